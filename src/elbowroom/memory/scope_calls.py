"""Calls of scopes inside a block: of its attention, feed-forward, or attention kernel, treated otherwise than its rest.

What a call means depends on what its block is doing, so the block that is active says how it is done:

- a block that is recorded for a replay runs the scope under the scope's own hooks and remembers what it returned;
- a block that is replayed gets that back, and the scope is not run a second time;
- a block that is not recomputed as a whole runs the scope under its own hooks, or records it as a unit of its own.

What enters a scope is computed again by the replay of its block in any case. So where autograd saves an argument in a
scope that is kept or offloaded (the input of a projection), it is not kept or offloaded, but filled in by the replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from elbowroom.memory import ambient
from elbowroom.memory.counters import Counters
from elbowroom.memory.errors import ReplayError
from elbowroom.memory.module_state import LeftBehind, holds_tensors, modules_of, version_of


class Packed(Protocol):
    """A saved tensor in another form."""

    @property
    def intact(self) -> bool:
        """Whether nobody has written into the tensor since it was packed."""
        ...

    def unpack(self) -> torch.Tensor: ...


Pack = Callable[[torch.Tensor], Packed]


def unpack(packed: Packed) -> torch.Tensor:
    """Return the saved tensor: the other half of each pair of hooks."""
    return packed.unpack()


class ScopeCall(Protocol):
    """A module or function that is (part of) a scope.

    Attributes:
        name: where it is, for messages: "the attention 'attn' of block 'blocks.0'".
        module: the module, or the one around the function.
        original: what a call runs.
        pack: the scope's pack hook, or None if the scope is recomputed.
    """

    name: str
    module: nn.Module
    original: Callable[..., Any]

    @property
    def pack(self) -> Pack | None: ...

    def as_recorded(self) -> AbstractContextManager[None]:
        """Return a context in which a call does what it did when it was recorded."""
        return nullcontext()


class ActiveBlock(Protocol):
    """What a block that is being called right now does with its scopes."""

    def call(self, scope: ScopeCall, args: tuple, kwargs: dict) -> Any: ...


class ActiveBlocks(threading.local):
    """The block that each thread is in. Threads have their own: each runs its own forward or backward pass."""

    current: ActiveBlock | None = None

    def entered(self, block: ActiveBlock) -> _Entered:
        """Return a context in which `block` is the active one."""
        return _Entered(self, block)


class _Entered:
    """Makes a block the active one, then the one before again: a forward pass may run a backward pass inside."""

    __slots__ = ("_active", "_before", "_block")

    def __init__(self, active: ActiveBlocks, block: ActiveBlock):
        self._active = active
        self._block = block

    def __enter__(self) -> None:
        self._before = self._active.current
        self._active.current = self._block

    def __exit__(self, *_: object) -> None:
        self._active.current = self._before


Place = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and offset of a tensor in its storage."""


def _place(tensor: torch.Tensor) -> Place:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


@dataclass(frozen=True, slots=True)
class _SavedArgument:
    """A tensor that autograd saved in a scope and that is an argument of the call, or a view of one.

    Attributes:
        leaf: which leaf of the arguments.
        argument: where that lay in its storage.
        saved: where the saved tensor lay in the same storage.
    """

    leaf: int
    argument: Place
    saved: Place

    def again(self, leaves: list[Any], scope: str) -> torch.Tensor:
        """Return the saved tensor from the arguments of a replay."""
        argument = leaves[self.leaf]
        if not isinstance(argument, torch.Tensor) or _place(argument) != self.argument:
            raise ReplayError(f"{scope} got other arguments in the replay of its block than in the forward pass")
        return argument.detach().as_strided(*self.saved)


@dataclass(frozen=True, slots=True)
class _ReturnedTensor:
    """A tensor that a scope returned, under the scope's treatment."""

    packed: Packed
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class ScopeResult:
    """What one call of a scope returned and left behind.

    Attributes:
        scope: what was called.
        leaves: the returned values as a flattened tree, tensors packed.
        structure: the tree.
        saved_arguments: arguments that autograd saved, in the order in which it did.
        random_state: torch's generators after the call, if it drew from them.
    """

    scope: ScopeCall
    leaves: list[Any]
    structure: TreeSpec
    saved_arguments: list[_SavedArgument]
    random_state: ambient.RandomState | None

    @property
    def intact(self) -> bool:
        return all(leaf.packed.intact for leaf in self.leaves if isinstance(leaf, _ReturnedTensor))

    def again(self) -> Any:
        """Return the values for a replay. Its graph is thrown away, so they need no history."""
        leaves = [
            leaf.packed.unpack().detach().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, _ReturnedTensor)
            else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)


class RecordedScopes:
    """For a block that is recorded: runs its scopes and remembers what they returned.

    Args:
        pack: the block's own pack hook, for what its replay fills in.
        accelerator: device whose random state matters besides the CPU's, or None.
        weights_first: makes of a pack hook one that saves streamed weights as handles.
    """

    def __init__(self, pack: Pack, accelerator: torch.device | None, weights_first: Callable[[Pack], Pack]):
        self.results: list[ScopeResult] = []
        self._pack = pack
        self._accelerator = accelerator
        self._weights_first = weights_first
        self._returned: list[tuple[str, torch.Tensor, int | None]] = []
        self._problem: str | None = None

    def call(self, scope: ScopeCall, args: tuple, kwargs: dict) -> Any:
        pack_scope = scope.pack
        if pack_scope is None:
            return scope.original(*args, **kwargs)
        given = [leaf for leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf[1], torch.Tensor)]
        arguments = {id(_root(leaf)): (index, leaf) for index, leaf in given if leaf.layout == torch.strided}
        versions = [(leaf, version_of(leaf)) for _, leaf in given]
        left_behind = LeftBehind(modules_of(scope.module), (args, kwargs))
        saved_arguments: list[_SavedArgument] = []
        pack_slot = self._pack  # autograd holds on to the hook, and must not hold on to the results with it

        def pack(tensor: torch.Tensor) -> Packed:
            index, argument = arguments.get(id(_root(tensor)), (0, None))
            # Another number format or a conjugate is more than another place in the same storage.
            if argument is None or argument.dtype != tensor.dtype or argument.is_conj() != tensor.is_conj():
                return pack_scope(tensor)
            saved_arguments.append(_SavedArgument(index, _place(argument), _place(tensor)))
            return pack_slot(tensor)

        before = ambient.random_state(self._accelerator)
        with saved_tensors_hooks(self._weights_first(pack), unpack):
            result = scope.original(*args, **kwargs)
        arguments.clear()  # nor on to the arguments
        if any(version_of(leaf) != version for leaf, version in versions):
            self._problem = f"has {scope.name} write into its argument"
        elif (found := left_behind.found()) is not None:
            self._problem = f"has {scope.name} change {found}, which it would not do if it were not run again"
        after = ambient.random_state(self._accelerator)
        leaves, structure = tree_flatten(result)
        packed = []
        for leaf in leaves:
            if holds_tensors(leaf):
                self._problem = (
                    f"has {scope.name} return a {type(leaf).__name__} that holds tensors, into which can't be looked "
                    "(register the class with torch.utils._pytree)"
                )
            if isinstance(leaf, torch.Tensor):
                self._returned.append((scope.name, leaf.detach(), version_of(leaf)))
                leaf = _ReturnedTensor(pack_scope(leaf), leaf.requires_grad)
            packed.append(leaf)
        drew = not ambient.same_random_state(before, after)
        self.results.append(ScopeResult(scope, packed, structure, saved_arguments, after if drew else None))
        return result

    def problem(self) -> str | None:
        """Return why a replay can't go without the calls of scopes, if that is so: what the block does, in words."""
        if self._problem is not None:
            return self._problem
        overwritten = (name for name, tensor, version in self._returned if version_of(tensor) != version)
        return next((f"writes into what {name} returned" for name in overwritten), None)

    def end(self) -> None:
        """Let go of the tensors that were returned: a graph may hold on to this for long."""
        self._returned.clear()


class ReplayedScopes:
    """For a block that is replayed: hands back what its scopes returned in the forward pass.

    Args:
        results: the calls of the forward pass.
        fill: the replay's pack hook, for arguments that autograd saved in the scopes.
        counters: where calls that need not be run again are counted.
        accelerator: device whose random state matters besides the CPU's, or None.
    """

    def __init__(
        self,
        results: list[ScopeResult],
        fill: Callable[[torch.Tensor], None],
        counters: Counters,
        accelerator: torch.device | None,
    ):
        self._results = results
        self._used = 0
        self._fill = fill
        self._counters = counters
        self._accelerator = accelerator

    def call(self, scope: ScopeCall, args: tuple, kwargs: dict) -> Any:
        if scope.pack is None:
            return scope.original(*args, **kwargs)
        if self._used >= len(self._results) or self._results[self._used].scope is not scope:
            raise ReplayError(f"{scope.name} was not called at this point of the forward pass, but is in the replay")
        result = self._results[self._used]
        self._used += 1
        if result.saved_arguments:
            leaves = tree_leaves((args, kwargs))
            for saved in result.saved_arguments:
                self._fill(saved.again(leaves, scope.name))
        if not result.intact:  # the model has written into it after the block had returned it
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return scope.original(*args, **kwargs)
        self._counters.scopes_reused += 1
        if result.random_state is not None:
            # What comes after it in the block must draw the numbers that it drew then.
            ambient.set_random_state(result.random_state, self._accelerator)
        return result.again()


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which this one is a view, or itself."""
    return tensor if tensor._base is None else tensor._base
