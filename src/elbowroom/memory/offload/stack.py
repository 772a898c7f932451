"""A stack of byte spans in slabs: the arithmetic of an arena, without any memory.

Saved activations are last in, first out as a rule: the last one saved is the first one that the backward pass needs.
So a stack that has grown to its high-water mark never has to grow again, whatever the shapes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

ALIGNMENT = 512  # bytes; enough for every element type, for direct I/O, and for a copy engine


@dataclass(eq=False, slots=True)
class Slab:
    """A contiguous piece of memory or of a file; `spans` are stacked in it from offset 0."""

    nbytes: int
    spans: list[Span] = field(default_factory=list)

    @property
    def top(self) -> int:
        """The first free byte."""
        return self.spans[-1].end if self.spans else 0


@dataclass(eq=False, slots=True)
class Span:
    """Bytes of a slab that are in use until they are freed."""

    slab: Slab
    offset: int
    nbytes: int
    reserved: int
    free: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.reserved


class SpanStack:
    """Hands out spans of slabs, within a limit.

    The caller makes the memory of a slab when it is asked to, and drops it when `consolidate` says so.

    Args:
        limit: most bytes of all slabs.
        slab: smallest size of a new slab, in bytes, as far as the limit allows.

    Attributes:
        slabs: in the order in which they are filled.
        used: bytes in spans that are not free.
        peak: most bytes that were needed at one time, with alignment.
    """

    def __init__(self, limit: int, slab: int = 64 << 20):
        self.slabs: list[Slab] = []
        self.used = 0
        self.peak = 0
        self._limit = limit
        self._smallest = slab
        self._occupied = 0
        self._wanted = 0

    @property
    def allocated(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    def allocate(self, nbytes: int, make: Callable[[Slab], bool] = lambda slab: True) -> Span | None:
        """Return a span, or None if the limit leaves no room.

        Args:
            nbytes: its size.
            make: makes the memory of a new slab; False if that is impossible. The limit is lowered then, for what
                could not be had once is not asked for again and again.
        """
        reserved = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        slab = self._slab_with_room(reserved, make)
        self._wanted = max(self._wanted, self._occupied + reserved)
        if slab is None:
            return None
        span = Span(slab, slab.top, nbytes, reserved)
        slab.spans.append(span)
        self.used += nbytes
        self._occupied += reserved
        self.peak = max(self.peak, self._occupied)
        return span

    def free(self, span: Span) -> None:
        """Give a span back. Its room is used anew as soon as everything above it is free too."""
        if span.free:
            raise ValueError("a span was freed twice")
        span.free = True
        self.used -= span.nbytes
        self._occupied -= span.reserved
        spans = span.slab.spans
        while spans and spans[-1].free:
            spans.pop()

    def consolidate(self) -> bool:
        """If nothing is in use and there should be one slab instead, drop them.

        The next one is as large as all that was wanted at one time: several slabs, or a small one, leave room unused
        that the limit allows.

        Returns:
            Whether slabs were dropped.
        """
        short = self._wanted > self.allocated and self.allocated < self._limit
        if not self.slabs or not (len(self.slabs) > 1 or short) or any(slab.spans for slab in self.slabs):
            return False
        self.slabs.clear()
        return True

    def _slab_with_room(self, reserved: int, make: Callable[[Slab], bool]) -> Slab | None:
        # The first that fits, not the last in use: a span that outlives its step must not block the slabs below it.
        for slab in self.slabs:
            if slab.nbytes - slab.top >= reserved:
                return slab
        while reserved <= (room := self._limit - self.allocated):
            slab = Slab(min(max(reserved, self._smallest, self._wanted if not self.slabs else 0), room))
            if make(slab):
                self.slabs.append(slab)
                return slab
            self._limit = self.allocated + slab.nbytes // 2  # half of it may still be there
        return None
