"""The engine together with the families: finding a model's blocks without being told."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from elbowroom.families import block_patterns
from elbowroom.memory import Controls, Plan, find_blocks, schedule_blocks, unwrap


def schedule(model: nn.Module, controls: Controls, *, blocks: Sequence[str] | None = None) -> Plan:
    """Return the plan that `controls` describe for `model`. Pure: the model is only looked at.

    Args:
        model: a Diffusers model, or any module; by itself or wrapped by PEFT, DDP or `torch.compile`.
        controls: the knobs.
        blocks: patterns that name the blocks in execution order, such as `["encoder.layers.*", "decoder.layers.*"]`.
            Not needed for Diffusers models.

    Raises:
        ValueError: the blocks are not known, or a pattern names none.
    """
    base = unwrap(model)
    patterns = blocks if blocks is not None else block_patterns(base)
    return schedule_blocks([block.name for block in find_blocks(base, patterns)], controls)
