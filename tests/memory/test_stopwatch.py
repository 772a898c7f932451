"""How long copies take, and how much of that the computation stands still for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.memory import OffloadSettings, Treatments
from elbowroom.memory.devices import accelerator
from elbowroom.memory.devices.accelerator import StreamEvent
from elbowroom.memory.devices.base import CopySeconds
from elbowroom.memory.devices.cpu import FutureEvent
from elbowroom.memory.devices.stopwatch import Stopwatch
from elbowroom.testing import simulated_accelerator
from tests.memory.test_streaming import ALL, Stack, example, gradients, streaming


def test_a_copy_that_has_ended_hides_behind_the_computation():
    with ThreadPoolExecutor(1) as threads:
        event = FutureEvent(threads, threading.Event().wait, 0.01)
        assert event.seconds() is None
        event.wait()
        assert event.seconds() is None  # nobody has held the computation for it yet
        event.hold_compute()
        seconds = event.seconds()
        assert seconds is not None
        assert seconds.transfer >= 0.01
        assert seconds.exposed == 0


def test_a_copy_that_is_waited_for_is_exposed():
    with ThreadPoolExecutor(1) as threads:
        begun = threading.Event()

        def work() -> None:
            begun.set()
            threading.Event().wait(0.02)

        event = FutureEvent(threads, work)
        begun.wait()
        event.hold_compute()
        seconds = event.seconds()
        assert seconds is not None
        assert 0 < seconds.exposed <= seconds.transfer
        event.hold_compute()
        assert event.seconds() == seconds  # the second time, nothing stands still


def test_a_copy_that_failed_has_no_time():
    def work() -> None:
        raise OSError(5, "gone")

    seen: list[CopySeconds] = []
    with ThreadPoolExecutor(1) as threads:
        event = FutureEvent(threads, work)
        with pytest.raises(OSError, match="gone"):
            Stopwatch(seen.append).hold_compute(event)
    assert seen == []


@dataclass
class Recorded:
    """Stands for an event of a stream that happened, or will, at a known time in milliseconds."""

    at: float
    happened: bool = True

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, end: Recorded) -> float:
        return end.at - self.at


@dataclass
class Computing:
    """Stands for the stream that computes."""

    now: float
    waits_for: list[Any] = field(default_factory=list)

    def wait_event(self, event: Any) -> None:
        self.waits_for.append(event)


@pytest.mark.parametrize(
    ("held", "exposed"),
    [(5.0, 0.010), (12.0, 0.008), (25.0, 0.0)],
    ids=["asked for when it was needed", "begun a little early", "had ended before"],
)
def test_streams(held, exposed, monkeypatch):
    computing = Computing(held)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: computing)
    monkeypatch.setattr(accelerator, "_recorded_on", lambda stream, _: Recorded(stream.now))
    end = Recorded(20.0, happened=False)
    event = StreamEvent(Recorded(10.0), end, torch.device("cuda"))  # type: ignore[arg-type]
    seen: list[CopySeconds] = []
    stopwatch = Stopwatch(seen.append)
    stopwatch.hold_compute(event)
    assert computing.waits_for == [end]
    assert seen == []
    end.happened = True
    stopwatch.look()
    stopwatch.look()
    assert seen == [CopySeconds(transfer=pytest.approx(0.010), exposed=pytest.approx(exposed))]


def test_a_report_says_how_much_was_hidden(tmp_path):
    model = Stack()
    with elbowroom.apply(model, streaming(*ALL, store="disk", path=str(tmp_path))) as handle:
        gradients(model, example())
        report = handle.report()
    assert 0 <= report.counters.weight_wait_seconds <= report.counters.weight_copy_seconds
    assert report.counters.weight_copy_seconds > 0
    assert "% hidden; on the device at most" in str(report)


def test_offloading_counts_too(tmp_path):
    model = Stack()
    plan = replace(
        streaming(treatments=Treatments.all("offload")),
        offload=OffloadSettings(store="disk", path=str(tmp_path), smallest=1),
    )
    with elbowroom.apply(model, plan) as handle:
        gradients(model, example())
        report = handle.report()
    assert report.counters.records > 0
    assert 0 <= report.counters.wait_seconds <= report.counters.copy_seconds
    assert report.counters.copy_seconds > 0
    assert "% hidden; on their way at most" in str(report)


def test_without_a_clock_nothing_is_said():
    model = Stack()
    with simulated_accelerator() as accelerator:
        with elbowroom.apply(model, streaming(*ALL), device=accelerator.device) as handle:
            gradients(model, example().to(accelerator.device))
            report = handle.report()
        assert report.counters.weight_bytes_in > 0
        assert "hidden" not in str(report)
