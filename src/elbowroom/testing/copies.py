"""Copies of a simulated accelerator: they complete late, in an adversarial order, and show what depends on luck."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.memory.devices.base import CopySeconds

POISON = 0xFF
"""Every byte of memory that a copy has not written yet: NaN in each floating-point format."""


class Bytes:
    """A range of memory that is not kept alive by knowing it, as a copy engine knows no more than an address."""

    def __init__(self, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.storage = storage._cdata
        self.start = int(tensor.storage_offset())
        self.end = self.start + tensor.nbytes
        self._reference = StorageWeakRef(storage)

    def tensor(self) -> torch.Tensor | None:
        """Return the memory, or None if it was released."""
        if self._reference.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage)[self.start : self.end]

    def overlaps(self, other: Bytes) -> bool:
        return self.storage == other.storage and self.start < other.end and other.start < self.end


@dataclass(eq=False)
class Copy:
    """A copy that was asked for; also the event of its end.

    Attributes:
        name: for messages.
        source, target: where from and to.
        after: what has to happen first.
        queue: where it waits.
        complete: the bytes are there.
        seen: somebody has waited for it, so its target may be used.
    """

    name: str
    source: Bytes
    target: Bytes
    after: Sequence[Copy]
    queue: Copies
    complete: bool = False
    seen: bool = False

    def done(self) -> bool:
        if not self.complete and self.queue.lucky():
            self.queue.run(self)
        self.seen = self.seen or self.complete
        return self.complete

    def wait(self) -> None:
        self.queue.run(self)
        self.seen = True

    def hold_compute(self) -> None:
        self.wait()  # the simulated device computes in the calling thread

    def seconds(self) -> CopySeconds:
        return CopySeconds(0, 0)  # copies end when the adversary wants


@dataclass
class Copies:
    """All copies of a device that are not complete, and an adversary who decides which of them runs when.

    Attributes:
        seed: of the adversary's choices.
        late: False completes each copy at once, to tell a wrong copy from a wrong order.
        violations: what would be undefined on real hardware.
    """

    seed: int
    late: bool = True
    violations: list[str] = field(default_factory=list)
    _waiting: list[Copy] = field(default_factory=list)
    _unseen: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.RLock()  # the threads of a store wait for copies too

    def ask(self, name: str, source: torch.Tensor, target: torch.Tensor, after: Sequence[Copy]) -> Copy:
        """Queue a copy; its target is poisoned until it runs."""
        copy = Copy(f"{name} of {source.nbytes} bytes", Bytes(source), Bytes(target), tuple(after), self)
        with self._lock:
            # What an earlier copy still has to read there stays.
            if not any(copy.target.overlaps(other.source) for other in self._waiting):
                target.fill_(POISON)
            self._waiting.append(copy)
            self._unseen.append(copy)
        if not self.late:
            self.run(copy)
        return copy

    def lucky(self) -> bool:
        return self._random.random() < 0.3

    def tick(self) -> None:
        """Let the adversary run some copy that may run: called with every operation of the device."""
        with self._lock:
            self._run_some()

    def _run_some(self) -> None:
        ready = [copy for copy in self._waiting if all(before.complete for before in copy.after)]
        if ready and self.lucky():
            self.run(self._random.choice(ready))

    def run(self, copy: Copy) -> None:
        """Complete a copy, and what it has to wait for before."""
        with self._lock:
            self._run(copy)

    def _run(self, copy: Copy) -> None:
        if copy.complete:
            return
        for before in copy.after:
            self._run(before)
        copy.complete = True
        self._waiting.remove(copy)
        for other in self._waiting:
            self._check_order(copy, other)
        source, target = copy.source.tensor(), copy.target.tensor()
        if target is None:
            self.violations.append(f"the target of a {copy.name} was released before the copy was done")
            return
        if source is None:
            self.violations.append(f"the source of a {copy.name} was released before the copy was done")
            return  # the target keeps its poison
        target.copy_(source)

    def check_use(self, storages: set[int]) -> None:
        """Note a device operation that uses the target of a copy for which nobody has waited."""
        with self._lock:
            self._unseen = [copy for copy in self._unseen if not copy.seen]
            unseen = list(self._unseen)
        for copy in unseen:
            if copy.target.storage in storages and copy.target.tensor() is not None:
                self.violations.append(f"the target of a {copy.name} is used before the copy was waited for")

    def _check_order(self, copy: Copy, other: Copy) -> None:
        """Note a copy that may run at the same time, or before, and touches the same memory."""
        if self._comes_before(copy, other):
            return  # `other` waits for this one
        if (
            copy.source.overlaps(other.target)
            or copy.target.overlaps(other.target)
            or copy.target.overlaps(other.source)
        ):
            self.violations.append(f"a {copy.name} and a {other.name} touch the same memory in no order")

    @staticmethod
    def _comes_before(copy: Copy, other: Copy) -> bool:
        waiting: list[Copy] = list(other.after)
        while waiting:
            before = waiting.pop()
            if before is copy:
                return True
            waiting += before.after
        return False
