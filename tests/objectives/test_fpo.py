"""FPO: ratio one at the start, NFT's direction, and a clip that stops it."""

import pytest
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.objectives.fpo import FPO
from arvideo_rl.objectives.nft import NFT


def gradient(policies, pieces):
    for loss, _ in pieces:
        loss.backward()
    out = torch.cat([p.grad.flatten() for p in policies.parameters().values()])
    policies.model.zero_grad()
    return out


def test_the_ratio_is_one_at_the_start_and_moves_with_the_policy(alignable):
    _, policies, make, losses = alignable
    record = make(FPO(), frames=6)
    seen = [m for _, m in losses(FPO(), record, torch.randn(2, 2))]
    assert len(seen) == 2 and max(m["ratio_off"] for m in seen) == 0
    with torch.no_grad():
        for p in policies.parameters().values():
            p.add_(0.05)
    policies.old_is_current = False
    assert min(m["ratio_off"] for _, m in losses(FPO(kl_weight=1.0), record, torch.randn(2, 2))) > 1e-6


def test_at_the_start_it_is_minus_the_advantage_times_the_flow_loss(alignable):
    """Descent lowers the flow-matching loss of what was rewarded, as NFT's does: A grad l."""
    _, policies, make, losses = alignable
    record, adv = make(FPO(), frames=3, pivot=0), torch.tensor([[1.0], [0.0]])
    plus = gradient(policies, losses(FPO(draws=8), record, adv))
    minus = gradient(policies, losses(FPO(draws=8), record, -adv))
    torch.testing.assert_close(plus, -minus)
    optimizer = torch.optim.SGD(policies.parameters().values(), lr=0.05)
    ratios = []
    for _ in range(3):
        ((loss, metrics),) = losses(FPO(draws=8, clip=0.9), record, adv)
        loss.backward()
        ratios.append(metrics["ratio_max"])
        optimizer.step()
        optimizer.zero_grad()
        policies.old_is_current = False
    assert ratios[0] == 1 and ratios[1] > 1 and ratios[2] > ratios[1]
    nft = gradient(policies, losses(NFT(kl_weight=0.0, levels_per_chunk=4, weighting="astrolabe"), record, adv))
    cosine = torch.nn.functional.cosine_similarity(plus, nft, dim=0)
    assert cosine > 0.2  # other draws and weights of levels, the same direction


def test_past_the_clip_nothing_pulls(alignable):
    _, policies, make, losses = alignable
    record = make(FPO(), frames=3, pivot=0)
    with torch.no_grad():
        for p in policies.parameters().values():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    policies.old_is_current = False
    ((_, metrics),) = losses(FPO(clip=1e-6), record, torch.ones(2, 1))
    sign = 1.0 if metrics["ratio_min"] > 1 else -1.0
    if (metrics["ratio_min"] - 1) * (metrics["ratio_max"] - 1) > 0:
        assert gradient(policies, losses(FPO(clip=1e-6), record, sign * torch.ones(2, 1))).norm() == 0
    assert gradient(policies, losses(FPO(clip=1e-6), record, -sign * torch.ones(2, 1))).norm() > 0


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="draws=0"):
        FPO(draws=0)
    with pytest.raises(ConfigError, match="from_chunk=2 leaves no chunk to train"):
        FPO(from_chunk=2).check_chunks(2)
