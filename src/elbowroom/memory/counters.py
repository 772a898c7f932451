"""What really happened, counted: the proof that a plan took effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elbowroom.memory.devices.base import CopySeconds
from elbowroom.memory.plan import Plan
from elbowroom.memory.sizes import in_bytes


@dataclass
class Counters:
    """Totals since `apply`.

    Attributes:
        segments: segments that forward passes went through.
        blocks_recorded: calls of blocks whose activations were dropped in the forward pass.
        blocks_recomputed: calls of blocks that were run again in a backward pass.
        replays: runs of a whole segment, or of a scope that is recomputed alone, in a backward pass.
        scopes_recorded: calls of attention or feed-forward modules that are recomputed alone.
        scopes_recomputed: such calls that were run again.
        scopes_reused: calls of kept or offloaded scopes that a replay of their block did not have to run again.
        tensors_recomputed: saved tensors that a replay restored.
        blocks_kept: calls whose activations had to be kept, because they can't be run again (a warning names them).
        records: storages that were offloaded.
        bytes_offloaded: bytes that were copied to the store, by scope and for boundaries.
        bytes_reloaded: bytes that were copied back.
        bytes_deduplicated: bytes that were not copied since their storage was in the store already.
        bytes_refused: bytes that were to be offloaded, but stayed: the store was at its limit, or the disk was full.
        prefetch_hits: reloads that had been issued ahead of their use.
        prefetch_waits: reloads that were issued when they were needed.
        reads_in_place: reads of tensors that had not been given up yet, so that nothing had to be reloaded.
        copy_seconds: time that copies to the store and back took, in seconds.
        wait_seconds: that part of it during which the computation stood still for them.
        window_out: most bytes on their way to the store at one time.
        window_in: most bytes reloaded, or on their way back, and not used yet.
        store_peak: most bytes in the store at one time.
        store_allocated: bytes of host memory or disk that the store has reserved.
        weights_streamed: bytes of weights that live in their home and visit the device.
        weights_tied: bytes of weights that were to be streamed, but stay, for others share them.
        weight_fetches: copies of weights to the device; one may take several layers.
        weight_bytes_in: their bytes.
        weight_hits: uses of weights that were on the device, or on their way.
        weight_waits: uses of weights that were fetched when they were needed.
        weight_copy_seconds: time that those copies took, in seconds.
        weight_wait_seconds: that part of it during which the computation stood still for them.
        weight_window: most bytes of weights on the device at one time.
        gradient_bytes_out: bytes of gradients of streamed weights that were copied home.
        gradient_window: most bytes of gradients on their way home at one time.
    """

    segments: int = 0
    blocks_recorded: int = 0
    blocks_recomputed: int = 0
    replays: int = 0
    scopes_recorded: int = 0
    scopes_recomputed: int = 0
    scopes_reused: int = 0
    tensors_recomputed: int = 0
    blocks_kept: int = 0
    records: int = 0
    bytes_offloaded: Counter[str] = field(default_factory=Counter)
    bytes_reloaded: int = 0
    bytes_deduplicated: int = 0
    bytes_refused: int = 0
    prefetch_hits: int = 0
    prefetch_waits: int = 0
    reads_in_place: int = 0
    copy_seconds: float = 0.0
    wait_seconds: float = 0.0
    window_out: int = 0
    window_in: int = 0
    store_peak: int = 0
    store_allocated: int = 0
    weights_streamed: int = 0
    weights_tied: int = 0
    weight_fetches: int = 0
    weight_bytes_in: int = 0
    weight_hits: int = 0
    weight_waits: int = 0
    weight_copy_seconds: float = 0.0
    weight_wait_seconds: float = 0.0
    weight_window: int = 0
    gradient_bytes_out: int = 0
    gradient_window: int = 0

    def add_seconds(self, seconds: CopySeconds) -> None:
        """Count the time of a copy to the store or back."""
        self.copy_seconds += seconds.transfer
        self.wait_seconds += seconds.exposed

    def add_weight_seconds(self, seconds: CopySeconds) -> None:
        """Count the time of a copy of weights."""
        self.weight_copy_seconds += seconds.transfer
        self.weight_wait_seconds += seconds.exposed


@dataclass(frozen=True)
class Report:
    """A plan and what came of it; `str()` of it is for people, `to_dict()` for programs.

    Attributes:
        plan: the plan.
        counters: totals.
        never_called: blocks that no forward pass has called, although it has called others.
        out_of_order: blocks that were first called before one that precedes them in the plan.
        stores: where offloaded tensors go, a line a device.
    """

    plan: Plan
    counters: Counters
    never_called: tuple[str, ...] = ()
    out_of_order: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    def to_dict(self) -> Mapping[str, Any]:
        return {"plan": self.plan.strip(), **asdict(self.counters)}

    def __str__(self) -> str:
        counters = self.counters
        lines = [f"plan: {self.plan.strip()} ({len(self.plan.blocks)} blocks, {len(self.plan.segments)} segments)"]
        if counters.replays or counters.blocks_recorded or counters.scopes_recorded:
            lines += _of_recomputation(counters)
        if self.plan.offloads:
            lines.extend(f"store: {store}" for store in self.stores)
            lines += _of_offload(counters)
        if self.plan.streamed:
            lines += _of_weights(counters)
        if counters.bytes_refused:
            lines.append(f"no room: {in_bytes(counters.bytes_refused)} stayed, for the store had no room for them")
        if self.never_called:
            lines.append(f"never called: {', '.join(self.never_called)}; the plan has no effect on them")
        if self.out_of_order:
            lines.append(
                f"called early: {', '.join(self.out_of_order)}, before blocks that precede them in the plan; segments "
                "end there, so name the blocks in the order of their calls"
            )
        if counters.blocks_kept:
            lines.append(f"kept: {counters.blocks_kept} calls can't be run again (a warning says why)")
        lines.extend(f"note: {note}" for note in self.plan.notes)
        return "\n".join(lines)


def _of_recomputation(counters: Counters) -> list[str]:
    dropped = [f"{counters.segments} segments, {counters.blocks_recorded} block calls dropped their activations"]
    again = [f"{counters.replays} replays, {counters.blocks_recomputed} block calls recomputed"]
    if counters.scopes_recorded:
        dropped.append(f"so did {counters.scopes_recorded} calls of scopes alone")
        again.append(f"{counters.scopes_recomputed} calls of scopes alone recomputed")
    if counters.scopes_reused:
        again.append(f"{counters.scopes_reused} calls of scopes not run again")
    again.append(f"{counters.tensors_recomputed} tensors restored")
    return [f"forward: {', '.join(dropped)}", f"backward: {', '.join(again)}"]


def _of_offload(counters: Counters) -> list[str]:
    scopes = [f"{scope} {in_bytes(count)}" for scope, count in sorted(counters.bytes_offloaded.items())]
    return [
        f"offloaded: {counters.records} storages ({', '.join(scopes) or 'nothing'}); "
        f"{in_bytes(counters.bytes_deduplicated)} more were in the store already; "
        f"store at most {in_bytes(counters.store_peak)}, {in_bytes(counters.store_allocated)} reserved",
        f"reloaded: {in_bytes(counters.bytes_reloaded)}; {counters.prefetch_hits} ahead of use, "
        f"{counters.prefetch_waits} on demand, {counters.reads_in_place} read before they had left; "
        f"{_hidden(counters.copy_seconds, counters.wait_seconds)}"
        f"on their way at most {in_bytes(counters.window_out)} out and {in_bytes(counters.window_in)} in",
    ]


def _of_weights(counters: Counters) -> list[str]:
    lines = [
        f"weights: {in_bytes(counters.weights_streamed)} streamed, "
        f"{in_bytes(counters.weight_bytes_in)} fetched in {counters.weight_fetches} copies; "
        f"{counters.weight_hits} uses ahead, {counters.weight_waits} on demand; "
        f"{_hidden(counters.weight_copy_seconds, counters.weight_wait_seconds)}"
        f"on the device at most {in_bytes(counters.weight_window)}"
    ]
    if counters.gradient_bytes_out:
        lines.append(
            f"gradients: {in_bytes(counters.gradient_bytes_out)} brought home, at most "
            f"{in_bytes(counters.gradient_window)} at one time"
        )
    if counters.weights_tied:
        lines.append(f"tied weights: {in_bytes(counters.weights_tied)} stay on the device, for others share them")
    return lines


def _hidden(copied: float, waited: float) -> str:
    """Tell how much of the copies was hidden behind the computation, if there is a clock."""
    if copied == 0:
        return ""
    return f"{waited:.2f} s of waiting for {copied:.2f} s of copies, {1 - waited / copied:.0%} hidden; "
