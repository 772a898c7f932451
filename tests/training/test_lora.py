from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from elbowroom.training.lora import FILE_NAMES, LoraFileError, add_lora, lora_state, save_lora, to_comfyui, verify_lora
from tests.support.models import flux, flux_inputs, sd3, sd3_inputs

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def tiny_flux() -> Any:
    return flux(num_layers=1, num_single_layers=1)


def tiny_sd3() -> Any:
    return sd3(num_layers=2)


def train(model: nn.Module, inputs: dict[str, Any], steps: int = 2) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(steps):
        model(**inputs).sample.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_flux(targets: list[str], rank: int = 4, alpha: float = 6.0) -> Any:
    model = tiny_flux()
    add_lora(model, rank=rank, alpha=alpha, targets=targets, seed=3)
    train(model, flux_inputs())
    return model


# ---- adding


def test_only_the_adapter_trains_in_float32_and_it_starts_as_nothing() -> None:
    model = tiny_flux().to(torch.bfloat16)
    inputs = {name: tensor.to(torch.bfloat16) for name, tensor in flux_inputs().items()}
    before = model(**inputs).sample
    add_lora(model, rank=4, alpha=8, targets=["to_q", "proj_out"], seed=3)
    assert torch.equal(model(**inputs).sample, before)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trainable) == 2 * 4  # to_q twice; proj_out of the single block and of the model
    assert all(".lora_" in name and parameter.dtype == torch.float32 for name, parameter in trainable.items())
    frozen = [parameter for name, parameter in model.named_parameters() if name not in trainable]
    assert all(parameter.dtype == torch.bfloat16 for parameter in frozen)


def test_the_seed_alone_decides_the_down_matrices() -> None:
    def down(seed: int, global_seed: int, dtype: torch.dtype) -> torch.Tensor:
        model = tiny_flux().to(dtype)
        torch.manual_seed(global_seed)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(global_seed))
        add_lora(model, rank=4, alpha=4, targets=["to_q"], seed=seed)
        assert torch.equal(torch.rand(3), expected), "add_lora must leave the global random state alone"
        return lora_state(model)["transformer_blocks.0.attn.to_q.lora_A.weight"]

    first = down(3, 0, torch.float32)
    assert first.abs().max() > 0
    assert torch.equal(first, down(3, 99, torch.bfloat16))
    assert not torch.equal(first, down(4, 0, torch.float32))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["to_q", "to_quu"], r"'to_quu' names no layer of FluxTransformer2DModel.*to_q"),
        (["ff.net.1"], r"'ff.net.1' names transformer_blocks.0.ff.net.1, which is no linear"),
        (["attn"], r"no linear or convolution layer; layers inside it: .*to_q"),
        (["o_q"], "names no layer"),  # the end of a name, but not of its parts
        ([], "must be a list"),
        ("to_q", "must be a list"),
    ],
)
def test_targets_that_match_nothing_are_refused(targets: list[str], message: str) -> None:
    model = tiny_flux()
    with pytest.raises(ValueError, match=message):
        add_lora(model, rank=4, alpha=4, targets=targets, seed=0)
    assert all(parameter.requires_grad for parameter in model.parameters()), "a refused model is left as it was"


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1.0), (4, 0.0), (4, float("nan"))])
def test_rank_and_alpha_must_be_positive(rank: int, alpha: float) -> None:
    with pytest.raises(ValueError, match="but is"):
        add_lora(tiny_flux(), rank=rank, alpha=alpha, targets=["to_q"], seed=0)


def test_models_that_can_not_take_an_adapter_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear has no add_adapter"):
        add_lora(nn.Linear(2, 2), rank=4, alpha=4, targets=["to_q"], seed=0)
    model = tiny_flux()
    add_lora(model, rank=4, alpha=4, targets=["to_q"], seed=0)
    with pytest.raises(ValueError, match=r"has an adapter already \(default\)"):
        add_lora(model, rank=4, alpha=4, targets=["to_q"], seed=0)


# ---- saving: names


FLUX_LAYERS = [
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.attn.add_k_proj",
    "transformer_blocks.0.ff.net.0.proj",
    "transformer_blocks.0.ff_context.net.2",
    "single_transformer_blocks.0.attn.to_q",
    "single_transformer_blocks.0.proj_mlp",
]
FLUX_TARGETS = ["to_q", "to_out.0", "add_k_proj", "ff.net.0.proj", "ff_context.net.2", "proj_mlp"]
SD3_LAYERS = [
    "transformer_blocks.0.attn.to_k",
    "transformer_blocks.0.attn2.to_k",
    "transformer_blocks.0.attn.to_add_out",
    "transformer_blocks.0.ff.net.2",
    "transformer_blocks.1.attn.to_k",
    "transformer_blocks.1.ff.net.2",
]
SD3_TARGETS = ["to_k", "to_add_out", "ff.net.2"]
GOLDEN_DIFFUSERS = {
    "flux": {f"transformer.{layer}.lora_{side}.weight" for layer in FLUX_LAYERS for side in "AB"},
    "sd3": {f"transformer.{layer}.lora_{side}.weight" for layer in SD3_LAYERS for side in "AB"},
}
# What ComfyUI looks for, written out: its map is `lora_transformer_` and the Diffusers name with underscores.
COMFYUI_LAYERS = {
    "flux": [
        "lora_transformer_transformer_blocks_0_attn_to_q",
        "lora_transformer_transformer_blocks_0_attn_to_out_0",
        "lora_transformer_transformer_blocks_0_attn_add_k_proj",
        "lora_transformer_transformer_blocks_0_ff_net_0_proj",
        "lora_transformer_transformer_blocks_0_ff_context_net_2",
        "lora_transformer_single_transformer_blocks_0_attn_to_q",
        "lora_transformer_single_transformer_blocks_0_proj_mlp",
    ],
    "sd3": [
        "lora_transformer_transformer_blocks_0_attn_to_k",
        "lora_transformer_transformer_blocks_0_attn2_to_k",
        "lora_transformer_transformer_blocks_0_attn_to_add_out",
        "lora_transformer_transformer_blocks_0_ff_net_2",
        "lora_transformer_transformer_blocks_1_attn_to_k",
        "lora_transformer_transformer_blocks_1_ff_net_2",
    ],
}
GOLDEN_COMFYUI = {
    family: {f"{layer}.{part}" for layer in layers for part in ("lora_down.weight", "lora_up.weight", "alpha")}
    for family, layers in COMFYUI_LAYERS.items()
}
FAMILIES = {
    "flux": (tiny_flux, flux_inputs, FLUX_TARGETS, FluxPipeline),
    "sd3": (tiny_sd3, sd3_inputs, SD3_TARGETS, StableDiffusion3Pipeline),
}


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_blocks(model: Any) -> nn.Module:
    for index, block in enumerate(model.transformer_blocks):
        model.transformer_blocks[index] = torch.compile(block, backend="eager")
    return model


class StandInForDDP(nn.parallel.DistributedDataParallel):
    """Names its parts as DistributedDataParallel does, without a process group."""

    def __init__(self, module: nn.Module):
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("family", ["flux", "sd3"])
@pytest.mark.parametrize("wrap", [plain, compiled, compiled_blocks, StandInForDDP])
def test_names_are_those_of_other_tools(family: str, wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    """Case F06: names have no framework prefixes, whatever the model is wrapped in."""
    build, inputs, targets, pipeline_class = FAMILIES[family]
    model = build()
    add_lora(model, rank=4, alpha=6, targets=targets, seed=3)
    train(model, inputs())
    wrapped = wrap(model)
    diffusers = load_file(save_lora(wrapped, tmp_path, pipeline_class=pipeline_class))
    comfyui = load_file(save_lora(wrapped, tmp_path, pipeline_class=pipeline_class, format="comfyui"))
    assert set(diffusers) == GOLDEN_DIFFUSERS[family]
    assert set(comfyui) == GOLDEN_COMFYUI[family]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "comfyui_lora_weights.safetensors",
        "pytorch_lora_weights.safetensors",
    ]


def test_comfyui_file_means_the_same_update() -> None:
    """Case F06: alpha / rank * up @ down, as ComfyUI computes it, is the update that PEFT applies."""
    model = trained_flux(FLUX_TARGETS, rank=4, alpha=6.0)
    file = to_comfyui(lora_state(model), alpha=6.0, component="transformer")
    for layer, comfy_layer in zip(FLUX_LAYERS, COMFYUI_LAYERS["flux"], strict=True):
        up, down = file[f"{comfy_layer}.lora_up.weight"], file[f"{comfy_layer}.lora_down.weight"]
        update = file[f"{comfy_layer}.alpha"].item() / down.shape[0] * (up @ down)
        assert update.abs().max() > 0
        torch.testing.assert_close(update, model.get_submodule(layer).get_delta_weight("default"))


def test_layers_that_comfyui_could_not_tell_apart_are_refused() -> None:
    state = {f"{layer}.lora_{side}.weight": torch.ones(2, 2) for layer in ("a_b.c", "a.b_c") for side in "AB"}
    with pytest.raises(LoraFileError, match="same name"):
        to_comfyui(state, alpha=1, component="transformer")
    with pytest.raises(LoraFileError, match="no weight of a plain LoRA"):
        to_comfyui({"a.lora_magnitude_vector": torch.ones(2)}, alpha=1, component="transformer")


# ---- saving: what other programs make of the file

READER = """
import sys, torch
from diffusers import FluxPipeline, FluxTransformer2DModel, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file

def denoise(model_class, pipeline_class, case, file):
    model = model_class.from_pretrained(f"{case}/transformer")
    nothing = dict.fromkeys(["scheduler", "vae", *(f"{part}{number}" for part in ("text_encoder", "tokenizer")
                             for number in ("", "_2", *(["_3"] if "Stable" in pipeline_class.__name__ else [])))])
    pipeline = pipeline_class(transformer=model, **nothing)
    if file:
        pipeline.load_lora_weights(case, weight_name=file)
    # A tensor mapped from a file starts at any byte, and some CPU kernels then round otherwise: copy.
    inputs = {name: tensor.clone() for name, tensor in load_file(f"{case}/inputs.safetensors").items()}
    with torch.no_grad():
        return model(**inputs).sample

flux, sd3 = sys.argv[1:]
ours = "pytorch_lora_weights.safetensors"
save_file({
    "flux base": denoise(FluxTransformer2DModel, FluxPipeline, flux, None),
    "flux": denoise(FluxTransformer2DModel, FluxPipeline, flux, ours),
    "flux comfyui": denoise(FluxTransformer2DModel, FluxPipeline, flux, "comfyui_lora_weights.safetensors"),
    "sd3": denoise(SD3Transformer2DModel, StableDiffusion3Pipeline, sd3, ours),
}, f"{flux}/outputs.safetensors")
assert not any(name.startswith("elbowroom") for name in sys.modules)
"""


def test_other_programs_get_the_same_pictures(tmp_path: Path) -> None:
    """Case F06: loaded by Diffusers alone in another process, rank and alpha take effect, bit for bit.

    The ComfyUI file of the Flux model is read through Diffusers' own converter for it, which knows attention layers
    alone and multiplies alpha into the matrices, so that one is equal up to rounding.
    """
    ours: dict[str, torch.Tensor] = {}
    for family, targets in (("flux", ATTENTION), ("sd3", SD3_TARGETS)):
        build, inputs, _, pipeline_class = FAMILIES[family]
        model = build()
        case = tmp_path / family
        model.save_pretrained(case / "transformer")
        save_file(inputs(), case / "inputs.safetensors")
        add_lora(model, rank=4, alpha=10.0, targets=targets, seed=3)
        train(model, inputs())
        for form in ("diffusers", "comfyui"):
            save_lora(model, case, pipeline_class=pipeline_class, format=form)
        with torch.no_grad():
            ours[family] = model.eval()(**inputs()).sample
    subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "flux"), str(tmp_path / "sd3")], check=True, timeout=300
    )
    theirs = load_file(tmp_path / "flux" / "outputs.safetensors")
    assert torch.equal(theirs["flux"], ours["flux"])
    assert torch.equal(theirs["sd3"], ours["sd3"])
    assert (theirs["flux base"] - ours["flux"]).abs().max() > 1e-3
    torch.testing.assert_close(theirs["flux comfyui"], ours["flux"])


def test_metadata_is_small_and_in_a_fixed_order(tmp_path: Path) -> None:
    path = save_lora(trained_flux(["to_v", "to_q", "to_k"]), tmp_path, pipeline_class=FluxPipeline)
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert metadata == {
        "transformer.r": 4,
        "transformer.lora_alpha": 6.0,
        "transformer.target_modules": ["to_k", "to_q", "to_v"],
    }


# ---- saving: what must not be saved


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    """The writer of safetensors has its metadata in another order each time."""
    model = trained_flux(["to_v", "to_q", "to_k"])
    files = {save_lora(model, tmp_path / str(copy), pipeline_class=FluxPipeline).read_bytes() for copy in range(12)}
    assert len(files) == 1
    state, metadata = FluxPipeline.lora_state_dict(tmp_path / "0", return_lora_metadata=True)
    assert metadata["transformer.lora_alpha"] == 6.0
    saved = lora_state(model)
    assert all(torch.equal(state[f"transformer.{name}"], tensor) for name, tensor in saved.items())


def test_an_untrained_adapter_is_not_saved(tmp_path: Path) -> None:
    model = tiny_flux()
    add_lora(model, rank=4, alpha=4, targets=["to_q"], seed=0)
    for form in ("diffusers", "comfyui"):
        with pytest.raises(LoraFileError, match="all of its 2 up-matrices are zero") as failure:
            save_lora(model, tmp_path, pipeline_class=FluxPipeline, format=form)
        assert f"the LoRA file {tmp_path / FILE_NAMES[form]} was not kept" in str(failure.value)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_with_nan_is_not_saved_over_a_good_one(tmp_path: Path) -> None:
    model = trained_flux(["to_q"])
    path = save_lora(model, tmp_path, pipeline_class=FluxPipeline)
    good = path.read_bytes()
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_q.lora_A["default"].weight[0, 0] = float("nan")
    with pytest.raises(LoraFileError, match=r"not finite: transformer\.transformer_blocks\.0\.attn\.to_q\.lora_A"):
        save_lora(model, tmp_path, pipeline_class=FluxPipeline)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


class HidesItsState(nn.Module):
    """A wrapper as in case C04: its state dict is empty, its parameters are there."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def state_dict(self, *args: object, destination: dict | None = None, **kwargs: object) -> dict:
        return {} if destination is None else destination


def test_a_wrapper_that_hides_weights_is_noticed(tmp_path: Path) -> None:
    """Case C04: a file with part of the adapter is never written."""
    model = trained_flux(["to_q"])
    model.transformer_blocks[0] = HidesItsState(model.transformer_blocks[0])
    with pytest.raises(LoraFileError, match=r"Only in the parameters: transformer_blocks\.0\.inner\.attn\.to_q"):
        save_lora(model, tmp_path, pipeline_class=FluxPipeline)
    assert list(tmp_path.iterdir()) == []


GOOD = {"a.lora_A.weight": torch.ones(2, 3), "a.lora_B.weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"a.lora_A.weight": torch.ones(2, 3)}, "missing: a.lora_B.weight"),
        (GOOD | {"b.lora_B.weight": torch.ones(1)}, "unexpected: b.lora_B.weight"),
        (GOOD | {"a.lora_A.weight": torch.zeros(2, 3)}, "different from the model: a.lora_A.weight"),
        (GOOD | {"a.lora_A.weight": torch.ones(2, 3).bfloat16()}, "different from the model: a.lora_A.weight"),
        (GOOD | {"a.lora_A.weight": torch.ones(2, 4)}, "different from the model: a.lora_A.weight"),
        (GOOD | {"a.lora_B.weight": torch.full((3, 2), float("inf"))}, "not finite: a.lora_B.weight"),
        (GOOD | {"a.lora_B.weight": torch.zeros(3, 2)}, "all of its 1 up-matrices are zero"),
    ],
)
def test_verification_finds_each_fault(written: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file(GOOD, path)
    verify_lora(path, GOOD)
    save_file(written, path)
    with pytest.raises(LoraFileError, match=message):
        verify_lora(path, GOOD)


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.", "module.", "blocks._orig_mod.", "blocks._fsdp_wrapped_module.", "transformer.module."],
)
def test_verification_refuses_names_of_wrappers(prefix: str, tmp_path: Path) -> None:
    """Case F06: even where the model's own names have the parts, since no other program would know them."""
    tensors = {prefix + name: tensor for name, tensor in GOOD.items()}
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFileError, match="names of wrappers"):
        verify_lora(tmp_path / "lora.safetensors", tensors)
    suffixed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in GOOD.items()}
    save_file(suffixed, tmp_path / "lora.safetensors")
    with pytest.raises(LoraFileError, match="names of wrappers"):
        verify_lora(tmp_path / "lora.safetensors", suffixed)


def test_verification_of_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file(GOOD, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LoraFileError, match="can't be read again"):
        verify_lora(path, GOOD)
