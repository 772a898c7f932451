"""What each kind of option makes of what is written for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Lt
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.options.annotations import Matching, Separated, SizeInBytes, kind_of
from elbowroom.options.values import UNSET, ValueProblem, convert


def converted(annotation: Any, raw: object, folder: Path = Path("/folder")) -> Any:
    return convert(kind_of(annotation), raw, folder)


def problem(annotation: Any, raw: object) -> ValueProblem:
    with pytest.raises(ValueProblem) as caught:
        converted(annotation, raw)
    return caught.value


@pytest.mark.parametrize("annotation", [bool, int, float, str, Path, Literal["a"], tuple[str, ...], int | None])
@pytest.mark.parametrize("raw", ["", "  ", "none", "None", "NULL", None])
def test_unset_spellings_mean_unset_for_every_kind(annotation: Any, raw: object) -> None:
    assert converted(annotation, raw) is UNSET


def test_none_is_a_value_where_it_is_one_of_the_choices() -> None:
    assert converted(Literal["none", "all"], "none") == "none"
    assert converted(tuple[Literal["none", "all"], ...], "none") == ("none",)


@pytest.mark.parametrize("raw", [2, -1, 1.0, "maybe", "t", "ja", [], ["true"]])
def test_other_values_are_no_booleans(raw: object) -> None:
    message = problem(bool, raw).message
    assert "true or false (also yes or no, on or off, 1 or 0)" in message
    assert json.dumps(raw) in message


def test_a_misspelt_boolean_gets_a_suggestion() -> None:
    assert problem(bool, "Flase").suggestion == "false"


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        ("100", 100),
        (" 100 ", 100),
        (100.0, 100),
        ("1e3", 1000),
        ("100.0", 100),
        ("-3", -3),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_whole_numbers_are_converted_when_nothing_is_lost(raw: object, number: int) -> None:
    value = converted(int, raw)
    assert value == number and type(value) is int


@pytest.mark.parametrize("raw", ["ten", 2.5, "2.5", True, False, "true", "nan", "inf", "1e400", "1e30", 1e30, [1], {}])
def test_what_is_no_whole_number_is_refused(raw: object) -> None:
    assert "a whole number" in problem(int, raw).message


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_means_the_same_as_its_text(number: float) -> None:
    assert converted(float, number) == converted(float, repr(number)) == float(number)


@pytest.mark.parametrize("raw", ["nan", "-inf", "Infinity", float("nan"), float("inf"), 10**400, True, "1,5", [1.0]])
def test_what_is_no_finite_number_is_refused(raw: object) -> None:
    assert "a number" in problem(float, raw).message


def test_limits_are_kept_and_named() -> None:
    share = Annotated[float, Ge(0), Lt(1)]
    assert converted(share, 0) == 0.0
    for outside in (-0.1, 1, "1"):
        assert "a number of at least 0 and below 1" in problem(share, outside).message


def test_limits_hold_for_the_numbers_of_a_union() -> None:
    shift = Annotated[float, Ge(1)] | Literal["auto"]
    assert converted(shift, "auto") == "auto"
    assert converted(shift, "1.5") == 1.5
    assert "auto or a number of at least 1" in problem(shift, 0.5).message
    assert problem(shift, "aut").suggestion == "auto"


def test_a_boolean_beside_a_choice() -> None:
    prefetch = Literal["auto"] | bool
    assert [converted(prefetch, raw) for raw in ("auto", "yes", 0)] == ["auto", True, False]


@pytest.mark.parametrize("raw", [False, True, "false", "True", 0, 1.5, [], "a\0b"])
def test_what_is_no_path_is_refused(raw: object) -> None:
    """D01: the word false never means a file of that name."""
    assert "must be a path" in problem(Path, raw).message


def test_a_path_is_taken_from_the_folder_and_tilde_from_the_home(tmp_path: Path) -> None:
    assert converted(Path, "pictures", tmp_path) == tmp_path / "pictures"
    assert converted(Path, "../x", tmp_path) == tmp_path.parent / "x"
    assert converted(Path, "./false", tmp_path) == tmp_path / "false"
    assert converted(Path, "/elsewhere", tmp_path) == Path("/elsewhere")
    assert converted(Path, "~/pictures", tmp_path) == Path.home().resolve() / "pictures"
    assert "home folder" in problem(Path, "~nobody-of-this-name/pictures").message


def test_choices_are_exact_and_the_nearest_is_suggested() -> None:
    sampling = Literal["uniform", "logit_normal"]
    assert converted(sampling, " uniform ") == "uniform"
    assert problem(sampling, "Uniform").suggestion == "uniform"
    assert problem(sampling, "logit-normal").suggestion == "logit_normal"
    assert problem(sampling, "cosine").suggestion is None
    assert "uniform or logit_normal" in problem(sampling, "cosine").message


def test_a_number_among_choices_is_not_a_boolean() -> None:
    assert converted(Literal[1, 8], "8") == 8
    assert "1 or 8" in problem(Literal[1, 8], True).message


def test_text_has_no_outer_blanks_and_keeps_its_pattern() -> None:
    assert converted(str, "  a red  circle ") == "a red  circle"
    assert "text" in problem(str, 5).message
    device = Annotated[str, Matching("cpu|cuda(:[0-9]+)?", "cpu or cuda", ("cpu", "cuda"))]
    assert converted(device, "cuda:1") == "cuda:1"
    assert problem(device, "cude").suggestion == "cuda"


@pytest.mark.parametrize("annotation", [str, Path, tuple[str, ...]])
def test_text_that_no_file_could_hold_is_refused(annotation: Any) -> None:
    assert "UTF-8" in problem(annotation, "caf\udce9").message


def test_lists() -> None:
    prompts = Annotated[tuple[str, ...], Separated("|")]
    assert converted(prompts, "a cat, black | a dog") == ("a cat, black", "a dog")
    assert converted(prompts, '["a|b", "c"]') == ("a|b", "c")
    assert converted(prompts, ["a|b", "c"]) == ("a|b", "c")
    assert converted(prompts, "[photo] a cat") == ("[photo] a cat",)
    assert converted(prompts, []) == ()
    assert converted(tuple[str, ...], "to_q, to_k,") == ("to_q", "to_k")


@pytest.mark.parametrize("raw", ["[to_q, to_k]", ["to_q", 3], ["to_q", ""], ["to_q", None], 3, {"to_q": 1}])
def test_what_is_no_list_of_texts_is_refused(raw: object) -> None:
    problem(tuple[str, ...], raw)


@pytest.mark.parametrize(("raw", "size"), [("16GiB", 2**34), ("1.5 kb", 1500), ("17", 17), (17, 17), ("2e3", 2000)])
def test_sizes_in_bytes(raw: object, size: int) -> None:
    assert converted(Annotated[int, SizeInBytes()], raw) == size


@pytest.mark.parametrize("raw", ["16 gigs", "1.5", "-1GiB", "1.2.3GB", "GiB", True])
def test_what_is_no_size_is_refused(raw: object) -> None:
    assert "size in bytes" in problem(Annotated[int, SizeInBytes(), Ge(0)], raw).message


def test_an_unknown_type_is_a_mistake_of_the_definition() -> None:
    with pytest.raises(TypeError, match="dict"):
        kind_of(dict)
