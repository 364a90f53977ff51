"""Activation checkpointing recomputes the same forward: same gradients, with and without a past."""

import pytest
import torch

from arvideo_rl.generators import transformer
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.window import Window


def context_of(model, chunks, randn):
    denoiser = Denoiser(model, Window(3, 6, 3), Script(((0, randn(2, 5, 8)),), torch.ones(2, 12, dtype=torch.long)))
    context = denoiser.enter(denoiser.start())
    for _ in range(chunks):
        with torch.no_grad():
            context = denoiser.enter(denoiser.refresh(randn(2, 3, 3, 4, 4), context))
    return context


def gradients(model, x, context):
    loss = model(x, torch.tensor([0.9, 0.4]), context).x0.square().mean()
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("chunks", [0, 3])
def test_gradients_with_and_without_checkpointing_are_equal(chunks, tiny, randn):
    model = tiny()
    context, x = context_of(model, chunks, randn), randn(2, 3, 3, 4, 4)
    plain = gradients(model, x, context)
    model.enable_gradient_checkpointing()
    again = gradients(model, x, context)
    for a, b in zip(plain, again):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_checkpointing_runs_every_block_twice(tiny, randn, monkeypatch):
    model, calls, block = tiny(), [], transformer._block
    monkeypatch.setattr(transformer, "_block", lambda *a, **k: calls.append(1) or block(*a, **k))
    context, x = context_of(model, 0, randn), randn(2, 3, 3, 4, 4)
    gradients(model, x, context)
    assert len(calls) == 2
    model.enable_gradient_checkpointing()
    gradients(model, x, context)
    assert len(calls) == 2 + 4


def test_every_parameter_gets_a_gradient(tiny, randn):
    model = tiny()
    context, x = context_of(model, 1, randn), randn(2, 3, 3, 4, 4)
    silent = [n for (n, _), g in zip(model.named_parameters(), gradients(model, x, context)) if g.abs().max() == 0]
    assert silent == []


def test_a_refresh_carries_no_gradient_into_the_context(tiny, randn):
    model = tiny()
    denoiser = Denoiser(model, Window(3, 6, 3), Script(((0, randn(2, 5, 8)),)))
    context = denoiser.refresh(randn(2, 3, 3, 4, 4), denoiser.enter(denoiser.start()))
    assert not any(k.requires_grad for span in context.spans for k in (*span.keys, *span.values))
