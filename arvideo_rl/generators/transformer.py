"""The causal transformer: diffusers' Wan parameters under their own names, with a context to attend to.

One class runs every size. It adds to WanTransformer3DModel what that class lacks: reading a :class:`Context`, frame
positions without a table limit, modulation once per frame (not per token), an action embedding, and both predictions
(x0 and v). Everything goes through ``forward``.

Shape letters: B batch, F frames of the chunk, L tokens per frame, E model dim, N heads, D head dim, C H W latent.
Noise level t in [0, 1]: x_t = (1 - t) x0 + t eps, v = eps - x0; the network is told 1000 t (source: Wan2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn

from arvideo_rl.generators.context import Context, KeyShape
from arvideo_rl.generators.linear import place_of, read
from arvideo_rl.generators.rope import place, rotate, rotation
from arvideo_rl.generators.spans import Span

if TYPE_CHECKING:
    from arvideo_rl.generators.packed import Packing


@dataclass(frozen=True)
class Prediction:
    """What the network says of a noisy chunk. ``span`` is there only when ``write`` was asked for."""

    x0: Tensor  # [B, F, C, H, W]
    v: Tensor  # [B, F, C, H, W]; 0 at t = 0 for an x0 network, where v cannot be known
    span: Span | None = None


class CausalWan(WanTransformer3DModel):
    """Causal Wan. ``prediction`` says what the weights predict (v or x0); ``num_actions`` > 0 adds an embedding of
    one discrete action per frame (index 0 = none) to the time embedding; ``places`` (frames, rows, columns) adds a
    learned embedding of a token's place in its chunk, which a small network needs where Wan makes do with RoPE;
    ``linear_state`` adds W_lin to every block (linear.py), zero until trained."""

    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int = 12,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,  # unused here; kept so that diffusers' config.json files load as they are
        pos_embed_seq_len: int | None = None,
        prediction: str = "v",
        num_actions: int = 0,
        places: tuple[int, int, int] | None = None,
        linear_state: bool = False,
    ) -> None:
        if image_dim is not None or added_kv_proj_dim is not None:
            raise ValueError("image-to-video Wan weights (image_dim, added_kv_proj_dim) are not supported")
        if prediction not in ("v", "x0"):
            raise ValueError(f"prediction {prediction!r} is unknown; choose v or x0")
        super().__init__(  # by keyword, or diffusers records every value as a default and drops it on saving
            patch_size=patch_size, num_attention_heads=num_attention_heads, attention_head_dim=attention_head_dim,
            in_channels=in_channels, out_channels=out_channels, text_dim=text_dim, freq_dim=freq_dim, ffn_dim=ffn_dim,
            num_layers=num_layers, cross_attn_norm=cross_attn_norm, qk_norm=qk_norm, eps=eps,
            rope_max_seq_len=rope_max_seq_len, pos_embed_seq_len=pos_embed_seq_len,
        )  # fmt: skip
        del self.rope  # its table ends at 1,024 frames; see rope.py
        dim = num_attention_heads * attention_head_dim
        self.action_embedding = nn.Embedding(num_actions, dim) if num_actions else None
        self.place_embedding = nn.Parameter(torch.zeros(*places, dim)) if places else None
        self.attention: AttentionBackendName | None = None  # kernel; None: diffusers' own setting (attention.py)
        if linear_state:
            for block in self.blocks:
                block.attn1.linear_proj = nn.Linear(attention_head_dim, attention_head_dim)
                nn.init.zeros_(block.attn1.linear_proj.weight)
                nn.init.zeros_(block.attn1.linear_proj.bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, t: Tensor, context: Context, *, write: bool = False, packing: Packing | None = None
    ) -> Prediction:
        """Predict the clean chunk.

        x [m * B, F, C, H, W] is the noisy chunk, in m stacked copies when several noise levels share one context of
        batch B; t [m * B] or [m * B, F] are noise levels. ``write`` also returns the chunk's keys and values, which
        are only worth keeping where t = 0. With a ``packing``, x is all chunks of a video at once (packed.py), and the
        context one at its start.
        """
        batch, frames, _, height, width = x.shape
        _, p_h, p_w = self.config.patch_size
        if height % p_h or width % p_w:
            raise ValueError(f"latent of {height}x{width} does not divide into patches of {p_h}x{p_w}")
        if context.text is None:
            raise ValueError("the context has no text: call context.condition(text, actions) first")
        grid = (height // p_h, width // p_w)
        copies = batch // context.text.shape[0]
        if copies * context.text.shape[0] != batch:
            raise ValueError(f"{batch} rows of latents do not go with {context.text.shape[0]} rows of text")
        t = t[:, None].expand(batch, frames) if t.ndim == 1 else t

        temb = self._time(t, context.actions, copies)  # [B, F, E]
        project = self.condition_embedder.time_proj  # in a bfloat16 model the embedder before it stays in float32
        modulation = project(torch.nn.functional.silu(temb).to(project.weight.dtype)).unflatten(-1, (6, -1))
        texts = self._texts(context)

        h = self.patch_embedding(x.transpose(1, 2).to(self.patch_embedding.weight.dtype))
        h = h.flatten(3).permute(0, 2, 3, 1)  # [B, F, L, E]
        if self.place_embedding is not None:
            if tuple(self.place_embedding.shape[1:3]) != grid:
                known = "x".join(map(str, self.place_embedding.shape[:3]))
                raise ValueError(f"chunk of {frames}x{grid[0]}x{grid[1]} tokens; this generator knows {known} places")
            chunk = [f % len(self.place_embedding) for f in range(frames)]  # several chunks may be read at once
            h = h + self.place_embedding[chunk].flatten(1, 2)
        dim = self.config.attention_head_dim
        tokens, heads = grid[0] * grid[1], self.config.num_attention_heads
        times = tuple(range(context.time, context.time + frames)) if packing is None else packing.times
        here = rotation(times, *grid, dim, x.device)
        attend: Callable[..., Tensor] = partial(_attend, backend=self.attention)
        look = attend if packing is None else packing.attending(attend)
        past = context.past(KeyShape(batch, tokens, heads, dim, len(self.blocks), h.dtype, h.device), frames)
        bias = context.bias(tokens, frames, h)
        linear = self._linear(context, frames, grid)

        kept = []
        for i, block in enumerate(self.blocks):
            sums = context.sums if write else ""
            run = partial(_block, block, copies=copies, bias=bias, linear=linear[i] if linear else None, sums=sums,
                          attend=attend, look=look)  # fmt: skip
            args = (h, modulation, texts[i], here, past[i] if past else None)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                h, *kv = self._gradient_checkpointing_func(run, *args)
            else:
                h, *kv = run(*args)
            if write:
                kept.append(kv)

        shift, scale = (self.scale_shift_table[:, None] + temb[:, :, None].float()).chunk(2, dim=2)
        h = (self.norm_out(h.float()) * (1 + scale) + shift).type_as(h)
        out = self._unpatch(self.proj_out(h), grid).to(x.dtype)
        span = None
        if write:
            keys, values = tuple(place(k, *grid) for k, *_ in kept), tuple(v for _, v, _ in kept)
            summed = tuple(s for *_, s in kept) if context.sums else ()
            span = Span(context.position, context.position + frames, keys, values, summed)
        return self._prediction(x, t, out, span)

    def _prediction(self, x: Tensor, t: Tensor, out: Tensor, span: Span | None) -> Prediction:
        level = t[:, :, None, None, None].to(torch.float32)
        if self.config.prediction == "v":
            return Prediction((x.float() - level * out.float()).to(x.dtype), out, span)
        v = torch.where(level > 0, (x.float() - out.float()) / level.clamp_min(1e-6), 0.0)
        return Prediction(out, v.to(x.dtype), span)

    def _linear(self, context: Context, frames: int, grid: tuple[int, int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What each block reads the linear state with: the rotation of its queries, and the state."""
        if context.linear is None:
            return []
        if not self.config.linear_state:
            raise ValueError("the window keeps a linear state, but these weights have no linear_proj to read it with")
        start, state = place_of(context.position), context.linear
        places = tuple(range(start, start + frames))
        factors = rotation(places, *grid, self.config.attention_head_dim, state.kv[0].device)
        return [(factors, relu, kv) for relu, kv in zip(state.relu, state.kv)]

    def _time(self, t: Tensor, actions: Tensor | None, copies: int) -> Tensor:
        """Time (and action) embedding [B, F, E]; the sinusoid is made in float64, levels are never rounded."""
        half = self.config.freq_dim // 2
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
        angles = 1000.0 * t.double()[..., None] * inverse
        embedder = self.condition_embedder.time_embedder
        temb = embedder(torch.cat([angles.cos(), angles.sin()], -1).to(embedder.linear_1.weight.dtype))
        if self.action_embedding is not None and actions is not None:
            temb = temb + self.action_embedding(actions).repeat(copies, 1, 1)
        elif actions is not None:
            raise ValueError("this generator takes no actions (num_actions is 0), but actions were given")
        return temb

    def _texts(self, context: Context) -> tuple[Tensor | tuple[Tensor, Tensor], ...]:
        """What each block reads of the prompt: the projected text, or where the context lets it be remembered and no
        gradient is asked for, the block's keys and values."""
        assert context.text is not None
        embedder = self.condition_embedder.text_embedder
        if context.read is None or torch.is_grad_enabled():
            return (embedder(context.text.to(embedder.linear_1.weight.dtype)),) * len(self.blocks)
        if not context.read:
            text = embedder(context.text.to(embedder.linear_1.weight.dtype))
            context.read.update(enumerate(_keys_of_text(block.attn2, text) for block in self.blocks))
        return tuple(context.read.values())

    def _unpatch(self, out: Tensor, grid: tuple[int, int]) -> Tensor:
        """[B, F, L, p_h * p_w * C] -> [B, F, C, H, W]."""
        _, p_h, p_w = self.config.patch_size
        out = out.unflatten(2, grid).unflatten(-1, (p_h, p_w, -1))  # B F gh gw ph pw C
        return out.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, backend: Any = None) -> Tensor:
    """Attention over [B, tokens, N, D] through diffusers' dispatcher; ``bias`` is added to the logits."""
    return dispatch_attention_fn(query, key, value, attn_mask=bias, backend=backend).type_as(query)


def _block(
    block: Any,
    h: Tensor,
    modulation: Tensor,
    text: Any,
    here: Tensor,
    past: Any,
    *,
    copies: int,
    bias: Tensor | None,
    linear: tuple[Tensor, Tensor, Tensor] | None,
    sums: str,
    attend: Callable[..., Tensor] = _attend,
    look: Callable[..., Tensor] = _attend,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One Wan block on h [B, F, L, E]; also returns the chunk's un-rotated keys and its values [B, F*L, N, D], and the
    ``sums`` that the context asks for [B, F, N, D].

    ``past`` has batch B / copies, is shared by the copies and joins itself to the chunk; None is nothing. ``look``
    attends to frames, ``attend`` to the prompt. Order of the modulation: shift, scale, gate of attention, then of the
    feed-forward (source: Wan2.1).
    """
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (
        (block.scale_shift_table[:, None] + modulation.float())[:, :, :, None].unbind(2)
    )  # fmt: skip
    heads, frames = block.attn1.heads, h.shape[1]

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    x = (block.norm1(h.float()) * (1 + scale_a) + shift_a).type_as(h).flatten(1, 2)
    a = block.attn1
    query, key, value = split(a.norm_q(a.to_q(x))), split(a.norm_k(a.to_k(x))), split(a.to_v(x))
    keys, values = rotate(key, here), value
    if past is not None:
        keys, values = past.join(keys, values, copies)
    turned = rotate(query, here)
    y = look(turned, keys, values, bias)
    if linear is not None:
        factors, relu, kv = linear
        relu, kv = relu.repeat(copies, 1, 1), kv.repeat(copies, 1, 1, 1)
        y = y + a.linear_proj(read(query, rotate(query, factors), relu, kv).type_as(y))
    h = (h.float() + a.to_out[0](y.flatten(2)).view_as(h).float() * gate_a).type_as(h)
    summed = {"queries": turned, "keys": key.relu()}.get(sums)
    if summed is not None:
        summed = summed.unflatten(1, (frames, -1)).float().sum(2)

    a = block.attn2
    x = block.norm2(h.float()).type_as(h).flatten(1, 2)
    text_k, text_v = text if isinstance(text, tuple) else _keys_of_text(a, text)
    if copies > 1:
        text_k, text_v = text_k.repeat(copies, 1, 1, 1), text_v.repeat(copies, 1, 1, 1)
    y = attend(split(a.norm_q(a.to_q(x))), text_k, text_v)
    h = h + a.to_out[0](y.flatten(2)).view_as(h)

    x = (block.norm3(h.float()) * (1 + scale_f) + shift_f).type_as(h)
    h = (h.float() + block.ffn(x).float() * gate_f).type_as(h)
    return h, key, value, summed


def _keys_of_text(attention: Any, text: Tensor) -> tuple[Tensor, Tensor]:
    """A prompt's keys and values [B, tokens, N, D] in one block's cross-attention."""
    heads = (attention.heads, -1)
    key = attention.norm_k(attention.to_k(text)).unflatten(-1, heads)
    return key, attention.to_v(text).unflatten(-1, heads)
