"""Stable Diffusion 3 and 3.5 (Stability AI): one stack of joint blocks, three text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from elbowroom.families.base import Conditioning, Family
from elbowroom.families.latents import normalised_moments
from elbowroom.families.lora_layers import JOINT_ATTENTION


class StableDiffusion3(Family):
    """Source: `diffusers.StableDiffusion3Pipeline` and `diffusers.SD3Transformer2DModel`."""

    name = "sd3"
    modality = "image"
    pipeline_class = "StableDiffusion3Pipeline"
    denoiser = "transformer"
    denoiser_class = "SD3Transformer2DModel"
    text_components = (
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
        "tokenizer",
        "tokenizer_2",
        "tokenizer_3",
    )
    blocks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "SD3Transformer2DModel": ("transformer_blocks.*",),
        "SD3ControlNetModel": ("transformer_blocks.*",),
    }
    lora_targets = (
        *JOINT_ATTENTION,
        "attn2.to_q",
        "attn2.to_k",
        "attn2.to_v",
        "attn2.to_out.0",
    )
    max_sequence_length = 256
    guidance = 7.0
    tiny_denoiser: ClassVar[Mapping[str, Any]] = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 64,
        "out_channels": 4,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }

    def pixel_step(self, vae: Any, denoiser: Any) -> int:
        return 2 ** (len(vae.config.block_out_channels) - 1) * denoiser.config.patch_size

    def encode_captions(self, pipeline: Any, captions: Sequence[str], max_sequence_length: int) -> Conditioning:
        prompt_embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(captions),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return normalised_moments(vae, pixels)

    def image_tokens(self, latents: torch.Tensor) -> int:
        return latents.shape[-2] // 2 * (latents.shape[-1] // 2)

    def predict_velocity(
        self, denoiser: Any, noisy: torch.Tensor, sigmas: torch.Tensor, conditioning: Conditioning, guidance: float
    ) -> torch.Tensor:
        return denoiser(
            hidden_states=noisy,
            timestep=sigmas * 1000,  # the scheduler's num_train_timesteps; Flux multiplies inside the model
            encoder_hidden_states=conditioning["prompt_embeds"],
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0]

    def sampling_arguments(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, Any]:
        negative = {f"negative_{name}": tensor for name, tensor in unconditional.items()}
        return {**conditioning, **negative}
