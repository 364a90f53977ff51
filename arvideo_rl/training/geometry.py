"""Train the depth-and-pose network on the embedded world, measure it on held-out clips, and write its weights.

What it is shown moves faster, slower and in more ways than the world's own clips, or it would learn the five commands
by heart and find them in pictures that do something else.
Shape letters: N windows, T frames, P pixels, S the network's size.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

from arvideo_rl.config import SEEDS, check_ranges
from arvideo_rl.outputs import check_file
from arvideo_rl.training.fit import fit, on_half, seeded, write
from arvideo_rl.world.dataset import HELD_OUT, SIZE, to_uint8
from arvideo_rl.world.render import FAR, FIELD_OF_VIEW, render, truth
from arvideo_rl.world.scene import HEIGHTS, STEP, TURN, Scenes, sample_actions, sample_scenes
from rewards import contract
from rewards.geometry.cameras import pinhole, pixel_centres, rays, rotation_angle
from rewards.geometry.network import DepthPoseNet, Network

FIRST = 300_000_000  # first seed of the scenes trained on
WINDOW = 8  # frames rendered of each
SPAN = 4  # frames over which motions are composed and compared
CLIP = 18  # frames from which a window is taken
MIRROR = torch.diag(torch.tensor([-1.0, 1.0, 1.0, 1.0]))
SKY = FAR / HEIGHTS[0]  # depth given to it where points are moved


@dataclass
class GeometryConfig:
    """Fields of ``arvideo rewards train-geometry``."""

    out: str = "geometry_world.safetensors"  # weights; the report is written beside them as .json
    seed: int = 0
    steps: int = 3500
    batch: int = 24  # windows a step
    lr: float = 2e-3  # highest learning rate (AdamW, cosine)
    scenes: int = 2048  # rendered for training
    held_out: int = 32  # clips to measure with

    def check(self) -> None:
        """Raise ValueError for a setting that cannot be."""
        check_file(Path(self.out), suffixes=(".safetensors",))
        counts = dict.fromkeys(("steps", "batch", "scenes", "held_out"), "[1, inf)")
        check_ranges(self, counts | {"seed": SEEDS, "lr": "(0, inf)"})


@dataclass(frozen=True)
class Windows:
    """Rendered windows with their truth; lengths are in heights of the camera over the ground."""

    pixels: np.ndarray  # [N, T, 3, S, S] uint8
    depth: Tensor  # float16 [N, T, S, S], NaN on the sky
    still: Tensor  # bool [N, T, S, S]: neither sky nor object
    w2c: Tensor  # [N, T, 4, 4]


def run(config: GeometryConfig) -> dict[str, Any]:
    """Train, evaluate, write ``config.out`` and its .json. Returns the report."""
    config.check()
    seen = Console(stderr=True).is_terminal
    start = time.process_time()
    windows = draw_windows(config.scenes, config.seed, progress=seen)
    net = train_geometry(windows, seed=config.seed, steps=config.steps, batch=config.batch, lr=config.lr, progress=seen)
    report: dict[str, Any] = {
        "size": net.size, "width": net.width, "field_of_view": FIELD_OF_VIEW, "config": asdict(config),
        "cpu_seconds": round(time.process_time() - start, 1),
        "command": "arvideo rewards train-geometry " + " ".join(f"{k}={v}" for k, v in asdict(config).items()),
    }  # fmt: skip
    tensors = {k: v.half() for k, v in net.state_dict().items()}
    write(Path(config.out), tensors, report)  # measured from the file, as a user will
    guess = windows.depth.float().log().nanmean((0, 1)).exp()
    report["held_out"] = {s: measure(Network(config.out), guess, config.held_out, s) for s in ("smooth", "joystick")}
    write(Path(config.out), tensors, report)
    return report


def draw_windows(count: int, seed: int, *, progress: bool = False) -> Windows:
    """Render ``count`` windows; blocks of eight scenes share the part of the clip that is shown."""
    draw, parts = np.random.default_rng(seed), []
    blocks = range(0, count, 8)
    for at in track(blocks, "rendering the world", console=Console(stderr=True), disable=not progress):
        scenes = sample_scenes(range(FIRST + at, FIRST + min(at + 8, count)), CLIP)
        scenes = cut(_driven(scenes, draw), int(draw.integers(CLIP - WINDOW + 1)))
        parts.append(_shown(scenes))
    return Windows(np.concatenate([p.pixels for p in parts]), *(
        torch.cat([getattr(p, name) for p in parts]) for name in ("depth", "still", "w2c")))  # fmt: skip


def _driven(scenes: Scenes, draw: np.random.Generator) -> Scenes:
    """``scenes`` seen by cameras that turn and go at 0 to 1.6 times the world's speeds, half of them both at once."""
    yaw, camera = scenes.yaw.clone(), scenes.camera.clone()
    for i in range(len(scenes)):
        commands = [sample_actions(draw, CLIP, "joystick") for _ in range(2)]
        turning, going = commands if draw.random() < 0.5 else (commands[0], commands[0])
        turned = np.cumsum((turning == 3) * 1.0 - (turning == 2)) * TURN * draw.uniform(0, 1.6)
        step = ((going == 4) * 1.0 - (going == 5)) * STEP * draw.uniform(0, 1.6)
        yaw[i] = torch.from_numpy(turned)
        camera[i, :, 0] = torch.from_numpy(np.cumsum(step * np.sin(turned)))
        camera[i, :, 2] = torch.from_numpy(np.cumsum(step * np.cos(turned)))
    return replace(scenes, yaw=yaw, camera=camera)


def cut(scenes: Scenes, at: int) -> Scenes:
    """WINDOW frames of ``scenes``, from frame ``at`` on."""
    timed = ("actions", "camera", "yaw", "centre", "spin")
    return replace(scenes, **{name: getattr(scenes, name)[:, at : at + WINDOW] for name in timed})


def _shown(scenes: Scenes) -> Windows:
    known, height = truth(scenes, SIZE), -scenes.camera[:, 0, 1]
    depth = (known.depth / height[:, None, None, None]).masked_fill(~known.valid, torch.nan)
    w2c = torch.cat([known.w2c, torch.tensor([0, 0, 0, 1.0]).expand(*known.w2c.shape[:2], 1, 4)], 2)
    w2c[:, :, :3, 3] /= height[:, None, None]
    return Windows(to_uint8(render(scenes, SIZE)), depth.half(), known.valid & ~known.masks.any(2), w2c)


def train_geometry(windows: Windows, *, seed: int, steps: int, batch: int = 32, lr: float = 2e-3,
                   progress: bool = False) -> DepthPoseNet:  # fmt: skip
    """Train on ``windows``. Returns the network, frozen; the global random state is untouched."""
    draw, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    net = seeded(seed, lambda: DepthPoseNet(windows.pixels.shape[-1]))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss_of(step: int) -> Tensor:
        frames, depth, still, w2c = sample_batch(windows, batch, draw)
        return torch.stack(losses(net, disturb(frames, noise), depth, still, w2c)).sum()

    return fit(net, loss_of, steps=steps, lr=lr, warm_up=0.05, about="depth and motion", progress=progress)


def sample_batch(windows: Windows, n: int, draw: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw frames [n, SPAN + 1, 3, S, S], depth and still [n, S, S] of the first of them, and w2c [n, SPAN + 1, 4, 4];
    half of them in a mirror, half played backwards."""
    count, length = windows.pixels.shape[:2]
    rows, at = draw.integers(count, size=n)[:, None], draw.integers(length - SPAN, size=n)[:, None]
    time = np.where(draw.random(n)[:, None] < 0.5, np.arange(SPAN + 1), np.arange(SPAN, -1, -1)) + at
    frames, w2c = torch.from_numpy(windows.pixels[rows, time]).float() / 255, windows.w2c[rows, time]
    maps = torch.stack([windows.depth[rows, time][:, 0].float(), windows.still[rows, time][:, 0]], 1)
    turned = torch.from_numpy(draw.random(n) < 0.5)
    frames = torch.where(turned[:, None, None, None, None], frames.flip(-1), frames)
    maps = torch.where(turned[:, None, None, None], maps.flip(-1), maps)
    w2c = torch.where(turned[:, None, None, None], MIRROR @ w2c @ MIRROR, w2c)
    return frames, maps[:, 0], maps[:, 1], w2c


def disturb(frames: Tensor, noise: torch.Generator) -> Tensor:
    """Disturb ``frames`` [N, T, 3, S, S] as generated video is; each effect on a random half of the windows."""
    n, t = frames.shape[:2]
    some = on_half(n, noise)
    soft = F.avg_pool2d(frames.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(frames)
    frames = frames.lerp(soft, some(1, 1, 1, 1, low=0) * (1 - 0.3 * some(t, 1, 1, 1, low=0)))
    gain = 0.25 * some(1, 1, 1, 1) + 0.08 * some(1, 3, 1, 1) + 0.08 * some(t, 1, 1, 1)
    grain = 0.04 * some(1, 1, 1, 1, low=0) * torch.randn(frames.shape, generator=noise)
    return (frames * gain.exp() + grain).clamp(0, 1)


def losses(net: DepthPoseNet, frames: Tensor, depth: Tensor, still: Tensor, w2c: Tensor) -> tuple[Tensor, ...]:
    """Error of log depth, cross-entropy of ``still``, and the pixels by which the motions found, over one step and over
    several, put what the first frame sees from where it goes. Arguments as of :func:`sample_batch`. Depth, which is
    soon learned, is asked of a third of the windows."""
    some = slice(None, None, 3)
    log_depth, logit = net.depth(frames[some, 0])
    known = ~depth[some].isnan()
    of_depth = (log_depth[known] - depth[some][known].log()).abs().mean()
    of_still = F.binary_cross_entropy_with_logits(logit, still[some])
    motions = net.motion(frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)).unflatten(0, (-1, SPAN))
    points, back = seen_points(depth), torch.linalg.inv(w2c[:, 0])
    path, of_motion = torch.eye(4), torch.zeros(())
    for i in range(SPAN):
        path = motions[:, i] @ path
        of_motion = of_motion + displaced(points, path, w2c[:, i + 1] @ back).mean() / SPAN
    return of_depth, 0.3 * of_still, of_motion


def seen_points(depth: Tensor) -> Tensor:
    """Points [N, P, 3], in the camera's axes, that every second row and column of ``depth`` [N, S, S] sees."""
    size = depth.shape[-1]
    view = rays(pixel_centres(size, size), pinhole(size, size, FIELD_OF_VIEW))
    return (view * depth.nan_to_num(nan=SKY)[..., None])[:, ::2, ::2].flatten(1, 2)


def displaced(points: Tensor, found: Tensor, true: Tensor, beta: float = 0.5, size: int = SIZE) -> Tensor:
    """Pixels [K] between where the motions ``found`` and ``true`` [N, 4, 4] take ``points`` [N, P, 3] of the first
    camera, for the K points that are then in view; quadratic below ``beta`` pixels."""
    k = pinhole(size, size, FIELD_OF_VIEW)
    at = [(points @ m[:, :3, :3].mT + m[:, None, :3, 3]) @ k.T for m in (found, true)]
    here, there = (p[..., :2] / p[..., 2:].clamp_min(0.3) for p in at)
    use = (at[1][..., 2] > 0.3) & (there >= 0).all(-1) & (there < size).all(-1)
    return F.smooth_l1_loss(here[use], there[use], reduction="none", beta=beta).sum(-1)


@torch.no_grad()
def measure(backend: Network, guess: Tensor, count: int, style: str) -> dict[str, float]:
    """Errors on ``count`` held-out clips of ``style``, each beside that of a trivial answer: the geometric mean
    ``guess`` [S, S] of all training depths, no motion, and the still world everywhere."""
    sums: dict[str, list[float]] = {}
    for at in range(0, count, 8):
        scenes = sample_scenes(range(HELD_OUT + at, HELD_OUT + min(at + 8, count)), CLIP, style=style)
        shown = _shown(scenes)
        clips = contract.Clips(torch.from_numpy(shown.pixels).float() / 255)
        for i, (depth, still, w2c) in enumerate(zip(shown.depth.float(), shown.still, shown.w2c)):
            found = backend.geometry(clips, i)
            assert found.depth is not None and found.confidence is not None
            known = ~depth.isnan()
            step = [p[1:] @ torch.linalg.inv(p[:-1]) for p in (found.w2c, w2c)]
            points, rest = seen_points(depth[:-1]), torch.eye(4).expand(len(w2c) - 1, 4, 4)
            row = {
                "depth_abs_rel": ((found.depth - depth).abs() / depth)[known].mean(),
                "depth_abs_rel_baseline": ((guess - depth).abs() / depth)[known].mean(),
                "rotation_degrees": rotation_angle(step[0][:, :3, :3].mT @ step[1][:, :3, :3]).rad2deg().mean(),
                "rotation_degrees_baseline": rotation_angle(step[1][:, :3, :3]).rad2deg().mean(),
                "translation": (step[0] - step[1])[:, :3, 3].norm(dim=-1).mean(),
                "translation_baseline": step[1][:, :3, 3].norm(dim=-1).mean(),
                "moved_pixels": displaced(points, step[0], step[1], beta=0.0).mean(),
                "moved_pixels_baseline": displaced(points, rest, step[1], beta=0.0).mean(),
                "last_rotation_degrees": rotation_angle(_from_first(found.w2c).mT @ _from_first(w2c)).rad2deg(),
                "still_accuracy": ((found.confidence > 0) == still).float().mean(),
                "still_accuracy_baseline": still.float().mean(),
            }  # fmt: skip
            for name, value in row.items():
                sums.setdefault(name, []).append(float(value))
    return {name: round(float(np.mean(values)), 4) for name, values in sums.items()}


def _from_first(w2c: Tensor) -> Tensor:
    return w2c[-1, :3, :3] @ w2c[0, :3, :3].mT
