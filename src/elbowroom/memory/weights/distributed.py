"""Streamed weights in several processes: DDP leaves frozen ones alone, and FSDP has an offload of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elbowroom.memory.weights.parts import dense_parts
from elbowroom.memory.weights.units import Unit

_CHUNK = 64 << 20


def refuse_sharded(parameters: Sequence[torch.Tensor]) -> None:
    """Raise `RuntimeError` if FSDP shards a parameter that would be streamed."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise RuntimeError(
            "FSDP shards these weights, so it has to stream them itself, by its CPUOffloadPolicy; shard the model by "
            "`plan = elbowroom.shard(model, plan)`, and apply the plan that it returns"
        )


def leave_to_us(model: nn.Module, units: Sequence[Unit]) -> Callable[[], None]:
    """Have DDP neither broadcast nor reduce frozen streamed weights, once all processes are known to have the same.

    Does nothing where there is one process. Source: `DistributedDataParallel`'s own list of parameters to ignore.

    Args:
        model: what will be given to DDP.
        units: what is streamed.

    Returns:
        what undoes it, for a DDP that is made afterwards.

    Raises:
        RuntimeError: the processes have other values.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return lambda: None
    frozen = {id(p): p for unit in units for p in unit.parameters if not p.requires_grad}
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(list(frozen.values())))
    if len(set(digests)) > 1:
        raise RuntimeError(
            "the processes have other values of the weights that are streamed; load the same checkpoint in all of them"
        )
    names = [name for name, parameter in model.named_parameters() if id(parameter) in frozen]
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    model._ddp_params_and_buffers_to_ignore = [*ignored, *names]  # type: ignore[assignment]

    def undo() -> None:
        model._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]

    return undo


def _digest(parameters: Sequence[torch.Tensor]) -> str:
    digest = hashlib.blake2b()
    for parameter in parameters:
        for part in dense_parts(parameter):
            flat = part.contiguous().view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _CHUNK):
                digest.update(flat[start : start + _CHUNK].cpu().numpy().data)
    return digest.hexdigest()
