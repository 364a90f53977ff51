"""What must hold of caches whatever the sizes: properties over random shapes and policies."""

import gc
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKLWan
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from arvideo_rl.generators.codec import WanCodec
from arvideo_rl.generators.context import Context, KeyShape, Past
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.ring import Ring, unfit
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.sinks import adaptive, ema
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.transformer import CausalWan, Prediction
from arvideo_rl.generators.window import Window
from samplers.randomness import Key
from samplers.stream import draw_from, stream

CLOSE = dict(rtol=0, atol=3e-5)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck))
POLICIES = ("static", "ema", "adaptive", "compress", "absolute", "unbounded")


@st.composite
def windows(draw, policies=POLICIES):
    """A window of any size, with a policy that goes with it."""
    policy = draw(st.sampled_from(policies))
    chunk, sink = draw(st.integers(1, 4)), draw(st.integers(1 if policy in ("ema", "adaptive") else 0, 4))
    kept = draw(st.integers(1, 2)) if policy == "compress" else 0
    size = None if policy == "unbounded" else sink + kept + chunk + draw(st.integers(0, 6))
    fold = {"ema": ema(0.5), "adaptive": adaptive(0.5)}.get(policy)
    return Window(chunk, size, sink, "absolute" if policy == "absolute" else "adjacent", fold, compress=kept)


@st.composite
def models(draw):
    """A random network and the shape of its latents [C, H, W]."""
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([12, 14, 16, 24]))
    patch = draw(st.sampled_from([(1, 1, 1), (1, 2, 2), (1, 1, 2)]))
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 99)))
        model = CausalWan(
            patch_size=patch, num_attention_heads=heads, attention_head_dim=dim, in_channels=2, out_channels=2,
            text_dim=6, freq_dim=16, ffn_dim=16, num_layers=draw(st.integers(1, 2)),
            prediction=draw(st.sampled_from(["v", "x0"])),
        ).eval()  # fmt: skip
    return model, (2, patch[1] * rows, patch[2] * columns)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def past_of(model, shape, window, chunks, batch=2, seed=0):
    """(denoiser, the next chunk's context, the clean latents before it)."""
    latents = normal(batch, chunks * window.chunk, *shape, seed=seed)
    denoiser = Denoiser(model, window, Script(((0, normal(batch, 4, 6, seed=1)),)))
    context = denoiser.enter(denoiser.start())
    for k in range(chunks):
        clean = latents[:, k * window.chunk : (k + 1) * window.chunk]
        context = denoiser.enter(denoiser.refresh(clean, context))
    return denoiser, context, latents


@given(models(), windows(("static", "absolute", "unbounded")), st.integers(1, 6), st.floats(0.05, 1))
@PROPERTY
@torch.no_grad()
def test_cached_is_the_same_as_every_clean_chunk_computed_again(net, window, chunks, t):
    """A context put together by hand from forwards that were told what each chunk may see."""
    model, shape = net
    denoiser, context, latents = past_of(model, shape, window, chunks)
    text, c = context.text, window.chunk

    def visible(start):
        if window.size is None:
            return list(range(start))
        recent = start - (window.size - window.sink - c)
        return [f for f in range(start) if f < window.sink or f >= recent]

    made: dict[int, Span] = {}

    def before(start):
        frames = visible(start)
        spans = [made[f] for f in frames]
        if window.positions == "adjacent":  # each frame's keys moved to the place where it is read
            first = start - len(frames)
            spans = [Span(first + i, first + i + 1, s.keys, s.values) for i, s in enumerate(spans)]
        return Context(tuple(spans), start, text=text)

    for start in range(0, chunks * c, c):
        out = model(latents[:, start : start + c], torch.zeros(2), before(start), write=True)
        made |= {f: out.span.crop(f, f + 1) for f in range(start, start + c)}
    x = normal(2, c, *shape, seed=3)
    levels = torch.full((2,), t)
    torch.testing.assert_close(denoiser.denoise(x, t, context), model(x, levels, before(chunks * c)).x0, **CLOSE)


@pytest.mark.parametrize("policy", POLICIES)  # each by itself, or few examples let frames leave
@given(models(), st.data(), st.integers(2, 6))
@PROPERTY
@torch.no_grad()
def test_shifting_every_position_changes_nothing(policy, net, data, chunks):
    """A stream that begins at a later frame is the stream that begins at 0, also when frames have left it."""
    model, shape = net
    window = data.draw(windows((policy,)))
    denoiser, context, latents = past_of(model, shape, window, chunks)
    by = 503  # a prime, so that it is no multiple of a sink's or a chunk's size
    moved = denoiser.enter(replace(denoiser.start(), position=by, origin=by))
    for clean in latents.split(window.chunk, 1):
        moved = denoiser.enter(denoiser.refresh(clean, moved))
    assert moved.held() == tuple(f + by for f in context.held())
    x = normal(2, window.chunk, *shape, seed=3)
    torch.testing.assert_close(denoiser.denoise(x, 0.7, moved), denoiser.denoise(x, 0.7, context), **CLOSE)


@given(models(), windows(("static", "ema", "compress")), st.integers(2, 5))
@PROPERTY
@torch.no_grad()
def test_adjacent_sinks_are_slots_counted_from_nought(net, window, chunks):
    """Un-rotated keys at slots 0 to n-1 and the chunk after them."""
    model, shape = net
    denoiser, context, _ = past_of(model, shape, window, chunks)
    n = len(context.held())
    x = normal(2, window.chunk, *shape, seed=3)
    slots = Context((Span(0, n, *(tuple(torch.cat(layer, 1) for layer in zip(*(getattr(s, k) for s in context.spans)))
                                  for k in ("keys", "values"))),), n, text=context.text) if n else context  # fmt: skip
    torch.testing.assert_close(denoiser.denoise(x, 0.7, slots), denoiser.denoise(x, 0.7, context), **CLOSE)


@given(models(), windows(("static",)), st.integers(1, 6))
@PROPERTY
@torch.no_grad()
def test_adjacent_sinks_are_miniworlds_shift_on_eviction(net, window, chunks):
    """It keeps keys rotated; when frames are dropped, the kept ones but the sinks, and the next chunk, move back by as
    many positions. Here by hand, with keys that the past hands out as they were stored."""
    model, shape = net
    denoiser, context, latents = past_of(model, shape, window, chunks)
    stored: list[list[Past]] = []  # per frame and layer, the first frame at 0
    position = 0

    def reading():
        if not stored:
            return Context(text=context.text)
        view = tuple(Past(*(torch.cat(part, 1) for part in zip(*layer))) for layer in zip(*stored))
        slot = Span(0, len(stored), *zip(*view))
        return Context((slot,), position, text=context.text, _rotated={"view": view})

    for clean in latents.split(window.chunk, 1):
        span = model(clean, torch.zeros(2), reading(), write=True).span
        for f in range(span.start, span.stop):
            frame = span.crop(f, f + 1)
            stored.append([Past(turn(k, (f,)), v) for k, v in zip(frame.keys, frame.values)])
        position, dropped = span.stop, max(0, len(stored) - (window.size - window.chunk))
        kept = [[Past(turn(k, (-dropped,)), v) for k, v in frame] for frame in stored[window.sink + dropped :]]
        stored, position = stored[: window.sink] + kept, position - dropped
    x = normal(2, window.chunk, *shape, seed=3)
    torch.testing.assert_close(denoiser.denoise(x, 0.7, reading()), denoiser.denoise(x, 0.7, context), **CLOSE)


@given(models(), windows(), st.integers(1, 4))
@PROPERTY
@torch.no_grad()
def test_forks_do_not_touch_each_other(net, window, chunks):
    model, shape = net
    denoiser, context, _ = past_of(model, shape, window, chunks)
    x = normal(2, window.chunk, *shape, seed=3)

    def after(context, seed):
        for k in range(2):
            clean = normal(2, window.chunk, *shape, seed=seed + k)
            context = denoiser.enter(denoiser.refresh(clean, context))
            denoiser.denoise(x, 0.7, context)
        return context

    def seen(context):
        """What is read of it now, which must be what it remembers having read."""
        out = denoiser.denoise(x, 0.7, replace(context, _rotated={}))
        assert torch.equal(denoiser.denoise(x, 0.7, context), out)
        return out

    before = seen(context)
    mine = after(context, 10)
    once = seen(mine)
    after(context, 20)
    after(mine, 30)
    assert torch.equal(seen(context), before) and torch.equal(seen(mine), once)
    assert torch.equal(seen(after(context, 10)), once)  # the same again, after the others


@pytest.mark.parametrize("policy", POLICIES)  # each by itself, or few examples let frames leave
@given(models(), st.data(), st.integers(2, 6))
@PROPERTY
@torch.no_grad()
def test_a_row_does_not_see_the_others(policy, net, data, chunks):
    model, shape = net
    window = data.draw(windows((policy,)))
    denoiser, context, latents = past_of(model, shape, window, chunks)
    x = normal(2, window.chunk, *shape, seed=3)
    alone = Denoiser(model, window, denoiser.script.rows(slice(1, 2)))
    own = alone.enter(alone.start())
    for start in range(0, latents.shape[1], window.chunk):
        own = alone.enter(alone.refresh(latents[1:, start : start + window.chunk], own))
    torch.testing.assert_close(alone.denoise(x[1:], 0.7, own), denoiser.denoise(x, 0.7, context)[1:], **CLOSE)


@given(models(), windows(("static", "ema", "adaptive", "absolute")), st.integers(2, 6), st.booleans())
@PROPERTY
@torch.no_grad()
def test_a_ring_is_the_functional_path(net, window, chunks, alone):
    model, shape = net
    window = replace(window, first_alone=alone)
    script = Script(((0, normal(2, 4, 6, seed=1)),))
    draw = draw_from([Key(1), Key(2)], (window.chunk, *shape))
    bounds = window.chunks(chunks * window.chunk)
    videos = []
    for in_place in (True, False):
        denoiser = Denoiser(model, window, script, fixed=True, in_place=in_place)
        out = list(stream(denoiser, bounds, (1.0, 0.5), draw))
        assert isinstance(out[-1].context, Ring) == (in_place and not unfit(window))
        videos.append(torch.cat([c.latents for c in out], 1))
    scale = 1 + videos[1].abs().max().item()
    torch.testing.assert_close(videos[0] / scale, videos[1] / scale, **CLOSE)


@given(models(), windows(), st.integers(1, 6))
@PROPERTY
@torch.no_grad()
def test_what_is_held_keeps_no_memory_of_what_left(net, window, chunks):
    model, shape = net
    _, context, _ = past_of(model, shape, window, chunks)
    for span in context.spans:
        for x in (*span.keys, *span.values):
            assert x.untyped_storage().nbytes() == x.nbytes


@pytest.fixture(scope="module")
def decoder():
    """A small random Wan VAE as a codec, and pixels of seven latent frames decoded in one go."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, attn_scales=[],
                               temperal_downsample=[False, True, True], latents_mean=[0.0] * 4,
                               latents_std=[1.0] * 4).eval()  # fmt: skip
    codec, latents = WanCodec(vae), normal(1, 7, 4, 2, 3)
    return codec, latents, codec.decode(latents)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(0, 6), st.floats(0, 1))
@example([2, 2], 3, 1.0)  # the second frame of a piece fails at the last convolution
@settings(PROPERTY, max_examples=10)
@torch.no_grad()
def test_every_decode_plan_gives_the_same_pixels(decoder, plan, frame, depth):
    """Also where the decoder fails at ``frame``, somewhere inside, and the piece is decoded again."""
    codec, latents, whole = decoder
    convolutions = [m for m in codec.vae.decoder.modules() if type(m).__name__ == "WanCausalConv3d"]
    place = convolutions[round(depth * (len(convolutions) - 1))]
    decode, parts, at = codec.decoder(), [], 0
    for count in [*plan, 7]:
        piece = latents[:, at : at + count]
        if at <= frame < at + count:
            calls, real = iter(range(7)), place.forward

            def failing(*args, calls=calls, left=frame - at, real=real):
                if next(calls) == left:
                    raise RuntimeError("lost")
                return real(*args)

            with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
                patch.setattr(place, "forward", failing)
                decode(piece)
        if at < 7:
            parts.append(decode(piece))
            at += count
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(codec.decode(latents), whole, rtol=0, atol=1e-5)


class Stub:
    """A network that writes keys and values of the right shape and predicts nothing."""

    def __call__(self, x, t, context, write=False):
        rows = KeyShape(1, 2, 1, 12, 1, x.dtype, x.device)
        past = context.past(rows, x.shape[1])
        keys = x.flatten(1)[:, :1, None, None].expand(1, 2 * x.shape[1], 1, 12).contiguous()
        if isinstance(context, Ring):
            past[0].join(turn(keys, (context.time,) * x.shape[1]), keys, 1)
        sums = (keys[:, ::2],) if context.sums else ()
        stop = context.position + x.shape[1]
        return Prediction(x, x, Span(context.position, stop, (keys,), (keys.clone(),), sums))


@pytest.mark.parametrize(
    "window",
    [Window(1, 6, 2), Window(3, 12, 3), Window(3, 9, 3, fold=ema(0.9)), Window(3, 11, 3, compress=2),
     Window(3, 9, 3, linear=True), Window(3, 6, 0, recompute=True), Window(3, 9, 3, at_switch="recache")],
    ids=["framewise", "static", "ema", "compress", "linear", "recompute", "recache"],
)  # fmt: skip
@pytest.mark.parametrize("in_place", [False, True], ids=["contexts", "ring"])
@torch.no_grad()
def test_three_thousand_frames_allocate_nothing_new(window, in_place):
    if in_place and unfit(window):
        assert not isinstance(Denoiser(Stub(), window, Script(()), in_place=True).start(), Ring)
        return
    denoiser = Denoiser(Stub(), window, Script(((0, torch.zeros(1, 2, 6)),)), in_place=in_place)
    context, x, held = denoiser.start(), torch.ones(1, window.chunk, 1, 1, 1), {}
    for start in range(0, 3000, window.chunk):
        context = denoiser.refresh(x, denoiser.enter(context))
        if start // window.chunk in (100, 500, 3000 // window.chunk - 1):
            gc.collect()
            live = [o for o in gc.get_objects() if type(o) is torch.Tensor]
            held[start] = (len(live), sum(o.untyped_storage().nbytes() for o in live))
            del live
    counts, sizes = zip(*held.values())
    assert len(set(sizes)) == 1 and len(set(counts)) == 1, held
