"""The memory options: every rule, what each does to the plan, and that each moves its counter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elbowroom
from elbowroom import Controls, ControlsError, Plan
from elbowroom.memory import ScopeModules, schedule_blocks, store_kind
from elbowroom.memory.activation_controls import Backend
from elbowroom.memory.plan import OffloadSettings
from tests.support.models import assert_identical, flux, flux_inputs, sd3, step

CHECKPOINTED = {"gradient_checkpointing": True}
OFFLOADED = {"activation_offload": ("attention",)}
STREAMED = {"weight_streaming": "100%", "weight_window": 1}


@pytest.mark.parametrize(
    ("values", "option", "rule"),
    [
        ({"gradient_checkpointing_backend": "unsloth"}, "gradient_checkpointing_backend", "no effect without"),
        ({"gradient_checkpointing_backend": "reentrant"}, "gradient_checkpointing_backend", "'torch' or 'torch-ffn'"),
        ({"gradient_checkpointing_keep_attention": True}, "gradient_checkpointing_keep_attention", "no effect without"),
        ({"gradient_checkpointing_keep_attention": "all"}, "gradient_checkpointing_keep_attention", "or 'kernel'"),
        (
            {**CHECKPOINTED, "gradient_checkpointing_backend": "torch-ffn", "gradient_checkpointing_interval": 2},
            "gradient_checkpointing_interval",
            "each feed-forward part is recomputed by itself",
        ),
        (
            {
                **CHECKPOINTED,
                "gradient_checkpointing_backend": "torch-ffn",
                "gradient_checkpointing_keep_attention": True,
            },
            "gradient_checkpointing_keep_attention",
            "does not recompute attention",
        ),
        (
            {**CHECKPOINTED, **OFFLOADED, "gradient_checkpointing_keep_attention": True},
            "gradient_checkpointing_keep_attention",
            "can't be kept and offloaded at once",
        ),
        ({"activation_offload": ("boundary",)}, "activation_offload", "no effect without gradient_checkpointing"),
        ({"activation_offload": ("all", "attention")}, "activation_offload", "all includes the other parts"),
        ({"activation_offload": ("attention", "attention")}, "activation_offload", "names a part twice"),
        ({"activation_offload": ("mlp",)}, "activation_offload", "a tuple of 'attention'"),
        ({"activation_offload": "attention"}, "activation_offload", "a tuple of 'attention'"),
        (
            {
                **CHECKPOINTED,
                "gradient_checkpointing_backend": "unsloth-ffn",
                "activation_offload": ("feed_forward",),
            },
            "activation_offload",
            "can't be offloaded and recomputed at once",
        ),
        ({"activation_store": "pinned"}, "activation_store", "nothing is offloaded"),
        ({"activation_store": "tape", **OFFLOADED}, "activation_store", "'pinned' or 'pageable' or 'disk'"),
        ({"activation_store_limit": 1}, "activation_store_limit", "nothing is offloaded"),
        ({"activation_store_limit": 0, **OFFLOADED}, "activation_store_limit", "at least 1"),
        ({"activation_store_path": Path("x")}, "activation_store_path", "nothing is offloaded"),
        (
            {"activation_store_path": Path("x"), "activation_store": "pinned", **OFFLOADED},
            "activation_store_path",
            "which is host memory; set activation_store to disk",
        ),
        ({"activation_window": 1}, "activation_window", "nothing is offloaded"),
        ({"activation_window": 1.5, **OFFLOADED}, "activation_window", "a whole number of at least 1, but is 1.5"),
        *(
            (
                {"gradient_checkpointing_offload_prefetch": wanted},
                "gradient_checkpointing_offload_prefetch",
                "nothing is offloaded",
            )
            for wanted in (True, False)
        ),
        (
            {
                **OFFLOADED,
                "gradient_checkpointing_offload_pin_memory_max_buckets": 0,
                "activation_store": "disk",
            },
            "gradient_checkpointing_offload_pin_memory_max_buckets",
            "0 means activation_store=pageable",
        ),
        (
            {"gradient_checkpointing_offload_pin_memory_max_buckets": -1},
            "gradient_checkpointing_offload_pin_memory_max_buckets",
            "at least 0, but is -1",
        ),
    ],
)
def test_what_can_not_take_effect_is_refused(values, option, rule):
    with pytest.raises(ControlsError, match=rule) as refusal:
        Controls(**values)
    assert refusal.value.option == option


STRIPS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "kkkkk", "kkkk"),
    (CHECKPOINTED, "[r][r][r][r][r]", "[r][r][r][r]"),
    ({**CHECKPOINTED, "gradient_checkpointing_backend": "unsloth"}, "<r><r><r><r><r>", "<r><r><r><r>"),
    ({**CHECKPOINTED, "gradient_checkpointing_backend": "torch-ffn"}, "krk krk krk krk krk", "krk krk krk krk"),
    (
        {**CHECKPOINTED, "gradient_checkpointing_backend": "unsloth-ffn"},
        "<krk> <krk> <krk> <krk> <krk>",
        "<krk> <krk> <krk> <krk>",
    ),
    (
        {**CHECKPOINTED, "gradient_checkpointing_backend": "torch-ffn", "gradient_checkpointing_segment_stride": 2},
        "krk k krk k krk",
        "krk k krk k",
    ),
    (
        {**CHECKPOINTED, "gradient_checkpointing_keep_attention": True, "gradient_checkpointing_interval": 2},
        "[krr krr] [krr krr] [krr]",
        "[krr krr] [krr krr]",
    ),
    (
        {**CHECKPOINTED, "gradient_checkpointing_keep_attention": "kernel"},
        "[Krr] [Krr] [Krr] [Krr] [Krr]",
        "[Krr] [Krr] [Krr] [Krr]",
    ),
    ({"gradient_checkpointing_offload_attention": True}, "okk okk okk okk okk", "okk okk okk okk"),
    (
        {**CHECKPOINTED, "gradient_checkpointing_offload_attention": True, "gradient_checkpointing_segment_stride": 2},
        "[orr] okk [orr] okk [orr]",
        "[orr] okk [orr] okk",
    ),
    ({"activation_offload": ("attention", "feed_forward")}, "ook ook ook ook ook", "ook ook ook ook"),
    ({"activation_offload": ("all",)}, "ooooo", "oooo"),
    ({**CHECKPOINTED, "activation_offload": ("all",)}, " ".join(["<oor>"] * 5), "<oor> <oor> <oor> <oor>"),
    ({**CHECKPOINTED, "activation_offload": ("boundary",)}, "<r><r><r><r><r>", "<r><r><r><r>"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "of_flux", "of_sd3"), STRIPS)
def test_what_each_option_does_to_the_plan(values, of_flux, of_sd3):
    for model, strip in ((flux(), of_flux), (sd3(), of_sd3)):
        plan = elbowroom.schedule(model, Controls(**values))
        assert plan.strip() == strip
        assert Plan.from_json(plan.to_json()) == plan
        letters = {letter for letter in plan.strip() if letter in "krKo[<"}
        assert all(f"{letter} " in plan.legend() for letter in letters)


COUNTED: dict[str, tuple[dict[str, Any], Any]] = {
    "gradient_checkpointing": (CHECKPOINTED, lambda counters: counters.blocks_recomputed == 5),
    "gradient_checkpointing_interval": (
        {**CHECKPOINTED, "gradient_checkpointing_interval": 2},
        lambda counters: counters.replays == 3,
    ),
    "gradient_checkpointing_segment_stride": (
        {**CHECKPOINTED, "gradient_checkpointing_segment_stride": 2},
        lambda counters: counters.blocks_recomputed == 3,
    ),
    "gradient_checkpointing_backend": (
        {**CHECKPOINTED, "gradient_checkpointing_backend": "unsloth-ffn"},
        lambda counters: counters.scopes_recomputed > 0 and counters.bytes_offloaded["boundary"] > 0,
    ),
    "gradient_checkpointing_keep_attention": (
        {**CHECKPOINTED, "gradient_checkpointing_keep_attention": True},
        lambda counters: counters.scopes_reused == 5,
    ),
    "gradient_checkpointing_offload_attention": (
        {"gradient_checkpointing_offload_attention": True},
        lambda counters: counters.bytes_offloaded["attention"] > 0 and set(counters.bytes_offloaded) == {"attention"},
    ),
    "gradient_checkpointing_offload_prefetch": (
        {**OFFLOADED, "gradient_checkpointing_offload_prefetch": True, "activation_window": 20_000},
        lambda counters: counters.prefetch_hits > 0,
    ),
    "activation_offload": (
        {"activation_offload": ("all",)},
        lambda counters: {"attention", "feed_forward", "rest"} == set(counters.bytes_offloaded),
    ),
    "activation_store": ({**OFFLOADED, "activation_store": "disk"}, lambda counters: counters.store_peak > 0),
    "activation_store_limit": (
        {**OFFLOADED, "activation_store_limit": 30_000},
        lambda counters: counters.bytes_refused > 0 and counters.store_allocated <= 30_000,
    ),
    "activation_store_path": ({**OFFLOADED, "activation_store_path": True}, lambda counters: counters.records > 0),
    "activation_window": (
        {**OFFLOADED, "activation_window": 20_000},
        lambda counters: 0 < counters.window_out <= 20_000 and counters.bytes_reloaded > 0,
    ),
    "weight_streaming": (STREAMED, lambda counters: counters.weight_fetches == 2 * 5 - 1),
    "weight_store": ({**STREAMED, "weight_store": "disk"}, lambda counters: counters.weight_bytes_in > 0),
    "weight_store_path": ({**STREAMED, "weight_store_path": True}, lambda counters: counters.weight_bytes_in > 0),
    "weight_window": (
        {**STREAMED, "weight_window": 1 << 20},
        lambda counters: counters.weight_fetches == 5 and counters.weight_window == counters.weights_streamed,
    ),
    "ramtorch": ({"ramtorch": True}, lambda counters: counters.weight_fetches > 5),
    "ramtorch_target_modules": (
        {"ramtorch": True, "ramtorch_target_modules": ("*.to_q",)},
        lambda counters: counters.weight_bytes_in > 0 and counters.weights_streamed == 5 * 4 * 33 * 32,
    ),
    "ramtorch_transformer_percent": (
        {"ramtorch": True, "ramtorch_transformer_percent": 30},
        lambda counters: counters.weight_bytes_in > 0 and 0.28 < counters.weights_streamed / LINEAR_BYTES < 0.32,
    ),
    "ramtorch_disable_extensions": (
        {"ramtorch": True, "ramtorch_disable_extensions": False},
        lambda counters: counters.weight_bytes_in > 0 and counters.weights_streamed > LINEAR_BYTES,
    ),
    "musubi_blocks_to_swap": ({"musubi_blocks_to_swap": 2}, lambda counters: counters.weight_fetches == 2),
}

LINEAR_BYTES = sum(
    sum(parameter.nbytes for parameter in module.parameters(recurse=False))
    for name, module in flux().named_modules()
    if isinstance(module, nn.Linear) and name != "time_text_embed.timestep_embedder.linear_1"  # has the first weight
)


def test_every_option_is_counted():
    """…but those of other models than the trained one (`tests/training/test_streaming.py`), and old spellings."""
    import dataclasses

    names = {control.name for control in dataclasses.fields(Controls)}
    others = {
        name for name in names if name.startswith(("ramtorch_text_encoder", "ramtorch_vae", "ramtorch_controlnet"))
    }
    spellings = {"gradient_checkpointing_offload_pin_memory_max_buckets", "musubi_block_swap_device"}
    assert set(COUNTED) == names - others - spellings


@pytest.mark.filterwarnings("ignore:saved tensors stay")
@pytest.mark.parametrize("option", COUNTED)
def test_each_option_moves_its_counter(option, tmp_path):
    values, moved = COUNTED[option]
    values = {
        name: tmp_path / "store" if value is True and name.endswith("path") else value for name, value in values.items()
    }
    model = flux()
    expected = step(model, flux_inputs())
    with elbowroom.apply(model, elbowroom.schedule(model, Controls(**values))) as handle:
        before = handle.report().counters
        assert not moved(before)
        for _ in range(2 if "prefetch" in option else 1):
            assert_identical(expected[1], step(model, flux_inputs())[1])
        assert moved(handle.report().counters), handle.report()
        if option.endswith("path"):
            assert (tmp_path / "store").is_dir()


def test_old_configurations():
    name = "gradient_checkpointing_offload_pin_memory_max_buckets"
    zero = elbowroom.schedule(flux(), Controls(**OFFLOADED, **{name: 0}))
    assert zero.offload.store == "pageable" and zero.notes == (f"{name} is 0: taken as activation_store=pageable",)
    other = elbowroom.schedule(flux(), Controls(**OFFLOADED, **{name: 12}))
    assert other.offload.store is None and "activation_store_limit limits the store" in other.notes[0]
    assert "nothing is offloaded" in elbowroom.schedule(flux(), Controls(**{name: 12})).notes[0]


def test_a_scope_that_no_block_has_is_an_error_that_says_how_to_name_it():
    bare = [("blocks.0", ScopeModules()), ("blocks.1", ScopeModules())]
    for values, option in (
        ({**CHECKPOINTED, "gradient_checkpointing_keep_attention": True}, "gradient_checkpointing_keep_attention"),
        ({"gradient_checkpointing_offload_attention": True}, "gradient_checkpointing_offload_attention"),
        ({**CHECKPOINTED, "gradient_checkpointing_backend": "torch-ffn"}, "gradient_checkpointing_backend"),
        ({"activation_offload": ("feed_forward",)}, "activation_offload"),
    ):
        with pytest.raises(ControlsError, match=r"no effect on this model: .*scopes=\{") as refusal:
            schedule_blocks(bare, Controls(**values))
        assert refusal.value.option == option
    # A block that lacks it among others that have it is treated like its rest.
    mixed = [("blocks.0", ScopeModules(("attn",), ("ff",))), ("blocks.1", ScopeModules())]
    values = {**CHECKPOINTED, "gradient_checkpointing_keep_attention": True}
    assert schedule_blocks(mixed, Controls(**values)).strip() == "[krr] [r]"


def test_the_store_of_a_device():
    assert store_kind(OffloadSettings(), on_cpu=True) == "disk"
    assert store_kind(OffloadSettings(), on_cpu=False) == "pinned"
    with pytest.raises(ValueError, match="the model is on the CPU, so its activations are there already; use 'disk'"):
        store_kind(OffloadSettings(store="pageable"), on_cpu=True)
    with pytest.raises(ValueError, match="activation_store_path: has no effect"):
        store_kind(OffloadSettings(path="x"), on_cpu=False)


@given(
    count=st.integers(1, 8),
    values=st.fixed_dictionaries(
        {
            "gradient_checkpointing": st.booleans(),
            "gradient_checkpointing_interval": st.integers(1, 3),
            "gradient_checkpointing_segment_stride": st.none() | st.integers(1, 5),
            "gradient_checkpointing_backend": st.sampled_from(get_args(Backend)),
            "gradient_checkpointing_keep_attention": st.sampled_from([False, True, "kernel"]),
            "activation_offload": st.sampled_from(
                [
                    combination
                    for size in range(3)
                    for combination in itertools.combinations(("attention", "feed_forward", "boundary", "all"), size)
                ]
            ),
        }
    ),
)
def test_controls_give_a_plan_or_say_why_not(count, values):
    try:
        controls = Controls(**values)
    except ControlsError as refusal:
        assert refusal.option in values
        return
    plan = schedule_blocks([(f"b.{index}", ScopeModules(("attn",), ("ff",))) for index in range(count)], controls)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.takes_effect == (controls.gradient_checkpointing or bool(controls.offloads))
    assert plan.offloads == bool(controls.offloads)
