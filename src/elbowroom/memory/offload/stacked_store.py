"""What the stores have in common: spans of a stack, and giving them back from destructors."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import torch

from elbowroom.memory.devices.base import Event
from elbowroom.memory.offload.stack import Slab, Span, SpanStack
from elbowroom.memory.offload.store import Store, Stored


class StoredSpan(Stored):
    """Bytes in a span of a stack.

    Attributes:
        span: where they are.
        uses: copies from and to the span; its room is used anew only after them.
    """

    def __init__(self, span: Span):
        self.nbytes = span.nbytes
        self.span = span
        self.uses: list[Event] = []


class StackedStore(Store):
    """A store whose room is a stack of spans.

    Args:
        limit: most bytes.
        slab: smallest size of the pieces in which it grows, in bytes.
    """

    def __init__(self, *, limit: int, slab: int):
        self._stack = SpanStack(limit, slab)
        self._freed: deque[StoredSpan] = deque()  # filled by destructors, which may run anywhere: append is atomic
        self._pending: list[Event] = []  # copies that use room which has been given back
        self._lock = threading.RLock()

    @property
    def present(self) -> int:
        with self._lock:
            self._collect()
            return self._stack.used

    @property
    def peak(self) -> int:
        return self._stack.peak

    @property
    def allocated(self) -> int:
        return self._stack.allocated

    def save(self, source: torch.Tensor) -> Stored | None:
        with self._lock:
            self._collect()
            known = len(self._stack.slabs)
            span = self._stack.allocate(source.nbytes)
            if span is None:
                return None
            if len(self._stack.slabs) > known and not self._make(span.slab):
                self._stack.free(span)
                self._stack.slabs.remove(span.slab)
                return None
            stored = self._begin_save(source, span, tuple(self._pending))
            stored.uses.append(stored.saved)
            return stored

    def free(self, stored: Stored) -> None:
        assert isinstance(stored, StoredSpan)
        self._freed.append(stored)

    def close(self) -> None:
        with self._lock:
            self._collect()
            self._wait()
            self._stack.slabs.clear()
            self._drop()

    @abstractmethod
    def _make(self, slab: Slab) -> bool:
        """Make the room of a new slab; False, with a warning, if that is impossible."""

    @abstractmethod
    def _drop(self) -> None:
        """Give the room of all slabs back to the system."""

    @abstractmethod
    def _begin_save(self, source: torch.Tensor, span: Span, after: Sequence[Event]) -> StoredSpan:
        """Begin to copy `source` into a span, once `after` has happened."""

    def _collect(self) -> None:
        """Take back what destructors have given up."""
        while self._freed:
            stored = self._freed.popleft()
            self._pending += stored.uses
            self._stack.free(stored.span)
        self._pending = [event for event in self._pending if not _over(event)]
        if self._stack.consolidate():
            self._wait()  # room is never given back to the system while a copy uses it
            self._drop()

    def _wait(self) -> None:
        for event in self._pending:
            if not _over(event):
                event.wait()
        self._pending.clear()


def _over(event: Event) -> bool:
    """Whether a copy has ended, well or not."""
    try:
        return event.done()
    except Exception:
        return True
