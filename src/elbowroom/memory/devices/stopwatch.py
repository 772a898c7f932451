"""How long copies took, and how much of that computations stood still for, counted as soon as it is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from elbowroom.memory.devices.base import CopySeconds, Event


class Stopwatch:
    """Holds computations for copies, and counts what that cost.

    Args:
        count: called once for each copy. A device that waits by itself knows its times only some time later.
    """

    def __init__(self, count: Callable[[CopySeconds], None]):
        self._count = count
        self._running: deque[Event] = deque()

    def hold_compute(self, event: Event) -> None:
        """Let whatever the device is told to compute from now on begin after a copy."""
        event.hold_compute()
        self._running.append(event)
        self.look()

    def look(self) -> None:
        """Count what has ended since."""
        while self._running and (seconds := self._running[0].seconds()) is not None:
            self._running.popleft()
            self._count(seconds)
