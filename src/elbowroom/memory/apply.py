"""Install a plan on a model. What can't work is refused here, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elbowroom.memory.block_forward import BlockForward
from elbowroom.memory.blocks import refuse_nested, unwrap
from elbowroom.memory.handle import Handle
from elbowroom.memory.offload.opening import check_store
from elbowroom.memory.own_checkpointing import OwnCheckpointing
from elbowroom.memory.plan import BlockPlan, Plan


def apply(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device | str | None = None,
    check_determinism: bool = False,
) -> Handle:
    """Install `plan` on this model instance.

    Args:
        model: the model that the plan was made for, by itself or wrapped by PEFT; its code is not changed.
        plan: from `schedule`, `Plan.from_json`, or made by hand.
        device: where the model computes. It and all that is not streamed are moved there; streamed weights stay in host
            memory (or go there, or to the disk). None: where the model is.
        check_determinism: in every replay, compare all recomputed tensors bit for bit with the originals (by digests)
            and raise if they differ. Slow; finds blocks that draw from Python's, NumPy's or a private generator, whose
            state is not restored.

    Raises:
        TypeError: the model is no module, or the plan no `Plan`.
        ValueError: the plan names a block, or a module of a block, that the model does not have; or its store makes no
            sense on the model's device.
        OSError: the folder of a disk store can't be made or written to.
        RuntimeError: a plan is applied already, the model's own checkpointing is switched on, the model is compiled as
            a whole, or a segment spans modules that FSDP shards apart.
    """
    refuse_other_types(model, plan)
    _refuse_compiled(model)
    base = unwrap(model)
    names = [block.name for block in plan.blocks]
    scopes = [
        f"{block.name}.{name}"
        for block in plan.blocks
        for name in (*block.modules.attention, *block.modules.feed_forward)
    ]
    modules = modules_named(base, (*names, *scopes, *plan.streamed))
    refuse_nested(names)
    refuse_nested(scopes)
    _refuse_shared_scopes(plan, modules)
    if plan.offloads and _stays_on_cpu(base):
        check_store(plan.offload, on_cpu=True)
    OwnCheckpointing(base).refuse()
    for block in plan.blocks:
        _refuse_second_plan(block, modules[block.name])
    for segment in plan.segments:
        _refuse_units_of_fsdp_in(segment, [modules[block.name] for block in segment])
    target = None if device is None else torch.device(device)
    return Handle(plan, model, device=target, check_determinism=check_determinism)


def refuse_other_types(model: Any, plan: Any) -> None:
    """Raise `TypeError` if the model is no module, or the plan no `Plan`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(plan, Plan):
        raise TypeError(
            f"the plan must be a Plan, not a {type(plan).__name__}; `elbowroom.schedule(model, controls)` makes one of "
            "controls, and `Plan.from_json` of JSON"
        )


def modules_named(base: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules of a model by name; `ValueError` if names that a plan has are not among them."""
    modules = dict(base.named_modules(remove_duplicate=False))
    missing = [name for name in names if name not in modules]
    if missing:
        raise ValueError(f"the plan names modules that {type(base).__name__} does not have: {', '.join(missing)}")
    return modules


def _refuse_shared_scopes(plan: Plan, modules: Mapping[str, nn.Module]) -> None:
    """A module that two blocks share has one forward, which can't be treated as the scope of both."""
    owners: dict[int, str] = {}
    for block in plan.blocks:
        for name in block.scopes_apart:
            scope = modules[f"{block.name}.{name}"]
            owner = owners.setdefault(id(scope), block.name)
            if owner != block.name:
                raise RuntimeError(
                    f"{name!r} of block {block.name!r} is also part of block {owner!r}, so it can't be treated "
                    "otherwise than the rest of them"
                )


def _stays_on_cpu(base: nn.Module) -> bool:
    """Whether the model computes on the CPU for sure: it is there, and there is nowhere else to go."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in base.parameters())
    return on_cpu and torch.accelerator.current_accelerator(check_available=True) is None


def _refuse_compiled(model: nn.Module) -> None:
    base = unwrap(model)
    if _is_compiled(model) or _is_compiled(base) or isinstance(model, torch._dynamo.OptimizedModule):
        raise RuntimeError(
            "the model is compiled as a whole, which leaves a plan no block to act on; compile the blocks by "
            "themselves: `model.compile_repeated_blocks()` or `block.compile()`"
        )


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _refuse_second_plan(block: BlockPlan, module: nn.Module) -> None:
    if any(isinstance(module.__dict__.get(name), BlockForward) for name in ("forward", "_compiled_call_impl")):
        raise RuntimeError(f"a plan is applied to block {block.name!r} already; call `handle.remove()` first")


def _refuse_units_of_fsdp_in(segment: Sequence[BlockPlan], modules: Iterable[Any]) -> None:
    """A replay needs the weights of a whole segment, and FSDP gathers those of one unit at a time."""
    units = {id(module._get_fsdp_state()) for module in modules if hasattr(module, "_get_fsdp_state")}
    if len(units) > 1:
        raise RuntimeError(
            f"segment {segment[0].segment} spans {len(units)} modules that FSDP shards apart; shard by "
            "`elbowroom.shard(model, plan)`, which shards the blocks of a segment together, as "
            f"`fully_shard([{', '.join(block.name for block in segment)}])` does, or set "
            "gradient_checkpointing_interval to 1"
        )
