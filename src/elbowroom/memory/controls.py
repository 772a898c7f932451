"""The knobs that a person sets by hand to control memory. A pure function, `schedule`, turns them into a plan."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, get_type_hints


class ControlsError(ValueError):
    """A control that breaks a rule. `option` is its name, `rule` says what is allowed."""

    def __init__(self, option: str, rule: str):
        super().__init__(f"{option}: {rule}")
        self.option = option
        self.rule = rule


@dataclass(frozen=True, kw_only=True)
class Controls:
    """The memory options, with the names and meanings that the command line, files and environment use too.

    The help text of an option stands in its field's metadata, and so does its smallest value: the options of the
    trainer are generated from here.

    Raises:
        ControlsError: (a `ValueError`) a value breaks one of the rules that the help texts state.
    """

    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Recompute the activations of blocks in the backward pass instead of saving them: less memory, "
            "more time, the same gradients."
        },
    )
    gradient_checkpointing_interval: int = field(
        default=1,
        metadata={
            "help": "Width of a segment: this many consecutive blocks are recomputed as one unit, and only what "
            "enters the segment is saved. Above the number of blocks, the whole model is one segment.",
            "minimum": 1,
        },
    )
    gradient_checkpointing_segment_stride: int | None = field(
        default=None,
        metadata={
            "help": "A segment starts every this many blocks; the blocks between segments keep their activations. "
            "At least the interval, which is also the default (every block is then in a segment).",
            "minimum": 1,
        },
    )

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for control in fields(self):
            _check_value(control, types[control.name], getattr(self, control.name))
        interval, stride = self.gradient_checkpointing_interval, self.gradient_checkpointing_segment_stride
        if not self.gradient_checkpointing:
            if interval != 1:
                raise ControlsError(
                    "gradient_checkpointing_interval",
                    f"{interval} has no effect without gradient_checkpointing; set gradient_checkpointing as well",
                )
            if stride is not None:
                raise ControlsError(
                    "gradient_checkpointing_segment_stride",
                    f"{stride} has no effect without gradient_checkpointing; set gradient_checkpointing as well",
                )
        if stride is not None and stride < interval:
            raise ControlsError(
                "gradient_checkpointing_segment_stride",
                f"must be at least gradient_checkpointing_interval, but {stride} is below {interval}: segments "
                "would overlap",
            )


def _check_value(control: Field[Any], annotation: Any, value: Any) -> None:
    if value is None and control.default is None:
        return
    if annotation is bool and not isinstance(value, bool):
        raise ControlsError(control.name, f"must be True or False, but is {value!r}")
    minimum = control.metadata.get("minimum")
    # True is an int in Python; as a count it is a mistake.
    if minimum is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
        raise ControlsError(control.name, f"must be a whole number of at least {minimum}, but is {value!r}")
