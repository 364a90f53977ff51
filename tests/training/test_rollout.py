"""How pictures look as a whole, in numbers anyone can check, and a sequence's reward."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.generators.denoiser import Script
from arvideo_rl.objectives.record import Record, Steps
from arvideo_rl.training.rollout import appearance, from_first
from samplers.randomness import Key


@pytest.mark.parametrize(
    ("colour", "brightness", "saturation"),
    [((1, 1, 1), 1, 0), ((1, 0, 0), 0.299, 1), ((0.5, 0.25, 0.25), 0.32475, 0.25)],
)
def test_a_frame_of_one_colour_has_its_brightness_and_saturation_and_no_contrast(colour, brightness, saturation):
    found = appearance(torch.tensor(colour, dtype=torch.float32).view(1, 1, 3, 1, 1).expand(2, 3, 3, 4, 4))
    assert found["brightness"].tolist() == pytest.approx([brightness] * 2)
    assert found["saturation"].tolist() == pytest.approx([saturation] * 2)
    assert found["contrast"].tolist() == pytest.approx([0, 0], abs=1e-6)


def test_contrast_is_the_deviation_over_a_frame():
    half = torch.zeros(1, 1, 3, 2, 4)
    half[..., 2:] = 1
    assert appearance(half)["contrast"].item() == pytest.approx(0.5)


def test_a_sequence_is_rewarded_for_its_chunks_from_the_first_trained_one_on():
    values = torch.tensor([[9.0, 1, 2, 6], [9.0, 9, 4, torch.nan], [1.0, 2, 3, 6]])
    steps = Steps(torch.zeros(3, 1), torch.zeros(3, 1), torch.tensor([1, 2, 0]))
    record = Record(torch.zeros(3, 12), Script(()), [Key(1, 0, 0, b) for b in range(3)], torch.zeros(3), steps)
    assert from_first(values, record).tolist() == [[3.0] * 4, [4.0] * 4, [3.0] * 4]
    assert from_first(values, replace(record, steps=None))[0].tolist() == [4.5] * 4
