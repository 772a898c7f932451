"""The CPU as a device: its tensors lie in host memory, so that only a disk is farther away."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from elbowroom.memory.devices.base import CopySeconds, Event
from elbowroom.memory.devices.strided import StridedDevice


class FutureEvent:
    """The end of a piece of work in another thread.

    Args:
        threads: where it is done.
        work: what is called there, with `args`.
    """

    def __init__(self, threads: ThreadPoolExecutor, work: Callable[..., None], *args: Any):
        self._seconds: CopySeconds | None = None
        self._future = threads.submit(_timed, work, args)

    def done(self) -> bool:
        if not self._future.done():
            return False
        self.wait()  # raises what made it fail
        return True

    def wait(self) -> None:
        error = self._future.exception()
        if error is not None:
            # Another object each time: one that is raised holds on to the frames that it passes, and to their tensors.
            raise copy.copy(error)

    def hold_compute(self) -> None:
        held = time.perf_counter()
        self.wait()  # the calling thread is the one that computes
        if self._seconds is None:
            begin, end = self._future.result()
            self._seconds = CopySeconds(transfer=end - begin, exposed=min(max(end - held, 0.0), end - begin))

    def seconds(self) -> CopySeconds | None:
        return self._seconds


class Cpu(StridedDevice):
    """Copies run on a worker thread a direction, beside the thread that computes."""

    device = torch.device("cpu")
    in_host_memory = True

    def __init__(self) -> None:
        self._out = ThreadPoolExecutor(1, "elbowroom-out")
        self._in = ThreadPoolExecutor(1, "elbowroom-in")

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if pinned:
            raise RuntimeError("page-locked memory speeds up copies from an accelerator; the CPU has no use for it")
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return FutureEvent(self._out, _copy, source, target, after)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return FutureEvent(self._in, _copy, source, target, after)

    def synchronize(self) -> None:
        for queue in (self._out, self._in):
            queue.submit(lambda: None).result()

    def bytes_in_use(self) -> int:
        """Return the resident set of the process (`VmRSS`), the nearest that a CPU has; 0 where there is no /proc."""
        return _status("VmRSS")

    def peak_bytes(self) -> int:
        return _status("VmHWM")

    def reset_peak(self) -> None:
        with suppress(OSError):  # not permitted here: the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")


def _timed(work: Callable[..., None], args: tuple[Any, ...]) -> tuple[float, float]:
    begin = time.perf_counter()
    work(*args)
    return begin, time.perf_counter()


def _copy(source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> None:
    for event in after:
        event.wait()
    target.copy_(source)


def _status(name: str) -> int:
    """Return a figure of /proc/self/status, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else 0
