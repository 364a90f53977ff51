"""The consistency transition and the forward process: means, spreads, dtypes."""

import pytest
import torch

from samplers.kernels import consistency, forward


def test_the_consistency_kernel_forgets_the_level_before(randn):
    x0 = randn(2, 3)
    mean, std = consistency(x0, 0.625)
    assert std == 0.625
    torch.testing.assert_close(mean, 0.375 * x0)


def test_the_consistency_kernel_is_a_point_at_level_0(randn):
    x0 = randn(2, 3)
    mean, std = consistency(x0, 0.0)
    assert std == 0 and torch.equal(mean, x0)


def test_the_consistency_kernel_works_in_float32(randn):
    x0 = randn(64).bfloat16()
    mean, _ = consistency(x0, 0.9375)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, 0.0625 * x0.float())


def test_the_kernel_draws_from_the_forward_process(randn):
    x0, noise = randn(2, 3), randn(2, 3)
    mean, std = consistency(x0, 0.4)
    torch.testing.assert_close(mean + std * noise, forward(x0, noise, 0.4))


@pytest.mark.parametrize(("t", "which"), [(0.0, "x0"), (1.0, "noise")])
def test_the_forward_process_starts_at_the_clip_and_ends_at_the_noise(t, which, randn):
    ends = {"x0": randn(2, 3), "noise": randn(2, 3)}
    assert torch.equal(forward(**ends, t=t), ends[which])


def test_the_forward_process_takes_a_level_per_row(randn):
    x0, noise, t = randn(2, 3), randn(2, 3), torch.tensor([[0.25], [0.5]])
    out = forward(x0, noise, t)
    for i in range(2):
        torch.testing.assert_close(out[i], (1 - t[i]) * x0[i] + t[i] * noise[i])
