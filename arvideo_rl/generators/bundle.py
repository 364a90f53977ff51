"""A generator as one thing: transformer, text encoder, codec, and the streaming settings it was made for.

On disk it is a folder: ``generator.json`` and ``transformer/`` in diffusers' format, with ``text_encoder/`` for a small
generator, or with the base model's parts named in the JSON for a Wan. A YAML file of the same keys does as well: the
presets in configs/generators/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from arvideo_rl.config import load, presets
from arvideo_rl.generators.codec import IdentityCodec, WanCodec
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.files import WAY_OUT, reading
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.generators.text import WordEncoder
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.umt5 import LENGTH, Umt5
from arvideo_rl.generators.wan import WanParts, load_parts, outline
from arvideo_rl.generators.weights import load_strictly, read_tensors
from samplers.guidance import Guidance
from samplers.kernels import Kernel
from samplers.rolling import rolling
from samplers.stream import CONSISTENCY, Chunk, Draw, Seen, given, stream

M = TypeVar("M", bound=torch.nn.Module)
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"  # diffusers' name
SHIPPED = Path(__file__).resolve().parents[1] / "weights"


@dataclass
class Described:
    """What generator.json or a preset says."""

    streaming: Streaming = field(default_factory=Streaming)
    codec: IdentityCodec = field(default_factory=IdentityCodec)
    wan: WanParts | None = None  # where a Wan's parts are; without it transformer/ and text_encoder/ lie beside


@dataclass
class Generator:
    """Everything needed to make video from prompts and actions."""

    transformer: CausalWan
    text_encoder: WordEncoder | Umt5
    codec: IdentityCodec | WanCodec = field(default_factory=IdentityCodec)
    streaming: Streaming = field(default_factory=Streaming)
    wan: WanParts | None = None  # where it was put together from
    said: str = ""  # what was loaded, in one line

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Shape [F, C, H, W] of one chunk."""
        s, stride = self.streaming, self.codec.stride
        return s.chunk, self.transformer.config.in_channels, s.size // stride, (s.width or s.size) // stride

    @property
    def text_tokens(self) -> int:
        """Tokens of a prompt, padding included."""
        text = self.text_encoder
        return text.config.length if isinstance(text, WordEncoder) else text.length

    @torch.no_grad()
    def script(self, prompts: list[str], actions: Tensor | None = None, switches: tuple = ()) -> Script:
        """Encode prompts (one per stream), actions [B, F] and prompt switches ((frame, prompts), ...)."""
        device = self.transformer.device
        texts = [(0, prompts), *switches]
        encoded = tuple((f, self.text_encoder.embed(list(p)).to(device)) for f, p in texts)
        return Script(encoded, None if actions is None else actions.to(device))

    def denoiser(
        self, model: Callable, script: Script, draw: Draw, fixed: bool = False, in_place: bool = False
    ) -> Denoiser:
        """What drives ``model`` as the settings say; ``draw`` is only asked for noise where refreshing needs some."""
        window, mix = self.streaming.attention_window(), self.streaming.mix(draw)
        return Denoiser(model, window, script, fixed, mix, in_place)

    def stream(
        self,
        model: Callable,
        script: Script,
        draw: Draw,
        frames: int,
        *,
        context: Any = None,
        start: int = 0,
        trim: bool = False,
        to_continue: bool = False,
        in_place: bool = False,
        kernel: Kernel | Sequence[Kernel] = CONSISTENCY,
        guidance: Guidance | None = None,
        seen: Seen | None = None,
    ) -> Iterator[Chunk]:
        """Stream ``frames`` frames in whole chunks (``trim`` cuts the last one) as the settings say. ``model`` is the
        transformer or a policy over it; ``start`` is where ``context``, the past that is continued, ends; ``in_place``
        keeps the past in a ring where it can be, and then the chunks' contexts are of no use to others; ``kernel`` and
        ``seen`` as in :func:`samplers.stream.stream`."""
        window = self.streaming.attention_window()
        chunks = [c for c in window.chunks(frames) if c[0] >= start]
        levels, in_place = self.streaming.levels, in_place and not self.streaming.joint
        denoiser = self.denoiser(model, script, draw, fixed=True, in_place=in_place)
        kept = frames if trim else None
        if self.streaming.joint:
            if seen is not None or guidance is not None or kernel != CONSISTENCY:
                raise ValueError("streaming.joint=true: joint denoising has no other kernel, guide or record")
            return rolling(denoiser, chunks, levels, draw, frames=kept, context=context)
        return stream(
            denoiser, chunks, levels, draw, frames=kept, context=context, to_continue=to_continue, kernel=kernel,
            guidance=guidance, seen=seen,
        )  # fmt: skip

    def given(self, model: Callable, script: Script, latents: Tensor, draw: Draw) -> Any:
        """The context after clean ``latents`` [B, F, C, h, w] (whole chunks) that were not generated."""
        denoiser = self.denoiser(model, script, draw)
        return given(denoiser, latents, denoiser.window.chunks(latents.shape[1]))

    def to(self, device: torch.device | str) -> Generator:
        """Move the networks; returns self."""
        for part in (self.transformer, self.text_encoder, self.codec):
            part.to(device)
        return self

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the folder. Weights are stored in ``dtype``, by default in their own (the networks in memory stay as
        they are). A Wan's text encoder and VAE are not copied: they are named, and found again when it is loaded.
        ValueError when an adapter is attached: the folder would hold neither the base nor the adapted weights."""
        if any("lora_" in k for k, _ in self.transformer.named_parameters()):
            raise ValueError(f"{folder} was not written: adapters are attached; merge them with fuse_lora and "
                             "unload_lora, or write their run with arvideo convert format=merged")  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("transformer",) if self.wan else ("transformer", "text_encoder"):
            module = getattr(self, name)
            module.save_config(folder / name)
            state = {k: v.detach().to("cpu", dtype or v.dtype).contiguous() for k, v in module.state_dict().items()}
            save_file(state, folder / name / WEIGHTS_NAME, {"format": "pt"})
        data = {"streaming": asdict(self.streaming)}
        if self.wan:
            data["wan"] = asdict(replace(self.wan, transformer="transformer", lora=None, container=None))
        if isinstance(self.codec, IdentityCodec):
            data["codec"] = asdict(self.codec)
        (folder / "generator.json").write_text(json.dumps(data, indent=2) + "\n")

    @classmethod
    def outline(cls, source: str | Path) -> Generator:
        """A Wan preset's generator without weights (wan.py), for what follows from sizes alone. It cannot run."""
        told = _described(find_generator(source))
        if told.wan is None:
            raise ValueError(f"{source} is no Wan; only of those the sizes are known without weights")
        transformer, codec = outline(told.wan)
        text: Any = SimpleNamespace(length=LENGTH)
        return cls(transformer, text, codec, told.streaming, told.wan)

    @classmethod
    def load(cls, source: str | Path) -> Generator:
        """Load a folder written by :meth:`save`, a YAML file of the same keys, or a shipped generator or preset by
        name (``tiny``, ``self_forcing``). Strict: missing, unexpected or wrongly shaped weights are a ValueError."""
        path = find_generator(source)
        told = _described(path)
        if told.wan:
            transformer, text, codec, said = load_parts(told.wan, path.parent)
            _check(transformer, told.streaming, path)
            beside = path.parent / told.wan.base  # saved elsewhere, it must still be found
            wan = replace(told.wan, base=str(beside.resolve())) if beside.exists() else told.wan
            return cls(transformer, text, codec, told.streaming, wan, said)
        transformer = _load_strict(CausalWan, path.parent / "transformer")
        _check(transformer, told.streaming, path)
        text = _load_strict(WordEncoder, path.parent / "text_encoder")
        size = sum(p.numel() for p in transformer.parameters())
        said = f"loaded {size / 1e6:.1f} M parameters from {path.parent}"
        return cls(transformer, text, told.codec, told.streaming, None, said)


def _check(transformer: CausalWan, streaming: Streaming, path: Path) -> None:
    if streaming.linear and not transformer.config.linear_state:
        raise ValueError(f"{path}: streaming.linear=true, but these weights have no linear_proj; set it to false")


def find_generator(source: str | Path) -> Path:
    """The generator.json or YAML file that ``source`` means; ValueError names what there is."""
    given = Path(source)
    for path in (SHIPPED / given / "generator.json", presets() / "generators" / f"{source}.yaml",
                 given / "generator.json", given):  # fmt: skip
        if path.is_file() and path.suffix in (".json", ".yaml", ".yml"):
            return path
    names = [p.parent.name for p in SHIPPED.glob("*/generator.json")]
    names += [p.stem for p in (presets() / "generators").glob("*.yaml")]
    raise ValueError(
        f"no generator at {str(source)!r} (seen from {Path.cwd()}): give a folder with generator.json, "
        f"a YAML file or one of: {', '.join(sorted(names))}"
    )


def _described(path: Path) -> Described:
    """The file's keys, checked. A folder's generator.json must say how it is streamed; nothing is assumed there."""
    if path.suffix != ".json":
        return load(Described, str(path), [])
    with reading(path):
        json.loads(path.read_text(encoding="utf-8"))["streaming"]
    try:
        return load(Described, str(path), [])
    except ValueError as error:
        raise ValueError(f"{error}; {WAY_OUT}") from None


def _load_strict(kind: type[M], folder: Path) -> M:
    """Build from config.json and load every tensor in float32; diffusers' own loader would fill gaps at random."""
    with reading(folder / "config.json"):
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        module = kind.from_config(told)  # type: ignore[attr-defined]
    with reading(folder / WEIGHTS_NAME):
        (folder / WEIGHTS_NAME).stat()
    try:
        state, _ = read_tensors(folder / WEIGHTS_NAME)
        load_strictly(module, {k: v.float() for k, v in state.items()}, folder / WEIGHTS_NAME)
    except ValueError as error:
        raise ValueError(f"{error}; {WAY_OUT}") from None
    return module.eval()
