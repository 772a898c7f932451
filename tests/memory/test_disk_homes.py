"""Weights that are streamed from files: the model's own, which are never loaded whole or written to, and others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import elbowroom
from elbowroom.memory.weights.mapped import map_weights, mapped_from, written_to
from elbowroom.testing import simulated_accelerator
from tests.memory.test_streaming import ALL, Stack, example, gradients, same, streaming
from tests.support.models import BUILDERS, INPUTS, add_lora, assert_identical, step


def saved(model: nn.Module, folder: Path, parts: int = 1) -> list[Path]:
    state = list(model.state_dict().items())
    files = []
    for part in range(parts):
        path = folder / f"model-{part}.safetensors"
        save_file(dict(state[part::parts]), path)
        files.append(path)
    return files


def digests(files: list[Path]) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def mapped(family: str, folder: Path) -> tuple[nn.Module, list[Path]]:
    files = saved(BUILDERS[family](), folder, parts=2)
    with torch.device("meta"):
        model = BUILDERS[family]()
    assert map_weights(model, files) == []
    return model, files


@pytest.mark.parametrize("family", sorted(BUILDERS))
@pytest.mark.parametrize("option", [{"weight_streaming": "100%"}, {"weight_streaming": "50%"}, {"ramtorch": True}])
def test_a_mapped_model_trains_from_its_own_files(family, option, tmp_path):
    resident = BUILDERS[family]()
    add_lora(resident)
    expected = step(resident, INPUTS[family]())
    model, files = mapped(family, tmp_path)
    add_lora(model)
    before = digests(files)
    plan = elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True, **option))
    with elbowroom.apply(model, plan) as handle:
        for _ in range(2):
            assert_identical(expected[1], step(model, INPUTS[family]())[1])
        assert handle.report().counters.weight_bytes_in > 0
        streamed = [p for unit in handle._streamer.units for p in unit.parameters]
        assert streamed and all(mapped_from(parameter) is not None for parameter in streamed)
    assert digests(files) == before


def test_what_is_written_into_mapped_weights_is_seen_and_never_in_the_file(tmp_path):
    """Merging an adapter writes through `.data`, which no count of writes notices."""
    model, files = mapped("flux", tmp_path)
    add_lora(model)
    before = digests(files)
    resident = BUILDERS["flux"]()
    add_lora(resident)
    inputs = INPUTS["flux"]()
    plan = elbowroom.schedule(model, elbowroom.Controls(weight_streaming="100%"))
    with elbowroom.apply(model, plan), torch.no_grad():
        assert torch.equal(model(**inputs).sample, resident(**inputs).sample)
        model.fuse_lora()
        resident.fuse_lora()
        assert torch.equal(model(**inputs).sample, resident(**inputs).sample)
        model.unfuse_lora()
        resident.unfuse_lora()
        assert torch.equal(model(**inputs).sample, resident(**inputs).sample)
    assert digests(files) == before
    assert not list(tmp_path.glob("elbowroom-*"))


def test_pages_that_were_written_to_are_told_from_those_that_were_read(tmp_path):
    files = saved(Stack(), tmp_path)
    with torch.device("meta"):
        model = Stack()
    map_weights(model, files)
    parameters = list(model.parameters())
    assert not any(written_to(parameters))
    assert all(parameter.sum().isfinite() for parameter in parameters)  # reading maps pages
    assert not any(written_to(parameters))
    parameters[-1].data += 1
    assert written_to(parameters)[-1]


def test_weights_in_memory_move_to_a_file_and_back(tmp_path):
    model = Stack()
    x = example()
    expected = gradients(model, x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with elbowroom.apply(model, streaming(*ALL, store="disk", path=str(tmp_path))):
        assert same(expected, gradients(model, x))
        assert not list(tmp_path.iterdir())  # the file has no name
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
    assert all(torch.equal(value, before[name] + 1) for name, value in model.state_dict().items())
    reference = Stack()
    reference.load_state_dict(model.state_dict())
    assert same(gradients(reference, x), gradients(model, x))


def test_an_accelerator_streams_from_the_disk(tmp_path):
    with simulated_accelerator(seed=4) as accelerator:
        resident = Stack().to(accelerator.device)
        x = example().to(accelerator.device)
        expected = gradients(resident, x)
        files = saved(Stack(), tmp_path)
        with torch.device("meta"):
            model = Stack()
        map_weights(model, files)
        model.requires_grad_(True)
        for window in (1, 1 << 30):
            plan = streaming(*ALL, store="disk", window=window)
            with elbowroom.apply(model, plan, device=accelerator.device):
                for _ in range(3):
                    assert same(expected, gradients(model, x))
                model.zero_grad()
        assert accelerator.violations == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b""), "not a safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (lambda path: path.write_bytes((8).to_bytes(8, "little") + b"not json"), "is damaged"),
        (lambda path: save_file({"other": torch.ones(1)}, path), "the model has no such tensor"),
        (lambda path: save_file({"x.y": torch.ones(1)}, path), "which Stack does not have"),
        (lambda path: save_file({"start.bias": torch.ones(3)}, path), r"is torch.float32 \(3,\), but the model has"),
    ],
)
def test_files_that_do_not_fit_are_refused(damage, said, tmp_path):
    (path,) = saved(Stack(), tmp_path)
    damage(path)
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(ValueError, match=said) as refusal:
        map_weights(model, [path])
    assert str(path) in str(refusal.value)


def test_what_no_file_has_is_named(tmp_path):
    state = Stack().state_dict()
    state.pop("end.weight")
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Stack()
    assert map_weights(model, [tmp_path / "model.safetensors"]) == ["end.weight"]


def test_a_header_may_have_metadata(tmp_path):
    save_file(Stack().state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = Stack()
    assert map_weights(model, [tmp_path / "model.safetensors"]) == []
    assert "__metadata__" in json.loads((tmp_path / "model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
