"""The documentation is true where a machine can tell: tests it names, files it links to, commands it shows."""

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from arvideo_rl.cli.main import COMMANDS, FLAGS, split
from arvideo_rl.training.settings import OBJECTIVES
from rewards.registry import available

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("arvideo_rl/weights/*/*.md"))]
LESSONS = (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8")
COUNTS = dict(C=16, N=23, R=21, K=11, V=7, G=7, I=5, M=6, D=6)
REQUIRED = [f"{letter}{i}" for letter, count in COUNTS.items() for i in range(1, count + 1)]
ID = r"[A-Z]\d+"


@cache
def functions(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}


def test_every_test_that_lessons_name_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", LESSONS)
    assert len(named) > 100 and len(named) == LESSONS.count("::"), "a test is written `tests/path/file.py::test_name`"
    for file, function in named:
        assert (ROOT / file).is_file(), file
        assert function.startswith("test_") and function in functions(ROOT / file), f"{file}::{function}"


def test_every_lesson_stands_once_and_every_row_names_a_test():
    rows = re.findall(rf"^\| ({ID}) \|([^|]+)\|(.+)\|$", LESSONS, re.M)
    listed = re.findall(rf"^- ({ID}): \S", LESSONS, re.M)
    found = [row[0] for row in rows] + listed
    assert sorted(found) == sorted(REQUIRED)
    assert all("::" in held for *_, held in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.split("#")[0]).exists(), f"{target} of {page.name}"


def shown() -> list[str]:
    """Command lines of the pages: in a block, or between backticks."""
    lines = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines += re.findall(r"^(?:    )?(arvideo [^`\n]+)$", text, re.M) + re.findall(r"`(arvideo [^`\n]+)`", text)
    return [x for x in lines if not set("<>") & set(x) and not re.search(r"\b[A-Z]{4,}\b|\.\.\.", x)]


def test_commands_and_keys_of_the_pages_exist():
    """The first part of every key must stand in the help of its command."""
    lines = shown()
    assert len(lines) > 15
    for line in lines:
        words, items, flags = split(shlex.split(line, comments=True)[1:])
        assert flags <= set(FLAGS), line
        if not words:
            continue
        assert words[0] in COMMANDS, line
        text = importlib.import_module(COMMANDS[words[0]][0]).help_text()
        for item in items:
            assert re.search(rf"\b{item.split('=')[0].split('.')[0]}\b[.=]", text), f"{item} of: {line}"


def test_every_objective_and_reward_has_its_page():
    for name in OBJECTIVES:
        page = (ROOT / "docs" / "objectives" / f"{name}.md").read_text(encoding="utf-8")
        assert "## What differs from the published code" in page and "## Options" in page, name
    for name in set(available()) - {"naive_colour"}:  # an example of a bad reward
        page = (ROOT / "docs" / "rewards" / f"{name}.md").read_text(encoding="utf-8")
        assert "## What maximises it wrongly" in page and "## Formula" in page, name
