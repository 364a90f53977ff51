"""Cached streaming equals recomputing everything: one dense pass over [all clean chunks; the noisy chunk], written here
a second time from the formulas, in float64, with a mask and positions for every chunk that reads."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.window import Window

FRAMES, CHUNK, TOKENS, GRID, SWITCH = 24, 3, 4, 2, 12


def visible(window: Window, start: int) -> tuple[list[int], list[int]]:
    """Frames that the chunk at ``start`` reads, its own last, and the position at which each is read."""
    past = list(range(start))
    if window.size is not None:
        recent = start - (window.size - window.sink - CHUNK)
        past = [f for f in past if f < window.sink or f >= recent]
    frames = past + list(range(start, start + CHUNK))
    at = frames if window.positions == "absolute" else [start + CHUNK - len(frames) + i for i in range(len(frames))]
    return frames, at


def turn(x, positions):
    """Rotate interleaved pairs of [B, tokens, heads, dim] by frame position, row and column, with real sines."""
    dim = x.shape[-1]
    space = 2 * (dim // 6)
    place = torch.tensor([(p, r, c) for p in positions for r in range(GRID) for c in range(GRID)]).double()
    dims = (dim - 2 * space, space, space)
    angles = torch.cat([place[:, i : i + 1] * 10000.0 ** (-torch.arange(0, d, 2) / d) for i, d in enumerate(dims)], 1)
    cos, sin, even, odd = angles.cos()[:, None], angles.sin()[:, None], x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def attention(q, k, v):
    weights = (torch.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", weights, v).flatten(2)


def dense(model, window, latents, t, actions, texts):
    """Raw network output [B, F, C, H, W]. t and actions [B, F]; texts holds one embedding per chunk."""
    w = {k: p.detach().double() for k, p in model.named_parameters()}
    heads, chunks = model.config.num_attention_heads, latents.shape[1] // CHUNK

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def mlp(x, name, act):
        return linear(act(linear(x, f"{name}.linear_1")), f"{name}.linear_2")

    def split(x):
        return x.unflatten(-1, (heads, -1))

    def project(x, name, norm=None):
        y = linear(x, name)
        return split(y if norm is None else F.rms_norm(y, y.shape[-1:], w[f"{norm}.weight"], 1e-6))

    def gelu(x):
        return F.gelu(x, approximate="tanh")

    def norm(x):
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)

    half = model.config.freq_dim // 2
    angles = 1000 * t.double()[..., None] * 10000.0 ** (-torch.arange(half).double() / half)
    temb = mlp(torch.cat([angles.cos(), angles.sin()], -1), "condition_embedder.time_embedder", F.silu)
    temb = temb + w["action_embedding.weight"][actions]
    modulation = linear(F.silu(temb), "condition_embedder.time_proj").unflatten(-1, (6, -1))
    texts = [mlp(x.double(), "condition_embedder.text_embedder", gelu) for x in texts]

    patches = latents.double().unflatten(4, (GRID, 2)).unflatten(3, (GRID, 2))  # B F C gh ph gw pw
    patches = patches.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(2, 3)  # B F L (C ph pw)
    h = patches @ w["patch_embedding.weight"].flatten(1).T + w["patch_embedding.bias"]
    for i in range(model.config.num_layers):
        name = f"blocks.{i}"
        parts = (w[f"{name}.scale_shift_table"] + modulation)[:, :, :, None].unbind(2)
        x = (norm(h) * (1 + parts[1]) + parts[0]).flatten(1, 2)
        a = f"{name}.attn1"
        q, k, v = (project(x, f"{a}.to_{s}", n) for s, n in (("q", f"{a}.norm_q"), ("k", f"{a}.norm_k"), ("v", None)))
        out = []
        for c in range(chunks):
            frames, at = visible(window, CHUNK * c)
            seen = torch.tensor([f * TOKENS + j for f in frames for j in range(TOKENS)])
            here = slice(c * CHUNK * TOKENS, (c + 1) * CHUNK * TOKENS)
            query = turn(q[:, here], range(CHUNK * c, CHUNK * c + CHUNK))
            out.append(attention(query, turn(k[:, seen], at), v[:, seen]))
        h = h + linear(torch.cat(out, 1), f"{a}.to_out.0").view_as(h) * parts[2]

        a = f"{name}.attn2"
        x = F.layer_norm(h, h.shape[-1:], w[f"{name}.norm2.weight"], w[f"{name}.norm2.bias"], 1e-6)
        out = []
        for c in range(chunks):
            q = project(x[:, CHUNK * c : CHUNK * c + CHUNK].flatten(1, 2), f"{a}.to_q", f"{a}.norm_q")
            out.append(attention(q, project(texts[c], f"{a}.to_k", f"{a}.norm_k"), project(texts[c], f"{a}.to_v")))
        h = h + linear(torch.cat(out, 1), f"{a}.to_out.0").view_as(h)

        x = norm(h) * (1 + parts[4]) + parts[3]
        x = linear(gelu(linear(x, f"{name}.ffn.net.0.proj")), f"{name}.ffn.net.2")
        h = h + x * parts[5]
    shift, scale = (w["scale_shift_table"] + temb[:, :, None])[:, :, :, None].unbind(2)
    out = linear(norm(h) * (1 + scale) + shift, "proj_out").unflatten(2, (GRID, GRID)).unflatten(-1, (2, 2, 3))
    return out.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


@pytest.mark.parametrize(
    ("size", "sink", "positions"),
    [(12, 3, "adjacent"), (12, 3, "absolute"), (6, 0, "adjacent"), (9, 1, "adjacent"), (None, 0, "absolute")],
)
@torch.no_grad()
def test_cached_streaming_equals_one_dense_pass_over_the_history(size, sink, positions, tiny, randn):
    model, window = tiny(), Window(CHUNK, size, sink, positions)
    clean, noise = randn(2, FRAMES, 3, 4, 4), randn(2, FRAMES, 3, 4, 4)
    actions = torch.arange(2 * FRAMES).view(2, FRAMES) * 7 % 6
    before, after = randn(2, 5, 8), randn(2, 5, 8)
    denoiser = Denoiser(model, window, Script(((0, before), (SWITCH, after)), actions))
    context, t = denoiser.start(), 0.6
    for start, stop in window.chunks(FRAMES):
        context = denoiser.enter(context)
        noisy = noise[:, start:stop]
        got = denoiser.denoise(noisy, t, context)
        levels = torch.zeros(2, stop)
        levels[:, start:] = t
        texts = [before if a < SWITCH else after for a, _ in window.chunks(stop)]
        history = torch.cat([clean[:, :start], noisy], 1)
        expected = dense(model, window, history, levels, actions[:, :stop], texts)[:, start:]
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
        context = denoiser.refresh(clean[:, start:stop], context)


@torch.no_grad()
def test_the_dense_pass_itself_feels_positions_window_actions_and_text(tiny, randn):
    model, latents, t = tiny(), randn(1, FRAMES, 3, 4, 4), torch.zeros(1, FRAMES)
    actions, text, other = torch.ones(1, FRAMES, dtype=torch.long), randn(1, 5, 8), randn(1, 5, 8)
    base = dense(model, Window(3, 12, 3, "adjacent"), latents, t, actions, [text] * 8)
    for changed in (
        dense(model, Window(3, 12, 3, "absolute"), latents, t, actions, [text] * 8),
        dense(model, Window(3, 9, 3, "adjacent"), latents, t, actions, [text] * 8),
        dense(model, Window(3, 12, 3, "adjacent"), latents, t, 2 * actions, [text] * 8),
        dense(model, Window(3, 12, 3, "adjacent"), latents, t, actions, [text] * 7 + [other]),
    ):
        assert (changed - base)[:, -3:].abs().max() > 1e-3
