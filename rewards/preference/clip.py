"""Scores of single frames by CLIP-like networks: CLIP score, LAION's aesthetic heads, PickScore, HPSv2.

Each takes ``frames`` frames spread over the clip and pools their scores. Clips are scored one at a time, so a score
does not depend on its company. Weights are read on first use, or by ``prepare``.
"""

from __future__ import annotations

import math
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from rewards.claims import Claims
from rewards.contract import Clips, Scores, check_needs
from rewards.preference import weights as of
from rewards.preference.pictures import BETWEEN, POOLS, cropped, letterboxed, pool, spread

OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
OPENAI_L14 = "timm/vit_large_patch14_clip_224.openai"
TRANSFORMERS = ("config.json", "model.safetensors")
PICKSCORE_SCALE = 26.0  # about its highest logit; flow_grpo divides by it
AESTHETIC_SCALE = 10.0  # its heads are trained on ratings from 1 to 10
HEAD = Path("~/.cache/arvideo-rl/sa_0_4_vit_l_14_linear.pth").expanduser()
HEAD_URL = "https://github.com/LAION-AI/aesthetic-predictor/raw/main/sa_0_4_vit_l_14_linear.pth"


class FrameScore:
    """What they share. ``weights``: a file, a folder or a name on the hub. ``pool``: mean of all frames, or of their
    lowest (``low``) or highest (``top``) 30 %."""

    name = "frame_score"
    needs = frozenset({"prompts"})
    granularity = "clip"
    value_range = (-1.0, 1.0)
    cost = "seconds a clip on one CPU thread; memory: the weights, in float32"
    optional = True  # what it needs is fetched by those who want it
    differentiable = True
    claims = Claims(notices=("wrong_prompt",), blind_to=(*BETWEEN, "saturated"))  # a cosine with the prompt, of frames
    hub: dict[str, tuple[str, ...]] = {}  # repository -> the files that are read
    download = 0  # bytes of what hub and files name

    def __init__(self, weights: str | Path, frames: int, pool: str):
        if int(frames) < 1:
            raise ValueError(f"{self.name}: frames is {frames}; it is 1 or more")
        if pool not in POOLS:
            raise ValueError(f"{self.name}: pool {pool!r} is unknown; choose {', '.join(POOLS)}")
        self.weights, self.frames, self.pool = weights, int(frames), pool
        self.hub = {k: v for k, v in self.hub.items() if k == str(weights)}

    def prepare(self) -> None:
        """Read the weights now."""
        self.network  # noqa: B018

    @cached_property
    def network(self) -> Any:
        """What scores, frozen."""
        raise NotImplementedError

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)  # type: ignore[arg-type]
        device = clips.frames.device
        self.prepare()
        rows = []
        for i, frames in enumerate(clips.frames):
            prompt = "" if clips.prompts is None else clips.prompts[i]
            with torch.autocast(device.type, enabled=False):
                rows.append(self.measure(spread(frames, self.frames), prompt).float())
        raw = torch.stack([pool(row, self.pool) for row in rows])
        value = (raw / self.scale).masked_fill(~raw.isfinite(), math.nan)
        reasons = [None if fine else "system:not_finite" for fine in value.isfinite().tolist()]
        return Scores(value, value.isfinite(), reasons, raw={self.unit: raw, "frames": torch.stack(rows)})

    scale, unit = 1.0, "cosine"

    def measure(self, frames: Tensor, prompt: str) -> Tensor:
        """Raw scores [F] of ``frames`` [F, 3, H, W] in [0, 1]."""
        raise NotImplementedError


class OpenClipScore(FrameScore):
    """One with a network of open_clip, whose architecture ``model`` names."""

    def __init__(self, weights: str | Path, model: str, frames: int, pool: str):
        super().__init__(weights, frames, pool)
        self.model = model
        self.architecture()

    def architecture(self) -> dict[str, Any]:
        """The configuration of ``model``; ValueError for one that open_clip does not know."""
        import open_clip

        found = open_clip.get_model_config(self.model)
        if found is None or "hf_model_name" in found["text_cfg"] or "timm_model_name" in found["vision_cfg"]:
            raise ValueError(f"{self.name}: model {self.model!r} is no CLIP of open_clip; e.g. ViT-L-14-quickgelu")
        return {k: v for k, v in found.items() if k != "custom_text"}

    @cached_property
    def network(self) -> Any:
        import open_clip

        files: tuple[str, ...] = self.hub.get(str(self.weights), OPEN_CLIP)
        path = of.one_of(self.name, of.located(self.name, self.weights, files), files)
        tensors = of.read(self.name, path)
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and thrown away
            return of.fit(self.name, open_clip.CLIP(**self.architecture()), tensors, path)

    def pictures(self, frames: Tensor) -> Tensor:
        """Unit features [F, D] of ``frames`` [F, 3, H, W]."""
        self.network.to(frames.device)
        return normalize(self.network.encode_image(cropped(frames, self.network.visual.image_size[0])), dim=-1)

    def measure(self, frames: Tensor, prompt: str) -> Tensor:
        words = tokens(prompt, self.network.context_length).to(frames.device)
        return cosine_similarity(self.pictures(frames), self.network.encode_text(words))


@cache
def _tokenizer() -> Any:
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()


def tokens(prompt: str, length: int) -> Tensor:
    """CLIP's tokens [1, length] of a prompt, cut where it is too long; the vocabulary comes with open_clip."""
    return _tokenizer()([prompt], context_length=length)


class ClipScore(OpenClipScore):
    """Cosine of prompt and frame in CLIP's space (arXiv 2104.08718)."""

    name = "clip_score"
    formula = "cosine of the CLIP features of prompt and frame, mean over frames"
    licence = "MIT (OpenAI ViT-L/14 and open_clip)"
    hacked_by = "the prompt's things as still, gaudy pictures; written words; it sees no motion and no order of frames"
    hub = {OPENAI_L14: OPEN_CLIP[:1]}
    download = 1_710_500_000  # 427.6 million float32

    def __init__(self, weights: str | Path = OPENAI_L14, model: str = "ViT-L-14-quickgelu", frames: int = 8,
                 pool: str = "mean"):  # fmt: skip
        super().__init__(weights, model, frames, pool)


class Aesthetic(OpenClipScore):
    """LAION's head on CLIP's unit picture features, over 10. ``head``: a file, linear (v1) or a stack of linear layers
    (v2, sac+logos+ava1), for the features of ``model``."""

    name = "aesthetic"
    formula = "head of the frame's CLIP features / 10, mean over frames"
    needs = frozenset()
    claims = Claims(blind_to=(*BETWEEN, "saturated"))
    value_range = (-math.inf, math.inf)
    licence = "MIT (head and OpenAI ViT-L/14)"
    hacked_by = "glossy, saturated, shallow-focus stills of anything; it reads no prompt and sees no motion"
    hub = {OPENAI_L14: OPEN_CLIP[:1]}
    download = 1_710_500_000  # 427.6 million float32, and a head of 768
    files = {HEAD: f"curl -L --create-dirs -o {HEAD} {HEAD_URL}"}
    scale, unit = AESTHETIC_SCALE, "rating"

    def __init__(self, weights: str | Path = OPENAI_L14, head: str | Path = HEAD, model: str = "ViT-L-14-quickgelu",
                 frames: int = 8, pool: str = "mean"):  # fmt: skip
        super().__init__(weights, model, frames, pool)
        self.head_path = Path(head).expanduser()
        self.files = {p: how for p, how in self.files.items() if p == self.head_path}

    def prepare(self) -> None:
        """Read the weights of head and network now."""
        self.head, self.network  # noqa: B018

    @cached_property
    def head(self) -> nn.Module:
        """The head, frozen."""
        if not self.head_path.is_file():
            raise ValueError(f"aesthetic: there is no head at {self.head_path}; "
                             + self.files.get(self.head_path, "give head=FILE"))  # fmt: skip
        return read_head(self.name, self.head_path, self.architecture()["embed_dim"])

    def measure(self, frames: Tensor, prompt: str) -> Tensor:
        return self.head.to(frames.device)(self.pictures(frames))[:, 0]


def read_head(reward: str, path: Path, width: int) -> nn.Module:
    """The linear layers of a file, in order, from ``width`` features to one number; ValueError when they are not."""
    tensors = of.read(reward, path)
    names = sorted({k.rpartition(".")[0] for k in tensors}, key=_place)
    refused = [k for k in tensors if k.rpartition(".")[2] not in ("weight", "bias")]
    missing = [f"{n}.{p}" for n in names for p in ("weight", "bias") if f"{n}.{p}".lstrip(".") not in tensors]
    of.refuse(reward, path, missing, refused)
    layers = [(tensors[f"{n}.weight".lstrip(".")], tensors[f"{n}.bias".lstrip(".")]) for n in names]
    sizes = [width, *(len(b) for _, b in layers)]
    odd = [
        f"layer {i} is {list(w.shape)}" for i, (w, _) in enumerate(layers) if list(w.shape) != sizes[i : i + 2][::-1]
    ]
    if sizes[-1] != 1:
        odd.append(f"it ends in {sizes[-1]} numbers")
    of.refuse(reward, path, (), (), odd)
    head = nn.Sequential(*(nn.utils.skip_init(nn.Linear, a, b) for a, b in pairwise(sizes)))
    renamed = {f"{i}.{p}": t for i, layer in enumerate(layers) for p, t in zip(("weight", "bias"), layer)}
    return of.fit(reward, head, {k: v.float() for k, v in renamed.items()}, path)


def _place(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else 0


class HPSv2(OpenClipScore):
    """Human Preference Score v2.1 (arXiv 2306.09341): a CLIP ViT-H/14 tuned on people's choices."""

    name = "hpsv2"
    formula = "cosine of the tuned CLIP features of prompt and letterboxed frame, mean over frames"
    licence = "Apache-2.0 (code and weights)"
    hacked_by = "glossy stills, over-saturation, grids; it sees no motion; its range, .2 to .3, drowns in raw sums"
    hub = {"xswu/HPSv2": ("HPS_v2.1_compressed.pt",)}
    download = 1_972_200_000  # 986.1 million float16

    def __init__(
        self, weights: str | Path = "xswu/HPSv2", model: str = "ViT-H-14", frames: int = 8, pool: str = "mean"
    ):
        super().__init__(weights, model, frames, pool)

    def pictures(self, frames: Tensor) -> Tensor:
        self.network.to(frames.device)
        return normalize(self.network.encode_image(letterboxed(frames, self.network.visual.image_size[0])), dim=-1)


class PickScore(FrameScore):
    """PickScore v1 (arXiv 2305.01569): exp(logit scale) x cosine, over 26."""

    name = "pickscore"
    formula = "exp(scale) * cosine of the tuned CLIP features of prompt and frame / 26, mean over frames"
    value_range = (-math.inf, math.inf)
    licence = "MIT (card of the weights)"
    hacked_by = "glossy stills, over-saturation, cartoon looks; it sees no motion"
    hub = {"yuvalkirstain/PickScore_v1": TRANSFORMERS}
    download = 3_944_400_000  # 986.1 million float32
    scale, unit = PICKSCORE_SCALE, "logit"

    def __init__(self, weights: str | Path = "yuvalkirstain/PickScore_v1", frames: int = 8, pool: str = "mean"):
        super().__init__(weights, frames, pool)

    @cached_property
    def network(self) -> Any:
        from transformers import CLIPModel

        path = of.located(self.name, self.weights, TRANSFORMERS)
        for file in TRANSFORMERS:
            of.one_of(self.name, path, [file])
        with torch.random.fork_rng(devices=[]):
            model, told = CLIPModel.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
        of.refuse(self.name, path, told["missing_keys"], told["unexpected_keys"], told["mismatched_keys"])
        return model.eval().requires_grad_(False)

    def measure(self, frames: Tensor, prompt: str) -> Tensor:
        net = self.network.to(frames.device)
        words = tokens(prompt, net.config.text_config.max_position_embeddings).to(frames.device)
        seen = net.vision_model(pixel_values=cropped(frames, net.config.vision_config.image_size)).pooler_output
        read = net.text_model(input_ids=words).pooler_output
        return net.logit_scale.exp() * cosine_similarity(net.visual_projection(seen), net.text_projection(read))
