"""What is written about options, and that it can be read back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elbowroom.options import Options, read
from elbowroom.options.definition import all_options
from elbowroom.options.export import to_markdown, to_resolved_table, to_table, to_toml, toml_value
from tests.options.routes import REQUIRED, with_required

DOCUMENT = Path(__file__).parents[2] / "docs" / "options.md"


def printed(table: Any) -> str:
    console = Console(width=400, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_committed_document_is_the_generated_one() -> None:
    command = "python -m elbowroom.options.export > docs/options.md"
    assert DOCUMENT.read_text(encoding="utf-8") == to_markdown(), f"options have changed; run `{command}`"


def test_the_document_and_the_table_hold_every_option() -> None:
    document, table = to_markdown(), printed(to_table())
    cells = " ".join(table.replace("│", " ").split())  # long texts go over several lines
    for option in all_options().values():
        assert option.name in document and option.kind.accepted in document
        assert option.name in table and all(word in cells for word in option.kind.accepted.split())
        assert option.help in document
    assert "### `guidance`\n\na number of at least 0 · default 1.0 · only for flux\n" in document


def test_the_resolved_table_shows_each_value_and_its_source() -> None:
    table = printed(to_resolved_table(read(None, {"ELBOWROOM_RANK": "8"}, REQUIRED)))
    rows = {
        cells[1].strip(): cells[2:4] for cells in (line.split("│") for line in table.splitlines()) if len(cells) > 3
    }
    assert [cell.strip() for cell in rows["rank"]] == ["8", "environment ELBOWROOM_RANK"]
    assert [cell.strip() for cell in rows["seed"]] == ["42", "default"]
    assert set(rows) == set(all_options())


@given(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"])),
        st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
    )
)
def test_a_value_as_toml_is_that_value(value: Any) -> None:
    read_back = tomllib.loads(f"key = {toml_value(value)}")["key"]
    assert read_back == value and type(read_back) is type(value)


def test_a_value_that_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        toml_value(object())


ALL_KINDS = with_required(
    name="mine", rank=8, alpha=4.5, lora_targets="to_q, to_k", learning_rate="1e-5", tensorboard="no", flow_shift=3,
    validation_prompts='["a \\"red\\" circle", "two\\nlines # not a comment"]', cache_dir="cached",
    validation_guidance=0.5,
    gradient_checkpointing="yes", gradient_checkpointing_interval=2, gradient_checkpointing_segment_stride=4,
)  # fmt: skip


@pytest.mark.parametrize("values", [REQUIRED, {**REQUIRED, "name": "x"}, ALL_KINDS], ids=["few", "named", "all kinds"])
def test_resolved_options_read_back_as_equal_options(values: dict[str, Any], tmp_path: Path) -> None:
    resolved = read(None, {}, values)
    file = tmp_path / "elsewhere" / "name-pictures.toml"
    file.parent.mkdir()
    file.write_text(to_toml(resolved.options, resolved.sources), encoding="utf-8")
    again = read(file, {}, {}).options
    assert again.run_folder == resolved.options.run_folder
    assert again.model_copy(update={"name": resolved.options.name}) == resolved.options


@pytest.mark.parametrize("model", ["a/b", "a/.b"])
def test_the_file_of_a_run_without_a_name_repeats_that_run_wherever_it_is(model: str, tmp_path: Path) -> None:
    resolved = read(None, {}, {**REQUIRED, "model": model} if model == "a/b" else {**REQUIRED, "model": f"/{model}"})
    file = tmp_path / "copied.toml"
    file.write_text(to_toml(resolved.options, resolved.sources), encoding="utf-8")
    assert 'name = "b-pictures"  # default\n' in file.read_text()
    assert read(file, {}, {}).options.run_folder == resolved.options.run_folder


def test_options_of_a_file_read_back_as_equal_options(tmp_path: Path) -> None:
    config = tmp_path / "sha\npes.toml"
    config.write_text('model = "a/b"\ndata = "pictures"\nsteps = 3\n')
    resolved = read(config, {"ELBOWROOM_RANK": "8"}, {"seed": "1"})
    text = to_toml(resolved.options, resolved.sources)
    assert "rank = 8  # environment ELBOWROOM_RANK\n" in text
    assert "seed = 1  # command line\n" in text
    assert "batch = 1  # default\n" in text
    assert f"steps = 3  # {tmp_path}/sha?pes.toml line 3\n" in text
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    assert read(tmp_path / "config.toml", {}, {}).options == resolved.options


def test_options_made_in_python_can_be_written_too(tmp_path: Path) -> None:
    options = Options(**REQUIRED, name="x")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(options, {}), encoding="utf-8")
    assert read(file, {}, {}).options == options
