"""VideoReward with a tiny random Qwen2-VL under LoRA: loading, sampling, standardising, what each part sees."""

import json

import pytest
import torch
from torchvision.transforms.v2.functional import adjust_saturation, rgb_to_grayscale

from rewards.contract import Clips, score
from rewards.preference.pictures import MEAN, STD
from rewards.preference.qwen import read_rubric
from rewards.preference.video_reward import (
    DIMENSIONS,
    LEAST_PIXELS,
    RUBRIC_NAME,
    TOKENS,
    plain,
    sampled,
    standardise,
)
from rewards.registry import build

RUBRIC = f"rate how it looks {TOKENS[0]} how it moves {TOKENS[1]} how it fits {{text_prompt}} {TOKENS[2]} end"
CONSTANTS = {"VQ_mean": 0.1, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.3, "TA_std": 4.0}
FRAMES = torch.rand(3, 9, 3, 84, 98, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a red ball rests", "a blue cube slides", "a red cube"]
ALPHA, RANK = 4, 2


@pytest.fixture(scope="module")
def made_of(tmp_path_factory, qwen_base):
    """(folder of the checkpoint, folder of the base, rubric, the merged network, its head)."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2VLForConditionalGeneration

    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("reward")
    config, words = qwen_base(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen2VLForConditionalGeneration(config)
        network.resize_token_embeddings(words + len(TOKENS))
        for p in network.parameters():
            torch.nn.init.normal_(p, std=0.2)
        head = torch.randn(1, 32)
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj", "down_proj"])
        adapted = get_peft_model(network, lora)
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.5)
    tensors = {_old(k): v.clone() for k, v in adapted.state_dict().items()}
    tensors["base_model.model.rm_head.weight"] = head
    (folder / "checkpoint-7").mkdir()
    (folder / "checkpoint-12").mkdir()
    torch.save(tensors, folder / "checkpoint-12" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps({
        "data_config": {"fps": 2.0, "max_frame_pixels": 5000, "num_frames": None},
        "model_config": {"output_dim": 1, "use_special_tokens": True},
        "peft_lora_config": {"lora_r": RANK, "lora_alpha": ALPHA}, "inference_config": CONSTANTS,
    }))  # fmt: skip
    rubric = base / "rubric.txt"
    rubric.write_text(RUBRIC)
    return folder, base, rubric, adapted.merge_and_unload().eval().model, head


def _old(key):
    """The name that transformers 4 gave a tensor, which is what the published checkpoint holds."""
    return key.replace("model.model.visual.", "model.visual.").replace("model.model.language_model.", "model.model.")


def reward_of(made_of, **args):
    folder, base, rubric, *_ = made_of
    return build("video_reward", **{"weights": folder, "base": base, "rubric": rubric} | args)


def scored(reward, frames=FRAMES, prompts=PROMPTS, fps=8.0):
    return score(reward, Clips(frames, fps, prompts=prompts))


def test_the_loaded_network_is_the_merged_one(made_of):
    network, head = reward_of(made_of).network
    theirs = made_of[3].state_dict()
    assert network.state_dict().keys() == theirs.keys() and torch.equal(head, made_of[4])
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-5)
    assert not any(p.requires_grad for p in network.parameters())


def test_logits_are_the_head_at_the_three_tokens_in_order(made_of):
    reward = reward_of(made_of)
    frames = sampled(FRAMES[0], 8.0, 2.0)
    seen = []
    reward.network[0].register_forward_hook(lambda m, a, k, out: seen.append((k, out)), with_kwargs=True)
    got = reward.logits(frames, PROMPTS[0])
    inputs, out = seen[0]
    at = [inputs["input_ids"][0].tolist().index(i) for i in reward.token_ids.values()]
    assert at == sorted(at) and list(reward.token_ids) == list(TOKENS) and len(set(at)) == 3
    torch.testing.assert_close(got, (out.last_hidden_state[0, at] @ made_of[4][0]))
    theirs = made_of[3]
    with torch.no_grad():  # as in transformers 4.45: with its features in place, a sequence like any other
        words = theirs.get_input_embeddings()(inputs["input_ids"])
        seen = theirs.visual(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output
        pads = inputs["input_ids"][..., None] == theirs.config.video_token_id
        states = theirs.language_model(inputs_embeds=words.masked_scatter(pads, seen)).last_hidden_state[0]
        other = theirs(**{k: v for k, v in inputs.items() if k != "position_ids"}).last_hidden_state[0]
    torch.testing.assert_close(got, states[at] @ made_of[4][0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, other[at] @ made_of[4][0], rtol=1e-2, atol=1e-2)


def test_frames_are_resized_into_the_budget_and_normalised_once(made_of):
    """Colours in [0, 1] by CLIP's mean and deviation; small frames are enlarged past the budget, as published."""
    reward, seen = reward_of(made_of), []
    hook = reward.network[0].register_forward_hook(lambda m, a, k, out: seen.append(k), with_kwargs=True)
    frames = torch.tensor([1.0, 0.5, 0.0])[:, None, None].expand(4, 3, 84, 98)
    reward.logits(frames, "a")
    reward.logits(frames[..., :42, :42], "a")
    hook.remove()
    big, small = ([int(x) * 14 for x in k["video_grid_thw"][0, 1:]] for k in seen)
    assert big == [56, 56] and small == [336, 336]
    assert small[0] * small[1] >= LEAST_PIXELS > 5000
    colours = seen[0]["pixel_values_videos"].unflatten(1, (3, -1))
    expected = (torch.tensor([1.0, 0.5, 0.0]) - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(colours, expected[None, :, None].expand_as(colours))


def test_same_scores_alone_and_in_another_order_without_drawing_random_numbers(made_of):
    before = torch.get_rng_state()
    every = scored(reward_of(made_of))
    assert torch.equal(torch.get_rng_state(), before)
    order = [2, 0]
    some = scored(reward_of(made_of), FRAMES[order], [PROMPTS[i] for i in order])
    assert torch.equal(some.value, every.value[order]) and every.valid.all()
    assert len(set(every.value.tolist())) == 3 and set(every.components) == set(DIMENSIONS)
    torch.testing.assert_close(every.value, torch.stack(list(every.components.values())).mean(0))


def test_prompt_frames_and_rate_matter(made_of):
    reward = reward_of(made_of, score="TA")
    plainly = scored(reward).value
    assert not torch.allclose(scored(reward, prompts=PROMPTS[::-1]).value[[0, 2]], plainly[[0, 2]])
    assert not torch.allclose(scored(reward, FRAMES.flip(1)).value, plainly)
    assert not torch.allclose(scored(reward, fps=2.0).value, plainly)
    assert set(scored(reward).components) == {"TA"}


def test_motion_is_judged_without_colour(made_of):
    grey, colour = (reward_of(made_of, score="MQ", grey_motion=g) for g in (True, False))
    drained = torch.stack([rgb_to_grayscale(f, 3) for f in FRAMES])
    torch.testing.assert_close(scored(grey).value, scored(colour, drained).value)
    assert not torch.allclose(scored(grey).value, scored(colour).value)
    every = scored(reward_of(made_of))
    torch.testing.assert_close(every.components["MQ"], scored(grey).value)
    torch.testing.assert_close(every.components["VQ"], scored(reward_of(made_of, score="VQ")).value)


def test_each_part_claims_what_it_is_made_of(made_of):
    """MQ does not see the saturation of colours that stay within range. Order is seen, so no blindness is claimed."""
    pale = 0.4 + 0.2 * FRAMES
    gaudy = torch.stack([adjust_saturation(f, 2.5) for f in pale])
    assert gaudy.min() > 0 and gaudy.max() < 1
    grey, colour = (reward_of(made_of, score="MQ", grey_motion=g) for g in (True, False))
    torch.testing.assert_close(scored(grey, gaudy).value, scored(grey, pale).value, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(scored(colour, gaudy).value, scored(colour, pale).value, rtol=1e-2, atol=1e-2)
    claims = {s: reward_of(made_of, score=s).claims for s in (*DIMENSIONS, "mean")}
    assert [s for s, c in claims.items() if "wrong_prompt" in c.notices] == ["TA"]
    assert all("saturated" in c.blind_to and not {"shuffled", "reversed"} & {*c.blind_to} for c in claims.values())


def test_constants_are_the_checkpoint_s(made_of, golden):
    got = scored(reward_of(made_of))
    for d in DIMENSIONS:
        expected = (got.raw[f"{d}_logit"] - CONSTANTS[f"{d}_mean"]) / CONSTANTS[f"{d}_std"]
        torch.testing.assert_close(got.components[d], expected)
    g = golden("videoalign_norm")
    published = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
    z = standardise(g["raw_logits"], published)
    torch.testing.assert_close(z, torch.stack([g[d] for d in DIMENSIONS], 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(z.sum(1), g["Overall"], rtol=0, atol=1e-5)


def test_sampling():
    clip = torch.arange(81.0)
    assert sampled(clip, 16.0, 2.0).tolist() == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]  # 10.1 frames: 10
    assert len(sampled(clip, 16.3, 2.0)) == 10 and len(sampled(clip, 18.0, 2.0)) == 8  # 9.94: 10; 9: to the even half
    assert [len(sampled(c, fps, 2.0)) for c, fps in ((clip[:5], 1.0), (clip, 81.0), (clip[:3], 8.0))] == [4, 4, 2]
    assert sampled(torch.ones(1, 3, 4, 4), 8.0, 2.0).shape == (2, 3, 4, 4)
    assert len(sampled(clip, 16.0, 99.0)) == 80  # never more than there are, and even


def test_lora_is_added_and_names_of_both_transformers_fit(tmp_path):
    w, a, b = torch.ones(4, 3), torch.full((2, 3), 0.5), torch.ones(4, 2)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    old = {f"{name}.base_layer.weight": w, f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b,
           "base_model.model.lm_head.weight": w, "base_model.model.rm_head.weight": w}  # fmt: skip
    out = plain(old, 2.0, tmp_path)
    assert set(out) == {"language_model.layers.0.self_attn.q_proj.weight", "rm_head.weight"}
    assert torch.equal(out["language_model.layers.0.self_attn.q_proj.weight"], w + 2)
    new = plain({"model.visual.patch_embed.proj.weight": w, "model.language_model.norm.weight": a}, 1.0, tmp_path)
    assert set(new) == {"visual.patch_embed.proj.weight", "language_model.norm.weight"}
    del old[f"{name}.lora_B.default.weight"]
    with pytest.raises(ValueError, match="unknown .*lora_A"):
        plain(old, 2.0, tmp_path)


def copied(made_of, tmp_path, change_config=None, change_tensors=None):
    folder = made_of[0]
    config = json.loads((folder / "model_config.json").read_text())
    tensors = torch.load(folder / "checkpoint-12" / "model.pth")
    if change_config:
        change_config(config)
    if change_tensors:
        change_tensors(tensors)
    (tmp_path / "checkpoint-1").mkdir(exist_ok=True)
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "checkpoint-1" / "model.pth")
    return tmp_path


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [(None, lambda t: t.pop("base_model.model.rm_head.weight"), "lacks rm_head.weight"),
     (None, lambda t: t.update({"base_model.model.rm_head.weight": torch.ones(3, 32)}), r"rm_head.weight is \[3, 32\]"),
     (None, lambda t: t.pop("base_model.model.model.norm.weight"), "lacks language_model.norm.weight"),
     (None, lambda t: t.update({"base_model.model.value.weight": torch.ones(1)}), "unknown value.weight"),
     (None, lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(9, 32)}), "knows 9 tokens"),
     (lambda c: c["inference_config"].pop("MQ_std"), None, "lacks MQ_std"),
     (lambda c: c.pop("inference_config"), None, "lacks MQ_mean"),
     (lambda c: c.pop("peft_lora_config"), None, "lacks peft_lora_config"),
     (lambda c: c["model_config"].update(output_dim=3), None, "another kind of head")],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_an_error_and_never_random(made_of, tmp_path, config, tensors, says):
    with pytest.raises(ValueError, match=says) as error:
        reward_of(made_of, weights=copied(made_of, tmp_path, config, tensors)).prepare()
    assert "\n" not in str(error.value)


def test_the_rubric_is_read_from_python_without_running_it(tmp_path):
    file = tmp_path / "prompt_template.py"
    file.write_text(f"OTHER = 'x'\n{RUBRIC_NAME} = '''{RUBRIC}'''\nraise SystemExit('it was run')\n")
    assert read_rubric("video_reward", file, [RUBRIC_NAME], TOKENS, "") == RUBRIC
    for text, says in ((f"{RUBRIC_NAME} = 'no tokens'", "must hold"), ("OTHER = 1", "get it"), ("def (", "get it")):
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_rubric("video_reward", file, [RUBRIC_NAME], TOKENS, "get it")


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda m: reward_of(m, score="AQ"), "'AQ' is unknown; choose VQ, MQ, TA, mean"),
     (lambda m: reward_of(m, rubric="/none/rubric.txt").prepare(), "no rubric in /none/rubric.txt: give rubric="),
     (lambda m: reward_of(m, weights=m[1]).prepare(), "holds none of model_config.json"),
     (lambda m: scored(reward_of(m), prompts=["<|VQ_reward|>"] * 3), "the prompt holds one of the reward tokens"),
     (lambda m: score(reward_of(m), Clips(FRAMES, prompts=PROMPTS)), "needs fps")],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(made_of, call, says):
    with pytest.raises(ValueError) as error:
        call(made_of)
    assert says in str(error.value) and "\n" not in str(error.value)
