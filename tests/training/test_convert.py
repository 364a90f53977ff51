"""Published weights rewritten for other programs, and a run's policy under Wan's own names."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import PeftModel
from safetensors.torch import load_file, save_file

from arvideo_rl.cli.main import main
from arvideo_rl.generators.lora import merge, read_lora
from arvideo_rl.generators.names import to_official
from arvideo_rl.generators.pretrained import build, load_transformer

CONFIG = dict(num_attention_heads=1, attention_head_dim=128, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """An official checkpoint with two sets of weights, and a LoRA for it with alpha 3 and rank 2."""
    folder = tmp_path_factory.mktemp("student")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        state = {to_official(k): torch.randn(v.shape) * 0.1 for k, v in build(CONFIG).state_dict().items()}
        lora = {f"blocks.0.cross_attn.{m}.lora_{k}.weight": torch.randn(s) for m in "qkv"
                for k, s in {"down": (2, 128), "up": (128, 2)}.items()}  # fmt: skip
    torch.save({"generator": state, "generator_ema": {k: v * 2 for k, v in state.items()}}, folder / "student.pt")
    save_file(lora | {f"blocks.0.cross_attn.{m}.alpha": torch.tensor(3.0) for m in "qkv"}, folder / "lora.safetensors")
    return folder


def convert(*args, capsys):
    with pytest.raises(SystemExit) as end:
        main(["convert", *map(str, args)])
    out, err = capsys.readouterr()
    return end.value.code or 0, out + err


@pytest.mark.parametrize("container", ["generator", "generator_ema"])
@pytest.mark.parametrize("target", ["out.safetensors", "out.pt", "folder"])
def test_a_checkpoint_is_the_same_weights_in_every_form(student, tmp_path, capsys, container, target):
    out = tmp_path / target
    code, said = convert(student / "student.pt", f"out={out}", f"container={container}", capsys=capsys)
    assert code == 0 and "tensors" in said and container in said
    expected, _ = load_transformer(student / "student.pt", container=container)
    if target == "folder":
        found = WanTransformer3DModel.from_pretrained(out).state_dict()
    else:
        found = load_transformer(out)[0].state_dict()
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[k], v) for k, v in expected.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == [target]


def test_a_lora_is_merged_and_the_dtype_changed(student, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    args = (student / "student.pt", f"out={out}", f"lora={student / 'lora.safetensors'}", "dtype=bfloat16")
    code, said = convert(*args, "container=generator", capsys=capsys)
    assert code == 0 and "LoRA merged into 3 modules" in said
    model, _ = load_transformer(student / "student.pt", torch.bfloat16, container="generator")
    merge(model, read_lora(student / "lora.safetensors"))
    found = load_file(out)["blocks.0.cross_attn.q.weight"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, model.blocks[0].attn2.to_q.weight)


@pytest.mark.parametrize("form", ["diffusers", "peft"])
def test_a_lora_changes_the_weights_alike_in_the_library_that_reads_it(student, tmp_path, capsys, form):
    out = tmp_path / "adapter"
    code, said = convert(student / "lora.safetensors", f"out={out}", f"format={form}", capsys=capsys)
    assert code == 0 and "3 modules" in said
    expected, model = (load_transformer(student / "student.pt")[0] for _ in range(2))
    merge(expected, read_lora(student / "lora.safetensors"))
    if form == "peft":
        merged = PeftModel.from_pretrained(model, str(out)).merge_and_unload()
    else:
        model.load_lora_adapter(str(out), weight_name="pytorch_lora_weights.safetensors", local_files_only=True)
        model.fuse_lora()
        merged = model
    weight = expected.blocks[0].attn2.to_k.weight
    modules = dict(merged.named_modules())
    found = modules["blocks.0.attn2.to_k"]
    found = getattr(found, "base_layer", found).weight
    torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{}/student.pt"], "say where to write"),
        (["{}/student.pt", "out={}/student.pt"], "exists"),
        (["{}/student.pt", "out={}/x", "format=peft"], "a checkpoint can be written as official, diffusers"),
        (["{}/lora.safetensors", "out={}/x", "format=official"], "a LoRA can be written as diffusers, peft"),
        (["{}/lora.safetensors", "out={}/x", "dtype=float16"], "dtype= is not for a LoRA"),
        (["{}/student.pt", "out={}/x", "dtype=int4"], "dtype=int4"),
        (["{}/student.pt", "out={}/x", "container=critic"], "has no 'critic'"),
        (["{}/student.pt", "out={}/x.safetensors", "lora={}/student.pt"], "the top level holds generator"),
        (["{}/nothing.pt", "out={}/x"], "no file or folder"),
    ],
)
def test_wrong_arguments_are_one_line_and_write_nothing(student, capsys, args, words):
    before = sorted(student.iterdir())
    code, said = convert(*(a.format(student) for a in args), capsys=capsys)
    assert code != 0 and words in said and len(said.strip().splitlines()) == 1, said
    assert sorted(student.iterdir()) == before


def test_what_is_read_back_differently_is_not_written(student, tmp_path, capsys, monkeypatch):
    from arvideo_rl.training import convert as module

    real = module.save_official
    monkeypatch.setattr(module, "save_official", lambda m, p: (real(m, p), m.proj_out.weight.data.add_(1)))
    code, said = convert(student / "student.pt", f"out={tmp_path / 'x.safetensors'}", capsys=capsys)
    assert code != 0 and "was not written" in said and not list(tmp_path.iterdir())
