"""Inverse-dynamics reward: a small network reads the action off each pair of frames, and is compared to the command.

RLIR (arXiv 2509.23958) scores accuracy; the log-likelihood and expected accuracy of the same network are denser.
Shape letters: B clips, T pixel frames, K chunks, N pairs, D features, A actions.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rewards.claims import Claims
from rewards.contract import Clips, Scores, check_needs

WEIGHTS = Path(__file__).parent / "weights"
SHIPPED = {"idm": WEIGHTS / "idm.safetensors", "idm_heldout": WEIGHTS / "idm_heldout.safetensors"}
TRAIN = "arvideo rewards train-idm"
FEATURES = 64  # D
FORMULAS = {  # p: probability that the network gives to the commanded action, from two frames
    "log_likelihood": "mean of max(log p, log floor)", "expected_accuracy": "mean of p",
    "accuracy": "share where p is the largest", "balanced_accuracy": "the same, rare actions weighing as much",
}  # fmt: skip
SCORES = tuple(FORMULAS)
BLOCK = {"cpu": 128}  # pairs at once; on a CPU small blocks stay in its cache and run three times faster
LARGE_BLOCK = 8192  # elsewhere: bounds memory


class InverseDynamicsNet(nn.Module):
    """Logits of A actions from two frames: strided convolutions on (a, b, b - a), then a small MLP."""

    def __init__(self, actions: int = 5, *, size: int = 32, width: int = 64, features: int = FEATURES):
        super().__init__()
        self.size = size
        self.convolutions = nn.Sequential(
            nn.Conv2d(9, width // 2, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
        )  # fmt: skip
        flat = width * (size // 8) ** 2
        self.mlp = nn.Sequential(nn.Linear(flat, 72), nn.SiLU(), nn.Linear(72, features), nn.SiLU())
        self.head = nn.Linear(features, actions)

    def features(self, first: Tensor, second: Tensor) -> Tensor:
        """Penultimate features [N, D] of the pairs ``first``, ``second`` [N, 3, size, size] in [0, 1]."""
        a, b = first - 0.5, second - 0.5
        return self.mlp(self.convolutions(torch.cat([a, b, 4 * (b - a)], 1)))  # differences are small: scale them up

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Logits [N, A] of the pairs ``first``, ``second`` [N, 3, size, size] in [0, 1]."""
        return self.head(self.features(first, second))


class InverseDynamics:
    """How well the frames obey the commanded actions; higher is better.

    ``weights``: ``idm``, ``idm_heldout`` (another seed and augmentation: measure with it, do not train on it), a path.
    ``score``: which of SCORES is the value; all of them are components.
    ``granularity``: ``clip`` gives [B]; ``chunk`` [B, K], a change into frame i belonging to the chunk of frame i.
    ``floor``: least probability that counts, so that one lost frame cannot outweigh a clip.
    Action 0 means "no command" and is not scored; where nothing is commanded the value is NaN, ``content:no_actions``.
    ``contract.score_with_grad`` gives the gradient in ``frames`` of the two scores that have one.
    """

    name = "inverse_dynamics"
    needs = frozenset({"actions"})
    licence = "the package's own (code and weights)"
    hacked_by = "frames that look like nothing but move as commanded; adversarial texture; always the majority action"
    claims = Claims(
        notices=("wrong_actions", "frozen", "half_frozen", "jittered", "shuffled", "reversed", "looped"),
        withstands=("darkened", "flickering", "grainy", "resized", "mirrored"),
        blind_to=("saturated", "blurred", "texture_free", "melted"),
    )
    cost = "about 0.02 s a clip of 18 frames at 32 x 32, on one CPU thread"
    files = {SHIPPED["idm"]: f"{TRAIN} out={SHIPPED['idm']}",
             SHIPPED["idm_heldout"]: f"{TRAIN} seed=1 augment=other out={SHIPPED['idm_heldout']}"}  # fmt: skip

    def __init__(self, weights: str | Path = "idm", score: str = "log_likelihood", granularity: str = "clip",
                 floor: float = 1e-4):  # fmt: skip
        if score not in SCORES:
            raise ValueError(f"inverse_dynamics: score {score!r} is unknown; choose from {', '.join(SCORES)}")
        if granularity not in ("clip", "chunk"):
            raise ValueError(f"inverse_dynamics: granularity {granularity!r} is unknown; choose clip or chunk")
        if not 0 < floor < 1:
            raise ValueError(f"inverse_dynamics: floor is {floor}; it is a probability strictly between 0 and 1")
        self.path = SHIPPED.get(str(weights), Path(weights))
        self.files = {self.path: self.files.get(self.path, f"{TRAIN} out={self.path}")}
        self.score, self.granularity, self.floor = score, granularity, float(floor)
        self.differentiable = score in ("log_likelihood", "expected_accuracy")
        self.formula = f"{FORMULAS[score]}, p of the commanded action, over the commanded changes between frames"
        self.value_range = (math.log(self.floor), 0.0) if score == "log_likelihood" else (0.0, 1.0)

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)
        assert clips.actions is not None
        actions = clips.actions.to(clips.frames.device)
        wrong = ((actions < 0) | (actions > len(self.labels))).nonzero()
        if len(wrong):
            b, i = wrong[0].tolist()
            raise ValueError(f"action {int(actions[b, i])} of clip {b} at change {i} is not in 0..{len(self.labels)}")
        logp = self.logits(clips.frames).log_softmax(-1)
        given = actions > 0
        target = (actions - 1).clamp_min(0)
        chosen = logp.gather(-1, target[..., None])[..., 0]
        hit = (logp.argmax(-1) == target).float()
        rarity = (1 / self.class_frequency.to(logp))[target]  # from the dataset: counts of one clip are too noisy
        pool = self._membership(clips) * given[:, None]  # [B, K or 1, T-1]

        def mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
            share = pool if weight is None else pool * weight[:, None]
            total = share.sum(-1)
            out = (share * values[:, None]).sum(-1) / total.where(total > 0, 1)  # 0 / 0 would also poison gradients
            out = out.masked_fill(total == 0, math.nan)
            return out if self.granularity == "chunk" else out[:, 0]

        components = {
            "log_likelihood": mean(chosen.clamp_min(math.log(self.floor))),
            "expected_accuracy": mean(chosen.exp()),
            "accuracy": mean(hit),
            "balanced_accuracy": mean(hit, rarity),
        }
        count = pool.sum(-1) if self.granularity == "chunk" else pool.sum(-1)[:, 0]
        valid = count > 0
        whole = valid if valid.ndim == 1 else valid.all(1)
        return Scores(
            value=components[self.score], valid=valid, components=components,
            reasons=[None if fine else "content:no_actions" for fine in whole.tolist()],
            raw={"predicted": logp.argmax(-1) + 1, "probability": chosen.exp().masked_fill(~given, math.nan)},
            diagnostics={"changes_scored": count},
        )  # fmt: skip

    def _membership(self, clips: Clips) -> Tensor:
        """Which changes count for which chunk, float [1, K, T-1]; one row of ones for the whole clip."""
        into = torch.arange(1, clips.frames.shape[1], device=clips.frames.device)
        if self.granularity == "clip":
            return torch.ones_like(into, dtype=torch.float32)[None, None]
        starts = torch.tensor(clips.chunk_starts, device=into.device)
        owner = torch.searchsorted(starts, into, right=True) - 1
        return (owner == torch.arange(len(starts), device=into.device)[:, None]).float()[None]

    def logits(self, frames: Tensor) -> Tensor:
        """Logits [B, T-1, A] over ``labels`` of ``frames`` [B, T, 3, H, W] in [0, 1]; differentiable."""
        return self._each_pair(self.net.to(frames.device), frames)

    def features(self, frames: Tensor) -> Tensor:
        """Penultimate features [B, T-1, D] of ``frames`` [B, T, 3, H, W] in [0, 1], for Frechet distances."""
        return self._each_pair(self.net.to(frames.device).features, frames)

    def _each_pair(self, function: Any, frames: Tensor) -> Tensor:
        frames = self._resize(frames)
        b, t = frames.shape[:2]
        first, second = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
        with torch.autocast(frames.device.type, enabled=False):  # half precision would break batch invariance
            size = BLOCK.get(frames.device.type, LARGE_BLOCK)
            blocks = [function(x, y) for x, y in zip(first.split(size), second.split(size), strict=True)]
        return torch.cat(blocks).unflatten(0, (b, t - 1)) if t > 1 else blocks[0].reshape(b, 0, blocks[0].shape[-1])

    def _resize(self, frames: Tensor) -> Tensor:
        h, w = frames.shape[-2:]
        size = self.net.size
        if h != w or h < size:
            raise ValueError(f"inverse_dynamics: frames are {h}x{w}; its weights want square ones of {size} or more")
        if h == size:
            return frames
        flat = nn.functional.interpolate(frames.flatten(0, 1), (size, size), mode="bilinear", antialias=True)
        return flat.unflatten(0, frames.shape[:2])

    @cached_property
    def _loaded(self) -> tuple[InverseDynamicsNet, dict[str, Tensor], dict[str, Any]]:
        return load(self.path)

    def prepare(self) -> None:
        """Read the weights now, so that damaged ones are found before anything else is computed."""
        self._loaded  # noqa: B018

    @property
    def net(self) -> InverseDynamicsNet:
        """The network, frozen; read from disk on first use."""
        return self._loaded[0]

    @property
    def report(self) -> dict[str, Any]:
        """What was measured on held-out clips after training: accuracy, balanced accuracy, confusion, baselines."""
        return self._loaded[2]

    @property
    def labels(self) -> list[str]:
        """Names of the A classes; class c is action c + 1."""
        return self.report["labels"]

    @property
    def class_frequency(self) -> Tensor:
        """Share of each class in the training data [A]."""
        return self._loaded[1]["class_frequency"]

    @property
    def frechet_reference(self) -> tuple[Tensor, Tensor]:
        """Mean [D] and covariance [D, D], float64, of ``features`` on real held-out clips."""
        return self._loaded[1]["frechet.mean"], self._loaded[1]["frechet.cov"]


def load(path: Path) -> tuple[InverseDynamicsNet, dict[str, Tensor], dict[str, Any]]:
    """Network, other tensors and report of ``path``; ValueError when it is missing or not exactly such a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            report = json.loads((file.metadata() or {}).get("report", "{}"))
        if not isinstance(report, dict):
            report = {}
    except (OSError, ValueError, SafetensorError) as error:
        known = ", ".join(SHIPPED)
        raise ValueError(f"inverse_dynamics: cannot read weights {path} ({error}); shipped: {known}") from None
    extra = {k: tensors.pop(k) for k in ("class_frequency", "frechet.mean", "frechet.cov") if k in tensors}
    if len(extra) < 3 or not {"labels", "size"} <= report.keys():
        raise ValueError(f"inverse_dynamics: {path} is not such a file; make one with 'arvideo rewards train-idm'")
    with torch.device("meta"):  # drawing initial weights would consume the global random state
        net = InverseDynamicsNet(len(report["labels"]), size=report["size"])
    try:
        net.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"inverse_dynamics: {path} does not fit the network: {' '.join(str(error).split())}") from None
    return net.eval().requires_grad_(False), extra, report
