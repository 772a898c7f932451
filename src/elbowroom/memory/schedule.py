"""From controls to a plan: a pure function of the block names."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.memory.controls import Controls
from elbowroom.memory.plan import BlockPlan, Plan


def schedule_blocks(names: Sequence[str], controls: Controls) -> Plan:
    """Return the plan that `controls` describe for a block sequence.

    With interval N and stride M, blocks 0 … N-1 form the first segment, blocks M … M+N-1 the second, and so on over the
    whole sequence in execution order, across the model's stacks; blocks outside segments keep their activations.

    Args:
        names: dotted names of the blocks in execution order.
        controls: the knobs.
    """
    if not controls.gradient_checkpointing:
        return Plan(tuple(BlockPlan(name) for name in names))
    interval = controls.gradient_checkpointing_interval
    stride = controls.gradient_checkpointing_segment_stride or interval
    blocks = tuple(
        BlockPlan(name, segment=position // stride if position % stride < interval else None)
        for position, name in enumerate(names)
    )
    return Plan(blocks, notes=_notes(len(names), interval, stride))


def _notes(count: int, interval: int, stride: int) -> tuple[str, ...]:
    notes = []
    if interval > count:
        notes.append(
            f"gradient_checkpointing_interval is {interval} and the model has {count} blocks: they form one segment"
        )
    elif stride > count:
        notes.append(
            f"gradient_checkpointing_segment_stride is {stride} and the model has {count} blocks: "
            f"only the first {interval} are recomputed"
        )
    return tuple(notes)
