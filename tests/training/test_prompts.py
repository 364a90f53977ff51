"""Prompts: files as users have them, actions in words, and the order in which a run takes them."""

import json

import pytest
import torch

from arvideo_rl.training.prompts import (
    HELD_OUT_SEED,
    TRAIN_SEED,
    PromptConfig,
    own_prompts,
    parse_actions,
    prompt_rows,
    read_prompts,
    training_prompts,
    world_prompts,
)
from arvideo_rl.world.dataset import HELD_OUT


def test_actions_in_words_numbers_and_repeats():
    assert parse_actions("turn left*2, forward", 6) == [0, 2, 2, 4, 0, 0]
    assert parse_actions(["stay", 3], 4) == [0, 1, 3, 0]
    assert parse_actions("", 3) == [0, 0, 0]
    assert parse_actions("back*9", 3) == [0, 5, 5], "cut to the frames asked for"


@pytest.mark.parametrize("bad", ["jump", "turn left*x", "9"])
def test_unknown_actions_are_named(bad):
    with pytest.raises(ValueError, match="action"):
        parse_actions(bad, 4)


def test_text_file_with_mark_crlf_and_blank_lines(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red ball rests\r\n\r\n  a blue cube slides left  \r\n".encode())
    assert read_prompts(path, 4).texts == ("a red ball rests", "a blue cube slides left")


def test_jsonl_with_actions(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a red ball rests", "actions": ["stay", "back"]}\n{"prompt": "a blue cube rests"}\n')
    prompts = read_prompts(path, 4)
    assert prompts.actions.tolist() == [[0, 1, 5, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"", "no prompt"),
        ("p.txt", b"caf\xe9", "UTF-8"),
        ("p.jsonl", b'{"prompt": "x"}\nnot json', "line 2"),
        ("p.jsonl", b'{"text": "x"}', "line 1"),
        ("p.jsonl", b'{"prompt": "x", "actions": ["jump"]}', "line 1.*jump"),
        ("p.jsonl", b'{"prompt": "x", "action": ["back"]}', 'line 1: .action. is not read; did you mean "actions"'),
        ("p.jsonl", b'{"prompt": "x"}\n{"prompt": " "}', "line 2: prompt ' ' is not a text"),
        ("p.csv", b"prompt,actions", "use .txt, a prompt a line, or .jsonl"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_prompts(tmp_path / name, 4)


def test_missing_file():
    with pytest.raises(ValueError, match="does not exist"):
        read_prompts(__import__("pathlib").Path("nowhere.txt"), 4)


def test_every_prompt_comes_once_an_epoch_and_steps_hold_different_ones():
    rows = [prompt_rows(12, 4, i, seed=5) for i in range(6)]
    assert sorted(sum(rows[:3], [])) == sorted(sum(rows[3:], [])) == list(range(12))
    assert rows[:3] != rows[3:], "epochs are shuffled differently"
    assert rows[0] != prompt_rows(12, 4, 0, seed=6)


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match="there are 3"):
        prompt_rows(3, 4, 0, 0)


def test_world_prompts_do_not_change_with_the_count_and_sets_are_disjoint():
    a, b = world_prompts(TRAIN_SEED, 3, 12, "joystick"), world_prompts(TRAIN_SEED, 5, 12, "joystick")
    assert a.texts == b.texts[:3] and torch.equal(a.actions, b.actions[:3])
    assert TRAIN_SEED + 1_000_000 < HELD_OUT < HELD_OUT_SEED
    assert len(training_prompts(PromptConfig(count=4), 9)) == 4


def test_every_fifth_different_text_of_a_file_is_held_out_with_all_its_actions(tmp_path):
    path = tmp_path / "mine.jsonl"
    names = [f"p{i}" for i in range(1, 13)]
    lines = [json.dumps({"prompt": n, "actions": ["back"]}) for n in names]
    lines += [json.dumps({"prompt": n, "actions": ["forward"]}) for n in ("p5", "p6")]
    path.write_text("\n".join(lines))
    train, out, said = own_prompts(path, 4)
    assert out.texts == ("p5", "p10", "p5") and out.actions[:, 1].tolist() == [5, 5, 4]
    assert not set(train.texts) & set(out.texts) and len(train) + len(out) == 14
    assert "11 prompts to train on, 3 held out (every 5th different text)" in said
    assert len(set(train.ids + out.ids)) == 14, "random keys differ"
    path.write_text("\n".join([*lines, *(json.dumps({"prompt": f"q{i}"}) for i in range(9))]))
    more = own_prompts(path, 4)
    assert set(train.texts) <= set(more[0].texts) and set(out.texts) <= set(more[1].texts), "appending moves none"
    assert training_prompts(PromptConfig(source=str(path)), 4).texts == more[0].texts


def test_repeated_lines_are_left_out_and_reported_and_small_files_are_trained_on_whole(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("a\nb\na\n\nb\nc\n")
    train, out, said = own_prompts(path, 4)
    assert train.texts == ("a", "b", "c") and not len(out)
    assert said.endswith("2 repeated left out (prompt 3 repeats 1, 4 repeats 2)")
    assert "none held out (of fewer than 10 different texts)" in said
    assert read_prompts(path, 4).texts == ("a", "b", "a", "b", "c"), "a file to generate from is taken as it is"


def test_only_line_ends_end_a_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "one\u2028line"}\r{"prompt": "two"}\n\r\n{"prompt": "three"}'.encode())
    assert read_prompts(path, 4).texts == ("one\u2028line", "two", "three")
