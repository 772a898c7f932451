"""FSDP2 as a plan needs it: the blocks of a segment are one unit, and it streams the weights that the plan streams."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from elbowroom.memory.apply import modules_named, refuse_other_types
from elbowroom.memory.blocks import unwrap
from elbowroom.memory.plan import Plan


def shard(model: nn.Module, plan: Plan, **options: Any) -> Plan:
    """Shard a model with FSDP2, in the units that a plan needs, and return what is left of the plan for `apply`.

    Each segment, and each block outside of segments, is one unit. Where the plan streams the weights of all blocks,
    FSDP keeps its shards in host memory and streams them itself (`CPUOffloadPolicy`: parameters, gradients and the
    states of the optimizer; page-locked unless `weight_store` is `pageable`), so the plan that comes back streams
    nothing.

    Args:
        model: by itself or wrapped by PEFT; sharded in place.
        plan: of `schedule`.
        options: for every call of `torch.distributed.fsdp.fully_shard`, such as `mesh` and `mp_policy`.

    Raises:
        TypeError: the model is no module, or the plan no `Plan`.
        RuntimeError: there is no process group.
        ValueError: the plan streams weights in a way that FSDP does not know, or names blocks that are not there.
    """
    refuse_other_types(model, plan)
    _refuse_what_fsdp_cannot(plan)
    modules = modules_named(unwrap(model), [block.name for block in plan.blocks])
    if "mesh" not in options and not dist.is_initialized() and "RANK" not in os.environ:
        raise RuntimeError(
            "FSDP needs a process group, and there is none: start the program by torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    policy = OffloadPolicy()
    if plan.streamed:
        on_accelerator = torch.accelerator.is_available()
        policy = CPUOffloadPolicy(pin_memory=on_accelerator and plan.weights.store in (None, "pinned"))
    apart = [(block,) for block in plan.blocks if block.segment is None]
    for unit in (*plan.segments, *apart):
        fully_shard([modules[block.name] for block in unit], offload_policy=policy, **options)
    fully_shard(model, offload_policy=policy, **options)
    return replace(plan, streamed=())


def _refuse_what_fsdp_cannot(plan: Plan) -> None:
    if not plan.streamed:
        return
    if set(plan.streamed) != {block.name for block in plan.blocks}:
        raise ValueError("weight_streaming: FSDP streams the weights of all blocks or of none; set it to 100% or off")
    if plan.weights.store == "disk":
        raise ValueError("weight_store: FSDP streams from host memory only; set it to pinned or pageable")
    if plan.weights.window is not None:
        raise ValueError("weight_window: has no effect with FSDP, which fetches one unit ahead; leave it out")
