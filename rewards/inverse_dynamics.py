"""Inverse-dynamics reward: a small network reads the action off each pair of frames, and is compared to the command.

RLIR (arXiv 2509.23958) scores accuracy; the log-likelihood and expected accuracy of the same network are denser.
Shape letters: M networks of an ensemble, B clips, T pixel frames, K chunks, A actions, or numbers of one.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips, Scores, check_needs
from rewards.idm_network import FEATURES as FEATURES
from rewards.idm_network import Idm, InverseDynamicsNet, load

WEIGHTS = Path(__file__).parent / "weights"
SHIPPED = {"idm": WEIGHTS / "idm.safetensors", "idm_heldout": WEIGHTS / "idm_heldout.safetensors"}
TRAIN = "arvideo rewards train-idm"
FORMULAS = {  # p: probability that the network gives to the commanded action, from two frames
    "log_likelihood": "mean of max(log p, log floor)", "expected_accuracy": "mean of p",
    "accuracy": "share where p is the largest", "balanced_accuracy": "the same, rare actions weighing as much",
}  # fmt: skip
SCORES = tuple(FORMULAS)
CLOSENESS = (
    "mean over the numbers of exp(-(a' - a)^2 / (2 (s / 2)^2)), a' read and a commanded, s its deviation in the data"
)
SHARP = 2.0  # 1 / (2 * .5^2): half a deviation of the data is one of the bell
DOUBT = ("log", "refuse")


class InverseDynamics:
    """How well the frames obey the commanded actions; higher is better.

    ``weights``: ``idm``, ``idm_heldout`` (another seed and augmentation: measure with it, do not train on it), a path.
    ``score``: which of SCORES is the value; all of them are components. Weights of continuous actions (float32
    [B, T-1, A]) have one, ``closeness``, which has to be named.
    ``granularity``: ``clip`` gives [B]; ``chunk`` [B, K], a change into frame i belonging to the chunk of frame i.
    ``floor``: least probability that counts, so that one lost frame cannot outweigh a clip.
    Weights may hold several networks: ``combine`` takes the ``mean`` of what they say or the ``min``. How far they
    disagree is the component ``disagreement`` (mean Jensen-Shannon divergence, nats; of numbers the mean deviation, in
    those of the data), and ``doubt`` is 1 above the largest of 95 % of the held-out clips; ``doubtful="refuse"`` makes
    such a clip NaN, ``content:doubtful``, so that a policy cannot gain by what the networks do not know.
    Action 0 means "no command", as does a NaN among the numbers of a change: it is not scored; where nothing is
    commanded the value is NaN, ``content:no_actions``.
    ``contract.score_with_grad`` gives the gradient in ``frames`` of the scores that have one.
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
                 floor: float = 1e-4, combine: str = "mean", doubtful: str = "log"):  # fmt: skip
        if score not in (*SCORES, "closeness"):
            raise ValueError(
                f"inverse_dynamics: score {score!r} is unknown; choose from {', '.join(SCORES)}, closeness"
            )
        for name, value, known in (
            ("granularity", granularity, ("clip", "chunk")),
            ("combine", combine, ("mean", "min")),
            ("doubtful", doubtful, DOUBT),
        ):
            if value not in known:
                raise ValueError(f"inverse_dynamics: {name} {value!r} is unknown; choose {' or '.join(known)}")
        if not 0 < floor < 1:
            raise ValueError(f"inverse_dynamics: floor is {floor}; it is a probability strictly between 0 and 1")
        self.path = SHIPPED.get(str(weights), Path(weights))
        self.files = {self.path: self.files.get(self.path, f"{TRAIN} out={self.path}")}
        self.score, self.granularity, self.floor, self.combine = score, granularity, float(floor), combine
        self.doubtful = doubtful
        self.differentiable = score in ("log_likelihood", "expected_accuracy", "closeness")
        of = f"{FORMULAS[score]}, p of the commanded action" if score in SCORES else CLOSENESS
        self.formula = f"{of}, over the commanded changes between frames"
        self.value_range = (math.log(self.floor), 0.0) if score == "log_likelihood" else (0.0, 1.0)

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)
        assert clips.actions is not None
        actions = clips.actions.to(clips.frames.device)
        self._check(actions)
        outputs = self._loaded.outputs(clips.frames)  # [M, B, T-1, A]
        read = self._numbers if self._loaded.kind == "continuous" else self._named
        parts, rarity, given, apart, raw = read(outputs, actions)
        pool = self._membership(clips) * given[:, None]  # [B, K or 1, T-1]

        def mean(values: Tensor, weight: Tensor | None = None) -> Tensor:
            share = pool if weight is None else pool * weight[:, None]
            total = share.sum(-1)
            out = (share * values[..., None, :]).sum(-1) / total.where(total > 0, 1)  # 0 / 0 would poison gradients
            out = out.masked_fill(total == 0, math.nan)
            return out if self.granularity == "chunk" else out[..., 0]

        said = {k: mean(v, rarity if k == "balanced_accuracy" else None) for k, v in parts.items()}
        components = {k: v.mean(0) if self.combine == "mean" else v.amin(0) for k, v in said.items()}
        count = pool.sum(-1) if self.granularity == "chunk" else pool.sum(-1)[:, 0]
        valid, value = count > 0, components[self.score]
        whole = valid if valid.ndim == 1 else valid.all(1)
        reasons = [None if fine else "content:no_actions" for fine in whole.tolist()]
        if len(outputs) > 1:
            apart = (apart * given).sum(1) / given.sum(1).clamp_min(1)
            doubt = apart > self.report["disagreement_95"]
            components |= {"disagreement": apart, "doubt": doubt.float()}
            if self.doubtful == "refuse":
                reasons = [r or ("content:doubtful" if d else None) for r, d in zip(reasons, doubt.tolist())]
                valid = valid & (~doubt if valid.ndim == 1 else ~doubt[:, None])
                value = value.masked_fill(~valid, math.nan)
        return Scores(value, valid, reasons, components, raw, diagnostics={"changes_scored": count})

    def _check(self, actions: Tensor) -> None:
        """ValueError for actions that are not those that the weights read, or a score that they do not have."""
        continuous, count = self._loaded.kind == "continuous", len(self.labels)
        if continuous != (self.score == "closeness"):
            known = "closeness" if continuous else ", ".join(SCORES)
            raise ValueError(f"inverse_dynamics: {self.path} reads {self._loaded.kind} actions; set score to {known}")
        if continuous:
            if not (self._loaded.beside["action_std"] > 0).any():
                raise ValueError(f"inverse_dynamics: no number changed in the videos that {self.path} was trained on; "
                                 "train it on others")  # fmt: skip
            if not actions.is_floating_point() or actions.shape[-1] != count:
                seen = f"{actions.dtype} {tuple(actions.shape)}"
                raise ValueError(f"inverse_dynamics: actions are {seen}; {self.path} reads {count} numbers a change: "
                                 f"{', '.join(self.labels)}")  # fmt: skip
            return
        if actions.is_floating_point():
            raise ValueError(f"inverse_dynamics: actions are numbers; {self.path} reads {', '.join(self.labels)}")
        wrong = ((actions < 0) | (actions > count)).nonzero()
        if len(wrong):
            b, i = wrong[0].tolist()
            raise ValueError(f"action {int(actions[b, i])} of clip {b} at change {i} is not in 0..{count}")

    def _named(self, outputs: Tensor, actions: Tensor) -> tuple:
        """Of actions that are one of several: parts [M, B, T-1] by name, how rare each action is, which changes count
        [B, T-1], disagreement [B, T-1], raw."""
        logp, given, target = outputs.log_softmax(-1), actions > 0, (actions - 1).clamp_min(0)
        chosen = logp.gather(-1, target[None, ..., None].expand(*logp.shape[:-1], 1))[..., 0]
        hit = (logp.argmax(-1) == target).float()
        rarity = (1 / self.class_frequency.to(logp))[target]  # from the dataset: counts of one clip are too noisy
        parts = {"log_likelihood": chosen.clamp_min(math.log(self.floor)), "expected_accuracy": chosen.exp(),
                 "accuracy": hit, "balanced_accuracy": hit}  # fmt: skip
        joint = logp.exp().mean(0)
        apart = torch.special.entr(joint).sum(-1) - torch.special.entr(logp.exp()).sum(-1).mean(0)
        raw = {"predicted": joint.argmax(-1) + 1, "probability": chosen.exp().mean(0).masked_fill(~given, math.nan)}
        return parts, rarity, given, apart.detach().clamp_min(0), raw

    def _numbers(self, outputs: Tensor, actions: Tensor) -> tuple:
        """The same of actions that are numbers. ``outputs`` are in deviations of the data from its mean; numbers that
        never changed there say nothing and are left out."""
        centre, spread = (self._loaded.beside[k].to(outputs) for k in ("action_mean", "action_std"))
        told, given = spread > 0, ~actions.isnan().any(-1)
        wanted = ((actions - centre) / spread.where(told, 1)).nan_to_num(0.0)
        close = (-SHARP * (outputs - wanted).square()).exp()[..., told].mean(-1)
        apart = outputs.detach().std(0, correction=0)[..., told].mean(-1)
        raw = {"predicted": outputs.detach().mean(0) * spread + centre}
        return {"closeness": close}, None, given, apart, raw

    def _membership(self, clips: Clips) -> Tensor:
        """Which changes count for which chunk, float [1, K, T-1]; one row of ones for the whole clip."""
        into = torch.arange(1, clips.frames.shape[1], device=clips.frames.device)
        if self.granularity == "clip":
            return torch.ones_like(into, dtype=torch.float32)[None, None]
        starts = torch.tensor(clips.chunk_starts, device=into.device)
        owner = torch.searchsorted(starts, into, right=True) - 1
        return (owner == torch.arange(len(starts), device=into.device)[:, None]).float()[None]

    def logits(self, frames: Tensor) -> Tensor:
        """Logits [B, T-1, A] over ``labels`` of the first network, of ``frames`` [B, T, 3, H, W] in [0, 1];
        differentiable."""
        return self._loaded.outputs(frames)[0]

    def features(self, frames: Tensor) -> Tensor:
        """Penultimate features [B, T-1, D] of ``frames`` [B, T, 3, H, W] in [0, 1], for Frechet distances."""
        return self._loaded.features(frames)

    @cached_property
    def _loaded(self) -> Idm:
        return load(self.path, ", ".join(SHIPPED))

    def prepare(self) -> None:
        """Read the weights now, so that damaged ones are found before anything else is computed."""
        self._loaded  # noqa: B018

    @property
    def net(self) -> InverseDynamicsNet:
        """The first network, frozen; read from disk on first use."""
        return self._loaded.nets[0]

    @property
    def report(self) -> dict[str, Any]:
        """What was measured on held-out clips after training: accuracy, balanced accuracy, confusion, baselines."""
        return self._loaded.report

    @property
    def labels(self) -> list[str]:
        """Names of the A classes; class c is action c + 1. Of continuous actions, names of the numbers."""
        return self.report["labels"]

    @property
    def kind(self) -> str:
        """``discrete`` or ``continuous``."""
        return self._loaded.kind

    @property
    def class_frequency(self) -> Tensor:
        """Share of each class in the training data [A]."""
        return self._loaded.beside["class_frequency"]

    @property
    def frechet_reference(self) -> tuple[Tensor, Tensor]:
        """Mean [D] and covariance [D, D], float64, of ``features`` on real held-out clips."""
        return self._loaded.beside["frechet.mean"], self._loaded.beside["frechet.cov"]
