"""What really happened, counted: the proof that a plan took effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elbowroom.memory.plan import Plan


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
        wait_seconds: time that the program stood still for copies, in seconds.
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
        weight_wait_seconds: time that the program stood still for weights, in seconds.
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
    weight_wait_seconds: float = 0.0
    weight_window: int = 0
    gradient_bytes_out: int = 0
    gradient_window: int = 0


@dataclass(frozen=True)
class Report:
    """A plan and what came of it; `str()` of it is for people, `to_dict()` for programs.

    Attributes:
        plan: the plan.
        counters: totals.
        never_called: blocks that no forward pass has called, although it has called others.
    """

    plan: Plan
    counters: Counters
    never_called: tuple[str, ...] = ()

    def to_dict(self) -> Mapping[str, Any]:
        return {"plan": self.plan.strip(), **asdict(self.counters)}

    def __str__(self) -> str:
        counters = self.counters
        lines = [f"plan: {self.plan.strip()} ({len(self.plan.blocks)} blocks, {len(self.plan.segments)} segments)"]
        if counters.replays or counters.blocks_recorded or counters.scopes_recorded:
            dropped = [
                f"{counters.segments} segments, {counters.blocks_recorded} block calls dropped their activations"
            ]
            again = [f"{counters.replays} replays, {counters.blocks_recomputed} block calls recomputed"]
            if counters.scopes_recorded:
                dropped.append(f"so did {counters.scopes_recorded} calls of scopes alone")
                again.append(f"{counters.scopes_recomputed} calls of scopes alone recomputed")
            if counters.scopes_reused:
                again.append(f"{counters.scopes_reused} calls of scopes not run again")
            again.append(f"{counters.tensors_recomputed} tensors restored")
            lines += [f"forward: {', '.join(dropped)}", f"backward: {', '.join(again)}"]
        if self.plan.offloads:
            parts = ", ".join(f"{scope} {_size(count)}" for scope, count in sorted(counters.bytes_offloaded.items()))
            lines += [
                f"offloaded: {counters.records} storages ({parts or 'nothing'}); {_size(counters.bytes_deduplicated)} "
                f"more were in the store already; store at most {_size(counters.store_peak)}, "
                f"{_size(counters.store_allocated)} reserved",
                f"reloaded: {_size(counters.bytes_reloaded)}; {counters.prefetch_hits} ahead of use, "
                f"{counters.prefetch_waits} on demand, {counters.reads_in_place} read before they had left; "
                f"{counters.wait_seconds:.2f} s of waiting; on their way at most {_size(counters.window_out)} out and "
                f"{_size(counters.window_in)} in",
            ]
        if self.plan.streamed:
            lines.append(
                f"weights: {_size(counters.weights_streamed)} streamed, {_size(counters.weight_bytes_in)} fetched in "
                f"{counters.weight_fetches} copies; {counters.weight_hits} uses ahead, {counters.weight_waits} on "
                f"demand; {counters.weight_wait_seconds:.2f} s of waiting; on the device at most "
                f"{_size(counters.weight_window)}"
            )
            if counters.gradient_bytes_out:
                lines.append(
                    f"gradients: {_size(counters.gradient_bytes_out)} brought home, at most "
                    f"{_size(counters.gradient_window)} at one time"
                )
            if counters.weights_tied:
                lines.append(f"tied weights: {_size(counters.weights_tied)} stay on the device, for others share them")
        if counters.bytes_refused:
            lines.append(f"no room: {_size(counters.bytes_refused)} stayed, for the store had no room for them")
        if self.never_called:
            lines.append(f"never called: {', '.join(self.never_called)}; the plan has no effect on them")
        if counters.blocks_kept:
            lines.append(f"kept: {counters.blocks_kept} calls can't be run again (a warning says why)")
        lines.extend(f"note: {note}" for note in self.plan.notes)
        return "\n".join(lines)


def _size(count: int) -> str:
    """Return a number of bytes for people: `1.5 MiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
