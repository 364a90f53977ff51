"""The pull to the start is part of every objective's loss, with its weight; and so are the weights of chunks."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.objectives.chunk_fork import ChunkFork
from arvideo_rl.objectives.fpo import FPO
from arvideo_rl.objectives.grpo import GRPO
from arvideo_rl.objectives.nft import NFT
from arvideo_rl.objectives.pairs import Pairs
from arvideo_rl.objectives.ratio import chunk_weights


@pytest.fixture
def moved(alignable):
    """Records and losses of policies that have left their start."""
    _, policies, make, losses = alignable
    records = {kind: make(kind(), frames=6, pivot=1) for kind in (GRPO, ChunkFork, FPO, Pairs, NFT)}
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in policies.parameters().values():
            p.add_(0.05 * torch.randn(p.shape, generator=source))
    return policies, records, losses


@pytest.mark.parametrize("kind", [GRPO, ChunkFork, FPO, Pairs, NFT])
def test_without_advantages_the_loss_is_the_weighted_pull(kind, moved):
    policies, records, losses = moved
    record, found = records[kind], {}
    for weight in (0.0, 1.0, 2.0):
        total, pull = 0.0, 0.0
        pieces = list(losses(kind(kl_weight=weight), record, torch.zeros(2, 2)))
        for loss, metrics in pieces:
            loss.backward()
            total, pull = total + loss.item(), pull + metrics.get("kl", 0.0) / len(pieces)
        gradient = torch.cat([p.grad.flatten() for p in policies.parameters().values()])
        found[weight] = (total, pull, gradient.clone())
        policies.model.zero_grad()
    if kind is not NFT:  # whose policy term is not zero at zero advantage, only its signal
        assert found[0.0][2].norm() == 0
        assert found[1.0][0] == pytest.approx(found[1.0][1], rel=1e-5) and found[1.0][1] > 0
    one, two = (found[w][2] - found[0.0][2] for w in (1.0, 2.0))
    assert one.norm() > 0 and (two - 2 * one).norm() < 1e-4 * two.norm()


@pytest.mark.parametrize("kind", [GRPO, ChunkFork, FPO, Pairs, NFT])
def test_each_branch_is_pulled_by_its_own_weight_and_all_are_counted(kind, moved):
    """(1/B) sum of gate times KL: two gates of one give two halves that add up to the pull of all."""
    policies, records, losses = moved
    objective = kind(kl_weight=1.0, anchors=2) if kind is ChunkFork else kind(kl_weight=1.0)
    found = {}
    for name, gates in (("all", None), ("none", [0.0, 0.0]), ("first", [1.0, 0.0]), ("second", [0.0, 1.0])):
        record = replace(records[kind], gates=None if gates is None else torch.tensor(gates))
        pull = 0.0
        for loss, metrics in losses(objective, record, torch.zeros(2, 2)):
            loss.backward()
            pull += metrics["pull"]
        gradient = torch.cat([p.grad.flatten() for p in policies.parameters().values()])
        found[name] = (pull, gradient.clone())
        policies.model.zero_grad()
    assert found["none"][0] == 0 < found["first"][0] and found["first"][0] != found["second"][0] > 0
    assert found["first"][0] + found["second"][0] == pytest.approx(found["all"][0], rel=1e-5)
    one, other, whole = (found[n][1] - found["none"][1] for n in ("first", "second", "all"))
    assert one.norm() > 0 and (one + other - whole).norm() < 1e-4 * whole.norm()


def test_of_a_fork_the_anchors_are_pulled_by_their_own_weights(moved):
    """With one anchor of two branches, one gate holds the whole pull and the other nothing."""
    _, records, losses = moved
    pulls = []
    for gates in (None, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])):
        record = replace(records[ChunkFork], gates=gates)
        pulls += [m["pull"] for _, m in losses(ChunkFork(kl_weight=1.0, anchors=1), record, torch.zeros(2, 2))]
    assert sorted(pulls[1:]) == [0, pulls[0]] and pulls[0] > 0


def test_later_chunks_count_more_where_that_is_asked(moved):
    _, records, losses = moved
    record, zero = records[GRPO], torch.zeros(2, 2)
    alike, shaped = (
        [loss.item() for loss, _ in losses(GRPO(kl_weight=1.0, chunk_shape=shape), record, zero)]
        for shape in (None, -1.0)
    )
    expected = chunk_weights([3, 3], -1.0).tolist()
    assert [b / a for a, b in zip(alike, shaped)] == pytest.approx(expected, rel=1e-5) and expected[0] != expected[1]


def test_chunks_before_the_first_trained_give_nothing(moved):
    _, records, losses = moved
    for kind in (GRPO, FPO):
        assert len(list(losses(kind(from_chunk=1), records[kind], torch.ones(2, 2)))) == 1
