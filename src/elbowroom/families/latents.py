"""Latents of Diffusers' image autoencoders."""

from __future__ import annotations

from typing import Any

import torch


def normalised_moments(vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the latents of `diffusers.AutoencoderKL`, shifted and scaled.

    Args:
        vae: an `AutoencoderKL`.
        pixels: (batch, 3, height, width), from -1 to 1.
    """
    distribution = vae.encode(pixels).latent_dist
    shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
    return (distribution.mean - shift) * scale, distribution.std * scale
