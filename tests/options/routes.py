"""The four ways in which an option's value can arrive, so that a test can send the same value along each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from elbowroom.options import Options, OptionsError, Resolved, read
from elbowroom.options.command_line import OptionsCommand, train_command
from elbowroom.options.export import toml_value

REQUIRED: dict[str, Any] = {"model": "owner/name", "data": "/pictures", "steps": 100}

COMPANIONS: dict[str, dict[str, Any]] = {
    "ramtorch_disable_extensions": {"ramtorch": True},
    "optimizer_in_backward": {"max_grad_norm": 0},
}
"""What an option needs beside it."""

Route = Callable[[str, Any, Path], Options]


def with_required(**values: Any) -> dict[str, Any]:
    """`values`, and the required options where they are not among them (nor `epochs`, which replaces `steps`)."""
    required = {key: value for key, value in REQUIRED.items() if key != "steps" or "epochs" not in values}
    for name in values:
        required |= COMPANIONS.get(name, {})
    return required | values


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value)


def by_command_line(key: str, value: Any, folder: Path) -> Options:
    """Through the real command, with real flags."""
    arguments = [f"--{name}={as_text(each)}" for name, each in with_required(**{key: value}).items()]
    resolved, output = run(arguments)
    if resolved is None:
        raise ValueError(output)
    return resolved.options


def by_environment(key: str, value: Any, folder: Path) -> Options:
    given = with_required(**{key: value})
    return read(None, {f"ELBOWROOM_{name.upper()}": as_text(each) for name, each in given.items()}, {}).options


def by_file(key: str, value: Any, folder: Path) -> Options:
    file = folder / "run.toml"
    file.write_text("".join(f"{name} = {toml_value(each)}\n" for name, each in with_required(**{key: value}).items()))
    return read(file, {}, {}).options


def by_python(key: str, value: Any, folder: Path) -> Options:
    return Options(**with_required(**{key: value}))


ROUTES: tuple[Route, ...] = (by_command_line, by_environment, by_file, by_python)


def run(arguments: list[str], environment: dict[str, str] | None = None) -> tuple[Resolved | None, str]:
    """Run a small program with the train command; what its body got, if it was called, and the output."""
    received: list[Resolved] = []

    def train(resolved: Resolved) -> None:
        """Train."""
        received.append(resolved)

    app = typer.Typer()
    app.command("train", cls=OptionsCommand)(train_command(train))
    result = CliRunner().invoke(app, arguments, env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert bool(received) == (result.exit_code == 0)
    return (received[0] if received else None), result.output


def problems_of(config: Path | None = None, environment: dict[str, str] | None = None, **flags: Any) -> list[str]:
    """The problems that reading finds, each as a person reads it."""
    try:
        read(config, environment or {}, flags)
    except OptionsError as error:
        return [str(problem) for problem in error.problems]
    return []
