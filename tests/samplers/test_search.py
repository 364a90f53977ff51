"""Search: what it costs, whom it keeps, what the judge sees, and that a winner streams again without a search."""

import math
from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.window import Window
from samplers.plan import KINDS, Plan, cost
from samplers.randomness import Key
from samplers.search import branch_noise, draw_branches, search
from samplers.stream import draw_from, given, stream

LEVELS = (1.0, 0.8, 0.4)
SHAPE = (3, 3, 4, 4)
WINDOW = Window(3, 9, 3)
CHUNKS = WINDOW.chunks(12)
NOISE = branch_noise(Key(1, 0, 4), SHAPE)


def brightest(latents, first):
    """A judge that likes what is large in the newest frame."""
    return latents[:, -1].mean((1, 2, 3))


class Echo:
    """A denoiser that predicts its input, so that a chunk of noise ``branch`` is ``branch`` everywhere; it notes what
    goes through it."""

    def __init__(self):
        self.rows, self.read = [], []

    def start(self):
        return ()

    def enter(self, context, stop=None):
        return context

    def denoise(self, x, t, context):
        self.rows.append(len(x))
        self.read.append(context)
        return x

    def refresh(self, x0, context):
        self.rows.append(len(x0))
        return (*context, x0.flatten()[0].item())


def plain_numbers(branches, chunk, step, purpose):
    """Noise that is the branch's own number."""
    return torch.tensor(branches, dtype=torch.float32).view(-1, 1, 1, 1, 1).expand(-1, *SHAPE)


def echo(judge, plan, **more):
    return search(Echo(), CHUNKS, LEVELS, plain_numbers, judge, plan, **more)


@pytest.fixture
def make(tiny, randn):
    """The denoiser of a small network with a prompt, actions, and a switch of the prompt on the way."""
    model, texts = tiny(), ((0, randn(1, 5, 8)), (6, randn(1, 5, 8)))
    script = Script(texts, torch.arange(12)[None] % 6)
    return lambda window=WINDOW: Denoiser(model, window, script)


@pytest.mark.parametrize("to_continue", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_known_beforehand(kind, to_continue):
    plan, denoiser, judged = Plan(kind, 5, 3), Echo(), []

    def judge(x, first):
        judged.append(len(x))
        return brightest(x, first)

    found = search(denoiser, CHUNKS, LEVELS, plain_numbers, judge, plan, to_continue=to_continue)
    expected = cost(plan, len(CHUNKS), len(LEVELS), to_continue)
    assert (sum(denoiser.rows), sum(judged)) == (expected.forwards, expected.scores)
    assert found.cost == expected and len(found.nodes) == expected.scores


def test_the_costs_of_four_chunks_in_three_levels_by_hand():
    """The formulas of the table, each with its last refresh."""
    found = {kind: cost(Plan(kind, 5, 3), 4, 3, to_continue=True) for kind in KINDS}
    assert {k: (c.forwards, c.scores) for k, c in found.items()} == {
        "best": (80, 5), "first": (16 + 12, 5), "greedy": (64, 20), "path": (48, 40), "beam": (192, 60),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_candidate_is_plain_streaming_to_the_bit(kind, make):
    key = Key(1, 0, 4)
    found = search(make(), CHUNKS, LEVELS, NOISE, brightest, Plan(kind, 1, 1), frames=11)
    plain = stream(make(), CHUNKS, LEVELS, draw_from([key], SHAPE), frames=11)
    assert torch.equal(found.latents, torch.cat([c.latents for c in plain], 1)) and found.latents.shape[1] == 11


def test_greedy_is_a_beam_of_one(make):
    greedy, beam = (search(make(), CHUNKS, LEVELS, NOISE, brightest, Plan(k, 4, 1)) for k in ("greedy", "beam"))
    assert torch.equal(greedy.latents, beam.latents) and greedy.nodes == beam.nodes and greedy.cost == beam.cost


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_branches_of_the_winner_stream_it_again_without_a_search(kind, batch, make):
    """To the bit where candidates were denoised one by one."""
    found = search(make(), CHUNKS, LEVELS, NOISE, brightest, Plan(kind, 4, 2, batch=batch))
    again = torch.cat([c.latents for c in stream(make(), CHUNKS, LEVELS, draw_branches(NOISE, found.branches))], 1)
    torch.testing.assert_close(found.latents, again, rtol=0, atol=1e-5 if batch == 0 and kind != "best" else 0)
    assert set(found.branches) == {0, 1, 2, 3} and any(any(b) for b in found.branches.values()), "not the plain one"


@pytest.mark.parametrize("kind", ["greedy", "path", "beam"])
def test_how_many_are_denoised_at_once_changes_nothing(kind, make):
    one, three = (search(make(), CHUNKS, LEVELS, NOISE, brightest, Plan(kind, 4, 2, batch=b)) for b in (1, 3))
    assert one.branches == three.branches and one.cost == three.cost
    torch.testing.assert_close(one.latents, three.latents, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_finds_more_than_plain_streaming(kind, make):
    """By the measure that each kind maximises: the last chunk of whole videos, the first one, or the mean of all."""
    starts = {"best": [9], "first": [0]}.get(kind, [0, 3, 6, 9])
    found, plain = (search(make(), CHUNKS, LEVELS, NOISE, brightest, Plan(kind, n, min(n, 2))) for n in (8, 1))

    def reward(latents):
        return torch.stack([brightest(latents[:, a : a + 3], a) for a in starts]).mean().item()

    assert found.reward == pytest.approx(reward(found.latents), abs=1e-5)
    assert found.reward > reward(plain.latents) + 0.05


def test_a_beam_keeps_what_pays_later_and_greedy_does_not():
    """Branch 3 looks best in the first chunk, and only after branch 2 does anything score in the others."""

    def judge(latents, first):
        opening, newest = latents[:, 0, 0, 0, 0], latents[:, -1, 0, 0, 0]
        return newest if latents.shape[1] == 3 else torch.where(opening == 2, 10 + newest, 0)

    greedy, beam = (echo(judge, Plan(k, 4, 2, window=9)) for k in ("greedy", "beam"))
    assert greedy.branches[0] == (3,) * 3 and greedy.reward == 3 / 4
    assert beam.branches[0] == (7,) * 3, "the first chunk has the candidates of both beams"
    cheap = echo(judge, Plan("beam", 2, 2, window=9))  # branches 0 to 3: 3 and 2 are kept
    assert [b[0] for b in list(cheap.branches.values())] == [2, 3, 1, 3]  # totals 2, 15, 26 (a tie: the first), 39


def test_beams_share_their_past_and_candidates_only_read_it(make):
    """What is committed after one parent has that parent's very tensors; nothing of a context is made per candidate."""
    inner, made = make(), []

    class Watched:
        start, enter = inner.start, inner.enter

        def denoise(self, x, t, context):
            assert all(k.shape[0] == 1 for s in context.spans for k in s.keys)
            before = [k.data_ptr() for s in context.spans for k in s.keys]
            out = inner.denoise(x, t, context)
            assert before == [k.data_ptr() for s in context.spans for k in s.keys]
            return out

        def refresh(self, x0, context):
            made.append((context, inner.refresh(x0, context)))
            return made[-1][1]

    search(Watched(), CHUNKS, LEVELS, NOISE, brightest, Plan("beam", 4, 3), to_continue=True)
    assert len(made) == 3 * len(CHUNKS)
    for parent, child in made[3:6]:
        assert child.spans[0] is parent.spans[0]
    parents = [id(parent.spans[0]) for parent, _ in made[:9] if parent.spans]
    assert len(set(parents)) < len(parents), "two of three beams went on from one context, or this shows nothing"


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        (1, [(0, 3), (3, 3), (6, 3), (9, 2)]),
        (2, [(0, 3), (0, 6), (3, 6), (6, 5)]),
        (9, [(0, 3), (0, 6), (0, 9), (0, 11)]),
    ],
)
def test_the_judge_sees_the_last_chunks_and_first_the_first_alone(window, seen):
    shown = []
    echo(lambda x, first: shown.append((first, x.shape[1])) or brightest(x, first), Plan("greedy", 2, window=window),
         frames=11)  # fmt: skip
    assert shown == seen


def test_the_judge_sees_the_stream_that_a_candidate_continues():
    """With two beams each candidate stands after its own past."""
    shown = []

    def judge(latents, first):
        shown.append(latents[:, ::3, 0, 0, 0].tolist())
        return latents[:, -1, 0, 0, 0]

    echo(judge, Plan("beam", 2, 2))
    assert shown[:3] == [[[0], [1], [2], [3]], [[3, 0], [3, 1]], [[2, 2], [2, 3]]]


def test_a_whole_video_is_judged_whole():
    shown = []
    echo(lambda x, first: shown.append((first, x.shape)) or brightest(x, first), Plan("best", 2), frames=11)
    assert shown == [(0, (1, 11, *SHAPE[1:]))] * 2


def scored(values):
    """A judge that gives branch b the score values[b]."""
    return lambda latents, first: torch.tensor([values[int(b)] for b in latents[:, -1, 0, 0, 0]])


@pytest.mark.parametrize("kind", ["best", "greedy", "beam"])
def test_a_candidate_without_a_score_is_never_kept_before_one_that_has_one(kind):
    found = echo(scored([math.nan, -5.0, math.nan, -7.0]), Plan(kind, 4, 1))
    assert set(found.branches.values()) == {(1, 1, 1)} and found.reward == -5
    assert sum(math.isnan(n.score) for n in found.nodes) == 2 * (1 if kind == "best" else 4)


@pytest.mark.parametrize("value", [math.nan, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_can_be_told_apart_the_plain_video_is_kept(kind, value):
    found = echo(lambda x, first: torch.full((len(x),), value), Plan(kind, 3, 2))
    assert set(found.branches.values()) == {(0, 0, 0)}
    assert found.reward == pytest.approx(value, nan_ok=True)


def test_a_chunk_that_cannot_be_scored_leaves_the_mean_to_the_others():
    found = echo(lambda x, first: torch.full((len(x),), math.nan) if x.shape[1] == 3 else brightest(x, first),
                 Plan("greedy", 3))  # fmt: skip
    assert found.reward == 2 and [list(b)[0] for b in found.branches.values()] == [0, 2, 2, 2]


def test_a_path_keeps_the_best_draw_at_every_level():
    """Echo's chunk at level t is (1 - t) of the one before and t of the branch."""
    shown = []

    def judge(latents, first):
        shown.append(latents[:, -1, 0, 0, 0])
        return -(shown[-1] - 1.3).abs()

    found = echo(judge, Plan("path", 3))
    torch.testing.assert_close(shown[0], torch.tensor([0, 0.8, 1.6]))
    torch.testing.assert_close(shown[1], 0.6 * 1.6 + torch.tensor([0, 0.4, 0.8]))
    assert found.branches[0] == (0, 2, 1)


@pytest.mark.parametrize("kind", ["greedy", "path", "beam"])
def test_the_tree_leads_from_the_winner_to_its_branches(kind, make):
    plan = Plan(kind, 4, 2)
    found = search(make(), CHUNKS, LEVELS, NOISE, brightest, plan)
    last = [n for n in found.nodes if n.chunk == 3 and n.step == 2]
    node = max(last, key=lambda n: n.mean)
    assert node.kept and node.mean == pytest.approx(found.reward)
    branches = {}
    while node is not None:
        branches[node.chunk, node.step] = node.branch
        parent = node.parent
        assert parent is None or (found.nodes[parent].kept and parent < node.id)
        node = None if parent is None else found.nodes[parent]
    assert all(found.branches[c][s] == b for (c, s), b in branches.items())
    assert len(branches) == (8 if kind == "path" else 4)
    choices = 4 * (2 if kind == "path" else 1)
    assert sum(n.kept for n in found.nodes) == choices * plan.width


def test_the_curve_of_whole_videos_is_the_best_so_far():
    found = echo(scored([math.nan, 1.0, 0.5, 4.0]), Plan("best", 4))
    assert [f for f, _ in found.curve] == [15, 30, 45, 60]
    assert [r for _, r in found.curve][1:] == [1, 1, 4] and math.isnan(found.curve[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_continues_a_stream(kind, make):
    """One candidate after a given past is the plain continuation, and its judge sees that past."""
    key, shown = Key(1, 0, 4), []
    whole = torch.cat([c.latents for c in stream(make(), CHUNKS, LEVELS, draw_from([key], SHAPE))], 1)
    context = given(make(), whole[:, :6], CHUNKS[:2])
    found = search(make(), CHUNKS[2:], LEVELS, NOISE, lambda x, f: shown.append((f, x)) or brightest(x, f),
                   Plan(kind, 1, 1), context=context, past=whole[:, :6], frames=11)  # fmt: skip
    torch.testing.assert_close(found.latents, whole[:, 6:11], rtol=0, atol=1e-5)
    assert set(found.branches) == {2, 3}
    first, seen = shown[0]
    assert first == (0 if kind == "best" else 3) and torch.equal(seen[:, : 6 - first], whole[:, first:6])


def test_what_comes_after_can_be_streamed_on(make):
    found = search(make(), CHUNKS[:2], LEVELS, NOISE, brightest, Plan("beam", 3, 2), to_continue=True)
    draw = draw_branches(NOISE, {**found.branches, 2: (0,) * 3, 3: (0,) * 3})
    on = list(stream(make(), CHUNKS[2:], LEVELS, draw, context=found.context))
    again = list(stream(make(), CHUNKS, LEVELS, draw))
    torch.testing.assert_close(on[-1].latents, again[-1].latents, rtol=0, atol=1e-5)


def test_what_refreshing_draws_is_not_searched(make):
    """Released weights want noise there; a replay finds the same."""
    plain = draw_from([Key(1, 0, 4)], SHAPE)

    def denoiser():
        return replace(make(), mix=lambda x0, start: 0.8 * x0 + 0.2 * plain(start // 3, 0, "refresh"))

    found = search(denoiser(), CHUNKS, LEVELS, NOISE, brightest, Plan("greedy", 3, batch=1))
    draw = draw_branches(NOISE, found.branches)
    assert torch.equal(draw(1, 0, "refresh"), plain(1, 0, "refresh"))
    assert torch.equal(found.latents, torch.cat([c.latents for c in stream(denoiser(), CHUNKS, LEVELS, draw)], 1))


def test_progress_counts_forwards():
    ticks = []
    found = echo(brightest, Plan("beam", 3, 2), tick=ticks.append)
    assert sum(ticks) == found.cost.forwards and max(ticks) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Plan("bean"), "search 'bean' is unknown; choose one of best, first"),
        (lambda: Plan(candidates=0), "search candidates=0: use 1 or more"),
        (lambda: Plan(window=0), "search window=0: use 1 or more"),
        (lambda: search(Echo(), CHUNKS, (1.0,), plain_numbers, brightest, Plan("path")), "one level has none"),
        (lambda: echo(lambda x, first: x, Plan()), "gave .* scores for 8 candidates"),
    ],
)
def test_what_cannot_be_searched_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
