"""Inside the first block: every intermediate equals that of the official model, part by part."""

import pytest
import torch

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.rope import place, rotate, rotation, turn

CLOSE = dict(rtol=0, atol=1e-5)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inside(golden, golden_wan):
    """What the modules gave in the first chunk's noisy pass, row 1 of the batch, and the keys and values it wrote."""
    g, seen, handles = golden("kv_forward"), {}, []

    def keep(name):
        return lambda module, inputs, output: seen.setdefault(name, output.detach())

    block, embedder = golden_wan.blocks[0], golden_wan.condition_embedder
    for name, module in {
        "patch_embedding": golden_wan.patch_embedding, "text_embedding": embedder.text_embedder,
        "time_embedding": embedder.time_embedder, "time_projection": embedder.time_proj,
        "block0_self_attn_norm_q": block.attn1.norm_q, "block0_self_attn": block.attn1.to_out[0],
        "block0_cross_attn": block.attn2.to_out[0], "block0_ffn": block.ffn, "head": golden_wan.proj_out,
        "block1_norm1": golden_wan.blocks[1].norm1, "v": block.attn1.to_v,
    }.items():  # fmt: skip
        handles.append(module.register_forward_hook(keep(name)))
    handles.append(golden_wan.norm_out.register_forward_pre_hook(lambda m, a: seen.setdefault("block1", a[0])))
    handles.append(golden_wan.blocks[1].norm1.register_forward_pre_hook(lambda m, a: seen.setdefault("block0", a[0])))
    with torch.no_grad():
        out = golden_wan(g["chunk0.noisy"], g["chunk0.timestep"] / 1000, Context(text=g["text"]), write=True)
    for handle in handles:
        handle.remove()
    return seen, out


@pytest.mark.parametrize(
    "name",
    ["text_embedding", "block0_self_attn_norm_q", "block0_self_attn", "block0_cross_attn", "block0_ffn", "block0",
     "block1", "head"],
)  # fmt: skip
def test_a_part_gives_what_the_official_one_gives(name, golden, inside):
    expected = golden("intermediates")[f"chunk0.{name}"]
    torch.testing.assert_close(inside[0][name][1:].reshape(expected.shape), expected, **CLOSE)


def test_the_stem_and_the_time_embeddings(golden, inside):
    g, seen = golden("intermediates"), inside[0]
    torch.testing.assert_close(seen["patch_embedding"][1:], g["chunk0.patch_embedding"], **CLOSE)
    for name in ("time_embedding", "time_projection"):
        torch.testing.assert_close(seen[name].flatten(0, 1)[3:], g[f"chunk0.{name}"], **CLOSE)


def test_keys_rotated_at_their_frames_and_values_of_a_noisy_pass(golden, inside):
    g, span = golden("intermediates"), inside[1].span
    torch.testing.assert_close(turn(span.keys[0][1:], (0, 1, 2)), g["chunk0.roped_k_layer0"], **CLOSE)
    torch.testing.assert_close(span.values[0][1:], g["chunk0.v_layer0"], **CLOSE)


@pytest.mark.parametrize("start", [0, 3, 21])
def test_rotation_at_an_offset_in_one_step_or_two(start, golden):
    g, frames = golden("intermediates"), (start, start + 1, start + 2)
    x, expected = g["rope_in"], g[f"rope_out_start{start}"]
    torch.testing.assert_close(rotate(x, rotation(frames, 4, 6, 32, CPU)), expected, **CLOSE)
    torch.testing.assert_close(turn(place(x, 4, 6), frames), expected, **CLOSE)


def test_the_sinusoid_is_that_of_float64(golden, golden_wan, monkeypatch):
    g, seen = golden("intermediates"), []
    embedder = golden_wan.condition_embedder.time_embedder
    monkeypatch.setattr(embedder, "forward", lambda x: seen.append(x) or x[..., :128])
    golden_wan._time(g["sinusoid_t"][None] / 1000, None, 1)
    torch.testing.assert_close(seen[0][0], g["sinusoid"], **CLOSE)
