"""Checkpoints in every published layout: read to the same weights, written so that others read them, or refused."""

import json
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from arvideo_rl.generators.lora import attach, merge, read_lora
from arvideo_rl.generators.names import to_diffusers, to_official, unwrap
from arvideo_rl.generators.pretrained import build, load_transformer, save_official, stored_dtype
from arvideo_rl.generators.weights import read_state, recognise

NAMES = json.loads((Path(__file__).parents[1] / "golden" / "wan_names.json").read_text())


@pytest.fixture(scope="module")
def official(golden_wan):
    """The golden model's weights under official names."""
    return {to_official(k): v.clone() for k, v in golden_wan.state_dict().items()}


def test_names_are_those_of_the_published_conversion_both_ways(golden_wan):
    assert {k: to_diffusers(k) for k in NAMES} == NAMES
    assert {to_official(v): v for v in NAMES.values()} == NAMES
    assert set(golden_wan.state_dict()) == set(NAMES.values())
    assert to_diffusers("blocks.3.norm2.weight") is None and to_diffusers("blocks.3.self_attn.qq.weight") is None
    assert to_diffusers("blocks.17.cross_attn.o.lora_A.weight") == "blocks.17.attn2.to_out.0.lora_A.weight"


@pytest.mark.parametrize(
    "key",
    ["model.{}", "generator.model.{}", "module.model._fsdp_wrapped_module.{}", "_orig_mod.{}", "base_model.model.{}",
     "model.diffusion_model.{}"],
)  # fmt: skip
def test_wrappers_are_taken_off_wherever_they_are(key):
    assert unwrap(key.format("head.head.weight")) == "head.head.weight"
    assert unwrap("model.blocks.0._checkpoint_wrapped_module.ffn._orig_mod.0.bias") == "blocks.0.ffn.0.bias"


def layouts(official, golden_wan, folder: Path) -> dict[str, Path]:
    """The same weights in every layout."""
    diffusers = golden_wan.state_dict()
    paths = {name: folder / name for name in
             ("raw.pt", "ema.pt", "generator.pth", "model.bin", "fsdp.ckpt", "raw.safetensors", "krea.safetensors",
              "diffusers.safetensors", "folder", "sharded", "comfy.safetensors")}  # fmt: skip
    other = {k: v + 1 for k, v in official.items()}
    torch.save(official, paths["raw.pt"])
    torch.save({"generator": other, "generator_ema": official, "critic": other, "step": 3}, paths["ema.pt"])
    torch.save({"generator": {f"model.{k}": v for k, v in official.items()}}, paths["generator.pth"])
    torch.save({"model": diffusers}, paths["model.bin"])
    wrapped = {f"model._fsdp_wrapped_module.{k.replace('ffn', 'ffn._orig_mod')}": v for k, v in official.items()}
    torch.save({"generator": wrapped}, paths["fsdp.ckpt"])
    save_file(official, paths["raw.safetensors"])
    save_file({f"model.{k}": v for k, v in official.items()}, paths["krea.safetensors"])
    save_file({f"model.diffusion_model.{k}": v for k, v in official.items()}, paths["comfy.safetensors"])
    save_file(diffusers, paths["diffusers.safetensors"])
    golden_wan.save_pretrained(paths["folder"])
    golden_wan.save_pretrained(paths["sharded"], max_shard_size="400KB")
    assert len(list(paths["sharded"].glob("*.safetensors"))) > 2
    return paths


def test_every_layout_gives_the_same_weights(official, golden_wan, tmp_path):
    wanted = golden_wan.state_dict()
    for name, path in layouts(official, golden_wan, tmp_path).items():
        model, said = load_transformer(path, head_dim=32)
        got = model.state_dict()
        assert set(got) == set(wanted) and all(torch.equal(got[k], wanted[k]) for k in wanted), name
        assert f"loaded {len(wanted)} tensors" in said and ("generator_ema of" in said) == (name == "ema.pt"), said
        assert model.config.num_attention_heads == 4 and model.config.prediction == "v"


def test_the_container_can_be_chosen(official, golden_wan, tmp_path):
    path = layouts(official, golden_wan, tmp_path)["ema.pt"]
    state, part = read_state(path, "generator")
    assert part == "generator" and torch.equal(state["proj_out.bias"], official["head.head.bias"] + 1)
    with pytest.raises(ValueError, match="has no 'model'; it has generator_ema, generator"):
        read_state(path, "model")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_is_written_in_official_names_is_read_back(official, golden_wan, tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    save_official(golden_wan, path)
    raw = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)["generator"]
    assert set(raw) == set(NAMES) and all(torch.equal(raw[k], official[k]) for k in official)
    assert torch.equal(load_transformer(path, head_dim=32)[0].state_dict()["proj_out.bias"], raw["head.head.bias"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_generator_with_parts_of_its_own_is_not_written_as_official(tiny, tmp_path):
    with pytest.raises(ValueError, match="official Wan has no action_embedding"):
        save_official(tiny(), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def change(name):
    def apply(state):
        if name == "missing":
            del state["blocks.1.ffn.2.bias"]
        elif name == "unexpected":
            state["blocks.1.ffn.9.bias"] = torch.zeros(1)
        elif name == "shape":
            state["head.head.bias"] = torch.zeros(7)
        elif name == "foreign":
            state.clear()
            state["conv1.weight"] = torch.zeros(3)
        elif name == "image":
            state["blocks.0.cross_attn.k_img.weight"] = torch.zeros(1)
        elif name == "twice":
            state["model.head.head.bias"] = torch.zeros(64)

    return apply


@pytest.mark.parametrize(
    "name, words",
    [
        ("missing", "1 missing: blocks.1.ffn.net.2.bias"),
        ("unexpected", "holds blocks.1.ffn.9.bias"),
        ("shape", r"1 wrongly shaped: proj_out.bias \(7,\) for \(64,\)"),
        ("foreign", "is no Wan checkpoint|no Wan transformer"),
        ("image", "holds blocks.0.cross_attn.k_img.weight|image-to-video"),
        ("twice", "1 tensors have the same name"),
    ],
)
def test_what_does_not_fit_is_named(official, tmp_path, name, words):
    state = dict(official)
    change(name)(state)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=words) as error:
        load_transformer(tmp_path / "a.safetensors", head_dim=32)
    assert "\n" not in str(error.value)


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize("kind", ["cut", "text", "evil", "list", "numbers", "none", "suffix"])
def test_files_that_are_no_checkpoint_are_one_line_and_nothing_runs(official, tmp_path, kind, capsys):
    path = tmp_path / "a.pt"
    torch.save({"evil": Evil(), "list": [1], "numbers": {"a": 1}}.get(kind, official), path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "none":
        path = tmp_path / "b.pt"
    elif kind == "suffix":
        path = path.rename(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=str(path)) as error:
        read_state(path)
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_a_cut_safetensors_and_a_missing_shard_are_named(official, golden_wan, tmp_path):
    paths = layouts(official, golden_wan, tmp_path)
    cut = paths["raw.safetensors"]
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="raw.safetensors is damaged"):
        read_state(cut)
    shard = sorted(paths["sharded"].glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"missing {shard.name}"):
        read_state(paths["sharded"])


def test_bfloat16_keeps_in_float32_what_diffusers_does(official, golden_wan, tmp_path):
    path = layouts(official, golden_wan, tmp_path)["folder"]
    model, _ = load_transformer(path, torch.bfloat16, head_dim=32)
    theirs = type(golden_wan).__mro__[1].from_pretrained(path, torch_dtype=torch.bfloat16).state_dict()
    assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v.dtype for k, v in theirs.items()}
    assert stored_dtype("blocks.0.norm2.weight", torch.bfloat16) == torch.float32


@pytest.mark.parametrize(
    "size, count",
    [(dict(), 1_418_996_800), (dict(num_attention_heads=40, ffn_dim=13824, num_layers=40), 14_288_491_584)],
)
def test_published_sizes_have_the_published_parameter_counts(size, count):
    model = build(size)
    assert sum(p.numel() for p in model.parameters()) == count
    assert recognise(model.state_dict())["num_layers"] == model.config.num_layers


def lora_of(model, rank=4, alpha=8.0):
    """Random LoRA weights on the attention linears, as (module, down, up)."""
    source = torch.Generator().manual_seed(3)
    names = [k for k, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".attn" in k]
    weights = {k: model.get_submodule(k).weight for k in names}
    return {k: (torch.randn(rank, w.shape[1], generator=source), torch.randn(w.shape[0], rank, generator=source))
            for k, w in weights.items()}  # fmt: skip


def write_lora(kind, parts, folder: Path, alpha=8.0) -> Path:
    def named(form):
        return {form.format(k, a): v for k, pair in parts.items() for a, v in zip("AB", pair)}

    path = folder / f"{kind}.safetensors"
    if kind == "peft folder":
        path = folder / "peft"
        path.mkdir()
        save_file(named("base_model.model.{}.lora_{}.weight"), path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha, "r": 4}))
    elif kind == "diffusers":
        save_file(named("transformer.{}.lora_{}.weight"), path)
    elif kind == "adapter":
        save_file(named("{}.lora_{}.default.weight"), path)
    elif kind == "official":
        save_file({f"base_model.model.{to_official(k)}.lora_{a}.weight": v
                   for k, pair in parts.items() for a, v in zip("AB", pair)}, path)  # fmt: skip
    elif kind == "kohya":
        words = {"A": "lora_down", "B": "lora_up"}
        state = {f"diffusion_model.{to_official(k)}.{words[a]}.weight": v
                 for k, pair in parts.items() for a, v in zip("AB", pair)}  # fmt: skip
        save_file(state | {f"diffusion_model.{to_official(k)}.alpha": torch.tensor(alpha) for k in parts}, path)
    elif kind == "generator_lora":
        path = folder / "lora.pt"
        torch.save({"generator_lora": named("{}.lora_{}.weight"), "critic_lora": {}, "step": 1}, path)
    return path


@pytest.mark.parametrize("kind", ["peft folder", "diffusers", "adapter", "official", "kohya", "generator_lora"])
def test_every_lora_layout_merged_equals_attached(golden_wan, golden, tmp_path, kind):
    config = {
        k: golden_wan.config[k]
        for k in ("num_attention_heads", "attention_head_dim", "text_dim", "ffn_dim", "num_layers")
    }
    merged, attached = type(golden_wan)(**config).eval(), type(golden_wan)(**config).eval()
    for model in (merged, attached):
        model.load_state_dict(golden_wan.state_dict())
    parts = lora_of(golden_wan)
    path = write_lora(kind, parts, tmp_path)
    lora = read_lora(path, None if kind in ("peft folder", "kohya") else 8.0)
    assert merge(merged, lora) == attach(attached, lora, "style") == len(parts) == 16
    name = "blocks.1.attn2.to_out.0"
    down, up = parts[name]
    torch.testing.assert_close(merged.get_submodule(name).weight, golden_wan.get_submodule(name).weight + 2 * up @ down)
    x = torch.randn(3, 128)
    torch.testing.assert_close(attached.get_submodule(name)(x), merged.get_submodule(name)(x), rtol=1e-4, atol=1e-3)
    assert all(p.dtype == torch.float32 for k, p in attached.named_parameters() if "lora_" in k)
    saved = get_peft_model_state_dict(attached, adapter_name="style")
    assert len(saved) == 32 and torch.equal(saved[f"{name}.lora_A.weight"], down)


def test_alpha_is_the_rank_where_nothing_says_it(golden_wan, tmp_path):
    lora = read_lora(write_lora("diffusers", lora_of(golden_wan), tmp_path))
    assert set(lora.alpha.values()) == {4.0}


@pytest.mark.parametrize(
    "fault, words",
    [
        ("half", "one half only of blocks.0.attn1.to_q"),
        ("foreign", "is no LoRA of a Wan transformer: it holds 'text_model.q"),
        ("unknown", "1 of 16 LoRA modules are not in this model: blocks.7.attn1.to_q"),
        ("size", r"LoRA of blocks.0.attn1.to_q is for a \(128, 99\) weight"),
        ("ranks", r"differ in \(rank, alpha\)"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(golden_wan, tmp_path, fault, words):
    parts = lora_of(golden_wan)
    name = "blocks.0.attn1.to_q"
    down, up = parts[name]
    if fault == "unknown":
        parts["blocks.7.attn1.to_q"] = parts.pop(name)
    elif fault == "size":
        parts[name] = (torch.zeros(4, 99), up)
    elif fault == "ranks":
        parts[name] = (torch.zeros(2, 128), torch.zeros(128, 2))
    path = write_lora("diffusers", parts, tmp_path)
    if fault in ("half", "foreign"):
        state = load_file(path)
        if fault == "half":
            del state[f"transformer.{name}.lora_B.weight"]
        else:
            state["text_model.q.weight"] = torch.zeros(1, 1)
        save_file(state, path)
    before = {k: v.clone() for k, v in golden_wan.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        (attach if fault == "ranks" else merge)(golden_wan, *([read_lora(path)] + (["a"] if fault == "ranks" else [])))
    assert all(torch.equal(v, before[k]) for k, v in golden_wan.state_dict().items())
