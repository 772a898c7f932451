"""A frozen weight in few bits, in the place of an ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from elbowroom.memory.weights.parts import dense_parts, with_parts
from elbowroom.quantization.formats import Format

_SAME_VALUES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class QuantizedWeight(torch.Tensor):
    """The weight of a linear layer in few bits; it has the shape and dtype of the matrix that it stands for.

    The layer stays as it is: `torch.nn.functional.linear` sees the weight and dequantizes it for the moment of each
    product. What autograd saves is the weight itself, and never the dequantized matrix, which would take more memory
    than a model that is not quantized. (Libraries whose tensors take part in ordinary products save that matrix.)

    It flattens into the tensors of its payload, so that whatever moves tensors, such as streaming, finds them.

    Args:
        payload: what the format has made of the matrix; may hold tensors of a library's own kind.
        format: how to make a matrix of it.
        size: of the matrix: (out features, in features).
        dtype: of the matrix.
    """

    format: Format
    names: tuple[str, ...]

    @staticmethod
    def __new__(
        cls, payload: Mapping[str, torch.Tensor], format: Format, size: torch.Size, dtype: torch.dtype
    ) -> QuantizedWeight:
        device = next(iter(payload.values())).device
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)  # type: ignore[attr-defined]

    def __init__(
        self, payload: Mapping[str, torch.Tensor], format: Format, size: torch.Size, dtype: torch.dtype
    ) -> None:
        self.format = format
        self.names = tuple(payload)
        for name, tensor in payload.items():
            setattr(self, f"payload_{name}", tensor)

    @property
    def payload(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, f"payload_{name}") for name in self.names}

    def dequantize(self) -> torch.Tensor:
        """Return the matrix."""
        kind = self.device.type
        # Some formats multiply matrices themselves, which autocast would round.
        exact = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with torch.no_grad(), exact:
            return self.format.dequantize(self.payload, self.size(), self.dtype)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> QuantizedWeight:
        """Return a weight like this one, of which each dense tensor is changed, say moved."""
        changed = iter([change(part) for part in dense_parts(self)])
        payload = {name: with_parts(getattr(self, f"payload_{name}"), changed) for name in sorted(self.names)}
        return QuantizedWeight(payload, self.format, self.size(), dtype or self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            twin = self.each(torch.clone)
            memo[id(self)] = nn.Parameter(twin, requires_grad=False) if isinstance(self, nn.Parameter) else twin
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"QuantizedWeight({tuple(self.size())}, {self.format}, {self.dtype}, {self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [f"payload_{name}" for name in self.names], (self.format, self.names, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], context: Any, size: Any, _: Any) -> QuantizedWeight:
        format, names, dtype = context
        return QuantizedWeight({name: inner[f"payload_{name}"] for name in names}, format, size, dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first: Any = args[0] if args else None
        if func in _SAME_VALUES:
            return first.each(torch.detach)
        if func is torch.ops.aten.clone.default:
            return first.each(torch.clone)
        if func is torch.ops.aten._to_copy.default:
            place = {name: kwargs[name] for name in ("device", "non_blocking") if kwargs.get(name) is not None}
            return first.each(lambda part: part.to(**place, copy=True), kwargs.get("dtype"))
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} would write into a quantized weight, which is frozen")
        return func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.dequantize() if isinstance(value, QuantizedWeight) else value


def _linear(input: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, QuantizedWeight):
        raise TypeError("a quantized weight can only be the weight of a linear layer")
    return _Linear.apply(input, weight, bias)  # type: ignore[return-value]


class _Linear(Function):
    """`torch.nn.functional.linear` with a weight that is dequantized on the way there and on the way back."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        kind = input.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else torch.promote_types(input.dtype, weight.dtype)
        ctx.save_for_backward(weight)
        ctx.dtype, ctx.input_dtype = dtype, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        return functional.linear(input.to(dtype), weight.dequantize().to(dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = torch.matmul(gradient, weight.dequantize().to(ctx.dtype)).to(ctx.input_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        return of_input, None, of_bias
