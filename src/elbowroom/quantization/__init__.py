"""Frozen weights in few bits: 8-bit and 4-bit bases for adapters, by torchao, SDNQ and bitsandbytes."""

from elbowroom.quantization.base import Quantized, quantize_base
from elbowroom.quantization.formats import FORMATS
from elbowroom.quantization.weight import QuantizedWeight

__all__ = ["FORMATS", "Quantized", "QuantizedWeight", "quantize_base"]
