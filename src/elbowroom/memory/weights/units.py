"""What is streamed together: the weights of one module, a block or a layer."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elbowroom.memory.devices.base import Geometry
from elbowroom.memory.module_state import modules_of
from elbowroom.memory.weights.parts import dense_parts

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes: any number format may, and vector instructions like it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A place where a module has a parameter: `module._parameters[name]` is number `number` of the unit's."""

    module: nn.Module
    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """One dense tensor of a parameter.

    Attributes:
        parameter: number of the parameter in the unit.
        geometry: dtype, size and stride; its offset counts from the part's first byte.
        start: first byte in the unit.
        nbytes: bytes from the first to the last element.
    """

    parameter: int
    geometry: Geometry
    start: int
    nbytes: int

    def at(self, start: int) -> Geometry:
        """Return the geometry in memory where the unit begins at byte `start`, a multiple of `ALIGNMENT`."""
        return self.geometry.moved_to(start + self.start)


class Unit:
    """The streamed weights of one module.

    Attributes:
        name: dotted name of the module in the unwrapped model.
        module: the module.
        number: its place in execution order.
        parameters: its streamed parameters, each once.
        holders: where the modules inside have them.
        parts: the dense tensors of all of them, in the order in which they lie in the unit's memory.
        nbytes: size of that memory.
        origin: the device where they were.
        addresses: where the parts lie in the memory of the host, once they do.
    """

    def __init__(self, name: str, module: nn.Module, number: int, holders: Sequence[tuple[nn.Module, str]]):
        self.name = name
        self.module = module
        self.number = number
        self.parameters: list[nn.Parameter] = []
        self.holders: list[Holder] = []
        numbers: dict[int, int] = {}
        for owner, attribute in holders:
            parameter = owner._parameters[attribute]
            assert parameter is not None
            if id(parameter) not in numbers:
                numbers[id(parameter)] = len(self.parameters)
                self.parameters.append(parameter)
            self.holders.append(Holder(owner, attribute, numbers[id(parameter)]))
        self.parts: list[Part] = []
        self.nbytes = 0
        for index, parameter in enumerate(self.parameters):
            for tensor in dense_parts(parameter):
                part = Part(index, Geometry.of(_dense(tensor)).moved_to(0), self.nbytes, tensor.nbytes)
                self.parts.append(part)
                self.nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.origin = self.parameters[0].device
        self.addresses: list[int] = []
        self._starts = [part.start for part in self.parts]

    def renewed(self) -> Unit:
        """Return a unit of the parameters that the same holders have now."""
        return Unit(self.name, self.module, self.number, [(holder.module, holder.name) for holder in self.holders])

    def part_at(self, start: int) -> Part:
        """Return the part in which a byte of the unit lies."""
        return self.parts[bisect_right(self._starts, start) - 1]


def find_units(base: nn.Module, names: Sequence[str], trainable: bool) -> tuple[list[Unit], dict[str, int]]:
    """Return the units of the named modules, and the parameters that can't be streamed, with their bytes.

    A parameter that a module outside of the unit has too (tied weights), or that shares its memory with another one,
    stays on the device: it has one owner.

    Args:
        base: the unwrapped model.
        names: of the modules, in execution order.
        trainable: stream parameters that need a gradient too.

    Raises:
        RuntimeError: a parameter is of a kind that keeps a part of its values elsewhere.
    """
    modules = dict(base.named_modules())
    places: dict[int, list[nn.Module]] = {}
    for module in modules_of(base):
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(module)
    overlapping = _overlapping(base)
    owners = Counter(id(module) for name in names for module in modules_of(modules[name]))
    units: list[Unit] = []
    tied: dict[str, int] = {}
    for name in names:
        inside = modules_of(modules[name])
        known = {id(module) for module in inside}
        holders = []
        for module in inside:
            for attribute, parameter in module._parameters.items():
                if parameter is None or (parameter.requires_grad and not trainable) or parameter.nbytes == 0:
                    continue
                if id(parameter) in overlapping or any(
                    id(place) not in known or owners[id(place)] > 1 for place in places[id(parameter)]
                ):
                    tied[f"{name}: {attribute}"] = parameter.nbytes
                    continue
                _refuse_unknown_kind(parameter, name, attribute)
                holders.append((module, attribute))
        if holders:
            units.append(Unit(name, modules[name], len(units), holders))
    return units, tied


def _refuse_unknown_kind(parameter: torch.Tensor, module: str, attribute: str) -> None:
    """A subclass without the flatten protocol may keep scales and other state anywhere, as bitsandbytes' layers do."""
    kind = type(parameter)
    if kind in (nn.Parameter, torch.Tensor) or hasattr(parameter, "__tensor_flatten__"):
        return
    raise RuntimeError(
        f"{attribute!r} in {module!r} is a {kind.__name__} of {kind.__module__.partition('.')[0]}, which can't be "
        "streamed, for it does not say which tensors it consists of; load the model without that quantization and "
        'quantize it by `elbowroom.quantization.quantize_base`, which has bitsandbytes\' format as "nf4-bitsandbytes"'
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it will lie in the unit: without holes, and with the same strides if it has none."""
    return torch.empty_like(tensor, device="meta")


def _overlapping(base: nn.Module) -> set[int]:
    """Return the ids of parameters that share bytes with another parameter or buffer of the model."""
    spans: list[tuple[int, int, int]] = []
    for tensor in _tensors(base):
        for part in dense_parts(tensor):
            if type(part) is torch.Tensor and part.layout == torch.strided and part.numel() and not part.is_meta:
                spans.append((part.data_ptr(), part.data_ptr() + part.nbytes, id(tensor)))
    spans.sort()
    shared: set[int] = set()
    end, last = 0, 0
    for start, stop, owner in spans:
        if start < end and owner != last:
            shared |= {owner, last}
        if stop > end:
            end, last = stop, owner
    return shared


def _tensors(base: nn.Module) -> Iterable[torch.Tensor]:
    seen: set[int] = set()
    for module in modules_of(base):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
