"""The one error that a data folder causes."""

from __future__ import annotations

from collections.abc import Sequence


class DataError(ValueError):
    """The data cannot be trained on. The message says what was found, where, and the smallest change that helps."""


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names as one line of text, and how many more there are: `"a, b and 3 more"`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
