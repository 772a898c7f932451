"""The device seam: what the engine asks of a device, for the CPU, accelerators, and simulated ones."""

from __future__ import annotations

import torch

from elbowroom.memory.devices.accelerator import Accelerator
from elbowroom.memory.devices.base import Device, Event, Geometry
from elbowroom.memory.devices.cpu import Cpu
from elbowroom.memory.host_memory import free_host_bytes

__all__ = ["Accelerator", "Cpu", "Device", "Event", "Geometry", "device_for", "free_device_bytes"]


def device_for(device: torch.device) -> Device:
    """Return the implementation for a device.

    The torch module of a device type may bring its own, as a function `elbowroom_device(device)`: that is how the
    simulated accelerator of `elbowroom.testing` comes in.
    """
    if device.type == "cpu":
        return Cpu()
    own = getattr(torch.get_device_module(device), "elbowroom_device", None)
    return own(device) if own is not None else Accelerator(device)


def free_device_bytes(device: torch.device | None = None) -> int:
    """Return the bytes that are free on a device; None is this machine's accelerator, or the CPU if there is none."""
    device = device or torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type == "cpu":
        return free_host_bytes()
    free, _ = torch.get_device_module(device).mem_get_info()
    return free
