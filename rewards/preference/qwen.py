"""What rewards on a Qwen2-VL share: frames and a rubric in, the hidden states of the rubric's reward tokens out.

They were trained with transformers 4.45, where their forward gave every token its place in the sequence and not, as
Qwen2-VL is meant to and transformers does since, the patches of a picture their time, row and column. So that is what
the network is given here, one picture or clip at a time. Rubrics are text of the repositories that trained the
rewards, so they are read from there and do not stand here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import InterpolationMode, resize

from rewards.preference import weights as of

BASE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json",
              "chat_template.json")  # the weights are in the rewards' checkpoints  # fmt: skip
SIDE_FACTOR = 28  # sides of pictures are multiples of it
RENAMED = {"visual.": "visual.", "model.layers.": "language_model.layers.", "model.norm.": "language_model.norm.",
           "model.embed_tokens.": "language_model.embed_tokens.", "model.visual.": "visual.",
           "model.language_model.": "language_model."}  # of transformers 4 and 5 -> Qwen2VLModel  # fmt: skip


def renamed(key: str) -> str:
    """The name in Qwen2VLModel of a tensor that transformers 4 or 5 saved as ``key``."""
    start = next((old for old in RENAMED if key.startswith(old)), None)
    return key if start is None else RENAMED[start] + key.removeprefix(start)


def processor_of(reward: str, base: str | Path, tokens: Sequence[str]) -> Any:
    """The processor of Qwen2-VL in ``base``, a folder or a repository of the hub, with reward ``tokens`` added."""
    from transformers import AddedToken, AutoProcessor

    path = of.located(reward, base, BASE_FILES)
    try:
        found = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{reward}: no Qwen2-VL processor in {path}: {' '.join(str(error).split())}") from None
    found.tokenizer.add_tokens([AddedToken(t, special=True) for t in tokens])
    return found


def network_of(
    reward: str, base: str | Path, tensors: Mapping[str, Tensor], path: Path, tokens: Mapping[str, int]
) -> Any:
    """Qwen2-VL without its language head, configured by ``base`` and made of exactly ``tensors`` (:func:`renamed`, read
    from ``path``, in their own type), frozen; its vocabulary is as large as they have it, and must hold ``tokens``."""
    from accelerate import init_empty_weights
    from transformers import Qwen2VLConfig, Qwen2VLModel

    config = Qwen2VLConfig.from_pretrained(of.located(reward, base, BASE_FILES))
    words = tensors.get("language_model.embed_tokens.weight")
    if words is not None:
        config.text_config.vocab_size = len(words)
        if max(tokens.values()) >= len(words):
            raise ValueError(f"{reward}: {path} knows {len(words)} tokens, too few for {', '.join(tokens)}")
    with init_empty_weights():
        network = Qwen2VLModel(config)
    return of.fit(reward, network, tensors, path)


def fitted(frames: Tensor, least: int, most: int) -> Tensor:
    """``frames`` [F, 3, H, W] in [0, 1], resized (bicubic) to sides that are multiples of 28 and hold ``least`` to
    ``most`` pixels, as far as the two allow."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    side = smart_resize(*frames.shape[-2:], SIDE_FACTOR, least, most)
    return resize(frames, list(side), InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)


def states_at(
    reward: str, network: Any, processor: Any, kind: str, frames: Tensor, text: str, ids: Sequence[int]
) -> Tensor:
    """Last hidden states [N, D] in float32 at the N tokens ``ids`` of ``text``, which follows ``frames``: a ``kind``
    "image" [3, H, W] or "video" [F, 3, H, W], of a size that :func:`fitted` gives."""
    network.to(frames.device, torch.bfloat16 if frames.device.type == "cuda" else torch.float32)
    chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
    words = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    given = {"images": [frames]} if kind == "image" else {"videos": [frames], "do_sample_frames": False}
    batch = processor(text=[words], **given, do_rescale=False, do_resize=False, return_tensors="pt").to(frames.device)
    places = torch.arange(batch["input_ids"].shape[1], device=frames.device).expand(3, 1, -1)
    hidden = network(**batch, position_ids=places, use_cache=False).last_hidden_state[0]
    at = [(batch["input_ids"][0] == i).nonzero()[:, 0] for i in ids]
    if any(len(a) != 1 for a in at):
        raise ValueError(f"{reward}: the prompt holds one of the reward tokens; take it out")
    return hidden[torch.cat(at)].float()


def read_rubric(reward: str, path: Path, names: Sequence[str], tokens: Sequence[str], how: str) -> str:
    """The rubric in ``path``: a text, or a Python file, which is read and not run, and in which it is the strings
    ``names`` one after the other. It holds {text_prompt} and each of ``tokens`` once. ``how`` it is had."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            given = {getattr(node.targets[0], "id", ""): node.value for node in ast.parse(text).body
                     if isinstance(node, ast.Assign)}  # fmt: skip
            text = "".join(ast.literal_eval(given[name]) for name in names)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError):
        raise ValueError(f"{reward}: there is no rubric in {path}: {how}") from None
    wrong = [part for part in ("{text_prompt}", *tokens) if text.count(part) != 1]
    if wrong:
        raise ValueError(f"{reward}: the rubric {path} must hold {', '.join(wrong)} once")
    return text
