"""Whether reloading ahead of use is faster: a real step each way, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elbowroom.memory import ambient
from elbowroom.memory.offload.offloader import Offloader

FASTER = 0.98
"""Prefetching has to take less than this share of the time on demand: a smaller gain is noise."""


@dataclass(frozen=True)
class Measured:
    """One step: its seconds, and the most bytes that were in use on the device."""

    seconds: float
    peak: int


@dataclass(frozen=True)
class PrefetchDecision:
    """What a probe found out, for one shape.

    Attributes:
        prefetch: reload ahead of use.
        reason: why, in words.
        on_demand, prefetched: the two steps; None where one failed.
    """

    prefetch: bool
    reason: str
    on_demand: Measured | None = None
    prefetched: Measured | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values; `from_dict` gives an equal decision back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrefetchDecision:
        measured = {
            name: None if values[name] is None else Measured(**values[name]) for name in ("on_demand", "prefetched")
        }
        return cls(values["prefetch"], values["reason"], **measured)


def probe_prefetch(
    step: Callable[[], None],
    offloaders: Sequence[Offloader],
    parameters: Iterable[torch.nn.Parameter],
    *,
    buffers: Iterable[torch.Tensor] = (),
    budget: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PrefetchDecision:
    """Time a step on demand and the same step prefetched, and decide.

    Training is not changed by it: random numbers are put back before each step and after, gradients that were there are
    put back, and those of the probe are dropped.

    Args:
        step: a forward and backward pass, always on the same batch. Its order of restores must have been learned: it,
            or one of the same shape, has run once.
        offloaders: of the handle (`Handle.offloaders`); prefetching is left as it was.
        parameters: whose gradients the step adds to. (Optimizers that step in the backward pass would change them.)
        buffers: what the step writes into, such as the statistics of batch normalization.
        budget: bytes of the device that prefetching must not exceed.
        clock: seconds.

    Raises:
        Exception: what the step on demand raised; nothing is changed then either.
    """
    written = [(buffer, buffer.clone()) for buffer in buffers]
    held = [(parameter, parameter.grad) for parameter in parameters]
    before = [offloader.prefetch for offloader in offloaders]
    accelerator = next((o.device.device for o in offloaders if o.device.device.type != "cpu"), None)
    random_state = ambient.random_state(accelerator)

    def put_back() -> None:
        ambient.set_random_state(random_state, accelerator)
        with torch.no_grad():
            for buffer, value in written:
                buffer.copy_(value)

    def measured(prefetch: bool) -> Measured:
        put_back()
        for parameter, _ in held:
            parameter.grad = None
        for offloader in offloaders:
            offloader.prefetch = prefetch
            offloader.device.reset_peak()
            offloader.device.synchronize()
        started = clock()
        step()
        for offloader in offloaders:
            offloader.device.synchronize()
        return Measured(clock() - started, sum(offloader.device.peak_bytes() for offloader in offloaders))

    try:
        on_demand = measured(prefetch=False)
        try:
            prefetched = measured(prefetch=True)
        except Exception as error:  # whatever it was: the step works without prefetching
            return PrefetchDecision(False, f"the prefetched step failed: {error}", on_demand)
        return _decide(on_demand, prefetched, budget)
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
        for offloader, prefetch in zip(offloaders, before, strict=True):
            offloader.prefetch = prefetch
        put_back()


def _decide(on_demand: Measured, prefetched: Measured, budget: int | None) -> PrefetchDecision:
    times = f"{prefetched.seconds:.3f} s prefetched, {on_demand.seconds:.3f} s on demand"
    if prefetched.seconds >= FASTER * on_demand.seconds:
        return PrefetchDecision(False, f"prefetching is not faster: {times}", on_demand, prefetched)
    if budget is not None and prefetched.peak > budget:
        reason = f"prefetching would take {prefetched.peak} bytes, and {budget} are allowed ({times})"
        return PrefetchDecision(False, reason, on_demand, prefetched)
    return PrefetchDecision(True, f"prefetching is faster: {times}", on_demand, prefetched)
