"""What a store of offloaded bytes offers, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from elbowroom.memory.devices.base import Event


class StoreError(RuntimeError):
    """Bytes could not be written to a store; whoever still has them must keep them."""


class Stored:
    """Bytes in a store.

    Attributes:
        nbytes: how many.
        saved: happens when the bytes have left their source, whose memory may then be used for something else.
    """

    nbytes: int
    saved: Event


class Store(ABC):
    """A place for bytes that leave a device and come back, last in, first out as a rule.

    Methods may be called from several threads.

    Attributes:
        trouble: why there is less room than its limit promises, in words; None while nothing is wrong.
    """

    trouble: str | None = None

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is made of, where it is, and the most that it may take; for people."""

    @property
    @abstractmethod
    def present(self) -> int:
        """Bytes in the store now."""

    @property
    @abstractmethod
    def peak(self) -> int:
        """Most bytes that were in it at one time, with what alignment adds."""

    @property
    @abstractmethod
    def allocated(self) -> int:
        """Bytes of host memory or disk that it has reserved."""

    @abstractmethod
    def save(self, source: torch.Tensor) -> Stored | None:
        """Begin to copy `source` (`Device.flat`, or part of it) into the store; the caller holds it until `saved`.

        Returns:
            None if there is no room.
        """

    @abstractmethod
    def load(self, stored: Stored, target: torch.Tensor) -> Event:
        """Begin to copy the bytes back into `target` (`Device.empty`), as soon as they are in the store.

        May be called again for the same bytes. Happens when `target` holds them. The caller keeps `target` alive.
        """

    @abstractmethod
    def free(self, stored: Stored) -> None:
        """Give the room back; it is used anew only after copies from it have ended. Safe in a destructor."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way and release everything. What is still stored is lost."""
