"""A parameter as the dense tensors that it consists of: itself, or those inside a quantized one.

Source: the flatten protocol of `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, by which torch takes
tensor subclasses apart and puts them together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of a tensor, in a fixed order."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()]
    return [part for _, inner in inner_tensors(tensor) for part in dense_parts(inner)]


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes: those of its parts, not of the matrix that a quantized one stands for."""
    return sum(part.nbytes for part in dense_parts(tensor))


def inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of which a tensor subclass consists, each with the name of its attribute."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    values = [(name, getattr(tensor, name)) for name in sorted(names)]  # some libraries name them in any order
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


def with_parts(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return a tensor like `tensor` that consists of other dense tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return next(parts)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    inner |= {name: with_parts(value, parts) for name, value in inner_tensors(tensor)}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def set_parts(parameter: torch.Tensor, parts: Iterator[torch.Tensor]) -> None:
    """Let a parameter consist of other dense tensors with the same values; it stays the same object."""
    if not hasattr(parameter, "__tensor_flatten__"):
        parameter.data = next(parts)
        return
    for name, inner in inner_tensors(parameter):
        if hasattr(inner, "__tensor_flatten__"):
            set_parts(inner, parts)
        else:
            setattr(parameter, name, next(parts))
