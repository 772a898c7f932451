"""Reads a TOML file of options into its entries, each with the line on which it stands.

Options stand at the top of the file, or in a table with the name of their group: `[training]`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elbowroom.options.problems import Problem, nearest

TOML_HINT = (
    "in TOML, text and paths stand in quotes, true and false are in lower case, a list stands in [ ], and a table's "
    "name in [ ] on a line of its own"
)


@dataclass(frozen=True)
class Entry:
    """`key = value`, as written on a line (counted from 1) of the file; `table` is empty at the top of the file."""

    table: str
    key: str
    value: Any
    line: int


def read_entries(path: Path, tables: Collection[str]) -> tuple[list[Entry], list[Problem]]:
    """What the file says, and what keeps it from being read.

    A key that is written twice comes back as two entries; tables other than `tables` are problems.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return [], [Problem(str(path), "", "there is no such file", _nearby(path))]
    except OSError as error:
        return [], [Problem(str(path), "", f"can't be read: {error.strerror}")]
    except UnicodeDecodeError as error:
        return [], [Problem(str(path), f"byte {error.start}", "is not UTF-8 text; save the file as UTF-8")]

    entries, problems, table = [], [], ""
    for line, statement, parsed in _statements(text):
        if parsed is None:
            return entries, [*problems, *_syntax_problems(path, text, line)]
        if statement.lstrip().startswith("["):
            table = _table_name(statement)
            if table not in tables:
                message = f"there is no such table; the tables are {', '.join(tables)}"
                problems.append(Problem(f"[{table}]", f"{path} line {line}", message, nearest(table, tables)))
            continue
        entries += [entry for entry in _flattened(table, parsed, line, tables) if entry.table in ("", *tables)]
    # Each statement is right by itself, but TOML as a whole forbids repeated keys, which the caller reports better,
    # with both places, and repeated tables, which it doesn't see.
    if len({entry.key for entry in entries}) == len(entries):
        problems += _syntax_problems(path, text)
    return entries, problems


def _nearby(path: Path) -> str | None:
    folder = path.parent
    return nearest(path.name, [file.name for file in folder.glob("*.toml")]) if folder.is_dir() else None


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """The statements of a TOML text with their first lines; None for the content of one that can't be read.

    tomllib doesn't say where a value stood. But a statement is the shortest run of lines that can be read by itself,
    for an open bracket or quote can't.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    start = 0
    for end in range(1, len(lines) + 1):
        statement = "\n".join(lines[start:end])
        try:
            parsed = tomllib.loads(statement)
        except ValueError:
            continue
        yield start + 1, statement, parsed
        start = end
    if start < len(lines):
        yield start + 1, "\n".join(lines[start:]), None


def _table_name(header: str) -> str:
    """`training` for the statement `[training]`; a name that no table has for `[[training]]`."""
    name = header.split("#")[0].strip().removeprefix("[").removesuffix("]")
    return name.strip().strip("\"'")


def _flattened(table: str, parsed: dict[str, Any], line: int, tables: Collection[str]) -> Iterator[Entry]:
    """The entries of one statement; at the top, `training.rank = 8` and `training = {rank = 8}` are in a table too."""
    for key, value in parsed.items():
        if not table and key in tables and isinstance(value, dict):
            yield from _flattened(key, value, line, tables)
        else:
            yield Entry(table, key, value, line)


def _syntax_problems(path: Path, text: str, begins: int = 0) -> list[Problem]:
    """What tomllib says about the text as a whole, with the line and what to do; nothing if it is in order.

    `begins` is the first line of the statement that can't be read, where it is known.
    """
    try:
        tomllib.loads(text)
    except ValueError as error:
        position = re.search(r"\(at line (\d+)", str(error))
        lines = text.split("\n")
        line = int(position[1]) if position else begins or len(lines)
        written = lines[line - 1].strip()[:60] or "empty line"
        belongs = f"; it belongs to what begins on line {begins}" if 0 < begins < line else ""
        if "overwrite a value" in str(error) and written.startswith("["):
            name = _table_name(written)  # `model` and `data` are names of options and of tables
            message = f"{name} is an option above and a table here; write the option {name} below [{name}] instead"
            return [Problem(written, f"{path} line {line}", message)]
        return [Problem(written, f"{path} line {line}", f"can't be read as TOML: {error}{belongs}; {TOML_HINT}")]
    return []
