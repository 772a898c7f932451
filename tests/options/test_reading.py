"""Where values come from, in which order, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from elbowroom.options import Options, OptionsError, Problem, read
from tests.options.routes import REQUIRED, problems_of, with_required

CONFIG = """\
# A small run.
model = "owner/name"
data = "pictures"

[training]
steps = 100
rank = 8
lora_targets = [
    "to_q",
    "to_k",
]
learning_rate = 1e-3
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, by a name that is relative to the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("shapes.toml").write_text(CONFIG)
    return Path("shapes.toml")


def written(text: str) -> Path:
    Path("shapes.toml").write_text(text)
    return Path("shapes.toml")


def test_the_order_is_command_line_environment_file_default(config: Path) -> None:
    environment = {"ELBOWROOM_RANK": "9", "ELBOWROOM_LEARNING_RATE": "2e-3", "PATH": "/bin"}
    resolved = read(config, environment, {"rank": "10"})
    options, sources = resolved.options, {name: str(source) for name, source in resolved.sources.items()}
    assert (options.rank, sources["rank"]) == (10, "command line")
    assert (options.learning_rate, sources["learning_rate"]) == (2e-3, "environment ELBOWROOM_LEARNING_RATE")
    assert (options.lora_targets, sources["lora_targets"]) == (("to_q", "to_k"), "shapes.toml line 8")
    assert (options.steps, sources["steps"]) == (100, "shapes.toml line 6")
    assert (options.seed, sources["seed"]) == (42, "default")
    assert set(sources) == set(Options.model_fields)


def test_reading_and_python_make_equal_options(config: Path) -> None:
    read_options = read(None, {}, REQUIRED).options
    assert read_options == Options(**REQUIRED)
    assert type(read_options).model_validate(read_options.model_dump()) == read_options


def test_empty_text_lets_a_lower_source_speak_and_none_means_the_default(config: Path) -> None:
    resolved = read(config, {"ELBOWROOM_RANK": ""}, {"learning_rate": "none"})
    assert resolved.options.rank == 8
    assert resolved.options.learning_rate == 1e-4
    assert str(resolved.sources["learning_rate"]) == "command line"


def test_none_replaces_steps_by_epochs(config: Path) -> None:
    options = read(config, {}, {"steps": "none", "epochs": "2"}).options
    assert (options.steps, options.epochs) == (None, 2)


def test_paths_are_relative_to_the_file_or_else_to_the_current_directory(tmp_path: Path, config: Path) -> None:
    folder = tmp_path / "configs"
    (folder / "base").mkdir(parents=True)
    file = folder / "run.toml"
    file.write_text('model = "base"\ndata = "../pictures"\nsteps = 1\n')
    options = read(file, {}, {"cache_dir": "cached"}).options
    assert options.model == str(folder / "base")
    assert options.data == tmp_path / "pictures"
    assert options.cache_dir == tmp_path / "cached"
    assert options.output_dir == tmp_path / "runs"


def test_a_model_on_the_hub_keeps_its_id_unless_a_folder_has_that_name(config: Path) -> None:
    assert read(None, {}, with_required(model="owner/name")).options.model == "owner/name"
    assert read(None, {}, with_required(model="./owner/name")).options.model == str(Path.cwd() / "owner/name")
    Path("owner/name").mkdir(parents=True)
    assert read(None, {}, with_required(model="owner/name")).options.model == str(Path.cwd() / "owner/name")


def test_a_run_is_named_after_its_file_or_after_model_and_data(config: Path) -> None:
    assert read(config, {}, {}).options.run_folder == Path.cwd() / "runs" / "shapes"
    assert read(config, {}, {"name": "mine"}).options.run_folder == Path.cwd() / "runs" / "mine"
    assert read(None, {}, REQUIRED).options.run_folder == Path.cwd() / "runs" / "name-pictures"


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a\\b"])
def test_a_name_that_leaves_the_output_folder_is_refused(name: str) -> None:
    assert "name without slashes" in problems_of(**with_required(name=name))[0]


def test_the_three_groups_of_spellings_in_a_file_are_the_same(config: Path) -> None:
    flat = 'model="a/b"\ndata="d"\nsteps=1\n'
    for rest in (
        "rank=8",
        "training.rank=8",
        "training = {rank = 8}",
        "[training]\nrank=8",
        "[ training ] # the loop\nrank=8",
    ):
        assert read(written(flat + rest), {}, {}).options.rank == 8
    assert read(written("\ufeff" + flat.replace("\n", "\r\n")), {}, {}).options.steps == 1


def test_all_problems_come_at_once_with_place_value_and_nearest_spelling(config: Path) -> None:
    file = written('model = "a/b"\nrnak = 16\nprecision = "BF16"\n\n[training]\nsteps = "ten"\nbatch = 0\n')
    environment = {"ELBOWROOM_LEARNING_RAT": "1", "ELBOWROOM_TENSORBOARD": "maybe", "ELBOWROOM_seed": "3"}
    with pytest.raises(OptionsError) as caught:
        read(file, environment, {"gradient_checkpointing_interval": "0", "lr_schedule": "cosine"})
    assert str(caught.value) == (
        "10 problems with the options:\n"
        "  rnak (shapes.toml line 2): there is no such option (its value is 16); did you mean rank?\n"
        '  ELBOWROOM_LEARNING_RAT (environment): there is no such option (its value is "1"); '
        "did you mean ELBOWROOM_LEARNING_RATE?\n"
        '  ELBOWROOM_seed (environment): there is no such option (its value is "3"); did you mean ELBOWROOM_SEED?\n'
        '  lr_schedule (command line): there is no such option (its value is "cosine"); did you mean lr_scheduler?\n'
        '  precision (shapes.toml line 3): must be bf16 or fp32, but is "BF16"; did you mean bf16?\n'
        '  steps (shapes.toml line 6): must be a whole number between 1 and 1000000000, but is "ten"\n'
        "  batch (shapes.toml line 7): must be a whole number between 1 and 65536, but is 0\n"
        "  tensorboard (environment ELBOWROOM_TENSORBOARD): must be true or false (also yes or no, on or off, 1 or 0), "
        'but is "maybe"\n'
        '  gradient_checkpointing_interval (command line): must be a whole number of at least 1, but is "0"\n'
        "  data: is required; give --data, ELBOWROOM_DATA or data in a file: a path"
    )
    assert isinstance(caught.value, ValueError)
    assert caught.value.problems[0] == Problem(
        "rnak", "shapes.toml line 2", "there is no such option (its value is 16)", "rank"
    )


def test_a_mistake_is_reported_even_where_a_higher_source_overrides_it(config: Path) -> None:
    file = written(CONFIG.replace("rank = 8", 'rank = "many"'))
    assert problems_of(file, rank="4") == [
        'rank (shapes.toml line 7): must be a whole number between 1 and 4096, but is "many"'
    ]


def test_a_key_in_the_wrong_table_or_twice_is_refused_with_both_lines(config: Path) -> None:
    assert problems_of(written(CONFIG + "seed = 3\n")) == [
        "seed (shapes.toml line 13): is not in the table [training]; put it below [run] or at the top of the file"
    ]
    twice = "rank (shapes.toml line 8): is given twice; line 1 has it already"
    assert problems_of(written("rank = 4\n" + CONFIG)) == [twice]
    assert problems_of(written(CONFIG + "rank = 4\n")) == [
        "rank (shapes.toml line 13): is given twice; line 7 has it already"
    ]


def test_an_unknown_table_is_refused_once(config: Path) -> None:
    (problem,) = problems_of(written(CONFIG.replace("[training]", "[trainng]") + "\n[training]\nsteps = 3\n"))
    assert problem.startswith("[trainng] (shapes.toml line 5): there is no such table; the tables are model, run, data")
    assert problem.endswith("did you mean training?")
    assert "[[training]]" in problems_of(written(CONFIG.replace("[training]", "[[training]]")))[0]
    assert problems_of(written("training = 5\n" + CONFIG))[0].startswith(
        "training (shapes.toml line 1): there is no such"
    )


def test_text_that_looks_like_a_key_is_no_key(config: Path) -> None:
    prompts = 'validation_prompts = ["""\nrank = 3\n[training]\n""", "b"]\nseed = 5\n'
    resolved = read(written(prompts + CONFIG), {}, {})
    assert resolved.options.validation_prompts == ("rank = 3\n[training]", "b")
    assert (resolved.options.rank, str(resolved.sources["seed"])) == (8, "shapes.toml line 5")


@pytest.mark.parametrize(
    ("broken", "line", "said"),
    [
        ("rank = True", 3, "Invalid value"),
        ("rank 5", 3, "Expected '='"),
        ("data2 = pictures", 3, "Invalid value"),
        ('lora_targets = ["a",', 4, "it belongs to what begins on line 3"),
        ("[run", 3, "Expected ']'"),
        ("seed = " + "9" * 5000, 3, "Exceeds the limit"),
    ],
)
def test_a_syntax_error_is_told_with_its_line_and_what_to_do(config: Path, broken: str, line: int, said: str) -> None:
    file = written(f'model = "a/b"\nrnak = 1\n{broken}\nsteps = 3\n')
    unknown, syntax = problems_of(file)
    assert unknown.startswith("rnak (shapes.toml line 2)")
    assert said in syntax and "text and paths stand in quotes" in syntax
    assert f"(shapes.toml line {line})" in syntax and len(syntax) < 500


def test_files_that_cannot_be_read(config: Path) -> None:
    assert problems_of(Path("shape.toml")) == ["shape.toml: there is no such file; did you mean shapes.toml?"]
    assert problems_of(Path("nowhere/shape.toml")) == ["nowhere/shape.toml: there is no such file"]
    assert problems_of(Path.cwd()) == [f"{Path.cwd()}: can't be read: Is a directory"]
    config.write_bytes(b"model = 'caf\xe9'")
    assert problems_of(config) == ["shapes.toml (byte 12): is not UTF-8 text; save the file as UTF-8"]


def test_a_rule_between_options_names_all_places(config: Path) -> None:
    assert problems_of(config, epochs="2") == [
        "steps (shapes.toml line 6, command line): steps and epochs are both given; give one, and set the other to "
        "none where it is inherited"
    ]
    (problem,) = problems_of(config, {"ELBOWROOM_GRADIENT_CHECKPOINTING": "yes"}, gradient_checkpointing_interval="4",
                             gradient_checkpointing_segment_stride="2")  # fmt: skip
    assert problem.startswith("gradient_checkpointing_segment_stride (environment ELBOWROOM_GRADIENT_CHECKPOINTING, co")
    assert "must be at least gradient_checkpointing_interval, but 2 is below 4" in problem


def test_a_rule_about_a_refused_value_is_not_reported_on_top() -> None:
    (problem,) = problems_of(**with_required(steps="ten"))
    assert "ten" in problem


def test_a_misspelt_option_is_not_reported_as_missing_too(config: Path) -> None:
    found = problems_of(written('modle = "a/b"\nstpes = 5\nrank = "x"\n'), {"ELBOWROOM_DATTA": "d"})
    assert [problem.split(" ")[0] for problem in found] == ["modle", "stpes", "ELBOWROOM_DATTA", "rank"]


def test_an_option_of_another_family_is_refused_if_it_is_set(config: Path) -> None:
    resolved = read(config, {}, {"guidance": "3.5"})
    resolved.check_family("flux")
    with pytest.raises(
        OptionsError, match=r"guidance \(command line\): has no effect on sd3 models; it is for flux only"
    ):
        resolved.check_family("sd3")
    read(config, {}, {}).check_family("sd3")
