"""torch.compile per block, with inductor on the CPU: gradients equal those of the compiled model without a plan."""

from __future__ import annotations

import copy

import pytest
import torch

import elbowroom
from elbowroom.memory import Plan, Treatments
from tests.memory.test_treatments import kernel_plan, letters, plan_for
from tests.support.models import Gradients, assert_identical, flux, flux_inputs, step

TREATMENTS = [
    Treatments.all("recompute"),
    Treatments.all("offload"),
    Treatments("keep", "recompute", "recompute"),
    Treatments("offload", "recompute", "recompute"),
    Treatments("keep", "recompute", "keep"),
    Treatments("offload", "keep", "keep"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(scope="module")
def expected():
    """The compiled model without a plan."""
    torch.compiler.reset()
    model = flux()
    model.compile_repeated_blocks()
    return step(model, flux_inputs())


@pytest.mark.parametrize("treatments", TREATMENTS, ids=letters)
def test_blocks_compiled_after_apply(treatments, expected, tmp_path):
    """Diffusers' way, whose `fullgraph=True` is honoured for whatever is one graph: blocks, or the parts apart."""
    model = flux()
    with elbowroom.apply(model, plan_for(model, treatments, path=str(tmp_path))) as handle:
        model.compile_repeated_blocks(fullgraph=True)
        for _ in range(2):
            found = step(model, flux_inputs())[1]
            if treatments.attention == treatments.feed_forward == treatments.rest == "recompute":
                assert_identical(expected[1], found)
            else:
                assert_close(expected[1], found)
        counters = handle.report().counters
        assert counters.replays or counters.records
    torch.compiler.reset()
    assert_identical(expected[1], step(model, flux_inputs())[1])
    assert all(block._compiled_call_impl is not None for block in model.transformer_blocks)


@pytest.mark.parametrize("treatments", [TREATMENTS[0], TREATMENTS[2]], ids=letters)
def test_blocks_compiled_before_apply(treatments, expected):
    model = flux()
    model.compile_repeated_blocks()
    with elbowroom.apply(model, plan_for(model, treatments)):
        for _ in range(2):
            assert_identical(expected[1], step(model, flux_inputs())[1])
    assert_identical(expected[1], step(model, flux_inputs())[1])


def test_a_kept_kernel_in_compiled_blocks():
    """Attention then runs uncompiled, so its rounding may differ from compiled code."""
    model = flux()
    model.compile_repeated_blocks()
    wanted = step(model, flux_inputs())[1]
    torch.compiler.reset()
    model = flux()
    with elbowroom.apply(model, kernel_plan(model, Treatments.all("recompute"))) as handle:
        model.compile_repeated_blocks()
        found = step(model, flux_inputs())[1]
        assert handle.report().counters.scopes_reused == 5
    assert_close(wanted, found)


def assert_close(expected: Gradients, found: Gradients) -> None:
    """Where a scope is treated apart, the block is several graphs, which inductor may round otherwise than one."""
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8)


def recompute(model: torch.nn.Module) -> Plan:
    return plan_for(model, Treatments.all("recompute"))


def test_a_model_compiled_as_a_whole_is_refused_with_the_way_to_do_it():
    model = flux()
    with pytest.raises(RuntimeError, match=r"compile the blocks by themselves: `model\.compile_repeated_blocks\(\)`"):
        elbowroom.apply(torch.compile(model), recompute(model))
    elbowroom.apply(model, recompute(model))
    with pytest.raises(RuntimeError, match=r"compile the blocks by themselves"):
        step(torch.compile(model), flux_inputs())
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"compile these by themselves: `model\.compile_repeated_blocks\(\)`"):
        step(torch.compile(model, fullgraph=True), flux_inputs())
    torch.compiler.reset()
    model.compile()
    with pytest.raises(RuntimeError, match=r"compile the blocks by themselves"):
        step(model, flux_inputs())
    other = flux()
    other.compile()
    with pytest.raises(RuntimeError, match=r"compile the blocks by themselves"):
        elbowroom.apply(other, recompute(other))


def test_copies_of_a_model_with_compiled_blocks_are_plain():
    model = flux()
    model.compile_repeated_blocks()
    with elbowroom.apply(model, recompute(model)) as handle:
        twin = copy.deepcopy(model)
        step(twin, flux_inputs())
        assert handle.report().counters.blocks_recorded == 0
    assert "compile" not in model.transformer_blocks[0].__dict__


@pytest.mark.parametrize("before", [True, False], ids=["compiled before", "compiled after"])
@pytest.mark.parametrize("options", [{"weight_streaming": "100%"}, {"ramtorch": True}], ids=["blocks", "layers"])
def test_streamed_weights(options, before, expected, tmp_path):
    """Compiled code gets copies as arguments, and is not compiled anew for each; a layer by itself ends a graph."""
    model = flux()
    controls = elbowroom.Controls(
        gradient_checkpointing=True, weight_window=1 << 16, weight_store="disk", weight_store_path=tmp_path, **options
    )
    if before:
        model.compile_repeated_blocks()
    with elbowroom.apply(model, elbowroom.schedule(model, controls)) as handle:
        if not before:
            model.compile_repeated_blocks()
        graphs = []
        for _ in range(3):
            found = step(model, flux_inputs())[1]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            if "ramtorch" in options:
                assert_close(expected[1], found)
            else:
                assert_identical(expected[1], found)
        assert graphs[0] == graphs[2] > 0
        assert handle.report().counters.weight_bytes_in > 0
    assert_close(expected[1], step(model, flux_inputs())[1])
