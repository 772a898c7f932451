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
from typing import Any

import torch
from torch.autograd.function import Function, once_differentiable

from elbowroom.memory.counters import Counters
from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.offload.staging import Staging


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
        gradient = gradient.contiguous()
        if self._device.storage(gradient).nbytes() != gradient.nbytes:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        with self._lock:
            while self._leaving and (self._leaving[0][1].done() or self._over(gradient.nbytes)):
                self._release_oldest()
            buffer = self._staging.take_at_once(gradient.nbytes)
            event = self._device.copy_out(self._device.flat(gradient), buffer[: gradient.nbytes])
            self._leaving.append((gradient, event))
            self._bytes_leaving += gradient.nbytes
            self._counters.gradient_bytes_out += gradient.nbytes
            self._counters.gradient_window = max(self._counters.gradient_window, self._bytes_leaving)
        return GradientCopy(gradient, buffer, event, self._staging)

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
        gradient, event = self._leaving.popleft()
        event.hold_compute()  # its memory may be used for something else only after the copy
        self._bytes_leaving -= gradient.nbytes


class GradientCopy:
    """A gradient on its way home.

    Attributes:
        tensor: the gradient in host memory, once the copy is done.
    """

    def __init__(self, gradient: torch.Tensor, buffer: torch.Tensor, event: Event, staging: Staging):
        self._buffer = buffer
        self._event = event
        self._staging = staging
        self.tensor = buffer[: gradient.nbytes].view(gradient.dtype).view(gradient.size())

    def received(self) -> torch.Tensor:
        """Wait for the copy, and return the gradient in memory of its own."""
        self._event.wait()
        gradient = self.tensor.clone()
        self._staging.give(self._buffer, [])
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
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
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
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.on_host:
            return gradient, None, None, None, None
        ctx.trip.copy = ctx.home.begin(gradient)
        return ctx.trip.copy.tensor, None, None, None, None


def arrived(parameter: torch.Tensor, on_device: torch.Tensor, home: GradientsHome, weight: object) -> torch.Tensor:
    """Return the copy of a parameter on the device as a result of the parameter.

    Args:
        parameter: at home, needs a gradient.
        on_device: its copy, without history.
        home: brings the gradient home.
        weight: what stands for the copy where autograd saves it.
    """
    trip = _Trip()
    return Arrives.apply(Departs.apply(parameter, trip), trip, on_device, home, weight)  # type: ignore[return-value]
