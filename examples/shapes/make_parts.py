"""Makes the demo pipeline but for the training of its denoiser, which is `elbowroom train`'s work.

    python examples/shapes/make_parts.py DIR

Trains the autoencoder and both text encoders on drawn pictures and their captions, adds a denoiser with random
weights and a scheduler, and saves all of it as one `FluxPipeline`. Takes about half an hour on two cores. The same
seed gives the same weights on the same machine.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from autoencoder import make_autoencoder
from text_encoders import WIDTH, make_clip, make_clip_tokenizer, make_t5, make_t5_tokenizer

LEAST_ACCURACY = 0.99  # of the text encoders, on captions of held-out combinations
LEAST_READABLE = 0.97  # of the autoencoder's pictures, by the checker
HEADS, HEAD_WIDTH = 5, 32


def make_denoiser(seed: int) -> FluxTransformer2DModel:
    """A small Flux with random weights: two double-stream and five single-stream blocks, 3.9 million weights."""
    torch.manual_seed(seed)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,  # 16 latent channels of 2x2 latents
        num_layers=2,
        num_single_layers=5,
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


def make_pipeline(seed: int) -> tuple[FluxPipeline, dict[str, tuple[float, float]]]:
    """All parts in one pipeline, and for each trained part how good it is and how good it has to be (shares)."""
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(seed), make_t5_tokenizer(seed)
    clip, clip_accuracy = make_clip(clip_tokenizer, seed)
    t5, t5_accuracy = make_t5(t5_tokenizer, seed)
    vae, readable = make_autoencoder(seed)
    pipeline = FluxPipeline(
        scheduler=make_scheduler(),
        vae=vae,
        text_encoder=clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=make_denoiser(seed),
    )
    return pipeline, {
        "CLIP text model, captions of which it tells every attribute": (clip_accuracy, LEAST_ACCURACY),
        "T5 encoder, captions of which it tells every attribute": (t5_accuracy, LEAST_ACCURACY),
        "autoencoder, pictures that the checker reads right": (readable, LEAST_READABLE),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo pipeline, its denoiser still untrained.")
    parser.add_argument("folder", type=Path, help="where the pipeline goes; must not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; remove it or name another folder")
    began = time.monotonic()
    pipeline, quality = make_pipeline(arguments.seed)
    pipeline.save_pretrained(arguments.folder)
    print(f"{arguments.folder}: made in {time.monotonic() - began:.0f} s")
    for part, (share, at_least) in quality.items():
        print(f"{part}: {share:.1%}" + ("" if share >= at_least else f", below the {at_least:.0%} that it should have"))
    return int(any(share < at_least for share, at_least in quality.values()))


if __name__ == "__main__":
    sys.exit(main())
