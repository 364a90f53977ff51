"""The context is a value: only clean chunks enter it, forks are independent, the window drops what it says."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Window
from samplers.randomness import Key
from samplers.stream import draw_from, stream

CLOSE = dict(rtol=0, atol=1e-5)


def marked(start, stop, tokens=2):
    """A span whose keys and values hold their frame's index."""
    x = torch.arange(start, stop).float().repeat_interleave(tokens).view(1, -1, 1, 1)
    frames = x.expand(1, -1, 1, 2).contiguous()
    return Span(start, stop, (frames, frames + 0.5), (-frames, -frames - 0.5))


def held_after(window, chunks):
    context = window.start()
    for k in range(chunks):
        context = window.commit(context, marked(window.chunk * k, window.chunk * (k + 1)))
    return context


def past_of(model, window, randn, chunks=4, batch=1):
    """(denoiser, context after some clean chunks with the next condition in force)."""
    denoiser = Denoiser(model, window, Script(((0, randn(batch, 5, 8)),)))
    context = denoiser.enter(denoiser.start())
    for _ in range(chunks):
        context = denoiser.enter(denoiser.refresh(randn(batch, 3, 3, 4, 4), context))
    return denoiser, context


@pytest.mark.parametrize(
    ("window", "held"),
    [
        (Window(3, None, 0), tuple(range(15))),
        (Window(3, 12, 3), (0, 1, 2, 9, 10, 11, 12, 13, 14)),
        (Window(3, 6, 0), (12, 13, 14)),
        (Window(3, 6, 3), (0, 1, 2)),
        (Window(3, 3, 0), ()),
        (Window(3, 6, 1), (0, 13, 14)),
        (Window(3, 9, 4), (0, 1, 2, 3, 13, 14)),
        (Window(1, 4, 1), (0, 3, 4)),
        (Window(3, 5, 1), (0, 14)),
    ],
    ids=str,
)
def test_the_window_keeps_its_sinks_and_the_newest_frames_oldest_first(window, held):
    context = held_after(window, 5)
    assert context.held() == held


@pytest.mark.parametrize("window", [Window(3, 6, 1), Window(3, 9, 4), Window(3, 12, 3)], ids=str)
def test_kept_keys_and_values_are_those_of_the_frames_held(window):
    context = held_after(window, 5)
    for layer, (turned, values) in enumerate(context.view()):
        keys = turn(turned, tuple(-p for p in context.positions())).round(decimals=3)
        assert keys[0, ::2, 0, 0].tolist() == [f + layer / 2 for f in context.held()]
        assert values[0, ::2, 0, 0].tolist() == [-f - layer / 2 for f in context.held()]


@pytest.mark.parametrize("chunks", range(1, 5))
def test_a_window_that_is_not_full_keeps_everything(chunks):
    assert held_after(Window(3, 15, 3), chunks).held() == tuple(range(3 * chunks))


def test_positions_are_the_frames_own_or_end_right_before_the_chunk():
    assert held_after(Window(3, 9, 3, "absolute"), 4).positions() == (0, 1, 2, 9, 10, 11)
    assert held_after(Window(3, 9, 3, "adjacent"), 4).positions() == (6, 7, 8, 9, 10, 11)


def test_chunks_cover_the_frames_with_whole_chunks():
    assert Window(3, 12, 3).chunks(7) == [(0, 3), (3, 6), (6, 9)]


def test_keys_of_noisy_passes_never_enter_the_context(tiny, randn):
    denoiser, context = past_of(tiny(), Window(3, 12, 3), randn, chunks=1)
    clean = randn(1, 3, 3, 4, 4)
    with torch.no_grad():
        quiet = denoiser.refresh(clean, context)
        for t in (1.0, 0.5, 0.0):
            denoiser.denoise(randn(1, 3, 3, 4, 4), t, context)
        after = denoiser.refresh(clean, context)
    assert context.held() == (0, 1, 2) and after.held() == quiet.held()
    for a, b in zip(quiet.spans, after.spans):
        assert all(map(torch.equal, a.keys + a.values, b.keys + b.values))


def test_a_forward_without_write_gives_no_keys(tiny, randn):
    denoiser, context = past_of(tiny(), Window(3, 12, 3), randn, chunks=1)
    x, t = randn(1, 3, 3, 4, 4), torch.zeros(1)
    assert denoiser.model(x, t, context).span is None
    assert denoiser.model(x, t, context, write=True).span is not None


@pytest.mark.parametrize("positions", ["adjacent", "absolute"])
@torch.no_grad()
def test_shifting_all_positions_leaves_the_outputs_unchanged(positions, tiny, randn, moved):
    denoiser, context = past_of(tiny(), Window(3, 9, 3, positions), randn)
    x, later = randn(1, 3, 3, 4, 4), moved(context, 500)
    torch.testing.assert_close(denoiser.denoise(x, 0.7, later), denoiser.denoise(x, 0.7, context), **CLOSE)


@torch.no_grad()
def test_shifting_only_the_chunk_changes_the_output_when_positions_are_absolute(tiny, randn):
    denoiser, context = past_of(tiny(), Window(3, 9, 3, "absolute"), randn)
    x, later = randn(1, 3, 3, 4, 4), replace(context, position=context.position + 5)
    assert (denoiser.denoise(x, 0.7, later) - denoiser.denoise(x, 0.7, context)).abs().max() > 1e-4


@torch.no_grad()
def test_committing_on_one_fork_leaves_the_other_as_it_was(tiny, randn):
    denoiser, context = past_of(tiny(), Window(3, 9, 3), randn)
    x, held = randn(1, 3, 3, 4, 4), context.held()
    before = denoiser.denoise(x, 0.7, context)
    left = denoiser.enter(denoiser.refresh(randn(1, 3, 3, 4, 4), context))
    right = denoiser.enter(denoiser.refresh(randn(1, 3, 3, 4, 4), context))
    outputs = [denoiser.denoise(x, 0.7, fork) for fork in (left, right)]
    assert context.held() == held and torch.equal(denoiser.denoise(x, 0.7, context), before)
    assert not torch.allclose(*outputs) and not torch.allclose(outputs[0], before)


def test_a_fork_shares_the_memory_of_what_it_keeps():
    window = Window(3, 12, 3)
    context = held_after(window, 5)
    fork = window.commit(context, marked(15, 18))
    kept = [(a, b) for a in context.spans for b in fork.spans if a.start == b.start]
    assert len(kept) == 2
    assert all(a.keys[0].data_ptr() == b.keys[0].data_ptr() for a, b in kept)


def test_frames_that_left_leave_no_memory_behind():
    context = held_after(Window(3, 8, 1), 6)
    assert context.held() == (0, 14, 15, 16, 17)
    bytes_held = sum(x.untyped_storage().nbytes() for s in context.spans for x in (*s.keys, *s.values))
    assert bytes_held == sum(x.nbytes for s in context.spans for x in (*s.keys, *s.values))


def test_a_sink_and_the_newest_frame_of_one_span_stay_in_order():
    assert held_after(Window(3, 5, 1), 1).held() == (0, 2)


def test_keys_are_turned_once_for_all_steps_of_a_chunk():
    context = held_after(Window(3, 9, 3), 3)
    views = [context.condition(torch.zeros(1), None).view() for _ in range(4)]
    assert all(view is views[0] for view in views)


@pytest.mark.parametrize("chunks", [0, 3])
@torch.no_grad()
def test_stacked_copies_over_one_context_equal_separate_calls(chunks, tiny, randn):
    model = tiny()
    actions = torch.tensor([[1, 2, 3], [4, 5, 0]])
    _, context = past_of(model, Window(3, 9, 3), randn, chunks=chunks, batch=2)
    context = context.condition(context.text, actions)
    x, t = randn(3, 2, 3, 3, 4, 4), torch.tensor([[1.0, 0.9], [0.5, 0.4], [0.1, 0.0]])
    together = model(x.flatten(0, 1), t.flatten(), context).x0.view_as(x)
    for i in range(3):
        torch.testing.assert_close(together[i], model(x[i], t[i], context).x0, **CLOSE)


@torch.no_grad()
def test_rows_of_a_span_and_a_script_are_those_streams(randn, tiny):
    model, window = tiny(), Window(3, 9, 3)
    script = Script(((0, randn(3, 5, 8)),), torch.tensor([[1, 2, 3], [4, 5, 0], [2, 2, 2]]))
    clean, part = randn(3, 3, 3, 4, 4), slice(1, 2)
    whole, alone = Denoiser(model, window, script), Denoiser(model, window, script.rows(part))
    a = whole.refresh(clean, whole.enter(whole.start())).spans[0].rows(part)
    b = alone.refresh(clean[part], alone.enter(alone.start())).spans[0]
    for left, right in zip(a.keys + a.values, b.keys + b.values):
        torch.testing.assert_close(left, right, **CLOSE)


def test_a_script_switches_the_prompt_at_its_frame_and_has_no_action_past_its_end(randn):
    first, second = randn(1, 5, 8), randn(1, 5, 8)
    script = Script(((0, first), (6, second)), torch.tensor([[0, 3, 3, 4]]))
    assert [script.prompt_at(f)[1] is second for f in (0, 5, 6, 9)] == [False, False, True, True]
    assert script.actions_in(3, 6).tolist() == [[4, 0, 0]]
    assert script.actions_in(6, 9).tolist() == [[0, 0, 0]]


REFUSED = {
    "positions": (lambda: Window(positions="sideways"), ("sideways", "absolute", "adjacent")),
    "chunk": (lambda: Window(chunk=0), ("chunk=0", "sink=3")),
    "sink": (lambda: Window(sink=-2), ("chunk=3", "sink=-2")),
    "size": (lambda: Window(4, 8, 5), ("8", "sink 5", "chunk 4", "9")),
    "frames": (lambda: Window().chunks(0), ("frames", "not 0")),
    "commit": (lambda: Window().commit(Context(position=6), marked(3, 6)), ("3..5", "6")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_with_its_numbers(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("switch", [False, True])
def test_remembered_text_changes_nothing_and_is_computed_once_a_prompt(switch, tiny, randn, monkeypatch):
    model, texts = tiny(), [(0, randn(2, 5, 8)), (6, randn(2, 7, 8))]
    script = Script(tuple(texts[: 1 + switch]), torch.ones(2, 12, dtype=torch.long))
    draw = draw_from([Key(1), Key(2)], (3, 3, 4, 4))
    calls, project = [], model.condition_embedder.text_embedder.forward
    monkeypatch.setattr(model.condition_embedder.text_embedder, "forward", lambda x: calls.append(1) or project(x))

    def run(fixed):
        calls.clear()
        denoiser = Denoiser(model, Window(3, 6, 3), script, fixed=fixed)
        return torch.cat([c.latents for c in stream(denoiser, denoiser.window.chunks(12), (1.0, 0.5), draw)], 1)

    plain, asked = run(False), len(calls)
    assert torch.equal(plain, run(True)) and (asked, len(calls)) == (4 * 3, 1 + switch)


def test_remembered_text_is_never_used_with_gradient(tiny, randn):
    model = tiny()
    denoiser = Denoiser(model, Window(3, 6, 3), Script(((0, randn(1, 5, 8)),), None), fixed=True)
    context, x = denoiser.enter(denoiser.start()), randn(1, 3, 3, 4, 4)
    with torch.no_grad():
        denoiser.denoise(x, 0.5, context)
    key = model.blocks[0].attn2.to_k.weight
    with torch.no_grad():
        key += 1.0  # the weights did change: with gradient, the new ones must answer
    out = model(x, torch.tensor([0.5]), context).x0
    fresh = Denoiser(model, Window(3, 6, 3), denoiser.script)
    torch.testing.assert_close(out, model(x, torch.tensor([0.5]), fresh.enter(fresh.start())).x0)
    assert torch.autograd.grad(out.sum(), key)[0].abs().max() > 0
