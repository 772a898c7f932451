"""The probe that decides whether to prefetch: both ways are timed, and training doesn't notice."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.memory import BlockPlan, OffloadSettings, Plan, Treatments
from elbowroom.memory.counters import Counters
from elbowroom.memory.forecast import REMEMBERED, Forecast, Orders
from elbowroom.memory.offload.autotune import Measured, PrefetchDecision, probe_prefetch
from elbowroom.memory.offload.host_store import HostStore
from elbowroom.memory.offload.offloader import Offloader
from elbowroom.testing import simulated_accelerator


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


@pytest.fixture
def at_work() -> Iterator[tuple[nn.Module, elbowroom.Handle, torch.Tensor]]:
    with simulated_accelerator(seed=1) as accelerator:
        model = nn.Sequential(Block(), Block(), Block()).to(accelerator.device)
        blocks = tuple(BlockPlan(str(index), treatments=Treatments.all("offload")) for index in range(3))
        x = torch.randn(8, 16).to(accelerator.device)
        with elbowroom.apply(model, Plan(blocks, OffloadSettings(smallest=0, window=2048))) as handle:
            model(x).sum().backward()
            yield model, handle, x
        gc.collect()
        assert accelerator.violations == []


def clock(*seconds: float):
    """A clock that shows these times, one after the other."""
    times = iter(seconds)
    return lambda: next(times)


@pytest.mark.parametrize(
    ("times", "budget", "prefetch", "reason"),
    [
        ((0, 2, 10, 11), None, True, "prefetching is faster: 1.000 s prefetched, 2.000 s on demand"),
        ((0, 2, 10, 11.99), None, False, "prefetching is not faster: 1.990 s prefetched, 2.000 s on demand"),
        ((0, 2, 10, 13), None, False, "not faster"),
        ((0, 2, 10, 11), 1, False, "prefetching would take"),
    ],
)
def test_the_faster_way_within_the_budget_is_chosen(at_work, times, budget, prefetch, reason):
    model, handle, x = at_work
    ways: list[bool] = []

    def step() -> None:
        ways.append(handle.offloaders[0].prefetch)
        model(x).sum().backward()

    before = handle.report().counters.prefetch_hits
    decision = probe_prefetch(step, handle.offloaders, model.parameters(), budget=budget, clock=clock(*times))
    assert ways == [False, True] and decision.prefetch is prefetch and reason in decision.reason
    assert handle.report().counters.prefetch_hits > before  # the second step was prefetched, for the order was known
    assert PrefetchDecision.from_dict(decision.to_dict()) == decision


def test_training_does_not_notice(at_work):
    model, handle, x = at_work
    torch.manual_seed(3)
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.cpu().clone() for gradient in gradients]
    state = torch.get_rng_state()
    seen: list[torch.Tensor] = []

    def step() -> None:
        loss = model(x).sum()
        seen.append(loss.detach().cpu())
        loss.backward()

    probe_prefetch(step, handle.offloaders, model.parameters())
    assert torch.equal(seen[0], seen[1]), "the two steps drew other dropout masks"
    assert torch.equal(state, torch.get_rng_state())
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient and torch.equal(gradient.cpu(), value)
    assert handle.prefetch


def test_buffers_are_put_back(at_work):
    model, handle, x = at_work
    statistics = nn.BatchNorm1d(4)

    def step() -> None:
        statistics(torch.randn(8, 4))
        model(x).sum().backward()

    before = [buffer.clone() for buffer in statistics.buffers()]
    probe_prefetch(step, handle.offloaders, model.parameters(), buffers=statistics.buffers())
    assert all(map(torch.equal, before, statistics.buffers()))


def test_an_error_in_the_prefetched_step_means_on_demand(at_work):
    model, handle, x = at_work

    def step() -> None:
        if handle.offloaders[0].prefetch:
            raise torch.OutOfMemoryError("too much")
        model(x).sum().backward()

    decision = probe_prefetch(step, handle.offloaders, model.parameters())
    assert not decision.prefetch and decision.reason == "the prefetched step failed: too much"
    assert decision.prefetched is None and PrefetchDecision.from_dict(decision.to_dict()) == decision


def test_an_error_on_demand_is_the_callers(at_work):
    model, handle, _ = at_work
    gradients = [parameter.grad for parameter in model.parameters()]

    def step() -> None:
        raise KeyError("the batch is broken")

    with pytest.raises(KeyError):
        probe_prefetch(step, handle.offloaders, model.parameters())
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))


def test_orders_are_remembered_for_each_kind_of_pass():
    orders = Orders()
    orders.learn((1, 2, 3), [2, 1, 0])
    orders.learn((1, 2), [1, 0])
    assert (
        orders.known(
            (
                1,
                2,
                3,
            )
        )
        == (2, 1, 0)
        and orders.known(
            (
                1,
                2,
            )
        )
        == (1, 0)
        and orders.known((1,)) is None
    )
    for size in range(REMEMBERED):
        orders.learn((size, 9), [0])
    assert (
        orders.known(
            (
                1,
                2,
                3,
            )
        )
        is None
    ), "the oldest is forgotten"


def test_an_order_that_changes_leaves_nothing_in_the_window():
    """What was reloaded for the order before is given up, and the window is free for what comes."""
    with simulated_accelerator(seed=1) as accelerator:
        store = HostStore(accelerator, pinned=True, limit=1 << 20)
        counters = Counters()
        offloader = Offloader(accelerator, store, OffloadSettings(smallest=0, window=2 * 64, prefetch=True), counters)

        def packed() -> list:
            return [
                offloader.pack(
                    torch.ones(16, device=accelerator.device, requires_grad=True) * place, "rest", "the test"
                )
                for place in range(8)
            ]

        for order in (range(7, -1, -1), (7, 2, 1, 0)):
            records = packed()
            for place in order:
                assert records[place].unpack().cpu().tolist() == [float(place)] * 16
        assert offloader._bytes_ahead <= 2 * 64
        before = counters.prefetch_hits
        records = packed()
        for place in (7, 2, 1, 0):
            records[place].unpack()
        assert counters.prefetch_hits > before
        del records
        gc.collect()
        store.close()
        assert accelerator.violations == []


def test_a_forecast_goes_on_from_what_was_asked_for():
    forecast = Forecast((4, 3, 2, 1))
    forecast.asked_for(4)
    assert list(forecast.upcoming()) == [3, 2, 1]
    forecast.asked_for(2)  # out of turn: 3 is not awaited any more
    assert list(forecast.upcoming()) == [1]
    forecast.asked_for(3)
    forecast.asked_for(7)  # not in the order at all
    assert list(forecast.upcoming()) == [1]


def test_decisions_read_like_what_was_measured():
    decision = PrefetchDecision(True, "faster", Measured(2.0, 10), Measured(1.0, 12))
    assert decision.to_dict()["on_demand"] == {"seconds": 2.0, "peak": 10}
