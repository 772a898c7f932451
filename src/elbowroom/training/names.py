"""Names of parameters without the parts that wrappers add: what files are written with."""

from __future__ import annotations

import re

from torch import nn


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the unwrapped model.

    Removed are the parts that PEFT (`base_model.model.`, `.default` after `lora_A`), `torch.compile` (`_orig_mod`),
    DDP (`module.` in front), FSDP and torch's checkpoint wrapper add.
    """
    name = re.sub(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", "", name)
    name = re.sub(r"^(module\.|base_model\.model\.)+", "", name)
    return re.sub(r"\b(lora_\w+)\.default\b", r"\1", name)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by their plain names.

    Raises:
        ValueError: two parameters have the same plain name.
    """
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if plain_name(name) in found:
                raise ValueError(f"two trainable parameters are called {plain_name(name)!r} without their wrappers")
            found[plain_name(name)] = parameter
    return found
