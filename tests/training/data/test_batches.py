from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.training.data import Bucket, DataError, accumulation_groups, epoch_batches, steps_per_epoch

buckets_of_samples = st.lists(st.builds(Bucket, st.sampled_from([64, 96]), st.sampled_from([64, 96])), min_size=1)
counts = st.integers(1, 6)


@given(buckets_of_samples, counts, counts, st.integers(0, 9), st.integers(0, 9))
def test_every_sample_as_often_as_it_should_in_batches_of_one_bucket(buckets, batch, repeats, seed, epoch):
    batches = epoch_batches(buckets, batch=batch, repeats=repeats, seed=seed, epoch=epoch)
    seen = Counter(index for members in batches for index in members)
    assert seen == dict.fromkeys(range(len(buckets)), repeats)
    assert all(len({buckets[index] for index in members}) == 1 for members in batches)
    assert all(1 <= len(members) <= batch for members in batches)
    partial = Counter(buckets[members[0]] for members in batches if len(members) < batch)
    assert all(count == 1 for count in partial.values())
    assert epoch_batches(buckets, batch=batch, repeats=repeats, seed=seed, epoch=epoch) == batches


@given(buckets_of_samples, counts, counts, counts)
def test_announced_steps_are_the_steps_made(buckets, batch, repeats, accumulation):
    """A14: the number of optimizer steps is what was announced, and no batch is lost."""
    batches = epoch_batches(buckets, batch=batch, repeats=repeats, seed=0, epoch=0)
    groups = accumulation_groups(batches, accumulation)
    assert tuple(members for group in groups for members in group) == batches
    assert all(len(group) == accumulation for group in groups[:-1])
    assert 1 <= len(groups[-1]) <= accumulation
    assert steps_per_epoch(buckets, batch=batch, repeats=repeats, accumulation=accumulation) == len(groups)


@pytest.mark.parametrize(("images", "sizes"), [(3, [3]), (7, [4, 3]), (8, [4, 4])])
def test_last_accumulation_group_is_partial(images: int, sizes: list[int]):
    """A14: 3 images and accumulation 4; 7 images and accumulation 4, in each of two epochs."""
    for epoch in range(2):
        batches = epoch_batches([Bucket(64, 64)] * images, batch=1, repeats=1, seed=0, epoch=epoch)
        assert [len(group) for group in accumulation_groups(batches, 4)] == sizes


def test_order_is_the_same_on_every_machine():
    """F04: what a resumed run computes again must not depend on the process, the machine or the Python version."""
    buckets = [Bucket(64, 64)] * 5 + [Bucket(96, 64)] * 3
    assert epoch_batches(buckets, batch=2, repeats=1, seed=7, epoch=3) == ((6,), (5, 7), (0, 1), (2, 4), (3,))


def test_order_changes_with_epoch_and_seed():
    def order(seed: int, epoch: int):
        return epoch_batches([Bucket(64, 64)] * 20, batch=2, repeats=1, seed=seed, epoch=epoch)

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_batches_of_different_buckets_are_mixed():
    buckets = [Bucket(64, 64)] * 40 + [Bucket(96, 64)] * 40
    wide = [members[0] >= 40 for members in epoch_batches(buckets, batch=2, repeats=1, seed=0, epoch=0)]
    changes = sum(before != after for before, after in itertools.pairwise(wide))
    assert changes > 10


def test_all_samples_come_before_any_comes_again():
    buckets = [Bucket(64, 64)] * 6
    for seed in range(5):
        batches = epoch_batches(buckets, batch=6, repeats=3, seed=seed, epoch=0)
        assert all(len(set(members)) == 6 for members in batches)


def test_ten_images_of_ten_aspect_ratios_all_train():
    """E07: many buckets with one image each are not rounded down to nothing."""
    buckets = [Bucket(64 + 16 * number, 64) for number in range(10)]
    batches = epoch_batches(buckets, batch=4, repeats=1, seed=0, epoch=0)
    assert sorted(batches) == [(number,) for number in range(10)]
    assert steps_per_epoch(buckets, batch=4, repeats=1, accumulation=8) == 2


@pytest.mark.parametrize("name", ["batch", "repeats", "accumulation"])
def test_counts_below_one_are_refused_by_name(name: str):
    """E07: repeats 0."""
    counts = {"batch": 1, "repeats": 1, "accumulation": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, but is 0"):
        steps_per_epoch([Bucket(64, 64)], **counts)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, but is 0"):
        accumulation = counts.pop("accumulation")
        accumulation_groups(epoch_batches([Bucket(64, 64)], seed=0, epoch=0, **counts), accumulation)


def test_no_samples_is_an_error():
    """E07: 0 images."""
    with pytest.raises(DataError, match="0 images are usable"):
        epoch_batches([], batch=1, repeats=1, seed=0, epoch=0)
    with pytest.raises(DataError, match="0 images are usable"):
        steps_per_epoch([], batch=1, repeats=1, accumulation=1)
