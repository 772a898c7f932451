"""How much memory was in use at most, and whether it was too little."""

from __future__ import annotations

import resource
import sys

import torch

from elbowroom.options.definition import Options


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


def what_needs_less(options: Options) -> str:
    """Return what a run could change to need less memory, the cheapest first; what it does already is left out."""
    controls = options.controls()
    measures = {
        "gradient_checkpointing": not controls.gradient_checkpointing,
        "activation_offload=all": not controls.offloads,
        "weight_streaming=100%": not controls.streams_weights,
        "ramtorch_text_encoder and ramtorch_vae (while pictures and captions are encoded)": not (
            controls.ramtorch_text_encoder and controls.ramtorch_vae
        ),
        "base_model_precision=int8-torchao": options.training_type == "lora" and options.base_model_precision is None,
        "optimizer_in_backward": options.training_type == "full" and not options.optimizer_in_backward,
        "precision=bf16": options.precision != "bf16",
        "training_type=lora": options.training_type != "lora",
        "a smaller batch": options.batch > 1,
        "a lower resolution": True,
    }
    possible = [measure for measure, helps in measures.items() if helps]
    return ", ".join(possible[:-1]) + " or " * (len(possible) > 1) + possible[-1]
