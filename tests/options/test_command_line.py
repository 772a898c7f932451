"""The command that is made from the options: its flags, its help, and how flags may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from elbowroom.options import Resolved
from elbowroom.options.command_line import OptionsCommand, normalise, train_command, usage_problems
from elbowroom.options.definition import GROUPS, all_options
from tests.options.routes import run

REQUIRED = ["--model", "owner/name", "--data", "pictures", "--steps", "10"]


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        (["--tensorboard"], ["--tensorboard=true"]),
        (["--tensorboard", "FALSE"], ["--tensorboard=FALSE"]),
        (["--tensorboard", "none"], ["--tensorboard=none"]),
        (["--tensorboard=maybe"], ["--tensorboard=maybe"]),
        (["--no-tensorboard"], ["--tensorboard=false"]),
        (["--no_gradient_checkpointing"], ["--gradient-checkpointing=false"]),
        (["--gradient_checkpointing", "run.toml"], ["--gradient-checkpointing=true", "run.toml"]),
        (["--gradient-checkpointing", "--rank", "8"], ["--gradient-checkpointing=true", "--rank", "8"]),
        (["--learning_rate=1e-4"], ["--learning-rate=1e-4"]),
        (["--name", "my_run"], ["--name", "my_run"]),
        (["--validation_prompts", "--no-tensorboard"], ["--validation-prompts", "--no-tensorboard"]),
        (["--no-rank"], ["--no-rank"]),
        (["--dry_run", "run.toml"], ["--dry-run", "run.toml"]),
        (["--", "--tensorboard"], ["--", "--tensorboard"]),
        (["my_file.toml", "-x"], ["my_file.toml", "-x"]),
        (["--rank"], ["--rank"]),
    ],
)
def test_flags_have_one_spelling_for_the_parser(written: list[str], normal: list[str]) -> None:
    assert normalise(written) == normal
    assert normalise(normal) == normal


@pytest.mark.parametrize(
    ("arguments", "tensorboard"),
    [
        ([], True),
        (["--tensorboard"], True),
        (["--tensorboard=false"], False),
        (["--tensorboard", "off"], False),
        (["--no-tensorboard"], False),
    ],
)
def test_booleans_on_the_command_line(arguments: list[str], tensorboard: bool) -> None:
    resolved, _ = run([*REQUIRED, *arguments])
    assert resolved is not None and resolved.options.tensorboard is tensorboard


def test_file_environment_and_flags_come_together(tmp_path: Path) -> None:
    config = tmp_path / "shapes.toml"
    config.write_text('model = "a/b"\ndata = "pictures"\nsteps = 5\nrank = 4\n')
    resolved, _ = run([str(config), "--learning_rate", "1e-3"], {"ELBOWROOM_RANK": "6"})
    assert resolved is not None
    options = resolved.options
    assert (options.steps, options.rank, options.learning_rate, options.name) == (5, 6, 1e-3, "shapes")
    assert options.data == tmp_path / "pictures"
    assert str(resolved.sources["learning_rate"]) == "command line"


def test_a_repeated_flag_makes_a_list_and_only_a_list() -> None:
    resolved, _ = run([*REQUIRED, "--validation-prompts", "a|b", "--validation-prompts", "c"])
    assert resolved is not None and resolved.options.validation_prompts == ("a|b", "c")
    resolved, _ = run([*REQUIRED, "--validation-prompts", "a|b"])
    assert resolved is not None and resolved.options.validation_prompts == ("a", "b")
    resolved, output = run([*REQUIRED, "--rank", "4", "--rank", "5", "--model", "b/c", "--model", "d/e"])
    assert resolved is None and output == (
        "2 problems with the options:\n"
        '  model (command line): is given 3 times ("owner/name", "b/c", "d/e"); give it once\n'
        '  rank (command line): is given twice ("4", "5"); give it once\n'
    )


def test_problems_are_printed_and_nothing_runs() -> None:
    resolved, output = run(["--model", "a/b", "--rank", "x", "--tensorboard=maybe"])
    assert resolved is None
    assert output.startswith("4 problems with the options:\n")
    assert "Traceback" not in output


def test_an_unknown_flag_gets_a_suggestion() -> None:
    resolved, output = run([*REQUIRED, "--rnak", "3"])
    assert resolved is None
    assert "--rnak" in output and "--rank" in output.replace("--rnak", "")


def test_further_parameters_of_the_body_are_parameters_of_the_command() -> None:
    received: list[tuple[Resolved, bool]] = []

    def train(resolved: Resolved, dry_run: Annotated[bool, typer.Option("--dry-run")] = False) -> None:
        received.append((resolved, dry_run))

    app = typer.Typer()
    app.command("train", cls=OptionsCommand)(train_command(train))
    assert CliRunner().invoke(app, [*REQUIRED, "--dry_run"]).exit_code == 0
    assert CliRunner().invoke(app, REQUIRED).exit_code == 0
    assert [dry_run for _, dry_run in received] == [True, False]


@pytest.mark.parametrize("markup", [None, "rich"])
def test_the_help_names_every_option_with_its_group_values_default_and_meaning(markup: Any) -> None:
    app = typer.Typer(rich_markup_mode=markup)
    app.command("train", cls=OptionsCommand)(train_command(lambda resolved: None))
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).output
    text = _without_blanks(shown.replace("│", ""))  # Lines may break at any blank or hyphen.
    titles = [text.index(f"Options:{group.group}") for group in GROUPS]
    assert titles == sorted(titles)
    for option in all_options().values():
        assert option.flag in text
        assert _without_blanks(option.help) in text
        assert _without_blanks(option.kind.accepted) in text
    assert "between1and4096;default16)" in text


def _without_blanks(text: str) -> str:
    return "".join(text.split())


KNOWN = {option.flag for option in all_options().values()} | {"--dry-run", "--help"}


def test_every_unknown_flag_is_named_with_what_was_meant() -> None:
    arguments = normalise(["--stpes", "6", "--rank", "--8", "--dry-run", "--segment-stride=3", "--xyzzy", "file.toml"])
    assert usage_problems(arguments, KNOWN) == [
        "there is no option --stpes; did you mean --steps?",
        "there is no option --segment-stride; did you mean --gradient-checkpointing-segment-stride?",
        "there is no option --xyzzy",
    ]
    assert usage_problems(normalise(["--name", "--x", "--", "--y"]), KNOWN) == []


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (["--rank", "--steps", "5"], "--rank has no value: --steps is the next flag"),
        (["--rank", "--dry_run"], "--rank has no value: --dry_run is the next flag"),
        (["--rank", "--no-tensorboard"], "--rank has no value: --no-tensorboard is the next flag"),
        (["--rank", "--steps=5"], "--rank has no value: --steps=5 is the next flag"),
        (["--gradient-checkpointing-keep-attention", "kernal"], "did you mean kernel?"),
        (["--gradient_checkpointing_offload_prefetch", "autoo"], "did you mean auto?"),
        (["--gradient-checkpointing", "ture"], "did you mean true?"),
    ],
)
def test_a_missing_or_misspelt_value_is_not_taken_for_something_else(written: list[str], problem: str) -> None:
    found = usage_problems(normalise(written), KNOWN)
    assert len(found) == 1 and problem in found[0]
    resolved, output = run([*REQUIRED, *written])
    assert resolved is None and "Traceback" not in output


def test_files_after_boolean_flags_and_values_like_flags_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "settings").write_text("")
    for written in (
        ["--gradient-checkpointing", "missing.toml"],
        ["--gradient-checkpointing", str(tmp_path / "settings")],
        ["--validation-prompts=--rank"],
        ["--validation-prompts", "--a prompt"],
    ):
        assert usage_problems(normalise(written), KNOWN) == []
