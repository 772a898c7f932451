"""Weights that are mapped from safetensors files: a model larger than memory, loaded in no time.

A mapped weight is an ordinary tensor whose pages come from the file when somebody reads them. Streaming reads the file
itself, so that these pages are never touched, and the process stays small.

Source: the description of the format at https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from elbowroom.memory.offload.file_bytes import read_all

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MOST_HEADER = 100 << 20
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61


class OpenFile:
    """A file that is open for reading, until nobody has it any more."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class FileBytes:
    """Where in a file the bytes of a tensor are.

    Attributes:
        file: keeps the file open.
        offset: first byte.
        nbytes: how many.
        address: where they are mapped to; 0 if they are not.
    """

    file: OpenFile
    offset: int
    nbytes: int
    address: int = 0


def mapped_from(parameter: torch.Tensor) -> FileBytes | None:
    """Return where a parameter was mapped from by `map_weights`; None if it lies elsewhere."""
    place: FileBytes | None = getattr(parameter, "_mapped_from", None)
    return place if place is not None and place.address == parameter.data_ptr() else None


def read_mapped(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter: read from its file if it is mapped, which leaves the mapping's pages alone."""
    place = mapped_from(parameter)
    if place is None or written_to([parameter])[0]:
        return parameter.detach()
    values = torch.empty(parameter.shape, dtype=parameter.dtype)
    read_all(place.file.descriptor, values.view(-1).view(torch.uint8), place.offset)
    return values


def forget_mapping(parameters: Iterable[Any]) -> None:
    """Note that parameters will not lie in their file any more."""
    for parameter in parameters:
        if hasattr(parameter, "_mapped_from"):
            del parameter._mapped_from


def map_weights(model: nn.Module, files: Iterable[Path]) -> list[str]:
    """Let the parameters and buffers of a model on the meta device lie in safetensors files.

    Parameters need no gradient afterwards.

    Args:
        model: with the dtypes that the files have.
        files: all files of the model.

    Returns:
        Names of parameters and persistent buffers that no file has.

    Raises:
        ValueError: a file is no safetensors file, or has tensors that the model does not have or has otherwise.
    """
    missing = set(model.state_dict())
    for path in files:
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        opened = OpenFile(path)
        for name, dtype, shape, start, stop in _entries(path):
            owner, attribute = _owner(model, name, path)
            present = owner._parameters.get(attribute, owner._buffers.get(attribute))
            if present is None or present.dtype != dtype or tuple(present.shape) != shape:
                has = "no such tensor" if present is None else f"{present.dtype} {tuple(present.shape)}"
                raise ValueError(f"{path}: {name} is {dtype} {shape}, but the model has {has}")
            bytes_ = whole[start:stop]
            aligned = start % dtype.itemsize == 0
            tensor = (bytes_ if aligned else bytes_.clone()).view(dtype).view(shape)
            if attribute in owner._buffers:
                owner._buffers[attribute] = tensor.clone()
            else:
                parameter: Any = nn.Parameter(tensor, requires_grad=False)
                if aligned:
                    parameter._mapped_from = FileBytes(opened, start, stop - start, parameter.data_ptr())
                owner._parameters[attribute] = parameter
            missing.discard(name)
    return sorted(missing)


def written_to(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Return for each mapped tensor whether somebody has written into it, so that its file has other bytes.

    The pages of such a tensor have been copied, and are not the file's any more. Source: the kernel's documentation of
    /proc/pid/pagemap. Where that is missing (not Linux), the answer is no.
    """
    tensors = list(tensors)
    if sys.platform != "linux":
        return [False] * len(tensors)
    page = mmap.PAGESIZE
    found = []
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for tensor in tensors:
            first = tensor.data_ptr() // page
            count = (tensor.data_ptr() + tensor.nbytes - 1) // page + 1 - first
            flags = numpy.frombuffer(os.pread(file.fileno(), 8 * count, 8 * first), dtype=numpy.uint64)
            somewhere = flags & numpy.uint64(_PRESENT | _SWAPPED) != 0  # pages of the file are dropped, never swapped
            own = somewhere & (flags & numpy.uint64(_OF_FILE) == 0)
            found.append(bool(own.any()))
    return found


def _entries(path: Path) -> list[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
    """Return name, dtype, shape, and first and last byte of each tensor of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is cut short")
        header = file.read(length)
    entries = []
    with suppress(UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
            elements = 1
            for extent in shape:
                elements *= extent
            if not 8 + length <= start <= stop <= size or stop - start != elements * dtype.itemsize:
                raise ValueError(name)
            entries.append((name, dtype, shape, start, stop))
        return entries
    raise ValueError(f"{path} is not a safetensors file, or is damaged")


def _owner(model: nn.Module, name: str, path: Path) -> tuple[nn.Module, str]:
    prefix, _, attribute = name.rpartition(".")
    try:
        return model.get_submodule(prefix), attribute
    except AttributeError:
        raise ValueError(f"{path} has {name}, which {type(model).__name__} does not have") from None
