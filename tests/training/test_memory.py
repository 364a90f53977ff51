"""Memory is estimated from the configuration and a run that plainly cannot fit is refused with what to lower."""

import gc
import runpy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training import memory
from arvideo_rl.training.align import Run
from arvideo_rl.training.settings import Method

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "bench_objectives.py"))


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
        old = sum(p.nbytes for p in run.policies.parameters("old").values()) if kind == "lora" else 0
        adapters = 2 * old + 4 * counted(run) + moments  # current, old and a gradient; full weights are counted above
        assert moments == 8 * counted(run) and run.memory["adapters and optimizer"] == adapters


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
    config.frames = 18
    assert len(context.held()) == 9, "of a window of 12 the next chunk reads 9"
    as_kept_as_read_and_the_new_chunk = held // 9 * (9 + 9 + 3)
    assert memory.phases(config, run.generator, 0)["update"]["context"] == as_kept_as_read_and_the_new_chunk


def test_tokens_are_those_of_the_latents_and_what_is_compared_is_counted_whole(config):
    """A Wan at 480 x 832 has 1,560 tokens a frame: the codec makes latents of 60 x 104, patches are 2 x 2."""
    wan = Generator.outline("longlive")
    config.rollout_batch = config.update_batch = config.held_out.batch = 1
    config.frames, config.held_out.frames = 21, 21
    found = memory.phases(config, wan, 0)["update"]
    per_frame = 2 * 2 * 30 * 1560 * 12 * 128  # keys and values of all layers in bfloat16
    assert found["context"] == per_frame * (12 + 9) and found["pixels"] == 8 * 81 * 3 * 480 * 832 * 4
    assert found["weights"] == pytest.approx(2 * 1.419e9 + 4 * 0.127e9, rel=0.02)  # and the VAE, in float32
    config.objective, config.group = Method("pairs", {}), 2
    forked = memory.phases(config, wan, 0)["update"]
    assert forked["one chunk's graph"] == 4 * found["one chunk's graph"]  # two branches x four steps, not one x two
    assert forked["context"] == found["context"], "a pair has one past"
    config.checkpointing = True
    assert memory.phases(config, wan, 0)["update"]["one chunk's graph"] < forked["one chunk's graph"] / 7


CASES = {
    "nft": ("tiny_nft", ()),
    "all weights": ("tiny_nft", ("policy.kind=full", "lr=1e-5")),
    "checkpointing": ("tiny_nft", ("checkpointing=true",)),
    "grpo": ("cps_grpo_tiny", ()),
    "chunk_fork": ("chunk_fork_tiny", ()),
    "kv_routing": ("kv_routing_tiny", ("objective.args.at_once=1",)),
    "fpo": ("fpo_tiny", ()),
    "pairs": ("pairs_tiny", ("group=2",)),
    "dmd through the context": ("dmd_tiny", ("frames=18", "objective.args.through_context=true")),
}


@pytest.mark.parametrize("case", [c if c in ("nft", "kv_routing") else pytest.param(c, marks=pytest.mark.slow)
                                  for c in CASES])  # fmt: skip
def test_what_a_loss_saves_is_what_is_estimated(case):
    """Of the shipped generator, all tensors that one loss keeps for its backward; the estimate has one block more."""
    recipe, items = CASES[case]
    run = TOOL["run_of"](recipe, "prompts_per_step=1", "group=4", *items)
    measured = max(TOOL["graph_bytes"](run, TOOL["rollouts"](run, [0])[0]))
    estimated = memory.phases(run.config, run.generator, counted(run))["update"]["one chunk's graph"]
    most = 8 if run.config.checkpointing else 1.35  # there a block's own graph only comes with the backward
    assert measured < estimated < most * measured


@pytest.mark.parametrize(
    ("recipe", "lengths"),
    [("cps_grpo_tiny", (15, 27)), ("chunk_fork_tiny", (15, 27)), ("kv_routing_tiny", (18, 27)),
     *(pytest.param(r, (18, 24, 48), marks=pytest.mark.slow) for r in
       ("tiny_nft", "cps_grpo_tiny", "tempact_tiny", "fpo_tiny", "chunk_fork_tiny", "kv_routing_tiny"))],
)  # fmt: skip
def test_what_a_loss_saves_does_not_grow_with_the_video(recipe, lengths, small):
    saved = []
    for frames in lengths:
        run = TOOL["run_of"](recipe, "prompts_per_step=1", "group=3", f"frames={frames}", f"generator={small}")
        saved.append(max(TOOL["graph_bytes"](run, run._rollouts([0])[0])))
    assert len(set(saved)) == 1 and saved[0] > 0


def test_kv_routing_can_hold_one_branch_s_graph(small):
    """Six branches at once, and one by one, with the same gradient."""
    saved, gradients = [], []
    for at_once in ("null", "1"):
        run = TOOL["run_of"]("kv_routing_tiny", "prompts_per_step=1", f"generator={small}",
                             f"objective.args.at_once={at_once}")  # fmt: skip
        with torch.no_grad():  # away from start and old, or nothing pulls
            for p in run.policies.parameters().values():
                p.add_(0.05)
        record, _ = run._rollouts([0])
        saved.append(max(TOOL["graph_bytes"](run, record)))
        run.optimizer = torch.optim.SGD(run.policies.parameters().values(), lr=1e3)
        before = {k: p.detach().clone() for k, p in run.policies.parameters().items()}
        run._update(record, torch.linspace(-1, 1, 7)[:, None].expand(-1, 6))
        gradients.append({k: before[k] - p.detach() for k, p in run.policies.parameters().items()})
    assert saved[1] < saved[0] / 4
    scale = max(g.abs().max() for g in gradients[0].values())
    assert scale > 0 and max((gradients[1][k] - g).abs().max() for k, g in gradients[0].items()) < 1e-3 * scale


@pytest.mark.parametrize(
    ("keys", "part", "says"),
    [
        (("update_batch", "prompts_per_step"), "one chunk's graph", "lower update_batch"),
        (("prompts_per_step",), "rollout", "lower prompts_per_step"),
        (("held_out.batch", "held_out.prompts"), "pixels", "held_out.batch"),
    ],
)
def test_what_plainly_cannot_fit_is_refused_with_the_key_that_made_it_so(config, keys, part, says):
    run = Run(config, Accelerator())
    most = 2 * sum(run.memory.values())
    memory.check_memory(run.memory, most)
    for key in keys:
        place = config.held_out if "." in key else config
        setattr(place, key.split(".")[-1], 1000 * getattr(place, key.split(".")[-1]))
    needed = memory.estimate(config, run.generator, counted(run))
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
