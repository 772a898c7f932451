"""What takes the place of the forward of a layer whose weights are streamed by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elbowroom.memory.installed import Installed
from elbowroom.memory.weights.streamer import Streamer
from elbowroom.memory.weights.units import Unit


class LayerForward(Installed):
    """Takes the place of one layer's forward.

    Args:
        streamer: brings the weights.
        unit: the layer.
        call: what gives the call its saved-tensor hooks, where no block does: called with this, args, kwargs.
    """

    def __init__(self, streamer: Streamer, unit: Unit, call: Callable[[LayerForward, tuple, dict], Any]):
        super().__init__(f"layer {unit.name!r}", unit.module)
        self._streamer = streamer
        self._number = unit.number
        self._call = call
        self._call_from_compiled: Any = torch.compiler.disable(
            call, reason="elbowroom streams this layer, which ends a graph: compile its block without fullgraph=True"
        )

    def install(self) -> None:
        super().install()
        self.original = self._streamer.visiting(self._number, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._call_from_compiled(self, args, kwargs)
        return self._call(self, args, kwargs)
