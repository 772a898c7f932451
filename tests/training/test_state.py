from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from elbowroom.training.checkpoints import CheckpointError, CheckpointFolder, CheckpointMismatchError
from elbowroom.training.lora import add_lora
from elbowroom.training.names import plain_name, trainable_parameters
from elbowroom.training.state import (
    load_training_state,
    load_weights,
    read_counters,
    save_training_state,
    save_weights,
    training_state_bytes,
)
from tests.support.models import flux, flux_inputs

# ---- names


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.to_q.lora_A.weight",
        "blocks.0.to_q.lora_A.default.weight",
        "module.blocks.0.to_q.lora_A.default.weight",
        "_orig_mod.blocks.0.to_q.lora_A.default.weight",
        "module._orig_mod.blocks.0.to_q.lora_A.weight",
        "_orig_mod.module.base_model.model.blocks.0._orig_mod.to_q.lora_A.default.weight",
        "base_model.model.blocks.0._checkpoint_wrapped_module._fsdp_wrapped_module.to_q.lora_A.weight",
    ],
)
def test_plain_names(name: str) -> None:
    assert plain_name(name) == "blocks.0.to_q.lora_A.weight"


@pytest.mark.parametrize(
    "name", ["model.layers.0.weight", "blocks.module.weight", "default.weight", "submodule.weight"]
)
def test_parts_that_only_look_like_wrappers_stay(name: str) -> None:
    assert plain_name(name) == name


# ---- state


@dataclass
class Run:
    """A small training run with every kind of state: weights, moments, averages, rates, five random sources."""

    model: Any
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    generators: dict[str, torch.Generator]
    ema: dict[str, torch.Tensor]
    history: list[tuple[float, ...]] = field(default_factory=list)
    step: int = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = flux_inputs()
            noise = torch.randn(inputs["hidden_states"].shape, generator=self.generators["noise"])
            numbers = (random.gauss(0, 1), float(np.random.normal()), float(torch.rand(())))
            inputs["hidden_states"] = inputs["hidden_states"] + noise * (1 + 0.01 * sum(numbers))
            loss = self.model(**inputs).sample.square().mean()
            loss.backward()
            self.history.append((loss.item(), self.lr_scheduler.get_last_lr()[0], *numbers))
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            for name, parameter in trainable_parameters(self.model).items():
                self.ema[name].lerp_(parameter.detach(), 0.1)
            self.step += 1

    def save(self, folder: Path) -> None:
        save_training_state(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            generators=self.generators,
            counters={"step": self.step, "loss": 1 / 3},
            tensors={"ema": self.ema},
        )

    def load(self, folder: Path) -> None:
        counters = load_training_state(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            generators=self.generators,
            tensors={"ema": self.ema},
        )
        assert counters["loss"] == 1 / 3
        self.step = counters["step"]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that must be equal bit for bit."""
        found = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for index, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{index}.{key}"] = torch.as_tensor(value).clone()
        found |= {f"ema.{name}": tensor.clone() for name, tensor in self.ema.items()}
        found["generator"] = self.generators["noise"].get_state()
        found["torch"] = torch.get_rng_state()
        return found


def make_run(
    kind: str = "lora", optimizer: str = "adamw", *, seed: int = 0, rank: int = 4, targets: tuple[str, ...] = ("to_q",)
) -> Run:
    model: Any = flux(num_layers=1, num_single_layers=1)
    if kind == "lora":
        add_lora(model, rank=rank, alpha=8, targets=targets, seed=seed)
    parameters = list(trainable_parameters(model).values())
    if optimizer == "adamw":
        made: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.95))
    else:
        made = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / 4))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    generators = {"noise": torch.Generator().manual_seed(seed), "data": torch.Generator().manual_seed(seed)}
    ema = {name: parameter.detach().clone() for name, parameter in trainable_parameters(model).items()}
    return Run(model, made, scheduler, generators, ema)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_resuming_is_exact(kind: str, optimizer: str, tmp_path: Path) -> None:
    """Case F05: 6 steps, and 3 + 3 with new objects, end in the same bits; every step's loss, rate and draw too."""
    whole = make_run(kind, optimizer)
    whole.train(6)

    first = make_run(kind, optimizer)
    first.train(3)
    path = CheckpointFolder(tmp_path, keep=1).save(3, first.save)
    second = make_run(kind, optimizer, seed=99)  # other random state, and for a LoRA another beginning
    second.load(path)
    shutil.rmtree(path)  # nothing may still read from the file
    second.train(3)

    assert second.step == 6
    assert first.history + second.history == whole.history
    assert_equal(second.tensors(), make_final(whole))


def make_final(run: Run) -> dict[str, torch.Tensor]:
    """The tensors of a run, except that the global random state is the one of now: the runs share a process."""
    return run.tensors() | {"torch": torch.get_rng_state()}


def test_gauss_caches_are_part_of_the_random_state(tmp_path: Path) -> None:
    """`random.gauss` and NumPy's `normal` draw pairs and keep the second number for the next call."""
    run = make_run()
    random.gauss(0, 1)
    np.random.normal()
    run.save(tmp_path)
    expected = (random.gauss(0, 1), np.random.normal(), torch.rand(2).tolist(), random.random())
    make_run(seed=99).load(tmp_path)
    assert (random.gauss(0, 1), np.random.normal(), torch.rand(2).tolist(), random.random()) == expected


def test_a_lora_checkpoint_has_no_frozen_weights(tmp_path: Path) -> None:
    """Case F08: it is as small as the adapter and its moments."""
    run = make_run("lora")
    run.train(1)
    run.save(tmp_path)
    assert set(load_file(tmp_path / "weights.safetensors")) == {
        f"{block}.0.attn.to_q.lora_{side}.weight"
        for block in ("transformer_blocks", "single_transformer_blocks")
        for side in "AB"
    }
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    estimated = training_state_bytes(run.model, run.optimizer, {"ema": run.ema})
    random_state = (tmp_path / "random.safetensors").stat().st_size
    assert estimated <= written - random_state <= estimated + 10_000  # file headers
    assert not [file.name for file in tmp_path.iterdir() if file.suffix not in (".safetensors", ".json")]


def test_moments_keep_their_own_precision(tmp_path: Path) -> None:
    """torch's own `load_state_dict` would round float32 moments of bfloat16 weights."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    model, optimizer, scheduler = build()
    (parameter,) = model.parameters()
    momentum = torch.full((2, 3), 1 / 3)
    optimizer.state[parameter]["momentum_buffer"] = momentum
    save_training_state(tmp_path, model=model, optimizer=optimizer, lr_scheduler=scheduler, generators={}, counters={})
    other, other_optimizer, other_scheduler = build()
    load_training_state(tmp_path, model=other, optimizer=other_optimizer, lr_scheduler=other_scheduler, generators={})
    (restored,) = other_optimizer.state.values()
    assert restored["momentum_buffer"].dtype == torch.float32
    assert torch.equal(restored["momentum_buffer"], momentum)


def test_optimizer_options_come_back_exactly(tmp_path: Path) -> None:
    run = make_run()
    run.train(2)
    run.save(tmp_path)
    other = make_run(seed=99)
    other.load(tmp_path)
    saved, restored = run.optimizer.param_groups[0], other.optimizer.param_groups[0]
    assert {key: value for key, value in saved.items() if key != "params"} == {
        key: value for key, value in restored.items() if key != "params"
    }
    assert isinstance(restored["betas"], tuple)
    assert other.lr_scheduler.state_dict() == run.lr_scheduler.state_dict()


def test_present_settings_win_over_saved_ones(tmp_path: Path) -> None:
    """Moments and the step are state; the learning rate, betas and the form of the schedule are settings."""
    run = make_run()
    run.train(2)
    run.optimizer.param_groups[0]["made_by_the_optimizer"] = [1, 2]
    run.save(tmp_path)
    other = make_run(seed=99)
    parameters = other.optimizer.param_groups[0]["params"]
    other.optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.5, 0.6), weight_decay=0.3, eps=1e-5)
    other.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(other.optimizer, lambda step: 1 / (step + 2))
    other.load(tmp_path)
    (group,) = other.optimizer.param_groups
    assert (group["betas"], group["weight_decay"], group["eps"], group["initial_lr"]) == ((0.5, 0.6), 0.3, 1e-5, 4e-3)
    assert group["made_by_the_optimizer"] == [1, 2]
    assert group["lr"] == other.lr_scheduler.get_last_lr()[0] == 4e-3 / 4
    other.optimizer.step()
    other.lr_scheduler.step()
    assert group["lr"] == 4e-3 / 5
    assert read_counters(tmp_path) == {"step": 2, "loss": 1 / 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, r"lora_A\.weight is float32\[4, 32\] there and float32\[8, 32\] here"),
        ({"targets": ("to_q", "to_k")}, r"Missing there: .*to_k\.lora_A\.weight.*Unexpected there: nothing"),
        ({"targets": ("to_k",)}, r"Missing there: .*to_k\.lora_A.*Unexpected there: .*to_q\.lora_A"),
        ({"kind": "full"}, r"Missing there: context_embedder\.bias.* and \d+ more.*Unexpected there: .*to_q\.lora_A"),
    ],
)
def test_another_rank_or_other_targets_stop_the_resume(changes: dict, message: str, tmp_path: Path) -> None:
    """Case F05: nothing is loaded in part, and the names are listed."""
    run = make_run()
    run.train(1)
    run.save(tmp_path)
    other = make_run(seed=5, **changes)
    before = other.tensors()
    with pytest.raises(CheckpointMismatchError, match=message):
        other.load(tmp_path)
    assert_equal(other.tensors(), before)


def test_every_part_is_compared_before_any_is_changed(tmp_path: Path) -> None:
    """Case F05: an optimizer over other parameters, other averages or other generators are refused as well."""
    run = make_run()
    run.train(1)
    run.save(tmp_path)

    fewer = make_run(seed=5)
    fewer.optimizer.param_groups[0]["params"].pop()
    averages = make_run(seed=5)
    averages.ema["more"] = torch.zeros(1)
    generators = make_run(seed=5)
    generators.generators["more"] = torch.Generator()
    groups = make_run(seed=5)
    last = groups.optimizer.param_groups[0]["params"].pop()
    groups.optimizer.add_param_group({"params": [last]})
    for other, message in (
        (fewer, r"optimizer\.safetensors does not fit.*Unexpected there: .*to_q\.lora_B"),
        (averages, r"ema\.safetensors does not fit.*Missing there: more"),
        (generators, r"random\.safetensors does not fit.*Missing there: generator\.more"),
        (groups, "has 1 parameter groups, and the optimizer 2"),
    ):
        before = other.tensors()
        with pytest.raises(CheckpointMismatchError, match=message):
            other.load(tmp_path)
        assert_equal(other.tensors(), before)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    run = make_run()
    run.save(tmp_path)
    os.truncate(tmp_path / "weights.safetensors", 30)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors can't be read"):
        run.load(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json can't be read"):
        run.load(tmp_path)
    (tmp_path / "state.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match=r"its format is 99.*reads format 1"):
        run.load(tmp_path)


def test_values_that_are_neither_tensors_nor_json_are_refused(tmp_path: Path) -> None:
    run = make_run()
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(TypeError, match=r"the value tensor\(0\.1000\) \(Tensor\) can't be saved as JSON"):
        run.save(tmp_path)


def test_an_optimizer_over_foreign_parameters_is_refused(tmp_path: Path) -> None:
    run = make_run()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 5))]})
    with pytest.raises(ValueError, match=r"holds a parameter of shape \(3, 5\) that is no trainable parameter"):
        run.save(tmp_path)


def test_weights_alone_load_into_a_wrapped_model(tmp_path: Path) -> None:
    run = make_run()
    run.train(1)
    save_weights(run.model, tmp_path / "adapter.safetensors")
    other = make_run(seed=5)
    load_weights(torch.compile(other.model, backend="eager"), tmp_path / "adapter.safetensors")
    assert_equal(dict(trainable_parameters(other.model)), dict(trainable_parameters(run.model)))


class StandInForAccelerator:
    """The random state of a device, as torch.cuda has it."""

    def __init__(self) -> None:
        self.state = torch.tensor([1, 2, 3], dtype=torch.uint8)

    def get_rng_state(self) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


def test_the_accelerators_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    device = StandInForAccelerator()
    kind = ["cuda"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind[0]))
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    run.save(tmp_path)
    device.state = torch.tensor([4, 5, 6], dtype=torch.uint8)
    kind[0] = "xpu"
    run.load(tmp_path)
    assert device.state.tolist() == [4, 5, 6], "another kind of device has another kind of state"
    kind[0] = "cuda"
    run.load(tmp_path)
    assert device.state.tolist() == [1, 2, 3]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    run.load(tmp_path)
