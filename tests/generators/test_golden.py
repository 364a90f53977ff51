"""Streams, caches, predictions and gradients equal those of the official Wan, Self-Forcing and LongLive code."""

import pytest
import torch

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Window
from samplers.schedule import warped_levels
from samplers.stream import stream

CLOSE = dict(rtol=0, atol=1e-5)
LEVELS = warped_levels((1000, 750, 500, 250), 5)
ROLLOUTS = {
    "full.absolute": Window(3, None, 0, "absolute"),
    "l6s0.absolute": Window(3, 6, 0, "absolute"),
    "l6s3.absolute": Window(3, 6, 3, "absolute"),
    "l9s3.absolute": Window(3, 9, 3, "absolute"),
    "l6s3.adjacent": Window(3, 6, 3, "adjacent"),
    "l9s3.adjacent": Window(3, 9, 3, "adjacent"),
}


def roll(model, window, g):
    def draw(chunk, step, purpose):
        if purpose == "init":
            return g["noise"][:, 3 * chunk : 3 * chunk + 3]
        return g["renoise"][3 * chunk + step - 1][None]

    denoiser = Denoiser(model, window, Script(((0, g["text"]),)))
    return torch.cat([c.latents for c in stream(denoiser, window.chunks(24), LEVELS, draw)], 1)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_streaming_rollout_equals_the_official_one(name, golden, golden_wan):
    g = golden("rollouts")
    torch.testing.assert_close(roll(golden_wan, ROLLOUTS[name], g), g[name], **CLOSE)


def test_sinks_that_are_more_than_a_chunk_are_read_once_they_are_there(golden, golden_wan, roll_by_hand):
    """LongLive v1.0 attends to all sink slots from the start, empty ones too, and keeps their first, noisy keys: with 6
    sinks and chunks of 3 its very first frames are off, so there is no frame to agree on. Here a sink is an ordinary
    frame that stays: until the window is full it is full attention, and then the frames between sinks and window go."""
    g, window = golden("rollouts"), Window(3, 12, 6, "absolute")
    out = roll(golden_wan, window, g)
    torch.testing.assert_close(out[:, :12], g["full.absolute"][:, :12], **CLOSE)
    assert (out[:, 12:15] - g["full.absolute"][:, 12:15]).abs().max() > 0.01
    by_hand = roll_by_hand(golden_wan, g, lambda frames: frames[:6] + frames[6:][-3:])
    torch.testing.assert_close(out, by_hand, **CLOSE)


def test_the_official_first_chunk_with_more_sinks_than_a_chunk_reads_empty_slots(golden, golden_wan, roll_by_hand):
    """So the difference is that defect and nothing else: three slots of zeros, read in chunk 0, make it theirs."""
    g, empty = golden("rollouts"), (torch.zeros(1, 72, 4, 32),) * 2
    assert ((g["l12s6.first"] - g["full.absolute"][:, :3]).abs().amax((0, 2, 3, 4)) > 0.01).all()
    first = roll_by_hand(golden_wan, g, lambda frames: [Span(3, 6, empty, empty)], chunks=1)
    torch.testing.assert_close(first, g["l12s6.first"], **CLOSE)


def test_the_golden_rollouts_tell_every_policy_from_every_other(golden):
    g = golden("rollouts")
    assert all((g[a] - g[b]).abs().max() > 0.01 for a in ROLLOUTS for b in ROLLOUTS if a != b)


@pytest.fixture(scope="module")
def kv_run(golden, golden_wan):
    """Per chunk the noisy and the clean prediction, and the context after the last chunk."""
    g, window, seen = golden("kv_forward"), Window(3, None, 0, "absolute"), []
    context = window.start()
    with torch.no_grad():
        for c in range(3):
            context = context.condition(g["text"], None)
            noisy = golden_wan(g[f"chunk{c}.noisy"], g[f"chunk{c}.timestep"] / 1000, context)
            clean = golden_wan(g[f"chunk{c}.x0"], torch.zeros(2, 3), context, write=True)
            context = window.commit(context, clean.span)
            seen.append((noisy, clean))
    return seen, context


@pytest.mark.parametrize("chunk", range(3))
def test_noisy_and_clean_passes_over_the_cache_equal_the_official_ones(chunk, golden, kv_run):
    g, (noisy, clean) = golden("kv_forward"), kv_run[0][chunk]
    torch.testing.assert_close(noisy.v, g[f"chunk{chunk}.flow"], **CLOSE)
    torch.testing.assert_close(noisy.x0, g[f"chunk{chunk}.x0"], **CLOSE)
    torch.testing.assert_close(clean.v, g[f"chunk{chunk}.clean_pass_flow"], **CLOSE)


@pytest.mark.parametrize("layer", range(2))
def test_cached_keys_rotated_at_their_frames_equal_the_official_cache(layer, golden, kv_run):
    g, spans = golden("kv_forward"), kv_run[1].spans
    keys = turn(torch.cat([s.keys[layer] for s in spans], 1), tuple(range(9)))
    torch.testing.assert_close(keys[1:], g[f"kv{layer}.k"], **CLOSE)
    torch.testing.assert_close(torch.cat([s.values[layer] for s in spans], 1)[1:], g[f"kv{layer}.v"], **CLOSE)


def test_one_chunk_of_all_frames_equals_the_official_bidirectional_model(golden, golden_wan):
    g = golden("bidirectional")
    with torch.no_grad():
        out = golden_wan(g["hidden_states"].transpose(1, 2), g["timestep"] / 1000, Context(text=g["text"]))
    torch.testing.assert_close(out.v.transpose(1, 2), g["flow"], **CLOSE)
