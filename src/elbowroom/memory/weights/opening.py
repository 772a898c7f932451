"""Setting up the streaming that a plan asks for, on the device at hand."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from elbowroom.memory.blocks import unwrap
from elbowroom.memory.counters import Counters
from elbowroom.memory.devices import device_for
from elbowroom.memory.devices.base import Device
from elbowroom.memory.host_memory import return_freed_memory
from elbowroom.memory.module_state import modules_of
from elbowroom.memory.plan import Plan, StoreKind, WeightSettings
from elbowroom.memory.weights.disk_homes import DiskHomes
from elbowroom.memory.weights.distributed import leave_to_us, refuse_sharded
from elbowroom.memory.weights.homes import Homes, HostHomes
from elbowroom.memory.weights.rest import Rest
from elbowroom.memory.weights.selection import has_frozen
from elbowroom.memory.weights.streamer import Streamer
from elbowroom.memory.weights.units import Unit, find_units

DEFAULT_WINDOW = 256 << 20


def weight_store_kind(settings: WeightSettings, *, on_cpu: bool) -> StoreKind:
    """Return the kind of store: what the settings say, else pinned memory, or the disk for the CPU.

    Args:
        settings: of the plan.
        on_cpu: the model computes on the CPU.

    Raises:
        ValueError: streaming that would free nothing, or a folder for a store that has no files.
    """
    kind: StoreKind = settings.store or ("disk" if on_cpu else "pinned")
    if on_cpu and kind != "disk":
        raise ValueError(
            f"weight_store: {kind!r} is host memory, and the model computes on the CPU, so its weights are there "
            "already; use 'disk', or have it compute elsewhere (in the library, `apply(model, plan, device=…)`)"
        )
    if settings.path is not None and kind != "disk":
        raise ValueError(f"weight_store_path: has no effect, for the store is {kind!r}; set weight_store to 'disk'")
    return kind


def open_streamer(model: nn.Module, plan: Plan, device: torch.device | None, counters: Counters) -> Streamer:
    """Take the weights that a plan streams to their home, and everything else to the device.

    Args:
        model: the model, by itself or wrapped by PEFT.
        plan: names what is streamed.
        device: where the model computes; None for where it is.
        counters: totals of the handle.

    Raises:
        ValueError: the store makes no sense on this device.
        RuntimeError, OSError: the store has no room, FSDP shards the weights, or processes have other values.
    """
    base = unwrap(model)
    target = device_for(device or _present_device(base))
    kind = weight_store_kind(plan.weights, on_cpu=target.in_host_memory)
    units, tied = find_units(base, plan.streamed, trainable=not has_frozen(base))
    refuse_sharded([parameter for unit in units for parameter in unit.parameters])
    counters.weights_tied += sum(tied.values())
    counters.weights_streamed += sum(unit.nbytes for unit in units)
    window = plan.weights.window or default_window(units)
    homes = _homes(kind, target, plan.weights, window)
    if target.in_host_memory:
        return_freed_memory()  # else the process would hardly get smaller
    undo = leave_to_us(model, units)
    homes.take_in(units)
    rest = Rest(base, units)
    rest.move(target.device)
    return Streamer(target, homes, units, window, counters, rest, closed=undo)


def default_window(units: list[Unit]) -> int:
    """Return a window in which two units have room, one in use and one on its way."""
    return max(DEFAULT_WINDOW, 2 * max((unit.nbytes for unit in units), default=0))


def _homes(kind: StoreKind, device: Device, settings: WeightSettings, window: int) -> Homes:
    if kind == "disk":
        return DiskHomes(device, Path(settings.path or tempfile.gettempdir()), staging=window)
    return HostHomes(device, pinned=kind == "pinned")


def _present_device(base: nn.Module) -> torch.device:
    devices = {
        parameter.device
        for module in modules_of(base)
        for parameter in module._parameters.values()
        if parameter is not None and parameter.device.type not in ("cpu", "meta")
    }
    return devices.pop() if devices else torch.device("cpu")
