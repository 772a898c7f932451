"""The number formats of frozen weights: how a matrix becomes a few bits, and a matrix again.

Each is a thin adapter of a library, which is imported when the format is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

Payload = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Format(ABC):
    """A number format for frozen matrices.

    Attributes:
        package: the library that does the work.
        modules: those of its modules that are used.
    """

    package: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of one value, without scales."""

    def suits(self, weight: torch.Tensor) -> bool:
        """Whether a matrix of this shape can be quantized."""
        return True

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> Payload:
        """Return what stands for a matrix, on the same device."""

    @abstractmethod
    def dequantize(self, payload: Payload, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix that a payload stands for."""


@dataclass(frozen=True)
class Torchao(Format):
    """Weight-only quantization by torchao, a scale a row (https://github.com/pytorch/ao)."""

    config: str

    package = "torchao"
    modules = ("torchao.quantization",)

    @property
    def bits(self) -> int:
        return 8

    def quantize(self, weight: torch.Tensor) -> Payload:
        from torchao import quantization

        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        quantization.quantize_(layer, getattr(quantization, self.config)())
        return {"weight": layer.weight.detach()}

    def dequantize(self, payload: Payload, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return payload["weight"].dequantize().to(dtype)


@dataclass(frozen=True)
class TorchaoInt4(Format):
    """Four bits by torchao's affine quantization, a scale and a zero point for every 32 values of a row.

    Two values are packed into a byte. torchao's own packed tensors are made for one kind of device each; this one is
    the same everywhere.
    """

    group: int = 32

    package = "torchao"
    modules = ("torchao.quantization.quant_primitives",)

    @property
    def bits(self) -> int:
        return 4

    def suits(self, weight: torch.Tensor) -> bool:
        return weight.shape[1] % self.group == 0

    def quantize(self, weight: torch.Tensor) -> Payload:
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

        block: Any = (1, self.group)
        scale, zero = choose_qparams_affine(
            weight, MappingType.ASYMMETRIC, block, torch.uint8, 0, 15, scale_dtype=torch.float32,
            zero_point_dtype=torch.uint8,
        )  # fmt: skip
        values = quantize_affine(weight, block, scale, zero, torch.uint8, 0, 15)
        return {"packed": values[:, ::2] | values[:, 1::2] << 4, "scale": scale, "zero": zero}

    def dequantize(self, payload: Payload, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        from torchao.quantization.quant_primitives import dequantize_affine

        packed = payload["packed"]
        values = torch.stack((packed & 15, packed >> 4), dim=-1).view(size)
        block: Any = (1, self.group)
        return dequantize_affine(
            values, block, payload["scale"], payload["zero"], torch.uint8, 0, 15, output_dtype=dtype
        )


@dataclass(frozen=True)
class Sdnq(Format):
    """Quantization by SDNQ (https://github.com/Disty0/sdnq).

    Attributes:
        dtype: name of the number format.
        hadamard: rotate rows first, which spreads outliers (QuaRot, https://arxiv.org/abs/2404.00456).
        svd: keep a part of low rank in full precision (SVDQuant, https://arxiv.org/abs/2411.05007).
    """

    dtype: str
    hadamard: bool = False
    svd: bool = False

    package = "sdnq"
    modules = ("sdnq.quantizer", "sdnq.training", "sdnq.utils")

    @property
    def bits(self) -> int:
        return 4 if self.dtype.endswith("4") else 8

    def quantize(self, weight: torch.Tensor) -> Payload:
        from sdnq.quantizer import sdnq_quantize_layer_weight
        from sdnq.training import SDNQTensor

        # `SDNQTensor.from_float` compiles this for each shape, and compiled code rounds otherwise each time it is made
        # for more general shapes.
        dequantizer, parts = sdnq_quantize_layer_weight(
            weight.detach(),
            layer_class_name="Linear",
            weights_dtype=self.dtype,
            group_size=32,
            use_hadamard=self.hadamard,
            use_svd=self.svd,
            use_quantized_matmul=False,
            use_stochastic_rounding=False,  # the same weights each time
        )
        quantized = SDNQTensor(dequantizer, **parts)
        return {"weight": quantized}

    def dequantize(self, payload: Payload, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        from sdnq.utils import get_sdnq_params

        weight: Any = payload["weight"]
        # SDNQ compiles this for each shape, which on the CPU takes longer than it ever saves.
        compiled = weight.device.type in ("cuda", "xpu")
        return weight.sdnq_dequantizer(**get_sdnq_params(weight), skip_compile=not compiled).to(dtype)


@dataclass(frozen=True)
class Nf4(Format):
    """Four bits by bitsandbytes: NormalFloat (QLoRA, https://arxiv.org/abs/2305.14314), a scale for every 64 values."""

    block: int = 64

    package = "bitsandbytes"
    modules = ("bitsandbytes.functional",)

    @property
    def bits(self) -> int:
        return 4

    def suits(self, weight: torch.Tensor) -> bool:
        return weight.numel() % self.block == 0

    def quantize(self, weight: torch.Tensor) -> Payload:
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(weight.detach(), blocksize=self.block, quant_type="nf4")
        return {"packed": packed, "scale": state.absmax}

    def dequantize(self, payload: Payload, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

        packed = payload["packed"]
        code = get_4bit_type("nf4", device=packed.device)
        state = QuantState(payload["scale"], size, code, self.block, "nf4", dtype)
        return dequantize_4bit(packed, state)


FORMATS: Mapping[str, Format] = {
    "int8-torchao": Torchao("Int8WeightOnlyConfig"),
    "float8-torchao": Torchao("Float8WeightOnlyConfig"),
    "int4-torchao": TorchaoInt4(),
    "int8-sdnq": Sdnq("int8"),
    "int8-sdnq-hadamard": Sdnq("int8", hadamard=True),
    "int8-sdnq-svd": Sdnq("int8", svd=True),
    "uint4-sdnq": Sdnq("uint4"),
    "nf4-bitsandbytes": Nf4(),
}
"""By the values of the option `base_model_precision`."""


def format_named(name: str) -> Format:
    """Return the format of a name, with its library imported.

    Imported here and not at the first use, since some libraries draw random numbers when they are imported, which would
    change what a format that is found by random search finds.

    Raises:
        ValueError: there is none, or its library is not installed.
    """
    if name not in FORMATS:
        raise ValueError(f"there is no number format {name!r}; choose one of {', '.join(FORMATS)}")
    found = FORMATS[name]
    if importlib.util.find_spec(found.package) is None:
        raise ValueError(f"{name} needs the package {found.package}: pip install {found.package}")
    for module in found.modules:
        importlib.import_module(module)
    return found
