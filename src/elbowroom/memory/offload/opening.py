"""Opening the store that a plan asks for, on the device at hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

from elbowroom.memory.devices.base import Device
from elbowroom.memory.offload.disk_store import DiskStore
from elbowroom.memory.offload.host_memory import default_limit
from elbowroom.memory.offload.host_store import HostStore
from elbowroom.memory.offload.store import Store
from elbowroom.memory.plan import OffloadSettings, StoreKind


def store_kind(device: Device, settings: OffloadSettings) -> StoreKind:
    """Return the kind of store: what the settings say, else pinned memory, or the disk for the CPU.

    Raises:
        ValueError: host memory is asked for, and the tensors are there already.
    """
    if settings.store is None:
        return "disk" if device.in_host_memory else "pinned"
    if device.in_host_memory and settings.store != "disk":
        raise ValueError(
            f"activation_store: {settings.store!r} is host memory, and the model is on the CPU, so its activations are "
            "there already; use 'disk'"
        )
    return settings.store


def open_store(device: Device, settings: OffloadSettings) -> Store:
    """Return an empty store.

    Raises:
        ValueError: see `store_kind`.
        OSError: the folder of a disk store can't be made or written to.
    """
    kind = store_kind(device, settings)
    folder = Path(settings.path or tempfile.gettempdir())
    limit = settings.limit if settings.limit is not None else default_limit(kind, folder)
    if kind == "disk":
        return DiskStore(device, folder, limit=limit)
    return HostStore(device, pinned=kind == "pinned", limit=limit)
