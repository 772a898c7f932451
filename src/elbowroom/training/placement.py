"""Where the models of a pipeline compute, and which of them have their weights streamed there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from elbowroom.api import schedule_component
from elbowroom.memory import Controls, Plan, apply
from elbowroom.memory.weight_controls import Component
from elbowroom.memory.weights.opening import weight_store_kind


@dataclass(frozen=True)
class Placement:
    """A device, and the options that say what visits it instead of living there.

    Attributes:
        device: where models compute.
        controls: the memory options; None streams nothing.
        folder: where weights on the disk go that can't stay in their own files.
    """

    device: torch.device
    controls: Controls | None = None
    folder: Path | None = None

    def place(self, name: str, module: nn.Module) -> None:
        """Bring a component of a pipeline to the device, or have its weights streamed there.

        Args:
            name: of the component, as in Diffusers' pipelines: "text_encoder_2", "vae".
            module: the component.
        """
        component = _component(name)
        plan = None
        if self.controls is not None and component is not None and getattr(self.controls, f"ramtorch_{component}"):
            plan = schedule_component(module, self.controls, component)
        if plan is None or not plan.streamed:
            module.to(self.device)
        else:
            apply(module, self.with_folder(plan), device=self.device)

    def with_folder(self, plan: Plan) -> Plan:
        """Return a plan whose weights on the disk have a folder.

        Raises:
            ValueError: the store of the plan's weights makes no sense on this device.
        """
        kind = weight_store_kind(plan.weights, on_cpu=self.device.type == "cpu")
        if kind != "disk" or plan.weights.path is not None or self.folder is None:
            return plan
        return replace(plan, weights=replace(plan.weights, path=str(self.folder.absolute())))


def _component(name: str) -> Component | None:
    if name.startswith("text_encoder"):
        return "text_encoder"
    return "vae" if name == "vae" else None
