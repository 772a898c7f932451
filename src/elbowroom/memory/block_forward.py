"""What takes the place of the forward of a block, and of the scopes in it that are treated apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from elbowroom.memory.attention_kernel import KeptKernel, with_kept_kernel
from elbowroom.memory.installed import Installed, InstalledCompile, refuse_compiled_model
from elbowroom.memory.kept import keep
from elbowroom.memory.plan import BlockPlan, Scope, Treatment
from elbowroom.memory.scope_calls import ActiveBlocks, Pack, Packed

Visiting = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a forward a call during which streamed weights are on the device."""


class Treats(Protocol):
    """What gives calls their treatment: the handle.

    Attributes:
        active: the block that each thread is in.
    """

    @property
    def active(self) -> ActiveBlocks: ...

    def call_block(self, forward: BlockForward, args: tuple, kwargs: dict) -> Any: ...

    def call_scope(self, forward: ScopeForward, args: tuple, kwargs: dict) -> Any: ...

    def pack(self, scope: str, where: str, module: nn.Module, tensor: torch.Tensor) -> Packed: ...


class BlockForward(Installed):
    """Takes the place of one block's forward.

    Args:
        handle: gives calls their treatment.
        module: the block.
        block: its plan.
        position: its place in the block sequence.
        visiting: makes of the forward a call during which the block's streamed weights are on the device; None if the
            block is not streamed as a whole.
    """

    def __init__(
        self,
        handle: Treats,
        module: nn.Module,
        block: BlockPlan,
        position: int,
        visiting: Visiting | None,
    ):
        super().__init__(f"block {block.name!r}", module)
        self.block = block
        self._visiting = visiting
        self.position = position
        self.pack: Pack = partial(handle.pack, "rest", self.name, module)
        self.pack_boundary: Pack | None = None
        if block.boundary == "offload":
            self.pack_boundary = partial(handle.pack, "boundary", self.name, module)
        self._call = handle.call_block
        self._compile = InstalledCompile(module, self._compiled)
        self._scopes: list[ScopeForward] = []
        scopes: tuple[Scope, ...] = ("attention", "feed_forward")
        for scope in scopes:
            if block.apart(scope):
                treatment = getattr(block.treatments, scope)
                names = getattr(block.modules, scope)
                self._scopes += [
                    ScopeForward(handle, module, block, scope, treatment, name, visiting) for name in names
                ]

    def install(self) -> None:
        self._install()
        self._compile.install()
        for scope in self._scopes:
            scope.install()
            if self.compiled:
                scope.compile_original()

    def _install(self) -> None:
        super().install()
        if self._visiting is not None:
            self.original = self._visiting(self.original)

    def check_installed(self) -> None:
        super().check_installed()
        for scope in self._scopes:
            scope.check_installed()

    def uninstall(self) -> None:
        super().uninstall()
        self._compile.uninstall()
        for scope in self._scopes:
            scope.uninstall()

    @contextmanager
    def as_recorded(self) -> Iterator[None]:  # type: ignore[override]
        # After `remove`, a graph that was built before may still be replayed: with the scopes as they were.
        missing = [] if self.installed else [scope for scope in self._scopes if not scope.installed]
        for scope in missing:
            scope.install()
        try:
            yield
        finally:
            for scope in missing:
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
            self._install()


class ScopeForward(Installed):
    """Takes the place of the forward of a module that is (part of) a scope with a treatment of its own."""

    def __init__(
        self,
        handle: Treats,
        block: nn.Module,
        plan: BlockPlan,
        scope: Scope,
        treatment: Treatment,
        path: str,
        visiting: Visiting | None,
    ):
        where = f"the {scope.replace('_', '-')} {path!r} of block {plan.name!r}"
        super().__init__(where, block.get_submodule(path))
        self.pack: Pack | None = None
        if treatment == "keep":
            self.pack = partial(keep, where)
        elif treatment == "offload":
            self.pack = partial(handle.pack, scope, where, block)
        self._block = block
        self._visiting = visiting
        self._kernel = KeptKernel(where, self.module) if scope == "attention" and plan.keep_kernel else None
        self._active = handle.active
        self._path = path.split(".")
        self._call = handle.call_scope
        self._call_from_compiled: Any = torch.compiler.disable(
            handle.call_scope, reason="elbowroom treats this module apart; compile the blocks after `elbowroom.apply`"
        )

    def install(self) -> None:
        super().install()
        if self._kernel is not None:
            self.original = with_kept_kernel(self.original, self._kernel, self._active)
        if self._visiting is not None:  # it may be replayed without its block
            self.original = self._visiting(self.original)

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
