"""Install a plan on a model, and take it off again. All state lives in the handle that `apply` returns."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from elbowroom.memory.attention_kernel import KeptKernel, with_kept_kernel
from elbowroom.memory.blocks import refuse_nested, unwrap
from elbowroom.memory.counters import Counters, Report
from elbowroom.memory.devices import device_for
from elbowroom.memory.installed import Installed, InstalledCompile, refuse_compiled_model
from elbowroom.memory.kept import Kept
from elbowroom.memory.module_state import modules_of
from elbowroom.memory.offload.offloader import Offloader
from elbowroom.memory.offload.opening import open_store
from elbowroom.memory.offload.outside import Outside
from elbowroom.memory.plan import BlockPlan, Plan, Scope, Treatment
from elbowroom.memory.scope_calls import ActiveBlock, ActiveBlocks, Pack, Packed, ScopeCall, unpack
from elbowroom.memory.segments import SegmentRun


class Handle:
    """A plan at work on one model. `report()` tells what it did; `remove()` leaves the model as it was."""

    def __init__(self, plan: Plan, modules: Sequence[nn.Module], *, check_determinism: bool):
        self.plan = plan
        self._counters = Counters()
        self._check_determinism = check_determinism
        self.active = _Threads()
        self._offloaders: dict[torch.device, Offloader | None] = {}
        self._prefetch: bool | None = plan.offload.prefetch
        self._installed = [
            _BlockForward(self, module, block, position)
            for position, (module, block) in enumerate(zip(modules, plan.blocks, strict=True))
            if block.treatments != _KEPT
        ]
        for forward in self._installed:
            forward.install()

    @property
    def offloaders(self) -> tuple[Offloader, ...]:
        """What has offloaded tensors so far, one for each device."""
        return tuple(offloader for offloader in self._offloaders.values() if offloader is not None)

    @property
    def prefetch(self) -> bool:
        """Whether offloaded tensors are reloaded ahead of use; may be changed at any time."""
        return self._prefetch is not False

    @prefetch.setter
    def prefetch(self, wanted: bool) -> None:
        self._prefetch = wanted
        for offloader in self.offloaders:
            offloader.prefetch = wanted

    def report(self) -> Report:
        """Return the plan and the totals so far, as a copy that does not change any more."""
        return Report(self.plan, copy.deepcopy(self._counters))

    def remove(self) -> None:
        """Take the plan off; the model is as it was before `apply`. Calling it again does nothing.

        A backward pass through a graph that was built before still works.
        """
        while self._installed:
            self._installed[-1].uninstall()
            self._installed.pop()
        for device, offloader in list(self._offloaders.items()):
            # What graphs still need stays until they are gone; the store then goes with the last of it.
            if offloader is not None and offloader.store.present == 0:
                offloader.close()
            del self._offloaders[device]

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def pack(self, scope: str, where: str, module: nn.Module, tensor: torch.Tensor) -> Packed:
        """Take a saved tensor to the store of its device."""
        if tensor.device not in self._offloaders:
            self._offloaders[tensor.device] = self._offloader(tensor.device, module)
        offloader = self._offloaders[tensor.device]
        if offloader is None:
            return Kept(tensor, where)
        return offloader.pack(tensor, scope, where, self.active.outside)

    def _offloader(self, device: torch.device, module: nn.Module) -> Offloader | None:
        """Return what offloads from a device; None for tensors in host memory whose model is on an accelerator."""
        if device.type == "cpu" and accelerator_of(module) is not None:
            return None
        seam = device_for(device)
        offloader = Offloader(seam, open_store(seam, self.plan.offload), self.plan.offload, self._counters)
        if self._prefetch is not None:
            offloader.prefetch = self._prefetch
        return offloader

    def call_block(self, forward: _BlockForward, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward.original(*args, **kwargs)
        forward.follow_replaced_modules()
        self.active.outside = Outside(forward.module, (args, kwargs)) if forward.block.offloads else None
        try:
            return self._call_treated(forward, args, kwargs)
        finally:
            self.active.outside = None

    def _call_treated(self, forward: _BlockForward, args: tuple, kwargs: dict) -> Any:
        if forward.block.segment is None:
            return self._call_directly(forward, args, kwargs)
        run = self._segment_for(forward)
        try:
            result, stays_open = run.record(forward, args, kwargs)
        except BaseException:
            self.active.open_segment = None
            raise
        if not stays_open:
            self.active.open_segment = None
        return result

    def call_scope(self, forward: _ScopeForward, args: tuple, kwargs: dict) -> Any:
        block = self.active.current
        # Called past its block, or where nothing is saved.
        if block is None or not torch.is_grad_enabled():
            return forward.original(*args, **kwargs)
        return block.call(forward, args, kwargs)

    def _call_directly(self, forward: _BlockForward, args: tuple, kwargs: dict) -> Any:
        """Call a block that is not recomputed as a whole."""
        with self.active.entered(_DirectBlock(forward, self._run)):
            if forward.block.treatments.rest == "keep":
                return forward.original(*args, **kwargs)
            with saved_tensors_hooks(forward.pack, unpack):
                return forward.original(*args, **kwargs)

    def _segment_for(self, forward: _BlockForward) -> SegmentRun:
        """Return the open segment if the block goes on with it, else a new one."""
        number = forward.block.segment
        reference = self.active.open_segment
        run = reference() if reference is not None else None
        if run is None or run.number != number or run.last_block >= forward.position:
            run = self._run(forward)
            self._counters.segments += 1
            # Weak: the graph's slots own the segment, so that nothing of it outlives the backward pass.
            self.active.open_segment = weakref.ref(run)
        run.last_block = forward.position
        return run

    def _run(self, forward: _BlockForward) -> SegmentRun:
        return SegmentRun(
            forward.block.segment,
            self._counters,
            self.active,
            accelerator_of(forward.module),
            forward.pack_boundary,
            self._check_determinism,
        )


class _Threads(ActiveBlocks):
    """What each thread is in the middle of: the block that is called, what it came with, the segment that may go on."""

    open_segment: weakref.ref[SegmentRun] | None = None
    outside: Outside | None = None


class _DirectBlock(ActiveBlock):
    """A block that is not recomputed as a whole: its scopes run under hooks of their own, or are units of their own."""

    def __init__(self, forward: _BlockForward, new_run: Callable[[_BlockForward], SegmentRun]):
        self._forward = forward
        self._new_run = new_run
        self._run: SegmentRun | None = None

    def call(self, scope: ScopeCall, args: tuple, kwargs: dict) -> Any:
        if scope.pack is not None:
            with saved_tensors_hooks(scope.pack, unpack):
                return scope.original(*args, **kwargs)
        # Parts that feed one another (up-projection, activation) are one unit; separate modules are replayed apart.
        if self._run is None or not self._run.returned((*args, *kwargs.values())):
            self._run = self._new_run(self._forward)
        result, stays_open = self._run.record(scope, args, kwargs)
        if not stays_open:
            self._run = None
        return result


class _BlockForward(Installed):
    """Takes the place of one block's forward."""

    def __init__(self, handle: Handle, module: nn.Module, block: BlockPlan, position: int):
        super().__init__(f"block {block.name!r}", module)
        self.block = block
        self.position = position
        self.pack: Pack = partial(handle.pack, "rest", self.name, module)
        self.pack_boundary: Pack | None = None
        if block.boundary == "offload":
            self.pack_boundary = partial(handle.pack, "boundary", self.name, module)
        self._call = handle.call_block
        self._compile = InstalledCompile(module, self._compiled)
        self._scopes = [
            _ScopeForward(handle, module, block, scope, treatment, name)
            for scope, treatment, names in (
                ("attention", block.treatments.attention, block.modules.attention),
                ("feed_forward", block.treatments.feed_forward, block.modules.feed_forward),
            )
            # Offloaded like the rest, it is still counted apart.
            if treatment != block.treatments.rest
            or treatment == "offload"
            or (scope == "attention" and block.keep_kernel)
            for name in names
        ]

    def install(self) -> None:
        super().install()
        self._compile.install()
        for scope in self._scopes:
            scope.install()
            if self.compiled:
                scope.compile_original()

    def uninstall(self) -> None:
        super().uninstall()
        self._compile.uninstall()
        for scope in self._scopes:
            scope.uninstall()

    def follow_replaced_modules(self) -> None:
        """Move to the module that took a scope's place, such as PEFT's LoRA layer, which wraps the one before."""
        for scope in self._scopes:
            scope.follow()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            refuse_compiled_model(self.name)
        return self._call(self, args, kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> None:
        super().uninstall()
        try:
            if self._scopes:
                # The scopes that are treated apart end a graph, and each is a graph of its own.
                for scope in self._scopes:
                    scope.compile_original(*args, **kwargs)
                kwargs = {**kwargs, "fullgraph": False}
            type(self.module).compile(self.module, *args, **kwargs)
        finally:
            super().install()


class _ScopeForward(Installed):
    """Takes the place of the forward of a module that is (part of) a scope with a treatment of its own."""

    def __init__(
        self, handle: Handle, block: nn.Module, plan: BlockPlan, scope: Scope, treatment: Treatment, path: str
    ):
        where = f"the {scope.replace('_', '-')} {path!r} of block {plan.name!r}"
        super().__init__(where, block.get_submodule(path))
        self.pack: Pack | None = None
        if treatment == "keep":
            self.pack = partial(_keep, where)
        elif treatment == "offload":
            self.pack = partial(handle.pack, scope, where, block)
        self._block = block
        self._kernel = KeptKernel(where) if scope == "attention" and plan.keep_kernel else None
        self._active = handle.active
        self._path = path.split(".")
        self._call = handle.call_scope
        self._call_from_compiled = torch.compiler.disable(
            handle.call_scope, reason="elbowroom treats this module apart; compile the blocks after `elbowroom.apply`"
        )

    def install(self) -> None:
        super().install()
        if self._kernel is not None:
            self.original = with_kept_kernel(self.original, self._kernel, self._active)

    def follow(self) -> None:
        module = self._block
        for name in self._path:
            module = module._modules[name]
            assert module is not None
        if module is not self.module:
            self.uninstall()
            self.module = module
            self.install()

    def compile_original(self, *args: Any, **kwargs: Any) -> None:
        # Compiled attention has no kernel call of its own any more, so with a kept kernel it stays as it is.
        if self._kernel is None:
            self.original = torch.compile(self.original, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call_from_compiled(self, args, kwargs)
        return self._call(self, args, kwargs)


def apply(model: nn.Module, plan: Plan, *, check_determinism: bool = False) -> Handle:
    """Install `plan` on this model instance.

    Args:
        model: the model that the plan was made for, by itself or wrapped by PEFT; its code is not changed.
        plan: from `schedule`, `Plan.from_json`, or made by hand.
        check_determinism: in every replay, compare all recomputed tensors bit for bit with the originals (by digests)
            and raise if they differ. Slow; finds blocks that draw from Python's, NumPy's or a private generator, whose
            state is not restored.

    Raises:
        ValueError: the plan names a block, or a module of a block, that the model does not have.
        RuntimeError: a plan is applied already, the model's own checkpointing is switched on, the model is compiled as
            a whole, or a segment spans modules that FSDP shards apart.
    """
    _refuse_compiled(model)
    base = unwrap(model)
    modules = dict(base.named_modules())
    names = [block.name for block in plan.blocks]
    scopes = [
        f"{block.name}.{name}"
        for block in plan.blocks
        for name in (*block.modules.attention, *block.modules.feed_forward)
    ]
    missing = [name for name in (*names, *scopes) if name not in modules]
    if missing:
        raise ValueError(f"the plan names modules that {type(base).__name__} does not have: {', '.join(missing)}")
    refuse_nested(names)
    refuse_nested(scopes)
    _refuse_own_checkpointing(base)
    for block in plan.blocks:
        _refuse_second_plan(block, modules[block.name])
    for segment in plan.segments:
        _refuse_units_of_fsdp_in(segment, [modules[block.name] for block in segment])
    return Handle(plan, [modules[name] for name in names], check_determinism=check_determinism)


def _refuse_compiled(model: nn.Module) -> None:
    base = unwrap(model)
    if _is_compiled(model) or _is_compiled(base) or isinstance(model, torch._dynamo.OptimizedModule):
        raise RuntimeError(
            "the model is compiled as a whole, which leaves a plan no block to act on; compile the blocks by "
            "themselves: `model.compile_repeated_blocks()` or `block.compile()`"
        )


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _refuse_own_checkpointing(base: nn.Module) -> None:
    for name, module in base.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            where = f" (in {name!r})" if name else ""
            raise RuntimeError(
                f"the model's own gradient checkpointing is switched on{where}; switch it off with "
                "`model.disable_gradient_checkpointing()`"
            )


def _refuse_second_plan(block: BlockPlan, module: nn.Module) -> None:
    if any(isinstance(module.__dict__.get(name), _BlockForward) for name in ("forward", "_compiled_call_impl")):
        raise RuntimeError(f"a plan is applied to block {block.name!r} already; call `handle.remove()` first")


def _refuse_units_of_fsdp_in(segment: Sequence[BlockPlan], modules: Iterable[nn.Module]) -> None:
    """A replay needs the weights of a whole segment, and FSDP gathers those of one unit at a time."""
    units = {id(module._get_fsdp_state()) for module in modules if hasattr(module, "_get_fsdp_state")}
    if len(units) > 1:
        raise RuntimeError(
            f"segment {segment[0].segment} spans {len(units)} modules that FSDP shards apart; shard the blocks of a "
            f"segment together, `fully_shard([{', '.join(block.name for block in segment)}])`, or set "
            "gradient_checkpointing_interval to 1"
        )


def accelerator_of(module: nn.Module) -> torch.device | None:
    """Return the accelerator that the module computes on, or None for the CPU."""
    for inner in modules_of(module):
        for parameter in inner._parameters.values():
            if parameter is not None:
                return None if parameter.device.type in ("cpu", "meta") else parameter.device
    return torch.accelerator.current_accelerator(check_available=True)


def _keep(where: str, tensor: torch.Tensor) -> Packed:
    return Kept(tensor, where)


_KEPT = BlockPlan("").treatments
