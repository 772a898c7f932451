"""The knobs for activations: what is recomputed, kept and offloaded, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from elbowroom.memory.control_values import ControlsError
from elbowroom.memory.plan import StoreKind

Backend = Literal["torch", "torch-ffn", "unsloth", "unsloth-ffn"]

OffloadPart = Literal["attention", "feed_forward", "boundary", "all"]


@dataclass(frozen=True, kw_only=True)
class ActivationControls:
    """The options of activations; part of `Controls`."""

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

    gradient_checkpointing_backend: Backend = field(
        default="torch",
        metadata={
            "help": "What is recomputed. torch: whole blocks; torch-ffn: only their feed-forward part, which is large "
            "and cheap to recompute. unsloth and unsloth-ffn: the same, and what enters the recomputed part goes to "
            "the store instead of staying on the device."
        },
    )
    gradient_checkpointing_keep_attention: bool | Literal["kernel"] = field(
        default=False,
        metadata={
            "help": "Inside recomputed blocks, keep what attention saves, so that it never runs twice: the slowest "
            "part at long sequences. kernel keeps only the result of softmax(QKᵀ)V, which is what is slow: about an "
            "eighth of the memory where torch has a fused kernel for it, and the projections around it are recomputed."
        },
    )
    gradient_checkpointing_offload_attention: bool = field(
        default=False,
        metadata={
            "help": "What attention saves goes to the store instead of staying on the device; attention never runs "
            "twice. With or without recomputing the rest of the block. The same as activation_offload=attention."
        },
    )
    gradient_checkpointing_offload_prefetch: bool | Literal["auto"] = field(
        default="auto",
        metadata={
            "help": "Reload offloaded tensors ahead of use, in the order learned in the step before. auto times one "
            "step with and one without, for each shape, and takes the faster way."
        },
    )
    gradient_checkpointing_offload_pin_memory_max_buckets: int | None = field(
        default=None,
        metadata={
            "help": "Accepted for configurations of other trainers: 0 means activation_store=pageable; other numbers "
            "are ignored, for activation_store_limit limits bytes.",
            "minimum": 0,
        },
    )
    activation_offload: tuple[OffloadPart, ...] = field(
        default=(),
        metadata={
            "help": "Which saved tensors go to the store: attention, feed_forward, boundary (what enters a recomputed "
            "part), several of them separated by commas, or all. With gradient_checkpointing, all offloads attention, "
            "feed-forward and boundary, and the rest of the block is recomputed (with torch-ffn, all but the "
            "feed-forward part, which is recomputed); without, every saved tensor goes.",
            "separator": ",",
        },
    )
    activation_store: StoreKind | None = field(
        default=None,
        metadata={
            "help": "Where offloaded tensors live: pinned is page-locked host memory, which the device copies to and "
            "from while it computes; pageable is ordinary host memory; disk is a file. Unset: pinned, or disk when the "
            "model is on the CPU."
        },
    )
    activation_store_limit: int | None = field(
        default=None,
        metadata={
            "help": "Most bytes in the store, such as 24GiB; what has no room stays on the device. Unset: 60 % of the "
            "host memory (or disk) that is free.",
            "minimum": 1,
            "unit": "bytes",
        },
    )
    activation_store_path: Path | None = field(
        default=None,
        metadata={"help": "Folder of the disk store, on a fast local disk. Unset: the run folder."},
    )
    activation_window: int | None = field(
        default=None,
        metadata={
            "help": "Bytes that may be on their way to the store, and back, at one time: they take room on the device. "
            "A tensor that is larger goes by itself. Unset: 256MiB.",
            "minimum": 1,
            "unit": "bytes",
        },
    )

    @property
    def offloads(self) -> frozenset[str]:
        """Everything that is offloaded, whichever option says so."""
        parts = set(self.activation_offload)
        if self.gradient_checkpointing_offload_attention:
            parts.add("attention")
        if self.gradient_checkpointing_backend.startswith("unsloth"):
            parts.add("boundary")
        return frozenset(parts)

    @property
    def recomputes_feed_forward_alone(self) -> bool:
        return self.gradient_checkpointing and self.gradient_checkpointing_backend.endswith("-ffn")

    def check_activations(self) -> None:
        """Raise `ControlsError` where options contradict one another, or one would have no effect."""
        self._check_checkpointing()
        self._check_attention()
        self._check_offload()
        self._check_store()

    def _check_checkpointing(self) -> None:
        interval, stride = self.gradient_checkpointing_interval, self.gradient_checkpointing_segment_stride
        if not self.gradient_checkpointing:
            for name in (
                "gradient_checkpointing_interval",
                "gradient_checkpointing_segment_stride",
                "gradient_checkpointing_backend",
                "gradient_checkpointing_keep_attention",
            ):
                value = getattr(self, name)
                if value != _DEFAULTS[name]:
                    raise ControlsError(
                        name,
                        f"{value} has no effect without gradient_checkpointing; set gradient_checkpointing as well",
                    )
        if stride is not None and stride < interval:
            raise ControlsError(
                "gradient_checkpointing_segment_stride",
                f"must be at least gradient_checkpointing_interval, but {stride} is below {interval}: segments "
                "would overlap",
            )
        if self.recomputes_feed_forward_alone and interval > 1 and (stride is None or stride == interval):
            raise ControlsError(
                "gradient_checkpointing_interval",
                f"{interval} has no effect with gradient_checkpointing_backend={self.gradient_checkpointing_backend}: "
                "each feed-forward part is recomputed by itself; leave it out, or set a larger "
                "gradient_checkpointing_segment_stride to leave blocks out",
            )

    def _check_attention(self) -> None:
        if not self.gradient_checkpointing_keep_attention:
            return
        name = "gradient_checkpointing_keep_attention"
        if self.recomputes_feed_forward_alone:
            raise ControlsError(
                name,
                f"has no effect with gradient_checkpointing_backend={self.gradient_checkpointing_backend}, which does "
                "not recompute attention",
            )
        if self.offloads & {"attention", "all"}:
            raise ControlsError(name, "attention can't be kept and offloaded at once; choose one")

    def _check_offload(self) -> None:
        parts = self.activation_offload
        if len(set(parts)) != len(parts):
            raise ControlsError("activation_offload", f"names a part twice: {', '.join(parts)}")
        if "all" in parts and len(parts) > 1:
            raise ControlsError("activation_offload", "all includes the other parts; give all alone")
        if "boundary" in parts and not self.gradient_checkpointing:
            raise ControlsError(
                "activation_offload",
                "boundary has no effect without gradient_checkpointing: nothing is recomputed, so nothing enters it",
            )
        if "feed_forward" in parts and self.recomputes_feed_forward_alone:
            raise ControlsError(
                "activation_offload",
                "feed_forward can't be offloaded and recomputed at once "
                f"(gradient_checkpointing_backend={self.gradient_checkpointing_backend}); choose one",
            )

    def _check_store(self) -> None:
        buckets = self.gradient_checkpointing_offload_pin_memory_max_buckets
        if buckets == 0 and self.activation_store not in (None, "pageable"):
            raise ControlsError(
                "gradient_checkpointing_offload_pin_memory_max_buckets",
                f"0 means activation_store=pageable, but activation_store is {self.activation_store}; leave one out",
            )
        if self.activation_store_path is not None and self.activation_store in ("pinned", "pageable"):
            raise ControlsError(
                "activation_store_path",
                f"has no effect with activation_store={self.activation_store}, which is host memory; set "
                "activation_store to disk",
            )
        if self.offloads:
            return
        for name in ("activation_store", "activation_store_limit", "activation_store_path", "activation_window"):
            if getattr(self, name) is not None:
                raise ControlsError(name, f"{_NOTHING_OFFLOADED}")
        if self.gradient_checkpointing_offload_prefetch != "auto":
            raise ControlsError("gradient_checkpointing_offload_prefetch", _NOTHING_OFFLOADED)


_NOTHING_OFFLOADED = "has no effect, for nothing is offloaded; set activation_offload as well"
_DEFAULTS = {control.name: control.default for control in fields(ActivationControls)}
