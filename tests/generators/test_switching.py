"""Prompt switches: recaching against LongLive's own numbers and by identities, flush and cut by what they leave."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.sinks import ema
from arvideo_rl.generators.switching import CUT
from arvideo_rl.generators.window import Window
from arvideo_rl.objectives.record import walk
from samplers.schedule import warped_levels
from samplers.stream import stream

CLOSE = dict(rtol=0, atol=1e-5)
LEVELS = warped_levels((1000, 750, 500, 250), 5)
AT = 15


def roll(model, window, golden, frames=24):
    """Chunks of a stream under LongLive's two prompts, and the contexts its chunks entered with."""
    g, noise = golden("prompt_switch"), golden("rollouts")

    def draw(chunk, step, purpose):
        return (noise["noise"][:, 3 * chunk : 3 * chunk + 3] if purpose == "init"
                else noise["renoise"][3 * chunk + step - 1][None])  # fmt: skip

    denoiser, entered = Denoiser(model, window, Script(((0, g["text_A"]), (AT, g["text_B"])))), []

    class Seen:
        def __getattr__(self, name):
            return getattr(denoiser, name)

        def enter(self, context):
            entered.append(denoiser.enter(context))
            return entered[-1]

    return list(stream(Seen(), window.chunks(frames), LEVELS, draw)), entered


CASES = {
    "l9s3_globalsink": Window(3, 9, 3, "absolute", None, "recache_joint", True),
    "l9s3_noglobal": Window(3, 9, 3, "absolute", None, "recache_joint", False),
    "l9s0_noglobal": Window(3, 9, 0, "absolute", None, "recache_joint", False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_joint_recache_equals_longlive(name, golden, golden_wan):
    chunks, _ = roll(golden_wan, CASES[name], golden)
    torch.testing.assert_close(
        torch.cat([c.latents for c in chunks], 1), golden("prompt_switch")[f"{name}.latents"], **CLOSE
    )


@pytest.mark.parametrize(
    "name, frames", [("l9s3_globalsink", (0, 1, 2, *range(9, 15))), ("l9s3_noglobal", range(6, 15))]
)
def test_the_recached_keys_equal_longlives(name, frames, golden, golden_wan):
    """All nine of them: the window is widened by a chunk, so that what the next chunk cannot read is still there."""
    g = golden("prompt_switch")
    denoiser = Denoiser(golden_wan, replace(CASES[name], size=12), Script(((0, g["text_A"]), (AT, g["text_B"]))))
    _, entered = roll(golden_wan, CASES[name], golden, AT)
    chunks, _ = roll(golden_wan, CASES[name], golden, AT)
    context = replace(chunks[-1].context, recent=chunks[-1].context.recent[:, -9:])
    if name == "l9s3_globalsink":
        context = replace(context, recent=context.recent[:, -6:])
    context = denoiser.enter(context)
    assert context.held() == tuple(frames)
    keys = torch.cat([s.keys[1] for s in context.spans], 1)
    torch.testing.assert_close(turn(keys, tuple(frames)), g[f"{name}.kv_after_recache1.k"], **CLOSE)
    torch.testing.assert_close(
        torch.cat([s.values[1] for s in context.spans], 1), g[f"{name}.kv_after_recache1.v"], **CLOSE
    )


@pytest.mark.parametrize("positions", ["absolute", "adjacent"])
def test_a_causal_recache_is_a_stream_that_had_the_new_prompt_all_along(positions, golden, golden_wan):
    """Without sinks and before anything left the window, the recached past is what refreshing the same latents under
    the new prompt from the start gives."""
    g, window = golden("prompt_switch"), Window(3, 24, 0, positions, None, "recache", False)
    chunks, entered = roll(golden_wan, window, golden)
    latents = torch.cat([c.latents for c in chunks], 1)
    fresh = Denoiser(golden_wan, window, Script(((0, g["text_B"]),)))
    contexts = [c for *_, c in walk(fresh, latents, torch.no_grad)]
    a, b = entered[AT // 3], contexts[AT // 3]
    assert a.held() == b.held() == tuple(range(AT))
    for layer in range(2):
        torch.testing.assert_close(
            torch.cat([s.keys[layer] for s in a.spans], 1), torch.cat([s.keys[layer] for s in b.spans], 1), **CLOSE
        )


def test_causal_and_joint_recaches_differ_and_only_the_causal_one_is_causal(golden, golden_wan):
    found = {}
    for how in ("recache", "recache_joint"):
        window = Window(3, 9, 0, "absolute", None, how, False)
        chunks, entered = roll(golden_wan, window, golden, AT + 3)
        changed = replace(chunks[AT // 3 - 1].context)
        moved = changed.recent.clone()
        moved[:, -3:] += 0.5  # the newest recached chunk
        g = golden("prompt_switch")
        denoiser = Denoiser(golden_wan, window, Script(((0, g["text_A"]), (AT, g["text_B"]))))
        after = denoiser.enter(replace(changed, recent=moved))
        same = entered[AT // 3]
        first = slice(0, 24)  # tokens of the oldest frame held
        found[how] = (
            (torch.cat([s.keys[1] for s in after.spans], 1) - torch.cat([s.keys[1] for s in same.spans], 1))[:, first]
            .abs()
            .max()
        )
    assert found["recache"] < 1e-6 and found["recache_joint"] > 1e-3


def test_kept_sinks_are_the_first_prompts_and_new_ones_the_oldest_recached(golden, golden_wan):
    kept = roll(golden_wan, Window(3, 9, 3, "adjacent", None, "recache", True), golden)[1]
    new = roll(golden_wan, Window(3, 9, 3, "adjacent", None, "recache", False), golden)[1]
    assert kept[5].held() == (0, 1, 2, 12, 13, 14) and new[5].held() == (6, 7, 8, 12, 13, 14)
    assert torch.equal(kept[5].spans[0].keys[1], kept[4].spans[0].keys[1])
    assert kept[6].held() == (0, 1, 2, 15, 16, 17) and new[6].held() == (6, 7, 8, 15, 16, 17)


def test_flush_leaves_the_sinks_and_two_frames(golden, golden_wan):
    _, entered = roll(golden_wan, Window(3, 9, 1, "adjacent", None, "flush"), golden)
    assert entered[5].held() == (0, 13, 14) and entered[5].positions() == (12, 13, 14)
    assert entered[6].held() == (0, 13, 14, 15, 16, 17)


def test_a_cut_stands_far_off_for_one_chunk_only(golden, golden_wan):
    _, entered = roll(golden_wan, Window(3, 6, 1, "adjacent", None, "cut"), golden)
    gaps = [c.position - 1 - c.positions()[-1] for c in entered[1:]]
    assert gaps == [CUT if k == AT // 3 else 0 for k in range(1, 8)]
    assert 3 + CUT == 45  # three frames held, then the chunk: Infinity-RoPE's number


def test_keeping_the_past_changes_nothing_but_the_prompt(golden, golden_wan):
    chunks, entered = roll(golden_wan, Window(3, 9, 3, "absolute"), golden)
    assert entered[5].spans == chunks[4].context.spans and entered[5].recent is None


def test_an_update_recaches_as_the_stream_did(golden, golden_wan):
    g, window = golden("prompt_switch"), CASES["l9s3_noglobal"]
    chunks, entered = roll(golden_wan, window, golden)
    denoiser = Denoiser(golden_wan, window, Script(((0, g["text_A"]), (AT, g["text_B"]))))
    again = [c for *_, c in walk(denoiser, torch.cat([c.latents for c in chunks], 1), torch.no_grad)]
    for a, b in zip(entered, again):
        assert a.held() == b.held()
        for one, other in zip(a.spans, b.spans):
            torch.testing.assert_close(one.keys[1], other.keys[1], **CLOSE)
            assert not other.keys[1].requires_grad


@pytest.mark.parametrize("bad, words", [(dict(at_switch="forget"), "choose one of keep, recache"),
                                        (dict(at_switch="cut", positions="absolute"), "needs adjacent")])  # fmt: skip
def test_unknown_switches_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        Window(**(dict(chunk=3, size=9, sink=3) | bad))


@pytest.mark.parametrize("policy", [dict(fold=ema(0.9)), dict(linear=True)], ids=["ema", "linear"])
def test_what_has_been_taken_in_is_not_taken_in_again(policy):
    for how in ("recache", "recache_joint"):
        with pytest.raises(ValueError, match=f"at_switch {how} runs frames again .*; choose keep, flush or cut"):
            Window(3, 9, 3, at_switch=how, **policy)
    assert Window(3, 9, 3, at_switch="flush", **policy)


@pytest.mark.parametrize("how", ["recache", "recache_joint"])
@pytest.mark.parametrize(
    ("window", "at", "held"),
    [(Window(3, 12, 1), 6, range(6)), (Window(3, 12, 1), 9, range(9)), (Window(3, 12, 4), 9, range(9)),
     (Window(3, 12, 0, first_alone=True), 4, range(4))],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_a_recache_keeps_all_that_the_window_holds(how, window, at, held, tiny, randn):
    window = replace(window, at_switch=how)
    denoiser = Denoiser(tiny(), window, Script(((0, randn(1, 5, 8)), (at, randn(1, 5, 8)))))
    context = denoiser.start()
    for start, stop in window.chunks(at):
        context = denoiser.refresh(randn(1, stop - start, 3, 4, 4), denoiser.enter(context))
    assert denoiser.enter(context).held() == tuple(held)


@torch.no_grad()
def test_a_switch_inside_a_chunk_takes_effect_with_the_next(tiny, randn):
    calls = []

    def model(x, t, context, write=False):
        calls.append((context.position, write))
        return plain(x, t, context, write=write)

    plain, window = tiny(), Window(3, 12, 3, at_switch="recache")
    denoiser = Denoiser(model, window, Script(((0, randn(1, 5, 8)), (4, randn(1, 5, 8)))))
    context = denoiser.start()
    for start in (0, 3, 6, 9):
        calls.clear()
        context = denoiser.enter(context)
        assert bool(calls) == (start == 6)  # the first chunk that begins under the new prompt
        context = denoiser.refresh(randn(1, 3, 3, 4, 4), context)
