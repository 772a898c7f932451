"""Copies of streamed weights on the device: fetched before use, within a window, and given up in the right order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from elbowroom.memory.counters import Counters
from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.devices.stopwatch import Stopwatch
from elbowroom.memory.forecast import NEVER, Forecast, Orders
from elbowroom.memory.weights.homes import Homes
from elbowroom.memory.weights.units import Unit

BATCH = 32 << 20
"""Small layers are fetched together, up to so many bytes and a quarter of the window: each copy has its price."""


_NO_BACKWARD = -1
"""What torch calls the backward pass of a thread in which none is running."""


class Arrival:
    """One or more units on the device, or on their way there.

    Attributes:
        flat: their bytes.
        event: the end of the copy.
        starts: first byte of each unit, by its number.
        version: count of writes into the copy: nobody may write into it.
        users: calls of modules that are using it right now.
        awaited: the device's computations wait for the copy.
        last_use: when it was asked for, as a number that grows.
    """

    __slots__ = ("awaited", "event", "flat", "last_use", "starts", "users", "version")

    def __init__(self, flat: torch.Tensor, event: Event, units: Sequence[Unit]):
        self.flat = flat
        self.event = event
        self.starts: dict[int, int] = {}
        start = 0
        for unit in units:
            self.starts[unit.number] = start
            start += unit.nbytes
        self.version = flat._version
        self.users = 0
        self.awaited = False
        self.last_use = 0


class Arrivals:
    """The units that are on the device.

    The order of use is learned in one pass and known in the next, so it is known which unit is used next, and which
    last: fetched is what comes next, given up what comes last (Belady 1966, "A study of replacement algorithms for a
    virtual-storage computer"). So a layer that the forward pass leaves behind and the backward pass needs next stays.
    In a pass of which nothing is known, units are fetched on demand, and the least recently used is given up.

    A pass is a forward pass, with the backward passes that follow before the next one begins. No copy outlives its
    pass: between two passes anything may write into the weights (an optimizer, merging an adapter), unseen. What is not
    used any more in a pass whose order is known is given up at once, and everything at the end of a backward pass, so
    that the device has room for what comes in between.

    Args:
        device: where they are.
        homes: where they come from.
        units: all units.
        window: most bytes of all copies, if a single unit does not need more.
        counters: totals of the handle.
        begun: called when a pass begins.
    """

    def __init__(
        self,
        device: Device,
        homes: Homes,
        units: Sequence[Unit],
        window: int,
        counters: Counters,
        begun: Callable[[], None],
    ):
        self._device = device
        self._homes = homes
        self._units = units
        self._window = window
        self._counters = counters
        self._stopwatch = Stopwatch(counters.add_weight_seconds)
        self._begun = begun
        self._lock = threading.RLock()  # several threads may run backward
        self._by_unit: dict[int, Arrival] = {}
        self._by_storage: dict[int, Arrival] = {}
        self._nbytes = 0
        self._orders = Orders()
        self._order: list[int] = []
        self._kind: tuple[bool, int] | None = None
        self._entered: set[int] = set()
        self._in_backward = False
        self._backward: int | None = None  # the one at whose end copies are given up
        self._forecast: Forecast | None = None
        self._clock = 0

    def use(self, unit: Unit, *, backward: bool) -> Arrival:
        """Return a unit on the device, for computations that are issued from now on.

        Args:
            unit: what is needed.
            backward: it is needed by a backward pass, for itself or for a replay.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        saving = torch.is_grad_enabled()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            repeated = self._follow(unit, backward, saving)
            if backward:
                self._clear_at_the_end_of_backward()
            arrival = self._by_unit.get(unit.number)
            counters = self._counters
            if arrival is None:
                counters.weight_waits += 1
                arrival = self._fetch_now(unit)
            elif not repeated:
                counters.weight_hits += 1
            self._clock += 1
            arrival.last_use = self._clock
            arrival.users += 1  # what is fetched ahead must not take its place
            try:
                self._fetch_ahead()
            finally:
                arrival.users -= 1
            if not arrival.awaited:
                self._await(arrival)
            return arrival

    def of(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Return the unit in whose copy a dense tensor of the device lies, and the first byte of the unit there."""
        with self._lock:
            arrival = self._by_storage.get(self._device.storage(tensor)._cdata)
            if arrival is None:
                return None
            byte = int(tensor.storage_offset()) * tensor.dtype.itemsize
            number = max((start, number) for number, start in arrival.starts.items() if start <= byte)[1]
            return self._units[number], arrival.starts[number]

    def clear(self) -> None:
        """Give up all copies that no call is using."""
        with self._lock:
            for arrival in set(self._by_unit.values()):
                if arrival.users == 0:
                    self._give_up(arrival)

    def hold(self, arrival: Arrival) -> None:
        """Keep a copy on the device for the time of a call."""
        with self._lock:
            arrival.users += 1

    def let_go(self, arrival: Arrival) -> None:
        """End what `hold` began. In a forward pass the copy is given up if that was its last use."""
        with self._lock:
            arrival.users -= 1
            if not self._in_backward:  # else the operations of the call that is replayed are still to come
                self._give_up_if_finished(arrival)

    def look(self) -> None:
        """Count the times of copies that have ended since."""
        with self._lock:
            self._stopwatch.look()

    # ---- passes ------------------------------------------------------------------------------------------------------

    def _follow(self, unit: Unit, backward: bool, saving: bool) -> bool:
        """Note a use in the order of the pass; True if it is a further use by the same call or operation."""
        if not backward:
            kind = (saving, unit.number)
            goes_on = self._kind is not None and self._kind[0] == kind[0] and not self._in_backward
            if not goes_on or unit.number in self._entered:
                self._begin(kind)
            self._entered.add(unit.number)
        self._in_backward = backward
        repeated = bool(self._order) and self._order[-1] == unit.number and backward
        if not repeated:
            before = self._by_unit.get(self._order[-1]) if self._order else None
            self._order.append(unit.number)
            if self._forecast is not None:
                self._forecast.asked_for(unit.number)
            if before is not None and unit.number not in before.starts:
                self._give_up_if_finished(before)
        return repeated

    def _clear_at_the_end_of_backward(self) -> None:
        current = torch._C._current_graph_task_id()
        if current not in (self._backward, _NO_BACKWARD):
            self._backward = current
            # As DDP and FSDP do: called once, when this backward pass has ended.
            torch.autograd.Variable._execution_engine.queue_callback(self.clear)  # type: ignore[attr-defined]

    def _begin(self, kind: tuple[bool, int]) -> None:
        if self._kind is not None:
            self._orders.learn(self._kind, self._order)
        self.clear()
        self._begun()
        self._kind, self._order, self._entered = kind, [], set()
        order = self._orders.known(kind)
        self._forecast = Forecast(order) if order is not None else None

    # ---- fetching and giving up --------------------------------------------------------------------------------------

    def _fetch_now(self, unit: Unit) -> Arrival:
        self._make_room(unit.nbytes)
        try:
            return self._fetch([unit])
        except torch.OutOfMemoryError:
            self.clear()  # what is there too early makes room for what is needed now
            return self._fetch([unit])

    def _make_room(self, nbytes: int) -> None:
        """Give up copies until so many bytes have room in the window, or none is left that nobody uses."""
        while self._nbytes + nbytes > self._window and (victim := self._victim()) is not None:
            self._give_up(victim)

    def _fetch_ahead(self) -> None:
        if self._forecast is None:
            return
        batch = min(BATCH, self._window // 4)
        waiting: list[Unit] = []
        nbytes = 0
        for number in self._forecast.upcoming():
            unit = self._units[number]
            if number in self._by_unit or unit in waiting:
                continue
            if not self._room_for(nbytes + unit.nbytes, self._forecast.next_use(number)):
                break
            waiting.append(unit)
            nbytes += unit.nbytes
        else:
            batch = 0  # nothing more will come to fill it
        if not waiting or (nbytes < batch and self._nbytes > self._window // 2):
            return
        try:
            for group in self._joined(waiting):
                self._fetch(group)
        except torch.OutOfMemoryError:
            return  # it is fetched when it is needed

    def _room_for(self, nbytes: int, wanted_at: int) -> bool:
        """Make room in the window by giving up what is used later than `wanted_at`; False if that does not do."""
        while self._nbytes + nbytes > self._window:
            victim = self._victim()
            if victim is None or self._next_use(victim) <= wanted_at:
                return False
            self._give_up(victim)
        return True

    def _joined(self, units: Sequence[Unit]) -> list[list[Unit]]:
        groups: list[list[Unit]] = []
        for unit in sorted(units, key=lambda each: each.number):
            together = groups and self._homes.joined(groups[-1][-1], unit)
            if together and sum(each.nbytes for each in groups[-1]) + unit.nbytes <= BATCH:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        # What is needed first is fetched first.
        order = {unit.number: place for place, unit in enumerate(units)}
        return sorted(groups, key=lambda group: min(order[unit.number] for unit in group))

    def _fetch(self, units: Sequence[Unit]) -> Arrival:
        nbytes = sum(unit.nbytes for unit in units)
        flat = self._device.empty(nbytes)
        arrival = Arrival(flat, self._homes.load(units, flat), units)
        for unit in units:
            self._by_unit[unit.number] = arrival
        self._by_storage[self._device.storage(flat)._cdata] = arrival
        self._nbytes += nbytes
        counters = self._counters
        counters.weight_bytes_in += nbytes
        counters.weight_fetches += 1
        counters.weight_window = max(counters.weight_window, self._nbytes)
        return arrival

    def _victim(self) -> Arrival | None:
        """Return the copy that is used last of all, of those that no call is using."""
        unused = [arrival for arrival in set(self._by_unit.values()) if arrival.users == 0]
        return max(unused, key=lambda arrival: (self._next_use(arrival), -arrival.last_use), default=None)

    def _next_use(self, arrival: Arrival) -> int:
        forecast = self._forecast
        return NEVER if forecast is None else min(forecast.next_use(number) for number in arrival.starts)

    def _give_up_if_finished(self, arrival: Arrival) -> None:
        """Give up a copy that the rest of the pass has no use for, as far as is known."""
        if self._forecast is not None and arrival.users == 0 and self._next_use(arrival) == NEVER:
            self._give_up(arrival)

    def _give_up(self, arrival: Arrival) -> None:
        if not arrival.awaited:
            self._await(arrival)  # its memory is used anew only after the copy into it
        for number in arrival.starts:
            del self._by_unit[number]
        del self._by_storage[self._device.storage(arrival.flat)._cdata]
        self._nbytes -= arrival.flat.nbytes

    def _await(self, arrival: Arrival) -> None:
        self._stopwatch.hold_compute(arrival.event)
        arrival.awaited = True
