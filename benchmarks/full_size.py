"""Models of the sizes that people train, with random weights, and their inputs: for programs that need a GPU.

The shapes are those of the released checkpoints (`transformer/config.json`): stabilityai/stable-diffusion-3-medium and
black-forest-labs/FLUX.1-dev.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from peft import LoraConfig
from torch import nn

Name = Literal["sd3-medium", "flux.1-dev"]

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]

Inputs = dict[str, torch.Tensor]


def build(
    name: Name, *, layers: int | None, lora: bool, device: torch.device, dtype: torch.dtype, heads: int = 24
) -> Any:
    """Return a denoiser with random weights, all of which, or a LoRA's alone, are trained.

    Args:
        name: whose shape it has.
        layers: blocks, of both kinds together; None: all of them.
        lora: the model is frozen, and a LoRA of rank 16 on the attention projections is trained.
        device: where it lies.
        dtype: of all weights.
        heads: the width is this many heads; tests have fewer.
    """
    with init_empty_weights(include_buffers=False):
        model = _BUILDERS[name](layers, heads)
    model.to(dtype)
    _fill(model, device)
    model.to(device)
    torch.manual_seed(0)
    if lora:
        model.requires_grad_(False)
        # Random, not zero, so that every one of its weights has a gradient.
        model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=LORA_TARGETS, init_lora_weights=False))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # so that no step has to make it
    return model.train()


def inputs(name: Name, *, side: int, batch: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return a batch for the model of that name, with `side` x `side` picture tokens: 64 for 1,024 x 1,024 pixels."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator).to(device, dtype)

    if name == "sd3-medium":
        return {
            "hidden_states": normal(16, 2 * side, 2 * side),
            "encoder_hidden_states": normal(333, 4096),
            "pooled_projections": normal(2048),
            "timestep": torch.full((batch,), 500.0, device=device),
        }
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    return {
        "hidden_states": normal(side**2, 64),
        "encoder_hidden_states": normal(512, 4096),
        "pooled_projections": normal(768),
        "timestep": torch.full((batch,), 0.5, device=device),
        "guidance": torch.full((batch,), 3.5, device=device),
        "img_ids": positions.to(device, dtype),
        "txt_ids": torch.zeros(512, 3, device=device, dtype=dtype),
    }


def step(model: Any, batch: Inputs) -> None:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=False)
    model(**batch).sample.float().square().mean().backward()


def _sd3_medium(layers: int | None, heads: int) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=layers or 24, attention_head_dim=64,
        num_attention_heads=heads, joint_attention_dim=4096, caption_projection_dim=64 * heads,
        pooled_projection_dim=2048, pos_embed_max_size=192,
    )  # fmt: skip


def _flux_dev(layers: int | None, heads: int) -> FluxTransformer2DModel:
    # A third of the blocks are double-stream ones, as in the released model.
    double = 19 if layers is None else max(1, layers // 3)
    single = 38 if layers is None else max(1, layers - double)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=double, num_single_layers=single, attention_head_dim=128,
        num_attention_heads=heads, joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True,
        axes_dims_rope=(16, 56, 56),
    )  # fmt: skip


_BUILDERS: dict[Name, Callable[[int | None, int], Any]] = {"sd3-medium": _sd3_medium, "flux.1-dev": _flux_dev}


def _fill(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device random weights, of which a repeated piece is made: 12 billion take a while."""
    piece = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(device)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            values = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.dim() > 1:
                scale = parameter[0].numel() ** -0.5
                for part in values.view(-1).split(len(piece)):
                    part.copy_(piece[: len(part)] * scale)
            elif name == "weight":
                values.fill_(1)
            module._parameters[name] = nn.Parameter(values)
