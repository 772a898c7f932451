"""The definitions themselves, and the rules that tie options together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from elbowroom.memory.controls import Controls
from elbowroom.options import Options
from elbowroom.options.definition import GROUPS, all_options
from elbowroom.options.group import Option, options_in
from elbowroom.options.kinds import Either
from elbowroom.options.memory import MemoryOptions, group_from
from elbowroom.options.values import UNSET, convert
from tests.options.routes import REQUIRED, problems_of, with_required

EVERY_OPTION = pytest.mark.parametrize("option", all_options().values(), ids=lambda option: option.name)


def test_every_option_is_in_exactly_one_group() -> None:
    names = [option.name for group in GROUPS for option in options_in(group)]
    assert sorted(names) == sorted(Options.model_fields)
    assert len(set(names)) == len(names)


@EVERY_OPTION
def test_every_option_is_explained_and_its_default_is_accepted(option: Option) -> None:
    assert option.help.endswith(".") and len(option.help.split()) >= 5
    if not option.required and option.default is not None:
        assert convert(option.kind, option.default, Path.cwd()) is not UNSET


@EVERY_OPTION
def test_none_always_means_the_default(option: Option) -> None:
    """So an option that can be unset is unset by default: there would be no spelling for it otherwise."""
    optional = type(None) in getattr(option.field.annotation, "__args__", ())
    assert not optional or option.default is None


def test_options_are_frozen_and_refuse_unknown_names() -> None:
    options = Options(**REQUIRED)
    with pytest.raises(ValidationError, match="frozen"):
        options.rank = 8  # type: ignore[misc]
    with pytest.raises(ValidationError, match="rnak"):
        Options.model_validate({**REQUIRED, "rnak": 8})


def test_the_memory_options_are_the_controls() -> None:
    given = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 2,
             "gradient_checkpointing_segment_stride": 4}  # fmt: skip
    assert Options(**REQUIRED, **given).controls() == Controls(**given)
    assert Options(**REQUIRED).controls() == Controls()
    assert list(MemoryOptions.model_fields) == list(Controls.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class LaterControls:
    """The kinds of fields that controls may grow."""

    prefetch: Literal["auto"] | bool = field(default="auto", metadata={"help": "Reload ahead."})
    offload: tuple[Literal["none", "attention"], ...] = field(default=("none",), metadata={"help": "What goes."})
    window: int | Literal["planned"] = field(
        default="planned", metadata={"help": "Bytes in flight.", "unit": "bytes", "minimum": 1}
    )
    share: float | None = field(default=None, metadata={"help": "How much.", "minimum": 0, "maximum": 1})
    folder: Path | None = field(default=None, metadata={"help": "Where."})


def test_controls_may_have_any_kind_of_field() -> None:
    group: Any = group_from(LaterControls, "later", "Later.")
    assert vars(group()) == {
        "prefetch": "auto",
        "offload": ("none",),
        "window": "planned",
        "share": None,
        "folder": None,
    }
    given = group(prefetch="no", offload="attention", window="1GiB", share="0.5", folder="/tmp")
    assert vars(given) == {
        "prefetch": False, "offload": ("attention",), "window": 2**30, "share": 0.5, "folder": Path("/tmp"),
    }  # fmt: skip
    assert [option.group for option in options_in(group)] == ["later"] * 5
    for wrong in ({"window": 0}, {"window": "plan"}, {"share": 1.5}, {"offload": "feet"}, {"prefetch": "often"}):
        with pytest.raises(ValidationError):
            group(**wrong)
    kinds = {option.name: option.kind for option in options_in(group)}
    assert isinstance(kinds["window"], Either)
    assert kinds["share"].accepted == "a number between 0 and 1"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"steps": None}, "steps: either steps or epochs is required"),
        ({"steps": 5, "epochs": 5}, "steps (command line): steps and epochs are both given"),
        ({"steps": 5, "lr_warmup_steps": 5}, "lr_warmup_steps (command line): must be below steps (5), but is 5"),
        ({"validation_steps": 5}, "validation_steps (command line): has no effect without validation_prompts"),
        ({"validation_seed": 5}, "validation_seed (command line): has no effect without validation_prompts"),
        ({"validation_inference_steps": 5}, "validation_inference_steps (command line): has no effect without"),
        ({"validation_guidance": 5}, "validation_guidance (command line): has no effect without validation_prompts"),
        ({"training_type": "full", "rank": 8}, "rank (command line): has no effect unless training_type is lora"),
        ({"training_type": "full", "alpha": 8}, "alpha (command line): has no effect unless training_type is lora"),
        ({"training_type": "full", "lora_targets": "a"}, "lora_targets (command line): has no effect unless"),
        ({"training_type": "full", "lora_format": "comfyui"}, "lora_format (command line): has no effect unless"),
        ({"timestep_sampling": "uniform", "logit_mean": 1}, "logit_mean (command line): has no effect unless"),
        ({"timestep_sampling": "uniform", "logit_std": 2}, "logit_std (command line): has no effect unless"),
    ],
)
def test_rules_between_options(values: dict[str, Any], problem: str) -> None:
    given = {key: value for key, value in with_required(**values).items() if value is not None}
    (found,) = problems_of(**given)
    assert found.startswith(problem)
    with pytest.raises(ValidationError, match=problem.split(" ")[0].rstrip(":")):
        Options(**given)


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": 1},
        {"steps": 5, "lr_warmup_steps": 4},
        {"steps": 1, "lr_warmup_steps": 0},
        {"validation_steps": 5, "validation_seed": 2**63 - 1, "validation_prompts": "a cat"},
        {"validation_seed": 42, "validation_inference_steps": 28},
        {"seed": 2**32 - 1, "rank": 4096, "resolution": 16384, "adam_epsilon": 1e-16},
        {"training_type": "full"},
        {"timestep_sampling": "uniform"},
        {"device": "cuda:1", "flow_shift": 3, "alpha": "0.5", "caption_dropout": 1},
    ],
)
def test_values_that_keep_the_rules(values: dict[str, Any]) -> None:
    assert problems_of(**with_required(**values)) == []


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1", "CUDA"])
def test_devices_that_do_not_exist(device: str) -> None:
    (problem,) = problems_of(**with_required(device=device))
    assert "must be auto, cpu, cuda, mps or xpu" in problem
