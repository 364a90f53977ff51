"""What a reward receives and what it returns: ``Clips`` in, ``Scores`` out, both checked when they are made.

Shape letters: B clips, T pixel frames, H W pixels, K chunks. Higher is better. A failed measurement is NaN with a
reason, never a number: ``content:*`` when the clip itself cannot be measured, ``system:*`` when the measuring failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

NEEDS = {"fps": "fps", "prompts": "prompts", "actions": "actions", "cameras": "cameras",
         "groups": "group_ids", "chunks": "chunk_starts"}  # what a reward may need -> the field of Clips  # fmt: skip
GRANULARITIES = ("clip", "chunk", "group")
RANGE_SLACK = 1e-3  # resizing and float rounding overshoot [0, 1] by a little; a wrong range overshoots by a lot


@dataclass(frozen=True)
class Clips:
    """One batch of clips. A reward reads only the fields it declares in ``needs``. Raises ValueError when malformed."""

    frames: Tensor  # float32 [B, T, 3, H, W] in [0, 1], RGB
    fps: float | Tensor | None = None  # true playback rate, pixel frames a second, one for all or [B]; never guessed
    prompts: Sequence[str] | None = None  # B strings
    actions: Tensor | None = None  # int64 [B, T-1], or float32 [B, T-1, A] where an action is A numbers; action i
    # drives the change between pixel frames i and i + 1
    cameras: Any = None  # reserved for target cameras
    group_ids: Tensor | None = None  # int64 [B]; clips of one prompt share an id
    chunk_starts: tuple[int, ...] | None = None  # first pixel frame of each chunk, starting with 0

    def __post_init__(self) -> None:
        check_frames(self.frames)
        b, t = self.frames.shape[:2]
        if self.fps is not None:
            rates = torch.as_tensor(self.fps, dtype=torch.float64)
            if rates.shape not in ((), (b,)) or not bool((rates.isfinite() & (rates > 0)).all()):
                raise ValueError(f"fps is {self.fps}; pass one positive number, or a tensor of {b}, one for each clip")
        if self.prompts is not None and (isinstance(self.prompts, str) or len(self.prompts) != b):
            seen = "one string" if isinstance(self.prompts, str) else f"{len(self.prompts)} entries"
            raise ValueError(f"prompts is {seen}; pass a list of {b} strings, one for each clip")
        if self.actions is not None:
            _check_actions(self.actions, (b, t - 1))
        if self.group_ids is not None:
            _check_integers("group_ids", self.group_ids, (b,))
        starts = self.chunk_starts
        if starts is not None:
            rising = all(a < z for a, z in zip(starts, (*starts[1:], t), strict=False))
            if not starts or starts[0] != 0 or not rising:
                raise ValueError(f"chunk_starts is {tuple(starts)}; it must begin with 0 and rise, below {t} frames")

    def __len__(self) -> int:
        return self.frames.shape[0]


def check_frames(frames: Tensor) -> None:
    """Raise ValueError, naming what was seen, unless ``frames`` is finite float32 [B, T, 3, H, W] in [0, 1]."""
    if not isinstance(frames, Tensor):
        raise ValueError(f"frames is a {type(frames).__name__}; pass a float32 tensor [B, T, 3, H, W]")
    shape = tuple(frames.shape)
    if len(shape) != 5:
        hint = "add the batch axis with frames[None]" if len(shape) == 4 else "pass one batch of clips"
        raise ValueError(f"frames has shape {shape}, {len(shape)} axes; expected [B, T, 3, H, W]: {hint}")
    if shape[2] != 3:
        hint = ""
        if shape[1] == 3:
            hint = ": time and colour look swapped, use frames.transpose(1, 2)"
        elif shape[4] == 3:
            hint = ": colour looks last, use frames.permute(0, 1, 4, 2, 3)"
        raise ValueError(f"frames has shape {shape}; expected [B, T, 3, H, W]{hint}")
    if frames.numel() == 0:
        raise ValueError(f"frames has shape {shape}, which holds no pixel; pass at least one clip of one frame")
    if frames.dtype != torch.float32:
        fix = "frames.float() / 255" if frames.dtype == torch.uint8 else "frames.float()"
        raise ValueError(f"frames is {frames.dtype}; expected float32 in [0, 1], use {fix}")
    low, high = (float(v) for v in torch.aminmax(frames.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = [i for i, clip in enumerate(frames) if not bool(clip.isfinite().all())]
        raise ValueError(f"frames holds non-finite pixels in clip {bad[0]} ({len(bad)} of {shape[0]} clips)")
    if low < -RANGE_SLACK or high > 1 + RANGE_SLACK:
        fix = "frames.clamp(0, 1)"
        if low < -0.5 or high > 2:  # not an overshoot, another convention
            fix = "(frames + 1) / 2" if low < 0 else "frames / 255"
        raise ValueError(f"frames lies in [{low:.3g}, {high:.3g}]; expected [0, 1], use {fix}")


def _check_actions(actions: Tensor, shape: tuple[int, int]) -> None:
    if not isinstance(actions, Tensor) or actions.dtype != torch.float32:
        _check_integers("actions", actions, shape)
    elif actions.ndim != 3 or tuple(actions.shape[:2]) != shape:
        raise ValueError(f"actions has shape {tuple(actions.shape)}; expected int64 {shape}, or float32 "
                         f"({shape[0]}, {shape[1]}, A) where an action is A numbers")  # fmt: skip


def _check_integers(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or values.dtype != torch.int64:
        seen = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} is {seen}; pass an int64 tensor of shape {list(shape)}")
    if tuple(values.shape) != shape:
        hint = ""
        if name == "actions" and tuple(values.shape) == (shape[0], shape[1] + 1):
            hint = ": one per change between frames, so drop the first frame's with actions[:, 1:]"
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected {shape}{hint}")


@dataclass(frozen=True)
class Scores:
    """What a reward returns. ``value`` is NaN exactly where ``valid`` is false. Raises ValueError otherwise."""

    value: Tensor  # float32 [B], or [B, K] for a chunk reward; higher is better
    valid: Tensor = None  # type: ignore[assignment]  # bool, same shape; None = all valid
    reasons: Sequence[str | None] = None  # type: ignore[assignment]  # B; set exactly for clips with something invalid
    components: Mapping[str, Tensor] = field(default_factory=dict)  # named parts, [B] or the shape of value
    raw: Mapping[str, Any] = field(default_factory=dict)  # native units and native direction
    diagnostics: Mapping[str, Any] = field(default_factory=dict)  # counts, coverage, seconds

    def __post_init__(self) -> None:
        value = self.value
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.ndim not in (1, 2):
            seen = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"a score is {seen}; return a float32 tensor [B] or [B, K]")
        if self.valid is None:
            object.__setattr__(self, "valid", torch.ones_like(value, dtype=torch.bool))
        if self.valid.dtype != torch.bool or self.valid.shape != value.shape:
            seen = f"{self.valid.dtype} {tuple(self.valid.shape)}"
            raise ValueError(f"valid is {seen}; expected torch.bool {tuple(value.shape)}")
        if self.reasons is None:
            object.__setattr__(self, "reasons", [None] * len(value))
        if len(self.reasons) != len(value):
            raise ValueError(f"{len(self.reasons)} reasons for {len(value)} clips; give one, or None, for each clip")
        wild = (self.valid & ~value.isfinite()) | (~self.valid & ~value.isnan())
        if wild.any():
            at = tuple(int(i) for i in wild.nonzero()[0])
            flag = "valid" if self.valid[at] else "not valid"
            where = f"sample {at[0]}" + (f", chunk {at[1]}" if len(at) > 1 else "")
            raise ValueError(f"score of {where} is {float(value[at])} but {flag}; NaN and valid=False go together")
        whole = self.valid if value.ndim == 1 else self.valid.all(1)
        for i, (fine, reason) in enumerate(zip(whole.tolist(), self.reasons, strict=True)):
            if fine != (reason is None):
                raise ValueError(f"sample {i} is {'valid' if fine else 'not valid'} but its reason is {reason!r}")
            if reason is not None and not reason.startswith(("content:", "system:")):
                raise ValueError(f"reason {reason!r} of sample {i} must start with 'content:' or 'system:'")
        for name, part in self.components.items():
            if part.shape not in (value.shape, value.shape[:1]):
                raise ValueError(f"component {name!r} has shape {tuple(part.shape)}; expected {tuple(value.shape)}")

    def detach(self) -> Scores:
        """The same scores without any gradient."""
        components, raw, diagnostics = _detach(self.components), _detach(self.raw), _detach(self.diagnostics)
        return replace(self, value=self.value.detach(), components=components, raw=raw, diagnostics=diagnostics)


def _detach(items: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in items.items()}


class Reward(Protocol):
    """A callable on clips. ``hacked_by`` says in words what maximises it wrongly."""

    name: str
    needs: frozenset[str]  # keys of NEEDS
    granularity: str  # clip: [B]; chunk: [B, K]; group: [B], having seen all clips of a prompt
    value_range: tuple[float, float]
    licence: str
    hacked_by: str
    # It may have prepare(): load what is loaded late, so that what is missing is found before a run starts; what
    # describe.py shows of it (formula, cost, modules, files, page); claims, of what it notices (claims.py); and
    # differentiable = True: its value has a gradient in the frames (score_with_grad).

    def __call__(self, clips: Clips) -> Scores: ...


def check_needs(reward: Reward, clips: Clips) -> None:
    """Raise ValueError naming the field of ``clips`` that ``reward`` needs and does not find."""
    name, granularity = reward.name, reward.granularity
    if granularity not in GRANULARITIES:
        raise ValueError(f"reward {name!r} declares granularity {granularity!r}; choose {', '.join(GRANULARITIES)}")
    implied = {"chunk": {"chunks"}, "group": {"groups"}}.get(granularity, set())
    for need in sorted(set(reward.needs) | implied):
        if need not in NEEDS:
            raise ValueError(f"reward {name!r} declares the unknown need {need!r}; known: {', '.join(NEEDS)}")
        if getattr(clips, NEEDS[need]) is None:
            raise ValueError(f"reward {name!r} needs {need}, which the clips lack; pass Clips({NEEDS[need]}=...)")


def score(reward: Reward, clips: Clips) -> Scores:
    """Score ``clips``: needs are checked before any compute, nothing keeps a gradient, a wrong answer is an error."""
    check_needs(reward, clips)
    before = None if clips.frames.is_inference() else clips.frames._version
    with torch.no_grad():
        scores = reward(clips).detach()
    if before is not None and clips.frames._version != before:
        raise ValueError(f"reward {reward.name!r} changed the frames it was given; it must work on a copy")
    chunks = (len(clips.chunk_starts or ()),) if reward.granularity == "chunk" else ()
    shape = (len(clips), *chunks)
    if tuple(scores.value.shape) != shape:
        raise ValueError(f"reward {reward.name!r} returned shape {tuple(scores.value.shape)}; expected {shape}")
    return scores


def score_with_grad(reward: Reward, clips: Clips) -> Tensor:
    """The value, [B] or [B, K], with its gradient in ``clips.frames``; NaN where it could not be measured. For rewards
    that declare ``differentiable``; ValueError for others, and when the value has no gradient after all."""
    check_needs(reward, clips)
    if not getattr(reward, "differentiable", False):
        raise ValueError(f"reward {reward.name!r} does not declare differentiable = True, so it gives no gradient")
    with torch.enable_grad():
        value = reward(clips).value
    if clips.frames.requires_grad and not value.requires_grad:
        raise ValueError(f"reward {reward.name!r} declares itself differentiable, but its value has no gradient")
    return value
