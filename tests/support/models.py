"""Tiny models, their inputs, and exact comparison of gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import diffusers
import torch
from torch import nn

from elbowroom.families import FAMILIES

Gradients = dict[str, torch.Tensor | None]


def denoiser(family: str, **changes: Any) -> nn.Module:
    """The tiny denoiser of a family, with fixed random weights."""
    (found,) = [entry for entry in FAMILIES if entry.name == family]
    torch.manual_seed(0)
    return getattr(diffusers, found.denoiser_class)(**{**found.tiny_denoiser, **changes})


def flux(**changes: Any) -> nn.Module:
    return denoiser("flux", **changes)


def sd3(**changes: Any) -> nn.Module:
    return denoiser("sd3", **changes)


def flux_inputs(*, residuals: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs: dict[str, Any] = {
        "hidden_states": normal(2, 16, 16),
        "encoder_hidden_states": normal(2, 12, 32),
        "pooled_projections": normal(2, 32),
        "img_ids": torch.randint(0, 4, (16, 3), generator=generator).float(),
        "txt_ids": torch.zeros(12, 3),
        "timestep": torch.tensor([0.3, 0.7]),
    }
    if residuals:
        inputs["controlnet_block_samples"] = [normal(2, 16, 32).requires_grad_()]
        inputs["controlnet_single_block_samples"] = [normal(2, 16, 32).requires_grad_() for _ in range(2)]
    return inputs


def sd3_inputs(*, residuals: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs: dict[str, Any] = {
        "hidden_states": normal(2, 4, 16, 16),
        "encoder_hidden_states": normal(2, 12, 32),
        "pooled_projections": normal(2, 64),
        "timestep": torch.tensor([300.0, 700.0]),
    }
    if residuals:
        inputs["block_controlnet_hidden_states"] = [normal(2, 64, 32).requires_grad_() for _ in range(2)]
    return inputs


BUILDERS: dict[str, Callable[..., nn.Module]] = {"flux": flux, "sd3": sd3}
INPUTS: dict[str, Callable[..., dict[str, Any]]] = {"flux": flux_inputs, "sd3": sd3_inputs}
BLOCK_COUNTS = {"flux": 5, "sd3": 4}


def add_lora(model: Any) -> None:
    """A LoRA on attention and feed-forward whose up-matrices are not zero, so that every gradient counts."""
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "proj_mlp"]
    torch.manual_seed(2)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian"))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)


def step(
    model: nn.Module, inputs: dict[str, Any], context: Callable[[], AbstractContextManager] = nullcontext
) -> tuple[torch.Tensor, Gradients]:
    """One forward and backward pass from the same random state; returns the loss and every gradient."""
    model.zero_grad(set_to_none=True)
    residuals = [tensor for key, tensors in inputs.items() if "controlnet" in key for tensor in tensors]
    for tensor in residuals:
        tensor.grad = None
    torch.manual_seed(5)
    with context():
        output = model(**inputs).sample
    loss = output.float().square().mean()
    loss.backward()
    gradients: Gradients = {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }
    gradients.update({f"residual {index}": tensor.grad for index, tensor in enumerate(residuals)})
    return loss.detach(), gradients


def assert_identical(expected: Gradients, actual: Gradients) -> None:
    """Bit for bit: the same gradients exist and have the same values."""
    assert expected.keys() == actual.keys()
    assert any(gradient is not None for gradient in expected.values()), "nothing was compared"
    for name, gradient in expected.items():
        other = actual[name]
        if gradient is None or other is None:
            assert gradient is None and other is None, f"only one run gave {name} a gradient"
        else:
            assert torch.equal(gradient, other), f"{name} differs by {(gradient - other).abs().max()}"
