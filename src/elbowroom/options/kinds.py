"""The kinds of values that options have. Each knows what it accepts, in words, and how to convert to it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elbowroom.options.problems import nearest
from elbowroom.options.values import Kind, ValueProblem, refused, shown

BOOLEANS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip
EXACT_IN_FLOAT: Final = 2**53
"""Every whole number up to this size has its own 64-bit float; above it, a float may stand for its neighbour."""
SIZE_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                     "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The numbers that are accepted; a limit that is None is no limit."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def __str__(self) -> str:
        if self.ge is not None and self.le is not None:
            return f" between {self.ge} and {self.le}"
        words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
        limits = [f"{word} {getattr(self, name)}" for name, word in words.items() if getattr(self, name) is not None]
        return " " + " and ".join(limits) if limits else ""


@dataclass(frozen=True)
class Boolean:
    accepted: str = "true or false (also yes or no, on or off, 1 or 0)"
    choices: tuple[object, ...] = ()

    def convert(self, raw: object, folder: Path) -> bool:
        if isinstance(raw, bool):
            return raw
        # Native 0 and 1 only: a 1.0 is a measurement that strayed here, not an answer.
        if isinstance(raw, (int, str)):
            word = str(raw).strip().lower()
            if word in BOOLEANS:
                return BOOLEANS[word]
            raise refused(raw, self.accepted, nearest(word, [name for name in BOOLEANS if name.isalpha()]))
        raise refused(raw, self.accepted)


@dataclass(frozen=True)
class WholeNumber:
    range: Range = Range()
    choices: tuple[object, ...] = ()

    @property
    def accepted(self) -> str:
        return f"a whole number{self.range}"

    def convert(self, raw: object, folder: Path) -> int:
        number = _whole(raw)
        if number is None or number not in self.range:
            raise refused(raw, self.accepted)
        return number


def _whole(raw: object) -> int | None:
    """`raw` as a whole number if nothing is lost by it, else None."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        try:
            return int(raw)
        except ValueError:
            pass
    number = _real(raw)
    if number is None or not number.is_integer() or abs(number) > EXACT_IN_FLOAT:
        return None
    return int(number)


def _real(raw: object) -> float | None:
    """`raw` as a finite number, else None."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        return None
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Number:
    range: Range = Range()
    choices: tuple[object, ...] = ()

    @property
    def accepted(self) -> str:
        return f"a number{self.range}"

    def convert(self, raw: object, folder: Path) -> float:
        number = _real(raw)
        if number is None or number not in self.range:
            raise refused(raw, self.accepted)
        return number


@dataclass(frozen=True)
class ByteSize:
    range: Range = Range()
    choices: tuple[object, ...] = ()

    @property
    def accepted(self) -> str:
        return f"a size in bytes{self.range}, such as 16GiB or 17179869184"

    def convert(self, raw: object, folder: Path) -> int:
        size = _whole(raw)
        written = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]*)\s*", raw) if isinstance(raw, str) else None
        if size is None and written and written[2].upper() in SIZE_UNITS:
            amount = _real(written[1])
            size = None if amount is None else _whole(amount * SIZE_UNITS[written[2].upper()])
        if size is None or size not in self.range:
            raise refused(raw, self.accepted)
        return size


@dataclass(frozen=True)
class Text:
    accepted: str = "text"
    pattern: str = ".*"
    spellings: tuple[str, ...] = ()
    choices: tuple[object, ...] = ()

    def convert(self, raw: object, folder: Path) -> str:
        if not isinstance(raw, str):
            raise refused(raw, f"{self.accepted} (in quotes)")
        text = _unicode(raw).strip()
        if not re.fullmatch(self.pattern, text, re.DOTALL):
            raise refused(raw, self.accepted, nearest(text, self.spellings))
        return text


def _unicode(text: str) -> str:
    """The text, if it can be written to a file: bytes from the environment that are not UTF-8 can't."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueProblem(f"must be UTF-8 text, but is {text!a}")
    return text


@dataclass(frozen=True)
class FilePath:
    accepted: str = "a path"
    choices: tuple[object, ...] = ()

    def convert(self, raw: object, folder: Path) -> Path:
        return (folder / _path_text(raw, self.accepted)).resolve()


def _path_text(raw: object, accepted: str) -> Path:
    if isinstance(raw, bool) or (isinstance(raw, str) and raw.strip().lower() in ("true", "false")):
        # A form or a script that turns something off writes "false"; it never means a file of that name.
        word = str(raw).strip().lower()
        raise ValueProblem(
            f"must be {accepted}, but is the word {word}; write none to leave it unset, or ./{word} for a file that "
            "has this name"
        )
    if not isinstance(raw, (str, Path)) or "\0" in str(raw):
        raise refused(raw, f"{accepted} (in quotes)")
    try:
        return Path(_unicode(str(raw)).strip()).expanduser()
    except RuntimeError:
        raise ValueProblem(f"must be {accepted}, but the home folder in {shown(raw)} is not known") from None


@dataclass(frozen=True)
class ModelReference:
    accepted: str = "the path of a folder or the id of a model on the hub, such as owner/name"
    choices: tuple[object, ...] = ()

    def convert(self, raw: object, folder: Path) -> str:
        path = _path_text(raw, self.accepted)
        # `owner/name` could be either; as in Diffusers, a folder that exists is meant before the hub.
        looks_like_an_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(raw).strip())
        if looks_like_an_id and not (folder / path).exists():
            return str(raw).strip()
        return str((folder / path).resolve())


@dataclass(frozen=True)
class Choice:
    choices: tuple[object, ...]

    @property
    def accepted(self) -> str:
        *others, last = map(str, self.choices)
        return f"{', '.join(others)} or {last}" if others else last

    def convert(self, raw: object, folder: Path) -> object:
        for choice in self.choices:
            # The type is compared too, for True == 1.
            if (type(raw) is type(choice) and raw == choice) or (isinstance(raw, str) and raw.strip() == str(choice)):
                return choice
        raise refused(raw, self.accepted, nearest(str(raw), map(str, self.choices)))


@dataclass(frozen=True)
class Items:
    item: Kind
    separator: str = ","

    @property
    def accepted(self) -> str:
        each = "" if self.item == Text() else f" (each {self.item.accepted})"
        return f'a list{each}, as an array or as text with "{self.separator}" between the items'

    @property
    def choices(self) -> tuple[object, ...]:
        return self.item.choices

    def convert(self, raw: object, folder: Path) -> tuple[Any, ...]:
        if isinstance(raw, str):
            raw = self._split(raw)
        if not isinstance(raw, (list, tuple)):
            raise refused(raw, self.accepted)
        for item in raw:
            if item is None or (isinstance(item, str) and not item.strip()):
                raise ValueProblem(f"must not hold an empty item, but is {shown(raw)}")
        return tuple(self.item.convert(item, folder) for item in raw)

    def _split(self, text: str) -> object:
        if text.strip().startswith("[") and text.strip().endswith("]"):
            try:
                return json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueProblem(
                    f'must be a JSON array such as ["one", "two"] if it stands in brackets, but is {shown(text)} '
                    f"({error.msg} at character {error.pos + 1})"
                ) from None
        return [item for item in text.split(self.separator) if item.strip()]


@dataclass(frozen=True)
class Either:
    kinds: tuple[Kind, ...]

    @property
    def accepted(self) -> str:
        return " or ".join(kind.accepted for kind in self.kinds)

    @property
    def choices(self) -> tuple[object, ...]:
        return tuple(choice for kind in self.kinds for choice in kind.choices)

    def convert(self, raw: object, folder: Path) -> Any:
        suggestion = None
        for kind in self.kinds:
            try:
                return kind.convert(raw, folder)
            except ValueProblem as problem:
                suggestion = suggestion or problem.suggestion
        raise refused(raw, self.accepted, suggestion)
