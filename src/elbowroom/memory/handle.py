"""A plan at work on one model. All state lives in the handle that `apply` returns."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from elbowroom.memory.block_forward import BlockForward, ScopeForward
from elbowroom.memory.blocks import unwrap
from elbowroom.memory.call_order import CallOrder
from elbowroom.memory.counters import Counters, Report
from elbowroom.memory.devices import device_for
from elbowroom.memory.installed import Installed
from elbowroom.memory.kept import Kept, keep
from elbowroom.memory.module_state import modules_of
from elbowroom.memory.offload.offloader import Offloader
from elbowroom.memory.offload.opening import open_store
from elbowroom.memory.offload.outside import Outside
from elbowroom.memory.own_checkpointing import OwnCheckpointing
from elbowroom.memory.plan import Plan, Treatments
from elbowroom.memory.scope_calls import ActiveBlock, ActiveBlocks, Pack, Packed, ScopeCall, unpack
from elbowroom.memory.segments import SegmentRun
from elbowroom.memory.weights.layer_forward import LayerForward
from elbowroom.memory.weights.opening import open_streamer


class Handle:
    """A plan at work on one model. `report()` tells what it did; `remove()` leaves the model as it was."""

    def __init__(
        self, plan: Plan, model: nn.Module, *, device: torch.device | None = None, check_determinism: bool = False
    ):
        self.plan = plan
        self._counters = Counters()
        self._check_determinism = check_determinism
        self.active = _Threads()
        self._offloaders: dict[torch.device, Offloader | None] = {}
        self._lock = threading.Lock()  # several threads may call the model
        self._prefetch: bool | None = plan.offload.prefetch
        self._streamer = (
            open_streamer(model, plan, device, self._counters) if plan.streamed or device is not None else None
        )
        self._weights_first: Callable[[Pack], Pack] = _same if self._streamer is None else self._streamer.first
        self._installed: list[Installed] = []
        self._treated = [
            block for block in plan.blocks if block.treatments != Treatments() or plan.residency(block) != "resident"
        ]
        self._order = CallOrder([block.name for block in self._treated])
        self._stores: list[str] = []
        self._own_checkpointing = OwnCheckpointing(unwrap(model))
        try:
            for forward in (*self._layers(), *self._blocks(unwrap(model))):
                forward.install()
                self._installed.append(forward)
        except BaseException:
            self.remove()
            raise

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
        for each in (*self.offloaders, *([] if self._streamer is None else [self._streamer])):
            each.look()
        counters = copy.deepcopy(self._counters)
        return Report(self.plan, counters, self._order.never_called, self._order.early, tuple(self._stores))

    def settle(self) -> None:
        """Let go of what finished copies still hold on the device; for the time between two steps.

        The next forward pass does so by itself; until then it is at most `activation_window`.
        """
        for offloader in self.offloaders:
            offloader.settle()

    def remove(self) -> None:
        """Take the plan off; the model is as it was before `apply`. Calling it again does nothing.

        A backward pass through a graph that was built before still works.

        Raises:
            RuntimeError: something has replaced a forward since; nothing is changed then.
        """
        for forward in self._installed:
            forward.check_installed()
        while self._installed:
            self._installed[-1].uninstall()
            self._installed.pop()
        for device, offloader in list(self._offloaders.items()):
            # What graphs still need stays until they are gone; the store then goes with the last of it.
            if offloader is not None and offloader.store.present == 0:
                offloader.close()
            del self._offloaders[device]
        if self._streamer is not None:
            self._streamer.close()
            self._streamer = None

    def at_home(self) -> AbstractContextManager[None]:
        """Return a context in which the whole model is in host memory, if weights are streamed.

        For what needs streamed weights and adapters on one device: `with handle.at_home(): model.merge_adapter()`.
        """
        return nullcontext() if self._streamer is None else self._streamer.at_home()

    def renew(self, name: str) -> None:
        """Take in the weights of a module whose frozen parameters were replaced, if they are streamed.

        Call it between two steps. (Writing into parameters needs no such call.)

        Args:
            name: of the module, such as a block, in the unwrapped model.
        """
        if self._streamer is not None:
            self._streamer.renew(name)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def pack(self, scope: str, where: str, module: nn.Module, tensor: torch.Tensor) -> Packed:
        """Take a saved tensor to the store of its device."""
        if tensor.device not in self._offloaders:
            with self._lock:
                if tensor.device not in self._offloaders:
                    self._offloaders[tensor.device] = self._offloader(tensor.device, module)
        offloader = self._offloaders[tensor.device]
        if offloader is None:
            return Kept(tensor, where)
        return offloader.pack(tensor, scope, where, self.active.outside)

    def _offloader(self, device: torch.device, module: nn.Module) -> Offloader | None:
        """Return what offloads from a device; None for tensors in host memory whose model is on an accelerator."""
        if device.type == "cpu" and self._accelerator(module) is not None:
            return None
        seam = device_for(device)
        offloader = Offloader(seam, open_store(seam, self.plan.offload), self.plan.offload, self._counters)
        if self._prefetch is not None:
            offloader.prefetch = self._prefetch
        self._stores.append(offloader.description)
        return offloader

    def call_block(self, forward: BlockForward, args: tuple, kwargs: dict) -> Any:
        self._order.note(forward.block.name)
        self._own_checkpointing.refuse()
        if not torch.is_grad_enabled():
            return forward.original(*args, **kwargs)
        forward.follow_replaced_modules()
        self.active.outside = Outside(forward.module, (args, kwargs)) if forward.block.offloads else None
        try:
            return self._call_treated(forward, args, kwargs)
        finally:
            self.active.outside = None

    def _call_treated(self, forward: BlockForward, args: tuple, kwargs: dict) -> Any:
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

    def call_scope(self, forward: ScopeForward, args: tuple, kwargs: dict) -> Any:
        block = self.active.current
        # Called past its block, or where nothing is saved.
        if block is None or not torch.is_grad_enabled():
            return forward.original(*args, **kwargs)
        return block.call(forward, args, kwargs)

    def call_layer(self, forward: LayerForward, args: tuple, kwargs: dict) -> Any:
        """Call a layer whose weights are streamed. Inside a block, the block's hooks see what is saved."""
        if self.active.current is not None or not torch.is_grad_enabled():
            return forward.original(*args, **kwargs)
        with saved_tensors_hooks(self._weights_first(partial(keep, forward.name)), unpack):
            return forward.original(*args, **kwargs)

    def _call_directly(self, forward: BlockForward, args: tuple, kwargs: dict) -> Any:
        """Call a block that is not recomputed as a whole."""
        with self.active.entered(_DirectBlock(forward, self._run, self._weights_first)):
            keeps = forward.block.treatments.rest == "keep"
            if keeps and self.plan.residency(forward.block) == "resident":
                return forward.original(*args, **kwargs)
            pack = partial(keep, forward.name) if keeps else forward.pack
            with saved_tensors_hooks(self._weights_first(pack), unpack):
                return forward.original(*args, **kwargs)

    def _segment_for(self, forward: BlockForward) -> SegmentRun:
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

    def _layers(self) -> Iterator[LayerForward]:
        if self._streamer is None:
            return
        blocks = {block.name for block in self.plan.blocks}
        for unit in self._streamer.units:
            if unit.name not in blocks:
                yield LayerForward(self._streamer, unit, self.call_layer)

    def _blocks(self, base: nn.Module) -> Iterator[BlockForward]:
        units = {} if self._streamer is None else {unit.name: unit for unit in self._streamer.units}
        for position, block in enumerate(self._treated):
            visiting = None
            if self._streamer is not None and block.name in units:
                visiting = partial(self._streamer.visiting, units[block.name].number)
            yield BlockForward(self, base.get_submodule(block.name), block, position, visiting)

    def _accelerator(self, module: nn.Module) -> torch.device | None:
        if self._streamer is not None:  # parameters at home don't tell
            return None if self._streamer.device.type == "cpu" else self._streamer.device
        return accelerator_of(module)

    def _run(self, forward: BlockForward) -> SegmentRun:
        return SegmentRun(
            forward.block.segment,
            self._counters,
            self.active,
            self._accelerator(forward.module),
            self._weights_first,
            forward.pack_boundary,
            self._check_determinism,
        )


class _Threads(ActiveBlocks):
    """What each thread is in the middle of: the block that is called, what it came with, the segment that may go on."""

    open_segment: weakref.ref[SegmentRun] | None = None
    outside: Outside | None = None


class _DirectBlock(ActiveBlock):
    """A block that is not recomputed as a whole: its scopes run under hooks of their own, or are units of their own."""

    def __init__(
        self,
        forward: BlockForward,
        new_run: Callable[[BlockForward], SegmentRun],
        weights_first: Callable[[Pack], Pack],
    ):
        self._forward = forward
        self._weights_first = weights_first
        self._new_run = new_run
        self._run: SegmentRun | None = None

    def call(self, scope: ScopeCall, args: tuple, kwargs: dict) -> Any:
        if scope.pack is not None:
            with saved_tensors_hooks(self._weights_first(scope.pack), unpack):
                return scope.original(*args, **kwargs)
        # Parts that feed one another (up-projection, activation) are one unit; separate modules are replayed apart.
        if self._run is None or not self._run.returned((*args, *kwargs.values())):
            self._run = self._new_run(self._forward)
        result, stays_open = self._run.record(scope, args, kwargs)
        if not stays_open:
            self._run = None
        return result


def accelerator_of(module: nn.Module) -> torch.device | None:
    """Return the accelerator that the module computes on, or None for the CPU."""
    for inner in modules_of(module):
        for parameter in inner._parameters.values():
            if parameter is not None:
                return None if parameter.device.type in ("cpu", "meta") else parameter.device
    return torch.accelerator.current_accelerator(check_available=True)


def _same(pack: Pack) -> Pack:
    return pack
