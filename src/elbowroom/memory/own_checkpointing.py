"""A model's own gradient checkpointing, the switch of Diffusers and Transformers, which excludes ours."""

from __future__ import annotations

from torch import nn


class OwnCheckpointing:
    """The modules of a model that have a switch of their own, so that looking at it costs next to nothing."""

    def __init__(self, model: nn.Module):
        self._switches = [
            (name, module) for name, module in model.named_modules() if hasattr(module, "gradient_checkpointing")
        ]

    def refuse(self) -> None:
        """Raise RuntimeError if a switch is on: the model would recompute what the plan recomputes or keeps."""
        for name, module in self._switches:
            if module.gradient_checkpointing is True:
                where = f" (in {name!r})" if name else ""
                raise RuntimeError(
                    f"the model's own gradient checkpointing is switched on{where}; switch it off with "
                    "`model.disable_gradient_checkpointing()`"
                )
