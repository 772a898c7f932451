"""A parameter as the dense tensors that it consists of: itself, or those inside a quantized one.

Source: the flatten protocol of `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, by which torch takes tensor
subclasses apart and puts them together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of a tensor, in a fixed order."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in dense_parts(getattr(tensor, name))]


def with_parts(tensor: torch.Tensor, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return a tensor like `tensor` that consists of other dense tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return next(parts)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: with_parts(getattr(tensor, name), parts) for name in names}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def set_parts(parameter: torch.Tensor, parts: Iterator[torch.Tensor]) -> None:
    """Let a parameter consist of other dense tensors with the same values; it stays the same object."""
    if not hasattr(parameter, "__tensor_flatten__"):
        parameter.data = next(parts)
        return
    names, _ = parameter.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(parameter, name)
        if hasattr(inner, "__tensor_flatten__"):
            set_parts(inner, parts)
        else:
            setattr(parameter, name, next(parts))
