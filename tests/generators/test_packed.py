"""The packed forward is the cached form: predictions and gradients, for every window it can express."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.packed import pack, packed_forward
from arvideo_rl.generators.sinks import ema
from arvideo_rl.generators.window import Window
from arvideo_rl.objectives.record import walk
from samplers.randomness import Key
from samplers.stream import draw_from

WINDOWS = {
    "unbounded": Window(3, None, 0), "rolling": Window(3, 6, 0), "sinks, absolute": Window(3, 9, 3, "absolute"),
    "sinks, adjacent": Window(3, 9, 3), "sinks of two frames": Window(3, 8, 2), "frame by frame": Window(1, 4, 1),
}  # fmt: skip
FRAMES = 15


@pytest.fixture
def asked(tiny, randn):
    """asked(window, copies) -> (model, denoiser, latents, states) of two videos of 15 frames, actions included."""

    def make(window, copies=1, skip=0):
        model = tiny()
        script = Script(((0, randn(2, 5, 8)),), torch.arange(2 * FRAMES).view(2, FRAMES) % 6)
        latents, bounds = randn(2, FRAMES, 3, 4, 4), window.chunks(FRAMES)
        states = {k: (randn(2 * copies, b - a, 3, 4, 4), torch.rand(2 * copies).clamp_min(0.1))
                  for k, (a, b) in enumerate(bounds) if k >= skip}  # fmt: skip
        return model, Denoiser(model, window, script), latents, states

    return make


def cached(model, denoiser, latents, states):
    """The same, chunk by chunk."""
    contexts = walk(denoiser, latents, nullcontext)
    return {k: model(*states[k], context).x0 for k, *_, context in contexts if k in states}


def close(one, other):
    return one.keys() == other.keys() and all((one[k] - other[k]).abs().max() < 1e-5 for k in one)


def gradient(model, chunks):
    """Of one number that all chunks decide."""
    model.zero_grad()
    sum((x * x.detach().cos()).sum() for x in chunks.values()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", WINDOWS)
def test_predictions_and_gradients_are_those_of_the_cached_form(name, asked):
    model, *rest = asked(WINDOWS[name])
    one, other = cached(model, *rest), packed_forward(model, *rest)
    assert close(one, other)
    a, b = gradient(model, one), gradient(model, other)
    assert (a - b).norm() < 1e-5 * a.norm()


def test_several_noisy_pieces_of_a_chunk_and_chunks_with_none(asked):
    model, *rest = asked(WINDOWS["sinks, adjacent"], copies=2, skip=2)
    one, other = cached(model, *rest), packed_forward(model, *rest)
    assert sorted(other) == [2, 3, 4] and len(other[2]) == 4 and close(one, other)


def test_noise_of_refreshing_is_mixed_in_as_in_the_cached_form(asked):
    model, denoiser, *rest = asked(WINDOWS["sinks, adjacent"])
    draw = draw_from([Key(1, branch=b) for b in range(2)], (3, 3, 4, 4))
    noisy = replace(denoiser, mix=lambda x0, start: 0.8 * x0 + 0.2 * draw(start // 3, 0, "refresh"))
    one, plain = cached(model, noisy, *rest), cached(model, denoiser, *rest)
    other = packed_forward(model, noisy, *rest)
    assert close(one, other)
    assert (one[2] - plain[2]).abs().max() > 1e-3


def test_gradient_through_the_past_changes_gradients_alone(asked):
    model, *rest = asked(WINDOWS["sinks, adjacent"])
    shut, through = packed_forward(model, *rest), packed_forward(model, *rest, gradient=True)
    assert all(torch.equal(shut[k], through[k]) for k in shut)
    a, b = gradient(model, shut), gradient(model, through)
    assert (a - b).norm() > 0.01 * a.norm()


def test_checkpointing_changes_nothing(asked):
    model, *rest = asked(WINDOWS["sinks, adjacent"])
    plain = gradient(model, packed_forward(model, *rest))
    model.enable_gradient_checkpointing()
    model.train()
    torch.testing.assert_close(gradient(model, packed_forward(model, *rest)), plain)


def test_the_layout_is_the_windows():
    packing = pack(Window(3, 9, 3), [0, 1, 0, 2])
    first, second, third, last = packing.places
    assert (first.noisy, first.clean, first.held) == ((), 0, ())
    assert (second.noisy, second.clean, second.held) == ((3,), 6, (0, 1, 2))
    assert (third.noisy, third.clean, third.held) == ((), 9, (0, 1, 2, 6, 7, 8)) and set(third.shifts) == {0}
    assert (last.noisy, last.clean, last.held) == ((12, 15), None, (0, 1, 2, 9, 10, 11))
    assert last.shifts == (3, 3, 3, 0, 0, 0)  # adjacent sinks have followed the frame that left
    assert packing.times == (0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 11, 9, 10, 11)


@pytest.mark.parametrize(
    ("window", "name"),
    [(Window(3, 9, 3, fold=ema(0.9)), "sinks that change"), (Window(3, 9, 3, compress=3), "compress"),
     (Window(3, 9, 3, linear=True), "linear"), (Window(3, 9, 0, recompute=True), "recompute"),
     (Window(3, 9, 3, past_weight=0.5), "past_weight")],
)  # fmt: skip
def test_windows_that_cannot_be_packed_are_refused(window, name):
    with pytest.raises(ValueError, match=f"a window with {name} cannot be packed"):
        pack(window, [1, 1])


def test_a_prompt_that_changes_is_refused(asked, randn):
    model, denoiser, *rest = asked(WINDOWS["rolling"])
    script = replace(denoiser.script, texts=(*denoiser.script.texts, (6, randn(2, 5, 8))))
    with pytest.raises(ValueError, match="whose prompt changes cannot be packed"):
        packed_forward(model, replace(denoiser, script=script), *rest)
