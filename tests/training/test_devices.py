"""The device that a user names is the one that torch works on."""

from __future__ import annotations

import pytest
import torch

from elbowroom.training import loop
from elbowroom.training.devices import device_named, make_current


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two accelerators; the list gets the number of each that is made the current one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("name", "chosen"), [("cuda:1", [1]), ("cuda:0", [0]), ("cuda", []), ("auto", []), ("cpu", [])]
)
def test_a_numbered_device_becomes_the_current_one(two_cards: list[int], name: str, chosen: list[int]) -> None:
    make_current(device_named(name))
    assert two_cards == chosen


def test_a_number_that_no_device_has_is_refused(two_cards: list[int]) -> None:
    with pytest.raises(ValueError, match="there are only 2 of them"):
        device_named("cuda:2")


def test_training_makes_the_device_the_current_one_before_anything_else(two_cards: list[int]) -> None:
    """Random state, memory figures and the cache of memory are those of the current device."""

    class Stopped(Exception):
        pass

    class Job:
        resolved = type("Resolved", (), {"options": None})
        device = torch.device("cuda:1")

        @property
        def run(self):
            raise Stopped

    with pytest.raises(Stopped):
        loop.train(Job(), None)  # type: ignore[arg-type]
    assert two_cards == [1]
