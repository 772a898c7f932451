"""The knobs that a person sets by hand to control memory. A pure function, `schedule`, turns them into a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


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
        if not isinstance(self.gradient_checkpointing, bool):
            raise ControlsError(
                "gradient_checkpointing", f"must be True or False, but is {self.gradient_checkpointing!r}"
            )
        for control in fields(self):
            if "minimum" in control.metadata:
                _check_whole_number(control.name, getattr(self, control.name), control.metadata["minimum"])
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


def _check_whole_number(option: str, value: Any, minimum: int) -> None:
    if value is None and option == "gradient_checkpointing_segment_stride":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ControlsError(option, f"must be a whole number of at least {minimum}, but is {value!r}")
