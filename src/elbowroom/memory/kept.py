"""A saved tensor that stays where it is, with the check that autograd itself makes where there are no hooks."""

from __future__ import annotations

import torch

from elbowroom.memory.module_state import version_of


class Kept:
    """Packs a tensor as itself. Autograd doesn't check for writes in place where hooks are active, so this does.

    Attributes:
        where: what saved it, for messages.
    """

    __slots__ = ("_tensor", "_version", "where")

    def __init__(self, tensor: torch.Tensor, where: str):
        # Detached: the saved tensor may be the output of the very node that saves it, and would keep itself alive.
        self._tensor = tensor.detach()
        self._version = version_of(tensor)
        self.where = where

    @property
    def intact(self) -> bool:
        return self._version is None or version_of(self._tensor) == self._version

    def unpack(self) -> torch.Tensor:
        check_version(version_of(self._tensor), self._version, self.where)
        return self._tensor


def keep(where: str, tensor: torch.Tensor) -> Kept:
    """Pack a tensor as itself."""
    return Kept(tensor, where)


def check_version(present: int | None, saved: int | None, where: str) -> None:
    """Raise `RuntimeError` if a saved tensor was written to since it was saved. None: it counts no writes."""
    if saved is not None and present != saved:
        raise RuntimeError(
            f"a tensor that {where} saved for the backward pass was modified in place after it was saved: it is at "
            f"version {present}, but {saved} is needed"
        )
