"""What a block has not made itself: its parameters, its buffers, and its arguments. Offloading these frees nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elbowroom.memory.devices.base import Device
from elbowroom.memory.module_state import modules_of


class Outside:
    """The memory that a block was called with.

    Args:
        block: the block.
        arguments: of the call, as a tree.
    """

    def __init__(self, block: nn.Module, arguments: Any):
        self._block = block
        self._arguments = arguments
        self._storages: frozenset[int] | None = None

    def has(self, tensor: torch.Tensor, device: Device) -> bool:
        """Whether a tensor lies in memory that was there before the call."""
        if hasattr(tensor, "__tensor_flatten__"):  # a subclass that consists of other tensors
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]
            return bool(parts) and all(self.has(part, device) for part in parts)
        if not device.holds(tensor):
            return False
        if self._storages is None:  # most calls never get here
            self._storages = frozenset(device.storage(known)._cdata for known in self._tensors() if device.holds(known))
        return device.storage(tensor)._cdata in self._storages

    def _tensors(self) -> Iterable[torch.Tensor]:
        for module in modules_of(self._block):
            for held in (module._parameters, module._buffers):
                yield from (tensor for tensor in held.values() if tensor is not None)
        yield from (leaf for leaf in tree_leaves(self._arguments) if isinstance(leaf, torch.Tensor))
