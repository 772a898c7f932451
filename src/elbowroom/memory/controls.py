"""The knobs that a person sets by hand to control memory. A pure function, `schedule`, turns them into a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_type_hints

from elbowroom.memory.activation_controls import ActivationControls
from elbowroom.memory.control_values import ControlsError, check_value
from elbowroom.memory.weight_controls import WeightControls

__all__ = ["Controls", "ControlsError"]


@dataclass(frozen=True, kw_only=True)
class Controls(WeightControls, ActivationControls):
    """The memory options, with the names and meanings that the command line, files and environment use too.

    The help text of an option stands in its field's metadata, and so does its smallest value: the options of the
    trainer are generated from here.

    Raises:
        ControlsError: (a `ValueError`) a value breaks one of the rules that the help texts state.
    """

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for control in fields(self):
            check_value(control, types[control.name], getattr(self, control.name))
        self.check_activations()
        self.check_weights()
