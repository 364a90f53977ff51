"""Guidance by a reward of the run: it works, the policy knows nothing of it, and what gives no gradient is refused."""

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.objectives.grpo import GRPO
from arvideo_rl.training.align import Run
from arvideo_rl.training.guided import guiding, judge_of
from arvideo_rl.training.prompts import held_out_prompts
from arvideo_rl.training.rollout import clips_of, reward_table, roll_out
from arvideo_rl.training.settings import Method
from rewards import registry
from rewards.contract import Clips, score, score_with_grad
from samplers.guidance import Guide
from samplers.kernels import Kernel
from samplers.randomness import Key
from samplers.stream import draw_from

LENGTH = 0.1


def reward(score="expected_accuracy", granularity="chunk"):
    return registry.build("inverse_dynamics", score=score, granularity=granularity)


def drawn(generator, guide, count=6, branches=2, frames=6):
    """A record of ``branches`` for each of ``count`` prompts, its prompts and the rewards of its chunks."""
    rows = [i for i in range(count) for _ in range(branches)]
    prompts = held_out_prompts(count, frames, "joystick", 0).take(rows)
    keys = [Key(1, 0, i, n % branches) for n, i in enumerate(rows)]
    exploration = GRPO(guide=guide).exploration
    by = guide and reward()
    record = roll_out(generator, generator.transformer, prompts, keys, frames, torch.tensor(rows), exploration, 0, by)
    values, _ = reward_table({"a": (reward(), 1.0)}, clips_of(generator, record, prompts))
    return record, prompts, values["a"]


def test_guided_rollouts_have_more_of_the_reward_that_guides():
    generator = Generator.load("tiny")
    (_, _, plain), (_, _, guided) = drawn(generator, None, frames=3), drawn(generator, Guide("a", LENGTH, 3), frames=3)
    gain = (guided - plain).mean(1)
    assert (gain > -0.01).all() and gain.mean() > 0.05


def test_the_policy_knows_nothing_of_the_guidance(config):
    """Recorded states are the unguided mean, the drawn noise and the shift; the log-ratio takes them as they are."""
    generator = Generator.load(config.generator)
    record, _, _ = drawn(generator, Guide("a", LENGTH))
    plain, _, _ = drawn(generator, None)
    x, x0, levels = record.steps.x[:, 0], record.steps.x0[:, 0], generator.streaming.levels
    mean, std = Kernel("cps", 0.8).from_x0(x[:, 2], x0[:, 2], levels[2], levels[3])
    shift = x[:, 3] - mean - std * draw_from(record.keys, generator.latent_shape)(0, 3, "renoise")
    expected = LENGTH * std * shift[0].numel() ** 0.5
    assert shift.flatten(1).norm(dim=1).tolist() == pytest.approx([expected] * len(shift), rel=1e-3)
    assert torch.equal(plain.steps.x[:, 0, :3], x[:, :3]) and not torch.equal(plain.steps.x[:, 0, 3], x[:, 3])
    config.objective = Method("grpo", {"guide": {"reward": "actions", "strength": LENGTH}, "steps_per_chunk": 3})
    assert Run(config, Accelerator()).step()["train/ratio_off"] < 1e-5


def test_a_chunk_is_judged_as_the_reward_judges_it_in_the_video():
    generator = Generator.load("tiny")
    record, prompts, values = drawn(generator, None, branches=1)
    x = record.latents
    for by in (reward(), reward(granularity="clip")):
        judge = judge_of(by, generator, prompts)
        torch.testing.assert_close(judge(0, x[:, :3], None), values[:, 0])
        torch.testing.assert_close(judge(1, x[:, 3:], x[:, :3]), values[:, 1])


def test_what_gives_no_gradient_is_refused():
    for name, by, message in (("a", reward("accuracy"), "'inverse_dynamics' as configured has no gradient"),
                              ("b", reward(), "guide.reward=b: choose one of a")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            guiding(Guide(name), {"a": (by, 1.0)})


def test_a_gradient_is_asked_of_rewards_that_declare_one():
    clips = Clips(torch.rand(2, 3, 3, 32, 32).requires_grad_(), actions=torch.tensor([[1, 2], [3, 4]]))
    value = score_with_grad(reward("log_likelihood", "clip"), clips)
    value.sum().backward()
    assert clips.frames.grad.abs().sum() > 0
    torch.testing.assert_close(value.detach(), score(reward("log_likelihood", "clip"), clips).value)
    with pytest.raises(ValueError, match="does not declare differentiable"):
        score_with_grad(reward("accuracy", "clip"), clips)

    def cut(clips):
        return clips.frames.detach().mean((1, 2, 3, 4))

    cut.differentiable = True
    with pytest.raises(ValueError, match="'cut' declares itself differentiable, but its value has no gradient"):
        score_with_grad(registry.FunctionReward(cut, "cut", {}), clips)
