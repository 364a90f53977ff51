"""``arvideo audit`` as a user runs it: the table, the three files, the page that is opened, and what is refused."""

import base64
import csv
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from arvideo_rl.cli.main import main
from arvideo_rl.media import read_video, write_video
from arvideo_rl.scoring.audit import AuditConfig, prepare, run

SMALL = "audit clips=3 frames=6 batch=2 shown=1 "
JUDGES = """
from rewards.claims import Claims
from rewards.contract import Scores

def light(clips):
    '''Mean of all pixels.'''
    return clips.frames.mean((1, 2, 3, 4))

def honest(clips):
    return light(clips)
honest.claims = Claims(notices=("darkened",), withstands=("reversed",))

def wrong(clips):
    return light(clips)
wrong.claims = Claims(notices=("frozen",))

def lost(clips):
    return Scores(light(clips) * float("nan"), (light(clips) < 0), ["content:never"] * len(clips))

def chunks(clips):
    return light(clips)
chunks.granularity = "chunk"
def odd(clips):
    return light(clips)
odd.claims = ("frozen",)
"""


class Page(HTMLParser):
    """Videos by the words below them; fails where tags do not close in order or lead out of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.videos, self.said, self.figure, self.tags = [], {}, [], None, set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert all(v.startswith("data:") for k, v in attrs if k in ("src", "href")), attrs
        if tag == "video":
            self.figure = dict(attrs)["src"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.said.append(data)
        if self.figure and self.open[-1] == "strong":
            self.videos[data] = self.figure
            self.figure = None

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.said).split())

    def frames(self, name: str, tmp_path: Path) -> torch.Tensor:
        path = tmp_path / "shown.mp4"
        path.write_bytes(base64.b64decode(self.videos[name].partition(",")[2]))
        return torch.as_tensor(read_video(path)[0]).float()


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with three clips, one of another size and one that is none, and judges."""
    source = torch.Generator().manual_seed(0)
    for i in range(3):
        coarse = torch.rand(6, 3, 4, 4, generator=source)
        size = (32, 32, 48)[i]
        write_video(tmp_path / "videos" / f"{i}.mp4", torch.nn.functional.interpolate(coarse, (size, size)), 8)
    (tmp_path / "videos" / "3.mp4").write_text("no video")
    (tmp_path / "critics.py").write_text(JUDGES)
    (tmp_path / "recipe.yaml").write_text("clips: 2\nframes: 4\nreward: 'critics:light'\nout: from_yaml.html\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "critics", raising=False)
    return tmp_path


def said(capsys, line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line))
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


def test_without_files_the_world_is_audited(desk, capsys, tmp_path):
    code, out, err = said(capsys, SMALL)
    assert code == 0 and not err
    assert "inverse_dynamics on 3 clips" in out and "passes its own claims (" in out
    row = next([c.strip() for c in line.split("│")] for line in out.splitlines() if "wrong_actions" in line)
    assert row[2:4] == ["notices", "2"], "the third clip is alone in its batch"
    assert row[6] == "1.00" and row[9] == "noticed"
    assert re.fullmatch(r"1\.00 \(0\.\d\d to 1\.00\)", row[7])
    assert {p.name for p in tmp_path.glob("audit*")} == {"audit.html", "audit.csv", "audit.json"}, "no draft is left"

    rows = list(csv.DictReader((tmp_path / "audit.csv").open()))
    told = json.loads((tmp_path / "audit.json").read_text())
    values = told["rewards"][0]["values"]
    assert told["settings"]["clips"] == 3 and len(told["clips"]) == 3 and len(values["clean"]) == 3
    frozen = next(r for r in rows if r["change"] == "frozen")
    assert float(frozen["changed"]) == sorted(v["value"] for v in values["frozen"])[1], "the median"
    assert frozen["passed"] == "True" and float(frozen["auroc"]) == 1 and float(frozen["auroc_low"]) < 1

    page = Page((tmp_path / "audit.html").read_text())
    assert {"clean", "frozen", "mirrored", "wrong_actions"} <= set(page.videos) and "half_rate" not in page.videos
    assert "adversarial texture" in page.text and told["clips"][0] + " in every change" in page.text
    assert told["clips"][1] + " in every change" not in page.text, "shown=1"
    still, moving = page.frames("frozen", tmp_path), page.frames("clean", tmp_path)
    assert float(still.diff(dim=0).abs().mean()) < 0.1 * float(moving.diff(dim=0).abs().mean())


def test_a_fooled_reward_is_shown_with_the_clip_that_gains_most(desk, capsys, tmp_path):
    line = "audit clips=6 frames=4 shown=0 reward=naive_colour changes=[saturated,grainy,wrong_prompt] "
    code, out, _ = said(capsys, line)
    assert code == 0 and "scored above clean: saturated" in out and "FAILS its own claims: saturated (FOOLED)" in out
    assert said(capsys, line + "fail=true out=again.html")[0] == 1
    told = json.loads((tmp_path / "audit.json").read_text())
    reward = told["rewards"][0]
    gains = [b["value"] - a["value"] for a, b in zip(reward["values"]["clean"], reward["values"]["saturated"])]
    page = Page((tmp_path / "audit.html").read_text())
    assert told["clips"][max(range(6), key=gains.__getitem__)] in page.text
    assert set(page.videos) == {"saturated"} and page.frames("saturated", tmp_path).shape[3] == 198  # side by side
    assert "saturated" in reward["failures"] and "wrong_actions" not in reward["values"]


def test_one_s_own_files_and_judge(desk, capsys, tmp_path):
    prompt = "<script>alert(1)</script>"
    code, out, err = said(
        capsys,
        f"audit videos reward=critics:honest,critics:wrong prompt='{prompt}' out=own.html "
        "changes=[darkened,reversed,frozen,mirrored]",
    )
    assert code == 0 and not err
    assert "left out: videos/3.mp4" in out and "critics:honest on 3 clips" in out
    assert "critics:honest: passes its own claims (1 tested)" not in out and "critics:wrong: FAILS" in out
    page = Page((tmp_path / "own.html").read_text())
    assert prompt in page.text and "script" not in page.tags
    told = json.loads((tmp_path / "own.json").read_text())
    assert told["clips"] == ["videos/0.mp4", "videos/1.mp4", "videos/2.mp4"]
    assert [r["reward"] for r in told["rewards"]] == ["critics:honest", "critics:wrong"]
    said_of = {f["change"]: f for f in told["rewards"][0]["findings"]}
    assert said_of["darkened"]["verdict"] == "noticed" and said_of["reversed"]["passed"] is True


def test_a_recipe_and_dry_run_and_every_kind_of_clips(desk, capsys, tmp_path):
    code, out, _ = said(capsys, "audit recipe.yaml --dry-run")
    assert code == 0 and out == "would audit critics:light on 2 clips in 20 changes\n"
    assert not list(tmp_path.glob("from_yaml*"))
    assert said(capsys, "audit recipe.yaml changes=[darkened]")[0] == 0 and (tmp_path / "from_yaml.csv").is_file()
    for videos in ("rooms", "tiny"):
        job = prepare(AuditConfig(videos=videos, clips=3, frames=4, batch=2, size=16, reward="critics:light"), [])
        assert [b.frames.shape[:2] for b in job.clips.batches] == [(2, 4), (1, 4)] and len(job.clips.names) == 3
    assert job.clips.batches[0].prompts and job.clips.batches[0].actions.shape == (2, 3)
    assert not torch.equal(job.clips.batches[0].frames[0], job.clips.batches[0].frames[1])


def test_all_takes_what_can_score_the_clips_and_says_what_cannot(desk, capsys):
    job = prepare(AuditConfig(reward="all", clips=2, frames=4, size=32), [])
    assert {"inverse_dynamics", "naive_colour", "camera_following", "sharpness"} <= set(job.rewards)
    assert "not audited: remote requires url, reward" in job.notes
    job = prepare(AuditConfig(reward="all", frames=4), ["videos/0.mp4"])
    assert "sharpness" in job.rewards and "inverse_dynamics" not in job.rewards
    assert any("'inverse_dynamics' needs actions, which videos/0.mp4 lacks; give actions=" in n for n in job.notes)


def test_the_mirrored_world_obeys_its_mirrored_actions(desk):
    found = run(prepare(AuditConfig(clips=4, frames=6, changes=["frozen", "mirrored"]), []))[0].findings
    assert {f.change: f.verdict for f in found} == {"frozen": "noticed", "mirrored": "stays"}


def test_nothing_measured_is_said_and_fails(desk, capsys, tmp_path):
    code, out, _ = said(capsys, SMALL + "reward=critics:lost shown=0 changes=[frozen]")
    assert code == 1 and "3 of 3 clean clips have no value: content:never" in out and "nothing could be measured" in out
    assert Page((tmp_path / "audit.html").read_text())


def test_a_page_that_cannot_be_written_leaves_the_old_one(desk, capsys, tmp_path, monkeypatch):
    (tmp_path / "audit.html").write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arvideo_rl.training.rundir.Path.replace", full)
    code, _, err = said(capsys, SMALL + "shown=0 changes=[frozen]")
    assert code == 1 and err.count("\n") == 1 and "audit.html: No space left on device; free some space" in err
    assert (tmp_path / "audit.html").read_text() == "old" and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("audit reward=epipola", 1, "did you mean 'epipolar'?"),
        ("audit clips=0", 1, "clips=0: use 1 or more"),
        ("audit frames=1", 1, "frames=1: use 2 or more"),
        ("audit size=0", 1, "size=0: use 1 or more"),
        ("audit noticed=0.5", 1, "noticed=0.5: use above 0.5 and at most 1"),
        ("audit stays=-1", 1, "stays=-1.0: use 0 or more"),
        ("audit shown=-1", 1, "shown=-1: use 0 or more"),
        ("audit videos/0.mp4 fps=0", 1, "fps=0.0: use a finite number above 0"),
        ("audit videos/0.mp4 short_side=0", 1, "short_side=0: use 1 or more"),
        ("audit changes=[frosen]", 1, "changes=frosen: did you mean frozen?"),
        ("audit changes=[resized]", 1, "add one, e.g. frozen"),
        ("audit change=[frozen]", 1, "unknown key change; did you mean changes?"),
        ("audit device=gpu", 1, "device=gpu: not here"),
        ("audit videos=gone", 1, "no generator at 'gone'"),
        ("audit videos/0.mp4 videos=tiny", 1, "videos=tiny: files were given too"),
        ("audit gone", 1, "no file or folder at 'gone'"),
        ("audit videos/3.mp4 reward=critics:light", 1, "no clip could be read; videos/3.mp4: "),
        (
            "audit videos/0.mp4",
            1,
            "'inverse_dynamics' needs actions, which videos/0.mp4 lacks; give actions=, a manifest",
        ),
        ("audit videos/0.mp4 reward=naive_colour", 1, "needs prompts, which videos/0.mp4 lacks; give prompt="),
        ("audit videos/0.mp4 reward=camera_following", 1, "needs cameras, which videos/0.mp4 lacks; files have none"),
        ("audit videos/0.mp4 actions=jump", 1, "turn left"),
        ("audit reward=critics:chunks", 1, "gives a value for each chunk; an audit wants one a clip"),
        ("audit reward=critics:odd", 1, "its claims are a tuple; use rewards.claims.Claims"),
        ("audit reward=inverse_dynamics,naive_colour args.score=accuracy", 1, "Write rewards.NAME.target="),
        ("audit size=16", 1, "reward 'inverse_dynamics': inverse_dynamics: frames are 16x16"),
        ("audit out=x.txt", 1, "e.g. out=x.html"),
        ("audit out=critics.py/x.html", 1, "critics.py is not a folder"),
        ("audit recipe.yaml recipe.yaml", 2, "audit takes one YAML file"),
    ],
)
def test_one_line_that_names_the_way_out_and_no_file(line, code, says, desk, capsys, tmp_path):
    before = sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts)
    got, out, err = said(capsys, line)
    assert (got, out, err.count("\n")) == (code, "", 1) and says in err
    assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts) == before


def test_help_names_every_key(capsys):
    code, out, _ = said(capsys, "audit --help")
    assert code == 0 and all(f"  {key}=" in out or f"  {key}." in out for key in vars(AuditConfig()))
