"""Makes the demo pipeline but for the training of its denoiser, which is `elbowroom train`'s work.

    python examples/shapes/make_parts.py DIR

Trains the autoencoder and both text encoders on drawn pictures and their captions, adds a denoiser with random
weights and a scheduler, and saves all of it as one `FluxPipeline`. Takes about ten minutes on two cores. The same
seed gives the same weights on the same machine.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from autoencoder import make_autoencoder
from text_encoders import WIDTH, make_clip, make_clip_tokenizer, make_t5, make_t5_tokenizer

LEAST_ACCURACY = 0.99  # of the text encoders, on captions of held-out combinations
LEAST_READABLE = 0.97  # of the autoencoder's pictures, by the checker
HEADS = 6
HEAD_WIDTH = 32


def make_denoiser(seed: int) -> FluxTransformer2DModel:
    """A small Flux with random weights: two double-stream and four single-stream blocks."""
    torch.manual_seed(seed)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,  # 16 latent channels of 2x2 latents
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Flow matching with a fixed shift of 1: with 16 tokens a picture there is nothing to shift for."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=False)


def make_pipeline(seed: int) -> FluxPipeline:
    """All parts in one pipeline. Exits with what failed if a trained part isn't good enough to build on."""
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(seed), make_t5_tokenizer(seed)
    clip, clip_accuracy = make_clip(clip_tokenizer, seed)
    _report("CLIP text encoder, captions with every attribute right", clip_accuracy, LEAST_ACCURACY)
    t5, t5_accuracy = make_t5(t5_tokenizer, seed)
    _report("T5 encoder, captions with every attribute right", t5_accuracy, LEAST_ACCURACY)
    vae, readable = make_autoencoder(seed)
    _report("autoencoder, pictures that the checker reads right", readable, LEAST_READABLE)
    return FluxPipeline(
        scheduler=make_scheduler(),
        vae=vae,
        text_encoder=clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=make_denoiser(seed),
    )


def _report(part: str, share: float, at_least: float) -> None:
    print(f"{part}: {share:.1%}", flush=True)
    if share < at_least:
        sys.exit(f"{part}: {share:.1%} is below {at_least:.0%}; train it for more steps (STEPS in its module)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo pipeline, its denoiser still untrained.")
    parser.add_argument("folder", type=Path, help="where the pipeline goes; must not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; remove it or name another folder")
    began = time.monotonic()
    make_pipeline(arguments.seed).save_pretrained(arguments.folder)
    megabytes = sum(path.stat().st_size for path in arguments.folder.rglob("*.safetensors")) / 1e6
    print(f"{arguments.folder}: {megabytes:.1f} MB of weights, made in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
