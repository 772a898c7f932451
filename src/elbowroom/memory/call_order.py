"""Whether the blocks of a plan are called, and in its order."""

from __future__ import annotations

from collections.abc import Sequence


class CallOrder:
    """The first call of each block.

    Args:
        names: the blocks in the order of the plan.
    """

    def __init__(self, names: Sequence[str]):
        self._positions = {name: position for position, name in enumerate(names)}
        self._called: dict[str, None] = {}  # in the order of the first calls

    def note(self, name: str) -> None:
        self._called[name] = None

    @property
    def never_called(self) -> tuple[str, ...]:
        """The blocks that were not called, if others were."""
        return tuple(name for name in self._positions if name not in self._called) if self._called else ()

    @property
    def early(self) -> tuple[str, ...]:
        """The blocks that were first called before one that precedes them in the plan."""
        early: list[str] = []
        earliest_to_come = len(self._positions)
        for name in reversed(self._called):
            if self._positions[name] > earliest_to_come:
                early.append(name)
            earliest_to_come = min(earliest_to_come, self._positions[name])
        return tuple(reversed(early))
