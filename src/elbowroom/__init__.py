"""elbowroom: fit the training of large diffusion transformers into the memory you have.

The library in five lines (any PyTorch model that is made of repeated blocks):

    controls = elbowroom.Controls(gradient_checkpointing=True, gradient_checkpointing_interval=2)
    plan = elbowroom.schedule(model, controls)
    handle = elbowroom.apply(model, plan)
    ...                       # train as before; gradients are the same bit for bit
    print(handle.report())
"""

from elbowroom.api import schedule
from elbowroom.memory import (
    BlockPlan,
    Controls,
    ControlsError,
    Handle,
    OffloadSettings,
    Plan,
    PrefetchDecision,
    ReplayError,
    Report,
    ScopeModules,
    Treatments,
    WeightSettings,
    apply,
    probe_prefetch,
    shard,
)

__all__ = [
    "BlockPlan",
    "Controls",
    "ControlsError",
    "Handle",
    "OffloadSettings",
    "Plan",
    "PrefetchDecision",
    "ReplayError",
    "Report",
    "ScopeModules",
    "Treatments",
    "WeightSettings",
    "apply",
    "probe_prefetch",
    "schedule",
    "shard",
]
