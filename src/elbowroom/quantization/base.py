"""Quantize the frozen base of a model, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from elbowroom.families import block_patterns
from elbowroom.memory import Handle, find_blocks, unwrap
from elbowroom.memory.weights.mapped import read_mapped
from elbowroom.memory.weights.parts import stored_bytes
from elbowroom.quantization.formats import Format, format_named
from elbowroom.quantization.weight import QuantizedWeight


@dataclass(frozen=True)
class Quantized:
    """What was quantized.

    Attributes:
        layers: how many linear layers.
        before, after: bytes of their weights.
        left: names of linear layers of the blocks whose shape does not suit the number format.
    """

    layers: int
    before: int
    after: int
    left: tuple[str, ...]


def quantize_base(
    model: nn.Module,
    precision: str,
    *,
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    handle: Handle | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quantized:
    """Replace the frozen weights of the linear layers of a model's blocks by quantized ones, in place.

    The layers stay the same modules. Layers outside of the blocks, other weights, and what is trained stay as they are.
    At one time, one weight is there in both precisions; weights that are mapped from files are read one by one.

    Args:
        model: by itself or wrapped by PEFT; its linear layers are frozen, or have adapters.
        precision: a value of the option `base_model_precision`.
        blocks: patterns of dotted names of blocks. None: those of the family.
        device: where weights are quantized; they come back to where they were. None: where they are.
        handle: a plan that is applied to the model; what it streams is brought home block by block.
        progress: called with the number of blocks that are done, and of all.

    Raises:
        ValueError: there is no such number format, its library is not installed, or there is nothing to quantize.
    """
    format = format_named(precision)
    base = unwrap(model)
    found = find_blocks(base, blocks if blocks is not None else block_patterns(base))
    layers: list[nn.Linear] = []
    left: list[str] = []
    before = 0
    for done, block in enumerate(found):
        progress(done, len(found))
        for name, layer in frozen_linears(block.module):
            if isinstance(layer.weight, QuantizedWeight):
                raise ValueError(f"{block.name}.{name} is quantized already")
            if not format.suits(layer.weight):
                left.append(f"{block.name}.{name}")
                continue
            before += layer.weight.nbytes
            layer.weight = nn.Parameter(_quantized(layer.weight, format, device), requires_grad=False)
            layers.append(layer)
        if handle is not None:
            handle.renew(block.name)
    progress(len(found), len(found))
    if not layers:
        raise ValueError(
            f"{type(base).__name__} has no frozen linear layer in its blocks that could be quantized to {precision}: "
            "freeze the model (`model.requires_grad_(False)`) and train an adapter"
        )
    return Quantized(len(layers), before, sum(stored_bytes(layer.weight) for layer in layers), tuple(left))


def put_stand_ins(model: nn.Module, precision: str, *, blocks: Sequence[str] | None = None) -> None:
    """Replace what `quantize_base` would quantize by weights of about as many bytes; for a model on the meta device.

    Scales are not counted. The model can't compute afterwards.

    Raises:
        ValueError: as for `quantize_base`.
    """
    format = format_named(precision)
    base = unwrap(model)
    for block in find_blocks(base, blocks if blocks is not None else block_patterns(base)):
        for _, layer in frozen_linears(block.module):
            if format.suits(layer.weight):
                nbytes = layer.weight.numel() * format.bits // 8
                stand_in = torch.empty(nbytes, dtype=torch.uint8, device="meta")
                layer.weight = nn.Parameter(stand_in, requires_grad=False)


def frozen_linears(block: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers of a block whose weights are frozen, without those of adapters."""
    return [
        (name, module)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and ".lora_" not in f".{name}"
    ]


def _quantized(weight: torch.Tensor, format: Format, device: torch.device | str | None) -> QuantizedWeight:
    # Some formats are found by random search; the same weights have to come out each time, and nothing else to change.
    accelerators = [] if device is None or torch.device(device).type != "cuda" else None
    with torch.no_grad(), torch.random.fork_rng(accelerators):
        torch.manual_seed(0)
        matrix = read_mapped(weight)
        payload = format.quantize(matrix if device is None else matrix.to(device))
        quantized = QuantizedWeight(payload, format, weight.size(), weight.dtype)
        return quantized if device is None else cast(QuantizedWeight, quantized.to(weight.device))
