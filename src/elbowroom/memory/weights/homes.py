"""Where streamed weights live between visits: in slabs of host memory, or in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.devices.strided import strided_view
from elbowroom.memory.weights.parts import dense_parts, set_parts
from elbowroom.memory.weights.units import Unit

SLAB = 256 << 20
"""Bytes of host memory that are taken at a time: so much more than the weights themselves is needed while they move."""


class Homes(ABC):
    """The home of some units' weights. The parameters lie there, so whatever reads or writes them is right."""

    @abstractmethod
    def take_in(self, units: Sequence[Unit]) -> None:
        """Move the weights of units here. Each parameter stays the same object.

        Raises:
            RuntimeError, OSError: there is no room.
        """

    @abstractmethod
    def leave(self, unit: Unit) -> None:
        """Forget a unit, whose parameters nobody has any more. No copy of it is under way."""

    def refresh(self) -> None:  # noqa: B027
        """Notice what was written into the parameters since the last pass, where that is not in their home already."""

    @abstractmethod
    def joined(self, one: Unit, other: Unit) -> bool:
        """Whether `other` lies right behind `one`, so that one copy can take both."""

    @abstractmethod
    def load(self, units: Sequence[Unit], target: torch.Tensor) -> Event:
        """Begin to copy the bytes of joined units to the device."""

    @abstractmethod
    def give_back(self) -> None:
        """Move the weights to where they were before, in memory of their own. Earlier graphs still find them here."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies. The weights stay where they are."""


class HostHomes(Homes):
    """Host memory, page-locked if asked for. Units that are used one after another lie one behind another.

    Args:
        device: where the weights visit.
        pinned: page-lock the memory, so that copies run beside the device's computations.
    """

    def __init__(self, device: Device, *, pinned: bool):
        self._device = device
        self._pinned = pinned
        self._units: list[Unit] = []
        self._places: dict[int, tuple[torch.Tensor, int]] = {}

    def take_in(self, units: Sequence[Unit]) -> None:
        for group in _slabs(units):
            slab = self._device.host_memory(sum(unit.nbytes for unit in group), pinned=self._pinned)
            start = 0
            for unit in group:
                self._places[unit.number] = (slab, start)
                move(unit, slab, start)
                self._units.append(unit)
                start += unit.nbytes

    def leave(self, unit: Unit) -> None:
        self._units.remove(unit)
        del self._places[unit.number]

    def refresh(self) -> None:
        for unit in self._units:
            check_at_home(unit)

    def joined(self, one: Unit, other: Unit) -> bool:
        slab, start = self._places[one.number]
        other_slab, other_start = self._places[other.number]
        return slab is other_slab and start + one.nbytes == other_start

    def load(self, units: Sequence[Unit], target: torch.Tensor) -> Event:
        slab, start = self._places[units[0].number]
        return self._device.copy_in(slab[start : start + target.nbytes], target)

    def give_back(self) -> None:
        for unit in self._units:
            move_out(unit)

    def close(self) -> None:
        self._device.synchronize()


def _slabs(units: Sequence[Unit]) -> list[list[Unit]]:
    slabs: list[list[Unit]] = []
    nbytes = 0
    for unit in units:
        if not slabs or nbytes + unit.nbytes > SLAB:
            slabs.append([])
            nbytes = 0
        slabs[-1].append(unit)
        nbytes += unit.nbytes
    return slabs


def move(unit: Unit, memory: torch.Tensor, start: int = 0) -> None:
    """Copy the weights of a unit into memory of the host, and let the parameters lie there.

    Args:
        unit: its parameters are moved one at a time.
        memory: a whole storage as bytes.
        start: first byte of the unit there.
    """
    parts = iter(unit.parts)
    unit.addresses = []
    for parameter in unit.parameters:
        tensors = []
        for tensor in dense_parts(parameter):
            view = strided_view(memory, next(parts).at(start))
            view.copy_(tensor)
            tensors.append(view)
        set_parts(parameter, iter(tensors))
        unit.addresses += [tensor.data_ptr() for tensor in tensors]


def move_out(unit: Unit) -> None:
    """Undo `move`: let the parameters of a unit lie in memory of their own, on the device where they were."""
    for parameter in unit.parameters:
        set_parts(parameter, iter([part.to(unit.origin, copy=True) for part in dense_parts(parameter)]))


def check_at_home(unit: Unit) -> None:
    """Raise `RuntimeError` if a parameter lies elsewhere than where `move` has put it."""
    if [tensor.data_ptr() for parameter in unit.parameters for tensor in dense_parts(parameter)] != unit.addresses:
        raise RuntimeError(
            f"weights of {unit.name!r} were moved after `apply`, and are streamed from where they were; call "
            "`handle.remove()` first (to move the model to a device, pass it to `apply` as `device`)"
        )
