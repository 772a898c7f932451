"""Buffers in host memory between an accelerator and a file, for one direction."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from elbowroom.memory.devices.base import CopySeconds, Device, Event
from elbowroom.memory.devices.cpu import FutureEvent
from elbowroom.memory.offload.stacked_store import wait_for

Used = tuple[torch.Tensor, list[Event]]
"""A buffer, and the copies from and to it that may be under way."""


class Staging:
    """Buffers in host memory, page-locked where possible, that are used again and again.

    A buffer lives until the copies that use it have ended, also when the staging is dropped without `close`.

    Args:
        device: what copies from and to them.
        limit: bytes of all buffers; a single larger one is allowed when it is alone.
    """

    def __init__(self, device: Device, limit: int):
        self._device = device
        self._limit = limit
        self._allocated = 0
        self._free: list[Used] = []
        self._kept: list[Used] = []
        self._changed = threading.Condition()
        weakref.finalize(self, _settle, self._free, self._kept)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Return a buffer of at least `nbytes`, waiting until there is one. None once `keep` was called.

        Raises:
            RuntimeError: there is no host memory.
        """
        with self._changed:
            while not self._kept:
                buffer = self._reused(nbytes)
                if buffer is not None:
                    return buffer
                if self._allocated == 0 or self._allocated + nbytes <= self._limit:
                    return self._made(nbytes)
                self._changed.wait()
            return None

    def take_at_once(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes`, beyond the limit if need be.

        What loads hold is given back only by the thread that would wait here; the window of the caller bounds it.

        Raises:
            RuntimeError: there is no host memory.
        """
        with self._changed:
            buffer = self._reused(nbytes)
            return self._made(nbytes) if buffer is None else buffer

    def give(self, buffer: torch.Tensor, uses: list[Event]) -> None:
        """Take a buffer back; it is used again after `uses`."""
        with self._changed:
            self._free.append((buffer, uses))
            self._changed.notify_all()

    def keep(self, buffer: torch.Tensor, uses: list[Event]) -> None:
        """Leave a buffer to whoever has it, for its bytes are nowhere else; it lives until the end."""
        with self._changed:
            self._kept.append((buffer, uses))
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the copies that use buffers which were given back, and release those."""
        with self._changed:
            _settle(self._free, self._kept)

    def _reused(self, nbytes: int) -> torch.Tensor | None:
        """Return the smallest free buffer that is large enough, else make room for a new one."""
        large_enough = [used for used in self._free if used[0].nbytes >= nbytes]
        if large_enough:
            used = min(large_enough, key=lambda each: each[0].nbytes)
            # By identity: tensors can't be compared.
            del self._free[next(index for index, each in enumerate(self._free) if each is used)]
            wait_for(used[1])
            return used[0]
        while self._free and self._allocated + nbytes > self._limit:
            buffer, uses = self._free.pop(0)
            wait_for(uses)
            self._allocated -= buffer.nbytes
        return None

    def _made(self, nbytes: int) -> torch.Tensor:
        try:
            buffer = self._device.host_memory(nbytes, pinned=True)
        except RuntimeError:
            buffer = self._device.host_memory(nbytes, pinned=False)  # slower, and nothing else
        self._allocated += nbytes
        return buffer


class StagedLoad:
    """Reads into a staging buffer in a thread, then copies to the device from the thread that computes.

    Only there it is known which of the device's work the copy has to wait for.

    Args:
        device: where the bytes go in the end.
        staging: where the buffer comes from.
        readers: the threads.
        read: fills the bytes of the host that it is given.
        target: bytes of the device.

    Attributes:
        read: the end of reading.
    """

    def __init__(
        self,
        device: Device,
        staging: Staging,
        readers: ThreadPoolExecutor,
        read: Callable[[torch.Tensor], None],
        target: torch.Tensor,
    ):
        self._device = device
        self._staging = staging
        self._target: torch.Tensor | None = target
        self._copied: Event | None = None
        self._lock = threading.Lock()
        self._buffer = staging.take_at_once(target.nbytes)
        self._bytes = self._buffer[: target.nbytes]
        self.read = FutureEvent(readers, read, self._bytes)

    def done(self) -> bool:
        return self.read.done() and self._copy().done()

    def wait(self) -> None:
        self._copy().wait()

    def hold_compute(self) -> None:
        self.read.hold_compute()
        self._copy().hold_compute()

    def seconds(self) -> CopySeconds | None:
        read = self.read.seconds()
        copied = None if self._copied is None else self._copied.seconds()
        if read is None or copied is None:
            return None
        return CopySeconds(read.transfer + copied.transfer, read.exposed + copied.exposed)

    def _copy(self) -> Event:
        self.read.wait()
        with self._lock:
            if self._copied is None:
                assert self._target is not None
                self._copied = self._device.copy_in(self._bytes, self._target)
                self._staging.give(self._buffer, [self._copied])
                self._target = None
            return self._copied


def _settle(*lists: list[Used]) -> None:
    for buffers in lists:
        for _, uses in buffers:
            wait_for(uses)
        buffers.clear()
