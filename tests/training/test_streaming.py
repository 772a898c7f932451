"""Training runs with streamed weights: the same LoRA, bit for bit, and a summary that shows what was streamed."""

from __future__ import annotations

import re

import pytest
import torch

from elbowroom.memory import Handle, apply
from elbowroom.training import placement
from elbowroom.training.checkpoints import CheckpointError
from elbowroom.training.pipeline import PipelineFolder
from tests.support.runs import job, run, weights


@pytest.fixture
def basics(basics):
    """With pictures that are drawn before and after training."""
    drawn = {"validation_prompts": "a circle", "validation_inference_steps": 2}
    return lambda family, name: basics(family, name) | drawn


OPTIONS = {
    "all blocks": {"weight_streaming": "100%"},
    "half of the bytes": {"weight_streaming": "50%"},
    "two blocks": {"weight_streaming": 2},
    "the last two blocks": {"musubi_blocks_to_swap": 2},
    "layers": {"ramtorch": True},
    "layers of attention": {"ramtorch": True, "ramtorch_target_modules": "*attn.to_*,Linear"},
    "half of the layers": {"ramtorch": True, "ramtorch_transformer_percent": 50},
    "every kind of layer": {"ramtorch": True, "ramtorch_disable_extensions": False},
    "a small window": {"weight_streaming": "100%", "weight_window": "64KiB"},
    "recomputed": {"weight_streaming": "100%", "gradient_checkpointing": True, "gradient_checkpointing_interval": 2},
}


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_every_way_ends_in_the_same_lora(family, basics):
    plain, _, _ = run(**basics(family, "plain"))
    expected = weights(plain.run.path)
    for name, options in OPTIONS.items():
        streamed, _, printed = run(**basics(family, name.replace(" ", "-")), **options)
        assert weights(streamed.run.path) == expected, name
        assert re.search(r"weights: [\d.]+ KiB streamed, [1-9][\d.]* \w+ fetched", printed), name
        assert any(mark in streamed.plan.strip() for mark in "~."), name
        assert not list(streamed.run.path.rglob("elbowroom-*"))


def test_the_strip_shows_what_is_streamed(basics):
    def strip(**options: object) -> str:
        return job(**basics("flux", "run"), **options).plan.strip()

    assert strip(weight_streaming="100%") == "k~ k~ k~ k~ k~"
    assert strip(weight_streaming=2) == "k k k~ k k~"
    assert strip(musubi_blocks_to_swap=2) == "k k k k~ k~"
    assert strip(ramtorch=True) == "k. k. k. k. k."
    assert strip(ramtorch=True, ramtorch_target_modules="single_transformer_blocks.1") == "k k k k. k"
    both = {"ramtorch": True, "ramtorch_target_modules": "transformer_blocks.0", "musubi_blocks_to_swap": 1}
    assert strip(**both) == "k. k k k k~"
    assert strip(weight_streaming="auto") == "kkkkk"  # it fits


@pytest.mark.parametrize("training_type", ["lora", "full"])
def test_a_full_fine_tune_and_resuming(training_type, basics):
    options = basics("flux", "run") | {"training_type": training_type, "checkpoint_steps": 2}
    plain, _, _ = run(**options | {"name": "plain", "steps": 5})
    streamed = {"weight_streaming": "60%", "gradient_checkpointing": True}
    run(**options | {"steps": 2}, **streamed)
    resumed, _, printed = run(**options | {"steps": 5}, **streamed)
    assert resumed.resume is not None and "weights: " in printed
    assert weights(resumed.run.path) == weights(plain.run.path)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_a_quantized_base(family, basics):
    plain, _, _ = run(**basics(family, "plain"))
    ways: dict[str, dict[str, object]] = {
        "resident": {},
        "from files": {"weight_streaming": "100%"},
        "layers": {"ramtorch": True, "gradient_checkpointing": True},
        "recomputed": {"weight_streaming": 2, "gradient_checkpointing": True},
    }
    found = {}
    for name, options in ways.items():
        quantized, _, printed = run(
            **basics(family, name.replace(" ", "-")), base_model_precision="int8-torchao", **options
        )
        found[name] = weights(quantized.run.path)
        assert re.search(r"base quantized to int8-torchao: \d+ layers, ([\d.]+) KiB of weights are", printed)
        assert "frozen weights in int8-torchao" not in printed  # the announcement is the command's
    assert all(each == found["resident"] for each in found.values())
    assert found["resident"] != weights(plain.run.path)


def test_a_run_with_a_quantized_base_goes_on_exactly(basics):
    options = basics("flux", "run") | {"base_model_precision": "int8-sdnq-svd", "checkpoint_steps": 2}
    whole, _, _ = run(**options | {"name": "whole", "steps": 4})
    run(**options | {"steps": 2})
    resumed, _, _ = run(**options | {"steps": 4})
    assert resumed.resume is not None and weights(resumed.run.path) == weights(whole.run.path)
    with pytest.raises(CheckpointError, match="base_model_precision .*: was int8-sdnq-svd, is int4-torchao"):
        job(**options | {"steps": 6, "base_model_precision": "int4-torchao"})


def test_quantizing_that_can_not_be_is_refused_before_the_run(basics, monkeypatch):
    with pytest.raises(ValueError, match="base_model_precision .* has no effect unless training_type is lora"):
        job(**basics("flux", "run"), base_model_precision="int8-torchao", training_type="full")
    with pytest.raises(ValueError, match="did you mean int8-sdnq"):
        job(**basics("flux", "run"), base_model_precision="int8-sndq")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="nf4-bitsandbytes needs the package bitsandbytes: pip install bitsandbytes"):
        job(**basics("flux", "run"), base_model_precision="nf4-bitsandbytes")


def test_encoders_are_streamed_while_they_are_used(basics, monkeypatch, tmp_path):
    plain, _, _ = run(**basics("flux", "plain"))
    handles: list[Handle] = []
    monkeypatch.setattr(
        placement, "apply", lambda *args, **kwargs: (handles.append(apply(*args, **kwargs)), handles[-1])[1]
    )
    streamed, _, _ = run(
        **basics("flux", "streamed"), cache_dir=tmp_path / "another", ramtorch_text_encoder=True,
        ramtorch_text_encoder_percent=70, ramtorch_vae=True,
        ramtorch_disable_extensions=False,
    )  # fmt: skip
    assert weights(streamed.run.path) == weights(plain.run.path)
    fetched = [handle.report().counters.weight_bytes_in for handle in handles]
    assert len(fetched) >= 4 and all(fetched)  # two text encoders, the autoencoder, and that again to draw
    drawn = sorted(path.relative_to(plain.run.path) for path in plain.run.samples.rglob("*.png"))
    assert drawn
    assert all((plain.run.path / path).read_bytes() == (streamed.run.path / path).read_bytes() for path in drawn)


def test_the_same_model_is_mapped_as_is_loaded(flux_folder, sd3_folder):
    for folder in (flux_folder, sd3_folder):
        pipeline = PipelineFolder.open(str(folder))
        for dtype in (torch.float32, torch.bfloat16):
            loaded, mapped = pipeline.load_denoiser(dtype), pipeline.map_denoiser(dtype)
            assert loaded.training == mapped.training
            for kind in ("named_parameters", "named_buffers"):
                expected, found = dict(getattr(loaded, kind)()), dict(getattr(mapped, kind)())
                assert list(expected) == list(found)
                assert all(value.dtype == found[name].dtype for name, value in expected.items())
                assert all(torch.equal(value, found[name]) for name, value in expected.items())
            assert dict(loaded.config) == dict(mapped.config)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight_streaming": 6}, "weight_streaming: must be between 0 and 5"),
        ({"musubi_blocks_to_swap": 6}, "musubi_blocks_to_swap: must be between 0 and 5"),
        ({"weight_streaming": "101%"}, "weight_streaming"),
        ({"weight_streaming": -1}, "weight_streaming"),
        ({"weight_streaming": "half"}, "a percentage such as 50%"),
        ({"musubi_block_swap_device": "cuda:1", "musubi_blocks_to_swap": 1}, "musubi_block_swap_device"),
        ({"weight_streaming": "50%", "ramtorch": True}, "both say what is streamed"),
        ({"weight_streaming": "50%", "weight_store": "pinned"}, "weight_store: 'pinned' is host memory"),
        ({"weight_store": "disk"}, r"weight_store .*: has no effect without weight_streaming"),
        ({"weight_window": "1MiB"}, r"weight_window .*: has no effect without weight_streaming"),
        ({"ramtorch_target_modules": "x"}, r"ramtorch_target_modules .*: has no effect without ramtorch"),
        ({"ramtorch": True, "ramtorch_target_modules": "x"}, "'x' matches no layer"),
        ({"ramtorch": True, "musubi_blocks_to_swap": 1}, "both stream single_transformer_blocks.2"),
        ({"ramtorch_controlnet": True}, "this run has no ControlNet"),
    ],
)  # fmt: skip
def test_what_can_not_take_effect_is_refused(options, said, basics):
    with pytest.raises(ValueError, match=said):
        job(**basics("flux", "run"), **options)
    assert not (basics("flux", "run")["output_dir"] / "run").exists()
