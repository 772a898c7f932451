"""Moving all bytes of a tensor to and from a file."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def write_all(file: int, source: torch.Tensor, offset: int) -> None:
    """Write the bytes of a uint8 tensor of the host at an offset.

    Args:
        file: descriptor.
        source: of one dimension.
        offset: in bytes.

    Raises:
        OSError: they can't be written.
    """
    _whole(lambda view, at: os.pwrite(file, view, at), source, offset)


def read_all(file: int, target: torch.Tensor, offset: int) -> None:
    """Fill a uint8 tensor of the host from an offset on; the other half of `write_all`.

    Raises:
        OSError: they can't be read, or the file ends before.
    """
    _whole(lambda view, at: os.preadv(file, [view], at), target, offset)


def _whole(step: Callable[[memoryview, int], int], tensor: torch.Tensor, offset: int) -> None:
    """Move all bytes of a tensor: the system may do less at a time than it is asked for."""
    view: memoryview = tensor.numpy().data
    position = 0
    while position < len(view):
        moved = step(view[position:], offset + position)
        if moved == 0:
            raise OSError(5, "the file is shorter than what was written to it")
        position += moved
