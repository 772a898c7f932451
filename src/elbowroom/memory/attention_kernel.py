"""The attention kernel as a scope of its own: softmax(Q Kᵀ) V, without the projections around it.

The kernel's time grows with the square of the sequence, and its result has one hidden state's size. Kept inside a
recomputed block, it costs little memory and never runs twice, while the projections, which are cheap, do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from elbowroom.memory.kept import Kept
from elbowroom.memory.scope_calls import ActiveBlocks, Pack, Packed, ScopeCall


class KeptKernel(ScopeCall):
    """The kernel calls of one attention module; what they save is kept, besides their arguments.

    Attributes:
        called: the attention has called it.
    """

    def __init__(self, attention: str, module: nn.Module):
        self.name = f"the kernel of {attention}"
        self.module = module
        self.original = scaled_dot_product_attention
        self.called = False

    @property
    def pack(self) -> Pack:
        return self._keep

    def _keep(self, tensor: torch.Tensor) -> Packed:
        return Kept(tensor, self.name)


def with_kept_kernel(forward: Callable[..., Any], kernel: KeptKernel, active: ActiveBlocks) -> Callable[..., Any]:
    """Return `forward` of an attention module with its kernel calls given to the block that is active.

    It raises `RuntimeError` in its first call if it calls no kernel.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if active.current is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _KernelCalls(kernel, active):
            result = forward(*args, **kwargs)
        if not kernel.called:
            raise RuntimeError(
                f"gradient_checkpointing_keep_attention=kernel has no effect: {kernel.name} is not seen to call "
                "torch's scaled_dot_product_attention (nn.MultiheadAttention hides it, others have a kernel of their "
                "own); set it to true, which keeps all that attention saves"
            )
        return result

    return call


class _KernelCalls(TorchFunctionMode):
    """Sees the functions of torch that are called inside, and takes the attention kernel out of them."""

    def __init__(self, kernel: KeptKernel, active: ActiveBlocks):
        super().__init__()
        self._kernel = kernel
        self._active = active

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        block = self._active.current
        if func is scaled_dot_product_attention and block is not None:
            self._kernel.called = True
            return block.call(self._kernel, args, kwargs or {})
        return func(*args, **(kwargs or {}))
