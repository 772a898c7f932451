"""Gradients with segments are those of the untouched model, bit for bit."""

from __future__ import annotations

import pytest
import torch

import elbowroom
from tests.support.models import BLOCK_COUNTS, BUILDERS, INPUTS, add_lora, assert_identical, step

GRID = [
    (family, interval, stride)
    for family, count in BLOCK_COUNTS.items()
    for interval in range(1, count + 2)
    for stride in [None, *range(interval, count + 2)]
]


def controls(interval: int = 1, stride: int | None = None) -> elbowroom.Controls:
    return elbowroom.Controls(
        gradient_checkpointing=True,
        gradient_checkpointing_interval=interval,
        gradient_checkpointing_segment_stride=stride,
    )


def apply(model, interval: int = 1, stride: int | None = None, **options) -> elbowroom.Handle:
    return elbowroom.apply(model, elbowroom.schedule(model, controls(interval, stride)), **options)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("family", "interval", "stride"), GRID)
def test_every_interval_and_stride(family, interval, stride, lora):
    model, inputs = BUILDERS[family](), INPUTS[family]()
    if lora:
        add_lora(model)
    loss, expected = step(model, inputs)
    with apply(model, interval, stride) as handle:
        loss_again, actual = step(model, inputs)
        report = handle.report()
    assert torch.equal(loss, loss_again)
    assert_identical(expected, actual)
    planned = sum(block.segment is not None for block in report.plan.blocks)
    assert report.counters.blocks_recorded == planned
    assert report.counters.blocks_recomputed == planned
    assert report.counters.replays == len(report.plan.segments)
    assert_identical(expected, step(model, inputs)[1])


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("family", BUILDERS)
def test_controlnet_residuals_between_blocks(family, interval):
    model, inputs = BUILDERS[family](), INPUTS[family](residuals=True)
    _, expected = step(model, inputs)
    with apply(model, interval):
        _, actual = step(model, inputs)
    assert_identical(expected, actual)
    assert any(name.startswith("residual") for name in expected)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("family", BUILDERS)
def test_autocast_is_restored_in_the_replay(family, interval, lora):
    """Case A04: autocast only around the forward pass; the replay computes in the same dtypes."""
    model, inputs = BUILDERS[family](), INPUTS[family]()
    if lora:
        add_lora(model)

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    _, expected = step(model, inputs, autocast)
    _, plain = step(model, inputs)
    with apply(model, interval):
        _, actual = step(model, inputs, autocast)
    assert_identical(expected, actual)
    with pytest.raises(AssertionError):
        assert_identical(expected, plain)  # the comparison would notice a replay without autocast


@pytest.mark.parametrize("interval", [1, 2])
def test_a_pass_without_gradients_warms_the_autocast_cache(interval):
    """Case A04: a `no_grad` pass over the same layers inside the same autocast context."""
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()

    def run():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model(**inputs)
            output = model(**inputs).sample
        output.float().square().mean().backward()
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    expected = run()
    with apply(model, interval):
        assert_identical(expected, run())


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_gradient_accumulation(interval):
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()
    other = {**inputs, "hidden_states": inputs["hidden_states"] * 0.5}

    def accumulate():
        model.zero_grad(set_to_none=True)
        for batch in (inputs, other):
            model(**batch).sample.square().mean().backward()
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    expected = accumulate()
    with apply(model, interval):
        assert_identical(expected, accumulate())


@pytest.mark.parametrize("between", ["no_grad", "inference_mode", "grad"])
def test_a_validation_forward_between_training_steps(between):
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()
    _, expected = step(model, inputs)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}[between]
    with apply(model, 2) as handle:
        assert_identical(expected, step(model, inputs)[1])
        recorded = handle.report().counters.blocks_recorded
        model.eval()
        with context():
            model(**inputs)
        model.train()
        assert handle.report().counters.blocks_recorded == recorded + (5 if between == "grad" else 0)
        assert_identical(expected, step(model, inputs)[1])


def test_a_validation_forward_between_forward_and_backward():
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()
    _, expected = step(model, inputs)
    with apply(model, 3):
        model.zero_grad(set_to_none=True)
        loss = model(**inputs).sample.square().mean()
        with torch.no_grad():
            model(**{**inputs, "hidden_states": inputs["hidden_states"] * 2})
        loss.backward()
        actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_identical(expected, actual)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_several_forwards_before_one_backward(interval):
    model, inputs = BUILDERS["sd3"](), INPUTS["sd3"]()

    def run():
        model.zero_grad(set_to_none=True)
        first = model(**inputs).sample.square().mean()
        second = model(**{**inputs, "hidden_states": inputs["hidden_states"] * 0.5}).sample.mean()
        (first * second).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = run()
    with apply(model, interval):
        assert_identical(expected, run())


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_two_backwards_through_one_graph(interval):
    """Case B09: `retain_graph=True`, then a second backward pass."""
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()

    def run():
        model.zero_grad(set_to_none=True)
        loss = model(**inputs).sample.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = run()
    with apply(model, interval):
        assert_identical(expected, run())


def test_two_models_in_one_process():
    first, second = BUILDERS["flux"](), BUILDERS["sd3"]()
    inputs, other_inputs = INPUTS["flux"](), INPUTS["sd3"]()

    def run():
        first.zero_grad(set_to_none=True), second.zero_grad(set_to_none=True)
        loss = first(**inputs).sample.square().mean() + second(**other_inputs).sample.square().mean()
        loss.backward()
        models = {"first": first, "second": second}
        return {f"{key}.{name}": p.grad for key, model in models.items() for name, p in model.named_parameters()}

    expected = run()
    with apply(first, 2), apply(second, 3, 4):
        assert_identical(expected, run())


@pytest.mark.parametrize("interval", [1, 2])
def test_lora_that_is_added_after_apply(interval):
    reference, model, inputs = BUILDERS["flux"](), BUILDERS["flux"](), INPUTS["flux"]()
    add_lora(reference)
    _, expected = step(reference, inputs)
    with apply(model, interval):
        add_lora(model)
        _, actual = step(model, inputs)
    assert_identical(expected, actual)


def test_a_model_wrapped_by_peft():
    from peft import LoraConfig, get_peft_model

    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    _, expected = step(wrapped, inputs)
    plan = elbowroom.schedule(wrapped, controls(2))
    assert plan.blocks[0].name == "transformer_blocks.0"  # the names do not depend on the wrapper
    with elbowroom.apply(wrapped, plan) as handle:
        _, actual = step(wrapped, inputs)
    assert handle.report().counters.blocks_recomputed == 5
    assert_identical(expected, actual)


@pytest.mark.parametrize("where", ["attention only", "feed-forward only", "first block only"])
@pytest.mark.parametrize(("interval", "stride"), [(1, None), (2, None), (2, 3), (5, None)])
def test_frozen_input_and_base(where, interval, stride):
    """Case A01: with a frozen base and an input without gradient, every adapter still gets its exact gradient."""
    from peft import LoraConfig

    targets = {
        "attention only": ["to_q", "to_v"],
        "feed-forward only": ["ff.net.2", "proj_mlp"],
        "first block only": ["transformer_blocks.0.attn.to_q"],
    }[where]
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    _, expected = step(model, inputs)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable and all(expected[name] is not None for name in trainable)
    with apply(model, interval, stride):
        _, actual = step(model, inputs)
    assert_identical(expected, actual)


@pytest.mark.parametrize(("interval", "stride"), [(1, None), (2, None), (2, 3), (6, None)])
@pytest.mark.parametrize("family", BUILDERS)
def test_dropout_in_training_mode(family, interval, stride):
    """Case A02: LoRA dropout draws random numbers inside the blocks; the replay draws the same."""
    from peft import LoraConfig

    model, inputs = BUILDERS[family](), INPUTS[family]()
    model.requires_grad_(False)
    targets = ["to_q", "to_v", "ff.net.2"]
    model.add_adapter(LoraConfig(r=4, target_modules=targets, lora_dropout=0.5, init_lora_weights=False))
    model.train()
    loss, expected = step(model, inputs)
    model.eval()
    loss_without, _ = step(model, inputs)
    assert not torch.equal(loss, loss_without)  # there is dropout
    model.train()
    with apply(model, interval, stride, check_determinism=True):
        _, actual = step(model, inputs)
    assert_identical(expected, actual)


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_exception_in_the_middle_of_a_forward(failing):
    model, inputs = BUILDERS["flux"](), INPUTS["flux"]()
    _, expected = step(model, inputs)
    with apply(model, 2):
        block = [*model.transformer_blocks, *model.single_transformer_blocks][failing]
        hook = block.attn.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, inputs)
        hook.remove()
        assert_identical(expected, step(model, inputs)[1])


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("family", BUILDERS)
def test_a_lora_scale_for_one_forward_pass(family, interval):
    """`joint_attention_kwargs={"scale": …}` changes the LoRA's scale and puts it back before the backward pass."""
    model, inputs = BUILDERS[family](), INPUTS[family]()
    add_lora(model)
    _, unscaled = step(model, inputs)
    scaled = {**inputs, "joint_attention_kwargs": {"scale": 0.5}}
    _, expected = step(model, scaled)
    with pytest.raises(AssertionError):
        assert_identical(expected, unscaled)
    with apply(model, interval):
        _, actual = step(model, {**inputs, "joint_attention_kwargs": {"scale": 0.5}})
    assert_identical(expected, actual)
