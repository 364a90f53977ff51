"""Captions that are wrong on purpose: which words of them are right, worked out by hand."""

import math

import numpy as np
import pytest

from arvideo_rl.world.captions import ATTRIBUTES, Shown, alter, caption_of, exchange, judge_words
from arvideo_rl.world.scene import CAMERA_WORDS, WORDS, Object, parse_caption, sample_scenes

RED, BLUE = Object("red", "ball", "left"), Object("blue", "cube", "rest")
BOTH = Shown((RED, BLUE), (2, 4))


def judged(said: Shown, shown: Shown) -> dict[int, float]:
    """Place -> label of the words that are asked about; place 0 is the number of objects."""
    words, labels = caption_of(said).split(), judge_words(said, shown)
    assert len(labels) == 1 + len(words)
    return {i: x for i, x in enumerate(labels) if not math.isnan(x)}


def wrong(said: Shown, shown: Shown) -> list[str]:
    words = ["NUMBER", *caption_of(said).split()]
    return [words[i] for i, right in judged(said, shown).items() if not right]


def test_exactly_the_words_with_alternatives_are_asked_about():
    words = ["NUMBER", *caption_of(BOTH).split()]
    asked = [words[i] for i in judged(BOTH, BOTH)]
    assert asked == "NUMBER red ball rolls left blue cube rests turns left moves forward".split()
    assert wrong(BOTH, BOTH) == []


@pytest.mark.parametrize(
    "objects, camera, expected",
    [
        ((RED, BLUE), (3, 4), "turns right"),
        ((RED, BLUE), (4,), "moves forward"),  # it came second
        ((RED, Object("green", "cube", "rest")), (), "green cube rests"),
        ((Object("red", "cube", "left"), BLUE), (), "cube"),  # and the verb is right, whatever the shape
        ((Object("red", "ball", "right"), BLUE), (), "right"),  # it does roll
        ((Object("red", "ball", "rest"), BLUE), (), "rests"),
        ((RED, Object("blue", "cube", "left")), (), "slides left"),
        ((Object("blue", "ball", "left"), Object("red", "cube", "rest")), (), "ball rolls left cube rests"),
        ((RED,), (), "NUMBER"),
        ((Object("yellow", "ball", "left"),), (), "NUMBER yellow ball rolls left"),  # nothing is yellow
        ((RED, BLUE, Object("green", "ball", "rest")), (), "NUMBER green ball rests"),
    ],
)
def test_the_wrong_words_are_found(objects, camera, expected):
    assert wrong(Shown(objects, camera), BOTH) == expected.split()


def test_nothing_is_right_of_an_empty_clip():
    assert set(judged(BOTH, Shown((), ())).values()) == {0.0}


def test_mirror_and_reverse_undo_themselves_and_freezing_stops_everything():
    for s in (BOTH, Shown((Object("green", "ball", "bounce"),), (5, 1, 3))):
        assert s.mirrored() != s and s.mirrored().mirrored() == s
        assert s.reversed() != s and s.reversed().reversed() == s
    assert BOTH.mirrored() == Shown((Object("red", "ball", "right"), BLUE), (3, 4))
    assert BOTH.reversed() == Shown((Object("red", "ball", "right"), BLUE), (5, 3))
    assert BOTH.frozen() == Shown((Object("red", "ball", "rest"), BLUE), (1,))


def test_what_a_scene_shows_is_what_its_caption_says():
    scenes = sample_scenes(range(40), 18)
    for text, objects, actions in zip(scenes.captions, scenes.objects, scenes.actions):
        shown = Shown.of(objects, actions)
        plain = caption_of(Shown(objects, ()))
        assert text in (plain, caption_of(shown)) and parse_caption(text) == objects
        assert set(judged(shown, shown).values()) == {1.0}


def test_altered_captions_are_mostly_wrong_always_sayable_and_repeat():
    draw, again = np.random.default_rng(0), np.random.default_rng(0)
    scenes = sample_scenes(range(300), 18)
    shown = [Shown.of(o, a) for o, a in zip(scenes.objects, scenes.actions)]
    bad = 0
    for a, b in zip(shown, shown[1:]):
        said = alter(a, b, draw)
        assert said == alter(a, b, again)
        assert set(caption_of(said.retold(draw)).split()) <= set(WORDS) and again.random() >= 0
        again.bit_generator.state = draw.bit_generator.state
        bad += bool(wrong(said, a))
    assert bad > 0.8 * len(shown)
    assert alter(Shown((), ()), Shown((), ()), draw).objects  # there is always an object to speak of


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_exchange_changes_one_attribute_and_takes_no_colour_twice(attribute):
    draw = np.random.default_rng(0)
    for _ in range(30):
        other = exchange(RED, attribute, draw, ["red", "blue"])
        assert {n for n in ATTRIBUTES if getattr(other, n) != getattr(RED, n)} == {attribute}
        assert other.colour != "blue"


def test_the_camera_is_told_only_where_two_words_are_enough():
    draw = np.random.default_rng(0)
    assert all(not Shown((RED,), (2, 4, 3)).retold(draw).camera for _ in range(20))
    told = [bool(Shown((RED,), (2, 4)).retold(draw).camera) for _ in range(400)]
    assert 0.5 < sum(told) / 400 < 0.7
    assert set(CAMERA_WORDS) == {1, 2, 3, 4, 5}
