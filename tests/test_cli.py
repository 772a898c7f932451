"""The command line as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from elbowroom.cli import app
from elbowroom.training import loop, pipeline
from tests.support.pipelines import build_pipeline
from tests.support.runs import draw_pictures, flags, run


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    return build_pipeline("flux", tmp_path_factory.mktemp("flux"))


@pytest.fixture
def pictures(tmp_path) -> Path:
    return draw_pictures(tmp_path / "pictures", 5)


def elbowroom(*arguments: str | Path, **environment: str):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "400", **environment})


def test_a_dry_run_shows_everything_and_trains_nothing(tmp_path, flux_folder, pictures):
    config = tmp_path / "mine.toml"
    config.write_text(f'model = "{flux_folder}"\nsteps = 8\n[training]\nbatch = 2\n')
    (pictures / "broken.png").write_bytes(b"nonsense")
    (pictures / "broken.txt").write_text("a caption")
    ran = elbowroom(
        "train", config, "--data", pictures, "--dry-run", "--resolution=32", "--gradient-checkpointing",
        "--output-dir", tmp_path / "runs", ELBOWROOM_RANK="8",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    for expected in (
        "(flux, ", "LoRA of rank 8", "[r][r][r][r][r]", "8 (3 per epoch, 2.7 epochs)", "starts at    step 0",
        str(tmp_path / "runs" / "mine"), "5 used, 1 left out", "broken.png", "Dry run: nothing was trained.",
    ):  # fmt: skip
        assert expected in ran.output, (expected, ran.output)
    lines = {line.split("│")[1].strip(): line for line in ran.output.splitlines() if line.count("│") == 4}
    assert "mine.toml line 2" in lines["steps"] and "environment ELBOWROOM_RANK" in lines["rank"]
    assert "command line" in lines["resolution"] and "default" in lines["learning_rate"]
    assert not (tmp_path / "runs").exists()


def test_sample_draws_with_a_run_and_with_a_pipeline(tmp_path, flux_folder, pictures):
    job, _, _ = run(
        model=flux_folder, data=pictures, output_dir=tmp_path / "runs", steps=2, learning_rate=0.5,
        validation_prompts="a red circle|a cat", validation_inference_steps=2, validation_guidance=1,
    )  # fmt: skip
    wanted = ("--prompt", "a red circle", "--prompt", "a cat", "--device", "cpu")
    drawn = elbowroom("sample", job.run.path, *wanted, "--output", tmp_path / "tuned")
    assert drawn.exit_code == 0, drawn.output
    names = ["00-a-red-circle.png", "01-a-cat.png"]
    assert sorted(path.name for path in (tmp_path / "tuned").iterdir()) == names
    for index, name in enumerate(names):  # the same pictures as in training, so in the run's precision (fp32) too
        trained = job.run.samples / "step-00000002" / f"0{index}.png"
        assert Image.open(tmp_path / "tuned" / name).tobytes() == Image.open(trained).tobytes()
    size = ("--width", "32", "--height", "48", "--steps", "2", "--max-sequence-length", "20")
    plain = elbowroom("sample", flux_folder, *wanted, *size, "--output", tmp_path / "plain")
    assert plain.exit_code == 0, plain.output
    assert Image.open(tmp_path / "plain" / names[0]).size == (32, 48)
    exact = elbowroom("sample", flux_folder, *wanted, *size, "--precision", "fp32", "--output", tmp_path / "exact")
    assert exact.exit_code == 0, exact.output
    assert Image.open(tmp_path / "exact" / names[0]).tobytes() != Image.open(tmp_path / "plain" / names[0]).tobytes()
    with_lora = elbowroom(
        "sample", flux_folder, *wanted, *size, "--lora", job.run.result, "--output", tmp_path / "lora"
    )
    assert with_lora.exit_code == 0, with_lora.output
    assert Image.open(tmp_path / "lora" / names[0]).tobytes() != Image.open(tmp_path / "plain" / names[0]).tobytes()


def test_sample_with_a_full_fine_tune(tmp_path, flux_folder, pictures):
    job, _, _ = run(
        model=flux_folder, data=pictures, output_dir=tmp_path / "runs", steps=2, training_type="full",
        validation_prompts="a red circle", validation_inference_steps=2, validation_guidance=1,
    )  # fmt: skip
    arguments = ("--prompt", "a red circle", "--precision", "fp32", "--device", "cpu", "--output", tmp_path / "out")
    assert elbowroom("sample", job.run.path, *arguments).exit_code == 0
    drawn = Image.open(tmp_path / "out" / "00-a-red-circle.png")
    assert drawn.tobytes() == Image.open(job.run.samples / "step-00000002" / "00.png").tobytes()


def test_sample_with_a_run_whose_lora_is_for_comfyui(tmp_path, flux_folder, pictures):
    job, _, _ = run(
        model=flux_folder, data=pictures, output_dir=tmp_path / "runs", steps=2, learning_rate=0.5,
        lora_format="comfyui", validation_prompts="a cat", validation_inference_steps=2, validation_guidance=1,
    )  # fmt: skip
    drawn = elbowroom("sample", job.run.path, "--prompt", "a cat", "--device", "cpu", "--output", tmp_path / "out")
    assert drawn.exit_code == 0, drawn.output
    trained = Image.open(job.run.samples / "step-00000002" / "00.png")
    assert Image.open(tmp_path / "out" / "00-a-cat.png").tobytes() == trained.tobytes()


def test_inspect_shows_what_would_be_trained_on(tmp_path, pictures):
    (pictures / "broken.png").write_bytes(b"nonsense")
    sheet = tmp_path / "sheet.png"
    looked = elbowroom("inspect", pictures, "--resolution", "32", "--batch", "2", "--contact-sheet", sheet)
    assert looked.exit_code == 0, looked.output
    assert "32×32" in looked.output and "broken.png" in looked.output and "5 used, 1 left out" in looked.output
    assert Image.open(sheet).width > 32


def test_inspect_of_a_folder_without_pictures(tmp_path):
    (tmp_path / "empty").mkdir()
    looked = elbowroom("inspect", tmp_path / "empty")
    assert looked.exit_code == 1 and "no image to train on" in looked.output


def test_options_lists_every_option():
    from elbowroom.options.definition import all_options

    listed = elbowroom("options", COLUMNS="400")
    assert listed.exit_code == 0
    assert all(name in listed.output for name in all_options())


def test_help_names_every_option_of_train():
    from elbowroom.options.definition import all_options

    shown = elbowroom("train", "--help")
    assert all(option.flag in shown.output for option in all_options().values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nobody/nothing"}, "nobody/nothing is no local folder, and could not be fetched"),
        ({"model": "{pictures}"}, "is not a pipeline in Diffusers' format: it has no model_index.json"),
        ({"data": "nowhere"}, "nowhere is missing"),
        ({"resolution": "34"}, "resolution 34 (command line): flux needs a multiple of 4, such as 32 or 36"),
        ({"lora_targets": "to_kk"}, "to_kk"),
        ({"output_dir": "{pictures}/0.png"}, "output_dir (command line): {pictures}/0.png/cache can't be made"),
        ({"device": "cuda:7"}, "device cuda:7: this torch finds"),
        ({"steps": "ten"}, "ten"),
        ({"gradient_checkpointing_interval": "2"}, "no effect without gradient_checkpointing"),
        (
            {"guidance": "2"},
            "guidance 2.0 (command line): has no effect on this model, which has no guidance embedding",
        ),
        (
            {"name": "cache"},
            "would be the folder of the run and of the cache; give the run another name (command line)",
        ),
        (
            {"steps": "none", "epochs": "1", "lr_warmup_steps": "5"},
            "is only 5 steps long, so the learning rate would never",
        ),
    ],
)
def test_what_can_not_work_is_refused_before_any_work(tmp_path, flux_folder, pictures, changes, message):
    options = {"model": flux_folder, "data": pictures, "steps": 2, "output_dir": tmp_path / "runs", **changes}
    options = {name: str(value).format(pictures=pictures) for name, value in options.items()}
    ran = elbowroom("train", *flags(**options))
    assert ran.exit_code in (1, 2), ran.output
    assert message.format(pictures=pictures) in ran.output
    assert "Traceback" not in ran.output
    assert not (tmp_path / "runs" / "cache").exists() or not list((tmp_path / "runs" / "cache").glob("*/*"))


def test_a_pipeline_that_no_family_knows(tmp_path, pictures):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "AudioLDMPipeline"}')
    ran = elbowroom("train", "--model", tmp_path / "other", "--data", pictures, "--steps", "1")
    assert ran.exit_code == 1
    assert "'AudioLDMPipeline' can't be trained; supported are FluxPipeline (flux)" in ran.output


def test_an_option_for_another_family_is_refused(tmp_path, pictures):
    folder = build_pipeline("sd3", tmp_path / "sd3")
    ran = elbowroom("train", *flags(model=folder, data=pictures, steps=1, guidance=2, output_dir=tmp_path / "runs"))
    assert ran.exit_code == 1
    assert "guidance (command line): has no effect on sd3 models" in ran.output


def test_the_weights_of_a_model_on_the_hub_are_fetched_last(tmp_path, flux_folder, pictures, monkeypatch):
    """Hours of waiting must not end in a message about the data, or about a run that can't go on."""
    fetched: list[bool] = []
    monkeypatch.setattr(pipeline, "_downloaded", lambda model, *, weights: fetched.append(weights) or flux_folder)
    options = {"model": "owner/name", "data": pictures, "steps": 1, "output_dir": tmp_path / "runs", "name": "run"}
    refused = elbowroom("train", *flags(**options | {"data": tmp_path / "nowhere"}))
    assert refused.exit_code == 1 and "nowhere is missing" in refused.output and fetched == [False]
    assert elbowroom("train", "--dry-run", *flags(**options)).exit_code == 0 and fetched == [False] * 2
    assert elbowroom("train", *flags(**options)).exit_code == 0 and fetched == [False] * 3 + [True]
    refused = elbowroom("train", *flags(**options, seed=7))
    assert refused.exit_code == 1 and "seed (command line): was 42, is 7" in refused.output
    refused = elbowroom("train", *flags(**options, resume="never"))
    assert refused.exit_code == 1 and fetched == [False] * 3 + [True] + [False] * 2


def test_a_run_that_is_further_than_asked_has_nothing_to_do(tmp_path, flux_folder, pictures):
    options = {"model": flux_folder, "data": pictures, "output_dir": tmp_path / "runs", "name": "run"}
    run(**options, steps=3)
    again = elbowroom("train", *flags(**options, steps=2))
    assert again.exit_code == 0, again.output
    assert "is at step 3, and 2 are asked for" in again.output


def too_large_for_the_machine() -> torch.Tensor:
    return torch.empty(2**50)


def too_large_for_the_accelerator() -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore\nlines")


@pytest.mark.parametrize("allocate", [too_large_for_the_machine, too_large_for_the_accelerator])
def test_too_little_memory_is_told_in_one_line_with_what_helps(tmp_path, flux_folder, pictures, allocate, monkeypatch):
    monkeypatch.setattr(loop.Run, "_losses", lambda *_: allocate())
    ran = elbowroom("train", *flags(model=flux_folder, data=pictures, steps=1, batch=2, output_dir=tmp_path / "runs"))
    assert ran.exit_code == 1 and isinstance(ran.exception, SystemExit)
    error = ran.output.splitlines()[-1]
    assert error.startswith("error: there is not enough memory (")
    assert all(option in error for option in ("gradient_checkpointing", "batch", "resolution", "precision"))


def test_other_runtime_errors_are_not_taken_for_too_little_memory(tmp_path, flux_folder, pictures, monkeypatch):
    def broken(*_):
        raise RuntimeError("a mistake in the program")

    monkeypatch.setattr(loop.Run, "_losses", broken)
    ran = elbowroom("train", *flags(model=flux_folder, data=pictures, steps=1, output_dir=tmp_path / "runs"))
    assert type(ran.exception) is RuntimeError


def test_an_option_and_a_table_of_one_name(tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text('data = "pictures"\n[data]\nresolution = 64\n')
    ran = elbowroom("train", config)
    assert ran.exit_code == 2
    assert (
        "mine.toml line 2): data is an option above and a table here; write the option data below [data]" in ran.output
    )


def test_sample_says_what_is_missing_and_overwrites_nothing(tmp_path, flux_folder, pictures):
    job, _, _ = run(
        model=flux_folder, data=pictures, output_dir=tmp_path / "runs", name="a", steps=1, learning_rate=0.5
    )
    draw = ("--prompt", "日本語", "--steps", "1", "--device", "cpu", "--output", tmp_path / "out")
    small = ("--width", "32", "--height", "32", "--max-sequence-length", "20")
    for _ in range(2):
        drawn = elbowroom("sample", flux_folder, *draw, *small, "--lora", job.run.path)
        assert drawn.exit_code == 0, drawn.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["00-日本語-2.png", "00-日本語.png"]
    odd = elbowroom("sample", flux_folder, *draw, "--width", "50", "--height", "32")
    assert odd.exit_code == 1 and "width 50: flux needs a multiple of 4" in odd.output
    missing = elbowroom("sample", flux_folder, *draw, *small, "--lora", tmp_path / "nothing.safetensors")
    assert missing.exit_code == 1 and "there is no LoRA file" in missing.output
    (job.run.result / "pytorch_lora_weights.safetensors").unlink()
    unfinished = elbowroom("sample", job.run.path, *draw)
    assert unfinished.exit_code == 1 and "has no result yet" in unfinished.output
