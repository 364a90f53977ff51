"""Krea's way: the past is run again before every chunk, and attention to it is weakened."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.window import Window
from samplers.randomness import Key
from samplers.stream import draw_from, stream

CLOSE = dict(rtol=0, atol=1e-5)
WINDOW = Window(3, 9, 0, recompute=True)


def counted(model):
    calls = []

    def run(x, t, context, **options):
        calls.append((float(t.max()), context.position, len(context.held())))
        return model(x, t, context, **options)

    return run, calls


@torch.no_grad()
def test_every_chunk_reads_the_newest_frames_as_a_stream_that_began_with_them(tiny, randn):
    model, text, latents = tiny(), randn(2, 5, 8), randn(2, 12, 3, 4, 4)
    x = randn(2, 3, 3, 4, 4)
    denoiser = Denoiser(model, WINDOW, Script(((0, text),)))
    context = denoiser.start()
    for start in range(0, 12, 3):
        context = denoiser.refresh(latents[:, start : start + 3], denoiser.enter(context))
    fresh = Denoiser(model, Window(3, None, 0), Script(((0, text),)))
    begun = fresh.start()
    for start in (6, 9):
        begun = fresh.refresh(latents[:, start : start + 3], fresh.enter(begun))
    entered = denoiser.enter(context)
    assert entered.held() == tuple(range(6, 12))
    torch.testing.assert_close(denoiser.denoise(x, 0.7, entered), fresh.denoise(x, 0.7, fresh.enter(begun)), **CLOSE)


@torch.no_grad()
def test_it_costs_the_past_once_a_chunk_and_no_refresh(tiny, randn):
    run, calls = counted(tiny())
    denoiser = Denoiser(run, WINDOW, Script(((0, randn(1, 5, 8)),)))
    list(stream(denoiser, WINDOW.chunks(12), (1.0, 0.5), draw_from([Key(1)], (3, 3, 4, 4))))
    clean = [(position, held) for t, position, held in calls if t == 0]
    assert clean == [(0, 0), (0, 0), (3, 3), (3, 0), (6, 3)]
    assert len(calls) - len(clean) == 8


@torch.no_grad()
def test_with_a_first_frame_of_its_own_nothing_is_lost(tiny, randn):
    window = Window(3, 9, 0, recompute=True, first_alone=True)
    denoiser = Denoiser(tiny(), window, Script(((0, randn(1, 5, 8)),)))
    context = denoiser.refresh(randn(1, 1, 3, 4, 4), denoiser.enter(denoiser.start()))
    assert denoiser.enter(context).held() == (0,)


@torch.no_grad()
def test_the_weight_of_the_past_goes_from_all_to_the_first_frame_alone(tiny, randn):
    denoiser, x = Denoiser(tiny(), Window(3, 9, 0), Script(((0, randn(1, 5, 8)),))), randn(1, 3, 3, 4, 4)
    context = denoiser.start()
    for _ in range(2):
        context = denoiser.refresh(randn(1, 3, 3, 4, 4), denoiser.enter(context))
    context = denoiser.enter(context)
    whole = denoiser.denoise(x, 0.7, context)
    weak, none = (denoiser.denoise(x, 0.7, replace(context, past_weight=w)) for w in (0.3, 1e-30))
    first = replace(context, spans=(context.spans[0].crop(0, 1),), gap=5, _rotated={})  # where it stood before
    torch.testing.assert_close(none, denoiser.denoise(x, 0.7, first), **CLOSE)
    assert (whole - weak).abs().max() > 1e-3 and (weak - none).abs().max() > 1e-3


def test_a_bias_multiplies_the_attention_weight(randn, tiny):
    context = Window(3, 9, 0, past_weight=0.3).start()
    assert context.bias(4, 3, randn(1)) is None
    denoiser = Denoiser(tiny(), Window(3, 9, 0, past_weight=0.3), Script(((0, randn(1, 5, 8)),)))
    with torch.no_grad():
        context = denoiser.refresh(randn(1, 3, 3, 4, 4), denoiser.enter(denoiser.start()))
    factors = context.bias(4, 3, randn(1)).exp().flatten()
    assert factors.tolist() == pytest.approx([1] * 4 + [0.3] * 8 + [1] * 12)


@pytest.mark.parametrize(
    "window", [dict(size=None), dict(sink=3), dict(at_switch="recache"), dict(compress=2)], ids=str
)
def test_what_does_not_go_together_is_refused(window):
    with pytest.raises(ValueError, match="recompute needs a window, no sinks"):
        Window(**{"chunk": 3, "size": 9, "sink": 0, "recompute": True} | window)
    with pytest.raises(ValueError, match=r"past_weight=0 must be above 0"):
        Window(3, 9, 0, past_weight=0)


@torch.no_grad()
def test_the_past_is_weakened_for_the_chunk_but_not_while_it_is_run_again(tiny, randn):
    model, text, latents, x = tiny(), randn(1, 5, 8), randn(1, 9, 3, 4, 4), randn(1, 3, 3, 4, 4)
    entered = {}
    for weight in (1.0, 0.3):
        denoiser = Denoiser(model, Window(3, 9, 0, recompute=True, past_weight=weight), Script(((0, text),)))
        context = denoiser.start()
        for start in (0, 3, 6):
            context = denoiser.refresh(latents[:, start : start + 3], denoiser.enter(context))
        entered[weight] = denoiser.enter(context)
    strong, weak = entered[1.0], entered[0.3]
    assert weak.past_weight == 0.3
    for a, b in zip(strong.spans, weak.spans):
        assert all(map(torch.equal, a.keys + a.values, b.keys + b.values))
    assert (denoiser.denoise(x, 0.7, weak) - denoiser.denoise(x, 0.7, strong)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("window", "chunks", "held"),
    [(Window(3, 8, 0, recompute=True), 4, (7, 8, 9, 10, 11)), (Window(3, 7, 0, recompute=True), 4, (8, 9, 10, 11)),
     (Window(3, 9, 0, recompute=True, first_alone=True), 2, (0, 1, 2, 3))],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_a_window_that_is_no_whole_chunks_loses_nothing(window, chunks, held, tiny, randn):
    run, calls = counted(tiny())
    denoiser = Denoiser(run, window, Script(((0, randn(1, 5, 8)),)))
    context = denoiser.start()
    for start, stop in window.chunks(3 * chunks)[:chunks]:
        context = denoiser.refresh(randn(1, stop - start, 3, 4, 4), denoiser.enter(context))
    calls.clear()
    assert denoiser.enter(context).held() == held
    odd = len(held) % 3  # the odd piece comes first, so that the chunks are those that were generated
    assert [position for _, position, _ in calls] == [held[0], *range(held[0] + odd, held[-1], 3)]
