"""A plan: an immutable value that says what happens to the memory of each block."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True)
class BlockPlan:
    """What happens to one block.

    Attributes:
        name: dotted name of the block in the unwrapped model.
        segment: number of the segment that the block is recomputed with, or None if its activations are kept.
    """

    name: str
    segment: int | None = None


@dataclass(frozen=True, repr=False)
class Plan:
    """The blocks of a model in execution order, each with its treatment.

    Attributes:
        blocks: one `BlockPlan` a block; the blocks of a segment are consecutive.
        notes: remarks for the reader; they do not count when plans are compared.

    Raises:
        ValueError: a block is planned twice, or a segment has a gap.
    """

    blocks: tuple[BlockPlan, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        names = [block.name for block in self.blocks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"the plan names {', '.join(repeated)} more than once")
        finished: set[int] = set()
        previous: int | None = None
        for block in self.blocks:
            if block.segment != previous and block.segment in finished:
                raise ValueError(
                    f"segment {block.segment} has a gap before {block.name}; its blocks must be consecutive"
                )
            if block.segment is not None:
                finished.add(block.segment)
            previous = block.segment

    @property
    def segments(self) -> tuple[tuple[BlockPlan, ...], ...]:
        """The segments in execution order, each with its blocks."""
        members: dict[int, list[BlockPlan]] = {}
        for block in self.blocks:
            if block.segment is not None:
                members.setdefault(block.segment, []).append(block)
        return tuple(tuple(blocks) for blocks in members.values())

    def strip(self) -> str:
        """One cell a block: `r` for recomputed, `k` for kept; brackets enclose a segment: `[rr][rr]kk`."""
        cells: list[str] = []
        previous: int | None = None
        for block in self.blocks:
            if previous is not None and block.segment != previous:
                cells.append("]")
            if block.segment is not None and block.segment != previous:
                cells.append("[")
            cells.append("k" if block.segment is None else "r")
            previous = block.segment
        return "".join(cells) + ("]" if previous is not None else "")

    def __repr__(self) -> str:
        return f"Plan({len(self.blocks)} blocks, {len(self.segments)} segments: {self.strip()})"

    def to_json(self) -> str:
        """Return the plan as a JSON document; `from_json` gives an equal plan back."""
        document = {
            "version": FORMAT_VERSION,
            "blocks": [{"name": block.name, "segment": block.segment} for block in self.blocks],
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not a plan; the message says what is wrong with it.
        """
        try:
            document: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a plan: it is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("version") != FORMAT_VERSION:
            raise ValueError(f"this is not a plan of format version {FORMAT_VERSION}")
        blocks, notes = document.get("blocks"), document.get("notes", [])
        if not isinstance(blocks, list) or not isinstance(notes, list):
            raise ValueError("this is not a plan: 'blocks' and 'notes' must be lists")
        return cls(tuple(map(_block_from_json, blocks)), tuple(map(str, notes)))


def _block_from_json(entry: Any) -> BlockPlan:
    valid = (
        isinstance(entry, dict)
        and set(entry) == {"name", "segment"}
        and isinstance(entry["name"], str)
        and (entry["segment"] is None or type(entry["segment"]) is int)
    )
    if not valid:
        raise ValueError(f"this is not a plan: {entry!r} is not a block with a 'name' and a 'segment' (number or null)")
    return BlockPlan(entry["name"], entry["segment"])
