"""What can be wrong with options, said so that a person can put it right: where, what, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the options that were given.

    Attributes:
        key: the option, or the word that was written where an option was expected.
        place: where it was written, such as `shapes.toml line 3` or `environment ELBOWROOM_RANK`; empty if nowhere.
        message: what is wrong and what is accepted.
        suggestion: the nearest valid spelling, if one is near.
    """

    key: str
    place: str
    message: str
    suggestion: str | None = None

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        suggestion = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.key}{place}: {self.message}{suggestion}"


class OptionsError(ValueError):
    """The options can't be used. `problems` holds everything that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} with the options:\n" + "\n".join(f"  {problem}" for problem in self.problems))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate spelled most like `word`, whatever the case and whether with dashes or underscores; None if far."""
    by_folded = {_folded(candidate): candidate for candidate in candidates}
    matches = difflib.get_close_matches(_folded(word), by_folded, n=1)
    return by_folded[matches[0]] if matches else None


def _folded(word: str) -> str:
    return word.strip().lower().replace("-", "_")
