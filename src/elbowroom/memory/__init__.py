"""The memory engine: what happens to a model's activations. Needs torch alone and imports nothing else of elbowroom."""

from elbowroom.memory.apply import apply
from elbowroom.memory.blocks import Block, find_blocks, unwrap
from elbowroom.memory.controls import Controls, ControlsError
from elbowroom.memory.counters import Counters, Report
from elbowroom.memory.errors import ReplayError
from elbowroom.memory.handle import Handle
from elbowroom.memory.offload.autotune import PrefetchDecision, probe_prefetch
from elbowroom.memory.offload.opening import store_kind
from elbowroom.memory.plan import BlockPlan, OffloadSettings, Plan, ScopeModules, Treatments, WeightSettings
from elbowroom.memory.schedule import schedule_blocks
from elbowroom.memory.sharding import shard

__all__ = [
    "Block",
    "BlockPlan",
    "Controls",
    "ControlsError",
    "Counters",
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
    "find_blocks",
    "probe_prefetch",
    "schedule_blocks",
    "shard",
    "store_kind",
    "unwrap",
]
