"""Forwards are counted by running them, and each is worth the products that torch counts."""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from diffusers.models.attention_dispatch import AttentionBackendName
from torch.utils.flop_counter import FlopCounterMode

from arvideo_rl.training import cost
from arvideo_rl.training.align import Run
from arvideo_rl.training.settings import Method

OBJECTIVES = {
    "nft": {"levels_per_chunk": 2, "from_chunk": 1},
    "grpo": {"kernel": "cps", "steps_per_chunk": 2, "kl_weight": 0.1},
    "grpo packed": {"kl_weight": 0.1, "packed": True, "context_writer": "current"},
    "chunk_fork": {"from_chunk": 1, "kl_weight": 0.1},
    "kv_routing": {"chunks": 1, "routed": 2, "at_once": 2},
    "fpo": {"draws": 2},
    "pairs": {"from_chunk": 1},
    "dmd": {"teacher": "tiny_teacher", "critic_updates": 2},
}


SLOW = ("grpo", "kv_routing", "fpo", "pairs")  # counting is: seconds each


@pytest.mark.parametrize(
    ("target", "checkpointing"),
    [*(pytest.param(k, False, marks=[pytest.mark.slow] if k in SLOW else []) for k in OBJECTIVES), ("nft", True)],
)
def test_an_iteration_is_worth_what_torch_counts(config, target, checkpointing):
    config.objective, config.prompts_per_step = Method(target.split()[0], OBJECTIVES[target]), 1
    config.frames = 18 if target == "kv_routing" else 12
    config.group, config.advantage = {"pairs": (2, "centre"), "kv_routing": (4, "group_z")}.get(target, (2, "group_z"))
    config.checkpointing = checkpointing
    run = Run(config, Accelerator())
    run.generator.transformer.attention = AttentionBackendName._NATIVE_MATH  # a fused kernel's products are not counted
    run.prompts = run.prompts.take([0, 1])
    run.prompts = type(run.prompts)(
        run.prompts.texts, run.prompts.actions, (0, 1)
    )  # as the counted ones, which fork alike
    found = {}
    with FlopCounterMode(display=False) as counter:
        record, _ = run._rollouts([0])
    found["rollout"] = counter.get_total_flops()
    adv = torch.linspace(-1, 1, len(record))[:, None].expand(-1, config.frames // 3)
    if run.critic is not None:
        for network in (run.critic.teacher.transformer, *run.critic.policies._copies.values()):
            network.attention = AttentionBackendName._NATIVE_MATH
        with FlopCounterMode(display=False) as counter:
            run.critic.learn(record, run.prompts, 1, run.accelerator)
            record = replace(record, towards=run.critic.towards(record, run.prompts, 1))
        found["teacher and critic"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        run._update(record, adv)
    found["update"] = counter.get_total_flops()
    told = cost.flops(config, run.generator)
    assert told.keys() == found.keys()
    assert told["rollout"] == pytest.approx(found["rollout"], rel=0.02)
    assert told == pytest.approx(found, rel=0.05)


def test_text_for_people():
    assert cost.seconds(0.034) == "0.034 s" and cost.seconds(170) == "170 s" and cost.seconds(7200) == "2.0 h"
    assert cost.number(1.42e15) == "1.42 P" and cost.number(5e9) == "5 G"
