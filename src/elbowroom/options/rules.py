"""The rules that tie several options together. What can't take effect is refused, and the message says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elbowroom.memory.controls import Controls, ControlsError

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Broken:
    """A rule that the values break: the option to change, what is wrong, and the options that take part."""

    option: str
    message: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """`check` gets a value for each of `options`, and all defaults; returns None, or the option to change and why."""

    options: tuple[str, ...]
    check: Callable[[Values, Values], tuple[str, str] | None]


def broken_rules(values: Values, defaults: Values) -> list[Broken]:
    """The rules that the values break. A rule about an option that has no value here is left out."""
    broken = []
    for rule in RULES:
        if all(option in values for option in rule.options) and (found := rule.check(values, defaults)):
            broken.append(Broken(*found, options=rule.options))
    return broken


def _steps_or_epochs(values: Values, defaults: Values) -> tuple[str, str] | None:
    if values["steps"] is None and values["epochs"] is None:
        return "steps", "either steps or epochs is required: how long to train"
    if values["steps"] is not None and values["epochs"] is not None:
        return "steps", "steps and epochs are both given; give one, and set the other to none where it is inherited"
    return None


def _warmup_within_steps(values: Values, defaults: Values) -> tuple[str, str] | None:
    steps, warmup = values["steps"], values["lr_warmup_steps"]
    # The first step of a warm-up has a learning rate of 0: were all steps warm-up, the last would not reach the value.
    if steps is not None and warmup >= steps:
        return "lr_warmup_steps", f"must be below steps ({steps}), but is {warmup}"
    return None


def _controls(values: Values, defaults: Values) -> tuple[str, str] | None:
    try:
        Controls(**{control.name: values[control.name] for control in dataclasses.fields(Controls)})
    except ControlsError as error:
        return error.option, error.rule
    return None


def _steps_in_backward(values: Values, defaults: Values) -> tuple[str, str] | None:
    if not values["optimizer_in_backward"]:
        return None
    if values["max_grad_norm"]:
        return "max_grad_norm", "must be 0 with optimizer_in_backward: the norm of all gradients is known too late"
    if values["gradient_accumulation_steps"] > 1:
        return "gradient_accumulation_steps", "must be 1 with optimizer_in_backward, which keeps no gradient to add to"
    return None


def _only_with(option: str, needed: str, value: str) -> Rule:
    """The rule that `option` may differ from its default only where the option `needed` has the given value."""

    def check(values: Values, defaults: Values) -> tuple[str, str] | None:
        if values[needed] != value and values[option] != defaults[option]:
            return option, f"has no effect unless {needed} is {value}, but {needed} is {values[needed]}"
        return None

    return Rule((option, needed), check)


def _only_with_prompts(option: str) -> Rule:
    """The rule that `option` may differ from its default only where there are prompts to draw."""

    def check(values: Values, defaults: Values) -> tuple[str, str] | None:
        if values[option] != defaults[option] and not values["validation_prompts"]:
            return option, "has no effect without validation_prompts; give prompts as well"
        return None

    return Rule((option, "validation_prompts"), check)


RULES = (
    Rule(("steps", "epochs"), _steps_or_epochs),
    Rule(("steps", "lr_warmup_steps"), _warmup_within_steps),
    Rule(("optimizer_in_backward", "max_grad_norm", "gradient_accumulation_steps"), _steps_in_backward),
    _only_with_prompts("validation_steps"),
    _only_with_prompts("validation_seed"),
    _only_with_prompts("validation_inference_steps"),
    _only_with_prompts("validation_guidance"),
    Rule(tuple(control.name for control in dataclasses.fields(Controls)), _controls),
    _only_with("rank", "training_type", "lora"),
    _only_with("base_model_precision", "training_type", "lora"),
    _only_with("alpha", "training_type", "lora"),
    _only_with("lora_targets", "training_type", "lora"),
    _only_with("lora_format", "training_type", "lora"),
    _only_with("logit_mean", "timestep_sampling", "logit_normal"),
    _only_with("logit_std", "timestep_sampling", "logit_normal"),
)
