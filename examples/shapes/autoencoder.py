"""The demo's autoencoder: a small `AutoencoderKL`, trained on drawn pictures in about twenty minutes.

Pictures of 64x64 pixels become latents of 8x8 with 16 channels, as Flux's own autoencoder does it.
"""

import random
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from checker import describe
from pictures import SHAPES, Description, combinations, draw

CHANNELS = (8, 16, 32, 32)  # of the four levels; each level but the last halves the sides
STEPS, BATCH, LEARNING_RATE = 7000, 8, 2e-3
KL_WEIGHT = 5e-4  # just enough to keep the latents near a normal distribution


def make_autoencoder(seed: int) -> tuple[AutoencoderKL, float]:
    """A trained autoencoder, and the share of fresh pictures that the checker still reads right after a round trip.

    It learns from every shape, the new one too: an autoencoder for the demo should not limit what can be drawn, as
    the autoencoder of a large model doesn't. What a heart is called, and when to draw one, it can't know.
    """
    torch.manual_seed(seed)
    levels = len(CHANNELS)
    shape: dict[str, Any] = {  # its type hints allow for one level only
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": CHANNELS,
    }
    vae = AutoencoderKL(
        **shape,
        layers_per_block=1,
        latent_channels=16,
        # One group: with a channel or two to a group, normalisation would erase the colour of a plain background.
        norm_num_groups=1,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    _train(vae, seed)
    _normalise(vae, seed + 1)
    return vae, _readable(vae, seed + 2)


def drawn(count: int, seed: int) -> tuple[Tensor, list[Description]]:
    """Random pictures, (count, 3, 64, 64) from -1 to 1, and what they show."""
    generator = random.Random(seed)
    descriptions = generator.choices(combinations(SHAPES), k=count)
    pixels = np.stack([np.asarray(draw(description, generator, anywhere=True)) for description in descriptions])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1, descriptions


def _train(vae: Any, seed: int) -> None:
    pictures, _ = drawn(4000, seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.03)
    vae.train()
    for _ in range(STEPS):
        pixels = pictures[torch.randint(len(pictures), (BATCH,))]
        latents = vae.encode(pixels).latent_dist
        decoded = vae.decode(latents.sample()).sample
        divergence = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).mean()
        loss = functional.l1_loss(decoded, pixels) + functional.mse_loss(decoded, pixels) + KL_WEIGHT * divergence
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    vae.eval()


@torch.no_grad()
def _normalise(vae: Any, seed: int) -> None:
    """Set shift and scale so that the latents a denoiser sees have mean 0 and standard deviation 1."""
    latents = vae.encode(drawn(500, seed)[0]).latent_dist.mean
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@torch.no_grad()
def _readable(vae: Any, seed: int, count: int = 200) -> float:
    pixels, descriptions = drawn(count, seed)
    decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample
    bytes_ = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    seen = [describe(Image.fromarray(picture)) for picture in bytes_]
    return sum(one == shown for one, shown in zip(seen, descriptions, strict=True)) / count
