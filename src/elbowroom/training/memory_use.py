"""How much memory was in use at most."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes so far: of the accelerator's tensors, or, on the CPU, of the whole process."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return torch.accelerator.max_memory_allocated(device)
