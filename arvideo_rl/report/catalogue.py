"""What each logged name means: where it stands in the report, its title, its axis, whether it is raw or normalised."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SHARE = "share, 0 to 1"
SECTIONS = {  # in the order of the page: title -> what to look for
    "Reward": "What is trained, on this run's own rollouts. It should rise; noise between iterations is the prompts'.",
    "Verifiers": "Ground truth that is never trained on, on the same rollouts. A reward that rises while these fall is "
    "being gamed.",
    "Held-out probe": "A small fixed set of held-out prompts, measured from time to time during the run.",
    "Signal": "What the groups give to learn from. No spread inside groups, no gradient.",
    "Loss": "The policy term. Its value means little; look for levels that run away from the others.",
    "Distance and trust region": "How far the policy has moved, from the start point and in one update.",
    "Optimisation": "Size of the gradient before clipping.",
    "Time": "Wall clock.",
    "Other": "Logged, and shown as it is.",
}


@dataclass(frozen=True)
class Meaning:
    """How one metric is shown."""

    section: str
    title: str
    axis: str  # y axis: quantity, unit, raw or normalised
    about: str = ""


TABLE: list[tuple[str, Meaning]] = [
    (r"reward/([^/]+)", Meaning("Reward", r"\1", "mean reward, raw", "mean of all branches, in the reward's units")),
    (r"reward/([^/]+)/group_std", Meaning("Signal", r"spread inside groups: \1", "standard deviation, raw reward",
        "population deviation inside a group, mean of groups")),
    (r"reward/([^/]+)/zero_spread_share", Meaning("Signal", r"groups without spread: \1", SHARE,
        "their advantage is 0 and they teach nothing")),
    (r"reward/([^/]+)/invalid_share", Meaning("Signal", r"invalid: \1", SHARE, "chunks that could not be scored")),
    (r"reward/([^/]+)/agreement", Meaning("Signal", r"agreement: \1", "correlation with the advantages",
        "near 0 a trained reward is drowned by the others; below 0 a held-out one is sacrificed")),
    (r"reward/mix/passing", Meaning("Signal", "let through by the gates", SHARE, "others are worst of their group")),
    (r"reward/([^/]+)/(.+)", Meaning("Reward", r"\1: \2", "part of the reward, raw")),
    (r"verifier/colour_present", Meaning("Verifiers", "colour present", SHARE,
        "frames in which each colour of the prompt is seen")),
    (r"verifier/direction_correct", Meaning("Verifiers", "direction correct", SHARE,
        "objects that travel as the prompt says")),
    (r"verifier/sharpness", Meaning("Verifiers", "sharpness", "pixel difference x 100, raw",
        "between neighbours; blur lowers it, noise raises it")),
    (r"verifier/motion", Meaning("Verifiers", "motion", "frame difference x 100, raw", "mean change between frames")),
    (r"verifier/(.+)", Meaning("Verifiers", r"\1", "raw")),
    (r"picture/(.+)", Meaning("Verifiers", r"picture: \1", "0 to 1",
        "on the same rollouts; where it drifts, so does the look")),
    (r"probe/change/reward/(.+)", Meaning("Held-out probe", r"trained reward \1: change", "paired change, held out",
        "since the start, same prompts and noise")),
    (r"probe/change/(.+)", Meaning("Held-out probe", r"\1: change", "paired change, held out",
        "since the start, same prompts and noise")),
    (r"probe/(.+)", Meaning("Held-out probe", r"\1", "held out, raw")),
    (r"train/loss_at/t([\d.]+)", Meaning("Loss", r"policy term at noise level t = \1", "{loss}",
        "t = 1 is pure noise, where motion is decided")),
    (r"train/policy_loss", Meaning("Loss", "policy term", "{loss}", "mean over levels, chunks and branches")),
    (r"x0_error/t([\d.]+)", Meaning("Loss", r"clean-frame error, noise level up to t = \1",
        "mean squared error, raw", "of the predicted clean frames")),
    (r"loss", Meaning("Loss", "loss", "error / t², weighted", "the trained objective")),
    (r"train/kl", Meaning("Distance and trust region", "KL", "{kl}", "distance from the start point")),
    (r"train/x0_moved", Meaning("Distance and trust region", "prediction moved", "mean squared change of x0, raw",
        "current against old policy; 0 while they are equal")),
    (r"train/policy_distance", Meaning("Distance and trust region", "policy distance", "L2 of parameters, raw",
        "current against old policy, after the update")),
    (r"train/context_gap", Meaning("Distance and trust region", "context gap", "relative L2, normalised",
        "between the contexts the two policies write")),
    (r"train/mean_signal", Meaning("Signal", "mean signal", "advantage / clip, normalised",
        "away from 0 the update drifts whatever the reward says")),
    (r"train/.*clip.*(share|frac|fraction)?", Meaning("Distance and trust region", r"{name}", "clipping, as logged")),
    (r"train/.*(ratio|trust|log_prob|old_approx|mask).*", Meaning("Distance and trust region", r"{name}",
        "as logged")),
    (r"(train/)?grad_norm", Meaning("Optimisation", "gradient norm", "L2 norm, raw", "before clipping")),
    (r"seconds/(.+)", Meaning("Time", r"\1", "seconds an iteration")),
    (r"seconds", Meaning("Time", "time since the start", "seconds", "of this start; begins again after a resume")),
]  # fmt: skip


def meaning(key: str, config: dict[str, Any]) -> Meaning:
    """How to show the metric ``key`` of a run with this configuration."""
    part = config.get("objective")
    args = part.get("args", {}) if isinstance(part, dict) else {}
    args = args if isinstance(args, dict) else {}
    scaled = {"diffusion_nft": "policy term, normalised by its own size", "astrolabe": "policy term, raw x0 error"}
    space = {"v": "squared difference of v, raw", "x0": "squared difference of x0, raw"}
    words = {
        "{loss}": scaled.get(args.get("weighting", "diffusion_nft"), "policy term, as logged"),
        "{kl}": space.get(args.get("kl_space", "v"), "as logged"),
        "{name}": key.split("/")[-1].replace("_", " "),
    }
    for pattern, found in TABLE:
        if match := re.fullmatch(pattern, key):
            title = match.expand(found.title) if "{" not in found.title else words[found.title]
            return Meaning(found.section, title.replace("_", " "), words.get(found.axis, found.axis), found.about)
    return Meaning("Other", key, "as logged")


def order(key: str) -> int:
    """Rank of a metric in its section: the order of the table, what is unknown last."""
    return next((i for i, (pattern, _) in enumerate(TABLE) if re.fullmatch(pattern, key)), len(TABLE))
