"""Memory is estimated from the configuration and a run that plainly cannot fit is refused with what to lower."""

import gc
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.training import memory
from arvideo_rl.training.align import Run
from arvideo_rl.training.settings import Method


def counted(run: Run) -> int:
    return sum(p.numel() for p in run.policies.parameters().values())


def test_weights_and_optimizer_are_as_many_bytes_as_there_are(config):
    for kind in ("lora", "full"):
        config.policy.kind = kind
        run = Run(config, Accelerator())
        run.step()
        gc.collect()
        nets = [run.generator.transformer, *getattr(run.policies, "_copies", {}).values()]
        bare = sum(4 * p.numel() for n in nets for k, p in n.named_parameters() if "lora_" not in k)
        assert run.memory["weights"] == bare
        moments = sum(v.nbytes for s in run.optimizer.state.values() for v in s.values() if v.ndim)
        assert moments == 8 * counted(run) and run.memory["adapters and optimizer"] == 16 * counted(run)


def test_the_context_is_as_many_bytes_as_a_rollout_holds(config):
    run = Run(config, Accelerator())
    window = run.generator.streaming.attention_window()
    model, context = run.generator.transformer, window.start()
    x = torch.zeros(2, *run.generator.latent_shape)
    text = torch.zeros(2, 4, model.config.text_dim)
    from dataclasses import replace

    context = replace(context, text=text)
    for _ in range(6):
        span = model(x, torch.zeros(2), context, write=True).span
        context = window.commit(context, span)
    held = sum(t.nbytes for s in context.spans for t in (*s.keys, *s.values))
    config.rollout_batch = config.update_batch = config.held_out.batch = 2
    estimated = memory.estimate(config, run.generator, 0)["context"]
    assert held <= estimated <= 2 * held


def test_tokens_are_those_of_the_latents_and_forks_are_counted_whole(config):
    """A Wan at 480 x 832 has 1,560 tokens a frame: the codec makes latents of 60 x 104, patches are 2 x 2."""
    run = Run(config, Accelerator())
    network = SimpleNamespace(
        config=SimpleNamespace(patch_size=(1, 2, 2), num_attention_heads=12, attention_head_dim=128, num_layers=30,
                               ffn_dim=8960),
        named_parameters=list,
    )  # fmt: skip
    wan = SimpleNamespace(
        transformer=network, latent_shape=(3, 16, 60, 104), codec=SimpleNamespace(pixel_frames=lambda f: 4 * f - 3),
        streaming=Streaming(window=12, size=480, width=832),
    )  # fmt: skip
    config.rollout_batch = config.update_batch = config.held_out.batch = 1
    found = memory.estimate(config, wan, 0)
    per_frame = 2 * 4 * 30 * 1560 * 12 * 128  # keys and values of all layers in float32
    assert found["context"] == per_frame * 12 and found["rollout"] > 0
    config.objective, config.group = Method("pairs", {}), 2
    forked = memory.estimate(config, wan, 0)
    assert forked["one chunk's graph"] == 4 * found["one chunk's graph"]  # two branches x four steps, not one x two
    assert forked["context"] == 2 * found["context"] and run.memory["context"] > 0


@pytest.mark.parametrize(
    ("key", "part", "says"),
    [
        ("update_batch", "one chunk's graph", "lower update_batch"),
        ("rollout_batch", "context", "lower rollout_batch"),
        ("prompts_per_step", "rollout", "lower prompts_per_step"),
    ],
)
def test_what_plainly_cannot_fit_is_refused_with_the_key_that_made_it_so(config, key, part, says):
    run = Run(config, Accelerator())
    most = 2 * sum(run.memory.values())
    memory.check_memory(run.memory, most)
    setattr(config, key, 1000 * getattr(config, key))
    needed = memory.estimate(config, run.generator, counted(run))
    assert max(needed, key=lambda k: needed[k]) in (part, "context")  # update_batch widens both
    with pytest.raises(ConfigError, match=says) as error:
        memory.check_memory(needed, most)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_run_is_refused_before_its_directory_is_made(config, tmp_path, monkeypatch):
    from arvideo_rl.training import align as module
    from arvideo_rl.training.launch import align

    monkeypatch.setattr(module, "limit", lambda device: 1000)
    with pytest.raises(ConfigError, match="needs about .* of memory, there are 0 MiB"):
        align(config)
    assert not (tmp_path / config.name).exists()


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("1048576\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(memory, "CGROUP", (tmp_path / "none", tmp_path / "gone"))
    whole = memory.limit(torch.device("cpu"))
    monkeypatch.setattr(memory, "CGROUP", (tmp_path / "max",))
    assert memory.limit(torch.device("cpu")) == 2**20 < whole


def test_after_memory_ran_out_a_smaller_run_in_the_same_process_works(config, monkeypatch):
    from arvideo_rl.objectives.nft import NFT

    losses = NFT.losses

    def greedy(self, policies, denoiser, record, *rest):
        if len(record) > 4:
            torch.empty(10**15)
        return losses(self, policies, denoiser, record, *rest)

    monkeypatch.setattr(NFT, "losses", greedy)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        Run(config, Accelerator()).step()
    config.update_batch = 4
    assert Run(config, Accelerator()).step()["train/grad_norm"] > 0
