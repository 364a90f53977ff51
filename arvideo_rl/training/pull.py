"""Who is pulled to the reference, and which policy that is: what a run remembers of both between iterations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from arvideo_rl.config import ConfigError, check_choice, check_ranges
from arvideo_rl.generators.policies import Policies
from arvideo_rl.objectives.contract import Objective
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.objectives.selective import LEAST, MOST, MovingReference, Share, gate, overrated

BRANCHES, REFERENCES = ("all", "selective"), ("start", "dynamic")


@dataclass
class PullConfig:
    """The pull that objective.args.kl_weight is the weight of (docs/objectives/selective.md)."""

    branches: str = "all"  # or selective: those that the trained reward likes more than rewards of weight 0 do
    share: float = 0.1  # of the suspected branches, at first; follows suspicion between .02 and .2
    reference: str = "start"  # what they are pulled to; or dynamic: set to the current policy now and then
    threshold: float = 0.15  # of dynamic: mean KL of the pulled branches from which on; follows how often that is
    every: int = 15  # of dynamic: iterations after which in any case


def check_pull(config: PullConfig, weights: dict[str, float], objective: Objective) -> None:
    """ConfigError for a pull that nobody would feel, or that the objective or the rewards cannot give."""
    check_choice("pull.branches", config.branches, BRANCHES)
    check_choice("pull.reference", config.reference, REFERENCES)
    check_ranges(config, {"share": f"[{LEAST}, {MOST}]", "threshold": "(0, inf)", "every": "[1, inf)"}, "pull.")
    asked = [
        f"{k}={getattr(config, k)}" for k in ("branches", "reference") if getattr(config, k) not in ("all", "start")
    ]
    if asked and not hasattr(objective, "kl_weight"):
        raise ConfigError(f"pull.{asked[0]}: this objective pulls nothing to a reference (it has no kl_weight); leave "
                          "pull out")  # fmt: skip
    if asked and not getattr(objective, "kl_weight", 0.0):
        raise ConfigError(f"pull.{asked[0]} needs a pull: set objective.args.kl_weight above 0")
    if config.branches == "all":
        return
    if isinstance(objective, KVRouting):
        raise ConfigError("pull.branches=selective: kv_routing pulls a choice between branches, not branches; use all")
    if all(weights.values()):
        raise ConfigError(
            f"pull.branches=selective needs independent judges: add rewards with weight=0 to {', '.join(weights)}"
        )


class Pull:
    """The gate and the moving reference of a run."""

    def __init__(self, config: PullConfig) -> None:
        self.config = config
        self.share, self.reference = Share(config.share), MovingReference(config.threshold, config.every)
        self._gated = 1.0  # share of the branches of this iteration that are pulled

    def gates(
        self, values: dict[str, Tensor], weights: dict[str, float], groups: Tensor
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Weights [B] of the branches' pull, None where all count, from rewards [B, K] of all processes; metrics."""
        if self.config.branches == "all":
            return None, {}
        u = overrated({name: value.nanmean(1) for name, value in values.items()}, weights, groups)
        self.share.see(u)
        chosen = gate(u, self.share.value).float()
        self._gated = chosen.mean().item()
        return chosen, {"pull/share": self.share.value, "pull/gated": self._gated,
                        "pull/suspicion": self.share.recent[-1]}  # fmt: skip

    def follow(self, policies: Policies, metrics: dict[str, float]) -> dict[str, float]:
        """After an iteration with its ``metrics``: set the reference to the current policy when that is due."""
        kl = metrics["train/pull"] / self._gated if self._gated and "train/pull" in metrics else None
        out = {} if kl is None else {"pull/kl": kl}
        if self.config.reference == "start":
            return out
        moved = self.reference.see(kl)
        if moved:
            policies.copy("current", "reference", keep=0.0)
        return out | {"pull/moved": float(moved), "pull/threshold": self.reference.now or self.config.threshold}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"share": asdict(self.share), "reference": asdict(self.reference)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` gave."""
        self.share, self.reference = Share(**state["share"]), MovingReference(**state["reference"])
