"""Of what leaves the window, the tokens that recent queries attend to most stay."""

import pytest
import torch

from arvideo_rl.generators import window as window_module
from arvideo_rl.generators.compression import LOOKS, compress
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.rope import place, rotate, rotation, turn
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Window

CLOSE = dict(rtol=0, atol=1e-5)
CPU = torch.device("cpu")


def past_of(model, window, randn, chunks):
    denoiser = Denoiser(model, window, Script(((0, randn(2, 5, 8)),)))
    context = denoiser.enter(denoiser.start())
    for _ in range(chunks):
        context = denoiser.enter(denoiser.refresh(randn(2, 3, 3, 4, 4), context))
    return denoiser, context


def test_the_tokens_kept_are_those_with_the_largest_sum_of_query_times_key(randn):
    raw, queries = randn(2, 16, 2, 24), randn(2, 12, 2, 24)  # 4 frames leave, 3 are new, 2 x 2 tokens each
    values = randn(2, 16, 2, 24)
    turned = rotate(queries, rotation((9, 10, 11), 2, 2, 24, CPU))
    leaving = Span(3, 7, (place(raw, 2, 2),), (values,))
    kept = compress(leaving, [turned.unflatten(1, (3, 4)).sum(2)], 2)
    keys = rotate(raw, rotation((3, 4, 5, 6), 2, 2, 24, CPU))
    phi = torch.einsum("bqnd,bknd->bk", turned, keys)
    for row in range(2):
        best = phi[row].argsort(descending=True)[:8].sort().values
        assert torch.equal(kept.values[0][row], values[row, best])
        assert torch.equal(kept.keys[0][row], leaving.keys[0][row, best])
    assert (kept.start, kept.stop) == (5, 7)


@torch.no_grad()
def test_a_stream_chooses_by_the_rotated_queries_of_its_newest_frames(tiny, randn, monkeypatch):
    """The queries are taken from the attention of the clean passes themselves, and the choice is made again by hand."""
    model, window, asked, queries = tiny(), Window(3, 15, 2, compress=2), [], []
    choose = window_module.compress

    def spy(leaving, looking, frames):
        asked.append((leaving, looking, choose(leaving, looking, frames)))
        return asked[-1][-1]

    monkeypatch.setattr(window_module, "compress", spy)
    hook = model.blocks[1].attn1.norm_q.register_forward_hook(lambda m, i, out: queries.append(out))
    past_of(model, window, randn, 6)
    hook.remove()
    leaving, looking, kept = asked[-1]
    newest = torch.cat([q.unflatten(-1, (2, 24)) for q in queries[-2:]], 1)  # frames 12 to 17
    turned = rotate(newest, rotation(tuple(range(12, 18)), 2, 2, 24, CPU)).unflatten(1, (6, 4)).sum(2)[:, -LOOKS:]
    torch.testing.assert_close(looking[1], turned, **CLOSE)
    assert LOOKS == 4 and leaving.stop - leaving.start > 2
    keys = turn(leaving.keys[1], tuple(range(leaving.start, leaving.stop)))
    phi = torch.einsum("bfnd,bknd->bk", turned, keys)
    for row in range(2):
        best = phi[row].argsort(descending=True)[:8].sort().values
        assert torch.equal(kept.keys[1][row], leaving.keys[1][row, best])


def test_what_fits_stays_as_it_is(randn):
    leaving = Span(3, 5, (randn(1, 8, 2, 24),), (randn(1, 8, 2, 24),))
    assert compress(leaving, [], 2) is leaving


@torch.no_grad()
def test_until_tokens_are_dropped_it_is_the_plain_window(tiny, randn):
    model, x = tiny(), randn(2, 3, 3, 4, 4)
    outputs = []
    source = torch.Generator()
    for window in (Window(3, 15, 3, compress=3), Window(3, 15, 3)):
        source.manual_seed(5)
        denoiser, context = past_of(model, window, lambda *s: torch.randn(*s, generator=source), 4)
        outputs.append(denoiser.denoise(x, 0.7, context))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_cache_keeps_its_size_and_its_place(tiny, randn):
    window = Window(3, 11, 3, compress=2)
    for chunks in (5, 9):
        _, context = past_of(tiny(), window, randn, chunks)
        assert [s.keys[0].shape[1] // 4 for s in context.spans] == [3, 2, 3]
        assert context.positions() == tuple(range(3 * chunks - 8, 3 * chunks))


@torch.no_grad()
def test_shifting_all_positions_leaves_the_outputs_unchanged(tiny, randn, moved):
    denoiser, context = past_of(tiny(), Window(3, 11, 3, compress=2), randn, 6)
    x = randn(2, 3, 3, 4, 4)
    torch.testing.assert_close(
        denoiser.denoise(x, 0.7, moved(context, 500)), denoiser.denoise(x, 0.7, context), **CLOSE
    )


def test_it_needs_room_and_a_window():
    with pytest.raises(
        ValueError, match=r"window of 7 frames cannot hold sink 3 \+ compress 2 \+ chunk 3; set window to 8"
    ):
        Window(3, 7, 3, compress=2)
    with pytest.raises(ValueError, match="compress needs a window and adjacent positions, not None"):
        Window(3, None, 3, compress=2)
    with pytest.raises(ValueError, match="choose one of them"):
        Window(3, 12, 3, compress=2, linear=True)
