"""In which order a backward pass asks for what was offloaded: learned in one step, used in the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

REMEMBERED = 64
"""Kinds of passes whose order is remembered: every shape that a training run has in turn is one."""


class Orders:
    """The restore orders of past passes.

    A pass is told from others by the sizes of its records, in the order in which they were made: the same shapes under
    the same plan give the same sizes.
    """

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[int, ...], tuple[int, ...]] = OrderedDict()

    def learn(self, sizes: Sequence[int], order: Sequence[int]) -> None:
        """Remember in which order the records of a pass were asked for, by their numbers."""
        signature = tuple(sizes)
        self._orders[signature] = tuple(order)
        self._orders.move_to_end(signature)
        while len(self._orders) > REMEMBERED:
            self._orders.popitem(last=False)

    def known(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the order that was learned for a pass with records of these sizes."""
        return self._orders.get(tuple(sizes))


class Forecast:
    """Where a backward pass is in a known order, and what it will ask for next."""

    def __init__(self, order: Sequence[int]):
        self._order = order
        self._places = {number: place for place, number in enumerate(order)}
        self._next = 0

    def asked_for(self, number: int) -> bool:
        """Note what was asked for; True if the order has others before it, which are not awaited any more."""
        place = self._places.get(number)
        if place is None or place < self._next:
            return False
        passed_over, self._next = place > self._next, place + 1
        return passed_over

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers of the records that come next."""
        yield from self._order[self._next :]
