"""In which order the samples of an epoch are trained on. Pure functions of the seed and the epoch: a run that resumes
computes the same order again and goes on where it was."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TypeVar

from .buckets import Bucket
from .errors import DataError

Item = TypeVar("Item")

Batch = tuple[int, ...]
"""Indices of samples that are trained on together; all in one bucket."""


def epoch_batches(buckets: Sequence[Bucket], *, batch: int, repeats: int, seed: int, epoch: int) -> tuple[Batch, ...]:
    """The batches of one epoch, shuffled.

    Every sample occurs exactly `repeats` times. A bucket is shuffled once per repeat, and all its samples come before
    any comes again. What is left of a bucket becomes a smaller batch; nothing is dropped. The order is the same on
    every machine and Python version.

    Args:
        buckets: the bucket of each sample; results are indices into this sequence.
        batch: the most samples in a batch.
        repeats: how often an epoch shows each sample.

    Raises:
        DataError: there are no samples.
        ValueError: `batch` or `repeats` is below 1.
    """
    _check_counts(batch=batch, repeats=repeats)
    _check_not_empty(buckets)
    generator = random.Random(f"epoch {epoch} of seed {seed}")
    members: dict[Bucket, list[int]] = defaultdict(list)
    for index, bucket in enumerate(buckets):
        members[bucket].append(index)
    batches: list[Batch] = []
    for _, indices in sorted(members.items()):
        order = [index for _ in range(repeats) for index in _shuffled(indices, generator)]
        batches += (tuple(order[start : start + batch]) for start in range(0, len(order), batch))
    return tuple(_shuffled(batches, generator))


def accumulation_groups(batches: Sequence[Batch], accumulation: int) -> tuple[tuple[Batch, ...], ...]:
    """The batches of each optimizer step: `accumulation` of them, and in the last group of the epoch what is left.

    Raises:
        ValueError: `accumulation` is below 1.
    """
    _check_counts(accumulation=accumulation)
    return tuple(tuple(batches[start : start + accumulation]) for start in range(0, len(batches), accumulation))


def steps_per_epoch(buckets: Sequence[Bucket], *, batch: int, repeats: int, accumulation: int) -> int:
    """How many optimizer steps an epoch has: the number of its accumulation groups.

    Raises:
        DataError: there are no samples.
        ValueError: a count is below 1.
    """
    _check_counts(accumulation=accumulation)
    _check_not_empty(buckets)
    return math.ceil(sum(batches_per_bucket(buckets, batch=batch, repeats=repeats).values()) / accumulation)


def batches_per_bucket(buckets: Sequence[Bucket], *, batch: int, repeats: int) -> dict[Bucket, int]:
    """How many batches of an epoch come from each bucket, in the order of the buckets' sizes.

    Raises:
        ValueError: a count is below 1.
    """
    _check_counts(batch=batch, repeats=repeats)
    return {bucket: math.ceil(count * repeats / batch) for bucket, count in sorted(Counter(buckets).items())}


def _shuffled(items: Sequence[Item], generator: random.Random) -> list[Item]:
    # Only random() is promised to give the same numbers in every Python version; shuffle() is not.
    return sorted(items, key=lambda _: generator.random())


def _check_not_empty(buckets: Sequence[Bucket]) -> None:
    if not buckets:
        raise DataError("there are no samples to make batches of: 0 images are usable; add at least one")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
