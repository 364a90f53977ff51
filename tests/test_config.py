"""Configuration: inheritance, overrides, and errors that name the key and the way out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from arvideo_rl.config import ConfigError, check_ranges, find, load, presets, read


@dataclass
class Inner:
    depth: int = 1


@dataclass
class Part:
    target: str = ""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Schema:
    name: str = "x"
    rate: float = 0.5
    many: tuple[int, ...] = (1, 2)
    maybe: int | None = None
    inner: Inner = field(default_factory=Inner)
    parts: dict[str, Part] = field(default_factory=dict)


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_base_file_then_override(tmp_path):
    write(tmp_path, "low.yaml", "name: low\nrate: 1\ninner: {depth: 3}\nparts: {a: {target: t, args: {k: 1}}}\n")
    top = write(tmp_path, "top.yaml", "base: low.yaml\nname: top\nparts: {a: {args: {j: 2}}}\n")
    config = load(Schema, top, ["inner.depth=7", "parts.a.args.k=9", "maybe=4"])
    assert (config.name, config.rate, config.inner.depth, config.maybe) == ("top", 1.0, 7, 4)
    assert isinstance(config.inner, Inner) and isinstance(config.parts["a"], Part)
    assert config.parts["a"].args == {"k": 9, "j": 2} and config.parts["a"].target == "t"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("nmae=y", "did you mean name"),
        ("inner.depht=1", "did you mean inner.depth"),
        ("parts.a.tagret=1", "did you mean parts.a.target"),
        ("rate=fast", "rate"),
        ("inner.depth=1.5", "depth"),
        ("plain", "not key=value"),
        ("name.first=x", "inner|name"),
        ("zzz=1", "known here"),
    ],
)
def test_mistakes_are_one_line_with_the_key(override, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(Schema, None, [override])
    assert "\n" not in str(caught.value)


def test_values_are_literal():
    assert load(Schema, None, ["name=${oc.env:HOME} a: b"]).name == "${oc.env:HOME} a: b"


@pytest.mark.parametrize("content", [b"name: [", b"- 1", b"\xff\xfe"])
def test_unreadable_yaml_names_the_file(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="bad.yaml"):
        load(Schema, str(path), [])


def test_missing_file_lists_presets():
    with pytest.raises(ConfigError, match="align/tiny_nft"):
        find("nowhere.yaml")


def test_missing_base_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone.yaml"):
        load(Schema, write(tmp_path, "a.yaml", "base: gone.yaml"), [])


def test_presets_are_found_by_name_and_by_path():
    assert find("align/tiny_nft") == presets() / "align" / "tiny_nft.yaml"
    assert find("configs/align/tiny_nft.yaml").name == "tiny_nft.yaml"


def test_numbers_as_people_write_them():
    """YAML 1.1 reads 1e-4 as text; here it is a number, in files and in overrides."""
    assert load(Schema, None, ["rate=1e-4", "parts.a.args.k=2e-3"]).parts["a"].args["k"] == 2e-3
    assert load(Schema, None, ["rate=1e-4"]).rate == 1e-4


def test_a_circle_of_bases_is_refused(tmp_path):
    write(tmp_path, "b.yaml", "base: a.yaml")
    with pytest.raises(ConfigError, match="base"):
        load(Schema, write(tmp_path, "a.yaml", "base: b.yaml"), [])


def test_byte_order_mark_and_any_line_ends_are_read(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: caf\xc3\xa9\r\nrate: 2\r\n\r\ninner:\r\n  depth: 4\r\n")
    config = load(Schema, str(path), [])
    assert (config.name, config.rate, config.inner.depth) == ("café", 2.0, 4)


def test_a_mistake_in_a_file_names_the_file_and_one_on_the_command_line_does_not(tmp_path):
    path = write(tmp_path, "mine.yaml", "nmae: x")
    with pytest.raises(ConfigError, match=r"mine.yaml: unknown key nmae; did you mean name\?"):
        load(Schema, path, [])
    with pytest.raises(ConfigError, match="^unknown key nmae"):
        load(Schema, write(tmp_path, "fine.yaml", "name: x"), ["nmae=1"])


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("[1, inf)", (1, 7), (0, float("nan")), "1 or more"),
        ("(0, inf)", (1e-9,), (0, -1, float("inf"), float("nan")), "a finite number above 0"),
        ("[0, 1]", (0, 1), (-0.1, 1.1), "0 to 1"),
        ("[0, 1)", (0,), (1,), "0 or more and below 1"),
        ("(0, 1]", (1,), (0,), "above 0 and at most 1"),
    ],
)
def test_ranges_and_their_words(interval, inside, outside, words):
    for value in (*inside, None):
        check_ranges({"a": {"b": value}}, {"a.b": interval})
    for value in outside:
        with pytest.raises(ConfigError, match=f"here.a.b={value}: use {words}$"):
            check_ranges({"a": {"b": value}}, {"a.b": interval}, "here.")


def test_a_base_may_be_a_shipped_preset_by_its_exact_name(tmp_path):
    data = read(Path(write(tmp_path, "mine.yaml", "base: self_forcing.yaml\nstreaming: {sink: 3}")))
    assert data["streaming"]["sink"] == 3 and data["streaming"]["window"] == 21 and "base" not in data
    for other in ("'*.yaml'", "self_forcing", "generators/self_forcing.yaml", "/self_forcing.yaml"):
        with pytest.raises(ConfigError, match="nor a shipped preset"):
            read(Path(write(tmp_path, "other.yaml", f"base: {other}")))
