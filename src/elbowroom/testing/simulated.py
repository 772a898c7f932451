"""A simulated accelerator: a device of torch whose memory is counted and limited, and whose copies are late.

    with simulated_accelerator(capacity=64 << 20, seed=1) as accelerator:
        model.to(accelerator.device)
        ...
        assert accelerator.peak_bytes() < 48 << 20 and not accelerator.violations

Tensors are computed by the CPU. What is simulated is the memory: its exact use, its limit, and that tensors of
different devices don't mix; and the copies between device and host (see `copies.py`). A process has one such device
type at a time: torch has room for one backend that is written in Python.

Source: the experimental `torch.utils.backend_registration._setup_privateuseone_for_python_backend`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from elbowroom.memory.devices.base import Device, Event, Geometry
from elbowroom.memory.devices.strided import strided_view
from elbowroom.testing.copies import Copies, Copy

NAME = "simulated"


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device. `raw` is the CPU tensor with its bytes."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> SimulatedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = _active()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        _refuse_mixed(func, tensors)
        device.used({leaf.raw.untyped_storage()._cdata for leaf in tensors if isinstance(leaf, SimulatedTensor)})
        wrappers = {id(leaf.raw): leaf for leaf in tensors if isinstance(leaf, SimulatedTensor)}
        to_host = func is torch.ops.aten._to_copy.default and _is_host(kwargs.get("device"))
        raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
        result = func(*raw_args, **raw_kwargs)
        if to_host:
            return result

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in wrappers:  # written in place
                return wrappers[id(leaf)]
            return device.tensor(leaf)

        if func is torch.ops.aten.copy_.default and not isinstance(args[0], SimulatedTensor):
            return args[0]  # to the host
        return tree_map(wrapped, result)


class SimulatedAccelerator(Device):
    """The device, as the engine sees it, and what tests want to know about it.

    Attributes:
        capacity: bytes of memory; None is no limit.
        violations: what would be undefined on real hardware; a right program leaves this empty.
    """

    device = torch.device("cpu")  # until the backend has its name
    in_host_memory = False

    def __init__(self, capacity: int | None, seed: int, late: bool):
        self.device = torch.device(NAME, 0)
        self.capacity = capacity
        self._copies = Copies(seed, late)
        self._sizes: dict[int, int] = {}
        self._in_use = 0
        self._peak = 0

    @property
    def violations(self) -> list[str]:
        return self._copies.violations

    # ---- memory ------------------------------------------------------------------------------------------------------

    def tensor(self, raw: torch.Tensor) -> SimulatedTensor:
        """Return a tensor of the device with the bytes of a CPU tensor, which are counted from now on.

        Raises:
            torch.OutOfMemoryError: they are more than the device has left.
        """
        storage = raw.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address not in self._sizes:
            if self.capacity is not None and self._in_use + nbytes > self.capacity:
                raise torch.OutOfMemoryError(
                    f"simulated accelerator: {nbytes} bytes needed, {self._in_use} of {self.capacity} in use"
                )
            self._sizes[address] = nbytes
            self._in_use += nbytes
            self._peak = max(self._peak, self._in_use)
            weakref.finalize(storage, self._released, address).atexit = False
        return SimulatedTensor(raw)

    def _released(self, address: int) -> None:
        self._in_use -= self._sizes.pop(address)

    def used(self, storages: set[int]) -> None:
        """Note that an operation of the device uses these storages; some copy may run at this moment."""
        self._copies.check_use(storages)
        self._copies.tick()

    def bytes_in_use(self) -> int:
        return self._in_use

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._in_use

    # ---- the seam ----------------------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, SimulatedTensor) and tensor.layout == torch.strided

    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        return cast(SimulatedTensor, tensor).raw.untyped_storage()

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.tensor(torch.empty(0, dtype=torch.uint8).set_(self.storage(tensor)))

    def witness(self, tensor: torch.Tensor) -> torch.Tensor:
        witness = cast(SimulatedTensor, tensor.detach())
        witness.raw = torch.empty(0, dtype=tensor.dtype)
        return witness

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def view(self, flat: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        return strided_view(flat, geometry)

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copies.ask("copy out", cast(SimulatedTensor, source).raw, target, self._own(after))

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copies.ask("copy in", source, cast(SimulatedTensor, target).raw, self._own(after))

    def synchronize(self) -> None:
        for copy in list(self._copies._waiting):
            copy.wait()

    @staticmethod
    def _own(events: Sequence[Event]) -> list[Copy]:
        for event in events:
            if not isinstance(event, Copy):  # work of another thread: only the host can wait for it
                event.wait()
        return [event for event in events if isinstance(event, Copy)]


@contextmanager
def simulated_accelerator(
    capacity: int | None = None, *, seed: int = 0, late: bool = True
) -> Iterator[SimulatedAccelerator]:
    """Have a simulated accelerator for the time of a context.

    Args:
        capacity: its memory in bytes; None is no limit.
        seed: of the adversary who orders the copies.
        late: False completes every copy at once.
    """
    _register()
    before = _MODULE.active
    _MODULE.active = accelerator = SimulatedAccelerator(capacity, seed, late)
    try:
        # In the calling thread: an error in autograd's thread of a device that is written in Python ends the process.
        with torch.autograd.set_multithreading_enabled(False):
            yield accelerator
    finally:
        _MODULE.active = before


_LARGE = 80 << 30


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device type (`torch.cuda` is the one of CUDA)."""

    registered = False
    active: SimulatedAccelerator | None = None

    def is_available(self) -> bool:
        return self.active is not None

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()  # the CPU computes, so it is its generator that is drawn from

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return free and all bytes, as `torch.cuda.mem_get_info` does; without a limit, those of a large card."""
        accelerator = _active()
        total = _LARGE if accelerator.capacity is None else accelerator.capacity
        return total - accelerator.bytes_in_use(), total

    def elbowroom_device(self, device: torch.device) -> SimulatedAccelerator:
        return _active()


_MODULE = _Module()  # torch has one place for it in a process


def _active() -> SimulatedAccelerator:
    if _MODULE.active is None:
        raise RuntimeError("a simulated tensor is used outside of `with simulated_accelerator()`")
    return _MODULE.active


def _register() -> None:
    if _MODULE.registered:
        return
    _MODULE.registered = True
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_MODULE)
    for name in ("empty.memory_format", "empty_strided"):
        _LIBRARY.impl(name, _factory(name), "PrivateUse1")


_LIBRARY = torch.library.Library("aten", "IMPL")  # taking it back would take the operations back


def _factory(name: str) -> Any:
    operation, overload = name.split(".") if "." in name else (name, "default")
    function = getattr(getattr(torch.ops.aten, operation), overload)

    def make(*args: Any, **kwargs: Any) -> SimulatedTensor:
        return _active().tensor(function(*args, **{**kwargs, "device": "cpu", "pin_memory": False}))

    return make


def _raw(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _refuse_mixed(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
        return
    # As on real devices: a single number from the host is no tensor of another device.
    if any(not isinstance(tensor, SimulatedTensor) and tensor.dim() > 0 for tensor in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {NAME}:0 and cpu")
