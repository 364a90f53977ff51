"""Codecs: any cutting of a stream gives the pixels of diffusers' own decoder, and its memory is the stream's own."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from arvideo_rl.generators.codec import IdentityCodec, WanCodec


@pytest.fixture(scope="module")
def vae():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


@pytest.fixture
def latents(randn):
    return randn(2, 7, 16, 2, 3)


def theirs(vae, latents):
    mean, std = (torch.tensor(vae.config[f"latents_{k}"]).view(1, -1, 1, 1, 1) for k in ("mean", "std"))
    with torch.no_grad():
        return (vae.decode(latents.transpose(1, 2) * std + mean).sample.transpose(1, 2) + 1) / 2


@pytest.mark.parametrize("plan", [[7], [1] * 7, [3, 3, 1], [1, 3, 3], [2, 5]])
def test_every_decode_plan_gives_diffusers_pixels(vae, latents, plan):
    codec = WanCodec(vae)
    decode = codec.decoder()
    pieces = [decode(part) for part in latents.split(plan, 1)]
    assert pieces[0].shape[1] == codec.pixel_frames(plan[0])
    pixels = torch.cat(pieces, 1)
    assert pixels.shape == (2, codec.pixel_frames(7), 3, 16, 24) and codec.pixel_frames(7) == 25
    torch.testing.assert_close(pixels, theirs(vae, latents), rtol=0, atol=1e-5)


def test_pixels_have_the_gradient_of_latents_that_ask_for_one_and_else_none(vae, latents, randn):
    codec, way = WanCodec(vae), randn(1, 3, 16, 2, 3)
    assert not codec.decode(latents).requires_grad
    z, h = latents[:1, :3].clone().requires_grad_(), 1e-2
    (slope,) = torch.autograd.grad(codec.decode(z).square().sum(), z)
    up, down = (codec.decode(latents[:1, :3] + s * h * way).double().square().sum() for s in (1, -1))
    assert ((up - down) / (2 * h)).item() == pytest.approx((slope * way).sum().item(), rel=0.02)


def test_streams_do_not_see_each_other(vae, latents):
    codec = WanCodec(vae)
    one, two = codec.decoder(), codec.decoder()
    parts = [(one(latents[:, i : i + 1]), two(latents.flip(1)[:, i : i + 1])) for i in range(7)]
    torch.testing.assert_close(torch.cat([a for a, _ in parts], 1), codec.decode(latents), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([b for _, b in parts], 1), codec.decode(latents.flip(1)), rtol=0, atol=1e-5)


def test_an_exception_leaves_nothing_behind(vae, latents, monkeypatch):
    codec = WanCodec(vae)
    decode, whole = codec.decoder(), codec.decode(latents)
    before = {k: v for k, v in vars(vae).items() if "feat" in k}
    first = decode(latents[:, :2])
    real = vae.decoder.conv_out.forward
    monkeypatch.setattr(vae.decoder.conv_out, "forward", lambda *a: (_ for _ in ()).throw(RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        decode(latents[:, 2:4])
    monkeypatch.setattr(vae.decoder.conv_out, "forward", real)
    again = torch.cat([first, decode(latents[:, 2:])], 1)  # the stream goes on where it was
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-5)
    assert all(vars(vae)[k] is v for k, v in before.items())


def test_encoding_is_diffusers_mean_and_says_what_it_takes(vae, randn):
    codec, pixels = WanCodec(vae), randn(2, 9, 3, 16, 24).sigmoid()
    with torch.no_grad():
        theirs = vae.encode((2 * pixels - 1).transpose(1, 2)).latent_dist.mode()
    mean, std = (torch.tensor(vae.config[f"latents_{k}"]).view(1, -1, 1, 1, 1) for k in ("mean", "std"))
    latents = codec.encode(pixels)
    assert latents.shape == (2, 3, 16, 2, 3)
    torch.testing.assert_close(latents, ((theirs - mean) / std).transpose(1, 2), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="8 pixel frames of 16x24: use 5 or 9 frames"):
        codec.encode(pixels[:, :8])
    with pytest.raises(ValueError, match="multiples of 8"):
        codec.encode(pixels[..., :20])


def test_the_identity_codec_is_its_own_inverse(randn):
    codec, pixels = IdentityCodec(), randn(1, 5, 3, 4, 4).sigmoid()
    decode = codec.decoder()
    pieces = torch.cat([decode(p) for p in codec.encode(pixels).split([2, 3], 1)], 1)
    torch.testing.assert_close(pieces, pixels)
    assert codec.pixel_frames(5) == 5
