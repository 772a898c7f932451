"""The engine together with the families: finding a model's blocks without being told."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from elbowroom.families import block_patterns, scope_patterns
from elbowroom.memory import Block, Controls, Plan, ScopeModules, find_blocks, schedule_blocks, unwrap
from elbowroom.memory.scopes import ScopePatterns, find_scopes, modules_in_blocks


def schedule(
    model: nn.Module,
    controls: Controls,
    *,
    blocks: Sequence[str] | None = None,
    scopes: ScopePatterns | None = None,
) -> Plan:
    """Return the plan that `controls` describe for `model`. Pure: the model is only looked at.

    Args:
        model: a Diffusers model, or any module; by itself or wrapped by PEFT, DDP or `torch.compile`.
        controls: the knobs.
        blocks: patterns that name the blocks in execution order, such as `["encoder.layers.*", "decoder.layers.*"]`.
            Not needed for Diffusers models.
        scopes: patterns that name the modules which are "attention" and "feed_forward", such as
            `{"feed_forward": ["decoder.layers.*.mlp"]}`. Not needed where a family, or their names and kinds, tell.

    Raises:
        ControlsError: (a `ValueError`) an option would have no effect on this model.
        ValueError: the blocks are not known, or a pattern names none.
    """
    base = unwrap(model)
    patterns = blocks if blocks is not None else block_patterns(base)
    found = find_blocks(base, patterns)
    named = None if scopes is None else modules_in_blocks(base, found, scopes)
    return schedule_blocks(
        [(block.name, _scopes_of(block, None if named is None else named[block.name])) for block in found], controls
    )


def _scopes_of(block: Block, named: ScopePatterns | None) -> ScopeModules:
    return find_scopes(block.module, {**scope_patterns(block.module), **(named or {})})
