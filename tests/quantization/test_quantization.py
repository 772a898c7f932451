"""Quantized base weights: what they stand for, what autograd saves of them, and that they stream exactly."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.memory import Plan
from elbowroom.memory.plan import WeightSettings
from elbowroom.memory.weights.parts import stored_bytes
from elbowroom.quantization import FORMATS, QuantizedWeight, quantize_base
from elbowroom.testing import simulated_accelerator
from tests.support.models import add_lora, assert_identical, flux, flux_inputs, step

WORST = {8: 0.03, 4: 0.1}
"""Relative error of a matrix of normal numbers, by bits."""

# What these formats compute with on the device is made by torch for devices it knows.
NOT_SIMULATED = ("int8-sdnq-hadamard", "nf4-bitsandbytes")


def wide_flux() -> nn.Module:
    """Layers wide enough for every format."""
    return flux(num_attention_heads=8, attention_head_dim=16, num_layers=2, num_single_layers=1)


def quantized(precision: str, **options: Any) -> nn.Module:
    model = wide_flux()
    model.requires_grad_(False)
    quantize_base(model, precision, **options)
    add_lora(model)
    return model


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, QuantizedWeight)]


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_stands_for_a_matrix(precision, dtype):
    format = FORMATS[precision]
    torch.manual_seed(0)
    layer = nn.Linear(256, 128).to(dtype).requires_grad_(False)
    matrix = layer.weight.detach().clone()
    layer.weight = nn.Parameter(
        QuantizedWeight(format.quantize(matrix), format, matrix.size(), matrix.dtype), requires_grad=False
    )
    restored = layer.weight.dequantize()
    assert restored.dtype == dtype and layer.weight.dtype == dtype and layer.weight.shape == matrix.shape
    assert (restored - matrix).float().norm() / matrix.float().norm() < WORST[format.bits]
    if precision != "int8-sdnq-svd":  # whose part of low rank is small for large matrices only
        assert format.bits < stored_bytes(layer.weight) * 8 / matrix.numel() < 1.6 * format.bits
    x = torch.randn(3, 5, 256, dtype=dtype, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = layer(x)
    assert [type(tensor) for tensor in saved] == [QuantizedWeight]  # and no matrix
    gradient = torch.randn_like(y)
    y.backward(gradient)
    other = x.detach().clone().requires_grad_()
    wanted = nn.functional.linear(other, restored, layer.bias)
    wanted.backward(gradient)
    assert torch.equal(y, wanted) and torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("precision", FORMATS)
def test_a_model_computes_as_with_the_matrices(precision):
    model = quantized(precision)
    assert {type(module) for module in model.modules()} == {type(m) for m in _with_lora(wide_flux()).modules()}
    plain = _with_lora(wide_flux())
    plain.load_state_dict(
        {name: t.dequantize() if isinstance(t, QuantizedWeight) else t for name, t in model.state_dict().items()}
    )
    expected, found = step(plain, flux_inputs()), step(model, flux_inputs())
    assert torch.equal(expected[0], found[0])
    assert_identical(expected[1], found[1])
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    expected, found = step(plain, flux_inputs(), autocast), step(model, flux_inputs(), autocast)
    assert torch.equal(expected[0], found[0])
    assert_identical(expected[1], found[1])


def _with_lora(model: nn.Module) -> nn.Module:
    add_lora(model)
    return model


def streaming(model: nn.Module, *, layers: bool, store: str, path: str | None = None) -> Plan:
    controls = elbowroom.Controls(ramtorch=True) if layers else elbowroom.Controls(weight_streaming="100%")
    plan = elbowroom.schedule(model, controls)
    settings = WeightSettings(store=store, window=1, path=path)  # type: ignore[arg-type]
    return Plan(plan.blocks, streamed=plan.streamed, weights=settings)


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["before apply", "after apply"])
def test_from_the_disk(precision, layers, late, tmp_path):
    expected = step(quantized(precision), flux_inputs())[1]
    model = wide_flux()
    model.requires_grad_(False)
    if not late:
        quantize_base(model, precision)
    add_lora(model)
    with elbowroom.apply(model, streaming(model, layers=layers, store="disk", path=str(tmp_path))) as handle:
        if late:
            step(model, flux_inputs())
            quantize_base(model, precision, handle=handle)
        for _ in range(2):
            assert_identical(expected, step(model, flux_inputs())[1])
        counters = handle.report().counters
        assert counters.weight_bytes_in > 0
        assert counters.weights_streamed < 0.8 * sum(p.nbytes for n, p in model.named_parameters() if "blocks" in n)
    assert_identical(expected, step(model, flux_inputs())[1])


@pytest.mark.parametrize("precision", [name for name in FORMATS if name not in NOT_SIMULATED])
@pytest.mark.parametrize("late", [False, True], ids=["before apply", "after apply"])
def test_to_an_accelerator(precision, late):
    with simulated_accelerator(seed=1) as accelerator:
        inputs = {name: value.to(accelerator.device) for name, value in flux_inputs().items()}
        resident = quantized(precision).to(accelerator.device)
        expected = {name: g if g is None else g.cpu() for name, g in step(resident, inputs)[1].items()}
        del resident
        model = wide_flux()
        model.requires_grad_(False)
        if not late:
            quantize_base(model, precision)
        add_lora(model)
        plan = streaming(model, layers=False, store="pinned")
        with elbowroom.apply(model, plan, device=accelerator.device) as handle:
            if late:
                step(model, inputs)
                quantize_base(model, precision, handle=handle)
            for _ in range(2):
                found = {name: g if g is None else g.cpu() for name, g in step(model, inputs)[1].items()}
                assert_identical(expected, found)
            model.zero_grad()
            # Nothing of the weights stays between forward and backward, dequantized or not.
            gc.collect()
            before = accelerator.bytes_in_use()
            loss = model(**inputs).sample.square().mean()
            during = accelerator.bytes_in_use() - before
            del loss
        plain = _with_lora(wide_flux()).to(accelerator.device)
        gc.collect()
        before = accelerator.bytes_in_use()
        loss = plain(**inputs).sample.square().mean()
        activations = accelerator.bytes_in_use() - before
        largest = max(sum(map(stored_bytes, b.parameters())) for b in model.transformer_blocks)
        assert during <= activations + largest
        del loss, plain
        assert accelerator.violations == []


@pytest.mark.parametrize("layers", [False, True])
def test_the_full_weights_of_one_layer_at_a_time(layers):
    """Case: a model in 16 bits that just fits into memory can be quantized."""
    model = wide_flux()
    model.requires_grad_(False)
    old = [
        [weakref.ref(layer.weight) for layer in block.modules() if isinstance(layer, nn.Linear)]
        for block in (*model.transformer_blocks, *model.single_transformer_blocks)
    ]
    handle = None
    if layers:
        handle = elbowroom.apply(model, streaming(model, layers=True, store="disk"))

    def progress(done: int, total: int) -> None:
        gc.collect()
        assert total == 3
        alive = [[reference() is not None for reference in block] for block in old]
        # What was streamed is known to its unit until the block is done.
        assert not any(any(block) for block in alive[:done]) and all(all(block) for block in alive[done:])

    quantize_base(model, "int8-torchao", handle=handle, progress=progress)
    if handle is not None:
        handle.remove()


def test_a_graph_does_not_outlive_its_weights(tmp_path):
    model = wide_flux()
    add_lora(model)
    with elbowroom.apply(model, streaming(model, layers=False, store="disk", path=str(tmp_path))) as handle:
        loss = model(**flux_inputs()).sample.mean()
        quantize_base(model, "int8-torchao", handle=handle)
        with pytest.raises(RuntimeError, match="were replaced between the forward and the backward pass"):
            loss.backward()


def test_what_can_not_be_quantized_is_refused(monkeypatch):
    model = wide_flux()
    with pytest.raises(ValueError, match="no frozen linear layer .* freeze the model"):
        quantize_base(model, "int8-torchao")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="there is no number format 'int3'; choose one of int8-torchao"):
        quantize_base(model, "int3")
    quantize_base(model, "int8-torchao")
    with pytest.raises(ValueError, match="transformer_blocks.0.* is quantized already"):
        quantize_base(model, "int8-torchao")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package bitsandbytes: pip install bitsandbytes"):
        quantize_base(wide_flux(), "nf4-bitsandbytes")


def test_shapes_that_do_not_suit_stay_as_they_are():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 40))])})
    model.requires_grad_(False)
    done = quantize_base(model, "int4-torchao", blocks=["blocks.*"])
    assert done.layers == 1 and done.left == ("blocks.0.0",) and done.after < done.before


def test_a_quantized_weight_is_a_tensor_like_others():
    model = quantized("int8-torchao")
    weight = weights_of(model)[0]
    assert torch.isfinite(weight).all() and weight.norm() > 0
    twin = copy.deepcopy(model)
    assert_identical(step(model, flux_inputs())[1], step(twin, flux_inputs())[1])
    assert weights_of(twin)[0] is not weight
    assert torch.equal(weights_of(twin.to(torch.bfloat16))[0].dequantize(), weight.dequantize().to(torch.bfloat16))
    with pytest.raises(RuntimeError, match="would write into a quantized weight, which is frozen"):
        weight.mul_(2)
    assert "QuantizedWeight((" in repr(weight)


def test_compiled_blocks():
    model = quantized("int8-torchao")
    expected = step(model, flux_inputs())[1]
    for block in model.transformer_blocks:
        block.compile()
    found = step(model, flux_inputs())[1]
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


# --- weights that a library has quantized by itself ---------------------------------------------------------------


def by_torchao(config: str) -> Any:
    def quantize(model: Any) -> None:
        from torchao import quantization

        quantization.quantize_(model.transformer_blocks, getattr(quantization, config)())

    return quantize


def by_sdnq(training: bool = False, **options: Any) -> Any:
    def quantize(model: Any) -> None:
        import sdnq.training

        call = sdnq.training.sdnq_training_post_load_quant if training else sdnq.sdnq_post_load_quant
        call(model.transformer_blocks, weights_dtype="int8", **options)

    return quantize


@pytest.mark.parametrize(
    "quantize",
    [
        by_torchao("Int8WeightOnlyConfig"), by_torchao("Float8WeightOnlyConfig"), by_torchao("IntxWeightOnlyConfig"),
        by_sdnq(), by_sdnq(use_hadamard=True), by_sdnq(use_svd=True), by_sdnq(training=True),
    ],
    ids=["int8", "float8", "intx", "sdnq", "sdnq-hadamard", "sdnq-svd", "sdnq-training"],
)  # fmt: skip
def test_tensors_of_the_libraries_themselves(quantize, tmp_path):
    def make() -> nn.Module:
        model = wide_flux()
        model.requires_grad_(False)
        torch.manual_seed(4)
        quantize(model)
        add_lora(model)
        return model

    expected = step(make(), flux_inputs())[1]
    model = make()
    with elbowroom.apply(model, streaming(model, layers=False, store="disk", path=str(tmp_path))) as handle:
        for _ in range(2):
            assert_identical(expected, step(model, flux_inputs())[1])
        assert handle.report().counters.weight_bytes_in > 0
    assert_identical(expected, step(model, flux_inputs())[1])


def by_bitsandbytes(layer: str, **options: Any) -> Any:
    def quantize(model: Any) -> None:
        from bitsandbytes import nn as layers

        attention = model.transformer_blocks[0].attn
        attention.to_q = getattr(layers, layer)(attention.to_q.in_features, attention.to_q.out_features, **options)

    return quantize


@pytest.mark.parametrize(
    ("quantize", "kind"),
    [
        (by_bitsandbytes("Linear4bit"), "Params4bit"),
        (by_bitsandbytes("Linear8bitLt", has_fp16_weights=False), "Int8Params"),
    ],
    ids=["4bit", "8bit"],
)
def test_layers_that_keep_their_scales_elsewhere_are_refused(quantize, kind, tmp_path):
    model = wide_flux()
    model.requires_grad_(False)
    quantize(model)
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    plan = streaming(model, layers=False, store="disk", path=str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"^'weight' in .* is a {kind} of bitsandbytes, which can't be streamed"):
        elbowroom.apply(model, plan)
    assert before == {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    elbowroom.apply(model, elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True))).remove()


def test_the_option_has_the_names_of_the_formats():
    from typing import get_args

    from elbowroom.options.definition import BasePrecision

    assert get_args(BasePrecision) == tuple(FORMATS)


def test_the_first_time_in_a_process_gives_the_same_weights_as_later():
    """A format that is found by random search, by a library that draws random numbers when it is imported."""
    program = """
import torch
from torch import nn
from elbowroom.quantization import quantize_base

def weight():
    block = nn.Sequential(nn.Linear(32, 32, bias=False)).requires_grad_(False)
    torch.manual_seed(1)
    nn.init.normal_(block[0].weight)
    model = nn.Module()
    model.blocks = nn.ModuleList([block])
    quantize_base(model, "int8-sdnq-svd", blocks=["blocks.*"])
    return block[0].weight.dequantize()

print(torch.equal(weight(), weight()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
