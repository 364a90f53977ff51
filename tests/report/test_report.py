"""The report: one file that says of a run what is so, also when the run is broken, young or hostile."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from arvideo_rl import media
from arvideo_rl.cli.main import main
from arvideo_rl.report.charts import nice, tick_text
from arvideo_rl.report.data import read_run
from arvideo_rl.report.series import MOST, series, smoothed
from arvideo_rl.report.status import status

VOID = {"meta", "br", "img", "link", "input", "hr"}
SCRIPT = "<script>alert('x')</script> & a red ball"


class Page(HTMLParser):
    """What the tests ask of a page; fails where tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.links, self.said, self.titles = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.said.append(data)
        if self.open and self.open[-1] == "text":
            self.titles.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.said).split())


def write(path: Path, data) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))


def measure(name, before, delta, se, **more):
    return {"name": name, "before": before, "after": before + delta, "delta": delta, "se": se, "n": 64, **more}


def make_run(folder: Path, learned=True, kept=True, rows=6, **config) -> Path:
    """A finished run directory written by hand."""
    settings = {"name": folder.name, "out": str(folder.parent), "iterations": 6, "lr": 0.001, "objective": {"args": {}}}
    write(folder / "config.yaml", settings | config)
    write(folder / "identity.json", {"kind": "align", "identity": "0"})
    write(folder / "environment.json", {"python": "3.11", "packages": {"torch": "2.9"}})
    metrics = [{"iteration": i, "reward/actions": 0.5 + i / 10, "reward/actions/group_std": 0.1,
                "reward/actions/zero_spread_share": 0.0, "train/kl": i * 1e-3, "train/loss_at/t1.000": 1.5,
                "verifier/sharpness": 4.0, "probe/sharpness": 4.0, "probe/change/sharpness": -0.1 * i,
                "probe/fall/sharpness": 0.3, "seconds/rollout": 2.0} for i in range(rows)]  # fmt: skip
    write(folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in metrics))
    gain = measure("actions", 0.7, 0.1 if learned else 0.001, 0.01, margin=0.03)
    blur = measure("sharpness", 4.0, 0.0 if kept else -1.0, 0.01, margin=0.05, better="higher", ok=kept)
    distance = measure("frechet", 20.0, -2.0, 1.0, margin=0.15, better="lower", ok=True)
    sentence = ("It learned" if learned else "No gain was shown") + ("" if kept else ", and sharpness was lost") + "."
    write(folder / "summary.json", {"iterations": 6, "trained": gain, "verifiers": [blur, distance],
                                    "learned": learned, "nothing_sacrificed": kept, "sentence": sentence})  # fmt: skip
    media.write_video(folder / "videos" / "00.mp4", torch.rand(4, 3, 8, 16), 8)
    clip = {
        "file": "00.mp4",
        "prompt": SCRIPT,
        "actions": "<>^",
        "before": {"sharpness": 4.0},
        "after": {"sharpness": None},
    }
    write(folder / "videos" / "videos.json", [clip])
    return folder


def report(capsys, *args) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, args)])
    out, err = capsys.readouterr()
    return end.value.code or 0, out + err


def page_of(capsys, *args, out: Path) -> Page:
    code, said = report(capsys, *args, f"out={out}")
    assert code == 0, said
    return Page(out.read_text())


def test_everything_is_in_one_file_that_needs_no_network(tmp_path, capsys):
    page = page_of(capsys, make_run(tmp_path / "a"), out=tmp_path / "a.html")
    assert page.links and all(x.startswith("data:") for x in page.links) and "script" not in page.tags
    for words in ("It learned.", "Held-out comparison", "sharpness", "frechet (lower is better)", "up, beyond 3 se",
                  "kept", "Configuration", "lr", "Environment", "packages.torch", "arvideo align"):  # fmt: skip
        assert words in page.text, words
    for title in ("actions", "spread inside groups: actions", "groups without spread: actions", "KL",
                  "policy term at noise level t = 1.000", "sharpness", "sharpness: change", "rollout"):  # fmt: skip
        assert title in page.titles, title
    assert page.tags.count("svg") == 8 and page.tags.count("video") == 1  # the probe's sharpness is drawn once


def test_what_a_user_wrote_is_text(tmp_path, capsys):
    folder = make_run(tmp_path / "a", generator=SCRIPT)
    write(folder / "events.jsonl", json.dumps({"iteration": 3, "kind": "alarm", "text": SCRIPT}) + "\n")
    page = page_of(capsys, folder, out=tmp_path / "a.html")
    assert "script" not in page.tags and page.text.count("alert('x')") >= 3


@pytest.mark.parametrize(
    ("learned", "kept", "badge"),
    [(True, True, "learned"), (False, True, "no gain shown"), (True, False, "learned, something lost"),
     (False, False, "no gain shown, something lost")],
)  # fmt: skip
def test_the_verdict_is_the_comparison_s(tmp_path, learned, kept, badge):
    told = status(read_run(make_run(tmp_path / "a", learned, kept), "a"))
    assert told["badge"] == badge and told["tone"] == ("bad" if not kept else "good" if learned else "open")


def test_a_loss_is_marked_in_the_table(tmp_path, capsys):
    page = page_of(capsys, make_run(tmp_path / "a", kept=False), out=tmp_path / "a.html")
    assert "LOST" in page.text and "sharpness was lost" in page.text


def test_runs_are_laid_over_each_other_and_their_differences_come_first(tmp_path, capsys):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.01)]
    page = page_of(capsys, *runs, out=tmp_path / "ab.html")
    assert page.tags.count("svg") == 8 and page.text.count("Held-out comparison") == 2
    table = page.text[page.text.index("What differs") :]
    assert table.index("lr 0.001 0.01") < table.index("iterations 6 6")


def test_an_alarm_is_shown_and_marked_in_the_curves(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    write(folder / "events.jsonl", json.dumps({"iteration": 3, "kind": "alarm", "text": "they parted"}) + "\n")
    page = page_of(capsys, folder, out=tmp_path / "a.html")
    assert "Alarm after iteration 3: they parted." in page.text and "a: they parted" in page.said


def test_a_run_that_goes_on_was_stopped_or_not_compared_says_so(tmp_path):
    folder = make_run(tmp_path / "a", rows=4)
    (folder / "summary.json").unlink()
    run = read_run(folder, "a")
    assert "still running, at iteration 4 of 6" in status(run, now=run.written + 5)["text"]
    assert "stopped before its end" in status(run, now=run.written + 3600)["text"]
    (tmp_path / "b").mkdir()
    whole = make_run(tmp_path / "b")
    (whole / "summary.json").unlink()
    told = status(read_run(whole, "b"))
    assert told["badge"] == "not compared" and "whether it learned is not known" in told["text"]


def test_a_torn_line_and_damaged_files_are_said_and_the_rest_is_shown(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "rew')
    write(folder / "environment.json", "{")
    write(folder / "videos" / "videos.json", "[")
    page = page_of(capsys, folder, out=tmp_path / "a.html")
    for words in (
        "last line of metrics.jsonl is cut short",
        "environment.json cannot be read",
        "videos.json is missing",
    ):
        assert words in page.text, words
    assert page.tags.count("video") == 1 and page.tags.count("svg") == 8


def test_values_that_are_not_finite_are_counted_and_not_drawn(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    rows = [{"iteration": i, "train/kl": v} for i, v in enumerate([0.1, math.nan, 0.2, math.inf])]
    write(folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    page = page_of(capsys, folder, out=tmp_path / "a.html")
    assert "a: 2 values are not finite, not drawn." in page.text and page.tags.count("circle") == 2


def test_what_does_not_fit_is_named(tmp_path, capsys):
    page = page_of(capsys, make_run(tmp_path / "a"), "file_mib=0.00001", out=tmp_path / "a.html")
    assert "video" not in page.tags and "was left out: the limit is" in page.text


def test_a_distillation_has_curves_and_no_verdict(tmp_path, capsys):
    folder = tmp_path / "d"
    write(folder / "identity.json", {"kind": "distill", "identity": "0"})
    write(folder / "config.yaml", {"out": str(folder), "steps": 2})
    write(folder / "metrics.jsonl", '{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 0.5}\n')
    page = page_of(capsys, folder, out=tmp_path / "d.html")
    assert "trained all 2 steps" in page.text and "loss" in page.titles and "arvideo distill" in page.text


@pytest.mark.parametrize(
    ("args", "says"),
    [((), "one run directory or more"), (("{}/gone",), "no such directory; runs there: "),
     (("{}",), "is not a run directory; it holds runs: "), (("{}/a", "{}/a"), "given twice"),
     (("{}/a/config.yaml",), "is a file; give the run directory"), (("{}/a", "out={}/x.pdf"), "must end with .html"),
     (("{}/a", "out={}/a/config.yaml/x.html"), "is not a folder"), (("{}/a", "file_mib=-1"), "file_mib=-1")],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_write_nothing(tmp_path, capsys, args, says):
    make_run(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    code, said = report(capsys, *(x.format(tmp_path) for x in args))
    assert code != 0 and says in said and len(said.strip().splitlines()) == 1, said
    assert sorted(tmp_path.rglob("*")) == before


def test_long_series_are_means_of_blocks_with_their_range():
    rows = [{"iteration": i, "x": float(i % 10)} for i in range(10 * MOST)]
    found = series(rows, "x", "iteration", "run", 0)
    assert found.block == 10 and len(found.y) == MOST
    assert (set(found.y), set(found.low), set(found.high)) == ({4.5}, {0.0}, {9.0})
    assert series(rows, "gone", "iteration", "run", 0) is None


def test_smoothing_bends_no_line_and_invents_nothing():
    line = [float(i) for i in range(40)]
    assert smoothed(line) == pytest.approx(line) and smoothed(line[:7]) == []
    line[5] = math.nan
    assert math.isnan(smoothed(line)[5]) and math.isfinite(smoothed(line)[6])


def test_ticks_are_round_and_cover_the_values():
    for low, high in [(0.0, 1.0), (0.823, 0.931), (-3e-9, 2e-9), (5.0, 5.0), (0.0, 0.0), (0, 17)]:
        ticks = nice(low, high, 4)
        assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8
        assert len({tick_text(t, ticks) for t in ticks}) == len(ticks)
