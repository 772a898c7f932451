"""What a block computes with besides its arguments: its parameters and buffers, and the settings of its modules.

A replay is right only if both are as they were in the forward pass. Tensors can't be put back, so a change of them is
noticed; settings can (a LoRA's scale that Diffusers changes for one forward pass, `training`, a counter), and are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

TensorStates = list[tuple[torch.Tensor, int | None]]
"""Every parameter and buffer, by identity, with the number of writes in place to it."""

Settings = list[dict[str, Any]]
"""For each module, its attributes that are plain values."""

ObjectStates = list[tuple[Any, dict[str, Any]]]
"""Objects, each with a copy of its attributes that are plain values."""

HOME = "_elbowroom_home"
"""Attribute of a streamed weight's copy on the device: the parameter that it is a copy of."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})
# What every module has and no forward pass changes; `training` is the exception.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_MISSING = object()


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return `root` and all modules inside it, each once: `root.modules()` without the making of names."""
    found = {id(root): root}
    waiting = [root]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the number of writes in place so far; None for tensors of inference mode, which don't count them."""
    return None if tensor.is_inference() else tensor._version


def tensor_states(modules: Sequence[nn.Module]) -> TensorStates:
    """Return identity and version of every parameter and buffer that the modules hold themselves.

    For a copy of a streamed weight, its home stands: the next call will see another copy of the same.
    """
    tensors = [
        getattr(tensor, HOME, tensor)
        for module in modules
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
        if tensor is not None
    ]
    return [(tensor, version_of(tensor)) for tensor in tensors]


def same_tensors(one: TensorStates, other: TensorStates) -> bool:
    """Whether these are the same tensors, not written to in between."""
    return len(one) == len(other) and all(a is b and v == w for (a, v), (b, w) in zip(one, other, strict=True))


def first_difference(block: nn.Module, recorded: TensorStates) -> str:
    """Return the name of the first parameter or buffer of `block` that is not as it was recorded."""
    known = {id(tensor): version for tensor, version in recorded}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if known.get(id(tensor), _MISSING) != version_of(tensor):
            return name
    return "a parameter or buffer that is gone"


def settings_of(modules: Sequence[nn.Module]) -> Settings:
    """Return a copy of all attributes that are numbers, texts or flags, or lists and dicts of such."""
    return [_settings_of(module) for module in modules]


def holds_tensors(value: Any) -> bool:
    """Whether a leaf of arguments or results is an object with tensors inside, which pytree does not look into."""
    if isinstance(value, (torch.Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(inner, torch.Tensor) for inner in vars(value).values())


def plain_objects(leaves: Sequence[Any]) -> ObjectStates:
    """Return the objects among arguments whose attributes a call may change, with a copy of those that are plain."""
    return [
        (leaf, _plain_attributes(vars(leaf)))
        for leaf in leaves
        if not isinstance(leaf, (torch.Tensor, nn.Module, type)) and hasattr(leaf, "__dict__")
    ]


def changed_object(objects: ObjectStates) -> str | None:
    """Return the class of the first object that is not as it was."""
    return next((type(each).__name__ for each, then in objects if _plain_attributes(vars(each)) != then), None)


class LeftBehind:
    """What a call leaves behind in modules and arguments, besides what it returns.

    Args:
        modules: whose attributes are looked at.
        arguments: of the call, as a tree.
    """

    def __init__(self, modules: Sequence[nn.Module], arguments: tuple[tuple, dict]):
        self._attributes = [(module.__dict__, module.__dict__.copy()) for module in modules]
        args, kwargs = arguments
        # Tensors and numbers by themselves can't grow.
        self._arguments = arguments if any(type(each) in _CONTAINERS for each in (*args, *kwargs.values())) else None
        self._tree = tree_flatten(self._arguments)

    def found(self) -> str | None:
        """Return what is not as it was, in words."""
        for now, before in self._attributes:
            for name, value in now.items():
                if before.get(name, _MISSING) is not value and _differs(before.get(name, _MISSING), value):
                    return f"its attribute {name!r}"
            if len(now) < len(before):
                return f"its attribute {min(before.keys() - now.keys())!r}"
        leaves, structure = tree_flatten(self._arguments)
        if structure != self._tree[1] or any(a is not b for a, b in zip(leaves, self._tree[0], strict=True)):
            return "a list or dict that it was given"
        return None


class settings_as:
    """A context in which modules have the given settings; then the present ones are put back."""

    def __init__(self, modules: Sequence[nn.Module], wanted: Settings):
        self._modules = modules
        self._wanted = wanted

    def __enter__(self) -> None:
        self._present = settings_of(self._modules)
        self._hidden = _put(self._modules, self._present, self._wanted)

    def __exit__(self, *_: object) -> None:
        _put(self._modules, settings_of(self._modules), self._present)
        for attributes, name, value in self._hidden:
            attributes[name] = value


def _differs(before: Any, now: Any) -> bool:
    """Whether an attribute was set to another tensor or plain value; what else is set there can't be judged."""
    kind = type(now)
    if isinstance(now, torch.Tensor) or isinstance(before, torch.Tensor):
        return True
    return kind in _PLAIN and not (type(before) is kind and before == now)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    return _plain_attributes(module.__dict__)


def _plain_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in attributes.keys() - _INTERNAL:
        value = attributes[name]
        kind = type(value)
        if kind in _PLAIN:
            found[name] = value
        elif kind in _CONTAINERS and all(type(item) in _PLAIN for item in _items(value)):
            found[name] = value if kind is tuple else value.copy()
    return found


def _items(container: Any) -> Any:
    return container.values() if type(container) is dict else container


def _put(modules: Sequence[nn.Module], present: Settings, wanted: Settings) -> list[tuple[dict[str, Any], str, Any]]:
    """Change the present settings into the wanted ones.

    Returns:
        The attributes that are no settings and had to make room for one: where they were, their name and value.
    """
    hidden = []
    for module, now, then in zip(modules, present, wanted, strict=True):
        if now == then:
            continue
        attributes = module.__dict__
        for name in now.keys() - then.keys():
            del attributes[name]
        for name, value in then.items():
            if name in now and now[name] == value:
                continue
            held = attributes.get(name, _MISSING)
            if name not in now and held is not _MISSING:
                hidden.append((attributes, name, held))
            if type(held) is dict and type(value) is dict:  # in place: others may hold the same dict
                held.clear()
                held.update(value)
            elif type(held) is list and type(value) is list:
                held[:] = value
            else:
                attributes[name] = value.copy() if type(value) in (list, dict) else value
    return hidden
