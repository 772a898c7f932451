"""Takes saved tensors off a device and brings them back: each storage once, within a window, ahead of use if wanted."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Collection

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from elbowroom.memory.counters import Counters
from elbowroom.memory.devices.base import Device, Geometry
from elbowroom.memory.devices.stopwatch import Stopwatch
from elbowroom.memory.forecast import Forecast, Orders
from elbowroom.memory.kept import Kept
from elbowroom.memory.offload.outside import Outside
from elbowroom.memory.offload.records import Ahead, Leaving, OffloadedSubclass, OffloadedTensor, Pass, Record, Restored
from elbowroom.memory.offload.stacked_store import over
from elbowroom.memory.offload.store import Store, StoreError
from elbowroom.memory.plan import OffloadSettings
from elbowroom.memory.scope_calls import Packed
from elbowroom.memory.sizes import in_bytes

DEFAULT_WINDOW = 256 << 20


class Offloader:
    """The offloaded tensors of one device.

    Args:
        device: where the tensors come from.
        store: where they go; the offloader closes it.
        settings: window, smallest size, whether to prefetch.
        counters: totals of the handle.

    Attributes:
        prefetch: reload ahead of use, where the order is known; may be changed at any time.
    """

    def __init__(self, device: Device, store: Store, settings: OffloadSettings, counters: Counters):
        self.device = device
        self.store = store
        self.prefetch = settings.prefetch is not False
        self._settings = settings
        self._window = DEFAULT_WINDOW if settings.window is None else settings.window
        self._counters = counters
        self._stopwatch = Stopwatch(counters.add_seconds)
        self._lock = threading.RLock()  # several threads may run backward
        self._orders = Orders()
        self._pass = Pass()
        self._leaving: deque[tuple[Leaving, weakref.ref[Record]]] = deque()
        self._bytes_leaving = 0
        self._bytes_ahead = 0
        self._ahead: weakref.WeakSet[Record] = weakref.WeakSet()
        self._warned = False
        # Filled by destructors, which may run at any moment in any thread, so nothing else may be done there.
        self._gone: deque[tuple[int, Ahead]] = deque()

    @property
    def description(self) -> str:
        """Where tensors go, and within which bounds; for people."""
        return f"{self.device.device}: {self.store.description}; window {in_bytes(self._window)} each way"

    def pack(self, tensor: torch.Tensor, scope: str, where: str, outside: Outside | None = None) -> Packed:
        """Return what stands for a saved tensor.

        Parameters, leaves that need a gradient, and views of them stay where they are, and so do tensors of other
        devices, sparse ones, those with few bytes, and what came from outside the block without needing a gradient:
        somebody else holds it. Of every other tensor the whole storage is copied, once: what lies in the storage
        besides the tensor can't be freed apart, and other views of it are often saved too.

        Args:
            tensor: as autograd saves it.
            scope: what its bytes are counted as.
            where: what saved it, for messages.
            outside: what the block has not made itself. None: everything that needs no gradient counts as that. (What
                custom functions and compiled code save needs none either, although the block has made it.)
        """
        if tensor.is_inference():  # it counts no writes, so it may change unnoticed; and somebody else holds it
            return Kept(tensor, where)
        root = tensor if tensor._base is None else tensor._base
        if isinstance(root, nn.Parameter) or (root.is_leaf and root.requires_grad):
            return Kept(tensor, where)
        if tensor.is_leaf and (outside is None or outside.has(tensor, self.device)):
            return Kept(tensor, where)
        return self._pack(tensor, scope, where)

    def learned(self) -> bool:
        """Whether the order in which the last pass was asked for is known."""
        with self._lock:
            self._learn()
            return self._orders.known(tuple(self._pass.sizes)) is not None

    def look(self) -> None:
        """Count the times of copies that have ended since."""
        with self._lock:
            self._stopwatch.look()

    def close(self) -> None:
        """Wait for all copies and release everything. Tensors that are still in the store are lost."""
        with self._lock:
            while self._leaving:
                self._release(self._leaving.popleft()[0])
            self._drop_gone(wait=True)
            self.store.close()

    def settle(self) -> None:
        """Let go of the device's memory that no graph needs any more; for the time between two steps."""
        with self._lock:
            needed = [(leaving, record) for leaving, record in self._leaving if record() is not None]
            for leaving, record in self._leaving:
                if record() is None:
                    self._release(leaving)
            self._leaving = deque(needed)
            self._drop_gone()

    def _pack(self, tensor: torch.Tensor, scope: str, where: str) -> Packed:
        if hasattr(tensor, "__tensor_flatten__"):
            return OffloadedSubclass(tensor, lambda part: self._pack(part, scope, where))
        if not self.device.holds(tensor):
            return Kept(tensor, where)
        storage = self.device.storage(tensor)
        nbytes = min(storage.nbytes(), tensor.nbytes)
        if nbytes == 0 or nbytes < self._settings.smallest:
            return Kept(tensor, where)
        with self._lock, torch.no_grad():
            record = self._record(tensor, storage, scope, where)
            if record is None:
                return Kept(tensor, where)
            record.handles += 1
            return OffloadedTensor(record, Geometry.of(tensor), self._unpack)

    def _record(self, tensor: torch.Tensor, storage: torch.UntypedStorage, scope: str, where: str) -> Record | None:
        """Return the record of a storage, beginning to copy it if there is none. None: there is no room."""
        if self._pass.order:
            self._learn()
            self._pass = Pass()
        key = (storage._cdata, tensor._version)
        known = self._pass.known.get(key)
        if known is not None and (record := known[1]()) is not None:
            self._counters.bytes_deduplicated += record.nbytes
            return record
        nbytes = storage.nbytes()
        self._drop_gone()
        self._make_room(nbytes)
        flat = self.device.flat(tensor)
        stored = self.store.save(flat)
        if stored is None:
            self._refused(nbytes, self.store.trouble or _at_its_limit(self.store))
            return None
        pass_ = self._pass
        leaving = Leaving(tensor.detach(), flat, stored.saved, nbytes)
        record = Record(pass_, leaving, self.device.witness(tensor), nbytes, stored, where, self._forget)
        pass_.sizes.append(nbytes)
        pass_.records.append(weakref.ref(record))
        pass_.known[key] = (StorageWeakRef(storage), weakref.ref(record))
        self._leaving.append((leaving, weakref.ref(record)))
        self._bytes_leaving += nbytes
        counters = self._counters
        counters.records += 1
        counters.bytes_offloaded[scope] += nbytes
        counters.window_out = max(counters.window_out, self._bytes_leaving)
        counters.store_peak = max(counters.store_peak, self.store.peak)
        counters.store_allocated = max(counters.store_allocated, self.store.allocated)
        return record

    # ---- out -----------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        """Let go of sources whose copies are done, and of more until `nbytes` fit into the window."""
        while self._leaving and (over(self._leaving[0][0].saved) or self._bytes_leaving + nbytes > self._window):
            self._release(self._leaving.popleft()[0])

    def _drop_read(self) -> None:
        """Let go of the newest sources that nobody needs any more: a backward pass reads the newest first."""
        while self._leaving and self._leaving[-1][1]() is None:
            self._release(self._leaving.pop()[0])

    def _release(self, leaving: Leaving) -> None:
        self._bytes_leaving -= leaving.nbytes
        try:
            # Its memory may be used for something else only after the copy; the device waits, not the program.
            self._stopwatch.hold_compute(leaving.saved)
        except StoreError as error:
            self._refused(leaving.nbytes, str(error))
            leaving.kept = True  # nobody else has its bytes
        leaving.release()

    def _refused(self, nbytes: int, why: str) -> None:
        self._counters.bytes_refused += nbytes
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"saved tensors that the store has no room for stay on {self.device.device}: {why}", stacklevel=2
            )

    # ---- back ----------------------------------------------------------------------------------------------------

    def _unpack(self, record: Record, geometry: Geometry) -> torch.Tensor:
        with self._lock, torch.no_grad():
            record.check()
            self._drop_read()
            if record.source is not None:  # still on the device, or there for good
                flat = self.device.flat(record.source)
                self._counters.reads_in_place += 1
                self._note(record)
            else:
                flat = self._restored(record)
            return self.device.view(flat, geometry)

    def _restored(self, record: Record) -> torch.Tensor:
        restored = record.restored
        if restored is None or restored.flat._version != restored.version:
            flat = self._reload(record)
            restored = record.restored = Restored(flat, flat._version)
        restored.readers += 1
        if restored.readers >= record.handles:
            record.restored = None  # whoever reads it again (retain_graph) has it reloaded
        return restored.flat

    def _reload(self, record: Record) -> torch.Tensor:
        counters = self._counters
        ahead = record.ahead
        if ahead is not None:
            record.ahead = None
            self._ahead.discard(record)
            self._bytes_ahead -= record.nbytes
            counters.prefetch_hits += 1
        else:
            counters.prefetch_waits += 1
            try:
                ahead = self._load(record)
            except torch.OutOfMemoryError:
                self._drop_ahead()  # what is there too early makes room for what is needed now
                ahead = self._load(record)
        self._note(record)
        self._stopwatch.hold_compute(ahead.event)
        return ahead.flat

    def _load(self, record: Record) -> Ahead:
        flat = self.device.empty(record.nbytes)
        event = self.store.load(record.stored, flat)
        self._counters.bytes_reloaded += record.nbytes
        return Ahead(flat, event)

    def _note(self, record: Record) -> None:
        """Learn what was asked for, and reload what will be asked for next."""
        pass_ = record.pass_
        if not pass_.order:
            order = self._orders.known(tuple(pass_.sizes))
            pass_.forecast = Forecast(order) if order is not None else None
        if record.number not in pass_.asked:
            pass_.asked.add(record.number)
            pass_.order.append(record.number)
        if pass_.forecast is None:
            return
        if pass_.forecast.asked_for(record.number):
            self._drop_passed_over(pass_, pass_.forecast)
        if self.prefetch:
            self._reload_ahead(pass_, pass_.forecast)

    def _reload_ahead(self, pass_: Pass, forecast: Forecast) -> None:
        for number in forecast.upcoming():
            record = pass_.records[number]()
            if record is None or record.source is not None or record.ahead or record.restored:
                continue
            if self._bytes_ahead and self._bytes_ahead + record.nbytes > self._window:
                return
            try:
                record.ahead = self._load(record)
            except torch.OutOfMemoryError:
                self._drop_ahead()
                return
            self._ahead.add(record)
            self._bytes_ahead += record.nbytes
            self._counters.window_in = max(self._counters.window_in, self._bytes_ahead)

    def _drop_ahead(self, kept: Collection[int] = (), of: Pass | None = None) -> None:
        """Let go of what was reloaded ahead of use, but for the records of one pass with the given numbers."""
        for record in list(self._ahead):
            if record.pass_ is of and record.number in kept:
                continue
            self._ahead.discard(record)
            if record.ahead is not None:
                self._stopwatch.hold_compute(record.ahead.event)  # its memory is used anew only after the copy into it
                record.ahead = None
                self._bytes_ahead -= record.nbytes

    def _drop_passed_over(self, pass_: Pass, forecast: Forecast) -> None:
        """The order has changed: what was expected by now may come much later, and must not fill the window."""
        self._drop_ahead(set(forecast.upcoming()), pass_)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _forget(self, record: Record) -> None:
        """Give up a record whose last handle is gone. Runs in its destructor."""
        self.store.free(record.stored)
        if over(record.leaving.saved):
            record.leaving.source = record.leaving.flat = None
        if record.ahead is not None:
            self._gone.append((record.nbytes, record.ahead))

    def _drop_gone(self, *, wait: bool = False) -> None:
        """Let go of memory into which something was reloaded that nobody asked for."""
        while self._gone:
            nbytes, ahead = self._gone.popleft()
            if wait:
                ahead.event.wait()
            self._stopwatch.hold_compute(ahead.event)
            self._bytes_ahead -= nbytes

    def _learn(self) -> None:
        if self._pass.order:
            self._orders.learn(tuple(self._pass.sizes), self._pass.order)


def _at_its_limit(store: Store) -> str:
    return f"it is full ({store.description}); activation_store_limit allows more"
