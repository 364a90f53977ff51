"""What the rewards cost: seconds a clip and peak memory of each that runs here, and pairs of frames a second of DIS.

    python tools/bench_rewards.py [reward ...] [--shapes 33x64x64 81x240x416 81x480x832] [--threads 1] [--out FILE.md]

Shapes are frames x height x width. Every case runs in a process of its own, so that its peak is its own. The clip is
made up: textured bands at eight depths pass a camera that moves sideways, so that geometry has something to find. Both
wall and CPU time are taken; on a machine that does other work, trust the CPU time. Rewards whose weights are not here,
or that need a server, are left out and named. The last table is the DIS rewards at 17x256x448, where they aim at 20.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from rewards import registry
from rewards.contract import Clips, score
from rewards.describe import lacking, optional, required
from rewards.geometry.base import GeometricReward
from rewards.geometry.cameras import Cameras, diagonal

FPS, BANDS, TARGET = 16.0, 8, "17x256x448"
LEFT_OUT = ("naive_colour",)  # an example of what goes wrong


def scene(frames: int, height: int, width: int) -> torch.Tensor:
    """[1, T, 3, H, W] in [0, 1]: bands of noise at eight depths, of which the nearest moves 0.8 % of the diagonal a
    frame."""
    source = torch.Generator().manual_seed(0)
    step, rows = 0.008 * diagonal(height, width), torch.arange(height) * BANDS // height
    room = int(step * frames) + 4
    coarse = torch.rand(1, 3, max(2, height // 4), (width + room) // 4 + 2, generator=source)
    texture = torch.nn.functional.interpolate(coarse, (height, width + room), mode="bicubic").clamp(0, 1)[0]
    nearness = torch.linspace(0.3, 1, BANDS)[torch.randperm(BANDS, generator=source)][rows][:, None]
    out = torch.empty(1, frames, 3, height, width)
    for t in range(frames):
        at = torch.arange(width)[None] + step * t * nearness  # [H, W] columns of the texture
        low = at.floor().long()
        share, row = at - low, torch.arange(height)[:, None]
        out[0, t] = texture[:, row, low] * (1 - share) + texture[:, row, low + 1] * share
    return out


def clips_of(shape: str) -> Clips:
    """One clip with all that a reward may ask for: the camera path is the true one, up to its unit."""
    frames, height, width = map(int, shape.split("x"))
    c2w = torch.eye(4).repeat(1, frames, 1, 1)
    c2w[0, :, 0, 3] = torch.arange(frames) * 0.05
    actions = torch.ones(1, frames - 1, dtype=torch.int64)
    return Clips(scene(frames, height, width), FPS, ["a ball rolls left"], actions, Cameras(c2w))


def memory(what: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{what}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def measure(name: str, shape: str, threads: int) -> None:
    """Print one case as JSON. Weights are loaded, and a small clip scored, before the clock starts."""
    import cv2

    torch.set_num_threads(threads)
    cv2.setNumThreads(threads)
    reward, clips = registry.build(name), clips_of(shape)
    registry.prepare(reward)
    score(reward, clips_of("5x64x64"))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        found = score(reward, clips)
        value = found.reasons[0] or round(float(found.value.nanmean()), 3)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
        return
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": memory("VmHWM") - before, "value": value}))


def case(name: str, shape: str, threads: int) -> dict:
    """The case in a process of its own."""
    command = [sys.executable, __file__, "--case", name, shape, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    if done.returncode:
        raise SystemExit(f"{name} at {shape} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def hardware(threads: int) -> str:
    """One line: processor, threads, load."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*:\s*(.+)", info)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return f"{model[1] if model else 'unknown CPU'}, {threads} thread(s), load of the machine {load:.1f} a core"


def main() -> None:
    """Parse, run, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rewards", nargs="*", help="names; all that run here unless given")
    parser.add_argument("--shapes", nargs="+", default=["33x64x64", "81x240x416", "81x480x832"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        return measure(*args.case, args.threads)
    if unknown := set(args.rewards) - set(registry.available()):
        parser.error(f"no such reward: {', '.join(sorted(unknown))}; 'arvideo rewards list' shows them")
    wanted = args.rewards or [n for n in registry.available() if n not in LEFT_OUT]
    runs = [n for n in wanted if not required(n) and not lacking(n, read=not optional(n))]
    lines = [f"{hardware(args.threads)}. CPU seconds a clip (wall), memory beyond the clip.", ""]
    lines += ["| reward | " + " | ".join(args.shapes) + " |", "|---" * (len(args.shapes) + 1) + "|"]
    for name in runs:
        cells = []
        for shape in args.shapes:
            found = case(name, shape, args.threads)
            print(name, shape, found, file=sys.stderr, flush=True)
            cells.append(found.get("refused") and "refused" or
                         f"{found['cpu']:.2f} s ({found['wall']:.2f}), {found['peak'] / 2**20:.0f} MiB")  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if left := sorted(set(wanted) - set(runs)):
        lines += ["", f"Not measured (weights or a server are missing): {', '.join(left)}."]
    dis = [n for n in runs if isinstance(registry.build(n), GeometricReward)]
    if dis:
        lines += ["", f"| DIS reward at {TARGET} | pairs a CPU second |", "|---|---|"]
    for name in dis:
        found = case(name, TARGET, args.threads)
        lines.append(f"| {name} | {(int(TARGET.split('x')[0]) - 1) / found['cpu']:.1f} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
