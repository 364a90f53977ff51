"""Loading a policy from its run, and exporting it: what comes out must be what was trained."""

import copy
import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffusers import WanTransformer3DModel
from peft import PeftModel
from safetensors.torch import load_file, save_file

from arvideo_rl.cli.main import main
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.pretrained import load_transformer
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.training import export as module
from arvideo_rl.training import rundir
from arvideo_rl.training.align import Run
from arvideo_rl.training.aligned import load_aligned, load_any
from arvideo_rl.training.checkpoints import TENSORS, checkpoints
from arvideo_rl.training.distill import DistillConfig, Network
from arvideo_rl.training.distill import run as distill
from arvideo_rl.training.export import DIFFUSERS_FILE, OFFICIAL_FILE, PEFT_FILE, export, outputs
from arvideo_rl.world.scene import COLOURS


def make_run(config, folder: Path, steps: int = 3) -> Run:
    """A run directory with a checkpoint a step; the second one scores best."""
    import dataclasses

    run = Run(config, Accelerator())
    rundir.claim(folder, "align", dataclasses.asdict(config), ())
    rundir.start(folder, None, dataclasses.asdict(config))
    for step in range(1, steps + 1):
        run.step()
        run.save(folder, score={1: 0.1, 2: 0.9}.get(step))
    return run


@pytest.fixture
def config(config):
    config.lr, config.policy.alpha = 1e-2, 10.0  # far enough to show; alpha is not the rank
    return config


@pytest.fixture
def trained(config, tmp_path):
    """(run directory, output of its policy, output of its base)."""
    base = Generator.load(config.generator)
    run = make_run(config, tmp_path / "run")
    return str(tmp_path / "run"), outputs(run.generator, run.policies), outputs(base, base.transformer)


def test_the_trained_policy_is_what_is_loaded_and_not_its_base(trained):
    source, policy, base = trained
    generator, model, text = load_any(source)
    assert torch.equal(outputs(generator, model), policy) and (policy - base).abs().max() > 1e-3
    assert "step-000003" in text and "40 tensors of lora" in text  # 2 layers x 10 linears x (A, B)
    assert not any(p.requires_grad for p in model.parameters())


def test_any_checkpoint_of_a_run_can_be_named(trained):
    source, policy, _ = trained
    found = {which: load_aligned(f"{source}{which}") for which in ("", "@newest", "@best", "@2", "@1")}
    steps = {which: int(x.checkpoint.name[-1]) for which, x in found.items()}
    assert steps == {"": 3, "@newest": 3, "@best": 2, "@2": 2, "@1": 1}
    assert load_aligned(f"{source}/checkpoints/step-000001").checkpoint == found["@1"].checkpoint
    out = {which: outputs(x.generator, x.generator.transformer) for which, x in found.items()}
    assert torch.equal(out[""], policy) and not torch.equal(out["@1"], out["@2"])
    for which, says in (("@7", "steps 1, 2, 3"), ("@worst", "newest, best")):
        with pytest.raises(ValueError, match=says):
            load_any(source + which)


def test_a_run_without_a_checkpoint_is_an_error_and_not_its_base(config, tmp_path):
    make_run(config, tmp_path / "run", 0)
    with pytest.raises(ValueError, match="has no complete checkpoint yet"):
        load_any(str(tmp_path / "run"))


def test_a_folder_may_have_an_at_in_its_name(config, tmp_path):
    make_run(config, tmp_path / "me@home", 1)
    assert load_aligned(str(tmp_path / "me@home")).checkpoint.name == "step-000001"
    assert load_aligned(f"{tmp_path / 'me@home'}@1").checkpoint.name == "step-000001"


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_neither_optimizer_nor_copies_are_made_to_load(kind, config, tmp_path, monkeypatch):
    config.policy.kind = kind
    run = make_run(config, tmp_path / "run", 1)
    expected = outputs(run.generator, run.policies)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the optimizer was read"))
    real = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda x, *a, **k: 1 / 0 if isinstance(x, CausalWan) else real(x, *a, **k))
    generator, model, _ = load_any(str(tmp_path / "run"))
    assert torch.equal(outputs(generator, model), expected)
    assert not [k for k, _ in model.named_parameters() if ".old." in k]


def test_a_damaged_newest_is_passed_over_aloud_and_a_damaged_named_one_is_refused(trained, capsys):
    source, *_ = trained
    path = checkpoints(Path(source))[-1]
    (path / TENSORS).write_bytes((path / TENSORS).read_bytes()[:-3])
    assert load_aligned(source).checkpoint.name == "step-000002"
    assert "step-000003 is damaged" in capsys.readouterr().err
    with pytest.raises(ValueError, match="step-000003 is damaged"):
        load_aligned(str(path))


def test_a_run_on_another_base_than_its_own_is_refused(trained, config, tmp_path):
    source, *_ = trained
    other = Generator.load(config.generator)
    other.transformer.patch_embedding.weight.data[0] += 1e-3
    other.save(tmp_path / "other")
    text = (Path(source) / "config.yaml").read_text()
    (Path(source) / "config.yaml").write_text(text.replace(config.generator, str(tmp_path / "other")))
    for which in ("", "@1"):
        with pytest.raises(ValueError, match="does not belong to generator .*other: weights was"):
            load_any(source + which)


@pytest.mark.parametrize("name", ["missing", "unknown"])
def test_a_tensor_too_few_or_too_many_is_refused(name, trained, config):
    from arvideo_rl.generators.policies import adapt

    tensors = load_file(checkpoints(Path(trained[0]))[-1] / TENSORS)
    current = {k.removeprefix("current/"): v for k, v in tensors.items() if k.startswith("current/")}
    if name == "missing":
        current.popitem()
    else:
        current["blocks.0.attn1.to_z.lora_A"] = torch.zeros(4, 32)
    with pytest.raises(ValueError, match="differing names"):
        adapt(Generator.load(config.generator).transformer, config.policy, current)


def test_a_distillation_is_loaded_by_its_result_and_has_no_alignment_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path / "cache"))
    network = Network(dim=32, layers=1, ffn=32, patch=(16, 16), text_dim=16)
    made = distill(
        DistillConfig(out=str(tmp_path / "d"), steps=1, clips=4, switch_clips=0, batch=1, levels=1, network=network),
        False,
    )
    _, model, text = load_any(str(tmp_path / "d"))
    assert (
        torch.equal(model.proj_out.weight, Generator.load(made).transformer.proj_out.weight)
        and str(made.parent) in text
    )
    for source in (f"{tmp_path / 'd'}@best", str(checkpoints(tmp_path / "d")[-1])):
        with pytest.raises(ValueError, match="no alignment checkpoint"):
            load_any(source)
    made.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="has not finished: continue with arvideo distill"):
        load_any(str(tmp_path / "d"))


def test_diffusers_reads_the_exported_adapter(trained, config, tmp_path):
    source, policy, _ = trained
    said = export(source, tmp_path / "out", "diffusers")
    assert "40 tensors" in said and "step-000003" in said
    tensors = load_file(tmp_path / "out" / DIFFUSERS_FILE)
    assert len(tensors) == 40 and all(k.startswith("transformer.blocks.") and ".lora_" in k for k in tensors)
    fresh = Generator.load(config.generator)
    assert isinstance(fresh.transformer, WanTransformer3DModel)
    fresh.transformer.load_lora_adapter(tensors)
    torch.testing.assert_close(outputs(fresh, fresh.transformer), policy, rtol=0, atol=1e-5 * policy.abs().max().item())


def test_diffusers_own_wan_takes_every_tensor_of_the_export(trained, config, tmp_path):
    """The plain class, as a WanPipeline holds it, without our forward."""
    export(trained[0], tmp_path / "out", "diffusers")
    own = Generator.load(config.generator).transformer.config
    keys = ("patch_size", "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim",
            "freq_dim", "ffn_dim", "num_layers", "cross_attn_norm", "qk_norm", "eps")  # fmt: skip
    plain = WanTransformer3DModel(**{k: own[k] for k in keys})
    plain.load_lora_adapter(str(tmp_path / "out"), weight_name=DIFFUSERS_FILE, local_files_only=True)
    bound = {k.replace(".default_0", ""): p for k, p in plain.named_parameters() if "lora_" in k}
    written = load_file(tmp_path / "out" / DIFFUSERS_FILE)
    assert {f"transformer.{k}" for k in bound} == set(written)
    assert all(torch.equal(p, written[f"transformer.{k}"]) for k, p in bound.items())


def test_peft_reads_the_exported_adapter(trained, config, tmp_path):
    source, policy, _ = trained
    export(source, tmp_path / "out", "peft")
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert said["r"] == 4 and said["lora_alpha"] == 10.0 and said["base_model_name_or_path"] == config.generator
    assert all(".lora_" in k for k in load_file(tmp_path / "out" / PEFT_FILE))
    fresh = Generator.load(config.generator)
    model = PeftModel.from_pretrained(fresh.transformer, str(tmp_path / "out"))
    torch.testing.assert_close(outputs(fresh, model), policy, rtol=0, atol=1e-5 * policy.abs().max().item())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_merged_generator_is_the_policy(kind, config, tmp_path):
    config.policy.kind = kind
    run = make_run(config, tmp_path / "run", 1)
    expected = outputs(run.generator, run.policies)
    export(str(tmp_path / "run"), tmp_path / "out", "merged")
    assert not [k for k in load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors") if "lora" in k]
    generator, model, text = load_any(str(tmp_path / "out"))
    assert text.startswith(f"generator {tmp_path / 'out'}: loaded")
    torch.testing.assert_close(outputs(generator, model), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_adapters_are_small_and_differ_between_checkpoints(trained, config, tmp_path):
    source, *_ = trained
    for step in (1, 2):
        export(f"{source}@{step}", tmp_path / f"out{step}", "diffusers")
    one, two = (load_file(tmp_path / f"out{step}" / DIFFUSERS_FILE) for step in (1, 2))
    assert not any(torch.equal(one[k], two[k]) for k in one if "lora_B" in k)
    trained_numbers = sum(v.numel() for v in one.values())
    assert (tmp_path / "out1" / DIFFUSERS_FILE).stat().st_size < 4 * trained_numbers + 20_000
    about = json.loads((tmp_path / "out2" / "export.json").read_text())
    assert about["from"].endswith("step-000002") and about["tensors"] == 40 and about["base"]["rank"] == 4


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # peft only warns of what must be an error
@pytest.mark.parametrize("form", ["diffusers", "peft"])
@pytest.mark.parametrize("spoil", ["value", "name", "nothing left", "one less"])
def test_an_export_that_does_not_come_through_whole_is_not_written(form, spoil, trained, tmp_path, monkeypatch):
    def spoilt(tensors, path, metadata=None):
        key = next(k for k in tensors if "lora_B" in k)
        if spoil == "value":
            tensors = tensors | {key: tensors[key] * 1.01}
        elif spoil == "name":
            tensors = {k.replace("to_q", "to_z"): v for k, v in tensors.items()}
        elif spoil == "nothing left":
            tensors = {k.replace("blocks", "layers"): v for k, v in tensors.items()}
        else:
            tensors = {k: v for k, v in tensors.items() if k != key}
        save_file(tensors, path, metadata)

    monkeypatch.setattr(module, "save_file", spoilt)
    with pytest.raises(ValueError):
        export(trained[0], tmp_path / "out", form)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("form", ["diffusers", "peft"])
def test_tensors_that_find_no_place_are_an_error_also_where_the_output_would_not_show_it(
    form, config, tmp_path, monkeypatch
):
    run = make_run(config, tmp_path / "run", 0)
    run.save(tmp_path / "run")  # untrained, so B is 0 and the policy is its base
    spoilt = {"to_q": "to_z"} if form == "peft" else {"blocks.1.attn1.to_q": "blocks.1.to_q"}
    (old, new), real = next(iter(spoilt.items())), save_file
    rename = lambda tensors, *rest: real({k.replace(old, new): v for k, v in tensors.items()}, *rest)  # noqa: E731
    monkeypatch.setattr(module, "save_file", rename)
    with pytest.raises(ValueError, match="only .* of 40 tensors"):
        export(str(tmp_path / "run"), tmp_path / "out", form)
    assert not list(tmp_path.glob("out*"))


def test_a_merge_that_forgets_the_adapter_is_not_written(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(CausalWan, "fuse_lora", lambda self: None)
    with pytest.raises(ValueError, match="output differs"):
        export(trained[0], tmp_path / "out", "merged")
    assert not list(tmp_path.glob("out*"))


@pytest.fixture
def other(config, tmp_path):
    """A second run on the same base, with another seed, rank and alpha and fewer adapters."""
    config = copy.deepcopy(config)
    config.seed, config.policy.rank, config.policy.alpha, config.policy.targets = 5, 2, 3.0, ("to_q", "ffn.net.2")
    make_run(config, tmp_path / "other", 1)
    return str(tmp_path / "other")


def test_a_merge_is_the_base_and_the_sum_of_both_changes(trained, other, config, tmp_path):
    said = export(trained[0], tmp_path / "out", "merged", f"{other}:0.8")
    assert "step-000003 + 0.8 * " in said and "other/checkpoints/step-000001" in said
    weights = {k: v.clone() for k, v in Generator.load(config.generator).transformer.state_dict().items()}
    for source, scale in ((trained[0], 10 / 4), (other, 0.8 * 3 / 2)):  # alpha / rank
        tensors = load_file(checkpoints(Path(source))[-1] / TENSORS)
        for key in (k for k in tensors if k.startswith("current/") and k.endswith("lora_A")):
            name = key.removeprefix("current/").removesuffix(".lora_A") + ".weight"
            weights[name] += scale * tensors[key[:-1] + "B"] @ tensors[key]
    fresh = Generator.load(config.generator)
    fresh.transformer.load_state_dict(weights)
    expected = outputs(fresh, fresh.transformer)
    generator, model, _ = load_any(str(tmp_path / "out"))
    found = outputs(generator, model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (found - trained[1]).abs().max() > 1e-2 * (trained[1] - trained[2]).abs().max(), "the second must show"
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert about["merged"]["scale"] == 0.8 and about["merged"]["from"].endswith("step-000001")


def test_runs_of_two_bases_are_not_merged(trained, other, config, tmp_path):
    changed = Generator.load(config.generator)
    changed.transformer.patch_embedding.weight.data[0] += 1e-3
    changed.save(tmp_path / "changed")
    one = copy.deepcopy(config)
    one.generator = str(tmp_path / "changed")
    make_run(one, tmp_path / "third", 1)
    with pytest.raises(
        ValueError, match="third.*does not belong to the base of .*run/checkpoints/step-000003: weights"
    ):
        export(trained[0], tmp_path / "out", "merged", f"{tmp_path / 'third'}:1")
    assert not (tmp_path / "out").exists()


def test_a_fully_trained_run_is_not_merged(trained, config, tmp_path):
    full = copy.deepcopy(config)
    full.policy.kind = "full"
    make_run(full, tmp_path / "full", 1)
    for a, b in ((trained[0], tmp_path / "full"), (str(tmp_path / "full"), trained[0])):
        with pytest.raises(ValueError, match="both must have policy.kind=lora"):
            export(a, tmp_path / "out", "merged", f"{b}:1")


def test_merging_on_the_command_line(trained, other, tmp_path, capsys):
    out = tmp_path / "both"
    assert convert(trained[0], f"merge={other}@1:0.5", f"out={out}", "--dry-run") == 0 and not out.exists()
    assert "as merged from" in (said := capsys.readouterr().out) and "+ 0.5 * " in said
    assert convert(trained[0], f"merge={other}@1:0.5", f"out={out}") == 0 and (out / "generator.json").is_file()
    capsys.readouterr()
    for merge, form, says in (
        (other, "merged", "e.g. merge=runs/other:0.8"),
        (f"{other}:x", "merged", "e.g. merge=runs/other:0.8"),
        (":1", "merged", "e.g. merge=runs/other:0.8"),
        ("gone:1", "merged", "'gone' is not an alignment run"),
        (f"{other}:1", "peft", "use format=merged or official"),
    ):
        assert convert(trained[0], f"merge={merge}", f"format={form}", f"out={tmp_path / 'x'}") == 1
        said = capsys.readouterr().err
        assert says in said and len(said.strip().splitlines()) == 1, said


def convert(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["convert", *args])
    return end.value.code or 0


def test_convert_on_the_command_line(trained, config, tmp_path, capsys):
    source, *_ = trained
    out = tmp_path / "lora"
    assert convert(f"{source}@best", f"out={out}", "--dry-run") == 0 and not out.exists()
    assert "step-000002" in capsys.readouterr().out
    assert convert(f"{source}@best", f"out={out}") == 0
    assert f"wrote {out}: 40 tensors" in capsys.readouterr().out and (out / DIFFUSERS_FILE).is_file()
    for args, code, says in [
        ((source, f"out={out}"), 2, "exists"),
        ((source,), 2, "out=FOLDER"),
        ((), 2, "one source"),
        ((source, f"out={tmp_path / 'x'}", "format=gguf"), 1, "diffusers, peft, merged"),
        (("tiny", f"out={tmp_path / 'x'}"), 1, "not an alignment run"),
        ((f"{source}@9", f"out={tmp_path / 'x'}"), 1, "steps 1, 2, 3"),
    ]:
        assert convert(*args) == code
        said = capsys.readouterr().err
        assert says in said and len(said.strip().splitlines()) == 1, said
    assert not (tmp_path / "x").exists()


def test_a_full_run_has_no_adapter_to_export(config, tmp_path):
    config.policy.kind = "full"
    make_run(config, tmp_path / "run", 1)
    with pytest.raises(ValueError, match="format=merged"):
        export(str(tmp_path / "run"), tmp_path / "out", "peft")


def test_evaluate_compares_two_checkpoints_of_one_run_and_runs_of_two_bases(trained, config, tmp_path, capsys):
    source, *_ = trained
    other = Generator.load(config.generator)
    other.transformer.patch_embedding.weight.data += 0.01
    other.save(tmp_path / "other")
    config.generator = str(tmp_path / "other")
    config.policy.rank = 2
    make_run(config, tmp_path / "second", 1)
    sizes = ("held_out.prompts=6", "held_out.noises=1", "held_out.frames=12")
    gains = []
    for a, b in ((source, f"{source}@1"), (source, source), (f"{source}@best", str(tmp_path / "second"))):
        with pytest.raises(SystemExit) as end:
            main(["evaluate", f"generator={a}", f"against={b}", f"out={tmp_path / 'e.json'}", *sizes])
        assert not end.value.code, capsys.readouterr().err
        gains.append(json.loads((tmp_path / "e.json").read_text())["verifiers"][0:4])
    assert all(v["delta"] == 0 for v in gains[1])
    assert any(v["delta"] != 0 for v in gains[0]) and any(v["delta"] != 0 for v in gains[2])


def test_the_policy_in_official_names_is_the_policy_and_a_part_that_wan_lacks_is_refused(config, tmp_path):
    make_run(config, tmp_path / "own", 1)
    with pytest.raises(ValueError, match=r"official Wan has no place_embedding, action_embedding"):
        export(str(tmp_path / "own"), tmp_path / "out", "official")
    assert not (tmp_path / "out").exists()
    base = Generator.load(config.generator)
    plain = {k: v for k, v in base.transformer.config.items() if k not in ("num_actions", "places", "prediction")}
    base.transformer = CausalWan(**plain)
    base.save(tmp_path / "wan")
    config.generator, config.prompts.source = str(tmp_path / "wan"), str(tmp_path / "prompts.jsonl")
    said = [
        {"prompt": f"a {c} {o} {m}", "actions": "forward*17"}
        for c in COLOURS
        for o in ("ball", "cube")
        for m in ("rests", "rolls left", "slides left")
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, said)))
    run = make_run(config, tmp_path / "run", 1)
    expected = outputs(run.generator, run.policies)
    assert "output equal" in export(str(tmp_path / "run"), tmp_path / "out", "official")
    model, _ = load_transformer(tmp_path / "out" / OFFICIAL_FILE, head_dim=32)
    torch.testing.assert_close(outputs(run.generator, model), expected, rtol=0, atol=1e-5)
