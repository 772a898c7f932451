"""A store in host memory, page-locked or ordinary."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch

from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.offload.stack import Slab, Span
from elbowroom.memory.offload.stacked_store import StackedStore, StoredSpan, wait_for
from elbowroom.memory.offload.store import Stored
from elbowroom.memory.sizes import in_bytes


class HostStore(StackedStore):
    """Offloaded bytes in host memory.

    Args:
        device: where the bytes come from.
        pinned: page-lock the memory, so that copies run beside the device's computations. Where that fails, ordinary
            memory is used, with one warning.
        limit: most bytes.
        slab: smallest size of the pieces in which it grows, in bytes.
    """

    def __init__(self, device: Device, *, pinned: bool, limit: int, slab: int = 64 << 20):
        super().__init__(limit=limit, slab=slab)
        self._device = device
        self._pinned = pinned
        self._memory: dict[Slab, torch.Tensor] = {}
        # A store that nobody closes may be dropped at any moment: not its memory, while a copy uses that.
        weakref.finalize(self, _settle, self._memory, self._live, self._pending)

    @property
    def description(self) -> str:
        return f"{'pinned' if self._pinned else 'ordinary'} host memory, at most {in_bytes(self._limit)}"

    def load(self, stored: Stored, target: torch.Tensor) -> Event:
        assert isinstance(stored, StoredSpan)
        with self._lock:
            self._check_open()
            event = self._device.copy_in(self._bytes(stored.span), target, after=(stored.saved,))
            stored.used_by(event)
            return event

    def _begin_save(self, source: torch.Tensor, span: Span, after: Sequence[Event]) -> StoredSpan:
        stored = StoredSpan(span)
        stored.saved = self._device.copy_out(source, self._bytes(span), after=after)
        return stored

    def _bytes(self, span: Span) -> torch.Tensor:
        return self._memory[span.slab][span.offset : span.offset + span.nbytes]

    def _make(self, slab: Slab) -> bool:
        if self._pinned:
            try:
                self._memory[slab] = self._device.host_memory(slab.nbytes, pinned=True)
                return True
            except RuntimeError as error:
                self._pinned = False
                warnings.warn(
                    f"offloaded activations go to ordinary host memory, which is slower: {error}", stacklevel=2
                )
        try:
            self._memory[slab] = self._device.host_memory(slab.nbytes, pinned=False)
        except RuntimeError as error:
            self.trouble = f"host memory can't be had: {error}"
            return False
        return True

    def _drop(self) -> None:
        self._memory.clear()


def _settle(memory: dict[Slab, torch.Tensor], live: set[StoredSpan], pending: list[Event]) -> None:
    wait_for(pending, *(stored.uses for stored in live))
    memory.clear()
