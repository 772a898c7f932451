"""Whole training runs on tiny pipelines."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from elbowroom.options.reading import read
from elbowroom.training import encoding, loop
from elbowroom.training.checkpoints import CheckpointFolder
from elbowroom.training.display import Display
from elbowroom.training.job import prepare
from elbowroom.training.loop import NonFiniteError
from tests.support.runs import command, draw_pictures, flags, job, run

PROMPTS = "a red circle|something else"


@pytest.fixture
def pictures(tmp_path) -> Path:
    return draw_pictures(tmp_path / "pictures", 7)


@pytest.fixture
def basics(tmp_path, flux_folder, pictures) -> dict[str, object]:
    return {"model": flux_folder, "data": pictures, "output_dir": tmp_path / "runs", "name": "run"}


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of everything that must not differ between two runs."""
    files = [path for kind in ("checkpoints/*/state.json", "metrics.jsonl") for path in folder.glob(kind)]
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    for path in (file for part in ("checkpoints", "result") for file in (folder / part).rglob("*.safetensors")):
        # By tensor: safetensors writes the entries of a header's metadata in any order.
        for name, tensor in load_file(path).items():
            contents[f"{path.relative_to(folder)}: {name}"] = tensor.numpy().tobytes()
    return contents


DRAW_ELSEWHERE = """
import sys, torch, diffusers
folder, lora, component, guidance, out = sys.argv[1:]
pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
pipeline.set_progress_bar_config(disable=True)
if component:
    cls = type(getattr(pipeline, component))
    setattr(pipeline, component, cls.from_pretrained(lora))
else:
    pipeline.load_lora_weights(lora)
size = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 20}
size["guidance_scale"] = float(guidance)
for index, prompt in enumerate(["a red circle", "something else"]):
    picture = pipeline(prompt, generator=torch.Generator("cpu").manual_seed(42 + index), **size).images[0]
    picture.save(f"{out}/{index:02d}.png")
assert "elbowroom" not in sys.modules
"""


@pytest.mark.parametrize("training_type", ["lora", "full"])
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_the_result_draws_the_same_pictures_without_our_package(family, training_type, tmp_path, pictures, request):
    """Case F06: Diffusers loads the file in another process, with alpha, and draws what we drew."""
    folder = request.getfixturevalue(f"{family}_folder")
    job_, outcome, _ = run(
        model=folder, data=pictures, output_dir=tmp_path / "runs", steps=4, batch=2, learning_rate=0.05,
        validation_prompts=PROMPTS, validation_inference_steps=3, training_type=training_type,
        **({"alpha": 1} if training_type == "lora" else {}),
    )  # fmt: skip
    ours = job_.run.samples / "step-00000004"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    what = [outcome.result.parent, ""] if training_type == "lora" else [outcome.result, "transformer"]
    arguments = [folder, *what, job_.validation_guidance, theirs]
    subprocess.run([sys.executable, "-c", DRAW_ELSEWHERE, *map(str, arguments)], check=True, cwd=tmp_path)
    before = job_.run.samples / "step-00000000"
    for name in ("00.png", "01.png"):
        drawn = Image.open(ours / name).tobytes()
        assert drawn == Image.open(theirs / name).tobytes()
        assert drawn != Image.open(before / name).tobytes()
    assert outcome.comparison is not None and outcome.comparison.name == "before-after.png"


def test_the_run_folder(basics):
    job_, outcome, _ = run(
        **basics, steps=4, batch=2, checkpoint_steps=2, validation_prompts=PROMPTS, validation_steps=2,
        validation_inference_steps=1, tensorboard="true",
    )  # fmt: skip
    folder = job_.run.path
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["epoch"] for record in records] == [0, 0, 0, 0]
    assert all(record["loss"] > 0 and record["gradient_norm"] > 0 for record in records)
    timings = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert all(record["seconds"] > 0 and record["peak_memory_bytes"] > 0 for record in timings)
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "before-after.png",
        *(f"step-0000000{step}{end}" for step in (0, 2, 4) for end in ("", ".png")),
    ]
    assert "steps = 4  # command line" in (folder / "config.toml").read_text()
    assert 'lr_scheduler = "constant"  # default' in (folder / "config.toml").read_text()
    assert list((folder / "tensorboard").iterdir())
    assert [checkpoint.name for checkpoint in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]
    assert outcome.result == folder / "result" / "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize("options", [{}, {"training_type": "full", "gradient_accumulation_steps": 2, "epochs": 2}])
def test_a_run_repeats_bit_for_bit(basics, options):
    settings = {"steps": 4, "batch": 2, "caption_dropout": 0.3, **options}
    if "epochs" in settings:
        del settings["steps"]
    first, _, _ = run(**basics | {"name": "one"}, **settings)
    second, _, _ = run(**basics | {"name": "two"}, **settings)
    other, _, _ = run(**basics | {"name": "three"}, **settings, seed=7)
    assert files_of(first.run.path) == files_of(second.run.path)
    assert files_of(first.run.path) != files_of(other.run.path)


def test_gradient_checkpointing_changes_nothing_but_memory(basics):
    plain, _, _ = run(**basics | {"name": "plain"}, steps=3, batch=2)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 2}
    saved, _, printed = run(**basics | {"name": "saved"}, steps=3, batch=2, **settings)
    assert files_of(plain.run.path) == files_of(saved.run.path)
    assert "[rr][rr][r] (5 blocks, 3 segments)" in printed
    assert "backward: 9 replays, 15 block calls recomputed" in printed


@pytest.mark.parametrize("training_type", ["lora", "full"])
def test_precision(basics, training_type, monkeypatch):
    """The linear layers of the blocks compute in the precision that is asked for; what is trained stays in float32."""
    computed: set[torch.dtype] = set()
    original = loop.Run._load_denoiser

    def watched(self):
        denoiser = original(self)
        for name, module in denoiser.named_modules():
            if "blocks." in name and isinstance(module, torch.nn.Linear) and "lora_" not in name:
                module.register_forward_hook(lambda module, inputs, output: computed.add(output.dtype))
        return denoiser

    monkeypatch.setattr(loop.Run, "_load_denoiser", watched)
    losses = []
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        computed.clear()
        settings = {"name": precision, "precision": precision, "training_type": training_type}
        job_, outcome, _ = run(**basics | settings, steps=2, batch=2)
        assert computed == {dtype}
        newest = CheckpointFolder(job_.run.checkpoints, 1).newest()
        assert newest is not None
        assert {tensor.dtype for tensor in load_file(newest.path / "weights.safetensors").values()} == {torch.float32}
        losses.append(outcome.loss)
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_comfyui_file_comes_beside_the_one_for_diffusers(basics):
    both, outcome, _ = run(**basics, steps=1, lora_format="comfyui")
    names = ["comfyui_lora_weights.safetensors", "pytorch_lora_weights.safetensors"]
    assert sorted(path.name for path in both.run.result.iterdir()) == names
    assert outcome.result.name == names[0]
    one, outcome, _ = run(**basics, steps=2)  # a longer run must not leave the old one's file beside its own
    assert list(one.run.result.iterdir()) == [outcome.result] == [one.run.result / names[1]]


def test_the_configuration_repeats_the_run(tmp_path, flux_folder, pictures):
    first, _, _ = run(model=flux_folder, data=pictures, output_dir=tmp_path / "runs", steps=1)
    assert first.run.path.name == f"{flux_folder.name}-pictures"
    file = tmp_path / "copied.toml"
    file.write_bytes(first.run.configuration.read_bytes())
    again = prepare(read(file, {}, {}), progress=lambda *_: None)
    assert again.run == first.run and again.resume is not None and again.setup == first.setup
    assert again.notes == first.notes


# --- resuming -------------------------------------------------------------------------------------------------------


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.02)


@pytest.mark.parametrize("training_type", ["lora", "full"])
def test_kill_and_resume_end_as_if_nothing_had_happened(tmp_path, basics, training_type):
    """Case F05: 20 steps, and 10 steps + kill -9 + resume, end in the same bytes."""
    settings = {
        "steps": 20, "batch": 2, "checkpoint_steps": 5, "lr_scheduler": "cosine", "lr_warmup_steps": 3,
        "caption_dropout": 0.2, "gradient_checkpointing": "true", "training_type": training_type,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    whole, _, _ = run(**basics | {"name": "whole"}, **settings)
    arguments = flags(**basics | {"name": "killed"}, **settings)
    metrics = tmp_path / "runs" / "killed" / "metrics.jsonl"
    process = command("train", *arguments)
    wait_for_step(process, metrics, 10)
    process.send_signal(signal.SIGKILL)
    process.wait()
    newest = CheckpointFolder(tmp_path / "runs" / "killed" / "checkpoints", 3).newest()
    assert newest is not None and 5 <= newest.step < 20
    again = command("train", *arguments)
    printed = again.communicate(timeout=240)[0]
    assert again.returncode == 0, printed
    assert f"step {newest.step} (" in printed
    assert files_of(whole.run.path) == files_of(tmp_path / "runs" / "killed")


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, basics):
    settings = {"steps": 30, "batch": 1, "checkpoint_steps": 0}
    whole, _, _ = run(**basics | {"name": "whole"}, **settings)
    arguments = flags(**basics | {"name": "stopped"}, **settings)
    process = command("train", *arguments)
    wait_for_step(process, tmp_path / "runs" / "stopped" / "metrics.jsonl", 4)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=240)[0]
    assert process.returncode == 130, printed
    assert "The state is saved; the same command goes on from there" in printed and "--steps 30" in printed
    again = command("train", *arguments)
    printed = again.communicate(timeout=240)[0]
    assert again.returncode == 0, printed
    assert "starts at    step 0" not in printed
    final = {name: data for name, data in files_of(whole.run.path).items() if "checkpoints" not in name}
    assert final == {
        name: data for name, data in files_of(tmp_path / "runs" / "stopped").items() if "checkpoints" not in name
    }


def test_counters_are_global_over_several_resumes(basics):
    """Case F02: to 2, to 3, to 5; and case F05 for the steps in between."""
    whole, _, _ = run(**basics | {"name": "whole"}, steps=5, batch=2)
    for steps in (2, 3, 5):
        parts, _, _ = run(**basics | {"name": "parts"}, steps=steps, batch=2)
    records = [json.loads(line) for line in (parts.run.path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert (whole.run.path / "metrics.jsonl").read_bytes() == (parts.run.path / "metrics.jsonl").read_bytes()
    assert {name: data for name, data in files_of(whole.run.path).items() if name.startswith("result")} == {
        name: data for name, data in files_of(parts.run.path).items() if name.startswith("result")
    }


def test_a_finished_run_trains_no_further(basics):
    first, _, _ = run(**basics, steps=2)
    before = files_of(first.run.path)
    again, _, _ = run(**basics, steps=2)
    assert again.resume is not None and files_of(again.run.path) == before


def test_resume_never_refuses_an_existing_folder(basics):
    run(**basics, steps=1)
    with pytest.raises(RuntimeError, match="exists already and resume is never"):
        job(**basics, steps=2, resume="never")


def test_two_processes_can_not_train_into_one_folder(basics):
    prepared = job(**basics, steps=1)
    with prepared.run.locked(), pytest.raises(RuntimeError, match="another process trains into"), prepared.run.locked():
        pass


def test_a_checkpoint_that_appears_after_the_announcement_stops_the_run(basics):
    announced = job(**basics, steps=2)
    run(**basics, steps=1)
    with pytest.raises(
        RuntimeError, match=r"changed meanwhile: its newest checkpoint was none, and is .*step-00000001"
    ):
        loop.train(announced, Display(Console(file=io.StringIO())))


def test_what_a_killed_process_left_anywhere_is_removed(basics):
    prepared = job(**basics, steps=1)
    for folder in (prepared.run.path, prepared.run.samples, prepared.run.result, prepared.run.checkpoints):
        (folder / ".aside-0123").mkdir(parents=True)
    finished, _, _ = run(**basics, steps=1)
    assert not list(finished.run.path.rglob(".aside-*"))


# --- validation pictures --------------------------------------------------------------------------------------------


def test_pictures_are_drawn_again_when_they_were_asked_for_otherwise(basics):
    settings = {"steps": 1, "validation_inference_steps": 1, "validation_prompts": "one|two"}

    def drawn(**changes) -> dict[str, bytes]:
        prepared, _, _ = run(**basics, **settings | changes)
        assert json.loads((prepared.run.samples / "step-00000001" / "prompts.json").read_text())["prompts"]
        return {path.name: path.read_bytes() for path in sorted((prepared.run.samples / "step-00000001").iterdir())}

    first = drawn()
    assert list(first) == ["00.png", "01.png", "prompts.json"]
    assert drawn() == first
    other_texts = drawn(validation_prompts="three|two")
    assert other_texts["00.png"] != first["00.png"] and other_texts["01.png"] == first["01.png"]
    assert list(drawn(validation_prompts="one|two|three")) == ["00.png", "01.png", "02.png", "prompts.json"]
    assert list(drawn(validation_prompts="one")) == ["00.png", "prompts.json"]
    for changes in ({"validation_seed": 7}, {"validation_inference_steps": 2}):
        assert drawn(**changes)["00.png"] != first["00.png"], changes
    assert drawn() == first


def test_unchanged_pictures_are_not_drawn_again(basics, monkeypatch):
    settings = {"steps": 1, "validation_inference_steps": 1, "validation_prompts": "one|two"}
    run(**basics, **settings)
    monkeypatch.setattr(loop, "draw_prompts", None)
    run(**basics, **settings)


def test_pictures_of_steps_that_are_done_again_are_removed(basics):
    settings = {"validation_inference_steps": 1, "validation_prompts": "one", "validation_steps": 1}
    prepared, _, _ = run(**basics, steps=3, checkpoint_steps=1, **settings)
    shutil.rmtree(prepared.run.checkpoints / "step-00000003")
    shutil.rmtree(prepared.run.checkpoints / "step-00000002")
    again, _, _ = run(**basics, steps=2, **settings)
    names = ["before-after.png", *(f"step-0000000{step}{end}" for step in (0, 1, 2) for end in ("", ".png"))]
    assert sorted(path.name for path in again.run.samples.iterdir()) == names


# --- gradient accumulation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "accumulation", "epochs", "batch", "steps"), [(3, 4, 1, 1, 1), (7, 4, 2, 1, 4), (7, 2, 1, 2, 2)]
)
def test_the_last_partial_group_is_stepped_with_its_true_size(
    tmp_path, flux_folder, count, accumulation, epochs, batch, steps, monkeypatch
):
    """Case A14: the number of steps is what was announced, and each gradient is the mean over its group's samples."""
    data = draw_pictures(tmp_path / "few", count)
    norms: list[float] = []
    groups: list[list[tuple[int, ...]]] = []
    expected: list[float] = []
    original = loop.Run._training_step

    def watched(self, epoch, group):
        groups.append(list(group))
        # The reference: one graph over the whole group, from the same random numbers.
        state = self.generator.get_state()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cat([self._losses(each) for each in group]).mean().backward()
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        expected.append(torch.nn.utils.get_total_norm(grads).item())
        self.generator.set_state(state)
        original(self, epoch, group)

    monkeypatch.setattr(loop.Run, "_training_step", watched)
    prepared, _, _ = run(
        model=flux_folder, data=data, output_dir=tmp_path / "runs", epochs=epochs, batch=batch,
        gradient_accumulation_steps=accumulation, lr_scheduler="linear", max_grad_norm=0,
    )  # fmt: skip
    records = [json.loads(line) for line in prepared.run.metrics.path.read_text().splitlines()]
    norms = [record["gradient_norm"] for record in records]
    assert len(records) == prepared.steps == steps
    assert norms == pytest.approx(expected, rel=1e-4)
    assert [record["samples"] for record in records] == [sum(map(len, group)) for group in groups]
    per_epoch = steps // epochs
    for epoch in range(epochs):  # every sample once an epoch, none carried over
        seen = [index for group in groups[epoch * per_epoch :][:per_epoch] for each in group for index in each]
        assert sorted(seen) == list(range(count))
    rates = [record["learning_rate"] for record in records]
    assert rates == pytest.approx([1e-4 * (1 - step / steps) for step in range(steps)])


# --- what is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "gradient", "weight"])
def test_a_value_that_is_not_finite_stops_the_run(basics, where, monkeypatch):
    """Case G01: noticed in the same step, not applied, the last checkpoint stays, and the message says where."""
    original = loop.Run._losses

    def poisoned(self, batch):
        if self.step == 3 and where == "weight":
            next(p for name, p in self.denoiser.named_parameters() if "lora_A" in name).data[0, 0] = float("nan")
        losses = original(self, batch)
        if self.step == 3 and where == "loss":
            losses = losses * float("inf")
        if self.step == 3 and where == "gradient":
            losses = losses + torch.sqrt(losses * 0)  # finite, with an infinite slope
        return losses

    monkeypatch.setattr(loop.Run, "_losses", poisoned)
    with pytest.raises(NonFiniteError) as failure:
        run(**basics, steps=6, batch=2, checkpoint_steps=1)
    message = str(failure.value)
    assert "of step 4 is not a finite number; the step was not applied" in message
    assert ".png" in message and "step-00000003" in message
    assert ("lora_A" in message) == (where != "loss")
    folder = job(**basics, steps=6, batch=2).run
    newest = CheckpointFolder(folder.checkpoints, 3).newest()
    assert newest is not None and newest.step == 3
    assert all(torch.isfinite(t).all() for t in load_file(newest.path / "weights.safetensors").values())


@pytest.mark.parametrize(("poisoned_step", "checkpoint_steps"), [(3, 1), (6, 0)])
def test_weights_that_are_not_finite_are_not_saved(basics, poisoned_step, checkpoint_steps, monkeypatch):
    """Case G01: loss and gradient are finite, and the optimizer makes an infinite weight of them."""
    original = torch.optim.AdamW.step
    steps = []

    def poisoned(self, *arguments, **named):
        original(self, *arguments, **named)
        steps.append(None)
        if len(steps) == poisoned_step:
            self.param_groups[0]["params"][1].data[0, 0] = float("inf")

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    with pytest.raises(NonFiniteError) as failure:
        run(**basics, steps=6, batch=2, checkpoint_steps=checkpoint_steps)
    assert f"a trained weight is not a finite number after step {poisoned_step}, and was not saved" in str(
        failure.value
    )
    assert "First tensor that is not finite: transformer_blocks.0" in str(failure.value)
    folder = job(**basics, steps=6, batch=2).run
    newest = CheckpointFolder(folder.checkpoints, 3).newest()
    assert (newest.step if newest else 0) == (poisoned_step - 1 if checkpoint_steps else 0)
    assert not folder.result.exists()


def test_a_result_that_is_not_finite_is_not_saved(basics, monkeypatch):
    """The check before the last checkpoint doesn't cover a finished run whose result is written once more."""
    _, outcome, _ = run(**basics, steps=1)
    good = outcome.result.read_bytes()
    original = loop.load_training_state

    def poisoned(*arguments, model, **named):
        counters = original(*arguments, model=model, **named)
        next(p for p in model.parameters() if p.requires_grad).data[0, 0] = float("nan")
        return counters

    monkeypatch.setattr(loop, "load_training_state", poisoned)
    with pytest.raises(NonFiniteError, match="a trained weight is not a finite number after step 1"):
        run(**basics, steps=1)
    assert outcome.result.read_bytes() == good


# --- the cache ------------------------------------------------------------------------------------------------------


def test_only_what_changed_is_encoded_again(basics, pictures, monkeypatch):
    """Case E10: files, captions and settings that change are noticed; everything else comes from the cache."""

    def encoded(**changes) -> list[str]:
        _, _, printed = run(**basics | {"name": f"run{time.monotonic_ns()}"}, **{"steps": 1, "batch": 7, **changes})
        return [line for line in printed.splitlines() if line.endswith(" done")]

    assert encoded() == ["captions: 8 done", "pictures: 7 done"]  # the empty caption is one of them
    assert encoded() == []
    (pictures / "0.txt").write_text("another circle")
    assert encoded() == ["captions: 1 done"]
    Image.new("RGB", (48, 48), "red").save(pictures / "1.png")
    assert encoded() == ["pictures: 1 done"]
    assert encoded(resolution=48) == ["pictures: 7 done"]
    assert encoded(max_sequence_length=16) == ["captions: 8 done"]
    (pictures / "a.b.png").write_bytes((pictures / "2.png").read_bytes())  # case E06: dots, and a copied picture
    (pictures / "a.b.txt").write_text("dots in the name")
    assert encoded() == ["captions: 1 done", "pictures: 1 done"]
    monkeypatch.setattr(encoding, "_FORMAT", encoding._FORMAT + 1)  # another way to prepare them
    assert encoded() == ["captions: 9 done", "pictures: 8 done"]
