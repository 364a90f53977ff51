"""The chunk fork: its ratio at the start, where a step goes, what it trains. The loss itself: test_neighbour.py."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.objectives.chunk_fork import ChunkFork


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_moves_the_chunk_towards_the_neighbour_that_was_rewarded(sign, alignable):
    _, policies, make, losses = alignable
    objective = ChunkFork(anchors=3, clip=1.0)
    record, adv = make(objective, branches=4, frames=9, pivot=1), torch.zeros(4, 3)
    adv[2] = sign
    optimizer = torch.optim.SGD(policies.parameters().values(), lr=0.1)
    seen = []
    for _ in range(4):
        ((loss, metrics),) = losses(objective, record, adv)
        seen.append((loss.item(), metrics))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0][0] == pytest.approx(-sign / 4, abs=1e-5)  # -mean rho A over four branches, rho = 1
    assert seen[0][1]["ratio_off"] < 1e-5 and seen[0][1]["x0_moved"] < 1e-9
    assert seen[0][0] > seen[1][0] > seen[2][0] > seen[3][0] and seen[3][1]["x0_moved"] > 1e-9


def test_it_trains_one_chunk_of_one_group(alignable):
    generator, policies, make, losses = alignable
    record = make(ChunkFork(), branches=3, frames=9, pivot=2)
    ((_, metrics),) = losses(ChunkFork(kl_weight=1.0), record, torch.randn(3, 3))
    assert metrics["pivot"] == 2 and metrics["kl"] < 1e-9 and 0 < metrics["entropy"] < 1.1
    with pytest.raises(ValueError, match="group by group"):
        next(losses(ChunkFork(), replace(record, groups=torch.tensor([0, 0, 1])), torch.randn(3, 3)))


def test_bad_options_are_refused():
    for options, message in ((dict(sigma=0), "sigma=0"), (dict(anchors=0), "anchors=0"), (dict(tau=0), "tau=0"),
                             (dict(credit="clip"), "credit=clip")):  # fmt: skip
        with pytest.raises((ConfigError, ValueError), match=message):
            ChunkFork(**options)
    with pytest.raises(ConfigError, match="from_chunk=4 leaves no chunk to train: a rollout has 4"):
        ChunkFork(from_chunk=4).check_chunks(4)
