"""Makes a command whose flags are all options. Flags take text; `reading.read` converts and checks it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from elbowroom.options.definition import GROUPS, all_options
from elbowroom.options.export import explained
from elbowroom.options.group import Option, options_in
from elbowroom.options.kinds import BOOLEANS, Boolean, Either
from elbowroom.options.problems import OptionsError, nearest
from elbowroom.options.reading import read
from elbowroom.options.values import UNSET_WORDS

EXIT_CODE_OF_BAD_USAGE = 2


class OptionsCommand(TyperCommand):
    """A Typer command that takes flags in all the ways that `normalise` describes, and lists them by their groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = normalise(args)
        known = {flag for parameter in self.get_params(ctx) for flag in parameter.opts}
        problems = usage_problems(arguments, known)
        if problems:
            ctx.fail("; ".join(problems))
        return super().parse_args(ctx, arguments)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        # Typer makes panels only with Rich's markup; a plain help text needs the groups all the more.
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def train_command(body: Callable[..., None]) -> Callable[..., None]:
    """The function of a Typer command that reads all options and hands them to `body`.

    Register it with `app.command("train", cls=OptionsCommand)(train_command(body))`. It takes a configuration file as
    an optional argument and every option as a flag. The first parameter of `body` gets the `Resolved`; its further
    parameters become parameters of the command, as Typer makes them. Options that can't be used are printed, and the
    command ends with exit code 2.
    """

    @functools.wraps(body)
    def command(config: Path | None, **arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in all_options()}
        given = {name: _one_or_all(value) for name, value in flags.items() if value}
        try:
            resolved = read(config, os.environ, given)
        except OptionsError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(EXIT_CODE_OF_BAD_USAGE) from None
        body(resolved, **arguments)

    own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
    flags = [_parameter(option, group.group) for group in GROUPS for option in options_in(group)]
    parameters = [_config_parameter(), *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *flags]
    signature = inspect.Signature(parameters)
    # Typer reads both; wraps has set them to those of the body.
    vars(command)["__signature__"] = signature
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def normalise(arguments: Sequence[str]) -> list[str]:
    """The arguments with one spelling for each flag, as the parser takes them.

    Dashes and underscores in a flag's name are the same. A flag for a boolean, here `--flag`, may be written `--flag`,
    `--flag=true`, `--flag true` (or any other spelling of true and false) or `--no-flag`; it becomes `--flag=true` or
    `--flag=false`. The value of any other flag is left as it is, even where it looks like a flag.
    """
    options = {option.flag: option for option in all_options().values()}
    normalised: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*normalised, argument, *rest]
        if not argument.startswith("--"):
            normalised.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        positive = name.replace("--no-", "--", 1)
        if not equals and name in options and (words := _words(options[name])):
            takes_next = bool(rest) and rest[0].strip().lower() in words
            normalised.append(f"{name}={rest.pop(0) if takes_next else 'true'}")
        elif not equals and name not in options and positive in options and _words(options[positive]):
            normalised.append(f"{positive}=false")
        else:
            normalised.append(name + equals + value)
            if name in options and not equals and rest:
                normalised.append(rest.pop(0))
    return normalised


def usage_problems(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """What is wrong with how flags are written; `arguments` are normalised, `known` are the flags of the command.

    A flag that does not exist, with the one that was perhaps meant; a flag whose value is missing, so that the next
    flag would be taken for it; a word after a boolean flag that is neither a value of it nor a file.
    """
    options = {option.flag: option for option in all_options().values()}
    problems = []
    previous = ""
    rest = list(arguments)
    while rest and rest[0] != "--":
        argument = rest.pop(0)
        name = argument.partition("=")[0]
        if not name.startswith("--"):
            flag = previous.removesuffix("=true")
            if flag != previous and flag in options and not _may_be_a_file(argument):
                problems.append(_no_value_of(options[flag], argument))
        elif name not in known:
            holding = [flag for flag in sorted(known) if flag.endswith(name.removeprefix("-"))]
            meant = holding[0] if holding else nearest(name, known)
            problems.append(f"there is no option {name}" + (f"; did you mean {meant}?" if meant else ""))
        elif name == argument and name in options and rest:
            value = rest.pop(0)
            flag = value.partition("=")[0].replace("_", "-")
            if flag in known or flag.replace("--no-", "--", 1) in known:
                problems.append(
                    f"{name} has no value: {value} is the next flag (if it is meant as the value, write {name}={value})"
                )
        previous = argument
    return problems


def _may_be_a_file(argument: str) -> bool:
    return argument.endswith(".toml") or Path(argument).exists()


def _no_value_of(option: Option, word: str) -> str:
    meant = nearest(word, _words(option))
    suggestion = f"; did you mean {meant}?" if meant else ""
    return (
        f"{word} is neither a value of {option.flag}, which must be {option.kind.accepted}, nor a configuration file"
        f"{suggestion}"
    )


def _words(option: Option) -> tuple[str, ...]:
    """The words that may follow the option's flag; empty for an option that isn't a boolean, which needs a value."""
    kind = option.kind
    boolean = isinstance(kind, Boolean) or (
        isinstance(kind, Either) and any(isinstance(k, Boolean) for k in kind.kinds)
    )
    return (*BOOLEANS, *UNSET_WORDS, *map(str, kind.choices)) if boolean else ()


def _one_or_all(values: list[str]) -> str | list[str]:
    """A flag's text; for a list whose flag is repeated, the items."""
    return values[0] if len(values) == 1 else values


def _config_parameter() -> inspect.Parameter:
    argument = typer.Argument(help="A TOML file of options.", metavar="CONFIG.toml", show_default=False)
    return inspect.Parameter(
        "config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[Path | None, argument]
    )


def _parameter(option: Option, group: str) -> inspect.Parameter:
    flag = typer.Option(
        option.flag,
        help=explained(option),
        rich_help_panel=f"Options: {group}",
        metavar="VALUE",
        show_default=False,
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, flag]
    )
