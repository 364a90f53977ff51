"""Does scoring hold memory flat over many clips, and how much of decoding goes on while rewards compute?

    python tools/bench_score.py [--clips 1000] [--size 96] [--frames 16] [--rewards sharpness,flicker] [--workers 2]

Writes the clips (scenes of the embedded world, no two alike) to a temporary folder, scores them and prints the memory
of this process after every hundred, then the seconds. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import psutil
import torch

from arvideo_rl.media import write_video
from arvideo_rl.scoring import ScoreConfig
from arvideo_rl.scoring.run import run
from arvideo_rl.scoring.settings import prepare
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import sample_scenes

SCENES = 20  # rendered; clips are these in other light


def main() -> None:
    """Write, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=1000)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--rewards", default="sharpness,flicker")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    process, seen, done = psutil.Process(), [], [0]
    with tempfile.TemporaryDirectory() as top:
        pixels = torch.cat([render(sample_scenes([i], args.frames), args.size) for i in range(SCENES)])
        for i in range(args.clips):
            write_video(Path(top) / f"{i:05d}.mp4", pixels[i % SCENES] * (0.5 + 0.5 * i / args.clips), 8)
        del pixels
        job = prepare(ScoreConfig(reward=args.rewards, workers=args.workers, out=str(Path(top) / "s.csv")), [top])

        def tell(clips: int) -> None:
            done[0] += clips
            if clips and done[0] // 100 > (done[0] - clips) // 100:
                seen.append((done[0], process.memory_info().rss / 2**20))
                print(f"{seen[-1][0]:>6} clips {seen[-1][1]:8.1f} MiB", flush=True)

        result = run(job, tell)
    counts = {name: found["scored"] for name, found in result.summary.items()}
    print(", ".join(f"{k} {v:.1f} s" for k, v in result.seconds.items()), counts)
    print(json.dumps({"memory": seen, "seconds": result.seconds, "scored": counts}))


if __name__ == "__main__":
    main()
