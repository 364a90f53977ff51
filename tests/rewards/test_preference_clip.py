"""CLIP-like rewards with tiny random networks of the same architecture: the contract, the formulas, strict loading."""

import json
import math

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity

from rewards.adversarial import CHANGES
from rewards.audit import audit
from rewards.contract import Clips, score, score_with_grad
from rewards.preference.clip import PICKSCORE_SCALE, tokens
from rewards.preference.pictures import BETWEEN, MEAN, STD, cropped, letterboxed, pool, spread
from rewards.registry import build

NAMES = ("clip_score", "aesthetic", "hpsv2", "pickscore")
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
FRAMES = torch.rand(3, 5, 3, 40, 48, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a red ball", "a blue cube", "a dog runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights of all four: a folder as open_clip has it, a torch file, two heads, a folder as transformers has it."""
    from transformers import CLIPConfig, CLIPModel

    at = tmp_path_factory.mktemp("weights")
    (at / "tiny-test.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(at / "tiny-test.json")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = open_clip.CLIP(**TINY)
        torch.nn.init.normal_(network.text_projection, std=0.3)
        save_file(network.state_dict(), at / "open_clip_model.safetensors")
        torch.save({"epoch": 1, "state_dict": network.state_dict()}, at / "HPS_v2.1_compressed.pt")
        linear = torch.nn.Linear(16, 1)
        torch.save(linear.state_dict(), at / "linear.pth")
        sizes = [16, 8, 4, 1]
        stack = {f"layers.{2 * i}.{k}": v for i, (a, b) in enumerate(zip(sizes, sizes[1:]))
                 for k, v in torch.nn.Linear(a, b).state_dict().items()}  # fmt: skip
        torch.save(stack, at / "stack.pth")
        sides = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        text = {**sides, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406}
        config = CLIPConfig(
            text_config=text, vision_config={**sides, "image_size": 32, "patch_size": 16}, projection_dim=8
        )
        CLIPModel(config).save_pretrained(at / "pick")
    return at


def made(name, folder, **args):
    given = {"pickscore": {"weights": folder / "pick"}, "hpsv2": {"weights": folder / "HPS_v2.1_compressed.pt"}}
    given = given.get(name, {"weights": folder}) | ({} if name == "pickscore" else {"model": "tiny-test"})
    return build(name, **({"head": folder / "linear.pth"} if name == "aesthetic" else {}) | given | args)


def scored(reward, frames=FRAMES, prompts=PROMPTS):
    return score(reward, Clips(frames, prompts=prompts))


@pytest.mark.parametrize("name", NAMES)
def test_same_scores_alone_and_in_another_order_without_drawing_random_numbers(name, folder):
    before = torch.get_rng_state()
    reward = made(name, folder)
    every = scored(reward)
    assert torch.equal(torch.get_rng_state(), before)
    order = [2, 0]
    some = scored(made(name, folder), FRAMES[order], [PROMPTS[i] for i in order])
    assert torch.equal(some.value, every.value[order])
    assert every.valid.all() and len(set(every.value.tolist())) == 3
    low, high = reward.value_range
    assert ((every.value >= low) & (every.value <= high)).all()
    assert torch.equal(scored(reward).value, every.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_matters_where_it_is_needed(name, folder):
    reward = made(name, folder)
    swapped = scored(reward, prompts=PROMPTS[::-1]).value
    assert torch.equal(swapped, scored(reward).value) is (name == "aesthetic")
    if name != "aesthetic":
        with pytest.raises(ValueError, match="needs prompts"):
            score(reward, Clips(FRAMES))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_slope_of_the_value(name, folder):
    reward, frames, h = made(name, folder), FRAMES[:1] * 0.5 + 0.25, 1e-2
    given = frames.clone().requires_grad_()
    value = score_with_grad(reward, Clips(given, prompts=PROMPTS[:1]))
    torch.testing.assert_close(value.detach(), scored(reward, frames, PROMPTS[:1]).value)
    (slope,) = torch.autograd.grad(value.sum(), given)
    way = slope / slope.norm()
    up, down = (scored(reward, frames + s * h * way, PROMPTS[:1]).value.item() for s in (1, -1))
    assert up > down and (up - down) / (2 * h) == pytest.approx(slope.norm().item(), rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_no_frame_is_scored_beside_another(name, folder):
    """Which is why these are blind to what lies between frames: a clip is worth its frames, one by one, in any order,
    and a frozen one of the best frame is worth the most."""
    reward = made(name, folder)
    alone = torch.stack([scored(reward, FRAMES[:, [k]]).value for k in range(5)], 1)
    torch.testing.assert_close(scored(reward).value, alone.mean(1))
    stills = torch.stack([scored(reward, FRAMES[:, [k] * 5]).value for k in range(5)], 1)
    torch.testing.assert_close(stills, alone)
    assert (stills.max(1).values > scored(reward).value).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pool", ["mean", "low"])
def test_what_is_claimed_holds_as_far_as_the_order_of_frames_goes(name, pool, folder):
    """Of prompts a random network claims nothing that could hold."""
    reward = made(name, folder, pool=pool)
    assert set(BETWEEN) <= set(reward.claims.blind_to)
    assert ("wrong_prompt" in reward.claims.notices) is ("prompts" in reward.needs)
    tried = ("shuffled", "reversed", "darkened")
    found = audit(reward, [Clips(FRAMES, prompts=PROMPTS)], {k: CHANGES[k] for k in tried})
    moved = {f.change: f.moved for f in found.findings}
    assert max(moved["shuffled"], moved["reversed"]) < 1e-4 and found.findings[0].claim == "blind_to"
    assert moved["darkened"] > 0.1


def test_clip_score_is_the_cosine_that_open_clip_computes(folder):
    network = open_clip.CLIP(**TINY).eval()
    network.load_state_dict(load_file(folder / "open_clip_model.safetensors"))
    pictures = spread(FRAMES[0], 4)
    with torch.no_grad():
        seen, read, _ = network(cropped(pictures, 32), open_clip.tokenize([PROMPTS[0]]))
    got = scored(made("clip_score", folder, frames=4))
    torch.testing.assert_close(got.raw["frames"][0], seen @ read[0])
    torch.testing.assert_close(got.value[0], (seen @ read[0]).mean())


def test_pickscore_is_the_scaled_logit_of_transformers(folder):
    from transformers import CLIPModel

    network = CLIPModel.from_pretrained(folder / "pick").eval()
    with torch.no_grad():
        out = network(input_ids=open_clip.tokenize([PROMPTS[1]]), pixel_values=cropped(FRAMES[1], 32))
    got = scored(made("pickscore", folder))
    torch.testing.assert_close(got.raw["logit"][1], out.logits_per_image.mean())
    torch.testing.assert_close(got.value, got.raw["logit"] / PICKSCORE_SCALE)


@pytest.mark.parametrize("head", ["linear", "stack"])
def test_aesthetic_is_its_layers_on_unit_features_over_ten(folder, head):
    reward = made("aesthetic", folder, head=folder / f"{head}.pth")
    got = scored(reward).value[0]
    x = reward.pictures(FRAMES[0])
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(5))
    tensors = list(torch.load(folder / f"{head}.pth").values())
    for weight, bias in zip(tensors[::2], tensors[1::2]):
        x = x @ weight.T + bias
    torch.testing.assert_close(got, x.mean() / 10)


def test_hpsv2_sees_the_whole_picture_and_clip_its_middle(folder):
    side = FRAMES.clone()
    side[..., :4] = 1.0  # of 48 columns; a square crop of 40 leaves them out
    assert torch.equal(scored(made("clip_score", folder)).raw["cosine"] > -2, torch.ones(3, dtype=torch.bool))
    hps = [scored(made("hpsv2", folder), f).value for f in (FRAMES, side)]
    assert (hps[0] - hps[1]).abs().max() > 1e-4
    black = -torch.tensor(MEAN) / torch.tensor(STD)
    boxed = letterboxed(torch.full((1, 3, 32, 64), 0.5), 32)
    assert boxed.shape == (1, 3, 32, 32)
    torch.testing.assert_close(boxed[0, :, [0, 7, 24, 31], 5], black[:, None].expand(3, 4))
    torch.testing.assert_close(boxed[0, :, 16, 5], (0.5 - torch.tensor(MEAN)) / torch.tensor(STD))


def test_pools():
    values = torch.arange(10.0)
    assert [float(pool(values, how)) for how in ("mean", "low", "top")] == [4.5, 1.0, 8.0]
    assert spread(values, 4).tolist() == [0, 3, 6, 9] and spread(values, 99).tolist() == values.tolist()


def test_a_long_prompt_is_cut_and_still_ends():
    cut = tokens("ball " * 200, 77)
    assert cut.shape == (1, 77) and cut[0, 0] == 49406 and cut[0, -1] == 49407


def broken(folder, tmp_path, change):
    tensors = load_file(folder / "open_clip_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda t: t.pop("text_projection"), "lacks text_projection"),
     (lambda t: t.update(extra=torch.ones(1)), "has the unknown extra"),
     (lambda t: t.update(text_projection=torch.ones(16, 4)), r"text_projection is \[16, 4\], not \[16, 16\]"),
     (lambda t: [t.pop(k) for k in list(t) if k.startswith("visual")], "and .* more")],
)  # fmt: skip
def test_a_network_that_does_not_fit_is_an_error_and_never_random(folder, tmp_path, change, says):
    with pytest.raises(ValueError, match=says) as error:
        made("clip_score", broken(folder, tmp_path, change)).prepare()
    assert "\n" not in str(error.value)


def test_places_that_old_transformers_saved_are_no_unknown_tensors(folder, tmp_path):
    """PickScore was saved when position_ids were part of a checkpoint."""
    tensors = load_file(folder / "pick" / "model.safetensors")
    tensors |= {f"{k}_model.embeddings.position_ids": torch.arange(n)[None] for k, n in (("text", 77), ("vision", 5))}
    (tmp_path / "config.json").write_text((folder / "pick" / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(scored(build("pickscore", weights=tmp_path)).value, scored(made("pickscore", folder)).value)


def test_downloads_are_as_large_as_the_networks_they_hold():
    sizes = {}
    for name in ("clip_score", "aesthetic", "hpsv2"):
        with torch.device("meta"):
            network = open_clip.CLIP(**build(name).architecture())
        sizes[name] = sum(p.numel() for p in network.parameters()) * (2 if name == "hpsv2" else 4)
    sizes["pickscore"] = 2 * sizes["hpsv2"]  # the same network in float32
    assert {n: round(size / 1e8) for n, size in sizes.items()} == {n: round(build(n).download / 1e8) for n in sizes}


def test_a_transformers_folder_with_a_missing_or_renamed_tensor_is_an_error(folder, tmp_path):
    tensors = load_file(folder / "pick" / "model.safetensors")
    tensors["visual_projection_renamed.weight"] = tensors.pop("visual_projection.weight")
    (tmp_path / "config.json").write_text((folder / "pick" / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks visual_projection.weight"):
        build("pickscore", weights=tmp_path).prepare()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds none of model.safetensors"):
        build("pickscore", weights=tmp_path).prepare()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [({"weight": torch.ones(1, 16)}, "lacks .bias"),
     ({"weight": torch.ones(1, 8), "bias": torch.ones(1)}, r"layer 0 is \[1, 8\]"),
     ({"weight": torch.ones(3, 16), "bias": torch.ones(3)}, "ends in 3 numbers"),
     ({"weight": torch.ones(1, 16), "bias": torch.ones(1), "scale": torch.ones(1)}, "unknown scale")],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_an_error(folder, tmp_path, tensors, says):
    torch.save(tensors, tmp_path / "head.pth")
    with pytest.raises(ValueError, match=says):
        made("aesthetic", folder, head=tmp_path / "head.pth").prepare()


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda f: build("clip_score", weights=f / "none.pt").prepare(), "there are no weights at"),
     (lambda f: build("hpsv2").prepare(), "fetch them with 'hf download xswu/HPSv2 HPS_v2.1_compressed.pt'"),
     (lambda f: made("aesthetic", f, head=f / "none.pth").prepare(), "there is no head at"),
     (lambda f: made("clip_score", f, model="ViT-X"), "'ViT-X' is no CLIP of open_clip"),
     (lambda f: made("clip_score", f, model="roberta-ViT-B-32"), "is no CLIP of open_clip"),
     (lambda f: made("hpsv2", f, frames=0), "frames is 0"),
     (lambda f: made("pickscore", f, pool="max"), "'max' is unknown; choose mean, low, top")],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_in_one_line(folder, monkeypatch, call, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        call(folder)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_damaged_weights_are_an_error(folder, tmp_path):
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).write_bytes(b"x" * 64)
        with pytest.raises(ValueError, match="cannot read weights"):
            made("clip_score", folder, weights=tmp_path / name).prepare()


def test_a_score_that_is_not_finite_is_no_number(folder, tmp_path):
    tensors = load_file(folder / "open_clip_model.safetensors")
    tensors["visual.proj"].fill_(math.inf)
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    assert scored(made("clip_score", tmp_path)).reasons == ["system:not_finite"] * 3


def test_scores_do_not_depend_on_padding_of_the_text(folder):
    """The text is read at its end token; what stands after it is not seen."""
    network = made("pickscore", folder).network
    words = tokens(PROMPTS[0], 77)
    longer = words.clone()
    longer[0, int((words == 49407).nonzero()[0, 1]) + 1 :] = 5
    with torch.no_grad():
        a, b = (network.text_projection(network.text_model(input_ids=w).pooler_output) for w in (words, longer))
    assert float(cosine_similarity(a, b)) == pytest.approx(1)
