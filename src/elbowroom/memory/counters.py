"""What really happened, counted: the proof that a plan took effect."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from elbowroom.memory.plan import Plan


@dataclass
class Counters:
    """Totals since `apply`.

    Attributes:
        segments: segments that forward passes went through.
        blocks_recorded: calls of blocks whose activations were dropped in the forward pass.
        blocks_recomputed: calls of blocks that were run again in a backward pass.
        replays: runs of a whole segment in a backward pass.
        tensors_recomputed: saved tensors that a replay restored.
        blocks_kept: calls of blocks in segments whose activations had to be kept, because the block writes into its
            own input and can therefore not be run again.
    """

    segments: int = 0
    blocks_recorded: int = 0
    blocks_recomputed: int = 0
    replays: int = 0
    tensors_recomputed: int = 0
    blocks_kept: int = 0


@dataclass(frozen=True)
class Report:
    """A plan and what came of it; `str()` of it is for people, `to_dict()` for programs."""

    plan: Plan
    counters: Counters

    def to_dict(self) -> dict[str, int | str]:
        return {"plan": self.plan.strip(), **asdict(self.counters)}

    def __str__(self) -> str:
        counters = self.counters
        lines = [
            f"plan: {self.plan.strip()} ({len(self.plan.blocks)} blocks, {len(self.plan.segments)} segments)",
            f"forward: {counters.segments} segments, {counters.blocks_recorded} block calls dropped their activations",
            f"backward: {counters.replays} replays, {counters.blocks_recomputed} block calls recomputed, "
            f"{counters.tensors_recomputed} tensors restored",
        ]
        if counters.blocks_kept:
            lines.append(f"kept: {counters.blocks_kept} block calls write into their input and can't be recomputed")
        lines.extend(f"note: {note}" for note in self.plan.notes)
        return "\n".join(lines)
