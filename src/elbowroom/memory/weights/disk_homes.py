"""Streamed weights in files: those that the model was loaded from, or files without a name."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from elbowroom.memory.devices.base import Device, Event
from elbowroom.memory.devices.cpu import FutureEvent
from elbowroom.memory.offload.file_bytes import read_all
from elbowroom.memory.offload.staging import StagedLoad, Staging
from elbowroom.memory.weights.homes import Homes, check_at_home, move, move_out
from elbowroom.memory.weights.mapped import FileBytes, OpenFile, forget_mapping, mapped_from, written_to
from elbowroom.memory.weights.units import Unit

READERS = 4


class DiskHomes(Homes):
    """Weights in files, read by worker threads.

    Weights that `map_weights` has mapped stay in their file, and are never loaded as a whole. Others move to a file
    without a name, to which the parameters are mapped: what writes into them writes into the file.

    Args:
        device: where the weights visit.
        folder: where files are made.
        staging: bytes of host memory for what is on its way to an accelerator.
    """

    def __init__(self, device: Device, folder: Path, *, staging: int):
        self._device = device
        self._folder = folder
        self._mapped: list[Unit] = []
        self._moved: list[Unit] = []
        self._pieces: dict[int, list[tuple[int, FileBytes]]] = {}
        self._readers = ThreadPoolExecutor(READERS, "elbowroom-weights")
        self._staging = None if device.in_host_memory else Staging(device, staging)
        weakref.finalize(self, self._readers.shutdown, wait=False)

    def take_in(self, units: Sequence[Unit]) -> None:
        for unit in units:
            places = [mapped_from(parameter) for parameter in unit.parameters]
            if len(places) == len(unit.parts) and None not in places:
                self._mapped.append(unit)
                self._pieces[unit.number] = [
                    (part.start, place) for part, place in zip(unit.parts, places, strict=True) if place is not None
                ]
            else:
                self._move(unit)

    def leave(self, unit: Unit) -> None:
        for units in (self._mapped, self._moved):
            if unit in units:
                units.remove(unit)
        del self._pieces[unit.number]

    def refresh(self) -> None:
        for unit in self._moved:
            check_at_home(unit)
        flags = iter(written_to(parameter for unit in self._mapped for parameter in unit.parameters))
        for unit in list(self._mapped):
            if any([next(flags) for _ in unit.parameters]):
                self._mapped.remove(unit)
                self._move(unit)  # merging an adapter, say; the model's own files are never written to

    def joined(self, one: Unit, other: Unit) -> bool:
        return False  # they are read by different threads

    def load(self, units: Sequence[Unit], target: torch.Tensor) -> Event:
        (unit,) = units
        read = partial(_read, self._pieces[unit.number])
        if self._staging is None:
            return FutureEvent(self._readers, read, target)
        return StagedLoad(self._device, self._staging, self._readers, read, target)

    def give_back(self) -> None:
        for unit in self._moved:
            move_out(unit)

    def close(self) -> None:
        self._readers.submit(lambda: None).result()
        if self._staging is not None:
            self._staging.close()

    def _move(self, unit: Unit) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="elbowroom-") as file:
            os.posix_fallocate(file.fileno(), 0, unit.nbytes)
            storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=unit.nbytes)
            opened = OpenFile(Path(file.name))
        forget_mapping(unit.parameters)
        move(unit, torch.empty(0, dtype=torch.uint8).set_(storage))  # type: ignore[call-overload]
        self._pieces[unit.number] = [(0, FileBytes(opened, 0, unit.nbytes))]
        self._moved.append(unit)


def _read(pieces: Sequence[tuple[int, FileBytes]], target: torch.Tensor) -> None:
    for start, place in pieces:
        read_all(place.file.descriptor, target[start : start + place.nbytes], place.offset)
