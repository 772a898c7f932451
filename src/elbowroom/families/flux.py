"""FLUX.1 (Black Forest Labs): double-stream blocks, then single-stream blocks, on 2x2-packed latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from elbowroom.families.base import Conditioning, Family
from elbowroom.families.latents import normalised_moments
from elbowroom.families.lora_layers import JOINT_ATTENTION


class Flux(Family):
    """Source: `diffusers.FluxPipeline` and `diffusers.FluxTransformer2DModel`."""

    name = "flux"
    modality = "image"
    pipeline_class = "FluxPipeline"
    denoiser = "transformer"
    denoiser_class = "FluxTransformer2DModel"
    text_components = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    blocks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "FluxTransformer2DModel": ("transformer_blocks.*", "single_transformer_blocks.*"),
        "FluxControlNetModel": ("transformer_blocks.*", "single_transformer_blocks.*"),
    }
    scopes: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
        # The feed-forward part has no module of its own, and shares its output projection with attention.
        "FluxSingleTransformerBlock": {"feed_forward": ("proj_mlp", "act_mlp", "proj_out")},
    }
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
        "proj_mlp",
        "proj_out",
    )
    max_sequence_length = 512
    guidance = 3.5
    tiny_denoiser: ClassVar[Mapping[str, Any]] = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    }

    def pixel_step(self, vae: Any, denoiser: Any) -> int:
        return 2 ** len(vae.config.block_out_channels)  # the autoencoder's scale, and the 2x2 packing

    def encode_captions(self, pipeline: Any, captions: Sequence[str], max_sequence_length: int) -> Conditioning:
        prompt_embeds, pooled, _ = pipeline.encode_prompt(
            prompt=list(captions), prompt_2=None, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return normalised_moments(vae, pixels)

    def image_tokens(self, latents: torch.Tensor) -> int:
        return latents.shape[-2] // 2 * (latents.shape[-1] // 2)

    def predict_velocity(
        self, denoiser: Any, noisy: torch.Tensor, sigmas: torch.Tensor, conditioning: Conditioning, guidance: float
    ) -> torch.Tensor:
        from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

        batch, channels, height, width = noisy.shape
        prompt_embeds = conditioning["prompt_embeds"]
        place = {"device": noisy.device, "dtype": noisy.dtype}
        velocity = denoiser(
            hidden_states=FluxPipeline._pack_latents(noisy, batch, channels, height, width),
            timestep=sigmas,
            guidance=torch.full_like(sigmas, guidance) if denoiser.config.guidance_embeds else None,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            encoder_hidden_states=prompt_embeds,
            txt_ids=torch.zeros(prompt_embeds.shape[1], 3, **place),
            img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, **place),
            return_dict=False,
        )[0]
        # A scale of 1 makes the pipeline's unpacking count in latent cells instead of pixels.
        return FluxPipeline._unpack_latents(velocity, height, width, vae_scale_factor=1)

    def sampling_arguments(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, Any]:
        return dict(conditioning)
