"""What the engine asks of a device: copies from and to host memory that run beside its computations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class CopySeconds:
    """How long a copy took.

    Attributes:
        transfer: from the first byte to the last, in seconds.
        exposed: that part during which the device's computations stood still for it (`Event.hold_compute`).
    """

    transfer: float
    exposed: float


class Event(Protocol):
    """A point in the work of a device or of a worker thread, such as the end of a copy.

    Raises:
        Exception: each method raises what made the work fail.
    """

    def done(self) -> bool:
        """Whether it has happened; never blocks."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it has happened."""
        ...

    def hold_compute(self) -> None:
        """Let whatever the device is told to compute from now on begin after it.

        The calling thread goes on, where the device can wait by itself.
        """
        ...

    def seconds(self) -> CopySeconds | None:
        """Return how long the copy took, once it has ended and computations were held for it; None before.

        Never blocks. Both are 0 where nothing has a clock.
        """
        ...


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage: everything that a view needs besides the bytes.

    Attributes:
        dtype: element type.
        size: elements in each dimension.
        stride: steps in each dimension, in elements.
        offset: first element.
        conjugate: the view is the complex conjugate of what is stored.
        negative: the view is the negative of what is stored.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def start(self) -> int:
        """The first element, in bytes."""
        return self.offset * self.dtype.itemsize

    def moved_to(self, start: int) -> Geometry:
        """Return the same with its first element at byte `start`, which the size of an element must divide."""
        return replace(self, offset=start // self.dtype.itemsize)


class Device(ABC):
    """One device, with a queue of copies in each direction beside the queue of its computations.

    A copy begins after everything that the device had been told to compute when the copy was asked for. Neither side
    of a copy is kept alive by it: who asks for a copy holds both tensors until the event has happened, or until the
    device's computations wait for it (`Event.hold_compute`), after which the allocator may reuse their memory.

    Attributes:
        device: as torch names it.
        in_host_memory: its tensors lie in host memory, so that only a disk is farther away.
    """

    device: torch.device
    in_host_memory: bool

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on this device as dense, strided memory that the methods below understand."""

    @abstractmethod
    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return the memory in which a dense tensor lies: the same object's identity (`_cdata`) for all its views."""

    @abstractmethod
    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole storage of a dense tensor as a detached uint8 tensor of one dimension, sharing its bytes."""

    @abstractmethod
    def witness(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that counts writes (`_version`) with a dense tensor, and holds none of its memory."""

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor of one dimension on the device, not initialised.

        Raises:
            torch.OutOfMemoryError: the device is full.
        """

    @abstractmethod
    def view(self, flat: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Return a tensor of the given geometry on the bytes of `flat`, which `empty` or `flat` returned."""

    @abstractmethod
    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a uint8 tensor of one dimension in host memory, page-locked if asked for, of exactly that size.

        Raises:
            RuntimeError: the memory can't be had, or not be locked.
        """

    @abstractmethod
    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy `source` on the device to `target` in host memory, once `after` has happened."""

    @abstractmethod
    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Copy `source` in host memory to `target` on the device, once `after` has happened."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the device has done everything it was told."""

    @abstractmethod
    def bytes_in_use(self) -> int:
        """Return the bytes of the device that tensors occupy now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes that were in use since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
