"""The package is whole: every module imports, and asks for nothing that the project does not declare."""

import ast
import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("arvideo_rl", "rewards", "samplers")
FILES = sorted(p for name in OURS for p in (ROOT / name).rglob("*.py"))
MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in FILES]


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, also inside functions."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            out.add((node.module or "").split(".")[0])
    return out


@pytest.mark.parametrize("name", [m for m in MODULES if not m.endswith("__main__")])
def test_every_module_imports(name):
    importlib.import_module(name)


def test_every_folder_of_code_is_a_package_that_is_shipped():
    assert all((p.parent / "__init__.py").is_file() for p in FILES)


# huggingface_hub: diffusers cannot be without it. The others cannot be asked for (one pins numpy<2, one is on no
# index); a geometry backend that lacks its package says how to install it.
UNDECLARED = {"huggingface_hub", "depth_anything_3", "vggt"}


def test_nothing_is_imported_that_the_project_does_not_ask_for():
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [x for extra in project["optional-dependencies"].values() for x in extra]
    declared = {re.match(r"[\w-]+", line)[0].lower() for line in lines}
    sources = importlib.metadata.packages_distributions()
    for path in FILES:
        for name in imported(path) - set(OURS) - sys.stdlib_module_names:
            known = {d.lower().replace("_", "-") for d in sources.get(name, [name])}
            assert known & declared or name in UNDECLARED, f"{path.relative_to(ROOT)} imports {name}"
        assert "torchvision.io" not in path.read_text(encoding="utf-8"), (
            f"{path.relative_to(ROOT)}: it is being removed"
        )


@pytest.mark.parametrize("part", ["rewards", "samplers"])
def test_rewards_and_samplers_stand_alone(part):
    for path in (ROOT / part).rglob("*.py"):
        assert not imported(path) & set(OURS) - {part}, path
