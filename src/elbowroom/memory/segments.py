"""Segments that close lazily: recompute a run of blocks without touching the loop that calls them.

While a segment is open, every call of one of its blocks is recorded: the callable, and its arguments as a flattened
tree in which a tensor that an earlier block of the segment returned (the same object, not written to since) is a
*link*, and every other tensor an *external input*. Saved-tensor hooks replace what autograd saves inside the block by
numbered slots. The first slot that the backward pass asks for replays the recorded calls and fills the slots that are
still alive; the replay stops as soon as the last of them is filled.

The graph that the backward pass walks is the one that the model built. The replay only restores values, so what a
model does between two blocks (a residual, a concatenation, a write in place) needs no knowledge of it: its result is
an external input.

The idea of filling numbered slots from a replay, and of stopping it early, is that of PyTorch's non-reentrant
`torch.utils.checkpoint`; segments that span unmodified calls are new here.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from elbowroom.memory import ambient
from elbowroom.memory.counters import Counters
from elbowroom.memory.errors import ReplayError
from elbowroom.memory.kept import check_version
from elbowroom.memory.module_state import (
    ObjectStates,
    Settings,
    TensorStates,
    changed_object,
    first_difference,
    holds_tensors,
    modules_of,
    plain_objects,
    same_tensors,
    settings_as,
    settings_of,
    tensor_states,
    version_of,
)
from elbowroom.memory.scope_calls import (
    ActiveBlocks,
    Pack,
    Packed,
    RecordedScopes,
    ReplayedScopes,
    ScopeResult,
    unpack,
)


class _ReplayDone(BaseException):
    """Leaves a replay early. Not an `Exception`, so that a model's own `except Exception` can't swallow it."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A tensor that an earlier call of the segment returned: leaf `leaf` of the outputs of call `call`."""

    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class _Returned:
    """A tensor that a call of the segment returned, as it was then."""

    tensor: weakref.ref[torch.Tensor]
    link: _Link
    version: int | None
    requires_grad: bool


@dataclass(slots=True)
class _ExternalInput:
    """A tensor from outside the segment. `tensor` is detached, so that a segment never holds a graph alive.

    Once it is offloaded, `packed` stands for it, and `tensor` is None.
    """

    tensor: torch.Tensor | None
    requires_grad: bool
    version: int | None
    packed: Packed | None = None

    @property
    def changed(self) -> bool:
        return self.tensor is not None and version_of(self.tensor) != self.version

    def offload(self, original: torch.Tensor, pack: Pack) -> None:
        """Give the tensor to the store. `original` is the tensor as the block got it: leaves stay where they are."""
        if self.packed is None:
            self.packed, self.tensor = pack(original), None

    def value(self) -> torch.Tensor:
        """Return the tensor without its history."""
        tensor = self.tensor if self.packed is None else self.packed.unpack()
        assert tensor is not None
        return tensor.detach()


class Recordable(Protocol):
    """A module whose calls are recorded.

    Attributes:
        name: where it is, for messages: "block 'blocks.0'".
        module: the module.
        original: its forward.
    """

    name: str
    module: nn.Module
    original: Callable[..., Any]

    def as_recorded(self) -> AbstractContextManager[None]:
        """Return a context in which a call does what it did when it was recorded."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded call of a module."""

    callee: Recordable
    leaves: list[Any]
    structure: TreeSpec
    objects: ObjectStates
    tensors: TensorStates
    settings: Settings
    autocast: tuple[ambient.Autocast, ...]
    random_state: ambient.RandomState | None
    scopes: list[ScopeResult]


class _Slot:
    """Stands for one tensor that autograd saved. Autograd's graph owns it; its segment only has a weak reference.

    `value` is filled by a replay and taken out when backward reads it, so that each value lives only briefly.
    """

    __slots__ = (
        "__weakref__",
        "digest",
        "dtype",
        "index",
        "segment",
        "shape",
        "value",
        "version",
        "where",
    )

    def __init__(self, segment: SegmentRun, index: int, tensor: torch.Tensor, where: str, digest: bytes | None):
        self.segment: SegmentRun | None = segment
        self.index = index
        self.where = where
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        # Detached: the saved tensor may be the output of the very node that saves it, and would keep itself alive.
        self.value: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.digest = digest

    def keep(self) -> None:
        """Hold on to the value for good: the block can't be run again."""
        self.segment = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Take the value that a replay computed. Its count of writes begins anew: an offloaded input's does too."""
        self.value, self.version = tensor.detach(), tensor._version

    @property
    def intact(self) -> bool:
        return self.value is None or self.value._version == self.version

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor, replaying the segment if need be."""
        segment = self.segment
        if segment is None:
            return self._checked(self.value)
        with segment.lock:  # two threads may run backward through one graph
            if segment.recording:
                segment.read_while_recording = True
                if self.value is not None:  # else it is of an earlier call, whose values are dropped already
                    return self._checked(self.value)
            if self.value is None:
                segment.replay()
            value, self.value = self.value, None
            return self._checked(value)

    def _checked(self, value: torch.Tensor | None) -> torch.Tensor:
        if value is None:
            raise ReplayError(f"the replay of {self.where} saved fewer tensors than its forward pass did")
        check_version(value._version, self.version, self.where)
        return value


@dataclass
class SegmentRun:
    """One pass of one forward through what is recomputed as one unit: a segment, or a scope alone.

    Attributes:
        number: the segment's number in the plan; None for a scope.
        counters: totals of the handle.
        active: the block that each thread is in.
        accelerator: device whose random state and autocast matter besides the CPU's, or None.
        weights_first: makes of a pack hook one that saves streamed weights as handles.
        pack_boundary: takes the tensors that enter it to the store; None if they are kept.
        check_determinism: compare every recomputed tensor with the original bit for bit, by a digest.
        last_block: position of the block that was recorded last.
        recording: a module of it is being called right now.
        read_while_recording: that module ran a backward pass of its own.
    """

    number: int | None
    counters: Counters
    active: ActiveBlocks
    accelerator: torch.device | None
    weights_first: Callable[[Pack], Pack]
    pack_boundary: Pack | None = None
    check_determinism: bool = False
    last_block: int = -1
    recording: bool = False
    read_while_recording: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    _calls: list[_Call] = field(default_factory=list)
    _slots: list[weakref.ref[_Slot]] = field(default_factory=list)
    _returned: dict[int, _Returned] = field(default_factory=dict)

    def record(self, callee: Recordable, args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """Call a module's forward, dropping what autograd saves in it.

        Returns:
            What it returned, and whether further calls may join the segment.
        """
        leaves, structure = tree_flatten((args, kwargs))
        holder = next((leaf for leaf in leaves if holds_tensors(leaf)), None)
        if holder is not None:
            self._cannot_replay(
                callee,
                f"gets a {type(holder).__name__} that holds tensors, into which can't be looked (register the class "
                "with torch.utils._pytree)",
                (),
            )
            return callee.original(*args, **kwargs), False

        bound = self._bind(leaves)
        objects = plain_objects(leaves)
        modules = modules_of(callee.module)
        tensors, settings = tensor_states(modules), settings_of(modules)
        autocast = ambient.current_autocast(self.accelerator)
        random_before = ambient.random_state(self.accelerator)
        fresh: list[_Slot] = []
        first_slot = len(self._slots)

        def pack(tensor: torch.Tensor) -> _Slot:
            digest = _digest(tensor) if self.check_determinism else None
            slot = _Slot(self, first_slot + len(fresh), tensor, callee.name, digest)
            fresh.append(slot)
            return slot

        scopes = RecordedScopes(pack, self.accelerator, self.weights_first)
        self.recording, self.read_while_recording = True, False
        try:
            with self.active.entered(scopes), saved_tensors_hooks(self.weights_first(pack), unpack):
                result = callee.original(*args, **kwargs)
        finally:
            self.recording = False

        # Values are held until here because only now it is known whether the call can be repeated. That does not
        # raise the peak: the backward pass will hold a whole segment's values at once.
        reason = None
        if any(isinstance(leaf, _ExternalInput) and leaf.changed for leaf in bound):
            reason = "writes into its own input"
        elif not same_tensors(tensors, tensor_states(modules)):
            reason = f"changes its own parameters or buffers ({first_difference(callee.module, tensors)})"
        elif self.read_while_recording:
            reason = "runs a backward pass inside its forward pass"
        elif (changed := changed_object(objects)) is not None:
            reason = f"changes its argument, a {changed}"
        else:
            reason = scopes.problem()
        scopes.end()
        if reason is not None:
            self._cannot_replay(callee, reason, fresh)
            return result, False

        for slot in fresh:
            slot.value = None
        if self.pack_boundary is not None:
            for leaf, input_ in zip(leaves, bound, strict=True):
                if isinstance(input_, _ExternalInput):
                    input_.offload(leaf, self.pack_boundary)
        unchanged = ambient.same_random_state(random_before, ambient.random_state(self.accelerator))
        random_state = None if unchanged else random_before
        self._calls.append(
            _Call(callee, bound, structure, objects, tensors, settings, autocast, random_state, scopes.results)
        )
        self._slots.extend(weakref.ref(slot) for slot in fresh)
        fresh.clear()  # autograd holds on to the hook, and must not hold on to slots that it has used up
        self._remember_outputs(result)
        if self.number is None:
            self.counters.scopes_recorded += 1
        else:
            self.counters.blocks_recorded += 1
        return result, True

    def returned(self, arguments: Any) -> bool:
        """Whether one of the arguments is a tensor that a recorded call returned."""
        return any(id(leaf) in self._returned and self._returned[id(leaf)].tensor() is leaf for leaf in arguments)

    def replay(self) -> None:
        """Run the recorded calls again and fill every slot that is still alive and empty."""
        wanted = {slot.index: slot for ref in self._slots if (slot := ref()) is not None and slot.value is None}
        last = max(wanted)
        position = 0
        call: _Call | None = None

        def fill(tensor: torch.Tensor) -> Any:
            nonlocal position
            slot = wanted.get(position)
            position += 1
            if slot is not None:
                assert call is not None
                _check_same(slot, tensor, call.callee.name)
                slot.fill(tensor)
                self.counters.tensors_recomputed += 1
            if position > last:
                raise _ReplayDone

        self.counters.replays += 1
        outputs: list[list[Any]] = []
        try:
            with torch.enable_grad(), ambient.device_as(self.accelerator):
                for call in self._calls:
                    modules = modules_of(call.callee.module)
                    _check_unchanged(call, modules)
                    args, kwargs = tree_unflatten(_resolve(call, outputs), call.structure)
                    if self.number is None:
                        self.counters.scopes_recomputed += 1
                    else:
                        self.counters.blocks_recomputed += 1
                    scopes = ReplayedScopes(call.scopes, fill, self.counters, self.accelerator)
                    with (
                        call.callee.as_recorded(),
                        settings_as(modules, call.settings),
                        ambient.autocast_as(call.autocast),
                        ambient.random_state_as(call.random_state, self.accelerator),
                        self.active.entered(scopes),
                        saved_tensors_hooks(self.weights_first(fill), _never_unpacked),
                    ):
                        outputs.append(tree_leaves(call.callee.original(*args, **kwargs)))
        except _ReplayDone:
            pass

    def _cannot_replay(self, callee: Recordable, reason: str, slots: Iterable[_Slot]) -> None:
        """Keep the activations of a call that a replay could not repeat, and say so once."""
        for slot in slots:
            slot.keep()
        self.counters.blocks_kept += 1
        warnings.warn(f"{callee.name} {reason}, so it can't be run again: its activations are kept", stacklevel=2)

    def _bind(self, leaves: list[Any]) -> list[Any]:
        # One external input for each tensor object: a block may ask whether two arguments are the same object.
        externals: dict[int, _ExternalInput] = {}
        bound: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                bound.append(leaf)
                continue
            version = version_of(leaf)
            returned = self._returned.get(id(leaf))
            # The identity alone is not enough: a model may have written into the tensor between two blocks, or cut it
            # off from its history (`detach_`).
            if (
                returned is not None
                and returned.tensor() is leaf
                and returned.version == version
                and returned.requires_grad == leaf.requires_grad
            ):
                bound.append(returned.link)
                continue
            if id(leaf) not in externals:
                externals[id(leaf)] = _ExternalInput(leaf.detach(), leaf.requires_grad, version)
            bound.append(externals[id(leaf)])
        return bound

    def _remember_outputs(self, result: Any) -> None:
        call = len(self._calls) - 1
        for index, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self._returned[id(leaf)] = _Returned(
                    weakref.ref(leaf), _Link(call, index), version_of(leaf), leaf.requires_grad
                )


def _resolve(call: _Call, outputs: list[list[Any]]) -> list[Any]:
    """Return the leaves of a call's arguments for its replay."""
    made: dict[int, torch.Tensor] = {}
    leaves = []
    for leaf in call.leaves:
        if isinstance(leaf, _Link):
            leaves.append(outputs[leaf.call][leaf.leaf])
        elif isinstance(leaf, _ExternalInput):
            if leaf.changed:
                raise ReplayError(
                    f"an input of {call.callee.name} was modified in place after it had been read, so it can't be "
                    "recomputed; leave the block out of the segments, or don't modify its input"
                )
            if id(leaf) not in made:
                made[id(leaf)] = leaf.value().requires_grad_(leaf.requires_grad)
            leaves.append(made[id(leaf)])
        else:
            leaves.append(leaf)
    return leaves


def _check_unchanged(call: _Call, modules: list[nn.Module]) -> None:
    if (changed := changed_object(call.objects)) is not None:
        raise ReplayError(
            f"an argument of {call.callee.name}, a {changed}, was changed between the forward and the backward pass, "
            "so it can't be recomputed"
        )
    if not same_tensors(call.tensors, tensor_states(modules)):
        raise ReplayError(
            f"{first_difference(call.callee.module, call.tensors)!r} of {call.callee.name} was replaced or modified in "
            "place between the forward and the backward pass, so it can't be recomputed"
        )


def _check_same(slot: _Slot, tensor: torch.Tensor, where: str) -> None:
    """Refuse a replay that differs from the forward pass, instead of computing wrong gradients."""
    if tensor.shape != slot.shape or tensor.dtype != slot.dtype or where != slot.where:
        raise ReplayError(
            f"{slot.where} did not repeat itself: where its forward pass saved a {slot.dtype} tensor of "
            f"shape {tuple(slot.shape)}, the replay of {where} saved {tensor.dtype} {tuple(tensor.shape)}. A "
            "context that was around the forward pass (sdpa_kernel, another default dtype) must be around backward too"
        )
    if slot.digest is not None and _digest(tensor) != slot.digest:
        raise ReplayError(
            f"{slot.where} is not deterministic: its replay computed other values than its forward pass. "
            "Only torch's default generators are restored; Python's, NumPy's and private generators are not"
        )


def _digest(tensor: torch.Tensor) -> bytes:
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that consists of other tensors
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = (getattr(tensor, name) for name in names)
        return b"".join(_digest(part) for part in inner if isinstance(part, torch.Tensor))
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(dense.numpy().tobytes()).digest()


def _never_unpacked(_: None) -> torch.Tensor:
    raise ReplayError("a block ran a backward pass inside its replay, which its forward pass did not do")
