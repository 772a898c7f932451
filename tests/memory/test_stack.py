"""The arithmetic of the stack of spans, without any memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.memory.offload.stack import ALIGNMENT, Slab, Span, SpanStack


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3)), max_size=60), st.integers(0, 2**16))
def test_spans_never_overlap_and_the_limit_holds(requests, seed):
    choose = random.Random(seed)
    stack, live = SpanStack(limit=60_000, slab=4096), []
    for nbytes, frees in requests:
        for _ in range(min(frees, len(live))):
            stack.free(live.pop(choose.randrange(len(live))))
        span = stack.allocate(nbytes)
        if span is None:
            continue
        live.append(span)
        assert span.offset % ALIGNMENT == 0 and span.end <= span.slab.nbytes and span.slab in stack.slabs
        assert stack.allocated <= 60_000 and stack.used == sum(each.nbytes for each in live)
        for other in live[:-1]:
            assert other.slab is not span.slab or other.end <= span.offset or span.end <= other.offset
    for span in live:
        stack.free(span)
    assert stack.used == 0 and all(not slab.spans for slab in stack.slabs)


def run_step(stack: SpanStack, sizes: list[int]) -> None:
    """Last in, first out, as a training step is."""
    stack.consolidate()
    spans = [stack.allocate(nbytes) for nbytes in sizes]
    for span in reversed(spans):
        assert isinstance(span, Span)
        stack.free(span)


@given(st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=20), min_size=1, max_size=3))
def test_nothing_grows_after_two_steps_of_each_shape(shapes):
    stack = SpanStack(limit=1 << 30, slab=2048)
    for _ in range(2):
        for sizes in shapes:
            run_step(stack, sizes)
    run_step(stack, shapes[0])
    slabs = list(stack.slabs)
    for _ in range(3):
        for sizes in shapes:
            run_step(stack, sizes)
    assert stack.slabs == slabs and len(slabs) == 1
    most = max(sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes) for sizes in shapes)
    assert stack.allocated <= max(most, 2048)


def test_a_limit_below_two_slabs_is_used_as_a_whole():
    stack = SpanStack(100 * ALIGNMENT, slab=64 * ALIGNMENT)
    for step in range(3):
        spans = [stack.allocate(50 * ALIGNMENT) for _ in range(2)]
        assert spans[0] is not None and (spans[1] is not None or step == 0)
        for span in reversed(spans):
            if span is not None:
                stack.free(span)
        stack.consolidate()
    assert len(stack.slabs) == 1 and stack.allocated == 100 * ALIGNMENT


def test_a_span_is_freed_once():
    stack = SpanStack(limit=4096)
    span = stack.allocate(10)
    assert span is not None
    stack.free(span)
    with pytest.raises(ValueError, match="freed twice"):
        stack.free(span)


def test_a_span_that_stays_does_not_block_the_slabs_below_it():
    stack = SpanStack(limit=4 * 4096, slab=4096)
    spans = [stack.allocate(4096) for _ in range(4)]
    for span in spans[:3]:
        assert span is not None
        stack.free(span)
    for _ in range(3):
        again = [stack.allocate(4096) for _ in range(3)]
        assert all(again) and stack.allocate(1) is None
        for span in again:
            assert span is not None
            stack.free(span)
    assert stack.allocated == 4 * 4096


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(0, 20_000), st.integers(0, 2**16))
def test_what_can_not_be_made_lowers_the_limit_and_nothing_else(sizes, capacity, seed):
    """A full disk: what is there already stays in use, and slabs are made as long as smaller ones can be had."""
    choose = random.Random(seed)
    stack = SpanStack(limit=1 << 20, slab=8192)
    refused: list[int] = []

    def make(slab: Slab) -> bool:
        if stack.allocated + slab.nbytes > capacity:
            refused.append(slab.nbytes)
            return False
        return True

    for _ in range(4):
        spans = [span for nbytes in sizes if (span := stack.allocate(nbytes, make)) is not None]
        assert stack.allocated <= capacity and stack.peak <= capacity
        assert stack.used == sum(span.nbytes for span in spans)
        choose.shuffle(spans)
        for span in spans:
            stack.free(span)
        stack.consolidate()
    if capacity >= 4096 and min(sizes) <= 1024:
        assert stack.peak > 0  # something did fit
    assert len(refused) <= 16, "each refusal halves what is asked for next"
