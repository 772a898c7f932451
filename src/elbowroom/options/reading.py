"""Reads options from the command line, the environment and a file, and finds everything that is wrong with them.

The order is command line > environment > file > default. A value that a higher source overrides is checked as well:
it is a mistake all the same, and would strike on the day when the other is taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elbowroom.options.config_file import Entry, read_entries
from elbowroom.options.definition import GROUPS, Options, all_options, defaults
from elbowroom.options.group import ENVIRONMENT_PREFIX, Option
from elbowroom.options.kinds import Either, Items
from elbowroom.options.problems import OptionsError, Problem, nearest
from elbowroom.options.rules import Broken, broken_rules
from elbowroom.options.values import UNSET, Kind, ValueProblem, convert, shown


@dataclass(frozen=True)
class Source:
    """Where an option's value comes from. `place` is what a person reads, such as `shapes.toml line 12`."""

    kind: Literal["command line", "environment", "file", "default"]
    place: str

    def __str__(self) -> str:
        return self.place


DEFAULT = Source("default", "default")
COMMAND_LINE = Source("command line", "command line")


@dataclass(frozen=True)
class Resolved:
    """All options of a run, checked, and the source of each."""

    options: Options
    sources: Mapping[str, Source]

    def check_family(self, family: str) -> None:
        """Refuse options that models of this family don't have, where they are set to something else than the default.

        Raises:
            OptionsError: with every such option.
        """
        problems = [
            Problem(name, str(self.sources[name]), f"has no effect on {family} models; it is for {_and(families)} only")
            for name, option in all_options().items()
            if (families := option.families)
            and family not in families
            and getattr(self.options, name) != option.default
        ]
        if problems:
            raise OptionsError(problems)


@dataclass(frozen=True)
class Given:
    """A value as one source gives it. Relative paths in it are taken from `folder`."""

    name: str
    raw: object
    source: Source
    folder: Path


def read(config: Path | None, environment: Mapping[str, str], command_line: Mapping[str, Any]) -> Resolved:
    """The options of a run.

    Args:
        config: a TOML file, or None.
        environment: `os.environ`; the variables whose names begin with `ELBOWROOM_` are read.
        command_line: a value, as text or native, for each option that was given there.

    Relative paths are taken from the folder of the file where they stand in one, else from the current directory.
    Empty text means that this source says nothing; `none` and `null` mean the default, whatever lower sources say.
    A run without a name is called like the file.

    Raises:
        OptionsError: (a `ValueError`) with everything that is wrong.
    """
    options = all_options()
    entries, file_problems = ([], []) if config is None else read_entries(config, [group.group for group in GROUPS])
    from_file, entry_problems = _from_file(config, entries, options)
    from_environment, environment_problems = _from_environment(environment, options)
    from_command_line, command_line_problems = _from_command_line(command_line, options)
    problems = [*entry_problems, *file_problems, *environment_problems, *command_line_problems]

    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    refused: set[str] = set()
    for given in [*from_file, *from_environment, *from_command_line]:
        if isinstance(given.raw, str) and not given.raw.strip():
            continue
        try:
            value = _converted(options[given.name].kind, given)
        except ValueProblem as problem:
            problems.append(Problem(given.name, str(given.source), problem.message, problem.suggestion))
            refused.add(given.name)
            continue
        sources[given.name] = given.source
        if value is UNSET:
            values.pop(given.name, None)
        else:
            values[given.name] = value
    if config is not None and "name" not in values:
        values |= _named_after(config, options["name"])
    optional = [option for option in options.values() if not option.required]
    values = {option.name: option.default_from(Path.cwd()) for option in optional} | values

    if not file_problems:  # Nothing is missing for sure where the file that may hold it couldn't be understood.
        # Nor where there is a misspelt name: once it is put right, the rules about that option may be kept.
        misspelt = {problem.suggestion for problem in problems}
        unsure = refused | {option.name for option in options.values() if misspelt & {option.name, option.variable}}
        missing = [option for option in options.values() if option.name not in values and option.name not in unsure]
        problems += [_missing(option, sources) for option in missing]
        rules = broken_rules({name: values[name] for name in values if name not in unsure}, defaults())
        problems += [_rule_problem(broken, sources) for broken in rules]
    if problems:
        raise OptionsError(problems)
    # Every value was converted and every rule was checked above. A second conversion would take the relative ones
    # from another folder.
    return Resolved(Options.model_construct(**values), {name: sources.get(name, DEFAULT) for name in options})


def _from_file(
    config: Path | None, entries: Iterable[Entry], options: Mapping[str, Option]
) -> tuple[list[Given], list[Problem]]:
    folder = (config or Path()).absolute().parent
    given, problems, seen = [], [], dict[str, Entry]()
    for entry in entries:
        place = f"{config} line {entry.line}"
        option = options.get(entry.key)
        if option is None:
            problems.append(_unknown(entry.key, place, entry.value, nearest(entry.key, options)))
        elif entry.table not in ("", option.group):
            message = f"is not in the table [{entry.table}]; put it below [{option.group}] or at the top of the file"
            problems.append(Problem(entry.key, place, message))
        elif entry.key in seen:
            problems.append(Problem(entry.key, place, f"is given twice; line {seen[entry.key].line} has it already"))
        else:
            seen[entry.key] = entry
            given.append(Given(entry.key, entry.value, Source("file", place), folder))
    return given, problems


def _from_environment(
    environment: Mapping[str, str], options: Mapping[str, Option]
) -> tuple[list[Given], list[Problem]]:
    by_variable = {option.variable: name for name, option in options.items()}
    given, problems = [], []
    for variable, raw in environment.items():
        if not variable.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        if variable in by_variable:
            source = Source("environment", f"environment {variable}")
            given.append(Given(by_variable[variable], raw, source, Path.cwd()))
        else:
            near = nearest(variable[len(ENVIRONMENT_PREFIX) :], options)
            suggestion = options[near].variable if near else None
            problems.append(_unknown(variable, "environment", raw, suggestion))
    return given, problems


def _from_command_line(
    command_line: Mapping[str, Any], options: Mapping[str, Option]
) -> tuple[list[Given], list[Problem]]:
    given = [Given(name, raw, COMMAND_LINE, Path.cwd()) for name, raw in command_line.items() if name in options]
    problems = [
        _unknown(name, str(COMMAND_LINE), raw, nearest(name, options))
        for name, raw in command_line.items()
        if name not in options
    ]
    return given, problems


def _converted(kind: Kind, given: Given) -> Any:
    """The native value; a flag that was repeated, which comes as a list, is no value for an option that is no list."""
    kinds = kind.kinds if isinstance(kind, Either) else (kind,)
    if given.source is COMMAND_LINE and isinstance(given.raw, list) and not any(isinstance(k, Items) for k in kinds):
        times = "twice" if len(given.raw) == 2 else f"{len(given.raw)} times"
        raise ValueProblem(f"is given {times} ({', '.join(map(shown, given.raw))}); give it once")
    return convert(kind, given.raw, given.folder)


def _named_after(config: Path, option: Option) -> dict[str, str]:
    try:
        return {"name": option.kind.convert(config.stem, config.parent)}
    except ValueProblem:  # Such as `.toml`: the run is then named like one without a file.
        return {}


def _unknown(key: str, place: str, raw: object, suggestion: str | None) -> Problem:
    return Problem(key, place, f"there is no such option (its value is {shown(raw)})", suggestion)


def _missing(option: Option, sources: Mapping[str, Source]) -> Problem:
    place = str(sources[option.name]) if option.name in sources else ""
    message = f"is required; give {option.flag}, {option.variable} or {option.name} in a file: {option.kind.accepted}"
    return Problem(option.name, place, message)


def _rule_problem(broken: Broken, sources: Mapping[str, Source]) -> Problem:
    """The problem, with the places of those options that the message speaks of."""
    named = [name for name in broken.options if name == broken.option or name in broken.message]
    places = dict.fromkeys(str(sources[name]) for name in named if name in sources)
    return Problem(broken.option, ", ".join(places), broken.message)


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)
