"""The models and inputs of the benchmarks: full training on the CPU, in float32, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

TEXT_TOKENS = 128


def build_flux(width: int, double: int, single: int) -> FluxTransformer2DModel:
    """A Flux of `double` double-stream and `single` single-stream blocks, with heads of 64 channels."""
    torch.manual_seed(0)
    return _with_gradients(
        FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=double, num_single_layers=single, attention_head_dim=64,
            num_attention_heads=width // 64, joint_attention_dim=64, pooled_projection_dim=32,
            axes_dims_rope=(16, 24, 24),
        )
    )  # fmt: skip


def build_sd3(width: int, layers: int, side: int) -> SD3Transformer2DModel:
    """An SD3 of `layers` joint blocks, for latents of `side` x `side`."""
    torch.manual_seed(0)
    return _with_gradients(
        SD3Transformer2DModel(
            sample_size=side, patch_size=2, in_channels=16, num_layers=layers, attention_head_dim=64,
            num_attention_heads=width // 64, joint_attention_dim=64, caption_projection_dim=width,
            pooled_projection_dim=32, out_channels=16, pos_embed_max_size=side,
        )
    )  # fmt: skip


def flux_inputs(
    tokens: int, *, channels: int = 16, joint: int = 64, pooled: int = 32, text: int = TEXT_TOKENS
) -> dict[str, torch.Tensor]:
    """Return inputs for a Flux with these widths of its embedders.

    Args:
        tokens: of the picture.
        channels, joint, pooled: the model's `in_channels`, `joint_attention_dim` and `pooled_projection_dim`.
        text: tokens of the text.
    """
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, tokens, channels, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, joint, generator=generator),
        "pooled_projections": torch.randn(1, pooled, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randint(0, 32, (tokens, 3), generator=generator).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def sd3_inputs(side: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, side, side, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 64, generator=generator),
        "pooled_projections": torch.randn(1, 32, generator=generator),
        "timestep": torch.tensor([500.0]),
    }


def step(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=False)
    model(**inputs).sample.square().mean().backward()


def _with_gradients(model: Any) -> Any:
    """Gradients exist before the step, so that what is counted in it is activations."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model
