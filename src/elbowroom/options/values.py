"""From what was written for an option, text or a native value, to its value: the one way, whatever the source.

The command line, the environment, files and code all go through `convert`, so a spelling means the same everywhere.
What an option takes is its `Kind`; the kinds are in `kinds.py`.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

UNSET_WORDS: Final = ("", "none", "null")


class Unset(Enum):
    """The type of `UNSET`: the value was written as unset, so the default holds."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class ValueProblem(ValueError):
    """A value that an option can't take. `message` says what is wrong, `suggestion` is the nearest valid spelling."""

    def __init__(self, message: str, suggestion: str | None = None):
        super().__init__(message + (f"; did you mean {suggestion}?" if suggestion else ""))
        self.message = message
        self.suggestion = suggestion


class Kind(Protocol):
    """The values that an option takes."""

    @property
    def accepted(self) -> str:
        """What is accepted, to be read after "must be"."""
        ...

    @property
    def choices(self) -> tuple[object, ...]:
        """The values that are named one by one; empty if the kind names none."""
        ...

    def convert(self, raw: object, folder: Path) -> Any:
        """The native value of `raw`; a relative path is taken from `folder`.

        Raises:
            ValueProblem: `raw` is not accepted.
        """
        ...


def convert(kind: Kind, raw: object, folder: Path) -> Any:
    """The native value of what was written for an option of this kind, or `UNSET`.

    Empty text, `none`, `null` (in any case) and None mean unset, except where `none` is one of the option's values.

    Raises:
        ValueProblem: the value is not accepted.
    """
    if is_unset(raw) and raw not in kind.choices:
        return UNSET
    return kind.convert(raw, folder)


def is_unset(raw: object) -> bool:
    """Whether `raw` is one of the spellings of "not set"."""
    return raw is None or (isinstance(raw, str) and raw.strip().lower() in UNSET_WORDS)


def shown(raw: object) -> str:
    """A value as a message shows it: text in quotes, shortened if it is very long."""
    text = str(raw).lower() if isinstance(raw, bool) else json.dumps(raw, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def refused(raw: object, accepted: str, suggestion: str | None = None) -> ValueProblem:
    """The problem that `raw` is not what is accepted."""
    return ValueProblem(f"must be {accepted}, but is {shown(raw)}", suggestion)
