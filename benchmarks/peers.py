"""Ways of others to train with less memory, put on a model of ours and taken off again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def blocks_of(model: Any) -> list[nn.Module]:
    return [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]


@contextmanager
def torch_checkpoint(model: Any, **options: Any) -> Iterator[None]:
    """`torch.utils.checkpoint` around each block."""
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks_of(model):
            del block.forward


@contextmanager
def diffusers_checkpointing(model: Any) -> Iterator[None]:
    model.enable_gradient_checkpointing()
    try:
        yield
    finally:
        model.disable_gradient_checkpointing()


def save_kernel(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if "scaled_dot_product" in str(operation):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class SaveAttention:
    """A policy that saves what autograd saves of an attention module's computations, and what the module returns.

    Which of its operations these are is found out once, in an untouched run. It counts the operations inside each
    attention module, in the forward pass and in the recomputation alike.

    Attributes:
        wanted: the numbers of these operations, for each attention module.
    """

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]):
        self._model = model
        self.wanted = _saved_operations(model, inputs)

    @contextmanager
    def ready(self) -> Iterator[None]:
        position: dict[str, Any] = {"module": None, "count": 0}
        hooks = []
        for name, module in _attention_modules(self._model):

            def enter(_: Any, __: Any, name: str = name) -> None:
                position.update(module=name, count=0)

            def leave(_: Any, __: Any, ___: Any) -> None:
                position.update(module=None)

            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if position["module"] is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = position["count"]
            position["count"] += 1
            saved = number in self.wanted[position["module"]]
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        try:
            with torch_checkpoint(
                self._model, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _attention_modules(model: Any) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in ("attn", "attn2")]


def _saved_operations(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, set[int]]:
    """Return, for each attention module, the numbers of its operations whose results autograd saves or it returns."""
    made: dict[str, dict[int, int]] = {}
    wanted: dict[str, set[int]] = {}
    current: list[str | None] = [None]
    alive: list[torch.Tensor] = []

    class Numbers(TorchDispatchMode):
        def __init__(self, name: str):
            super().__init__()
            self.name, self.count = name, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in SAC_IGNORED_OPS:  # policies are not asked about these
                return result
            given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(result):
                alive.append(tensor)  # so that no address is used twice
                address = tensor.untyped_storage()._cdata
                if func._schema.is_mutable or address not in given:  # a view makes nothing
                    made[self.name][address] = self.count
            self.count += 1
            return result

    def note(name: str, tensor: torch.Tensor) -> None:
        number = made[name].get(tensor.untyped_storage()._cdata)
        if number is not None:
            wanted[name].add(number)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if current[0] is not None:
            note(current[0], tensor)
        return tensor.detach()

    attention = _attention_modules(model)
    for name, module in attention:
        made[name], wanted[name] = {}, set()

        def forward(*args: Any, _name: str = name, _original: Any = module.forward, **kwargs: Any) -> Any:
            current[0] = _name
            with Numbers(_name):
                result = _original(*args, **kwargs)
            current[0] = None
            for tensor in _tensors(result):
                note(_name, tensor)
            return result

        module.forward = forward
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    for _, module in attention:
        del module.forward
    return wanted


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
