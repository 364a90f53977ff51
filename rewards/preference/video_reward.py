"""VideoReward (arXiv 2501.13918): a Qwen2-VL that reads a video and a rubric, and a head on three tokens of the rubric.

The checkpoint is KlingTeam/VideoReward: ``model_config.json`` (sampling, LoRA, the constants that standardise) and
``checkpoint-*/model.pth``. The rubric is text of the VideoAlign repository (MIT). The published code takes paths of
videos; this takes tensors, and one clip at a time, because padding changes the scores of this architecture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import rgb_to_grayscale

from rewards.claims import Claims
from rewards.contract import Clips, Scores, check_needs
from rewards.preference import qwen
from rewards.preference import weights as of
from rewards.preference.qwen import BASE_FILES

HUB, BASE = "KlingTeam/VideoReward", "Qwen/Qwen2-VL-2B-Instruct"
FILES = ("model_config.json", "checkpoint-*/model.pth")
RUBRIC_URL = ("https://raw.githubusercontent.com/KwaiVGI/VideoAlign/"
              "3e5ebc600aebc4d28300e9132b0a23ee8e1bc47c/prompt_template.py")  # fmt: skip
RUBRIC = Path("~/.cache/arvideo-rl/videoalign_prompt_template.py").expanduser()
RUBRIC_NAME = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"  # in that file
DIMENSIONS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{d}_reward|>" for d in DIMENSIONS)
SCORES = (*DIMENSIONS, "mean")
CLAIMS = {  # of a mean of three, one may hide what another sees
    "VQ": Claims(blind_to=("frozen", "half_frozen", "saturated", "wrong_prompt")),
    "MQ": Claims(blind_to=("saturated", "wrong_prompt")),
    "TA": Claims(notices=("wrong_prompt",), blind_to=("saturated",)),
    "mean": Claims(blind_to=("saturated", "wrong_prompt")),
}
FRAME_FACTOR, FEWEST, MOST = 2, 4, 768  # frames are an even number between these, as far as there are as many
LEAST_PIXELS = 128 * 28 * 28  # of a frame


class VideoReward:
    """Visual quality, motion quality and text alignment, each standardised by the checkpoint's constants.

    ``score``: the value, one of SCORES; only what it needs is computed. ``grey_motion``: MQ of the clip without colour
    (Astrolabe, arXiv 2603.17051), so that colour cannot buy it. ``base``: configuration and tokeniser of Qwen2-VL.
    ``rubric``: VideoAlign's prompt_template.py, or a text with {text_prompt} and the three reward tokens.
    """

    name = "video_reward"
    needs = frozenset({"prompts", "fps"})
    granularity = "clip"
    value_range = (-math.inf, math.inf)
    licence = "code MIT, weights Apache-2.0 (card), Qwen2-VL-2B Apache-2.0"
    hacked_by = (
        "gaudy, cartoon-like pictures (VQ); colour and texture for motion, unless grey_motion; few, large things"
    )
    cost = "minutes a clip on a CPU; about 5 GB in bfloat16 on a GPU, twice that in float32"
    optional = True
    download = 5_000_000_000  # about: Qwen2-VL-2B and its LoRA in bfloat16
    hub: Mapping[str, tuple[str, ...]] = {HUB: FILES, BASE: BASE_FILES}
    files: Mapping[Path, str] = {RUBRIC: f"curl -L --create-dirs -o {RUBRIC} {RUBRIC_URL}"}

    def __init__(self, weights: str | Path = HUB, base: str | Path = BASE, rubric: str | Path = RUBRIC,
                 score: str = "mean", grey_motion: bool = True):  # fmt: skip
        if score not in SCORES:
            raise ValueError(f"video_reward: score {score!r} is unknown; choose {', '.join(SCORES)}")
        self.weights, self.base, self.rubric = weights, base, Path(rubric).expanduser()
        self.score, self.grey_motion, self.claims = score, bool(grey_motion), CLAIMS[score]
        self.hub = {k: v for k, v in self.hub.items() if k in (str(weights), str(base))}
        self.files = {k: v for k, v in self.files.items() if k == self.rubric}
        wanted = "mean of VQ, MQ and TA" if score == "mean" else score
        self.formula = f"{wanted}, each (logit - mean) / std" + ", MQ on grey frames" * (self.grey_motion)

    formula = "mean of VQ, MQ and TA, each (logit - mean) / std, MQ on grey frames"

    def prepare(self) -> None:
        """Read configuration, rubric and weights now."""
        self.template, self.constants, self.network  # noqa: B018

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)  # type: ignore[arg-type]
        assert clips.prompts is not None
        self.prepare()
        rates = torch.as_tensor(clips.fps, dtype=torch.float64).expand(len(clips)).tolist()
        rows = [self._one(f.detach(), prompt, fps) for f, prompt, fps in zip(clips.frames, clips.prompts, rates)]
        logits = torch.stack(rows).to(clips.frames.device)
        z = standardise(logits, self.constants)
        value = z.mean(1) if self.score == "mean" else z[:, DIMENSIONS.index(self.score)]
        value = value.masked_fill(~value.isfinite(), math.nan)
        reasons = [None if fine else "system:not_finite" for fine in value.isfinite().tolist()]
        parts = {d: z[:, i] for i, d in enumerate(DIMENSIONS) if not logits[:, i].isnan().all()}
        return Scores(value, value.isfinite(), reasons, parts, raw={f"{d}_logit": logits[:, i] for i, d in
                                                                    enumerate(DIMENSIONS)})  # fmt: skip

    def _one(self, frames: Tensor, prompt: str, fps: float) -> Tensor:
        """Logits [3] of one clip; NaN where they are not asked for."""
        asked = DIMENSIONS if self.score == "mean" else (self.score,)
        frames = sampled(frames, fps, self.settings["fps"])
        out = torch.full((3,), math.nan)
        for grey in (False, True):
            mine = [i for i, d in enumerate(DIMENSIONS) if d in asked and (d == "MQ" and self.grey_motion) == grey]
            if mine:
                out[mine] = self.logits(rgb_to_grayscale(frames, 3) if grey else frames, prompt)[mine]
        return out

    def logits(self, frames: Tensor, prompt: str) -> Tensor:
        """What the head says at the three tokens [3], float32 on the CPU, of sampled ``frames`` [F, 3, H, W]."""
        network, head = self.network
        small = qwen.fitted(frames, LEAST_PIXELS, self.settings["max_frame_pixels"])
        ids = list(self.token_ids.values())
        states = qwen.states_at(self.name, network, self.processor, "video", small, self.text(prompt), ids)
        return (states @ head.to(states.device).T)[:, 0].cpu()

    def text(self, prompt: str) -> str:
        """The rubric for ``prompt``."""
        return self.template.replace("{text_prompt}", prompt)

    @cached_property
    def template(self) -> str:
        """The rubric with a place for the prompt."""
        how = self.files.get(self.rubric, "give rubric=FILE")
        return qwen.read_rubric(self.name, self.rubric, [RUBRIC_NAME], TOKENS, how)

    @cached_property
    def folder(self) -> Path:
        """Where the checkpoint lies."""
        return of.located(self.name, self.weights, FILES)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The checkpoint's model_config.json."""
        path = of.one_of(self.name, self.folder, ["model_config.json"])
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            missing = [k for k in ("data_config", "model_config", "peft_lora_config") if k not in found]
            missing += [f"data_config.{k}" for k in ("fps", "max_frame_pixels") if k not in found["data_config"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"video_reward: {path} cannot be read: {' '.join(str(error).split())}") from None
        of.refuse(self.name, path, missing, ())
        if found["model_config"].get("output_dim") != 1 or not found["model_config"].get("use_special_tokens"):
            raise ValueError(f"video_reward: {path} is of another kind of head; this reads one number at three tokens")
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """How frames are sampled."""
        return self.config["data_config"]

    @cached_property
    def constants(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of the logits, by dimension, as the checkpoint has them."""
        found = self.config.get("inference_config") or {}
        path = self.folder / "model_config.json"
        of.refuse(self.name, path, [f"{d}_{k}" for d in DIMENSIONS for k in ("mean", "std") if f"{d}_{k}" not in found],
                  ())  # fmt: skip
        return {d: (float(found[f"{d}_mean"]), float(found[f"{d}_std"])) for d in DIMENSIONS}

    @cached_property
    def processor(self) -> Any:
        """Of Qwen2-VL, with the three tokens added."""
        return qwen.processor_of(self.name, self.base, TOKENS)

    @property
    def token_ids(self) -> dict[str, int]:
        """Of the three tokens."""
        return {t: self.processor.tokenizer.convert_tokens_to_ids(t) for t in TOKENS}

    @cached_property
    def network(self) -> tuple[Any, Tensor]:
        """Qwen2-VL without its language head, frozen, and the reward head [1, D]."""
        found = sorted(self.folder.glob("checkpoint-*/model.pth"), key=lambda p: int(p.parent.name.split("-")[-1]))
        if not found:
            raise ValueError(f"video_reward: {self.folder} holds no checkpoint-*/model.pth")
        lora = self.config["peft_lora_config"]
        share = lora["lora_r"] ** (0.5 if lora.get("use_rslora") else 1)
        tensors = plain(of.read(self.name, found[-1]), lora["lora_alpha"] / share, found[-1])
        head = tensors.pop("rm_head.weight", None)
        of.refuse(self.name, found[-1], [] if head is not None else ["rm_head.weight"], ())
        assert head is not None
        network = qwen.network_of(self.name, self.base, tensors, found[-1], self.token_ids)
        if list(head.shape) != [1, network.config.text_config.hidden_size]:
            of.refuse(self.name, found[-1], (), (), [f"rm_head.weight is {list(head.shape)}"])
        return network, head.float()


def standardise(logits: Tensor, constants: Mapping[str, tuple[float, float]]) -> Tensor:
    """(logit - mean) / std of the columns VQ, MQ, TA of ``logits`` [B, 3]. Negative values are normal."""
    mean, std = (logits.new_tensor([constants[d][i] for d in DIMENSIONS]) for i in (0, 1))
    return (logits - mean) / std


def sampled(frames: Tensor, fps: float, wanted: float) -> Tensor:
    """An even number of ``frames`` [T, ...] of a clip of ``fps``, ``wanted`` a second and 4 at least, both ends among
    them; the last one twice where there is only one."""
    total = len(frames)
    if total < FRAME_FACTOR:
        return frames.repeat(FRAME_FACTOR, 1, 1, 1)
    count = min(max(total / fps * wanted, FEWEST), MOST, total // FRAME_FACTOR * FRAME_FACTOR)
    return frames[torch.linspace(0, total - 1, round(count / FRAME_FACTOR) * FRAME_FACTOR).round().long()]


def plain(tensors: Mapping[str, Tensor], scale: float, path: Path) -> dict[str, Tensor]:
    """Tensors of a LoRA model under the names of Qwen2VLModel: adapters added to what they adapt, W + scale B A, the
    language head left out, ``rm_head.weight`` kept."""
    short = {k.removeprefix("base_model.model."): v for k, v in tensors.items()}
    out: dict[str, Tensor] = {}
    low = {k.replace(".lora_A.default.", ".lora_A."): v for k, v in short.items() if ".lora_" in k}
    used = set()
    for key, value in short.items():
        if ".lora_" in key or key.startswith("lm_head."):
            continue
        name = key.replace(".base_layer.", ".")
        stem = name.removesuffix(".weight")
        a = low.get(f"{stem}.lora_A.weight")
        b = short.get(f"{stem}.lora_B.default.weight", short.get(f"{stem}.lora_B.weight"))
        if name.endswith(".weight") and a is not None and b is not None:
            value = value.float() + scale * (b.float() @ a.float())
            used.add(stem)
        out[qwen.renamed(name)] = value
    loose = [k for k in short if ".lora_" in k and k.split(".lora_")[0] not in used]
    of.refuse("video_reward", path, (), loose)
    return out
