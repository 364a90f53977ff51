"""Every objective learns: a reward anyone can compute goes up, and down when its sign is turned.

The network is random and tiny, so this takes seconds; that the shipped generator learns to obey its camera is in
docs/results.md, with the command.
"""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.training.align import Run
from arvideo_rl.training.settings import Method
from rewards.contract import Scores


class Brightness:
    """Mean of all pixels, or its negative."""

    name, needs, granularity, value_range = "brightness", frozenset(), "clip", (-1.0, 1.0)
    licence = hacked_by = "a test"

    def __init__(self, sign):
        self.sign = sign

    def __call__(self, clips):
        return Scores(self.sign * clips.frames.mean((1, 2, 3, 4)))


@pytest.mark.parametrize("weighting", ["diffusion_nft", "astrolabe"])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_sign_of_the_reward_decides_where_it_goes(config, kind, weighting, seed):
    """Two runs that differ in the reward's sign alone part ways. Their difference is asserted and not each gain: NFT
    also drifts towards the mean whatever the reward (objectives.md 2, identity e), and a random network shows it."""
    end = {}
    for sign in (1.0, -1.0):
        config.seed, config.policy.kind, config.lr, config.group, config.frames = seed, kind, 1e-2, 8, 3
        config.objective.args = {"weighting": weighting, "kl_weight": 0.0, "levels_per_chunk": 4}
        run = Run(config, Accelerator())
        run.rewards = {"bright": (Brightness(sign), 1.0)}
        values = [sign * run.step()["reward/bright"] for _ in range(12)]
        end[sign] = sum(values[-2:]) / 2
    assert end[1.0] - end[-1.0] > 0.02, end


OTHERS = {  # settings, iterations, and half of the difference that seed 0 shows
    "grpo": (dict(kernel="cm", eta=None, trust="score", explore="shared_init"), dict(group=12), 8, 4e-3),
    "chunk_fork": (dict(neighbours="all", anchors=3), dict(group=8), 4, 4e-3),
    "kv_routing": (dict(routed=1, nearest=2, chunks=2), dict(group=5, frames=18), 4, 4e-3),
    "fpo": (dict(draws=4), dict(group=8), 4, 4e-3),
    "pairs": (dict(apart=0.3), dict(group=2, advantage="centre"), 12, 4e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_sign_decides_under_every_objective(config, name):
    args, settings, iterations, least = OTHERS[name]
    end = {}
    for sign in (1.0, -1.0):
        config.lr, config.frames, config.objective = 3e-2, 3, Method(name, {**args, "kl_weight": 0.0})
        for key, value in settings.items():
            setattr(config, key, value)
        run = Run(config, Accelerator())
        run.rewards = {"bright": (Brightness(sign), 1.0)}
        values = [sign * run.step()["reward/bright"] for _ in range(iterations)]
        end[sign] = sum(values[-2:]) / 2
    assert end[1.0] - end[-1.0] > least, end


def test_distribution_matching_goes_where_its_teacher_is(config, tmp_path):
    """Two teachers that are the generator itself but for all of their pixels, brighter or darker."""
    end = {}
    for shift in (1.0, -1.0):
        teacher = Generator.load(config.generator)
        teacher.streaming = Streaming(6, 6, 0)
        teacher.transformer.proj_out.bias.data += shift  # it predicts the clip
        teacher.save(Path(tmp_path / f"teacher{shift}"))
        args = {
            "teacher": str(tmp_path / f"teacher{shift}"),
            "guidance": 0.0,
            "beta": 0.0,
            "warmup": 3,
            "critic_updates": 8,
            "critic_lr": 0.01,
        }  # it starts as the teacher and first learns what is made
        config.lr, config.objective = 1e-2, Method("dmd", args)
        run = Run(config, Accelerator())
        run.rewards = {"bright": (Brightness(1.0), 1.0)}
        end[shift] = [run.step()["reward/bright"] for _ in range(9)][-1]
    assert end[1.0] - end[-1.0] > 5e-3, end


def test_without_spread_nothing_is_learned(config):
    run = Run(config, Accelerator())
    before = {k: v.clone() for k, v in run.policies.parameters().items()}

    class Same(Brightness):
        def __call__(self, clips):
            return Scores(torch.ones(len(clips)))

    run.rewards = {"same": (Same(1.0), 1.0)}
    run.objective.kl_weight = 0.0
    metrics = run.step()
    assert metrics["reward/same/zero_spread_share"] == 1
    assert metrics["train/grad_norm"] < 1e-6
    moved = max((run.policies.parameters()[k] - before[k]).abs().max().item() for k in before)
    assert moved < 2e-3, "Adam on a zero gradient stays put up to rounding"
