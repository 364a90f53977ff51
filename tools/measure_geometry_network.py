"""Does the network backend rank clips as ground truth does? World clips of 32 x 32, clean and spoiled in grades.

python tools/measure_geometry_network.py [clips] [first seed of the held-out ones]
"""

import sys
from dataclasses import replace

import torch
from measure_geometry import auroc

from arvideo_rl.world.dataset import HELD_OUT
from arvideo_rl.world.geometry import geometry_of_scenes
from arvideo_rl.world.render import render, truth
from arvideo_rl.world.scene import sample_scenes
from rewards.contract import Clips, score
from rewards.distortions import freeze, jitter, melt
from rewards.geometry.backends import GroundTruth
from rewards.registry import build

SIZE, FRAMES = 32, 12
FINE = {"reach": 3, "patch": 2, "references": 6}
GRADES = ("clean", "melted .67", "melted 1.3", "melted 2.7", "melted 4", "shaken .5", "shaken 1", "shaken 2")


def main() -> None:
    count, first = (int(v) for v in (*sys.argv[1:], *("32", "0")[len(sys.argv) - 1 :]))
    torch.set_num_threads(1)
    scenes = sample_scenes(range(HELD_OUT + first, HELD_OUT + first + count), FRAMES, style="joystick")
    clean, seen = render(scenes, SIZE), truth(scenes, SIZE)
    sets = {"clean": clean}
    for name in GRADES[1:]:
        spoil, pixels = {"melted": melt, "shaken": jitter}[name.split()[0]], float(name.split()[1])
        sets[name] = torch.stack([spoil(f, i, pixels) for i, f in enumerate(clean)])
    dice = torch.Generator().manual_seed(0)
    sets["shuffled"] = torch.stack([f[torch.randperm(FRAMES, generator=dice)] for f in clean])
    half = FRAMES // 2
    sets["half frozen"] = clean[:, [min(i, half) for i in range(FRAMES)]]
    sets["frozen"] = torch.stack([freeze(f) for f in clean])
    whole = geometry_of_scenes(scenes, SIZE)
    still = (seen.valid & ~seen.masks.any(2)).float()
    backends = {
        "ground truth": GroundTruth([replace(g, confidence=s) for g, s in zip(whole, still)]),
        "network": "network",
    }
    cases = {"reprojection": FINE, "rerender": {}}
    for label, args in cases.items():
        ranks = {}
        for kind, backend in backends.items():
            reward = build(label, backend=backend, **args)
            got = {k: score(reward, Clips(v.contiguous())) for k, v in sets.items()}
            every = torch.cat([got[k].value for k in GRADES]).nan_to_num(nan=-1)
            ranks[kind] = every.argsort().argsort().float()
            lost = {k: auroc(got["clean"].value, v.value) for k, v in got.items() if k != "clean"}
            print(f"{label}, {kind}: AUROC", "; ".join(f"{k} {v:.3f}" for k, v in lost.items()))
            print("    medians", "; ".join(f"{k} {float(v.value.nanmedian()):.3f}" for k, v in got.items()))
            print("    NaN", [int((~v.valid).sum()) for v in got.values()], "frozen at most",
                  float(got["frozen"].value.max()), flush=True)  # fmt: skip
        agree = float(torch.corrcoef(torch.stack(list(ranks.values())))[0, 1])
        print(f"{label}: Spearman of network with ground truth {agree:.3f} on {GRADES}", flush=True)


if __name__ == "__main__":
    main()
