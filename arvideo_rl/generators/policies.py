"""Three policies over one set of weights: ``current`` is trained, ``old`` made the data, ``start`` is where it began.

With LoRA they are adapters on one frozen base (start = the base alone); with full fine-tuning they are copies.
``reference`` is what an objective pulls to: the start, or with ``moving`` a policy of its own that is set now and then.
Adapters are float32 whatever the base is. A policy is only ever used inside ``using(name)``, which hands out the model
and leaves ``current`` active on exit, so a later backward (and recomputation under checkpointing) sees the right one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from peft import LoraConfig
from torch import Tensor, nn

from arvideo_rl.generators.transformer import CausalWan, Prediction

LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")  # the ten linears of a block


@dataclass
class PolicyConfig:
    """How the trained policy is parametrised."""

    kind: str = "lora"  # lora or full
    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = field(default=LINEARS)  # suffixes of the linears inside the blocks that get an adapter


class Policies:
    """Make the three policies over ``transformer``, which from now on belongs to this object."""

    def __init__(self, transformer: CausalWan, config: PolicyConfig, seed: int = 0, moving: bool = False) -> None:
        if config.kind not in ("lora", "full"):
            raise ValueError(f"policy kind {config.kind!r} is unknown; choose lora or full")
        low = next((p.dtype for p in transformer.parameters() if p.dtype != torch.float32), None)
        if config.kind == "full" and low:  # an update is smaller than what such a weight can change by
            raise ValueError(
                f"policy.kind=full would train {str(low)[6:]} weights, which barely move; load the generator with "
                "wan.dtype=float32 or use policy.kind=lora"
            )
        self.kind = config.kind
        self.stored = ("current", "old", *(("reference",) if moving else ()))  # start is never anything new
        self.old_is_current = True
        self._scope = "current"
        transformer.requires_grad_(config.kind == "full").eval()
        self.model = transformer
        self._active: nn.Module = transformer
        if config.kind == "full":
            frozen = (*self.stored[1:], "start")
            self._copies = {name: copy.deepcopy(transformer).requires_grad_(False) for name in frozen}
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name in self.stored:
                _add_adapter(transformer, config, name)
        for name in self.stored[1:]:
            self.copy("current", name, keep=0.0)
        transformer.set_adapter("current")

    def __call__(self, *args, **kwargs) -> Prediction:
        """Run the policy in scope (``current`` outside any scope)."""
        return self._active(*args, **kwargs)

    @contextmanager
    def using(self, name: str) -> Iterator[nn.Module]:
        """Scope in which policy ``name`` answers; also hands out its model. All but ``current`` must run without
        gradient and before it. Scopes nest: on leaving one, the policy of the one around it answers again."""
        if name not in ("current", "old", "start", "reference"):
            raise ValueError(f"policy {name!r} is unknown; choose current, old, start or reference")
        if name != "current" and torch.is_grad_enabled():
            raise RuntimeError(f"policy {name!r} is frozen: use it under torch.no_grad()")
        name = "start" if name == "reference" and name not in self.stored else name
        if self.kind == "full":
            outer, self._active = self._active, self.model if name == "current" else self._copies[name]
            try:
                yield self._active
            finally:
                self._active = outer
            return
        around = self._scope
        self._enter(name)
        try:
            yield self.model
        finally:
            self._enter(around)

    def _enter(self, name: str) -> None:
        """Make the adapters of policy ``name`` the active ones."""
        if name == self._scope:
            return
        if name == "start":
            self.model.disable_adapters()
        else:
            if self._scope == "start":
                self.model.enable_adapters()
            self.model.set_adapter(name)
        self._scope = name

    def parameters(self, name: str = "current") -> dict[str, nn.Parameter]:
        """The parameters that make up ``current``, ``old`` or a moving ``reference``, by name without the policy's."""
        if self.kind == "full":
            model = self.model if name == "current" else self._copies[name]
            return dict(model.named_parameters())
        tag = f".{name}.weight"
        return {k.removesuffix(tag): p for k, p in self.model.named_parameters() if "lora_" in k and k.endswith(tag)}

    @torch.no_grad()
    def copy(self, source: str, target: str, keep: float) -> None:
        """target <- keep * target + (1 - keep) * source."""
        a, b = self.parameters(source), self.parameters(target)
        for key, p in b.items():
            p.lerp_(a[key].to(p.dtype), 1 - keep)
        if target == "old":
            self.old_is_current = keep == 0.0

    @torch.no_grad()
    def distance(self) -> float:
        """L2 distance of current from old, over all trained parameters."""
        a, b = self.parameters("current"), self.parameters("old")
        return float(sum((a[k].float() - b[k].float()).square().sum() for k in a)) ** 0.5

    def check_backward(self) -> None:
        """Raise unless exactly the current policy's parameters are trainable and the current adapter is active."""
        wanted = {id(p) for p in self.parameters("current").values()}
        found = {id(p) for p in self.model.parameters() if p.requires_grad}
        if wanted != found:
            raise RuntimeError(f"{len(found)} parameters are trainable where the current policy has {len(wanted)}")
        if self.kind == "lora" and self.model.active_adapters() != ["current"]:
            raise RuntimeError(f"adapter {self.model.active_adapters()} is active at backward instead of current")

    def state(self) -> dict[str, Tensor]:
        """All policy tensors, for a checkpoint: the live ones, which change with the policies; clone to keep them."""
        return {f"{n}/{k}": p.detach() for n in self.stored for k, p in self.parameters(n).items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor], old_is_current: bool) -> None:
        """Restore what :meth:`state` gave; every tensor must be there with its shape."""
        _fill(self.state(), state)
        self.old_is_current = old_is_current


def trained_parameters(transformer: CausalWan, config: PolicyConfig) -> int:
    """How many parameters will be trained; needs no weights."""
    if config.kind == "full":
        return sum(p.numel() for p in transformer.parameters())
    linears = (transformer.get_submodule(name) for name in _block_linears(transformer, config.targets))
    return sum(config.rank * (m.in_features + m.out_features) for m in linears)  # type: ignore[operator,union-attr,misc]


def adapt(transformer: CausalWan, config: PolicyConfig, current: dict[str, Tensor], name: str = "current") -> None:
    """Make ``transformer`` the trained policy and nothing more: no old one, no copies, nothing to train. ``current``
    are the tensors that ``Policies.state`` calls current/..., without that prefix; every one must be used. With LoRA
    they become adapter ``name``."""
    transformer.requires_grad_(False).eval()
    if config.kind == "lora":
        _add_adapter(transformer, config, name)
        transformer.requires_grad_(False)
    tag = f".{name}.weight" if config.kind == "lora" else ""
    mine = {k.removesuffix(tag): p for k, p in transformer.named_parameters() if not tag or k.endswith(tag)}
    _fill(mine, current)


@torch.no_grad()
def _fill(mine: dict[str, nn.Parameter] | dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Copy ``state`` into ``mine``; ValueError, with nothing changed, unless names and shapes are the same."""
    if not mine or set(mine) != set(state):
        odd = sorted(set(mine) ^ set(state))[:3]
        raise ValueError(f"checkpoint does not fit this policy; differing names: {', '.join(odd)} ...")
    for key, p in mine.items():
        if p.shape != state[key].shape:
            raise ValueError(f"checkpoint does not fit: {key} is {tuple(state[key].shape)}, not {tuple(p.shape)}")
    for key, p in mine.items():
        p.copy_(state[key])


def _add_adapter(transformer: CausalWan, config: PolicyConfig, name: str) -> None:
    """Add a LoRA adapter in float32 whatever the base is."""
    lora = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=_block_linears(transformer, config.targets)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are meant
        transformer.add_adapter(lora, adapter_name=name)
    for key, p in transformer.named_parameters():
        if "lora_" in key:
            p.data = p.data.float()


def _block_linears(transformer: nn.Module, suffixes: tuple[str, ...]) -> list[str]:
    for suffix in suffixes:
        if suffix not in LINEARS:
            raise ValueError(f"policy target {suffix!r} is not a linear of the blocks; known: {', '.join(LINEARS)}")
    linears = (k.removesuffix(".base_layer") for k, m in transformer.named_modules() if isinstance(m, nn.Linear))
    names = [k for k in linears if k.startswith("blocks.") and k.endswith(tuple(suffixes))]
    if not names:
        raise ValueError(f"policy targets {list(suffixes)} match no linear of the blocks; known: {', '.join(LINEARS)}")
    return names
