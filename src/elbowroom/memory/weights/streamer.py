"""Streamed weights at work: modules see copies on the device for the time of a call, and autograd saves handles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elbowroom.memory.counters import Counters
from elbowroom.memory.devices.base import Device, Geometry
from elbowroom.memory.kept import Kept, check_version
from elbowroom.memory.module_state import HOME
from elbowroom.memory.offload.records import OffloadedSubclass
from elbowroom.memory.scope_calls import Pack, Packed
from elbowroom.memory.weights.arrivals import Arrival, Arrivals
from elbowroom.memory.weights.gradients import GradientsHome, arrived
from elbowroom.memory.weights.homes import Homes
from elbowroom.memory.weights.parts import inner_tensors, with_parts
from elbowroom.memory.weights.rest import Rest
from elbowroom.memory.weights.units import Unit


class Streamer:
    """The streamed weights of one model, on one device.

    Args:
        device: where the model computes.
        homes: where the weights live.
        units: what is streamed together.
        window: bytes of weights on the device at one time; as many for gradients on their way home.
        counters: totals of the handle.
        rest: everything else of the model.
        closed: called in the end.
    """

    def __init__(
        self,
        device: Device,
        homes: Homes,
        units: list[Unit],
        window: int,
        counters: Counters,
        rest: Rest,
        closed: Callable[[], None] = lambda: None,
    ):
        self.units = units
        self.device = device.device
        self._device = device
        self._homes = homes
        self._rest = rest
        self._closed = closed
        self._counters = counters
        self._arrivals = Arrivals(device, homes, units, window, counters, self._begin_pass)
        self._gradients = GradientsHome(device, window, counters)
        self._used: dict[int, Arrival] = {}
        self._depths: dict[int, int] = {}

    def visiting(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` of a unit's module as a call during which its weights are on the device.

        Args:
            number: of the unit; by the time of the call, another one may have taken its place (`renew`).
            forward: what is called.
        """

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Visit(self, self.units[number]):
                return forward(*args, **kwargs)

        return call

    def first(self, pack: Pack) -> Pack:
        """Return a pack hook that saves handles of weights, and leaves other tensors to `pack`."""

        def pack_weights_first(tensor: torch.Tensor) -> Packed:
            handle = self.handle_of(tensor)
            return pack(tensor) if handle is None else handle

        return pack_weights_first

    def handle_of(self, tensor: torch.Tensor) -> Packed | None:
        """Return a handle if a tensor is (part of) a copy of a weight, or such a copy in the dtype of autocast."""
        if hasattr(tensor, "__tensor_flatten__"):
            if any(self.handle_of(inner) is not None for _, inner in inner_tensors(tensor)):
                return OffloadedSubclass(tensor, lambda part: self.handle_of(part) or Kept(part, "a quantized weight"))
            return None
        if not self._device.holds(tensor):
            return None
        found = self._arrivals.of(tensor)
        if found is not None:
            unit, start = found
            geometry = Geometry.of(tensor)
            return _Weight(self, unit, geometry.moved_to(geometry.start - start))
        return self._cast_handle(tensor)

    def read(self, unit: Unit, geometry: Geometry) -> torch.Tensor:
        """Return a view of a unit's copy on the device, fetching it if need be.

        Args:
            unit: the unit.
            geometry: of the view; its offset counts from the unit's first byte.
        """
        if self.units[unit.number] is not unit:
            raise RuntimeError(f"the weights of {unit.name!r} were replaced between the forward and the backward pass")
        arrival = self._arrivals.use(unit, backward=True)
        with torch.no_grad():
            start = arrival.starts[unit.number] + geometry.start
            return self._device.view(arrival.flat, geometry.moved_to(start))

    def renew(self, name: str) -> None:
        """Bring home the weights that a module has now, in the place of those that it had; between two passes.

        Args:
            name: of the module, or of one that holds it.
        """
        replaced = [unit for unit in self.units if f"{unit.name}.".startswith(f"{name}.")]
        self._arrivals.clear()
        fresh = [unit.renewed() for unit in replaced]
        for unit in replaced:
            self._homes.leave(unit)
        self._homes.take_in(fresh)
        for unit in fresh:
            self._counters.weights_streamed += unit.nbytes - self.units[unit.number].nbytes
            self.units[unit.number] = unit
        self._rest.renew(self.units)

    def look(self) -> None:
        """Count the times of copies that have ended since."""
        self._arrivals.look()

    def close(self) -> None:
        """Give up all copies, and put everything back where it was. Graphs that were built before still work."""
        self._arrivals.clear()
        self._gradients.close()
        self._homes.close()
        self.look()
        self._homes.give_back()
        self._rest.give_back()
        self._closed()

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Have all of the model in host memory, for what needs weights and adapters together: merging, say."""
        self._arrivals.clear()
        self._rest.move(torch.device("cpu"))
        try:
            yield
        finally:
            self._rest.move(self.device)

    def _begin_pass(self) -> None:
        self._homes.refresh()
        self._rest.move(self.device)  # an adapter that was added since lies where its weights are

    def _cast_handle(self, tensor: torch.Tensor) -> Packed | None:
        root = tensor if tensor._base is None else tensor._base
        cast = root.grad_fn
        if cast is None or cast.name() != "ToCopyBackward0":
            return None
        source: Any = cast.next_functions[0][0]
        weight = getattr(source, "weight", None)
        if not isinstance(weight, _Weight):
            return None
        return _CastWeight(weight, root.dtype, Geometry.of(tensor), self._device)

    def enter(self, unit: Unit) -> None:
        """Let the modules of a unit see copies of its weights on the device."""
        depth = self._depths.get(unit.number, 0)
        if depth == 0:
            for holder in unit.holders:
                if holder.module._parameters.get(holder.name) is not unit.parameters[holder.number]:
                    raise RuntimeError(
                        f"{holder.name!r} in {unit.name!r} was replaced after `apply`, which streams the one before; "
                        "replace parameters before `apply`, or after `handle.remove()`"
                    )
            arrival = self._arrivals.use(unit, backward=_in_backward())
            copies = self._copies(unit, arrival)
            self._arrivals.hold(arrival)
            self._used[unit.number] = arrival
            for holder in unit.holders:
                holder.module._parameters[holder.name] = copies[holder.number]  # type: ignore[assignment]
        self._depths[unit.number] = depth + 1  # a module may call itself

    def leave(self, unit: Unit) -> None:
        """Let the modules of a unit see their own weights again."""
        self._depths[unit.number] -= 1
        if self._depths[unit.number]:
            return
        for holder in unit.holders:
            holder.module._parameters[holder.name] = unit.parameters[holder.number]
        arrival = self._used.pop(unit.number)
        self._arrivals.let_go(arrival)
        if arrival.flat._version != arrival.version:
            raise RuntimeError(
                f"{unit.name!r} writes into its weights while it is called, which streamed weights can't take home; "
                "leave it out of weight_streaming"
            )

    def _copies(self, unit: Unit, arrival: Arrival) -> list[torch.Tensor]:
        """Return what stands for each parameter of a unit during a call."""
        start = arrival.starts[unit.number]
        views: dict[int, list[torch.Tensor]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for part in unit.parts:
                views.setdefault(part.parameter, []).append(self._device.view(arrival.flat, part.at(start)))
            copies = [with_parts(parameter, iter(views[number])) for number, parameter in enumerate(unit.parameters)]
        for number, parameter in enumerate(unit.parameters):
            if parameter.requires_grad and torch.is_grad_enabled():
                weight = self.handle_of(copies[number])
                copies[number] = arrived(parameter, copies[number], self._gradients, weight)
            setattr(copies[number], HOME, parameter)
        return copies


class _Visit:
    """The time of a call during which a unit's weights are on the device."""

    __slots__ = ("_streamer", "_unit")

    def __init__(self, streamer: Streamer, unit: Unit):
        self._streamer = streamer
        self._unit = unit

    def __enter__(self) -> None:
        self._streamer.enter(self._unit)

    def __exit__(self, *_: object) -> None:
        self._streamer.leave(self._unit)


class _Weight(Packed):
    """A saved tensor that is (a view of) a streamed weight: it is not kept, but fetched again."""

    __slots__ = ("_parameter", "_streamer", "_version", "geometry", "unit")

    def __init__(self, streamer: Streamer, unit: Unit, geometry: Geometry):
        self._streamer = streamer
        self.unit = unit
        self.geometry = geometry
        self._parameter = unit.parameters[unit.part_at(geometry.start).parameter]
        self._version = self._parameter._version

    @property
    def intact(self) -> bool:
        return self._parameter._version == self._version

    def unpack(self) -> torch.Tensor:
        check_version(self._parameter._version, self._version, f"the weight of {self.unit.name!r}")
        return self._streamer.read(self.unit, self.geometry)


class _CastWeight(Packed):
    """A saved tensor that is (a view of) a streamed weight in another dtype, as autocast makes one for each use."""

    __slots__ = ("_device", "_dtype", "_geometry", "_weight")

    def __init__(self, weight: _Weight, dtype: torch.dtype, geometry: Geometry, device: Device):
        self._weight = weight
        self._dtype = dtype
        self._geometry = geometry
        self._device = device

    @property
    def intact(self) -> bool:
        return self._weight.intact

    def unpack(self) -> torch.Tensor:
        with torch.no_grad():
            cast = self._weight.unpack().to(self._dtype)
            return self._device.view(self._device.flat(cast), self._geometry)


def _in_backward() -> bool:
    """Whether a backward pass is running in this thread: then a call is part of a replay."""
    return torch._C._current_graph_task_id() != -1
