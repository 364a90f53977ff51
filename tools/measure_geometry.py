"""Do the geometric rewards tell clean rooms from spoiled ones? Prints AUROC for each reward, backend and fault.

python tools/measure_geometry.py [clips] [size] [frames]
"""

import sys
import time

import torch

from arvideo_rl.world.geometry import geometry_of_room
from arvideo_rl.world.rooms import FIELD_OF_VIEW, room
from rewards.contract import Clips, score
from rewards.distortions import freeze, jitter, melt
from rewards.geometry.backends import Answer, Classical, GroundTruth
from rewards.geometry.cameras import Cameras
from rewards.geometry.flow import Flow
from rewards.registry import build


class Remembered(Classical):
    """The classical backend, asked once for each clip: four rewards share its answers here."""

    def __init__(self) -> None:
        super().__init__(FIELD_OF_VIEW)
        self.answers: dict[tuple[int, int], Answer] = {}

    def geometry(self, clips: Clips, index: int, flow: Flow) -> Answer:
        key = (clips.frames.data_ptr(), index)
        if key not in self.answers:
            self.answers[key] = super().geometry(clips, index, flow)
        return self.answers[key]


def auroc(good: torch.Tensor, bad: torch.Tensor) -> float:
    """Share of pairs in which the good clip scores higher, ties half; what cannot be measured scores lowest."""
    good, bad = good.nan_to_num(nan=-1.0)[:, None], bad.nan_to_num(nan=-1.0)[None]
    return float(((good > bad).float() + 0.5 * (good == bad).float()).mean())


def main() -> None:
    count, size, frames = (int(v) for v in (*sys.argv[1:], *("30", "96", "12")[len(sys.argv) - 1 :]))
    torch.set_num_threads(1)
    rooms = [room(seed, frames, size) for seed in range(count)]
    cameras = Cameras(torch.stack([torch.linalg.inv(r.w2c) for r in rooms]))
    sets = {
        "clean": torch.stack([r.frames for r in rooms]),
        "melted": torch.stack([melt(r.frames, i, size / 24) for i, r in enumerate(rooms)]),
        "jittered": torch.stack([jitter(r.frames, i, size / 32) for i, r in enumerate(rooms)]),
        "frozen": torch.stack([freeze(r.frames) for r in rooms]),
    }
    truth = GroundTruth([geometry_of_room(r) for r in rooms])
    rewards = {"epipolar": build("epipolar")}
    for name in ("reprojection", "rerender"):
        rewards[f"{name}, ground truth"] = build(name, backend=truth)
    classical = Remembered()
    for name in ("reprojection", "rerender", "camera_smoothness", "camera_following"):
        rewards[f"{name}, classical"] = build(name, backend=classical)
    for strength in (0.25, 0.5):  # only for the ranks below: grades of the same fault
        sets[f"melted {strength}"] = torch.stack([melt(r.frames, i, strength * size / 24) for i, r in enumerate(rooms)])
    graded = ("clean", "melted 0.25", "melted 0.5", "melted")
    ranks = {}
    print(f"{count} rooms, {frames} frames of {size}x{size}; AUROC against clean, NaN counted as the lowest")
    for label, reward in rewards.items():
        began = time.perf_counter()
        got = {k: score(reward, Clips(v, cameras=cameras)) for k, v in sets.items()}
        rate = len(sets) * count / (time.perf_counter() - began)
        ranks[label] = torch.cat([got[k].value for k in graded]).nan_to_num(nan=-1).argsort().argsort().float()
        median = " ".join(f"{k} {float(v.value.nanmedian()):.3f}" for k, v in got.items())
        print(f"{label:30}", *(f"{k} {auroc(got['clean'].value, v.value):.3f} " for k, v in list(got.items())[1:]))
        print(" " * 30, f"medians {median}; NaN {[int((~v.valid).sum()) for v in got.values()]}; {rate:.1f} clips/s",
              flush=True)  # fmt: skip
    for name in ("reprojection", "rerender"):
        pair = torch.stack([ranks[f"{name}, ground truth"], ranks[f"{name}, classical"]])
        print(f"{name}: Spearman of classical with ground truth {float(torch.corrcoef(pair)[0, 1]):.3f} on {graded}")


if __name__ == "__main__":
    main()
