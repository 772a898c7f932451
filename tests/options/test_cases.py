"""Reports about options that went wrong elsewhere, each sent along every route by which a value can arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elbowroom.options import Options
from elbowroom.options.definition import all_options
from elbowroom.options.kinds import Boolean, FilePath
from tests.options.routes import ROUTES, Route, by_python, with_required

BOOLEANS = [name for name, option in all_options().items() if isinstance(option.kind, Boolean)]
PATHS = [name for name, option in all_options().items() if isinstance(option.kind, FilePath)]
OPTIONAL_PATHS = [name for name in PATHS if not all_options()[name].required]

every_route = pytest.mark.parametrize("route", ROUTES)


@every_route
@pytest.mark.parametrize("name", BOOLEANS)
def test_d01_booleans_mean_the_same_from_everywhere(route: Route, name: str, tmp_path: Path) -> None:
    for value, spellings in {
        True: [True, "true", "True", "TRUE", "yes", "on", "1", 1],
        False: [False, "false", "False", "no", "Off", "0", 0],
        all_options()[name].default: ["", "none", "null"],
    }.items():
        for spelling in spellings:
            assert getattr(route(name, spelling, tmp_path), name) is value, spelling


@every_route
@pytest.mark.parametrize("spelling", ["maybe", "tru", 2, 1.0])
def test_d01_other_booleans_are_refused_with_the_accepted_spellings(
    route: Route, spelling: object, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tensorboard.*\s.*true or false \(also yes or no, on or off, 1 or 0\)"):
        route("tensorboard", spelling, tmp_path)


@every_route
@pytest.mark.parametrize("name", [*PATHS, "model"])
@pytest.mark.parametrize("spelling", [False, "false", "False", True, "true"])
def test_d01_the_word_false_is_no_path(route: Route, name: str, spelling: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}[^$]*but is the word (true|false); write none"):
        route(name, spelling, tmp_path)


@every_route
@pytest.mark.parametrize("name", OPTIONAL_PATHS)
@pytest.mark.parametrize("spelling", ["", "None", "null"])
def test_d01_an_empty_path_is_unset(route: Route, name: str, spelling: str, tmp_path: Path) -> None:
    assert getattr(route(name, spelling, tmp_path), name) == getattr(by_python("rank", 16, tmp_path), name)


@every_route
@pytest.mark.parametrize("name", ["model", "data"])
@pytest.mark.parametrize("spelling", ["", "None"])
def test_d01_a_required_path_that_is_unset_is_missing(route: Route, name: str, spelling: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}[^$]*is required"):
        route(name, spelling, tmp_path)


@every_route
@pytest.mark.parametrize(
    ("name", "spelling", "value"),
    [
        ("learning_rate", 1e-4, 1e-4),
        ("learning_rate", "1e-4", 1e-4),
        ("learning_rate", "1.0e-4", 1e-4),
        ("learning_rate", "", 1e-4),
        ("steps", "100", 100),
        ("steps", 100.0, 100),
        ("steps", 1e3, 1000),
        ("steps", "1e3", 1000),
    ],
)
def test_d04_numbers_as_text_are_numbers(route: Route, name: str, spelling: object, value: Any, tmp_path: Path) -> None:
    read = getattr(route(name, spelling, tmp_path), name)
    assert read == value and type(read) is type(value)


@every_route
@pytest.mark.parametrize(
    ("name", "spelling", "accepted"),
    [
        ("learning_rate", "nan", "a number above 0"),
        ("learning_rate", "inf", "a number above 0"),
        ("learning_rate", "-1", "a number above 0"),
        ("learning_rate", 0, "a number above 0"),
        ("learning_rate", True, "a number above 0"),
        ("steps", "ten", "a whole number between 1 and 1000000000"),
        ("steps", True, "a whole number between 1 and 1000000000"),
        ("steps", 1.5, "a whole number between 1 and 1000000000"),
        ("steps", 10**9 + 1, "a whole number between 1 and 1000000000"),
        ("epochs", 1e20, "a whole number between 1 and 1000000000"),
        ("seed", -1, "a whole number of at least 0 and below 4294967296"),
        ("seed", 2**32, "a whole number of at least 0 and below 4294967296"),
        ("validation_seed", 2**63, "a whole number of at least 0 and below 9223372036854775808"),
        ("rank", 4097, "a whole number between 1 and 4096"),
        ("rank", "1e20", "a whole number between 1 and 4096"),
        ("resolution", 16385, "a whole number between 16 and 16384"),
        ("repeats", 1_000_001, "a whole number between 1 and 1000000"),
        ("batch", 10**20, "a whole number between 1 and 65536"),
        ("gradient_accumulation_steps", 65537, "a whole number between 1 and 65536"),
        ("max_sequence_length", 4097, "a whole number between 1 and 4096"),
        ("adam_epsilon", 1e-300, "a number of at least 1e-16"),
    ],
)
def test_d04_what_is_no_such_number_is_refused_at_the_start(
    route: Route, name: str, spelling: object, accepted: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{name}[^$]*{accepted}"):
        route(name, spelling, tmp_path)


INTERVAL, STRIDE = "gradient_checkpointing_interval", "gradient_checkpointing_segment_stride"


def checkpointing(**values: Any) -> Any:
    return Options(**with_required(gradient_checkpointing=True, **values)).controls()


@pytest.mark.parametrize(("interval", "width"), [(1, 1), (2, 2), (1000, 1000), ("2", 2), (2.0, 2)])
def test_d05_an_interval_of_at_least_one_is_accepted(interval: object, width: int) -> None:
    """Above the number of blocks it is one segment, which the schedule decides: options don't know the model."""
    assert checkpointing(**{INTERVAL: interval}).gradient_checkpointing_interval == width


@every_route
@pytest.mark.parametrize("interval", [0, -1, 2.5, True, "0"])
def test_d05_other_intervals_are_refused(route: Route, interval: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{INTERVAL}[^$]*a whole number of at least 1"):
        route(INTERVAL, interval, tmp_path)


@every_route
def test_d05_an_empty_interval_or_stride_is_unset(route: Route, tmp_path: Path) -> None:
    assert route(INTERVAL, "", tmp_path).controls().gradient_checkpointing_interval == 1
    assert route(STRIDE, "", tmp_path).controls().gradient_checkpointing_segment_stride is None


@pytest.mark.parametrize("stride", [2, 3, 1000])
def test_d05_a_stride_from_the_interval_on_is_accepted(stride: int) -> None:
    controls = checkpointing(**{INTERVAL: 2, STRIDE: stride})
    assert controls.gradient_checkpointing_segment_stride == stride


@pytest.mark.parametrize(("stride", "rule"), [(0, "of at least 1"), (1, "at least gradient_checkpointing_interval")])
def test_d05_a_stride_below_the_interval_is_refused(stride: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"{STRIDE}[^$]*{rule}"):
        checkpointing(**{INTERVAL: 2, STRIDE: stride})


@every_route
@pytest.mark.parametrize("name", [INTERVAL, STRIDE])
def test_d05_without_checkpointing_they_are_refused(route: Route, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}[^$]*has no effect without gradient_checkpointing"):
        route(name, 4, tmp_path)
