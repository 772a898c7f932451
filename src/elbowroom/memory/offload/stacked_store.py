"""What the stores have in common: spans of a stack, and giving them back from destructors."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

import torch

from elbowroom.memory.devices.base import Event
from elbowroom.memory.offload.stack import Slab, Span, SpanStack
from elbowroom.memory.offload.store import Store, Stored


class StoredSpan(Stored):
    """Bytes in a span of a stack.

    Attributes:
        span: where they are.
        uses: copies from and to the span that may be under way; its room is used anew only after them.
    """

    def __init__(self, span: Span):
        self.nbytes = span.nbytes
        self.span = span
        self.uses: list[Event] = []

    def used_by(self, event: Event) -> None:
        """Note a copy. Those that have ended are forgotten: the same bytes may be loaded any number of times."""
        self.uses = [*unfinished(self.uses), event]


class StackedStore(Store):
    """A store whose room is a stack of spans.

    Args:
        limit: most bytes.
        slab: smallest size of the pieces in which it grows, in bytes.
    """

    def __init__(self, *, limit: int, slab: int):
        self._limit = limit
        self._stack = SpanStack(limit, slab)
        self._live: set[StoredSpan] = set()
        self._freed: deque[StoredSpan] = deque()  # filled by destructors, which may run anywhere: append is atomic
        self._pending: list[Event] = []  # copies that use room which has been given back
        self._lock = threading.RLock()
        self._closed = False

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
            self._check_open()
            self._collect()
            span = self._stack.allocate(source.nbytes, self._make)
            if span is None:
                return None
            stored = None
            try:
                stored = self._begin_save(source, span, tuple(self._pending))
            finally:
                if stored is None:
                    self._stack.free(span)
            if stored is not None:
                stored.used_by(stored.saved)
                self._live.add(stored)
            return stored

    def free(self, stored: Stored) -> None:
        assert isinstance(stored, StoredSpan)
        self._freed.append(stored)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._collect()
            wait_for(self._pending, *(stored.uses for stored in self._live))
            self._stack.slabs.clear()
            self._drop()

    @abstractmethod
    def _make(self, slab: Slab) -> bool:
        """Make the room of a new slab; False, with `trouble` set, if that is impossible."""

    @abstractmethod
    def _drop(self) -> None:
        """Give the room of all slabs back to the system."""

    @abstractmethod
    def _begin_save(self, source: torch.Tensor, span: Span, after: Sequence[Event]) -> StoredSpan | None:
        """Begin to copy `source` into a span, once `after` has happened. None if that turns out to be impossible."""

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the store of offloaded activations is closed, and what was in it is lost")

    def _collect(self) -> None:
        """Take back what destructors have given up."""
        while self._freed:
            stored = self._freed.popleft()
            self._pending += stored.uses
            self._live.discard(stored)
            self._stack.free(stored.span)
        self._pending[:] = unfinished(self._pending)
        if self._stack.consolidate():
            wait_for(self._pending)  # room is never given back to the system while a copy uses it
            self._drop()


def unfinished(events: Iterable[Event]) -> list[Event]:
    """Return the copies that may still be under way."""
    return [event for event in events if not over(event)]


def wait_for(*groups: Iterable[Event]) -> None:
    """Block until all copies have ended, well or not."""
    for event in chain(*groups):
        with suppress(Exception):  # whoever needs the bytes is told
            event.wait()


def over(event: Event) -> bool:
    """Whether a copy has ended, well or not."""
    try:
        return event.done()
    except Exception:
        return True
