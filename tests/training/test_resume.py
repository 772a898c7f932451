"""Going on with other options: what takes effect, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from elbowroom.options import Options
from elbowroom.training.checkpoints import CheckpointMismatchError
from elbowroom.training.resume import CHANGEABLE, FREE
from tests.support.pipelines import build_pipeline
from tests.support.runs import draw_pictures, job, run

SETTINGS = {"steps": 2, "batch": 2, "lr_scheduler": "linear", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A model, data, and a run of two steps; tests that change them work on a copy."""
    folder = tmp_path_factory.mktemp("finished")
    build_pipeline("flux", folder / "flux")
    draw_pictures(folder / "pictures", 5)
    run(**basics(folder), **SETTINGS)
    return folder


@pytest.fixture
def copy(tmp_path, finished) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


def basics(folder: Path) -> dict[str, object]:
    return {"model": folder / "flux", "data": folder / "pictures", "output_dir": folder / "runs", "name": "run"}


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def test_every_rule_is_about_an_option() -> None:
    assert set(Options.model_fields) >= FREE | CHANGEABLE and not FREE & CHANGEABLE


def test_what_may_change_takes_effect_and_is_announced(copy: Path) -> None:
    """The current values win over those that the checkpoint's optimizer and schedule were made with."""
    changes = {"learning_rate": 1e-5, "weight_decay": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "steps": 4}
    prepared, _, _ = run(**basics(copy), **SETTINGS | changes)
    assert [note.partition(" from step")[0] for note in prepared.notes] == [
        "learning_rate (command line) was 0.001, and is 1e-05",
        "adam_beta2 (command line) was 0.999, and is 0.9",
        "adam_epsilon (command line) was 1e-08, and is 1e-06",
        "weight_decay (command line) was 0.01, and is 0.5",
    ]
    assert all(note.endswith("from step 2 on") for note in prepared.notes)
    rates = [record["learning_rate"] for record in records(copy)]
    assert rates == pytest.approx([1e-3, 1e-3 / 2, 1e-5 * 2 / 4, 1e-5 / 4])
    state = json.loads((prepared.run.checkpoints / "step-00000004" / "state.json").read_text())
    (group,) = state["optimizer"]["groups"]
    options = group["options"]
    assert (options["weight_decay"], options["betas"], options["eps"], options["initial_lr"]) == (
        0.5, [0.9, 0.9], 1e-6, 1e-5,
    )  # fmt: skip
    assert state["counters"]["setup"]["learning_rate"] == 1e-5


def test_another_number_of_steps_is_another_schedule(copy: Path) -> None:
    prepared, _, _ = run(**basics(copy), **SETTINGS | {"steps": 4})
    assert prepared.notes == ()
    rates = [record["learning_rate"] for record in records(copy)]
    assert rates == pytest.approx([1e-3, 1e-3 / 2, 1e-3 * 2 / 4, 1e-3 / 4])


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 9, "checkpoint_steps": 7, "checkpoints_keep": 9, "tensorboard": "true", "lora_format": "comfyui"},
        {"validation_prompts": "a cat", "validation_steps": 3, "validation_seed": 5},
        {"gradient_checkpointing": "true", "cache_dir": "elsewhere"},
        {"alpha": 16, "rank": 16, "device": "auto"},
    ],
)
def test_what_does_not_touch_the_steps_that_are_done_may_change(finished: Path, tmp_path: Path, changes) -> None:
    if "cache_dir" in changes:
        changes = changes | {"cache_dir": tmp_path / "cache"}
    prepared = job(**basics(finished), **SETTINGS | changes)
    assert prepared.resume is not None and prepared.notes == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 8}, "rank (command line): was 16, is 8"),
        ({"alpha": 4}, "alpha (command line): was 16.0, is 4.0"),
        ({"lora_targets": "attn.to_q"}, "is ['attn.to_q']"),
        ({"training_type": "full"}, "training_type (command line): was lora, is full"),
        ({"seed": 7}, "seed (command line): was 42, is 7"),
        ({"batch": 1}, "batch (command line): was 2, is 1"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps (command line): was 1, is 2"),
        ({"repeats": 2}, "repeats (command line): was 1, is 2"),
        ({"resolution": 48}, "resolution (command line): was 32, is 48"),
        ({"precision": "bf16"}, "precision (command line): was fp32, is bf16"),
        ({"max_sequence_length": 16}, "max_sequence_length (command line): was 20, is 16"),
        ({"caption_missing": "empty"}, "caption_missing (command line): was skip, is empty"),
    ],
)
def test_what_makes_another_run_is_refused(finished: Path, changes, told: str) -> None:
    """Case F05: never a warm start by accident; before any work, with the old and the new value and its place."""
    with pytest.raises(CheckpointMismatchError) as failure:
        job(**basics(finished), **SETTINGS | changes)
    assert told in str(failure.value)
    assert "step-00000002" in str(failure.value)
    assert str(failure.value).endswith("Give the run another name, or put the value back")


def test_all_refused_changes_come_at_once(finished: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"seed .*\n.*batch .*\n"):
        job(**basics(finished), **SETTINGS | {"seed": 7, "batch": 1})


@pytest.mark.parametrize("change", ["caption", "picture", "fewer"])
def test_other_data_is_refused(copy: Path, change: str) -> None:
    pictures = copy / "pictures"
    if change == "caption":
        (pictures / "0.txt").write_text("something else")
    if change == "picture":
        (pictures / "0.png").write_bytes((pictures / "1.png").read_bytes())
    if change == "fewer":
        (pictures / "0.png").unlink()
    with pytest.raises(
        CheckpointMismatchError, match=r"data \(command line\): was 5 pictures \(digest .*, is \d pictures"
    ):
        job(**basics(copy), **SETTINGS)


@pytest.mark.parametrize("component", ["transformer", "vae"])
def test_another_model_is_refused_and_the_same_one_elsewhere_is_not(copy: Path, component: str) -> None:
    moved = basics(copy) | {
        "model": (copy / "flux").rename(copy / "moved"),
        "data": (copy / "pictures").rename(copy / "also moved"),
    }
    assert job(**moved, **SETTINGS).resume is not None
    (file,) = (copy / "moved" / component).glob("*.safetensors")
    weights = load_file(file)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=r"model \(command line\): was weights with the digest"):
        job(**moved, **SETTINGS)


def test_a_checkpoint_without_a_record_is_pointed_out(copy: Path) -> None:
    path = copy / "runs" / "run" / "checkpoints" / "step-00000002"
    state = json.loads((path / "state.json").read_text())
    del state["counters"]["setup"]
    text = json.dumps(state)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "state.json").write_text(text)
    manifest["files"]["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (note,) = job(**basics(copy), **SETTINGS | {"seed": 7}).notes
    assert "before checkpoints recorded their options" in note
