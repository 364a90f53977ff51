"""Codecs turn pixels into latents and back. The identity codec only centres and scales, frame by frame."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class IdentityCodec:
    """Latent = (pixel - mean) / std, one latent frame per pixel frame. Pixels are [B, T, 3, H, W] in [0, 1]."""

    mean: float = 0.57
    std: float = 0.22

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] to latents of the same shape."""
        return (pixels - self.mean) / self.std

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pixels, clamped to [0, 1]."""
        return (latents * self.std + self.mean).clamp(0, 1)
