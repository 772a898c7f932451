"""How much memory was in use at most, and whether it was too little."""

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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, of the accelerator or of the machine, was not enough."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The allocator for the CPU has no error class of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
