"""A ring streams what contexts stream, whatever the policy, and allocates nothing on the way."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.ring import Ring
from arvideo_rl.generators.sinks import adaptive, ema
from arvideo_rl.generators.window import Window
from samplers.randomness import Key
from samplers.stream import draw_from, given, stream

LEVELS, SHAPE = (1.0, 0.5), (3, 3, 4, 4)
WINDOWS = {
    "no sinks": Window(3, 9, 0),
    "absolute": Window(3, 9, 3, "absolute"),
    "adjacent": Window(3, 9, 3),
    "more sinks than a chunk": Window(3, 10, 5),
    "fewer": Window(3, 8, 1),
    "no recent frames": Window(3, 6, 3),
    "framewise": Window(1, 4, 1),
    "first alone": Window(3, 9, 3, first_alone=True),
    "sinks of odd size": Window(2, 7, 3),
    "ema": Window(3, 9, 3, fold=ema(0.5)),
    "ema that begins with the first chunk": Window(3, 4, 1, fold=ema(0.5)),
    "ema of one": Window(3, 8, 1, fold=ema(0.5)),
    "adaptive": Window(3, 9, 3, fold=adaptive(0.9)),
    **{how: Window(3, 9, 3, at_switch=how) for how in ("recache", "recache_joint", "flush", "cut")},
    "recache of all": Window(3, 9, 3, at_switch="recache", keep_sinks=False),
    "flush absolute": Window(3, 9, 3, "absolute", at_switch="flush"),
}


def run(model, window, script, frames, in_place, context=None, start=0):
    draw = draw_from([Key(1), Key(2)], (window.chunk, *SHAPE[1:]))
    denoiser = Denoiser(model, window, script, fixed=True, in_place=in_place)
    chunks = [c for c in window.chunks(frames) if c[0] >= start]
    return list(stream(denoiser, chunks, LEVELS, draw, context=context))


def video(chunks):
    return torch.cat([c.latents for c in chunks], 1)


@pytest.fixture
def script(randn):
    return Script(((0, randn(2, 5, 8)), (12, randn(2, 5, 8))), torch.arange(2 * 30).view(2, 30) % 6)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_ring_streams_what_contexts_stream(name, tiny, script):
    window = WINDOWS[name]
    if name == "first alone":
        script = replace(script, texts=(script.texts[0], (13, script.texts[1][1])))
    ours, theirs = (run(tiny(), window, script, 24, in_place) for in_place in (True, False))
    torch.testing.assert_close(video(ours), video(theirs), rtol=0, atol=2e-5)
    ring, context = ours[-1].context, theirs[-1].context
    assert isinstance(ring, Ring) and ring.held() == context.held()
    for a, b in zip(ring.context().view(), context.view()):
        torch.testing.assert_close(tuple(a), tuple(b), rtol=0, atol=2e-5)


def test_the_buffers_are_made_once(tiny, script):
    window = WINDOWS["ema"]
    seen = []
    for chunk in stream(Denoiser(tiny(), window, script, fixed=True, in_place=True), window.chunks(30), LEVELS,
                        draw_from([Key(1), Key(2)], SHAPE)):  # fmt: skip
        seen.append([x.data_ptr() for x in (*chunk.context.keys, *chunk.context.values)])
    assert len(seen) == 10 and all(s == seen[0] for s in seen)


@pytest.mark.parametrize("name", ["adjacent", "ema", "flush"])
def test_a_ring_takes_over_a_context_and_gives_it_back(name, tiny, script, randn):
    window, model = WINDOWS[name], tiny()
    past = randn(2, 9, 3, 4, 4)
    begun = given(Denoiser(model, window, script), past, window.chunks(9))
    a, b = (run(model, window, script, 21, in_place, begun, 9) for in_place in (True, False))
    torch.testing.assert_close(video(a), video(b), rtol=0, atol=2e-5)
    again = [
        run(model, window, script, 27, False, c[-1].context.context() if c is a else c[-1].context, 21) for c in (a, b)
    ]
    torch.testing.assert_close(video(again[0]), video(again[1]), rtol=0, atol=2e-5)


def test_what_a_ring_cannot_do_is_refused_or_streamed_with_contexts(tiny, script):
    with pytest.raises(ValueError, match="an unbounded window cannot be kept in a ring"):
        Ring(Window(3, None, 0), Window(3, None, 0).start())
    chunks = run(tiny(), Window(3, 11, 3, compress=2), script, 12, True)
    assert not isinstance(chunks[-1].context, Ring)
    denoiser = Denoiser(tiny(), WINDOWS["adjacent"], script, in_place=True)
    with pytest.raises(RuntimeError, match="no gradients"):
        denoiser.denoise(torch.zeros(2, *SHAPE), 0.5, denoiser.enter(denoiser.start()))


@torch.no_grad()
def test_a_ring_takes_over_averaged_sinks_in_bfloat16(tiny, script, randn):
    """They are float32 while everything else is bfloat16; the buffers are what the network makes."""
    model, window = tiny().bfloat16(), WINDOWS["ema"]
    script = Script(tuple((f, t.bfloat16()) for f, t in script.texts), script.actions)
    begun = given(Denoiser(model, window, script), randn(2, 12, 3, 4, 4).bfloat16(), window.chunks(12))
    draw, seen = draw_from([Key(1), Key(2)], SHAPE), []
    for in_place in (True, False):
        denoiser = Denoiser(model, window, script, in_place=in_place)
        chunks = [c for c in window.chunks(24) if c[0] >= 12]
        out = list(stream(denoiser, chunks, LEVELS, lambda *a: draw(*a).bfloat16(), context=begun))
        seen.append(video(out).float())
    assert begun.spans[0].keys[0].dtype == torch.float32 and out[-1].context.spans[0].keys[0].dtype == torch.float32
    assert (seen[0] - seen[1]).norm() < 0.02 * seen[1].norm()
