"""In which order things are asked for: learned in one pass, used in the next."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

REMEMBERED = 64
"""Kinds of passes whose order is remembered: every shape that a training run has in turn is one."""

NEVER = 1 << 62


class Orders:
    """The orders of past passes, by what tells one kind of pass from others."""

    def __init__(self) -> None:
        self._orders: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()

    def learn(self, kind: Hashable, order: Sequence[int]) -> None:
        """Remember in which order a pass of a kind asked for things, by their numbers."""
        self._orders[kind] = tuple(order)
        self._orders.move_to_end(kind)
        while len(self._orders) > REMEMBERED:
            self._orders.popitem(last=False)

    def known(self, kind: Hashable) -> tuple[int, ...] | None:
        """Return the order of the last pass of this kind."""
        return self._orders.get(kind)


class Forecast:
    """Where a pass is in a known order, and what it will ask for next. A number may come several times."""

    def __init__(self, order: Sequence[int]):
        self._order = order
        self._places: dict[int, list[int]] = {}
        for place, number in enumerate(order):
            self._places.setdefault(number, []).append(place)
        self._next = 0

    def asked_for(self, number: int) -> bool:
        """Note what was asked for; True if the order has others before it, which are not awaited any more."""
        place = self.next_use(number)
        if place == NEVER:
            return False
        passed_over, self._next = place > self._next, place + 1
        return passed_over

    def next_use(self, number: int) -> int:
        """Return the place in the order where a number comes next, `NEVER` if it does not."""
        places = self._places.get(number, ())
        found = bisect_left(places, self._next)
        return places[found] if found < len(places) else NEVER

    def upcoming(self) -> Iterator[int]:
        """Yield the numbers that come next."""
        for place in range(self._next, len(self._order)):
            yield self._order[place]

    @property
    def ended(self) -> bool:
        """Whether the order has nothing more to come."""
        return self._next >= len(self._order)
