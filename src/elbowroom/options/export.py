"""Writes options for people and for files: the documentation, tables for the terminal, and TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from elbowroom.options.definition import GROUPS, Options
from elbowroom.options.group import Group, Option, options_in
from elbowroom.options.reading import DEFAULT, Resolved, Source

INTRODUCTION = """\
# Options

<!-- Generated from src/elbowroom/options by `python -m elbowroom.options.export > docs/options.md`. -->

Every option can be given in three ways, here for `rank`:

| where | how |
| --- | --- |
| on the command line | `--rank 8` or `--rank=8` |
| in the environment | `ELBOWROOM_RANK=8` |
| in a TOML file | `rank = 8`, at the top of the file or below `[training]`, the name of its group |

Where several give it, the order is: command line, then environment, then file, then default. A value means the same
from everywhere:

- **Booleans** are `true`, `yes`, `on`, `1` or `false`, `no`, `off`, `0`, in any case. On the command line
  `--tensorboard` means true and `--no-tensorboard` false.
- **Numbers** may be written as text or with an exponent: `100`, `"100"`, `1e2`, `1e-4`.
- **Sizes** are bytes, with or without a unit: `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024, `KB`, `MB`, `GB`, `TB`
  powers of 1000.
- **Paths** are taken from the current directory, except in a file, where they are taken from the file's folder.
- **Lists** are an array in TOML; elsewhere a JSON array (`["a", "b"]`), or text with the separator that the option
  names between the items, or on the command line the flag several times.
- **Empty text** means that this source says nothing. **`none`** or `null` means the default, even where a source
  further down says something else: `--epochs none`.
- On the command line, dashes and underscores in a flag are the same.

A name that is not an option, or a value that is not accepted, stops the program before any work, with all such
mistakes at once, where they stand and what to write instead. `elbowroom train --dry-run` shows every value and where it
came from.
"""


def toml_value(value: object) -> str:
    """A native value as TOML; None as the word that means unset."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, (str, Path)):
        # JSON's escapes are TOML's, except that TOML wants one for the delete character too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    raise TypeError(f"no way is known to write {value!r} as TOML")


def to_toml(options: Options, sources: Mapping[str, Source]) -> str:
    """All options as a TOML file that reads back as the same options, the source of each in a comment behind it."""
    lines = [
        "# All options of a run, and where each value came from.",
        "# To repeat the run, train with this file and another name.",
    ]
    for group in GROUPS:
        lines += ["", f"[{group.group}]"]
        for option in options_in(group):
            # A file's name may hold what a comment can't, such as a line break.
            source = "".join(each if each.isprintable() else "?" for each in str(sources.get(option.name, DEFAULT)))
            # The name of the run's folder, so that the file means this run wherever it is copied to.
            value = options.run_folder.name if option.name == "name" else getattr(options, option.name)
            lines.append(f"{option.name} = {toml_value(value)}  # {source}")
    return "\n".join(lines) + "\n"


def to_markdown() -> str:
    """The text of docs/options.md."""
    parts = [INTRODUCTION]
    for group in GROUPS:
        parts.append(f"## {group.group}\n\n{_description(group)}\n")
        parts += [_entry(option) for option in options_in(group)]
    return "\n".join(parts)


def _entry(option: Option) -> str:
    families = f" · only for {', '.join(option.families)}" if option.families else ""
    return f"### `{option.name}`\n\n{option.kind.accepted} · {default_in_words(option)}{families}\n\n{option.help}\n"


def explained(option: Option) -> str:
    """What the option does, which values it takes, and what holds where it is not given, in one paragraph."""
    return f"{option.help} ({option.kind.accepted}; {default_in_words(option)})"


def _description(group: type[Group]) -> str:
    return " ".join((group.__doc__ or "").split())


def default_in_words(option: Option) -> str:
    """What holds where the option is not given: `default 16`, `unset by default` or `required`."""
    if option.required:
        return "required"
    return "unset by default" if option.default is None else f"default {toml_value(option.default)}"


def to_table() -> Table:
    """All options, their meaning, values and defaults, for the terminal."""
    table = Table("option", "meaning (values; default)")
    for group in GROUPS:
        table.add_section()
        # As Text, so that brackets are not taken for a style.
        table.add_row(Text(f"[{group.group}]", style="bold"), Text(_description(group), style="bold"))
        for option in options_in(group):
            table.add_row(Text(option.name), Text(explained(option)))
    return table


def to_resolved_table(resolved: Resolved) -> Table:
    """The value of every option of a run and its source, for the terminal."""
    # Folded, so that a long path is never cut off.
    table = Table(Column("option", overflow="fold"), Column("value", overflow="fold"), Column("from", overflow="fold"))
    for group in GROUPS:
        table.add_section()
        for option in options_in(group):
            value = toml_value(getattr(resolved.options, option.name))
            table.add_row(*map(Text, (option.name, value, str(resolved.sources[option.name]))))
    return table


if __name__ == "__main__":
    print(to_markdown(), end="")
