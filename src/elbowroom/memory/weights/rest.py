"""What is not streamed of a model: it lies on the device, together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elbowroom.memory.module_state import modules_of
from elbowroom.memory.weights.units import Unit


class Rest:
    """All parameters and buffers of a model but the streamed ones.

    Args:
        base: the unwrapped model.
        units: what is streamed.
    """

    def __init__(self, base: nn.Module, units: Sequence[Unit]):
        self._base = base
        self.renew(units)
        places = {tensor.device for tensor in self._tensors()}
        self._origin = places.pop() if len(places) == 1 else None

    def renew(self, units: Sequence[Unit]) -> None:
        """Note what is streamed now."""
        self._holders = [
            (holder.module, holder.name, unit.parameters[holder.number]) for unit in units for holder in unit.holders
        ]
        self._streamed = {id(parameter) for unit in units for parameter in unit.parameters}

    def move(self, device: torch.device) -> None:
        """Move what lies elsewhere to a device; cheap if nothing does."""
        if all(tensor.device.type == device.type for tensor in self._tensors()):
            return
        for module, name, parameter in self._holders:
            if module._parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"{name!r} of a {type(module).__name__} was replaced after `apply`, which streams the one before; "
                    "replace parameters before `apply`, or after `handle.remove()`"
                )
        for module, name, _ in self._holders:
            module._parameters[name] = None  # in its place: the order of names stays
        try:
            self._base.to(device)
        finally:
            for module, name, parameter in self._holders:
                module._parameters[name] = parameter

    def give_back(self) -> None:
        """Move everything to where it was in the beginning, if that was one place."""
        if self._origin is not None:
            self.move(self._origin)

    def _tensors(self) -> list[torch.Tensor]:
        return [
            tensor
            for module in modules_of(self._base)
            for held in (module._parameters, module._buffers)
            for tensor in held.values()
            if tensor is not None and id(tensor) not in self._streamed
        ]
