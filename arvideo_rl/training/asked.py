"""What a configuration asks for: its rewards, objective and prompts, built and checked before anything is trained."""

from __future__ import annotations

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.packed import pack
from arvideo_rl.objectives.contract import Objective
from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.grpo import GRPO
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.objectives.mix import check_mix
from arvideo_rl.training.critic import check_matching
from arvideo_rl.training.guided import guiding
from arvideo_rl.training.judges import shows_world
from arvideo_rl.training.prompts import Prompts, prompt_rows, training_prompts
from arvideo_rl.training.pull import check_pull
from arvideo_rl.training.replay import check_replay
from arvideo_rl.training.settings import (
    AlignConfig,
    build_objective,
    build_rewards,
    check,
    check_groups,
    check_on_policy,
    held_out_of,
    ungated,
    weights_of,
)
from samplers.randomness import Key
from samplers.routes import fork_frame


def asked_for(
    config: AlignConfig, generator: Generator, processes: int, missing: list[str] | None = None
) -> tuple[dict, Objective, Prompts, Prompts]:
    """(rewards, objective, training prompts, held-out prompts) of a configuration that can run with ``generator``, of
    which the weights are not looked at; ConfigError for one that cannot. ``missing`` as for :func:`build_rewards`."""
    streaming, world = generator.streaming, shows_world(generator)
    if streaming.first_alone:
        raise ConfigError("streaming.first_alone=true: videos whose first frame stands alone cannot be trained on here")
    check(config, streaming.chunk, processes, world)
    rewards = build_rewards(config.rewards, missing)
    objective = build_objective(config.objective, config.frames // streaming.chunk)
    check_groups(config, objective, processes)
    check_mix(config.mix, weights_of(config), config.rewards, {k: r.value_range for k, (r, _) in rewards.items()})
    check_pull(config.pull, ungated(weights_of(config), config), objective)
    check_replay(config.replay, config.lag, config.prompts_per_step, config.objective.target, objective)
    check_on_policy(config, objective)
    guiding(objective.exploration.guide, rewards)  # refuses one without a gradient
    if isinstance(objective, DMD):
        check_matching(objective, rewards, streaming.attention_window())
    if isinstance(objective, GRPO) and objective.packed:
        pack(streaming.attention_window(), [1] * (config.frames // streaming.chunk))  # refuses what cannot be packed
    if isinstance(objective, KVRouting):
        memory = objective.memory(streaming.attention_window(), config.frames)
        fork_frame(Key(config.seed), memory, config.frames, config.group - 1)  # refuses what has no room
    prompts = training_prompts(config.prompts, config.frames)
    prompt_rows(len(prompts), config.prompts_per_step, 0, config.seed)  # refuses too few prompts now
    held_out = held_out_of(config, world)
    source = config.prompts.source
    if source != "world" and len(held_out) < processes:
        raise ConfigError(f"{source} holds out {len(held_out)} prompts, fewer than there are processes")
    for name, (reward, _) in rewards.items() if source != "world" else ():
        if "actions" in reward.needs and not prompts.actions[:, 1:].any():
            raise ConfigError(f'rewards.{name} needs actions, but {source} has none; use a .jsonl with "actions"')
    return rewards, objective, prompts, held_out
