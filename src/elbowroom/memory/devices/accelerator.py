"""Accelerators through `torch.accelerator`: CUDA, ROCm, XPU. A stream a direction beside the stream that computes."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from elbowroom.memory.devices.base import CopySeconds, Event
from elbowroom.memory.devices.strided import StridedDevice


class StreamEvent:
    """The end of a copy on one of the device's streams.

    Args:
        begin: recorded on that stream before the copy.
        event: recorded after it.
        device: whose streams they are.
    """

    def __init__(self, begin: torch.Event, event: torch.Event, device: torch.device):
        self._begin = begin
        self._event = event
        self._held: torch.Event | None = None
        self._device = device

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def hold_compute(self) -> None:
        compute = torch.accelerator.current_stream(self._device)
        if self._held is None:
            self._held = _recorded_on(compute, self._device)
        compute.wait_event(self._event)

    def seconds(self) -> CopySeconds | None:
        if self._held is None or not (self._held.query() and self._event.query()):
            return None
        transfer = self._begin.elapsed_time(self._event) / 1000
        stood_still = self._held.elapsed_time(self._event) / 1000  # negative: the copy had ended before
        return CopySeconds(transfer, min(max(stood_still, 0.0), transfer))

    def hold(self, stream: torch.Stream) -> None:
        stream.wait_event(self._event)


class Accelerator(StridedDevice):
    """One accelerator. Its current stream is taken for the one that computes."""

    in_host_memory = False

    def __init__(self, device: torch.device):
        self.device = device
        self._out = torch.Stream(device=device)
        self._in = torch.Stream(device=device)

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if not pinned:
            return torch.empty(nbytes, dtype=torch.uint8)
        if self.device.type == "cuda":  # ROCm too
            return _registered(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._out, source, target, after)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._in, source, target, after)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def bytes_in_use(self) -> int:
        return torch.accelerator.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def _copy(
        self, stream: torch.Stream, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]
    ) -> StreamEvent:
        # The source must have been computed, and whatever used the target's memory before must have ended: both are
        # on the computing stream, up to where it is now.
        stream.wait_event(torch.accelerator.current_stream(self.device).record_event())
        for event in after:
            if isinstance(event, StreamEvent):
                event.hold(stream)
            else:  # work of another thread: only the host can wait for it
                event.wait()
        begin = _recorded_on(stream, self.device)
        with stream:
            target.copy_(source, non_blocking=True)
        return StreamEvent(begin, _recorded_on(stream, self.device), self.device)


def _recorded_on(stream: torch.Stream, device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    stream.record_event(event)
    return event


def _registered(nbytes: int) -> torch.Tensor:
    """Return page-locked memory of just the pages that are needed.

    torch's own allocator of pinned memory rounds up to a power of two, so a store of 33 GiB would take 64.
    """
    try:
        pages = mmap.mmap(-1, max(nbytes, 1))
    except OSError as error:
        raise RuntimeError(f"{nbytes} bytes of host memory can't be had ({error.strerror})") from error
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
    runtime: Any = torch.cuda.cudart()
    result = runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if int(result) != 0:
        raise RuntimeError(
            f"{nbytes} bytes of host memory can't be page-locked ({runtime.cudaGetErrorString(result)}); use "
            "activation_store=pageable, or a lower activation_store_limit"
        )
    # Unlocked before the pages go: the finalizer holds them.
    weakref.finalize(memory.untyped_storage(), _unregister, memory.data_ptr(), pages)
    return memory


def _unregister(address: int, pages: mmap.mmap) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
    del pages
