"""Opening the store that a plan asks for, on the device at hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

from elbowroom.memory.devices.base import Device
from elbowroom.memory.host_memory import default_limit, return_freed_memory
from elbowroom.memory.offload.disk_store import DiskStore, check_folder
from elbowroom.memory.offload.host_store import HostStore
from elbowroom.memory.offload.store import Store
from elbowroom.memory.plan import OffloadSettings, StoreKind

_OLD_NAME = "gradient_checkpointing_offload_pin_memory_max_buckets"


def store_kind(settings: OffloadSettings, *, on_cpu: bool) -> StoreKind:
    """Return the kind of store: what the settings say, else pinned memory, or the disk for the CPU.

    Args:
        settings: of the plan.
        on_cpu: the tensors are in host memory.

    Raises:
        ValueError: an offload that would free nothing, or a folder for a store that has no files.
    """
    kind: StoreKind = settings.store or ("disk" if on_cpu else "pinned")
    if on_cpu and kind != "disk":
        raise ValueError(
            f"activation_store: {kind!r} is host memory, and the model is on the CPU, so its activations are there "
            "already; use 'disk'" + (f" ({_OLD_NAME}=0 means pageable)" if kind == "pageable" else "")
        )
    if settings.path is not None and kind != "disk":
        raise ValueError(
            f"activation_store_path: has no effect, for the store is {kind!r}, which is host memory; set "
            "activation_store to 'disk'"
        )
    return kind


def check_store(settings: OffloadSettings, *, on_cpu: bool) -> None:
    """Raise what `open_store` would raise, without a device.

    Raises:
        ValueError, OSError: see there.
    """
    if store_kind(settings, on_cpu=on_cpu) == "disk":
        check_folder(_folder(settings))


def open_store(device: Device, settings: OffloadSettings) -> Store:
    """Return an empty store.

    Raises:
        ValueError: see `store_kind`.
        OSError: the folder of a disk store can't be made or written to.
    """
    kind = store_kind(settings, on_cpu=device.in_host_memory)
    folder = _folder(settings)
    limit = settings.limit if settings.limit is not None else default_limit(kind, folder)
    if device.in_host_memory:
        return_freed_memory()  # else the process would hardly get smaller
    if kind == "disk":
        return DiskStore(device, folder, limit=limit)
    return HostStore(device, pinned=kind == "pinned", limit=limit)


def _folder(settings: OffloadSettings) -> Path:
    return Path(settings.path or tempfile.gettempdir())
