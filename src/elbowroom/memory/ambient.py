"""The state around a call that changes what it computes: the current device, random numbers, autocast.

A replay must see the state that the forward pass saw, and leave the state of the backward pass untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """Autocast's settings for one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )


def current_autocast(accelerator: torch.device | None) -> tuple[Autocast, ...]:
    """Return autocast's settings for the CPU and for the accelerator, if there is one."""
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple(Autocast.current(device_type) for device_type in types)


def autocast_as(settings: Sequence[Autocast]) -> AbstractContextManager[Any]:
    """Return a context with the given autocast settings."""
    # Entering an autocast context clears a cache when it is left, so it is entered only where it matters.
    wanted = [entry for entry in settings if entry.enabled or torch.is_autocast_enabled(entry.device_type)]
    if not wanted:
        return nullcontext()
    stack = ExitStack()
    for entry in wanted:
        stack.enter_context(
            torch.autocast(
                entry.device_type, dtype=entry.dtype, enabled=entry.enabled, cache_enabled=entry.cache_enabled
            )
        )
    return stack


def device_as(accelerator: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context in which the accelerator is the current device; None changes nothing."""
    if accelerator is None or accelerator.index is None:
        return nullcontext()
    return torch.accelerator.device_index(accelerator.index)


RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""State of torch's generators: the CPU's, and that of the accelerator, if there is one."""


def random_state(accelerator: torch.device | None) -> RandomState:
    """Return the state of torch's default generators."""
    if accelerator is None:
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(accelerator).get_rng_state(accelerator)


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Whether no random number was drawn between the two."""
    if not torch.equal(one[0], other[0]):
        return False
    return one[1] is None or other[1] is None or torch.equal(one[1], other[1])


def random_state_as(state: RandomState | None, accelerator: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context with the given random state, which puts the present one back; None changes nothing."""
    return nullcontext() if state is None else _random_state_as(state, accelerator)


@contextmanager
def _random_state_as(state: RandomState, accelerator: torch.device | None) -> Iterator[None]:
    present = random_state(accelerator)
    set_random_state(state, accelerator)
    try:
        yield
    finally:
        set_random_state(present, accelerator)


def set_random_state(state: RandomState, accelerator: torch.device | None) -> None:
    """Put torch's default generators into a state that `random_state` returned."""
    torch.set_rng_state(state[0])
    if accelerator is not None and state[1] is not None:
        torch.get_device_module(accelerator).set_rng_state(state[1], accelerator)
