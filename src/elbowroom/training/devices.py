"""Where a computation runs."""

from __future__ import annotations

import torch


def device_named(name: str) -> torch.device:
    """Return the device that a user names; `auto` is the accelerator that torch finds, else the CPU.

    Raises:
        ValueError: this machine does not have it.
    """
    available = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return available or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device; use auto, cpu, cuda, cuda:1, mps or xpu") from None
    if device.type != "cpu":
        if available is None or available.type != device.type:
            raise ValueError(f"device {name}: this torch finds {available or 'no accelerator'}; use auto or cpu")
        if (device.index or 0) >= torch.accelerator.device_count():
            raise ValueError(
                f"device {name}: there are only {torch.accelerator.device_count()} of them, counted from 0"
            )
    return device


def make_current(device: torch.device) -> None:
    """Make `device` the one that torch means where no number is given: for its random state, memory and streams."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
