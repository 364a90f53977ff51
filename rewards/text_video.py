"""Text-video reward: a small network reads a clip and says, word by word, whether the prompt is true of it.

Each word that could have been another one of its kind (red or blue, ball or cube, rolls or bounces) becomes a question,
whose inner product with the clip's features gives the probability that the word is right. It is trained on captions in
which words were exchanged (ELECTRA's replaced-token detection, arXiv 2003.10555, with a video to look at). Counted per
word, a prompt half obeyed earns half, so that clips of one prompt can be told apart.
Shape letters: B clips, T pixel frames, N windows, L words, D features, R captions of one clip.
"""

from __future__ import annotations

import difflib
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
SHIPPED = {name: WEIGHTS / f"{name}.safetensors" for name in ("text_video", "text_video_heldout")}
TRAIN = "arvideo rewards train-text-video"
LENGTH = 28  # most words of a prompt
WINDOW = 18  # most frames seen at once; longer clips are read window by window
FEWEST = 3  # frames: motion needs two changes
PADDING, WHOLE = 0, 1  # tokens; WHOLE stands first and asks whether as many objects are seen as are named
FORMULAS = {  # p: probability that a word is right of the clip
    "mean": "mean of p", "geometric": "geometric mean of p", "product": "product of p",
}  # fmt: skip
SCORES = tuple(FORMULAS)
AIMS = 2  # places that a word looks at in a tube; one alone may get stuck at what is of no use
SHARP = 8.0  # how much attention prefers what fits best; blunt, it would start as a mean and learn slowly from it
BLOCK = {"cpu": 32}  # windows at once; elsewhere LARGE_BLOCK
LARGE_BLOCK = 512


class TextVideoNet(nn.Module):
    """Logits that words are right of a clip.

    Tubes of three frames pass strided convolutions. What they show as a whole, how the camera moves included, is mixed
    over time by a transformer layer. A convolution over the prompt lets "ball" know that it speaks of the red one. Each
    word then aims at places in every tube (spatial softmaxes, arXiv 1509.06113), and is told where they are, what is
    there, how both changed since the tube before, and the whole. The inner product of this with the word's question is
    the answer. Words share all of it, so what "left" looks like is learned once and not for every colour.
    """

    def __init__(self, words: int, *, size: int = 32, width: int = 64, features: int = 128, text: int = 64):
        super().__init__()
        self.size, half = size, width // 2
        self.first = nn.Sequential(nn.Conv2d(9, half, 3, stride=2, padding=1), nn.SiLU())
        self.whole = nn.Sequential(
            nn.Conv2d(half, width, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
            nn.Linear(width * (size // 8) ** 2, features), nn.LayerNorm(features),
        )  # fmt: skip
        self.extremes = nn.Linear(2 * (half + 3), features)
        self.local = nn.Sequential(nn.Conv2d(half, half, 3, padding=1), nn.SiLU(), nn.Conv2d(half, half, 3, padding=1))
        self.even = nn.LayerNorm(half)
        self.when = nn.Parameter(0.1 * torch.randn(WINDOW, features))
        self.mix = _layer(features)
        self.spot = nn.Linear(AIMS * 2 * (half + 6), features)
        self.both = nn.Sequential(nn.SiLU(), nn.Linear(features, features), nn.SiLU())
        self.clip = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, features), nn.SiLU(),
                                  nn.Linear(features, features))  # fmt: skip
        self.word = nn.Embedding(words + 2, text, padding_idx=PADDING)
        self.near = nn.Sequential(nn.Conv1d(text, text, 5, padding=2), nn.SiLU(), nn.Conv1d(text, text, 5, padding=2))
        self.all = nn.Linear(text, text)
        self.aim = nn.Sequential(nn.LayerNorm(text), nn.Linear(text, AIMS * (half + 3)))
        self.question = nn.Sequential(nn.LayerNorm(text), nn.Linear(text, features + AIMS + 1))

    @staticmethod
    def starts(frames: int) -> Tensor:
        """First frames of the tubes of a clip of ``frames``: every change lies in some tube."""
        return torch.linspace(0, frames - 3, math.ceil((frames - 1) / 2)).round().long()

    def watch(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """The whole [N, M, D] and the places [N, M, h * w, C] of the M tubes of ``frames`` [N, T, 3, size, size] in
        [0, 1], 3 <= T <= WINDOW."""
        n, starts = len(frames), self.starts(frames.shape[1])
        a, b, c = (frames[:, starts + i] - 0.5 for i in range(3))
        tubes = 4 * torch.cat([b / 2, b - a, c - b], 2)  # differences are small: scale them up
        maps = self.first(tubes.flatten(0, 1).to(memory_format=torch.channels_last))  # faster on a CPU
        hue = nn.functional.avg_pool2d(tubes[:, :, :3].flatten(0, 1), 2)
        hue = 4 * (hue - hue.mean(1, keepdim=True))  # dull surroundings are near 0 in it, so aims find objects early
        places = torch.cat([self.even(self.local(maps).flatten(2).mT), hue.flatten(2).mT], -1)
        places = places.unflatten(0, (n, -1))
        there = self.extremes(torch.cat([places.amax(2), places.amin(2)], -1))  # which colours there are, wherever
        return self.mix(self.whole(maps).unflatten(0, (n, -1)) + self.when[starts + 1]) + there, places

    def look(self, places: Tensor, aims: Tensor) -> Tensor:
        """Where ``aims`` [N, Q, C] find what they look for in ``places`` [N, M, P, C], in eighths of the width from the
        middle, what is there, how clearly it stands out, and the change of all since the tube before:
        [N, Q, M, 2 * (C + 3)]."""
        n, m, p, c = places.shape
        at = torch.linspace(-4, 4, math.isqrt(p), device=places.device)
        grid = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1).flatten(0, 1).expand(n, m, p, 2)
        heat = SHARP * aims[:, None] @ places.transpose(-1, -2) / math.sqrt(c)  # [N, M, Q, P]
        clear = (heat.logsumexp(-1, keepdim=True) - heat.mean(-1, keepdim=True) - math.log(p)) / SHARP
        seen = torch.cat([heat.softmax(-1) @ torch.cat([grid, places], -1), clear], -1)
        return torch.cat([seen, seen.diff(dim=1, prepend=seen[:, :1])], -1).transpose(1, 2)

    def read(self, tokens: Tensor) -> Tensor:
        """What each of ``tokens`` [N, L] says beside its neighbours and in its prompt: [N, L, E]."""
        x = self.word(tokens)
        near = self.near(x.transpose(1, 2)).transpose(1, 2)
        return x + near + self.all(x.sum(1, keepdim=True))

    def forward(self, frames: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
        """Logits [N, R, L] that each token is right of its frames, from ``frames`` [N, T, 3, size, size] and ``tokens``
        [N, R, L], L up to 1 + LENGTH; 0 where it is not ``asked`` [N, R, L] bool."""
        return self.answer(*self.watch(frames), tokens, asked)

    def answer(self, whole: Tensor, places: Tensor, tokens: Tensor, asked: Tensor) -> Tensor:
        """The logits of ``forward`` from what ``watch`` gives."""
        x = self.read(tokens.flatten(0, 1)).view(len(tokens), -1, self.word.embedding_dim)
        asked = asked.flatten(1)
        order = (~asked).long().argsort(dim=1, stable=True)[:, : int(asked.sum(1).max())]  # those asked come first
        x = x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))
        aims = self.aim(x).unflatten(-1, (AIMS, -1))
        look = torch.stack([self.look(places, aims[:, :, i]) for i in range(AIMS)], -1)  # [N, Q, M, 2 * (C + 3), AIMS]
        seen = self.clip(self.both(self.spot(look.flatten(3)) + whole[:, None]).mean(2))
        clear = look[:, :, :, look.shape[3] // 2 - 1].mean(2)
        question = self.question(x)  # of the clip; of how clear it is what is aimed at; and what holds of any clip
        logits = (question[..., :-1] * torch.cat([seen, clear], -1)).sum(-1) + question[..., -1]
        out = logits.new_zeros(asked.shape).scatter(1, order, logits)
        return (out * asked).view(tokens.shape)


def _layer(features: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(features, 4, 2 * features, dropout=0.0, activation="gelu", batch_first=True,
                                      norm_first=True)  # fmt: skip


class TextVideo:
    """How much of the prompt is true of the clip, 0 to 1; higher is better.

    ``weights``: ``text_video``, ``text_video_heldout`` (other scenes, another seed: measure with it, do not train on
    it), or a path. ``score``: how the words' probabilities become one number: their ``mean`` (half obeyed earns half),
    ``geometric`` mean (the worst word counts most) or ``product`` (all of it is true, were words independent).
    ``attributes``: which of the attributes count (None: all that the prompt speaks of); the components show each.
    A prompt with a word outside of the vocabulary is NaN, ``system:``, as the model and not the clip is at fault.
    ``contract.score_with_grad`` gives the gradient in ``frames``.
    """

    name = "text_video"
    needs = frozenset({"prompts"})
    granularity = "clip"  # what moves which way shows over a whole clip, and objects may rightly leave the view
    value_range = (0.0, 1.0)
    licence = "the package's own (code and weights)"
    hacked_by = "a camera that keeps the object in view whatever it was told; adversarial texture; half-way looks"
    claims = Claims(
        notices=("wrong_prompt", "jittered", "shuffled"),
        withstands=("flickering", "grainy", "resized", "mirrored"),
        blind_to=("blurred", "melted", "looped"),
    )
    cost = "about 0.01 s a clip of 12 frames at 32 x 32, on one CPU thread"
    differentiable = True
    files = {SHIPPED["text_video"]: f"{TRAIN} out={SHIPPED['text_video']}",
             SHIPPED["text_video_heldout"]: f"{TRAIN} seed=1 half=1 out={SHIPPED['text_video_heldout']}"}  # fmt: skip

    def __init__(self, weights: str | Path = "text_video", score: str = "mean",
                 attributes: tuple[str, ...] | list[str] | None = None):  # fmt: skip
        if score not in SCORES:
            raise ValueError(f"text_video: score {score!r} is unknown; choose from {', '.join(SCORES)}")
        self.path = SHIPPED.get(str(weights), Path(weights))
        self.files = {self.path: self.files.get(self.path, f"{TRAIN} out={self.path}")}
        self.score, self.attributes = score, None if attributes is None else tuple(attributes)
        which = "words that could be others" if attributes is None else f"words of {', '.join(self.attributes or ())}"
        self.formula = f"{FORMULAS[score]} over the prompt's {which}, p that the word is right of the clip"

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)
        assert clips.prompts is not None
        b, t = clips.frames.shape[:2]
        counted = self.attributes or self.names
        if unknown := [a for a in counted if a not in self.names]:
            raise ValueError(f"text_video: attribute {unknown[0]!r} is unknown; choose from {', '.join(self.names)}")
        read = [self.read(prompt) for prompt in clips.prompts]
        reasons: list[str | None] = [r if isinstance(r, str) else None for r in read]
        if t < FEWEST:
            reasons = [r or f"content: {t} frames; motion shows in {FEWEST} or more" for r in reasons]
        device = clips.frames.device
        ok = torch.tensor([r is None for r in reasons])
        tokens = torch.full((b, 1 + LENGTH), PADDING)
        kinds = torch.full((b, 1 + LENGTH), -1)  # index into names; -1 = says nothing that could be otherwise
        for i, (r, reason) in enumerate(zip(read, reasons)):
            if reason is None:
                assert not isinstance(r, str)
                tokens[i, : len(r[0])], kinds[i, : len(r[0])] = torch.tensor(r[0]), torch.tensor(r[1])
        wanted = torch.tensor([name in counted for name in self.names])
        silent = ok & ~((kinds >= 0) & wanted[kinds.clamp_min(0)]).any(1)
        reasons = ["system: the prompt says nothing of what counts" if s else r for s, r in zip(silent, reasons)]
        ok, kinds = (ok & ~silent).to(device), kinds.to(device)

        value = clips.frames.new_full((b,), math.nan)
        components = {name: value.clone() for name in self.names}
        diagnostics = {"words_judged": (kinds >= 0).sum(1)}
        if not ok.any():
            return Scores(value, ok, reasons, components, diagnostics=diagnostics)
        p = self.probabilities(clips.frames[ok], tokens[ok.cpu()].to(device))
        for i, name in enumerate(self.names):
            components[name][ok] = _pooled(p, kinds[ok] == i, "mean")
        value[ok] = _pooled(p, (kinds[ok] >= 0) & wanted.to(device)[kinds[ok].clamp_min(0)], self.score)
        return Scores(value, ok, reasons, components, diagnostics=diagnostics)

    def read(self, prompt: str) -> tuple[list[int], list[int]] | str:
        """Tokens and attribute indices (-1: none) of a prompt, WHOLE first; or the reason why it cannot be read. Words
        after "camera" are about the camera."""
        words = prompt.lower().replace(",", " ").replace(".", " ").split()
        if not 1 <= len(words) <= LENGTH:
            return f"system: the prompt has {len(words)} words, this model reads 1 to {LENGTH}"
        for word in words:
            if word not in self.vocabulary:
                near = difflib.get_close_matches(word, self.vocabulary, 1)
                return f"system: prompt word {word!r} is unknown to this model" + (f", near: {near[0]}" if near else "")
        kinds = [self.names.index(self.kind[w]) if w in self.kind else -1 for w in words]
        camera = words.index("camera") if "camera" in words else len(words)
        kinds = [self.names.index("camera") if i > camera and k >= 0 else k for i, k in enumerate(kinds)]
        whole = self.names.index("count") if any(k >= 0 for k in kinds[:camera]) else -1
        return [WHOLE, *(self.vocabulary[w] for w in words)], [whole, *kinds]

    def probabilities(self, frames: Tensor, tokens: Tensor) -> Tensor:
        """Probability [B, 1 + LENGTH] that each of ``tokens`` [B, 1 + LENGTH] is right of ``frames`` [B, T, 3, H, W],
        the mean over windows; differentiable in the frames."""
        frames = self._resize(frames)
        net, t = self.net.to(frames.device), frames.shape[1]
        starts = [*range(0, t - WINDOW, WINDOW), max(0, t - WINDOW)]
        size = BLOCK.get(frames.device.type, LARGE_BLOCK)
        with torch.autocast(frames.device.type, enabled=False):  # half precision would break batch invariance
            seen = [torch.cat([net(f[:, s : s + WINDOW], w[:, None], w[:, None] != PADDING)[:, 0].sigmoid()
                               for f, w in zip(frames.split(size), tokens.split(size))]) for s in starts]  # fmt: skip
        return torch.stack(seen).mean(0)

    def _resize(self, frames: Tensor) -> Tensor:
        h, w = frames.shape[-2:]
        size = self.net.size
        if h != w or h < size:
            raise ValueError(f"text_video: frames are {h}x{w}; its weights want square ones of {size} or more")
        if h == size:
            return frames
        flat = nn.functional.interpolate(frames.flatten(0, 1), (size, size), mode="bilinear", antialias=True)
        return flat.unflatten(0, frames.shape[:2])

    @cached_property
    def _loaded(self) -> tuple[TextVideoNet, dict[str, Any]]:
        return load(self.path)

    def prepare(self) -> None:
        """Read the weights now, so that damaged ones are found before anything else is computed."""
        self._loaded  # noqa: B018

    @property
    def net(self) -> TextVideoNet:
        """The network, frozen; read from disk on first use."""
        return self._loaded[0]

    @property
    def report(self) -> dict[str, Any]:
        """What was measured on held-out clips after training: AUROC by attribute, probes, and the command."""
        return self._loaded[1]

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token of each known word."""
        return {word: i + 2 for i, word in enumerate(self.report["words"])}

    @cached_property
    def kind(self) -> dict[str, str]:
        """Attribute of each word that has alternatives, outside of what is said about the camera."""
        pairs = [(word, name) for name, words in self.report["alternatives"].items() for word in words]
        return dict(reversed(pairs))  # the first attribute that has the word

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The attributes: those with words of their own, then ``count``: as many objects are seen as are named."""
        return (*self.report["alternatives"], "count")


def _pooled(p: Tensor, counts: Tensor, how: str) -> Tensor:
    """Probabilities [B, L] of the words that ``counts`` [B, L] -> [B]; NaN where none does."""
    n = counts.sum(1)
    if how == "mean":
        out = (p * counts).sum(1) / n.clamp_min(1)
    else:
        logs = (p.clamp_min(1e-6).log() * counts).sum(1)
        out = (logs / n.clamp_min(1) if how == "geometric" else logs).exp()
    return out.masked_fill(n == 0, math.nan)


def load(path: Path) -> tuple[TextVideoNet, dict[str, Any]]:
    """Network and report of ``path``; ValueError when it is missing or not exactly such a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
            report = json.loads((file.metadata() or {}).get("report", "{}"))
        if not isinstance(report, dict):
            report = {}
    except (OSError, ValueError, SafetensorError) as error:
        known = ", ".join(SHIPPED)
        raise ValueError(f"text_video: cannot read weights {path} ({error}); shipped: {known}") from None
    if not {"words", "alternatives", "size"} <= report.keys():
        raise ValueError(f"text_video: {path} is not such a file; make one with 'arvideo rewards train-text-video'")
    with torch.device("meta"):  # drawing initial weights would consume the global random state
        net = TextVideoNet(len(report["words"]), size=report["size"])
    try:
        net.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"text_video: {path} does not fit the network: {' '.join(str(error).split())}") from None
    return net.eval().requires_grad_(False), report
