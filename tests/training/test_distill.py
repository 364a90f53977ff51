"""Making a generator: it learns, resumes exactly, and a folder belongs to one configuration."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import arvideo_rl.training.distill as module
from arvideo_rl.config import load
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.training.checkpoints import checkpoints, load_checkpoint
from arvideo_rl.training.distill import DistillConfig, Network, build, clip_loss, run
from arvideo_rl.training.interrupt import Interrupted
from arvideo_rl.training.launch import align
from arvideo_rl.world.dataset import Clips, load_clips


@pytest.fixture
def quick(tmp_path, monkeypatch) -> DistillConfig:
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path / "cache"))
    network = Network(dim=32, layers=1, ffn=32, patch=(16, 16), text_dim=16)
    return DistillConfig(out=str(tmp_path / "a"), steps=4, clips=8, switch_clips=4, batch=1, levels=1,
                         save_every=2, network=network)  # fmt: skip


def weights(folder) -> dict[str, torch.Tensor]:
    return Generator.load(folder).transformer.state_dict()


def test_interrupted_equals_straight(quick, tmp_path, monkeypatch):
    straight = weights(run(quick, progress=False))

    torn = replace(quick, out=str(tmp_path / "b"))
    real, steps = module.clip_loss, []

    def stop_at_three(*args):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "clip_loss", stop_at_three)
    with pytest.raises(KeyboardInterrupt):
        run(torn, progress=False)
    monkeypatch.setattr(module, "clip_loss", real)
    resumed = weights(run(torn, progress=False))
    assert all(torch.equal(resumed[k], straight[k]) for k in straight)
    rows = [json.loads(x)["step"] for x in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3]


def test_told_to_stop_it_saves_and_goes_on_from_there(quick, tmp_path, monkeypatch):
    straight = weights(run(quick, progress=False))
    torn = replace(quick, out=str(tmp_path / "b"))
    real, steps = module.clip_loss, []

    def stop_in_the_third(*args):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(module, "clip_loss", stop_in_the_third)
    with pytest.raises(
        Interrupted, match="saved after step 3 of 4; continue with: arvideo distill .*b/config.yaml"
    ) as end:
        run(torn, progress=False)
    assert end.value.code == 143 and len(steps) == 3
    again = load(DistillConfig, str(tmp_path / "b" / "config.yaml"), [])
    assert all(torch.equal(v, straight[k]) for k, v in weights(run(again, progress=False)).items())
    assert len(steps) == 4


def test_killed_again_and_again_it_equals_the_one_left_alone(quick, tmp_path, fork):
    quick = replace(quick, save_every=1)
    _, operations = fork(lambda: run(quick, progress=False), tmp_path)
    torn = replace(quick, out=str(tmp_path / "b"))
    died = [fork(lambda: run(torn, progress=False), tmp_path, die_at=operations * k // 5)[0] for k in (2, 1, 2, 1)]
    fork(lambda: run(torn, progress=False), tmp_path)
    assert sum(died) >= 3
    a, b = (weights(tmp_path / x / "generator") for x in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)
    a, b = (load_checkpoint(checkpoints(tmp_path / x)[-1]) for x in "ab")
    assert all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors) and {k[:4] for k in a.tensors} == {
        "live",
        "ema.",
    }
    torch.testing.assert_close(a.optimizer, b.optimizer, rtol=0, atol=0)
    for x in "ab":
        rows = [json.loads(x) for x in (tmp_path / x / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows] == [0, 1, 2, 3]
        assert [r["seconds"] for r in rows] == sorted(r["seconds"] for r in rows), "time goes on after a resume"
        assert not list((tmp_path / x).rglob("*.tmp")) and len(checkpoints(tmp_path / x)) == quick.keep_last


def test_finished_it_is_left_alone(quick, capsys):
    folder = run(quick, progress=False)
    before = {p: p.stat().st_mtime_ns for p in folder.parent.rglob("*")}
    assert run(quick, progress=False) == folder and "is finished" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in folder.parent.rglob("*")} == before


def test_a_folder_of_another_kind_of_run_is_refused_by_both_names(quick, config):
    align(config)
    with pytest.raises(ValueError, match="belongs to a run of 'align', not 'distill'"):
        run(replace(quick, out=f"{config.out}/{config.name}"), progress=False)


def test_the_loss_falls(quick, tmp_path):
    run(replace(quick, steps=40, batch=2, warmup=1), progress=False)
    rows = [json.loads(x)["loss"] for x in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert sum(rows[-5:]) < 0.7 * sum(rows[:5])


def test_a_folder_of_another_configuration_is_refused(quick):
    run(quick, progress=False)
    with pytest.raises(ValueError, match="another configuration"):
        run(replace(quick, seed=1), progress=False)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"batch": 0},
        {"switch_clips": -1},
        {"first_weight": 0.0},
        {"network": Network(dim=100)},
        {"network": Network(patch=(5, 5))},
    ],
)
def test_what_cannot_be_trained_is_refused(quick, bad):
    with pytest.raises(ValueError, match=str(next(iter(bad)))):
        run(replace(quick, **bad), progress=False)


@pytest.mark.parametrize(
    "setting",
    [{"recompute": True, "sink": 0}, {"linear": True}, {"first_alone": True}, {"joint": True, "window": None},
     {"refresh_level": 0.1}, {"at_switch": "recache"}],
    ids=str,
)  # fmt: skip
def test_streaming_that_its_loop_does_not_do_is_refused(quick, setting):
    with pytest.raises(ValueError, match=f"streaming.{next(iter(setting))}=.* cannot be trained from nothing here"):
        run(replace(quick, streaming=replace(quick.streaming, **setting)), progress=False)


def test_the_prompt_in_force_is_the_one_after_the_switch(quick, monkeypatch):
    """Each chunk is told what is in force at its first frame: the words change at the clip's own switch, no earlier."""

    told = []
    real = module.Denoiser.enter
    monkeypatch.setattr(
        module.Denoiser, "enter", lambda self, c: (told.append(self.script.prompt_at(c.position)[1]), real(self, c))[1]
    )
    generator, rows = build(quick), np.array([0, 1, 2])
    clips = load_clips(30, 3, frames=18, style="switch")
    clip_loss(generator, clips, rows, 0, quick)
    words = generator.text_encoder
    for k, text in enumerate(told):
        assert torch.equal(text, words(words.tokens(clips.captions_at(rows, 3 * k))))
    assert [torch.equal(told[k][0], told[k - 1][0]) for k in range(1, 6)] == [True, False, True, True, True]  # at 6


def test_the_first_chunk_has_its_weight(quick):
    generator, rows = build(quick), np.array([0])
    clips = load_clips(0, 1, frames=18)
    flat, heavy = (clip_loss(generator, clips, rows, 0, replace(quick, first_weight=w))[0].item() for w in (1.0, 1e6))
    one = clip_loss(generator, Clips(clips.pixels[:, :3], clips.captions, clips.actions), rows, 0, quick)[0].item()
    assert heavy == pytest.approx(one, rel=1e-3) and flat != pytest.approx(one, rel=1e-3)


def test_a_teacher_goes_on_from_a_generator_and_reads_whole_clips(tmp_path, small, monkeypatch):
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path / "cache"))
    whole = Streaming(chunk=6, window=6, sink=0, trained_frames=6)
    config = DistillConfig(out=str(tmp_path / "run"), start=small, steps=2, clips=4, switch_clips=0, joystick_clips=4,
                           batch=2, levels=1, muon_lr=None, drop_all=1.0, own_history=0.0, streaming=whole)  # fmt: skip
    before = Generator.load(small).transformer.state_dict()
    made = Generator.load(run(config, progress=False))
    assert made.streaming.chunk == 6
    after = made.transformer.state_dict()
    assert before.keys() == after.keys() and (after["proj_out.weight"] - before["proj_out.weight"]).abs().max() > 0
    # where captions and commands are always left out, neither has learned
    assert torch.allclose(after["action_embedding.weight"][1:], before["action_embedding.weight"][1:], atol=2e-3)
