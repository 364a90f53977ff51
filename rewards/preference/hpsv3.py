"""Human Preference Score v3 (arXiv 2508.03789): a Qwen2-VL-7B that reads a picture, its prompt and a rubric, and a head
of three layers on one token of the rubric. It was trained on which of two pictures for one prompt people chose.

The checkpoint is MizzenAI/HPSv3: all weights in one file. The head gives the mean and the log standard deviation of a
normal score; the mean is what is published as the score. The rubric is text of the package hpsv3 (MIT).
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rewards.claims import Claims
from rewards.preference import qwen
from rewards.preference import weights as of
from rewards.preference.clip import FrameScore
from rewards.preference.pictures import BETWEEN
from rewards.preference.qwen import BASE_FILES

HUB, BASE = "MizzenAI/HPSv3", "Qwen/Qwen2-VL-7B-Instruct"
FILES = ("HPSv3.safetensors",)
FOLDER = Path("~/.cache/arvideo-rl/hpsv3").expanduser()
RUBRIC = FOLDER / "hpsv3/dataset/data_collator_qwen.py"
RUBRIC_NAMES = ("INSTRUCTION", "prompt_with_special_token")  # in that file
TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28  # of a frame, at least and at most
HIDDEN = (1024, 16)  # of the head


class HPSv3(FrameScore):
    """Mean of the score's distribution, by frame. ``base``: configuration and tokeniser of Qwen2-VL. ``rubric``: a file
    of the package hpsv3, or a text with {text_prompt} and the reward token."""

    name = "hpsv3"
    formula = "mean of the score that the head gives at the reward token, mean over frames"
    value_range = (-math.inf, math.inf)
    claims = Claims(blind_to=(*BETWEEN, "saturated"))
    licence = "code MIT, weights Apache-2.0 (card), Qwen2-VL-7B Apache-2.0"
    hacked_by = "glossy stills of anything, over-saturation, close-ups; it sees no motion"
    cost = "a pass of a 7B network a frame: minutes a clip on a CPU; 17 GB in bfloat16 on a GPU, twice that in float32"
    hub = {HUB: FILES, BASE: BASE_FILES}
    files = {RUBRIC: f"pip install --no-deps --target {FOLDER} hpsv3==1.0.0"}  # read, never imported
    download = 16_600_000_000  # 8.3 billion bfloat16
    unit = "mu"

    def __init__(self, weights: str | Path = HUB, base: str | Path = BASE, rubric: str | Path = RUBRIC, frames: int = 8,
                 pool: str = "mean"):  # fmt: skip
        super().__init__(weights, frames, pool)
        self.base, self.rubric = base, Path(rubric).expanduser()
        self.hub = {k: v for k, v in type(self).hub.items() if k in (str(weights), str(base))}
        self.files = {k: v for k, v in self.files.items() if k == self.rubric}

    def prepare(self) -> None:
        """Read rubric and weights now."""
        self.template, self.network  # noqa: B018

    @cached_property
    def template(self) -> str:
        """The rubric with a place for the prompt."""
        how = self.files.get(self.rubric, "give rubric=FILE")
        return qwen.read_rubric(self.name, self.rubric, RUBRIC_NAMES, [TOKEN], how)

    @cached_property
    def processor(self) -> Any:
        """Of Qwen2-VL, with the token added."""
        return qwen.processor_of(self.name, self.base, [TOKEN])

    @property
    def token_id(self) -> int:
        """Of the reward token."""
        return self.processor.tokenizer.convert_tokens_to_ids(TOKEN)

    @cached_property
    def network(self) -> tuple[Any, nn.Module]:
        """Qwen2-VL without its language head, and the reward head in float32, frozen."""
        path = of.one_of(self.name, of.located(self.name, self.weights, FILES), FILES)
        tensors = {qwen.renamed(k): v for k, v in of.read(self.name, path).items() if not k.startswith("lm_head.")}
        head = {k: tensors.pop(k).float() for k in list(tensors) if k.startswith("rm_head.")}
        network = qwen.network_of(self.name, self.base, tensors, path, {TOKEN: self.token_id})
        with torch.device("meta"):
            layers = nn.ModuleDict({"rm_head": head_of(network.config.text_config.hidden_size)})
        return network, of.fit(self.name, layers, head, path)["rm_head"]  # type: ignore[index]

    def measure(self, frames: Tensor, prompt: str) -> Tensor:
        return self.distribution(frames, prompt)[:, 0]

    def distribution(self, frames: Tensor, prompt: str) -> Tensor:
        """Mean and log standard deviation [F, 2] of the score of each of ``frames`` [F, 3, H, W]."""
        network, head = self.network
        text = self.template.replace("{text_prompt}", prompt)
        states = [qwen.states_at(self.name, network, self.processor, "image", frame, text, [self.token_id])
                  for frame in qwen.fitted(frames, PIXELS, PIXELS)]  # fmt: skip
        return head.to(frames.device)(torch.cat(states))


def head_of(width: int) -> nn.Sequential:
    """The layers from a hidden state [..., ``width``] to the two numbers."""
    a, b = HIDDEN
    return nn.Sequential(nn.Linear(width, a), nn.ReLU(), nn.Dropout(0.05), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 2))
