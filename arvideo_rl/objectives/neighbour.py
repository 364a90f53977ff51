"""Chunk-fork contrastive GRPO: credit to one chunk's initial noise, without stochastic steps or likelihoods.

The branches of a group differ in the noise of chunk p only. Where branch k stands at a step, the trained policy
predicts a_k; the closer a_k lies to the prediction x_i that the data policy made for branch i, the likelier it makes i:

    d_ki = mean (x_i - a_k)^2;  pi_k(i) = softmax_i(-d_ki / tau);  r = pi / pi_old, where a_k was x_k
    loss = mean over anchors k and branches i of max(-A_i r, -A_i clip(r, 1 - clip, 1 + clip))

AR-CoPO (2603.17461) compares predicted clean chunks, Neighbor GRPO (2511.16955) the next noisy states: the caller
decides what the points are. Neither has public code. Decided here: distances are means over elements, since sums make
the policy one-hot; tau is the median distance between branches; all steps may be trained, the last included.
Semi-on-policy training is the same loss on rollouts of the initial policy that are never renewed.
At the first update, with advantages that sum to zero, dL/da_k is -2/(G tau M) sum_i A_i x_i, M elements.
Shape letters: G branches, A anchors; points [G, ...] of one group, chunk and step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arvideo_rl.objectives.categorical import clipped_surrogate, log_policy, typical_gap
from samplers.randomness import Key, generator, shared


def distances(predicted: Tensor, points: Tensor) -> Tensor:
    """Mean squared distances [A, G], float64, of predictions [A, ...] from points [G, ...]; gradient through both."""
    rows = [points - p for p in predicted]
    return torch.stack([d.square().flatten(1).mean(1).double() for d in rows])


def temperature(points: Tensor) -> float:
    """The median distance between two branches' points [G, ...]."""
    return typical_gap(distances(points.detach(), points.detach()))


def anchor_branches(key: Key, chunk: int, group: int, count: int) -> list[int]:
    """Which ``count`` of ``group`` branches are anchors at this chunk, in order; the same for all of a prompt."""
    if not 1 <= count <= group:
        raise ValueError(f"{count} anchors of a group of {group} branches: use 1 to {group}")
    return sorted(generator(shared([key])[0], chunk, 2, "routing").permutation(group)[:count].tolist())


def neighbour_loss(
    current: Tensor,
    points: Tensor,
    anchors: list[int],
    adv: Tensor,
    tau: float | None = None,
    clip: float = 0.2,
    limit: float = 10.0,
) -> tuple[Tensor, dict[str, float]]:
    """The loss, a number, and statistics of one group at one step of its pivot chunk.

    ``current`` [A, ...]: the trained policy's predictions where the ``anchors`` stood, with gradient. ``points``
    [G, ...]: the data policy's predictions of all branches. ``adv`` [G]. ``tau`` None is :func:`temperature`.
    """
    if len(current) != len(anchors) or len(points) != len(adv):
        raise ValueError(
            f"{len(current)} predictions for {len(anchors)} anchors, {len(points)} points for {len(adv)} advantages: "
            "the numbers of each pair must agree"
        )
    points = points.detach()
    tau = temperature(points) if tau is None else tau
    old = log_policy(distances(points[anchors], points), tau)
    now = log_policy(distances(current, points), tau)
    loss, stats = clipped_surrogate(now - old, adv.expand_as(now), clip, clip, limit)
    entropy = -(old.exp() * old).sum(-1).mean().item()
    return loss.mean(), stats | {"tau": tau, "entropy": entropy}
