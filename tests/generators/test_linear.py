"""The linear state holds exactly what left the window, at one size, and is read as Hybrid Forcing reads it."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.linear import CAP, fold, place_of, read
from arvideo_rl.generators.names import to_diffusers, to_official
from arvideo_rl.generators.rope import place, rotate, rotation, turn
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.weights import recognise
from arvideo_rl.generators.window import Window

CLOSE = dict(rtol=0, atol=1e-5)
CPU = torch.device("cpu")
WINDOW = Window(3, 9, 3, linear=True)


def stream_on(denoiser, chunks, seed=5):
    source = torch.Generator().manual_seed(seed)
    context = denoiser.enter(denoiser.start())
    for _ in range(chunks):
        x = torch.randn(2, 3, 3, 4, 4, generator=source)
        context = denoiser.enter(denoiser.refresh(x, context))
    return context


@pytest.fixture
def trained(tiny):
    """A tiny Wan whose W_lin is not zero."""
    model = tiny(linear_state=True)
    source = torch.Generator().manual_seed(2)
    for block in model.blocks:
        for p in block.attn1.linear_proj.parameters():
            p.data = torch.randn(p.shape, generator=source)
    return model


def test_the_state_is_the_mean_over_everything_folded(randn):
    raw, values = [randn(2, 12, 2, 24) for _ in range(3)], [randn(2, 12, 2, 24) for _ in range(3)]
    state, relu, outer = None, 0, 0
    for i, (k, v) in enumerate(zip(raw, values)):
        position = 9 + 3 * i
        leaving = Span(3 + 3 * i, 6 + 3 * i, (place(k, 2, 2),), (v,), (k.relu().unflatten(1, (3, 4)).sum(2),))
        state = fold(state, leaving, position)
        places = tuple(range(place_of(position) - 6, place_of(position) - 3))
        relu = relu + k.relu().sum(1)
        outer = outer + torch.einsum("btnd,btne->bnde", rotate(k, rotation(places, 2, 2, 24, CPU)), v)
    assert state.count == 36
    torch.testing.assert_close(state.relu[0], relu / 36, **CLOSE)
    torch.testing.assert_close(state.kv[0], outer / 36, **CLOSE)


def test_reading_is_a_sum_over_keys_without_a_softmax(randn):
    q, k, v = randn(1, 5, 2, 24), randn(1, 7, 2, 24), randn(1, 7, 2, 24)
    found = read(q, q, k.relu().mean(1), torch.einsum("btnd,btne->bnde", k, v) / 7)
    weights = torch.einsum("bqnd,bknd->bnqk", q, k) / 7
    mass = torch.einsum("bqnd,bnd->bqn", q.relu(), k.relu().mean(1)) + 1e-6
    torch.testing.assert_close(
        found, torch.einsum("bnqk,bknd->bqnd", weights, v) / mass[..., None], rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_untrained_it_is_the_plain_window_and_trained_it_is_not(tiny, trained, randn):
    x = randn(2, 3, 3, 4, 4)
    text = randn(2, 5, 8)
    outputs = []
    for model, window in (
        (tiny(), replace(WINDOW, linear=False)),
        (tiny(linear_state=True), WINDOW),
        (trained, WINDOW),
    ):
        denoiser = Denoiser(model, window, Script(((0, text),)))
        outputs.append(denoiser.denoise(x, 0.7, stream_on(denoiser, 5)))
    torch.testing.assert_close(outputs[0], outputs[1], **CLOSE)
    assert (outputs[2] - outputs[0]).abs().max() > 1e-2


@torch.no_grad()
def test_frames_that_left_change_the_output_only_through_the_state(trained, randn):
    text, x = randn(2, 5, 8), randn(2, 3, 3, 4, 4)
    denoiser = Denoiser(trained, WINDOW, Script(((0, text),)))
    context = stream_on(denoiser, 6)
    other = replace(context, linear=stream_on(denoiser, 6, seed=8).linear)
    without = replace(context, linear=None)
    a, b, c = (denoiser.denoise(x, 0.7, one) for one in (context, other, without))
    assert (a - b).abs().max() > 1e-3 and (a - c).abs().max() > 1e-3


@torch.no_grad()
def test_it_has_one_size_and_folds_each_frame_once(trained, randn):
    denoiser = Denoiser(trained, WINDOW, Script(((0, randn(2, 5, 8)),)))
    for chunks in (4, 9):
        context = stream_on(denoiser, chunks)
        assert context.held() == (0, 1, 2, *range(3 * chunks - 3, 3 * chunks))
        assert context.linear.count == (3 * chunks - 6) * 4
        assert [x.shape for x in (context.linear.relu[0], context.linear.kv[0])] == [(2, 2, 24), (2, 2, 24, 24)]


@torch.no_grad()
def test_past_the_cap_only_distances_count(trained, randn, moved):
    denoiser = Denoiser(trained, WINDOW, Script(((0, randn(2, 5, 8)),)))
    context, x = stream_on(denoiser, CAP // 3 + 1), randn(2, 3, 3, 4, 4)
    torch.testing.assert_close(
        denoiser.denoise(x, 0.7, moved(context, 500)), denoiser.denoise(x, 0.7, context), **CLOSE
    )


@torch.no_grad()
def test_stacked_copies_read_the_state_of_their_own_row(trained, randn):
    denoiser = Denoiser(trained, WINDOW, Script(((0, randn(2, 5, 8)),)))
    context, x = stream_on(denoiser, 5), randn(2, 2, 3, 3, 4, 4)
    together = trained(x.flatten(0, 1), torch.full((4,), 0.5), context).x0.view_as(x)
    for i in range(2):
        torch.testing.assert_close(together[i], trained(x[i], torch.full((2,), 0.5), context).x0, **CLOSE)


def test_weights_without_it_are_refused(tiny, randn):
    denoiser = Denoiser(tiny(), WINDOW, Script(((0, randn(2, 5, 8)),)))
    with pytest.raises(ValueError, match="no linear_proj to read it with"), torch.no_grad():
        stream_on(denoiser, 4)
        denoiser.denoise(randn(2, 3, 3, 4, 4), 0.7, stream_on(denoiser, 4))


def test_its_weights_have_an_official_name_and_are_recognised(trained):
    name = "blocks.1.self_attn.linear_proj.weight"
    assert to_diffusers(name) == "blocks.1.attn1.linear_proj.weight" and to_official(to_diffusers(name)) == name
    assert recognise(trained.state_dict(), head_dim=24)["linear_state"]


@torch.no_grad()
def test_a_stream_folds_what_leaves_at_its_distance_from_the_next_chunk(trained, randn):
    denoiser = Denoiser(trained, WINDOW, Script(((0, randn(2, 5, 8)),)))
    context, kv, count = denoiser.enter(denoiser.start()), 0, 0
    for k in range(9):
        after = denoiser.enter(denoiser.refresh(randn(2, 3, 3, 4, 4), context))
        start = 3 * k - 3  # the chunk that leaves when chunk k is done, the window having room for one past chunk
        if start >= 3:
            (gone,) = [s for s in context.spans if s.start == start]
            position = 3 * k + 3
            place_of_gone = min(position, CAP) - (position - start)
            keys = turn(gone.keys[1], tuple(range(place_of_gone, place_of_gone + 3)))
            kv, count = kv + torch.einsum("btnd,btne->bnde", keys, gone.values[1]), count + 12
        context = after
    torch.testing.assert_close(context.linear.kv[1], kv / count, **CLOSE)
