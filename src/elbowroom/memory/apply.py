"""Install a plan on a model, and take it off again. All state lives in the handle that `apply` returns."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elbowroom.memory.blocks import refuse_nested, unwrap
from elbowroom.memory.counters import Counters, Report
from elbowroom.memory.plan import BlockPlan, Plan
from elbowroom.memory.segments import SegmentRun


class Handle:
    """A plan at work on one model. `report()` tells what it did; `remove()` leaves the model as it was."""

    def __init__(self, plan: Plan, modules: Sequence[nn.Module], *, check_determinism: bool):
        self.plan = plan
        self._counters = Counters()
        self._check_determinism = check_determinism
        self._thread = threading.local()  # forward passes in several threads have their own open segment
        self._installed = [
            _BlockForward(self, module, block, position)
            for position, (module, block) in enumerate(zip(modules, plan.blocks, strict=True))
            if block.segment is not None
        ]
        for forward in self._installed:
            forward.install()

    def report(self) -> Report:
        """Return the plan and the totals so far, as a copy that does not change any more."""
        return Report(self.plan, replace(self._counters))

    def remove(self) -> None:
        """Take the plan off; the model is as it was before `apply`. Calling it again does nothing.

        A backward pass through a graph that was built before still works.
        """
        while self._installed:
            self._installed[-1].uninstall()
            self._installed.pop()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _call(self, forward: _BlockForward, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward.original(*args, **kwargs)
        run = self._segment_for(forward)
        try:
            result, stays_open = run.record(forward.block.name, forward.module, forward.original, args, kwargs)
        except BaseException:
            self._close()
            raise
        if not stays_open:
            self._close()
        return result

    def _segment_for(self, forward: _BlockForward) -> SegmentRun:
        """Return the open segment if the block goes on with it, else a new one."""
        number = forward.block.segment
        assert number is not None
        run = self._open()
        if run is None or run.number != number or run.last_block >= forward.position:
            run = SegmentRun(number, self._counters, _accelerator_of(forward.module), self._check_determinism)
            self._counters.segments += 1
            # Weak: the graph's slots own the segment, so that nothing of it outlives the backward pass.
            self._thread.open = weakref.ref(run)
        run.last_block = forward.position
        return run

    def _open(self) -> SegmentRun | None:
        reference = getattr(self._thread, "open", None)
        return reference() if reference is not None else None

    def _close(self) -> None:
        self._thread.open = None


class _BlockForward:
    """Takes the place of one block's `forward`, on that instance only."""

    def __init__(self, handle: Handle, module: nn.Module, block: BlockPlan, position: int):
        self.handle = handle
        self.module = module
        self.block = block
        self.position = position
        self.original: Callable[..., Any] = module.forward
        # A block that is compiled for the forward pass only would save other tensors than its replay does.
        self._call: Callable[..., Any] = torch.compiler.disable(handle._call)
        self._had_own_forward = "forward" in module.__dict__
        functools.update_wrapper(self, self.original)  # tools that look at the signature see the block's own

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            raise RuntimeError(
                f"the forward of block {self.block.name!r} was replaced after `apply`; undo that first, then remove"
            )
        if self._had_own_forward:
            self.module.__dict__["forward"] = self.original
        else:
            del self.module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copies and pickles of the model are plain models: they must not call the blocks of this one."""
        if self._had_own_forward:
            return _same, (self.original,)
        return getattr, (self.module, "forward")


def apply(model: nn.Module, plan: Plan, *, check_determinism: bool = False) -> Handle:
    """Install `plan` on this model instance.

    Args:
        model: the model that the plan was made for, by itself or wrapped by PEFT; its code is not changed.
        plan: from `schedule`, `Plan.from_json`, or made by hand.
        check_determinism: in every replay, compare all recomputed tensors bit for bit with the originals (by digests)
            and raise if they differ. Slow; finds blocks that draw from Python's, NumPy's or a private generator, whose
            state is not restored.

    Raises:
        ValueError: the plan names a block that the model does not have.
        RuntimeError: a plan is applied already, or the model's own checkpointing is switched on.
    """
    base = unwrap(model)
    modules = dict(base.named_modules())
    names = [block.name for block in plan.blocks]
    missing = [name for name in names if name not in modules]
    if missing:
        raise ValueError(f"the plan names blocks that {type(base).__name__} does not have: {', '.join(missing)}")
    refuse_nested(names)
    _refuse_own_checkpointing(base)
    for block in plan.blocks:
        _refuse_second_plan(block, modules[block.name])
    return Handle(plan, [modules[name] for name in names], check_determinism=check_determinism)


def _refuse_own_checkpointing(base: nn.Module) -> None:
    for name, module in base.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            where = f" (in {name!r})" if name else ""
            raise RuntimeError(
                f"the model's own gradient checkpointing is switched on{where}; switch it off with "
                "`model.disable_gradient_checkpointing()`"
            )


def _refuse_second_plan(block: BlockPlan, module: nn.Module) -> None:
    if isinstance(module.__dict__.get("forward"), _BlockForward):
        raise RuntimeError(f"a plan is applied to block {block.name!r} already; call `handle.remove()` first")


def _accelerator_of(module: nn.Module) -> torch.device | None:
    """Return the accelerator that the module computes on, or None for the CPU."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return torch.accelerator.current_accelerator(check_available=True)
    return None if parameter.device.type in ("cpu", "meta") else parameter.device


def _same(value: Any) -> Any:
    return value
