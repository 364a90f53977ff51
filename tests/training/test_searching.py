"""Search from the command line: what the reward is shown, what is told and written, and what is refused."""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from arvideo_rl import media
from arvideo_rl.cli.main import main
from arvideo_rl.config import load
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training import generation, searching
from arvideo_rl.training.generation import GenerateConfig
from rewards.contract import Clips, Scores, score
from rewards.inverse_dynamics import InverseDynamics
from rewards.registry import build
from samplers.plan import KINDS
from samplers.randomness import Key
from samplers.search import branch_noise, draw_branches
from samplers.stream import draw_from

SHOWN: list[Clips] = []


def shown(clips: Clips) -> torch.Tensor:
    """A reward that remembers what it was shown, and likes it dark."""
    SHOWN.append(clips)
    return -clips.frames.mean((1, 2, 3, 4))


def unmeasurable(clips: Clips) -> Scores:
    """A reward that can score nothing."""
    return Scores(torch.full((len(clips),), math.nan), torch.zeros(len(clips), dtype=torch.bool),
                  ["content:empty_room"] * len(clips))  # fmt: skip


def by_group(clips: Clips) -> torch.Tensor:
    return torch.zeros(len(clips))


by_group.granularity = "group"  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """``searching_rewards:shown`` and the others are those of this file."""
    monkeypatch.setitem(sys.modules, "searching_rewards", sys.modules[__name__])
    SHOWN.clear()


@pytest.fixture
def prepared(small, tmp_path):
    """``prepared("search.kind=beam", ...)``: a job of 8 frames, one prompt, one switch."""

    def make(*items, out="v.mp4"):
        keys = [
            f"generator={small}",
            "prompt=a red ball rests",
            "actions=turn left*4, forward*3",
            "frames=8",
            "scale=1",
        ]
        if not any(i.startswith("search.reward") for i in items):
            items = (*items, "search.reward.target=searching_rewards:shown")
        return generation.prepare(load(GenerateConfig, None, [*keys, f"out={tmp_path / out}", *items]))

    return make


def run(job):
    """Latents and tree of the one video."""
    script = job.generator.script(
        list(job.prompts.texts), job.prompts.actions, tuple((f, [p]) for f, p in job.switches)
    )
    texts = [(0, job.prompts.texts[0]), *job.switches]
    latents, tree = searching.run(
        job.search, job.generator, job.model, script, texts, job.prompts.actions, Key(0), job.frames
    )
    return script, latents, tree


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_told_beforehand_is_what_it_took(kind, prepared):
    job = prepared(f"search.kind={kind}", "search.candidates=3", "search.beams=2")
    forwards, scores = re.search(r"takes (\d+) forwards and (\d+) scores", job.notes[-1]).groups()
    script, latents, tree = run(job)
    assert tree["cost"] == {"forwards": int(forwards), "scores": int(scores), "plain_forwards": 3 * 5 - 1}
    assert job.search.forwards == int(forwards) and len(tree["candidates"]) == int(scores)
    assert json.loads(json.dumps(tree, allow_nan=False))["search"]["kind"] == kind


@pytest.mark.parametrize("kind", ["best", "beam", "path"])
def test_the_written_branches_make_the_video_again(kind, prepared):
    job = prepared(f"search.kind={kind}", "search.candidates=4", "search.batch=1")
    script, latents, tree = run(job)
    tree = json.loads(json.dumps(tree))
    branches = {int(k): b for k, b in tree["branches"].items()}
    assert any(any(b) for b in branches.values()), "not the plain video"
    draw = draw_branches(branch_noise(Key(**tree["key"]), job.generator.latent_shape), branches)
    again = job.generator.stream(job.model, script, draw, 8, trim=True)
    assert torch.equal(latents, torch.cat([c.latents for c in again], 1)) and latents.shape[1] == 8


def test_one_candidate_is_what_is_generated_without_a_search(prepared):
    script, latents, _ = run(job := prepared("search.kind=greedy", "search.candidates=1"))
    plain = job.generator.stream(job.model, script, draw_from([Key(0)], job.generator.latent_shape), 8, trim=True)
    assert torch.equal(latents, torch.cat([c.latents for c in plain], 1))


def test_the_reward_is_shown_the_window_with_its_commands_chunks_and_prompt(prepared):
    run(prepared("search.kind=greedy", "search.candidates=2", "switch=6: a blue cube rests"))
    *steps, whole = SHOWN  # the winner's whole video comes last
    assert [c.frames.shape[:2] for c in steps] == [(2, 3), (2, 6), (2, 5)] and whole.frames.shape[:2] == (1, 8)
    assert [c.actions[1].tolist() for c in steps] == [[2, 2], [2, 2, 2, 2, 4], [2, 4, 4, 4]]
    assert [c.chunk_starts for c in steps] == [(0,), (0, 3), (0, 3)] and whole.chunk_starts == (0, 3, 6)
    assert [c.prompts[1] for c in steps] == ["a red ball rests", "a red ball rests", "a blue cube rests"]
    assert all(c.fps == 8 for c in SHOWN)
    assert any(torch.equal(whole.frames[0, 3:], f) for f in steps[-1].frames), "what was kept is what was seen"


def test_the_first_window_begins_with_a_first_frame_of_its_own(small):
    generator = Generator.load(small)
    generator.streaming = replace(generator.streaming, first_alone=True)
    judge = searching.Verifier(
        generator, build("searching_rewards:shown"), [(0, "a red ball rests")], torch.arange(7)[None] % 3
    )
    judge(torch.zeros(1, 7, 3, 32, 32), 0)
    judge(torch.zeros(1, 6, 3, 32, 32), 1)
    assert [c.chunk_starts for c in SHOWN] == [(0, 1, 4), (0, 3)]
    assert [c.actions[0].tolist() for c in SHOWN] == [[1, 2, 0, 1, 2, 0], [2, 0, 1, 2, 0]]


def test_what_a_reward_cannot_read_yet_has_no_score(small):
    reward = build("searching_rewards:shown")
    reward.fewest = 3
    judge = searching.Verifier(Generator.load(small), reward, [(0, "a red ball rests")], torch.ones(1, 6).long())
    assert judge(torch.zeros(2, 1, 3, 32, 32), 0).isnan().all() and not SHOWN
    assert judge.reasons == Counter({"content:too_short": 2}) and judge.scored == 0
    assert judge(torch.zeros(2, 3, 3, 32, 32), 0).isfinite().all() and judge.scored == 2


def test_a_reward_by_chunks_is_averaged_over_those_that_can_be_scored(small):
    generator, actions = Generator.load(small), torch.tensor([[0, 2, 2, 0, 0, 0]])
    reward = InverseDynamics(granularity="chunk")
    value = searching.Verifier(generator, reward, [(0, "a red ball rests")], actions)(torch.zeros(1, 6, 3, 32, 32), 0)
    pixels = generator.codec.decode(torch.zeros(1, 6, 3, 32, 32))
    expected = score(reward, Clips(pixels, actions=actions[:, 1:], chunk_starts=(0, 3))).value
    assert expected.isnan().tolist() == [[False, True]] and value.item() == expected[0, 0].item()


def test_a_search_is_written_with_its_tree_and_told(prepared, tmp_path):
    job = prepared("search.kind=beam", "search.candidates=3", "search.held_out.target=inverse_dynamics")
    (path,) = generation.run(job)
    assert media.read_video(path)[0].shape[0] == 8
    tree = json.loads((tmp_path / "v.mp4.search.json").read_text())
    winner, plain = tree["whole_video"]["winner"], tree["whole_video"]["plain"]
    said = searching.told(path)
    assert f"searching_rewards:shown {plain['reward']:.4g} -> {winner['reward']:.4g}" in said
    assert f"inverse_dynamics (held out) {plain['held_out']:.4g} -> {winner['held_out']:.4g}" in said
    assert winner["reward"] > plain["reward"] and "14 more for the plain video" in job.notes[-1]
    assert tree["curve"][-1]["reward"] == pytest.approx(tree["reward"])
    assert tree["curve"][-1]["forwards"] == tree["cost"]["forwards"]
    _, latents, again = run(job)
    pixels = job.generator.codec.decode(latents)
    expected = score(InverseDynamics(), Clips(pixels, actions=job.prompts.actions[:, 1:].contiguous())).value.item()
    assert again["whole_video"]["winner"]["held_out"] == pytest.approx(expected) == pytest.approx(winner["held_out"])


def test_without_a_held_out_reward_nothing_is_compared(prepared):
    (path,) = generation.run(prepared("search.kind=first", "search.candidates=2"))
    assert "->" not in searching.told(path) and "whole video: searching_rewards:shown" in searching.told(path)


def test_a_search_continues_a_video_and_is_shown_it(prepared, tmp_path):
    start = tmp_path / "start.mp4"
    media.write_video(start, torch.full((6, 3, 32, 32), 0.5), 8)
    job = prepared("search.kind=greedy", "search.candidates=2", f"start={start}", "frames=12", "actions=forward*5")
    (path,) = generation.run(job)
    pixels = media.read_video(path)[0]
    assert len(pixels) == 12 and (pixels[:6] - 0.5).abs().mean() < 0.05
    assert [c.frames.shape[:2] for c in SHOWN] == [(2, 6), (2, 6), (1, 12)]
    assert SHOWN[0].actions[0].tolist() == [0, 0, 4, 4, 4]
    assert (SHOWN[0].frames[:, :3] - 0.5).abs().mean() < 0.05


def test_every_prompt_is_searched_by_itself(prepared, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a red ball rests", "actions": ["back"]}\n{"prompt": "a blue cube rests", "actions": ["forward"]}\n'
    )
    items = ["search.kind=greedy", "search.candidates=2", "prompt=", "actions=", f"prompts={tmp_path / 'p.jsonl'}"]
    paths = list(generation.run(prepared(*items, out="videos")))
    trees = [json.loads(searching.tree_of(p).read_text()) for p in paths]
    assert [t["key"]["prompt"] for t in trees] == [0, 1]
    assert [c.prompts[0] for c in SHOWN] == ["a red ball rests"] * 4 + ["a blue cube rests"] * 4


def test_a_reward_that_can_score_nothing_ends_it_without_a_video(prepared, tmp_path):
    job = prepared("search.kind=greedy", "search.candidates=2", "search.reward.target=searching_rewards:unmeasurable")
    with pytest.raises(ValueError, match=r"could score none of 6 candidates \(content:empty_room 6\)"):
        list(generation.run(job))
    assert not list(tmp_path.glob("v.mp4*"))


BALL = ("prompt=a red ball rests", "actions=turn left*8")
IDM = "search.reward.target=inverse_dynamics"
GREEDY = ("search.kind=greedy", IDM)


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ((*BALL, "search=beam"), "did you mean search.kind=beam?"),
        ((*BALL, "search.kind=bean", IDM), "did you mean beam?"),
        ((*BALL, "search.candidates=4"), "search.kind is not; choose one of best, first, greedy, path, beam"),
        ((*BALL, "search.kind=beam"), "search.reward.target is missing"),
        ((*BALL, "search.kind=beam", "search.reward=inverse_dynamics"), "search.reward.target=inverse_dynamics"),
        ((*BALL, *GREEDY, "search.candidates=0"), "search.candidates=0: use 1 to 65536"),
        ((*BALL, *GREEDY, "search.window=0"), "search.window=0: use 1 or more"),
        ((*BALL, *GREEDY, "search.batch=-1"), "search.batch=-1: use 0 or more"),
        ((*BALL, *GREEDY, "search.beam=3"), "did you mean search.beams?"),
        ((*BALL, *GREEDY, "search.candidates=many"), "search.candidates=many: must be a whole number"),
        ((*BALL, "search.kind=greedy", "search.reward.target=inverse_dynamic"), "did you mean 'inverse_dynamics'"),
        ((*BALL, *GREEDY, "search.reward.args.scor=accuracy"), "did you mean 'score'"),
        ((*BALL, *GREEDY, "search.held_out.target=inverse_dynamics"), "search.held_out is the reward that chooses"),
        ((*BALL, "search.kind=greedy", "search.reward.target=camera_following"), "needs cameras"),
        ((*BALL, "search.kind=greedy", "search.reward.target=searching_rewards:by_group"), "clips of a group"),
        ((BALL[0], *GREEDY), "search.reward.target=inverse_dynamics needs actions; give actions='...'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(items, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["generate", *items])
    err = capsys.readouterr().err
    assert end.value.code == 1 and says in err and len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_window_too_short_for_the_reward_is_refused_with_its_length(small, tmp_path, capsys):
    generator = Generator.load(small)
    generator.streaming = replace(generator.streaming, first_alone=True)
    generator.save(tmp_path / "g")
    items = [f"generator={tmp_path / 'g'}", *BALL, "search.kind=first", "search.reward.target=rerender"]
    with pytest.raises(SystemExit):
        main(["generate", *items, f"out={tmp_path / 'v.mp4'}"])
    said = capsys.readouterr().err
    assert "search.reward.target=rerender needs 3 pixel frames and would see 1; raise search.window" in said


def test_a_generator_that_denoises_jointly_or_in_one_step_is_refused(small, tmp_path, capsys):
    generator = Generator.load(small)
    generator.streaming = replace(generator.streaming, steps=(1000.0,))
    generator.save(tmp_path / "one")
    generator.streaming = replace(generator.streaming, steps=(1000.0, 500.0), joint=True)
    generator.save(tmp_path / "joint")
    for name, says in (("one", "search.kind=path chooses re-noise draws"), ("joint", "denoises chunks jointly")):
        with pytest.raises(SystemExit):
            main(
                [
                    "generate",
                    f"generator={tmp_path / name}",
                    *BALL,
                    "search.kind=path",
                    IDM,
                    f"out={tmp_path / 'v.mp4'}",
                ]
            )
        assert says in capsys.readouterr().err


def test_a_dry_run_tells_the_cost_and_does_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["generate", *BALL, "search.kind=beam", IDM, "--dry-run"])
    out = capsys.readouterr().out
    assert not end.value.code and "search beam of 2 x 8 by inverse_dynamics: a video takes 394 forwards" in out
    assert "13.6 times the 29 forwards of plain streaming" in out and not list(tmp_path.iterdir())
