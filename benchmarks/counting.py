"""Counting bytes and seconds of a training step, for the benchmarks."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes that `step` had allocated at one time, above what was there before it.

    Every allocation and release of torch's CPU allocator is counted, by its profiler.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    profiler: Any = recorded.profiler  # torch has no public way to the single allocations
    allocations = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    present = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        present += event.nbytes()
        peak = max(peak, present)
    return peak


def median_seconds(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    warm: Collection[str] = (),
) -> dict[str, float]:
    """Return the median of each step's times; see `timed`."""
    return {name: statistics.median(times) for name, times in timed(steps, rounds, around, warm).items()}


def median_ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of two steps' times, round by round: the machine was the same in each."""
    return statistics.median(one / other for one, other in zip(mine, others, strict=True))


def timed(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    warm: Collection[str] = (),
    together: Iterable[Collection[str]] = (),
) -> dict[str, list[float]]:
    """Time several steps in turns, `rounds` times each after one warm-up, and return the times of each.

    In turns, because a machine gets faster and slower while it works: each round sees the same machine. In another
    order each time, because what one step leaves behind (freed memory, warm caches) is felt by the next.

    Args:
        steps: what is timed.
        rounds: how often.
        around: a context for each step in which it runs; entering and leaving it is not timed.
        warm: steps that run once untimed after each entering, for what they learn there.
        together: groups of steps that are timed one right after another, for they will be compared.
    """
    groups = [list(group) for group in together]
    groups += [[name] for name in steps if not any(name in group for group in groups)]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    shuffled = random.Random(0)
    for _ in range(rounds):
        order = [shuffled.sample(group, len(group)) for group in shuffled.sample(groups, len(groups))]
        for name in chain.from_iterable(order):
            step = steps[name]
            gc.collect()
            with around[name]() if around else nullcontext():
                if name in warm:
                    step()
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    return seconds
