"""The engine together with the families: finding a model's blocks without being told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from elbowroom.families import block_patterns, scope_patterns
from elbowroom.memory import Block, Controls, ControlsError, Plan, ScopeModules, find_blocks, schedule_blocks, unwrap
from elbowroom.memory.devices import free_device_bytes
from elbowroom.memory.schedule import weight_settings
from elbowroom.memory.scopes import ScopePatterns, find_scopes, modules_in_blocks
from elbowroom.memory.weight_controls import Component
from elbowroom.memory.weights.selection import select


def schedule(
    model: nn.Module,
    controls: Controls,
    *,
    blocks: Sequence[str] | None = None,
    scopes: ScopePatterns | None = None,
    free_bytes: int | None = None,
) -> Plan:
    """Return the plan that `controls` describe for `model`. Pure: the model is only looked at.

    Args:
        model: a Diffusers model, or any module; by itself or wrapped by PEFT, DDP or `torch.compile`.
        controls: the knobs.
        blocks: patterns that name the blocks in execution order, such as `["encoder.layers.*", "decoder.layers.*"]`.
            Not needed for Diffusers models.
        scopes: patterns that name the modules which are "attention" and "feed_forward", such as
            `{"feed_forward": ["decoder.layers.*.mlp"]}`. Not needed where a family, or their names and kinds, tell.
        free_bytes: memory of the device, for `weight_streaming="auto"`. None: what is free on this machine.

    Raises:
        TypeError: the model is no module, or the controls are no `Controls`.
        ControlsError: (a `ValueError`) an option would have no effect on this model.
        ValueError: the blocks are not known, or a pattern names none.
    """
    if not isinstance(model, nn.Module) or not isinstance(controls, Controls):
        raise TypeError(
            f"schedule takes a torch.nn.Module and Controls, not {type(model).__name__} and {type(controls).__name__}"
        )
    base = unwrap(model)
    patterns = blocks if blocks is not None else block_patterns(base)
    found = find_blocks(base, patterns)
    named = None if scopes is None else modules_in_blocks(base, found, scopes)
    streamed = select(
        base,
        [block.name for block in found],
        controls,
        free_bytes=lambda: free_device_bytes() if free_bytes is None else free_bytes,
    )
    scoped = [(block.name, _scopes_of(block, None if named is None else named[block.name])) for block in found]
    if controls.gradient_checkpointing_keep_attention == "kernel":
        _refuse_hidden_kernels(found, dict(scoped))
    return schedule_blocks(scoped, controls, streamed)


def schedule_component(model: nn.Module, controls: Controls, component: Component) -> Plan:
    """Return the plan for a model that is used beside the one that is trained: only its weights are streamed.

    Args:
        model: a text encoder, an autoencoder, or a ControlNet.
        controls: the knobs; `ramtorch_text_encoder`, `ramtorch_vae` and `ramtorch_controlnet` choose.
        component: which of them it is.

    Raises:
        ControlsError: (a `ValueError`) the option would have no effect on this model.
    """
    streamed = select(unwrap(model), (), controls, component)
    return Plan((), streamed=streamed.names, weights=weight_settings(controls), notes=streamed.notes)


def _refuse_hidden_kernels(blocks: Sequence[Block], scopes: Mapping[str, ScopeModules]) -> None:
    """Refuse to keep the kernel of torch's own attention module: what it calls inside can't be seen from outside."""
    attentions = [block.module.get_submodule(name) for block in blocks for name in scopes[block.name].attention]
    if attentions and all(isinstance(attention, nn.MultiheadAttention) for attention in attentions):
        raise ControlsError(
            "gradient_checkpointing_keep_attention",
            "kernel has no effect on this model: its attention is nn.MultiheadAttention, whose kernel can't be told "
            "from the projections around it; set it to true, which keeps all that attention saves",
        )


def _scopes_of(block: Block, named: ScopePatterns | None) -> ScopeModules:
    return find_scopes(block.module, {**scope_patterns(block.module), **(named or {})})
