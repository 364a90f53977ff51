"""Sinks that change: the moving average of Reward-Forcing against its authors' numbers, adaptive sinks by hand."""

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.rope import place
from arvideo_rl.generators.sinks import adaptive, ema
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Window
from samplers.schedule import warped_levels
from samplers.stream import stream

CLOSE = dict(rtol=0, atol=1e-5)
LEVELS = warped_levels((1000, 750, 500, 250), 5)


def roll(model, window, g):
    def draw(chunk, step, purpose):
        return (
            g["noise"][:, 3 * chunk : 3 * chunk + 3] if purpose == "init" else g["renoise"][3 * chunk + step - 1][None]
        )

    denoiser = Denoiser(model, window, Script(((0, g["text"]),)))
    return list(stream(denoiser, window.chunks(24), LEVELS, draw))


@pytest.mark.parametrize("name, size, alpha", [("l6s3", 6, 0.999), ("l9s3", 9, 0.999), ("l9s3_a09", 9, 0.9)])
def test_moving_average_sinks_equal_the_official_ones(name, size, alpha, golden, golden_wan):
    window = Window(3, size, 3, "adjacent", ema(alpha))
    out = torch.cat([c.latents for c in roll(golden_wan, window, golden("rollouts"))], 1)
    torch.testing.assert_close(out, golden("ema_sinks")[f"{name}.latents"], **CLOSE)


def test_the_average_itself_equals_the_official_one(golden, golden_wan):
    g = golden("ema_sinks")
    chunks = roll(golden_wan, Window(3, 9, 3, "adjacent", ema(0.9)), golden("rollouts"))
    # theirs is folded by the chunk that makes the cache roll, ours when the one before is done
    for i, k in enumerate((1, 2, 7)):
        sinks = chunks[k - 1].context.spans[0].crop(0, 3)
        for layer in range(2):
            torch.testing.assert_close(sinks.keys[layer], place(g[f"l9s3_a09.sink{layer}.k"][i][None], 4, 6), **CLOSE)
            torch.testing.assert_close(sinks.values[layer][0], g[f"l9s3_a09.sink{layer}.v"][i], **CLOSE)
    assert not torch.equal(g["l9s3_a09.sink0.k"][1], g["l9s3_a09.sink0.k"][2])


def test_where_sink_and_chunk_differ_only_the_frames_before_the_first_roll_are_theirs(golden, golden_wan, roll_by_hand):
    """There the official code overwrites the sink; averaging goes on here: after n frames left, frame i of them, from
    1, has the weight (1 - alpha) alpha^(n - i) in the sink, and frame 0 alpha^n."""
    out = torch.cat([c.latents for c in roll(golden_wan, Window(3, 6, 1, "adjacent", ema(0.9)), golden("rollouts"))], 1)
    theirs = golden("ema_sinks")["l6s1.latents"]
    torch.testing.assert_close(out[:, :6], theirs[:, :6], **CLOSE)
    assert (out[:, 6:9] - theirs[:, 6:9]).abs().max() > 0.01

    def read(frames):
        if not frames:
            return []
        left = frames[: len(frames) - 2]  # frame 0 and all that the sink has taken in; the newest two are in the window
        n = len(left) - 1
        weights = [0.9**n] + [0.1 * 0.9 ** (n - i) for i in range(1, n + 1)]
        average = [
            tuple(sum(w * x for w, x in zip(weights, layer)) for layer in zip(*(getattr(f, kind) for f in left)))
            for kind in ("keys", "values")
        ]
        return [Span(0, 1, *average), *frames[-2:]]

    by_hand = roll_by_hand(golden_wan, golden("rollouts"), read, adjacent=True)
    torch.testing.assert_close(out, by_hand, **CLOSE)


def span(start, *frames):
    """A span with two tokens a frame whose entries are the frame's number."""
    x = torch.tensor(frames).float().repeat_interleave(2).view(1, -1, 1, 1).expand(1, -1, 1, 2).contiguous()
    return Span(start, start + len(frames), (x,), (-x,))


def values(s):
    return s.keys[0][0, ::2, 0, 0].tolist()


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_small_steps_are_not_rounded_away_in_bfloat16(in_place, tiny, randn):
    """At alpha .999 a bfloat16 sink would hardly move; it is kept in float32 and read in bfloat16."""
    model, window = tiny().bfloat16(), Window(3, 6, 3, "adjacent", ema(0.999))
    denoiser = Denoiser(model, window, Script(((0, randn(1, 5, 8).bfloat16()),)), in_place=in_place)
    context = denoiser.start()
    for k in range(5):
        x = randn(1, 3, 3, 4, 4).bfloat16()
        context = denoiser.refresh(x, denoiser.enter(context))
        first = context.sinks if in_place else context.spans[0]
        if k == 0:
            begun = first.values[0].float().clone()
    assert first.values[0].dtype == torch.float32
    moved, grid = (first.values[0] - begun).abs(), torch.finfo(torch.bfloat16).eps * begun.abs() / 2
    assert ((moved > 0) & (moved < grid)).float().mean() > 0.2  # smaller than a bfloat16 number could have changed by
    assert denoiser.denoise(x, 0.7, denoiser.enter(context)).dtype == torch.bfloat16


@pytest.mark.parametrize("sink, chunk", [(2, 2), (3, 2), (2, 3), (1, 3)])
def test_every_leaving_frame_is_folded_into_its_slot(sink, chunk):
    sinks, leaving = span(0, *range(sink)), span(sink, *(3.0 + i for i in range(chunk)))
    wanted = list(map(float, range(sink)))
    for i in range(chunk):  # the first to leave is frame ``sink``, whose slot is 0
        wanted[i % sink] = 0.5 * wanted[i % sink] + 0.5 * (3.0 + i)
    assert values(ema(0.5)(sinks, leaving, leaving)) == wanted
    assert values(ema(1.0)(sinks, leaving, leaving)) == values(sinks) == values(ema(0.5)(sinks, None, leaving))


def test_a_window_commits_with_its_fold():
    window = Window(2, 6, 2, "adjacent", ema(0.5))
    context = window.start()
    for k in range(4):
        context = window.commit(context, span(2 * k, 10.0 * k, 10.0 * k + 1))
    assert context.held() == (0, 1, 6, 7)
    # frames 2, 3 (10, 11) left after chunk 2, frames 4, 5 (20, 21) after chunk 3
    assert [v for s in context.spans for v in values(s)] == [12.5, 13.5, 30.0, 31.0]


def test_frames_that_leave_with_the_chunk_of_the_sinks_are_folded_too():
    window = Window(3, 4, 1, "adjacent", ema(0.5))
    context = window.commit(window.start(), span(0, 8.0, 4.0, 0.0))  # one sink, and no room for the two beside it
    assert context.held() == (0,) and values(context.spans[0]) == [((8 + 4) / 2 + 0) / 2]


def test_adaptive_sinks_are_replaced_one_by_one_where_they_are_unlike():
    def spun(start, *angles):
        a = torch.tensor(angles).view(1, -1, 1, 1)
        x = torch.cat([a.cos(), a.sin()], -1)
        return Span(start, start + len(angles), (x,), (x,))

    sinks, newest = spun(0, 0.0, 0.1), spun(8, 0.3, 2.5)
    out = adaptive(0.2)(sinks, None, newest)
    assert torch.equal(out.keys[0], torch.cat([sinks.keys[0][:, :1], newest.keys[0][:, 1:]], 1))
    assert torch.equal(adaptive(-1.0)(sinks, None, newest).keys[0], sinks.keys[0]) and (out.start, out.stop) == (0, 2)


@pytest.mark.parametrize("bad", [dict(sink=0), dict(size=None), dict(positions="absolute")])
def test_folding_needs_sinks_that_sit_next_to_the_window(bad):
    with pytest.raises(ValueError, match="sinks that change need"):
        Window(**(dict(chunk=3, size=9, sink=3, positions="adjacent", fold=ema(0.9)) | bad))
    with pytest.raises(ValueError, match="alpha=1.5"):
        ema(1.5)
