"""The knobs for weights: which are streamed, from where, and how."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from elbowroom.memory.control_values import ControlsError
from elbowroom.memory.plan import StoreKind

Component = Literal["transformer", "text_encoder", "vae", "controlnet"]
"""The models of a pipeline, each with options of its own for streaming."""

_PERCENT = {"minimum": 0, "maximum": 100}


@dataclass(frozen=True, kw_only=True)
class WeightControls:
    """The options of weights; part of `Controls`."""

    weight_streaming: Literal["off", "auto"] | int | str = field(
        default="off",
        metadata={
            "help": "Weights of blocks that live in host memory (or on the disk) and visit the device only while they "
            "are used: the number of such blocks, or their share in bytes such as 50%, spread evenly over the model; "
            "100% needs the least memory. auto streams as little as leaves half of the device's free memory to "
            "everything else.",
            "minimum": 0,
            "pattern": r"(100|\d{1,2}(\.\d+)?)%",
            "accepted": "a percentage such as 50%",
        },
    )
    weight_store: StoreKind | None = field(
        default=None,
        metadata={
            "help": "Where streamed weights live: pinned is page-locked host memory, which the device copies from "
            "while it computes; pageable is ordinary host memory; disk is the model's own files, which are then "
            "never loaded whole. Unset: pinned, or disk when the model is on the CPU."
        },
    )
    weight_store_path: Path | None = field(
        default=None,
        metadata={
            "help": "Folder for streamed weights on the disk that can't stay in the model's own files, such as trained "
            "or quantized ones. Unset: the run folder."
        },
    )
    weight_window: int | None = field(
        default=None,
        metadata={
            "help": "Most bytes of streamed weights on the device at one time, used or on their way: a larger window "
            "fetches further ahead. A single block may need more. Unset: 256MiB, or room for two blocks.",
            "minimum": 1,
            "unit": "bytes",
        },
    )
    ramtorch: bool = field(
        default=False,
        metadata={
            "help": "Streams the weights of single layers instead of whole blocks: the name that SimpleTuner has for "
            "it. Less of the device is needed at one time, in more and smaller copies."
        },
    )
    ramtorch_target_modules: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Which layers ramtorch streams: patterns of their names or of their classes (* and ?); the plain "
            "name of a block means every layer in it. Unset: all.",
            "separator": ",",
        },
    )
    ramtorch_transformer_percent: int | None = field(
        default=None,
        metadata={
            "help": "Streams only this share of those layers of the trained model, in bytes, spread evenly over the "
            "order in which they run. Unset: 100.",
            **_PERCENT,
        },
    )
    ramtorch_text_encoder: bool = field(
        default=False,
        metadata={
            "help": "Streams the layers of the text encoders while captions are encoded: they never have to fit."
        },
    )
    ramtorch_text_encoder_percent: int | None = field(
        default=None,
        metadata={"help": "As ramtorch_transformer_percent, for the text encoders. Unset: 100.", **_PERCENT},
    )
    ramtorch_vae: bool = field(
        default=False,
        metadata={"help": "Streams the layers of the autoencoder while pictures are encoded and drawn."},
    )
    ramtorch_controlnet: bool = field(
        default=False,
        metadata={"help": "Streams the layers of a ControlNet, in runs that have one."},
    )
    ramtorch_disable_extensions: bool = field(
        default=True,
        metadata={
            "help": "Streams linear layers only. false: embeddings, normalizations and convolutions too, wherever the "
            "ramtorch options stream layers."
        },
    )
    musubi_blocks_to_swap: int = field(
        default=0,
        metadata={
            "help": "Streams the weights of the last so many blocks: the name that Musubi Tuner has for it.",
            "minimum": 0,
        },
    )
    musubi_block_swap_device: str = field(
        default="cpu",
        metadata={
            "help": "Accepted for configurations of other trainers: swapped blocks live in host memory, or where "
            "weight_store says.",
            "pattern": "cpu",
            "accepted": "cpu",
        },
    )

    @property
    def streams_weights(self) -> bool:
        """Whether weights of the trained model are streamed."""
        return self.weight_streaming not in ("off", 0, "0%") or self.ramtorch or self.musubi_blocks_to_swap > 0

    @property
    def streams_anything(self) -> bool:
        return self.streams_weights or self.ramtorch_text_encoder or self.ramtorch_vae or self.ramtorch_controlnet

    def check_weights(self) -> None:
        """Raise `ControlsError` where options contradict one another, or one would have no effect."""
        other = next((name for name in ("ramtorch", "musubi_blocks_to_swap") if getattr(self, name)), None)
        if self.weight_streaming != "off" and other is not None:
            raise ControlsError("weight_streaming", f"and {other} both say what is streamed; leave one of them out")
        layers = self.ramtorch or self.ramtorch_text_encoder or self.ramtorch_vae or self.ramtorch_controlnet
        for needed, met, names in (
            ("ramtorch", self.ramtorch, ("ramtorch_target_modules", "ramtorch_transformer_percent")),
            ("ramtorch_text_encoder", self.ramtorch_text_encoder, ("ramtorch_text_encoder_percent",)),
            ("ramtorch", layers, ("ramtorch_disable_extensions",)),
            ("weight_streaming", self.streams_anything, ("weight_store", "weight_store_path", "weight_window")),
        ):
            for name in names:
                if not met and getattr(self, name) != _DEFAULTS[name]:
                    raise ControlsError(name, f"has no effect without {needed}; set {needed} as well")
        if self.weight_store_path is not None and self.weight_store in ("pinned", "pageable"):
            raise ControlsError(
                "weight_store_path",
                f"has no effect with weight_store={self.weight_store}, which is host memory; set weight_store to disk",
            )


_DEFAULTS = {control.name: control.default for control in fields(WeightControls)}
