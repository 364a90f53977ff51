"""HPSv3 with a tiny random Qwen2-VL: names of the published tensors, loading, what the head reads, frame by frame."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rewards.adversarial import CHANGES
from rewards.audit import audit
from rewards.contract import Clips, score
from rewards.preference import hpsv3
from rewards.preference.hpsv3 import PIXELS, RUBRIC_NAMES, TOKEN, head_of
from rewards.preference.pictures import BETWEEN, MEAN, STD
from rewards.preference.qwen import read_rubric, renamed
from rewards.registry import build

RUBRIC = f"rate how it looks {{text_prompt}} how it fits {TOKEN} end"
FRAMES = torch.rand(2, 3, 3, 84, 112, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a red ball", "a blue cube"]

# Tensors of the published file, as transformers 4.45 names those of Qwen2-VL-7B: {n} is every number below n.
PUBLISHED = """lm_head.weight model.embed_tokens.weight model.norm.weight
model.layers.{28}.input_layernorm.weight model.layers.{28}.post_attention_layernorm.weight
model.layers.{28}.mlp.gate_proj.weight model.layers.{28}.mlp.up_proj.weight model.layers.{28}.mlp.down_proj.weight
model.layers.{28}.self_attn.q_proj.weight model.layers.{28}.self_attn.q_proj.bias
model.layers.{28}.self_attn.k_proj.weight model.layers.{28}.self_attn.k_proj.bias
model.layers.{28}.self_attn.v_proj.weight model.layers.{28}.self_attn.v_proj.bias
model.layers.{28}.self_attn.o_proj.weight visual.patch_embed.proj.weight
visual.blocks.{32}.norm1.weight visual.blocks.{32}.norm1.bias visual.blocks.{32}.norm2.weight
visual.blocks.{32}.norm2.bias visual.blocks.{32}.attn.qkv.weight visual.blocks.{32}.attn.qkv.bias
visual.blocks.{32}.attn.proj.weight visual.blocks.{32}.attn.proj.bias visual.blocks.{32}.mlp.fc1.weight
visual.blocks.{32}.mlp.fc1.bias visual.blocks.{32}.mlp.fc2.weight visual.blocks.{32}.mlp.fc2.bias
visual.merger.ln_q.weight visual.merger.ln_q.bias visual.merger.mlp.0.weight visual.merger.mlp.0.bias
visual.merger.mlp.2.weight visual.merger.mlp.2.bias rm_head.0.weight rm_head.0.bias rm_head.3.weight rm_head.3.bias
rm_head.5.weight rm_head.5.bias""".split()
SEVEN_B = {
    "text_config": dict(vocab_size=151658, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                        num_attention_heads=28, num_key_value_heads=4),
    "vision_config": dict(depth=32, embed_dim=1280, hidden_size=3584, num_heads=16, mlp_ratio=4),
}  # fmt: skip


@pytest.fixture(scope="module")
def made_of(tmp_path_factory, qwen_base):
    """(folder with weights, configuration, tokeniser and rubric; the whole network; its head)."""
    from transformers import Qwen2VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("hpsv3")
    config, words = qwen_base(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Qwen2VLForConditionalGeneration(config)
        network.resize_token_embeddings(words + 1)
        head = head_of(32)
        for p in (*network.parameters(), *head.parameters()):
            torch.nn.init.normal_(p, std=0.2)
    tensors = {_old(k): v.bfloat16() for k, v in network.state_dict().items()}
    tensors |= {f"rm_head.{k}": v.clone() for k, v in head.state_dict().items()}
    save_file(tensors, folder / "HPSv3.safetensors")
    (folder / "rubric.txt").write_text(RUBRIC)
    return folder, network.bfloat16().float().eval(), head.eval()


def _old(key):
    """The name that transformers 4 gave a tensor."""
    return key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def reward_of(made_of, **args):
    at = made_of[0]
    return build("hpsv3", **{"weights": at, "base": at, "rubric": at / "rubric.txt"} | args)


def scored(reward, frames=FRAMES, prompts=PROMPTS):
    return score(reward, Clips(frames, prompts=prompts))


def test_the_published_names_are_those_of_the_network_and_as_large_as_the_download():
    from transformers import Qwen2VLConfig, Qwen2VLModel

    names = set()
    for pattern in PUBLISHED:
        start, brace, rest = pattern.partition("{")
        count, _, end = rest.partition("}")
        names |= {f"{start}{i}{end}" for i in range(int(count))} if brace else {pattern}
    with torch.device("meta"):
        network, head = Qwen2VLModel(Qwen2VLConfig(**SEVEN_B)), head_of(3584)
    read = {renamed(n) for n in names if not n.startswith(("lm_head.", "rm_head."))}
    assert read == network.state_dict().keys() and len(names) == 736
    assert {n.removeprefix("rm_head.") for n in names if n.startswith("rm_head.")} == head.state_dict().keys()
    largest = 2 * (sum(p.numel() for p in network.parameters()) + 151658 * 3584)
    assert round(largest / 1e8) == round(build("hpsv3").download / 1e8)


def test_the_loaded_network_is_the_saved_one(made_of):
    network, head = reward_of(made_of).network
    theirs = made_of[1].model.state_dict()
    assert network.state_dict().keys() == theirs.keys()
    assert all(torch.equal(v.float(), theirs[k]) for k, v in network.state_dict().items())
    assert all(torch.equal(v, made_of[2].state_dict()[k]) for k, v in head.state_dict().items())
    assert not any(p.requires_grad or p.is_meta for p in (*network.parameters(), *network.buffers()))
    assert not head.training and not any(p.requires_grad for p in head.parameters())


def test_the_score_is_the_first_number_of_the_head_at_the_token(made_of):
    """Under row numbers, as it was trained, and not under those of time, row and column."""
    reward, seen = reward_of(made_of), []
    reward.network[0].register_forward_hook(lambda m, a, k, out: seen.append(k), with_kwargs=True)
    got = reward.distribution(FRAMES[0, :1], PROMPTS[0])
    inputs, theirs = seen[0], made_of[1].model
    at = inputs["input_ids"][0].tolist().index(reward.token_id)
    with torch.no_grad():
        words = theirs.get_input_embeddings()(inputs["input_ids"])
        patches = theirs.visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        pads = inputs["input_ids"][..., None] == theirs.config.image_token_id
        states = theirs.language_model(inputs_embeds=words.masked_scatter(pads, patches)).last_hidden_state
        other = theirs(**{k: v for k, v in inputs.items() if k != "position_ids"}).last_hidden_state
        torch.testing.assert_close(got, made_of[2](states[:, at]), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got, made_of[2](other[:, at]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(scored(reward).raw["frames"][0, 0], got[0, 0])


def test_frames_fill_the_published_number_of_pixels_and_are_normalised_once(made_of):
    reward, seen = reward_of(made_of), []
    reward.network[0].register_forward_hook(lambda m, a, k, out: seen.append(k), with_kwargs=True)
    colour = torch.tensor([1.0, 0.5, 0.0])
    for height, width in ((84, 84), (480, 832)):
        reward.measure(colour[:, None, None].expand(1, 3, height, width), "a")
    sides = [[14 * int(x) for x in k["image_grid_thw"][0, 1:]] for k in seen]
    assert sides == [[448, 448], [336, 588]] and 448**2 == PIXELS
    expected = (colour - torch.tensor(MEAN)) / torch.tensor(STD)
    patches = seen[0]["pixel_values"].unflatten(1, (3, -1))
    torch.testing.assert_close(patches, expected[None, :, None].expand_as(patches))


def test_a_clip_is_worth_its_frames_alone_in_any_order_and_company(made_of):
    reward = reward_of(made_of)
    before = torch.get_rng_state()
    every = scored(reward)
    assert torch.equal(torch.get_rng_state(), before) and every.valid.all()
    alone = torch.stack([scored(reward, FRAMES[:, [k]]).value for k in range(3)], 1)
    torch.testing.assert_close(every.value, alone.mean(1))
    assert torch.equal(scored(reward_of(made_of), FRAMES[1:], PROMPTS[1:]).value, every.value[1:])
    assert not torch.allclose(scored(reward, prompts=PROMPTS[::-1]).value, every.value, rtol=1e-3)
    assert set(BETWEEN) <= set(reward.claims.blind_to)
    changes = {k: CHANGES[k] for k in ("shuffled", "darkened")}
    found = audit(reward, [Clips(FRAMES, prompts=PROMPTS)], changes).findings
    assert found[0].moved < 1e-4 < found[1].moved


def test_the_rubric_is_two_strings_of_the_published_file(tmp_path):
    file = tmp_path / "data_collator_qwen.py"
    parts = RUBRIC[:20], RUBRIC[20:]
    first, second = (f"{name} = {part!r}" for name, part in zip(RUBRIC_NAMES, parts))
    file.write_text(f"import none\n{first}\nOTHER = 1\n{second}\n")
    assert read_rubric("hpsv3", file, RUBRIC_NAMES, [TOKEN], "") == RUBRIC
    file.write_text(f"{RUBRIC_NAMES[0]} = '{{text_prompt}} {TOKEN}'")
    with pytest.raises(ValueError, match="hpsv3: there is no rubric in .*: get it"):
        read_rubric("hpsv3", file, RUBRIC_NAMES, [TOKEN], "get it")


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda t: t.pop("rm_head.3.bias"), "lacks rm_head.3.bias"),
     (lambda t: t.update({"rm_head.5.weight": torch.ones(4, 16)}), r"rm_head.5.weight is \[4, 16\], not \[2, 16\]"),
     (lambda t: t.update({"rm_head.7.weight": torch.ones(1)}), "unknown rm_head.7.weight"),
     (lambda t: t.pop("visual.merger.ln_q.bias"), "lacks visual.merger.ln_q.bias"),
     (lambda t: t.update({"value.weight": torch.ones(1)}), "unknown value.weight"),
     (lambda t: t.update({"model.embed_tokens.weight": torch.ones(9, 32)}), "knows 9 tokens, too few for <|Reward|>")],
)  # fmt: skip
def test_weights_that_do_not_fit_are_an_error_and_never_random(made_of, tmp_path, change, says):
    tensors = load_file(made_of[0] / "HPSv3.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "HPSv3.safetensors")
    with pytest.raises(ValueError, match=says.replace("|", r"\|")) as error:
        reward_of(made_of, weights=tmp_path).prepare()
    assert "\n" not in str(error.value) and str(error.value).startswith("hpsv3: ")


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda m: reward_of(m, rubric=hpsv3.RUBRIC).prepare(), "pip install --no-deps --target"),
     (lambda m: reward_of(m, base="/none/base").prepare(), "there are no weights at /none/base"),
     (lambda m: scored(reward_of(m), prompts=[TOKEN] * 2), "the prompt holds one of the reward tokens"),
     (lambda m: score(reward_of(m), Clips(FRAMES)), "needs prompts")],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(made_of, monkeypatch, call, says):
    monkeypatch.setattr("pathlib.Path.expanduser", lambda p: p)
    with pytest.raises(ValueError) as error:
        call(made_of)
    assert says in str(error.value) and "\n" not in str(error.value)
