"""Controls to plans, plans to text and back, and finding blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elbowroom
from elbowroom import BlockPlan, Controls, Plan
from elbowroom.families import FAMILIES
from elbowroom.memory import OffloadSettings, ScopeModules, Treatments, find_blocks, schedule_blocks
from tests.support.models import flux, sd3

RECOMPUTED = Treatments.all("recompute")


def plan_of(count: int, interval: int = 1, stride: int | None = None) -> Plan:
    controls = Controls(
        gradient_checkpointing=True,
        gradient_checkpointing_interval=interval,
        gradient_checkpointing_segment_stride=stride,
    )
    return schedule_blocks([(f"blocks.{index}", ScopeModules()) for index in range(count)], controls)


@pytest.mark.parametrize(
    ("interval", "stride", "strip"),
    [
        (1, None, "[r][r][r][r][r][r]"),
        (2, None, "[rr][rr][rr]"),
        (4, None, "[rrrr][rr]"),
        (2, 4, "[rr]kk[rr]"),
        (1, 3, "[r]kk[r]kk"),
        (2, 3, "[rr]k[rr]k"),
        (6, None, "[rrrrrr]"),
        (7, None, "[rrrrrr]"),
        (1, 7, "[r]kkkkk"),
    ],
)
def test_interval_and_stride(interval, stride, strip):
    assert plan_of(6, interval, stride).strip() == strip


@given(st.integers(0, 40), st.integers(1, 45), st.integers(0, 45))
def test_segments_start_every_stride_blocks(count, interval, more):
    stride = interval + more
    plan = plan_of(count, interval, stride)
    assert len(plan.blocks) == count
    for position, block in enumerate(plan.blocks):
        assert (block.segment is not None) == (position % stride < interval)
    assert all(len(segment) <= interval for segment in plan.segments)
    assert len(plan.segments) == -(-count // stride)
    assert Plan.from_json(plan.to_json()) == plan


def test_off_means_that_everything_is_kept():
    plan = schedule_blocks([("a.0", ScopeModules()), ("a.1", ScopeModules())], Controls())
    assert plan.strip() == "kk" and plan.segments == ()


def test_values_above_the_number_of_blocks_are_noted():
    """Case D05."""
    assert "model has 3 blocks: they form one segment" in plan_of(3, 4).notes[0]
    assert "only the first 1 are recomputed" in plan_of(3, 1, 4).notes[0]
    assert plan_of(3, 3).notes == ()


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"gradient_checkpointing_interval": 0}, "whole number of at least 1, but is 0"),
        ({"gradient_checkpointing_interval": -1}, "but is -1"),
        ({"gradient_checkpointing_interval": 2.5}, "but is 2.5"),
        ({"gradient_checkpointing_interval": ""}, "but is ''"),
        ({"gradient_checkpointing_interval": True}, "but is True"),
        ({"gradient_checkpointing_interval": None}, "but is None"),
        ({"gradient_checkpointing_segment_stride": 0}, "whole number of at least 1, but is 0"),
        ({"gradient_checkpointing_segment_stride": 2, "gradient_checkpointing_interval": 3}, "2 is below 3"),
        ({"gradient_checkpointing": False, "gradient_checkpointing_interval": 2}, "no effect without"),
        ({"gradient_checkpointing": False, "gradient_checkpointing_segment_stride": 2}, "no effect without"),
        ({"gradient_checkpointing": "false"}, "must be True or False, but is 'false'"),
    ],
)
def test_bad_controls_state_the_rule(values, rule):
    """Case D05: refused with a `ValueError` that names the option."""
    with pytest.raises(ValueError, match=rule) as refusal:
        Controls(**{"gradient_checkpointing": True, **values})
    assert str(refusal.value).startswith("gradient_checkpointing")


def test_a_plan_is_a_value():
    plan = plan_of(4, 2)
    assert plan == plan_of(4, 2) and hash(plan) == hash(plan_of(4, 2)) and plan != plan_of(4, 1)
    assert repr(plan) == "Plan(4 blocks, 2 segments: [rr][rr])"
    with pytest.raises(AttributeError):
        plan.blocks = ()  # type: ignore[misc]


def test_plans_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="a.0 more than once"):
        Plan((BlockPlan("a.0"), BlockPlan("a.0")))
    with pytest.raises(ValueError, match="segment 0 has a gap before a.2"):
        Plan((BlockPlan("a.0", 0, RECOMPUTED), BlockPlan("a.1"), BlockPlan("a.2", 0, RECOMPUTED)))
    with pytest.raises(ValueError, match="segment 0: the boundary is both kept and offloaded"):
        Plan((BlockPlan("a.0", 0, RECOMPUTED), BlockPlan("a.1", 0, RECOMPUTED, "offload")))
    with pytest.raises(ValueError, match="in a segment exactly if its rest is recomputed"):
        BlockPlan("a.0", 0)
    with pytest.raises(ValueError, match="no boundary to offload"):
        BlockPlan("a.0", boundary="offload")
    with pytest.raises(ValueError, match="its attention can't be treated apart"):
        BlockPlan("a.0", treatments=Treatments(attention="offload"))
    with pytest.raises(ValueError, match="no kernel to keep"):
        BlockPlan("a.0", keep_kernel=True)
    with pytest.raises(ValueError, match="attention must be one of keep, recompute, offload, not 'ofload'"):
        Treatments("ofload")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attn: a module can be in one scope, and once"):
        ScopeModules(("attn",), ("attn",))
    with pytest.raises(ValueError, match=r"attention must be a tuple of names, as in \('attn',\), not 'attn'"):
        ScopeModules("attn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the boundary must be 'keep' or 'offload', not 'recompute'"):
        BlockPlan("a.0", 0, RECOMPUTED, "recompute")  # type: ignore[arg-type]
    for settings in ({"smallest": None}, {"window": -1}, {"limit": True}, {"prefetch": 0}, {"store": "tape"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            OffloadSettings(**settings)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 1, "blocks": []}',
        '{"version": 3}',
        '{"version": 3, "blocks": [1]}',
        '{"version": 3, "blocks": [], "extra": 1}',
        '{"version": 3, "blocks": [], "offload": {"prefetch": 0}}',
        '{"version": 3, "blocks": [], "offload": {"smallest": null}}',
        '{"version": 3, "blocks": [{"name": "a", "keep_kernel": "yes"}]}',
        '{"version": 3, "blocks": [{"segment": null}]}',
        '{"version": 3, "blocks": [{"name": "a", "segment": true}]}',
        '{"version": 3, "blocks": [{"name": "a", "treatments": {"rest": "forget"}}]}',
        '{"version": 3, "blocks": [{"name": "a", "treatments": {"mlp": "keep"}}]}',
        '{"version": 3, "blocks": [{"name": "a", "boundary": "recompute"}]}',
        '{"version": 3, "blocks": [{"name": "a", "modules": {"attention": "attn"}}]}',
        '{"version": 3, "blocks": [{"name": "a", "other": 1}]}',
        '{"version": 3, "blocks": [], "offload": {"limit": -1}}',
        '{"version": 3, "blocks": [], "offload": {"store": "tape"}}',
        '{"version": 3, "blocks": [], "offload": {"prefetch": "yes"}}',
    ],
)
def test_other_json_is_not_a_plan(text):
    with pytest.raises(ValueError, match="this is not a plan"):
        Plan.from_json(text)


def test_blocks_of_diffusers_models_are_found_in_execution_order():
    names = [block.name for block in elbowroom.schedule(flux(), Controls()).blocks]
    assert names == [
        *(f"transformer_blocks.{i}" for i in range(2)),
        *(f"single_transformer_blocks.{i}" for i in range(3)),
    ]
    assert len(elbowroom.schedule(sd3(), Controls()).blocks) == 4


def test_blocks_of_a_controlnet_are_found():
    from diffusers import FluxControlNetModel

    plan = elbowroom.schedule(FluxControlNetModel(**FAMILIES[0].tiny_denoiser), Controls())
    assert [block.name for block in plan.blocks][1:3] == ["transformer_blocks.1", "single_transformer_blocks.0"]


def test_a_diffusers_model_without_a_family_declares_its_blocks():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, cross_attention_dim=16,
        caption_channels=16, sample_size=8,
    )  # fmt: skip
    names = [block.name for block in elbowroom.schedule(model, Controls()).blocks]
    assert names == [f"transformer_blocks.{index}" for index in range(3)]


class Stacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(11))})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))})


def test_patterns_name_the_blocks_of_any_module():
    names = [block.name for block in find_blocks(Stacks(), ["decoder.layers.*", "encoder.layers.*"])]
    assert names == ["decoder.layers.0", "decoder.layers.1", *(f"encoder.layers.{index}" for index in range(11))]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["encodr.layers.*"], r"names no module of Stacks; did you mean 'encoder.layers.\*'"),
        (["encoder.layers.*", "encoder.layers.1"], "'encoder.layers.1', which an earlier pattern names already"),
        (["decoder.layers.*", "decoder.layers.*.*"], "'decoder.layers.0.0' lies inside the block 'decoder.layers.0'"),
        ([], "no blocks were named"),
        ("encoder.layers.*", "must be a list of patterns"),
    ],
)
def test_bad_patterns_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        elbowroom.schedule(Stacks(), Controls(), blocks=patterns)


def test_unknown_models_ask_for_patterns():
    with pytest.raises(ValueError, match=r"the blocks of Stacks are not known; name them"):
        elbowroom.schedule(Stacks(), Controls())


def test_blocks_of_a_u_net_are_not_guessed():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, cross_attention_dim=8, norm_num_groups=4,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the blocks of UNet2DConditionModel are not known; name them"):
        elbowroom.schedule(model, Controls())
