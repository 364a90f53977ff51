"""Codecs turn pixels into latents and back. Pixels are [B, T, 3, H, W] in [0, 1], latents [B, F, C, h, w].

A video is decoded by a decoder, one per stream, that is given the latents piece by piece: what it must remember between
pieces lives in it, never in the network, so any cutting gives the same pixels and an exception leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Decoder = Callable[[Tensor], Tensor]  # the next latents of one stream -> their pixels


class Codec(Protocol):
    """What a generator needs of a codec."""

    channels: int  # of a latent
    stride: int  # pixels per latent in height and in width

    def to(self, device: torch.device | str) -> Codec:
        """Move it; returns self."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels to latents."""

    def decoder(self) -> Decoder:
        """A decoder at the start of a stream."""

    def decode(self, latents: Tensor) -> Tensor:
        """A whole video at once: ``decoder()(latents)``. Pixels have a gradient in latents that ask for one."""

    def pixel_frames(self, frames: int) -> int:
        """Pixel frames that the first ``frames`` frames of a stream become."""

    @property
    def weight_bytes(self) -> int:
        """Of its networks."""

    @property
    def graph_bytes(self) -> int:
        """Held for a gradient, of every decoded pixel of the longest piece."""


@dataclass(frozen=True)
class IdentityCodec:
    """Latent = (pixel - mean) / std, one latent frame per pixel frame."""

    mean: float = 0.57
    std: float = 0.22

    channels = 3
    stride = 1

    def to(self, device: torch.device | str) -> IdentityCodec:
        """It has nothing to move."""
        return self

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] to latents of the same shape."""
        return (pixels - self.mean) / self.std

    def decoder(self) -> Decoder:
        """It needs no memory."""
        return self.decode

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pixels, clamped to [0, 1]."""
        return (latents * self.std + self.mean).clamp(0, 1)

    def pixel_frames(self, frames: int) -> int:
        """One per frame."""
        return frames

    weight_bytes = 0
    graph_bytes = 12


class WanCodec:
    """Wan's causal video VAE (diffusers' AutoencoderKLWan): the first frame of a stream is 1 pixel frame, each later
    one 4. Latents are normalised with the VAE's own mean and deviation. Source: Wan2.1, diffusers."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae = vae.eval().requires_grad_(False)
        config = vae.config
        self.channels, self.stride = config.z_dim, config.scale_factor_spatial
        self._mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)

    def to(self, device: torch.device | str) -> WanCodec:
        """Move the VAE; returns self."""
        self.vae.to(device)
        return self

    def pixel_frames(self, frames: int) -> int:
        """T = 4 F - 3."""
        return self.vae.config.scale_factor_temporal * (frames - 1) + 1 if frames > 0 else 0

    @property
    def weight_bytes(self) -> int:
        """Of the VAE."""
        return sum(p.numel() * p.element_size() for p in self.vae.parameters())

    @property
    def graph_bytes(self) -> int:
        """Of 13 pixel frames at 128 x 192, forward and backward, with Wan 2.1's 96 channels: 12,800 a pixel."""
        return 12_800 * self.vae.config.base_dim // 96

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """The posterior's mean, normalised. ValueError unless T = 4 F - 3 and the size is whole latents."""
        per, (t, h, w) = self.vae.config.scale_factor_temporal, (pixels.shape[i] for i in (1, 3, 4))
        if (t - 1) % per or h % self.stride or w % self.stride:
            low = (t - 1) // per * per + 1
            raise ValueError(
                f"cannot encode {t} pixel frames of {h}x{w}: use {low} or {low + per} frames and sides that are "
                f"multiples of {self.stride}"
            )
        x = (2 * pixels - 1).transpose(1, 2).to(self.vae.dtype)
        memory = [None] * self.vae._cached_conv_counts["encoder"]
        parts = [self.vae.encoder(x[:, :, a:b], feat_cache=memory, feat_idx=[0])
                 for a, b in [(0, 1), *((a, a + per) for a in range(1, t, per))]]  # fmt: skip
        mean = self.vae.quant_conv(torch.cat(parts, 2))[:, : self.channels].float()
        return ((mean - self._mean.to(mean.device)) / self._std.to(mean.device)).transpose(1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        """A whole video [B, F, C, h, w] to pixels [B, 4 F - 3, 3, H, W]."""
        return self.decoder()(latents)

    def decoder(self) -> Decoder:
        """A decoder at the start of a stream; its memory is the last two frames at every causal convolution."""
        memory: list = [None] * self.vae._cached_conv_counts["decoder"]
        first = True

        def decode(latents: Tensor) -> Tensor:
            nonlocal memory, first
            z = latents.transpose(1, 2).float()
            z = (z * self._std.to(z.device) + self._mean.to(z.device)).to(self.vae.dtype)
            out, after, opening = [], list(memory), first  # kept only if all succeed, so that they can be tried again
            for frame in self.vae.post_quant_conv(z).split(1, 2):
                if frame.requires_grad:  # one frame's graph at a time: all of a chunk's is 85 GiB at 480 x 832
                    pixels, after = checkpoint(self._decode_one, frame, after, opening, use_reentrant=False)
                else:
                    pixels, after = self._decode_one(frame, after, opening)
                out.append(pixels)
                opening = False
            memory, first = after, False
            return (torch.cat(out, 2).clamp(-1, 1).transpose(1, 2).float() + 1) / 2

        return decode

    def _decode_one(self, frame: Tensor, memory: list, opening: bool) -> tuple[Tensor, list]:
        """Pixels of one latent frame, and the memory after it."""
        after = list(memory)
        return self.vae.decoder(frame, feat_cache=after, feat_idx=[0], first_chunk=opening), after
