"""Does the 4D reward tell the world's clips from spoiled ones? Does a geometry backend rank as ground truth does?

python tools/measure_four_d.py [clips] [size] [frames] [backend]
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from torchvision.transforms.functional import gaussian_blur

from arvideo_rl.scoring.calibrate import moving_scenes
from arvideo_rl.world.geometry import geometry_of_scenes
from arvideo_rl.world.render import FIELD_OF_VIEW, render
from rewards.contract import Clips, Scores, score
from rewards.distortions import jitter, melt
from rewards.four_d.calibration import BY_HAND, calibrated
from rewards.four_d.reward import FourD
from rewards.geometry.backends import Classical, GroundTruth
from rewards.geometry.cameras import Geometry, diagonal

FPS = 8.0


def auroc(good: torch.Tensor, bad: torch.Tensor) -> float:
    """Share of pairs in which the good clip scores higher, ties half; what cannot be measured scores lowest."""
    good, bad = good.nan_to_num(nan=-1.0)[:, None], bad.nan_to_num(nan=-1.0)[None]
    return float(((good > bad).float() + 0.5 * (good == bad).float()).mean())


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Rank correlation; what cannot be measured ranks lowest."""
    ranks = [x.nan_to_num(nan=-1.0).argsort().argsort().float() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def noise(clip: torch.Tensor, seed: int, std: float) -> torch.Tensor:
    drawn = torch.randn(clip.shape, generator=torch.Generator().manual_seed(seed))
    return (clip + std * drawn).clamp(0, 1)


def spoiled(clip: torch.Tensor, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """One clip [F, 3, H, W] and what it is spoiled to; each with the frames of the clip that its frames show, since the
    true camera stands still in a frozen clip, too."""
    frames, _, size, _ = clip.shape
    draw = torch.Generator().manual_seed(seed)
    flicker = 1 + 0.15 * torch.randn(frames, 1, 1, 1, generator=draw).sign()
    order, half = torch.arange(frames), frames // 2
    picked = {
        "clean": order, "frozen": 0 * order, "half frozen": order.clamp_max(half),
        "shuffled": torch.randperm(frames, generator=draw), "each twice": order // 2, "reversed": order.flip(0),
    }  # fmt: skip
    changed = {
        "jittered": jitter(clip, seed, 0.01 * diagonal(size, size)), "melted": melt(clip, seed, size / 24),
        "melted a half": melt(clip, seed, size / 48), "melted a quarter": melt(clip, seed, size / 96),
        "noise .1": noise(clip, seed, 0.1), "noise .03": noise(clip, seed, 0.03),
        "texture-free": gaussian_blur(clip, size // 7 * 2 + 1, 0.05 * diagonal(size, size)),
        "darkened": 0.3 * clip, "flicker": (clip * flicker).clamp(0, 1),
    }  # fmt: skip
    return {k: (clip[at], at) for k, at in picked.items()} | {k: (v, order) for k, v in changed.items()}


def shown(known: list[Geometry], at: list[torch.Tensor]) -> list[Geometry]:
    """Geometry of clips that show the frames ``at``."""
    return [Geometry(g.depth[i], g.w2c[i], g.intrinsics, metric=True) for g, i in zip(known, at)]


def main() -> None:
    *numbers, backend = (*sys.argv[1:], *("16", "96", "16", "classical")[len(sys.argv) - 1 :])
    count, size, frames = (int(v) for v in numbers)
    torch.set_num_threads(1)
    base, scenes = moving_scenes(count, frames, seed=0), moving_scenes(count, frames, seed=1)
    sets = [spoiled(clip, i) for i, clip in enumerate(render(scenes, size))]
    names, known = list(sets[0]), geometry_of_scenes(scenes, size)
    got: dict[str, dict[str, Scores]] = {}
    print(f"{count} clips of the world in which something moves, {frames} frames of {size}x{size}, {FPS:g} a second")
    for label in ("ground truth", backend):

        def made(known, label=label, **args):
            told = GroundTruth(known) if label == "ground truth" else label
            return FourD(backend=Classical(FIELD_OF_VIEW) if label == "classical" else told, **args)

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "base.json"
            reward, clips = made(geometry_of_scenes(base, size)), Clips(render(base, size), fps=FPS)
            seen = [o for o in reward.observed(clips) if not isinstance(o, str)]
            found = calibrated(seen, reward.backend.name, reward.settings, [size], [reward.settings.step], {})
            found.write(path)
            print(f"{label}:", ", ".join(f"{k} {getattr(found, k):.4f}" for k in BY_HAND), flush=True)
            began, got[label] = time.perf_counter(), {}
            for n in names:
                reward = made(shown(known, [s[n][1] for s in sets]), calibration=str(path))
                got[label][n] = score(reward, Clips(torch.stack([s[n][0] for s in sets]), fps=FPS))
        rate = len(names) * count / (time.perf_counter() - began)
        for n in names:
            s = got[label][n]
            parts = {"value": s.value, **s.components, **{k: s.raw[k] for k in ("m", "recon_error", "unexplained")}}
            middle = " ".join(f"{k} {float(v.nanmedian()):.3f}" for k, v in parts.items())
            clean = got[label]["clean"]
            told = {p: auroc(clean.components[p], s.components[p]) for p in ("recon", "motion", "anchor")}
            below = float((s.value.nan_to_num(nan=-1.0) < clean.value).float().mean())
            line = ", ".join(f"{p} {v:.3f}" for p, v in {"value": auroc(clean.value, s.value), **told}.items())
            print(f"  {n:16} AUROC {line}; below its own clean clip {below:.2f}; NaN {int((~s.valid).sum())}; {middle}")
        print(f"  {rate:.2f} clips a second", flush=True)
    graded = [n for n in names if n not in ("frozen", "darkened", "flicker", "texture-free")]
    for what in ("value", "motion", "recon"):
        a, b = (torch.cat([got[x][n].value if what == "value" else got[x][n].components[what] for n in graded])
                for x in got)  # fmt: skip
        print(f"Spearman of {backend} with ground truth, {what}, {len(graded)} kinds of clips: {spearman(a, b):.3f}")


if __name__ == "__main__":
    main()
