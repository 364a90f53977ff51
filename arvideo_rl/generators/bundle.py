"""A generator as one thing: transformer, text encoder, codec, and the streaming settings it was made for.

On disk it is a folder: ``transformer/`` and ``text_encoder/`` in diffusers' format and ``generator.json``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from arvideo_rl.generators.codec import IdentityCodec
from arvideo_rl.generators.context import Window
from arvideo_rl.generators.denoiser import Script
from arvideo_rl.generators.files import reading
from arvideo_rl.generators.text import WordEncoder
from arvideo_rl.generators.transformer import CausalWan
from samplers.schedule import warped_levels

M = TypeVar("M", bound=torch.nn.Module)
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"  # diffusers' name
SHIPPED = Path(__file__).resolve().parents[1] / "weights"


@dataclass(frozen=True)
class Streaming:
    """How the generator is meant to be streamed; part of its weights' identity."""

    chunk: int = 3  # frames denoised together
    window: int | None = 12  # frames a chunk attends to, sinks and the chunk itself included
    sink: int = 3  # pinned oldest frames
    positions: str = "adjacent"  # where the sinks are read: adjacent or absolute
    steps: tuple[float, ...] = (1000.0, 750.0, 500.0, 250.0)  # nominal denoising steps of 1000
    shift: float = 2.0  # warps the steps into noise levels
    fps: float = 8.0  # pixel frames a second
    size: int = 32  # pixels, square
    trained_frames: int = 18  # longest clip seen in training

    @property
    def levels(self) -> tuple[float, ...]:
        """Warped noise levels the sampler visits."""
        return warped_levels(self.steps, self.shift)

    def attention_window(self) -> Window:
        """The cache policy."""
        return Window(self.chunk, self.window, self.sink, self.positions)


@dataclass
class Generator:
    """Everything needed to make video from prompts and actions."""

    transformer: CausalWan
    text_encoder: WordEncoder
    codec: IdentityCodec = field(default_factory=IdentityCodec)
    streaming: Streaming = field(default_factory=Streaming)

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Shape [F, C, H, W] of one chunk."""
        size = self.streaming.size
        return self.streaming.chunk, self.transformer.config.in_channels, size, size

    @torch.no_grad()
    def script(self, prompts: list[str], actions: Tensor | None = None, switches: tuple = ()) -> Script:
        """Encode prompts (one per stream), actions [B, F] and prompt switches ((frame, prompts), ...)."""
        device = self.transformer.device
        texts = [(0, prompts), *switches]
        encoded = tuple((f, self.text_encoder(self.text_encoder.tokens(list(p)).to(device))) for f, p in texts)
        return Script(encoded, None if actions is None else actions.to(device))

    def to(self, device: torch.device | str) -> Generator:
        """Move the networks; returns self."""
        self.transformer.to(device)
        self.text_encoder.to(device)
        return self

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the folder; weights are stored in ``dtype`` (the networks in memory stay as they are). ValueError when
        an adapter is attached: the folder would hold neither the base nor the adapted weights under their names."""
        if any("lora_" in k for k, _ in self.transformer.named_parameters()):
            raise ValueError(f"{folder} was not written: adapters are attached; merge them with fuse_lora and "
                             "unload_lora, or write their run with arvideo convert format=merged")  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("transformer", "text_encoder"):
            module = getattr(self, name)
            module.save_config(folder / name)
            state = {k: v.detach().to("cpu", dtype).contiguous() for k, v in module.state_dict().items()}
            save_file(state, folder / name / WEIGHTS_NAME, {"format": "pt"})
        data = {"codec": asdict(self.codec), "streaming": asdict(self.streaming)}
        (folder / "generator.json").write_text(json.dumps(data, indent=2) + "\n")

    @classmethod
    def load(cls, source: str | Path) -> Generator:
        """Load a folder written by :meth:`save`, or a shipped generator by name (``tiny``). Strict: missing,
        unexpected or wrongly shaped weights are a ValueError."""
        folder = SHIPPED / source if (SHIPPED / str(source) / "generator.json").exists() else Path(source)
        if not (folder / "generator.json").exists():
            known = ", ".join(sorted(p.parent.name for p in SHIPPED.glob("*/generator.json")))
            where = f"no generator at {str(source)!r} (seen from {Path.cwd()})"
            raise ValueError(f"{where}: give a folder with generator.json or one of: {known}")
        with reading(folder / "generator.json"):
            data = json.loads((folder / "generator.json").read_text(encoding="utf-8"))
            data["streaming"]["steps"] = tuple(data["streaming"]["steps"])
            codec, streaming = IdentityCodec(**data["codec"]), Streaming(**data["streaming"])
        return cls(
            _load_strict(CausalWan, folder / "transformer"), _load_strict(WordEncoder, folder / "text_encoder"),
            codec, streaming,
        )  # fmt: skip


def _load_strict(kind: type[M], folder: Path) -> M:
    """Build from config.json and load every tensor in float32; diffusers' own loader would fill gaps at random."""
    with reading(folder / "config.json"):
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        module = kind.from_config(told)  # type: ignore[attr-defined]
    path = folder / WEIGHTS_NAME
    with reading(path), safe_open(path, "pt") as file:
        state = {k: file.get_tensor(k).float() for k in file.keys()}  # noqa: SIM118
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit its config: {' '.join(str(error).split())}") from None
    return module.eval()
