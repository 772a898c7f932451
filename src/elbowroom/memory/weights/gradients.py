"""The way of a streamed parameter to the device, and of its gradient home, as autograd sees it.

Two functions stand between the parameter and the copy that the model computes with:

    parameter (host) → Departs (host) → Arrives (device) → the model

In the backward pass, the device's thread begins to copy the gradient home in `Arrives.backward` and goes on; the
thread of the host waits for the copy in `Departs.backward`. From there on everything is as for any parameter in host
memory: autograd adds what several uses contribute, accumulates into `.grad`, and calls the hooks of users, of DDP, and
of optimizers that step in the backward pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import Function

from elbowroom.memory.counters import Counters
from elbowroom.memory.devices.base import Device, Event, Geometry
from elbowroom.memory.devices.strided import strided_view
from elbowroom.memory.offload.staging import Staging

_AT_ONCE = 2**64 - 1
"""Of what is ready, autograd runs first what was made last, and accumulates into parameters before all else: that has
this number. A gradient that is whole leaves at once, too, and not when the whole block has been gone through."""


class GradientsHome:
    """Copies gradients from the device to host memory, at most a window of bytes at a time.

    Args:
        device: where gradients come from.
        window: bytes that may be on their way.
        counters: totals of the handle.
    """

    def __init__(self, device: Device, window: int, counters: Counters):
        self._device = device
        self._window = window
        self._counters = counters
        self._staging = None if device.in_host_memory else Staging(device, window)
        self._leaving: deque[tuple[torch.Tensor, Event]] = deque()
        self._bytes_leaving = 0
        self._lock = threading.Lock()

    def begin(self, gradient: torch.Tensor) -> GradientCopy:
        """Begin to copy a gradient home; returns at once."""
        assert self._staging is not None
        if self._device.storage(gradient).nbytes() > gradient.nbytes:
            gradient = gradient.clone()  # it is a part of something larger
        flat = self._device.flat(gradient)
        with self._lock:
            while self._leaving and (self._leaving[0][1].done() or self._over(flat.nbytes)):
                self._release_oldest()
            buffer = self._staging.take_at_once(flat.nbytes)
            event = self._device.copy_out(flat, buffer[: flat.nbytes])
            self._leaving.append((flat, event))
            self._bytes_leaving += flat.nbytes
            self._counters.gradient_bytes_out += flat.nbytes
            self._counters.gradient_window = max(self._counters.gradient_window, self._bytes_leaving)
        return GradientCopy(Geometry.of(gradient), buffer[: flat.nbytes], event, partial(self._arrived, buffer))

    def _arrived(self, buffer: torch.Tensor) -> None:
        """Take back the buffer of a copy that is done, and release what has left the device."""
        assert self._staging is not None
        self._staging.give(buffer, [])
        with self._lock:
            while self._leaving and self._leaving[0][1].done():
                self._release_oldest()

    def close(self) -> None:
        """Wait for all copies."""
        with self._lock:
            while self._leaving:
                self._release_oldest()
        if self._staging is not None:
            self._staging.close()

    def _over(self, nbytes: int) -> bool:
        return self._bytes_leaving + nbytes > self._window

    def _release_oldest(self) -> None:
        flat, event = self._leaving.popleft()
        event.hold_compute()  # its memory may be used for something else only after the copy
        self._bytes_leaving -= flat.nbytes


class GradientCopy:
    """A gradient on its way home.

    Args:
        geometry: of the gradient in its storage.
        buffer: host memory for the bytes of that storage.
        event: the end of the copy.
        give_back: what to do with the buffer afterwards.

    Attributes:
        tensor: the gradient in host memory, once the copy is done.
    """

    def __init__(self, geometry: Geometry, buffer: torch.Tensor, event: Event, give_back: Callable[[], None]):
        self._event = event
        self._give_back = give_back
        self.tensor = strided_view(buffer, geometry)

    def received(self) -> torch.Tensor:
        """Wait for the copy, and return the gradient in memory of its own."""
        self._event.wait()
        gradient = self.tensor.clone()
        self._give_back()
        return gradient


class _Trip:
    """What the two functions of one parameter in one call know of each other."""

    copy: GradientCopy | None = None


class Departs(Function):
    """The parameter leaves home. Runs backward in the thread of the host, where it receives the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _refuse_double_backward()
        copy, ctx.trip.copy = ctx.trip.copy, None
        return (gradient if copy is None else copy.received()), None


class Arrives(Function):
    """The parameter is on the device. Runs backward in the thread of the device, and sends the gradient home.

    Attributes:
        weight: what stands for the parameter where autograd saves it.
    """

    @staticmethod
    def forward(
        ctx: Any, departed: torch.Tensor, trip: _Trip, arrived: torch.Tensor, home: GradientsHome, weight: object
    ) -> torch.Tensor:
        ctx.trip = trip
        ctx.home = home
        ctx.weight = weight
        ctx.on_host = arrived.device == departed.device
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        _refuse_double_backward()
        if ctx.on_host:
            return gradient, None, None, None, None
        ctx.trip.copy = ctx.home.begin(gradient)
        return ctx.trip.copy.tensor, None, None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():  # autograd runs a backward pass so only where it is asked for a graph of it
        raise RuntimeError(
            "gradients of streamed weights that are trained can't be differentiated again (create_graph=True); leave "
            "weight_streaming out, or train an adapter"
        )


def arrived(parameter: torch.Tensor, on_device: torch.Tensor, home: GradientsHome, weight: object) -> torch.Tensor:
    """Return the copy of a parameter on the device as a result of the parameter.

    Args:
        parameter: at home, needs a gradient.
        on_device: its copy, without history.
        home: brings the gradient home.
        weight: what stands for the copy where autograd saves it.
    """
    trip = _Trip()
    result: Any = Arrives.apply(Departs.apply(parameter, trip), trip, on_device, home, weight)
    result.grad_fn._set_sequence_nr(_AT_ONCE)
    return result
