"""A store in files, written and read by worker threads."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.devices.cpu import FutureEvent
from elbowroom.memory.offload.file_bytes import read_all, write_all
from elbowroom.memory.offload.stack import Slab, Span
from elbowroom.memory.offload.stacked_store import StackedStore, StoredSpan, wait_for
from elbowroom.memory.offload.staging import StagedLoad, Staging
from elbowroom.memory.offload.store import Stored, StoreError
from elbowroom.memory.sizes import in_bytes


class DiskStore(StackedStore):
    """Offloaded bytes in a few large files without a name, so that nothing of them survives the process.

    Tensors in host memory are written and read in place. Those of an accelerator pass through staging buffers.

    Args:
        device: where the bytes come from.
        folder: where the files are; made if need be.
        limit: most bytes.
        slab: smallest size of a file, in bytes.
        staging: bytes of host memory for what is on its way from an accelerator, and as many for the way back.

    Raises:
        OSError: the folder can't be made or written to.
    """

    def __init__(self, device: Device, folder: Path, *, limit: int, slab: int = 256 << 20, staging: int = 128 << 20):
        super().__init__(limit=limit, slab=slab)
        check_folder(folder)  # whether that is possible is told now, not in the first step
        self._device = device
        self._folder = folder
        self._files: dict[Slab, _File] = {}
        self._writes = _Writes()
        # One thread writes: what it writes first is read last. Reads wait for writes, never the other way around,
        # except for a write into room that an earlier read still uses.
        self._writer = ThreadPoolExecutor(1, "elbowroom-write")
        self._readers = ThreadPoolExecutor(2, "elbowroom-read")
        # A ring a direction: a save that waits for a buffer waits for the writer, never for a load of its own thread.
        self._staging_out = None if device.in_host_memory else Staging(device, staging)
        self._staging_in = None if device.in_host_memory else Staging(device, staging)
        weakref.finalize(self, _shut_down, self._writer, self._readers)

    @property
    def description(self) -> str:
        return f"files in {self._folder}, at most {in_bytes(self._limit)}"

    def load(self, stored: Stored, target: torch.Tensor) -> Event:
        assert isinstance(stored, _DiskSpan)
        with self._lock:
            self._check_open()
            file = self._files[stored.span.slab]
            if self._staging_in is None:
                event = FutureEvent(self._readers, _read, file, stored, target)
                stored.used_by(event)
                return event
            assert isinstance(stored, _StagedSpan)
            copied = stored.copy_from_buffer(self._device, target)
            if copied is not None:
                return copied
            load = StagedLoad(self._device, self._staging_in, self._readers, partial(_read, file, stored), target)
            stored.used_by(load.read)  # not until the copy to the device: that is begun only by who waits for it
            return load

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._writer.shutdown()
            self._readers.shutdown()
            super().close()
            for staging in (self._staging_out, self._staging_in):
                if staging is not None:
                    staging.close()

    def _begin_save(self, source: torch.Tensor, span: Span, after: Sequence[Event]) -> StoredSpan | None:
        if self._writes.failure is not None:
            self.trouble = self._writes.failure
            return None
        file = self._files[span.slab]
        if self._staging_out is None:
            stored = _DiskSpan(span)
            stored.written = FutureEvent(self._writer, _write, self._writes, file, span, source, after)
            stored.saved = stored.written
            return stored
        try:
            buffer = self._staging_out.take(source.nbytes)
        except RuntimeError:  # no host memory, which is no reason to end the program
            buffer = None
        if buffer is None:
            return None
        stored = _StagedSpan(span, buffer)
        stored.saved = self._device.copy_out(source, buffer[: span.nbytes])
        stored.written = FutureEvent(self._writer, _write_buffer, self._writes, file, stored, after, self._staging_out)
        stored.used_by(stored.written)
        return stored

    def _make(self, slab: Slab) -> bool:
        try:
            self._files[slab] = _File(self._folder, slab.nbytes)
        except OSError as error:
            self.trouble = (
                f"{self._folder} can't take a file of {in_bytes(slab.nbytes)} ({error.strerror}); set "
                "activation_store_path to a folder on a disk with more room"
            )
            return False
        return True

    def _drop(self) -> None:
        self._files.clear()


def check_folder(folder: Path) -> None:
    """Make a folder if need be, and raise `OSError` if no file can be made there."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


class _File:
    """A file without a name, closed when no store and no worker thread has it any more.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, folder: Path, nbytes: int):
        self._file = tempfile.TemporaryFile(dir=folder, prefix="elbowroom-", buffering=0)  # noqa: SIM115
        self.number = self._file.fileno()
        try:
            if hasattr(os, "posix_fallocate"):  # not on macOS, where a full disk is noticed when writing
                # Room that is promised now can't be missing in the middle of a step.
                os.posix_fallocate(self.number, 0, nbytes)
        except BaseException:
            self._file.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class _Writes:
    """What has become of writing.

    Attributes:
        failure: what went wrong, so that nothing more is saved; None while all is well.
    """

    failure: str | None = None


class _DiskSpan(StoredSpan):
    """Bytes in a file.

    Attributes:
        written: the end of writing.
    """

    written: FutureEvent


class _StagedSpan(_DiskSpan):
    """Bytes that pass through a staging buffer, which has them until they are written."""

    def __init__(self, span: Span, buffer: torch.Tensor):
        super().__init__(span)
        self.buffer: torch.Tensor | None = buffer
        self.reads: list[Event] = []
        self.lock = threading.Lock()

    def copy_from_buffer(self, device: Device, target: torch.Tensor) -> Event | None:
        """Begin to copy to the device; None if the bytes are in the file only."""
        with self.lock:
            if self.buffer is None:
                return None
            event = device.copy_in(self.buffer[: self.nbytes], target, after=(self.saved,))
            self.reads.append(event)
            return event


def _write_buffer(writes: _Writes, file: _File, stored: _StagedSpan, after: Sequence[Event], staging: Staging) -> None:
    buffer = stored.buffer
    assert buffer is not None
    try:
        stored.saved.wait()
        _write(writes, file, stored.span, buffer[: stored.nbytes], after)
    except StoreError:
        staging.keep(buffer, stored.reads)  # it serves all loads
        return
    except BaseException:
        staging.keep(buffer, stored.reads)
        raise
    with stored.lock:
        stored.buffer = None
    staging.give(buffer, stored.reads)


def _write(writes: _Writes, file: _File, span: Span, source: torch.Tensor, after: Sequence[Event]) -> None:
    wait_for(after)
    try:
        write_all(file.number, source, span.offset)
    except OSError as error:
        writes.failure = (
            f"{in_bytes(source.nbytes)} could not be written ({error.strerror}); set activation_store_path to a folder "
            "on a disk with more room"
        )
        raise StoreError(writes.failure) from error


def _read(file: _File, stored: _DiskSpan, target: torch.Tensor) -> None:
    stored.written.wait()
    read_all(file.number, target, stored.span.offset)


def _shut_down(*pools: ThreadPoolExecutor) -> None:
    for pool in pools:
        pool.shutdown(wait=False)
