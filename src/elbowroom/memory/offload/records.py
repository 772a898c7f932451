"""One offloaded storage, and the light handles that autograd holds instead of the tensors that lay in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.memory.devices.base import Event, Geometry
from elbowroom.memory.forecast import Forecast
from elbowroom.memory.kept import check_version
from elbowroom.memory.offload.store import Stored
from elbowroom.memory.scope_calls import Packed


@dataclass(eq=False)
class Pass:
    """What was packed between two phases of reading: the records of one forward pass, or of several.

    Attributes:
        sizes: bytes of each record: what tells this kind of pass from others.
        records: in the order in which they were made.
        known: the record of a storage, by its address and the version of the tensor. The weak reference to the storage
            is there so that no other storage gets its address when it dies.
        order: numbers of the records in the order in which they were first asked for.
        asked: the same, to look them up.
        forecast: the order of the last pass of this kind.
    """

    sizes: list[int] = field(default_factory=list)
    records: list[weakref.ref[Record]] = field(default_factory=list)
    known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Record]]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    forecast: Forecast | None = None


class Record:
    """The bytes of one storage, as they were when a tensor in it was saved.

    First the source itself has them; when the copy to the store is done, only the store; and when the backward pass
    asks, a copy on the device again, which all handles share until each has read it. The handles own the record: when
    the last of them is gone, so is the record's room in the store.

    Attributes:
        pass_: the pass in which it was made.
        number: its place there.
        nbytes: size of the storage.
        where: what saved it, for messages.
        stored: its bytes in the store.
        leaving: the copy to the store; it has the source until it is done.
        ahead: the bytes on the device, reloaded before anybody asked.
        restored: the bytes on the device, until all handles have read them.
    """

    def __init__(
        self,
        pass_: Pass,
        leaving: Leaving,
        witness: torch.Tensor,
        nbytes: int,
        stored: Stored,
        where: str,
        gone: Callable[[Record], None],
    ):
        self.pass_ = pass_
        self.number = len(pass_.records)
        self.nbytes = nbytes
        self.where = where
        self.stored = stored
        self.leaving = leaving
        self.ahead: Ahead | None = None
        self.restored: Restored | None = None
        self.handles = 0
        self._witness = witness
        self._version = witness._version
        self._gone = gone

    def __del__(self) -> None:
        self._gone(self)

    @property
    def source(self) -> torch.Tensor | None:
        """An alias of the tensor that is copied, until the copy is done."""
        return self.leaving.source

    @property
    def intact(self) -> bool:
        return self._witness._version == self._version

    def check(self) -> None:
        """Raise as autograd would if the tensor was written to, whether its copy was done or not."""
        check_version(self._witness._version, self._version, self.where)


@dataclass(slots=True, eq=False)
class Leaving:
    """A copy out of the device. Both tensors keep the memory that is copied alive; None when it may go."""

    source: torch.Tensor | None
    flat: torch.Tensor | None
    saved: Event
    nbytes: int
    kept: bool = False

    def release(self) -> None:
        """Let go of the memory, unless the copy has failed and nobody else has the bytes."""
        if not self.kept:
            self.source = self.flat = None


@dataclass(slots=True)
class Ahead:
    """Bytes on their way back to the device, or there already."""

    flat: torch.Tensor
    event: Event


@dataclass(slots=True)
class Restored:
    """Bytes that are back on the device.

    Attributes:
        flat: the storage.
        version: its count of writes; a reader that writes into what it gets spoils it for the others.
        readers: handles that have read it.
    """

    flat: torch.Tensor
    version: int
    readers: int = 0


class OffloadedTensor(Packed):
    """A saved tensor in a record: the geometry of one view."""

    __slots__ = ("_geometry", "_record", "_restore")

    def __init__(self, record: Record, geometry: Geometry, restore: Callable[[Record, Geometry], torch.Tensor]):
        self._record = record
        self._geometry = geometry
        self._restore = restore

    @property
    def intact(self) -> bool:
        return self._record.intact

    def unpack(self) -> torch.Tensor:
        return self._restore(self._record, self._geometry)


class OffloadedSubclass(Packed):
    """A saved tensor that consists of other tensors: quantized weights, sharded tensors.

    Source: the flatten protocol of `torch.utils._python_dispatch.is_traceable_wrapper_subclass`.
    """

    __slots__ = ("_class", "_context", "_opaque", "_parts", "_size", "_stride")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Packed]):
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self._class: Any = type(tensor)
        values = {name: getattr(tensor, name) for name in names}
        # Some are no tensors: the mesh of devices on which a DTensor lies.
        self._parts = {name: pack(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._opaque = {name: value for name, value in values.items() if name not in self._parts}
        self._size, self._stride = tensor.size(), tensor.stride()

    @property
    def intact(self) -> bool:
        return all(packed.intact for packed in self._parts.values())

    def unpack(self) -> torch.Tensor:
        inner = {name: packed.unpack() for name, packed in self._parts.items()} | self._opaque
        return self._class.__tensor_unflatten__(inner, self._context, self._size, self._stride).detach()
