"""An optimizer that steps each parameter in the backward pass, so that no full set of gradients ever exists."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


class BackwardSteps:
    """Steps each parameter as soon as its gradient is whole, and drops the gradient.

    The optimizer stays what it was, with its state, its parameter groups and its schedule; it is lent one parameter
    at a time. It must treat parameters one by one, as those of `torch.optim` do (LBFGS aside).
    Source: LOMO (https://arxiv.org/abs/2306.09782); PyTorch's tutorial "How to save memory by fusing the optimizer step
    into the backward pass".

    Args:
        optimizer: `step()` of it must not be called by others any more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._lock = threading.Lock()  # gradients of streamed weights arrive in another thread than those on the device
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._probing = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._whole, group))
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Drop gradients without a step, for a backward pass that must leave no trace."""
        self._probing = True
        try:
            yield
        finally:
            self._probing = False

    def stepped(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter was stepped since norms were taken last."""
        return parameter in self._norms

    def take_norm(self) -> torch.Tensor:
        """Return the norm of all gradients that were dropped since the last call, as a scalar."""
        norms = [
            self._norms[parameter]
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter in self._norms
        ]
        self._norms.clear()
        if not norms:
            return torch.tensor(0.0)
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    def remove(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def _whole(self, group: dict, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if not self._probing:
            with self._lock:
                self._norms[parameter] = torch.linalg.vector_norm(parameter.grad.detach())
                self._step(group, parameter)
        parameter.grad = None

    def _step(self, group: dict, parameter: nn.Parameter) -> None:
        """Step one parameter. Others may have a gradient by now, which is not looked at."""
        everything = [(each, each["params"]) for each in self._optimizer.param_groups]
        for each, _ in everything:
            each["params"] = [parameter] if each is group else []
        try:
            self._optimizer.step()
        finally:
            for each, parameters in everything:
                each["params"] = parameters
