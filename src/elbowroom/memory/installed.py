"""Taking the place of a module's forward on one instance, and giving it back.

A module that is compiled by itself (`module.compile()`, Diffusers' `compile_repeated_blocks`) is called through its
compiled call instead of its forward, so that is what is replaced there: hooks that surround compiled code see what it
saves for its backward pass, and a replay runs the same compiled code again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class Installed:
    """Takes the place of one module's forward; subclasses say what happens in a call.

    Attributes:
        name: where the module is, for messages: "block 'blocks.0'".
        module: the module.
        original: what a call runs in the end; at first, what it would have run without us.
    """

    original: Callable[..., Any]
    _replaced: Callable[..., Any]

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self._attribute = ""
        self._had_own = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def install(self) -> None:
        compiled = getattr(self.module, "_compiled_call_impl", None) is not None
        self._attribute = "_compiled_call_impl" if compiled else "forward"
        self._had_own = self._attribute in self.module.__dict__
        self.original = self._replaced = getattr(self.module, self._attribute)
        # Tools that look at the signature see the module's own. Not its attributes: they could have the names of ours.
        functools.update_wrapper(self, self._replaced, updated=())
        self.module.__dict__[self._attribute] = self

    @property
    def compiled(self) -> bool:
        """Whether a call runs compiled code."""
        return self._attribute == "_compiled_call_impl"

    @property
    def installed(self) -> bool:
        return self.module.__dict__.get(self._attribute) is self

    def as_recorded(self) -> AbstractContextManager[None]:
        """Return a context in which a call does what it did while this was installed, although it may not be now."""
        return nullcontext()

    def check_installed(self) -> None:
        """Raise `RuntimeError` if the forward can't be given back."""
        if not self.installed:
            raise RuntimeError(f"the forward of {self.name} was replaced after `apply`; undo that first, then remove")

    def uninstall(self) -> None:
        self.check_installed()
        if self._had_own:
            self.module.__dict__[self._attribute] = self._replaced
        else:
            del self.module.__dict__[self._attribute]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copies and pickles of the model are plain models: they must not call the modules of this one."""
        if self._had_own:
            return _same, (self._replaced,)
        return getattr, (self.module, "forward")


class InstalledCompile:
    """Takes the place of a block's `compile()`, so that a block which is compiled after `apply` keeps its treatment."""

    def __init__(self, module: nn.Module, compiled: Callable[..., None]):
        self.module = module
        self._compiled = compiled

    def install(self) -> None:
        self.module.__dict__["compile"] = self

    def uninstall(self) -> None:
        del self.module.__dict__["compile"]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self.module, "compile")


def _refuse_compiled_model(name: str) -> None:
    raise RuntimeError(
        f"{name} has a plan, but the model is compiled as a whole, which leaves the plan no block to act on; compile "
        "the blocks by themselves: `model.compile_repeated_blocks()` or `block.compile()`"
    )


refuse_compiled_model: Any = torch.compiler.disable(
    _refuse_compiled_model,
    reason="elbowroom's plan acts on blocks, so compile these by themselves: `model.compile_repeated_blocks()`",
)
"""Raise for a block that is called from a model compiled as a whole; compiled code calls it as it is."""


def _same(value: Any) -> Any:
    return value
