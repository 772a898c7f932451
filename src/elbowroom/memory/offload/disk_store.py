"""A store in files, written and read by worker threads."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import torch

from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.devices.cpu import FutureEvent
from elbowroom.memory.offload.stack import Slab, Span
from elbowroom.memory.offload.stacked_store import StackedStore, StoredSpan
from elbowroom.memory.offload.store import Stored, StoreError


class DiskStore(StackedStore):
    """Offloaded bytes in a few large files without a name, so that nothing of them survives the process.

    Tensors in host memory are written and read in place. Those of an accelerator pass through staging buffers.

    Args:
        device: where the bytes come from.
        folder: where the files are; made if need be.
        limit: most bytes.
        slab: smallest size of a file, in bytes.
        staging: bytes of host memory for what is on its way from and to an accelerator.

    Raises:
        OSError: the folder can't be made.
    """

    def __init__(self, device: Device, folder: Path, *, limit: int, slab: int = 256 << 20, staging: int = 256 << 20):
        super().__init__(limit=limit, slab=slab)
        folder.mkdir(parents=True, exist_ok=True)
        self._device = device
        self._folder = folder
        self._files: dict[Slab, IO[bytes]] = {}
        self._warned = False
        # One thread writes: what it writes first is read last. Reads wait for writes, never the other way around,
        # except for a write into room that an earlier read still uses.
        self._writer = ThreadPoolExecutor(1, "elbowroom-write")
        self._readers = ThreadPoolExecutor(2, "elbowroom-read")
        self._staging = None if device.in_host_memory else _Staging(device, staging)
        weakref.finalize(self, _shut_down, self._writer, self._readers)

    def load(self, stored: Stored, target: torch.Tensor) -> Event:
        assert isinstance(stored, _DiskSpan)
        file = self._files[stored.span.slab].fileno()
        if self._staging is None:
            event: Event = FutureEvent(self._readers.submit(_read, file, stored, target))
        elif (buffer := stored.still_buffered()) is not None:
            event = self._device.copy_in(buffer, target, after=(stored.saved,))
        else:
            event = _StagedLoad(self._device, self._staging, self._readers, file, stored, target)
        with self._lock:
            stored.uses.append(event)
        return event

    def close(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        super().close()

    def _begin_save(self, source: torch.Tensor, span: Span, after: Sequence[Event]) -> StoredSpan:
        file = self._files[span.slab].fileno()
        stored = _DiskSpan(span)
        if self._staging is None:
            stored.written = self._writer.submit(_write, file, span, source, after)
            stored.saved = FutureEvent(stored.written)
            return stored
        buffer = self._staging.take(source.nbytes)
        copied = self._device.copy_out(source, buffer)
        stored.saved = copied
        stored.unwritten = buffer
        staging = self._staging

        def write() -> None:
            copied.wait()
            try:
                _write(file, span, buffer, after)
            except StoreError as error:
                warnings.warn(f"{error}; they stay in host memory", stacklevel=2)
                return  # the buffer serves the load
            stored.unwritten = None
            staging.give(buffer)

        stored.written = self._writer.submit(write)
        stored.uses.append(FutureEvent(stored.written))
        return stored

    def _make(self, slab: Slab) -> bool:
        file = tempfile.TemporaryFile(dir=self._folder, prefix="elbowroom-", buffering=0)  # noqa: SIM115
        try:
            # Room that is promised now can't be missing in the middle of a step.
            os.posix_fallocate(file.fileno(), 0, slab.nbytes)
        except OSError as error:
            file.close()
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"activations stay in memory from here on: {self._folder} has no room for {slab.nbytes} more "
                    f"bytes ({error.strerror})",
                    stacklevel=2,
                )
            return False
        self._files[slab] = file
        return True

    def _drop(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class _DiskSpan(StoredSpan):
    """Bytes in a file.

    Attributes:
        written: the end of writing.
        unwritten: the staging buffer that still has the bytes.
    """

    written: Future[None]
    unwritten: torch.Tensor | None = None

    def still_buffered(self) -> torch.Tensor | None:
        """Return the staging buffer, if the bytes could not be written and are only there."""
        self.written.result()  # until then, the buffer may be taken for something else at any moment
        return self.unwritten


class _StagedLoad:
    """Reads into a staging buffer in a thread, then copies to the device from the thread that computes.

    Only there it is known which of the device's work the copy has to wait for.
    """

    def __init__(
        self,
        device: Device,
        staging: _Staging,
        readers: ThreadPoolExecutor,
        file: int,
        stored: _DiskSpan,
        target: torch.Tensor,
    ):
        self._device = device
        self._staging = staging
        self._target: torch.Tensor | None = target
        self._copied: Event | None = None
        self._lock = threading.Lock()
        self._buffer = staging.take(stored.nbytes, wait=False)
        self._read = readers.submit(_read, file, stored, self._buffer)

    def done(self) -> bool:
        return self._read.done() and self._copy().done()

    def wait(self) -> None:
        self._copy().wait()

    def hold_compute(self) -> None:
        self._copy().hold_compute()

    def _copy(self) -> Event:
        self._read.result()
        with self._lock:
            if self._copied is None:
                assert self._target is not None
                self._copied = self._device.copy_in(self._buffer, self._target)
                self._staging.give(self._buffer, self._copied)
                self._target = None
            return self._copied


class _Staging:
    """Buffers in host memory between a device and a file. They are used again, for the same sizes come every step.

    Args:
        limit: bytes of all buffers; a single larger one is allowed when it is alone.
    """

    def __init__(self, device: Device, limit: int):
        self._device = device
        self._limit = limit
        self._allocated = 0
        self._free: list[tuple[torch.Tensor, Event | None]] = []
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, wait: bool = True) -> torch.Tensor:
        """Return a buffer.

        Args:
            nbytes: its size.
            wait: if all are in use, wait for one. Loads don't: what they hold is given back only by the thread that
                would wait. The window bounds them.
        """
        with self._changed:
            while True:
                for index, (buffer, event) in enumerate(self._free):
                    if buffer.nbytes == nbytes:
                        del self._free[index]
                        if event is not None:
                            event.wait()
                        return buffer
                while self._free and self._allocated + nbytes > self._limit:
                    buffer, event = self._free.pop(0)
                    if event is not None:
                        event.wait()
                    self._allocated -= buffer.nbytes
                    del buffer
                if not wait or self._allocated == 0 or self._allocated + nbytes <= self._limit:
                    self._allocated += nbytes
                    return self._new(nbytes)
                self._changed.wait()

    def give(self, buffer: torch.Tensor, after: Event | None = None) -> None:
        """Take a buffer back; it is used again after `after`."""
        with self._changed:
            self._free.append((buffer, after))
            self._changed.notify_all()

    def _new(self, nbytes: int) -> torch.Tensor:
        try:
            return self._device.host_memory(nbytes, pinned=True)
        except RuntimeError:
            return self._device.host_memory(nbytes, pinned=False)  # slower, and nothing else


def _write(file: int, span: Span, source: torch.Tensor, after: Sequence[Event]) -> None:
    for event in after:
        event.wait()
    try:
        _whole(lambda view, at: os.pwrite(file, view, at), source, span.offset)
    except OSError as error:
        raise StoreError(f"{source.nbytes} bytes of activations could not be written ({error.strerror})") from error


def _read(file: int, stored: _DiskSpan, target: torch.Tensor) -> None:
    stored.written.result()
    _whole(lambda view, at: os.preadv(file, [view], at), target, stored.span.offset)


def _whole(step: Callable[[memoryview, int], int], tensor: torch.Tensor, offset: int) -> None:
    """Move all bytes of a tensor: the system may do less at a time than it is asked for."""
    view: memoryview = tensor.numpy().data
    position = 0
    while position < len(view):
        moved = step(view[position:], offset + position)
        if moved == 0:
            raise OSError(5, "the file is shorter than what was written to it")
        position += moved


def _shut_down(*pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.shutdown(wait=False)
