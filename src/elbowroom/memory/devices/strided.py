"""What devices share whose tensors are ordinary strided tensors of torch."""

from __future__ import annotations

import torch

from elbowroom.memory.devices.base import Device, Geometry


class StridedDevice(Device):
    """Storages and views as torch itself has them."""

    def holds(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # a subclass has its own idea of memory
        return plain and tensor.device == self.device and tensor.layout == torch.strided

    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        return tensor.untyped_storage()

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def witness(self, tensor: torch.Tensor) -> torch.Tensor:
        witness = tensor.detach()  # which shares the count of writes
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return witness

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def view(self, flat: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        return strided_view(flat, geometry)


def strided_view(flat: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Return a view of bytes as a tensor. It counts writes together with `flat`, so that a write is noticed there."""
    whole = flat.nbytes // geometry.dtype.itemsize * geometry.dtype.itemsize
    tensor = flat[:whole].view(geometry.dtype).as_strided(geometry.size, geometry.stride, geometry.offset)
    if geometry.conjugate:
        tensor = tensor.conj()
    return torch.ops.aten._neg_view(tensor) if geometry.negative else tensor
