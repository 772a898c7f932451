"""Streamed weights: the same gradients bit for bit, a peak as counted, a model that looks like any other."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import elbowroom
from elbowroom.memory import BlockPlan, Plan, ScopeModules, Treatments
from elbowroom.memory.counters import Counters
from elbowroom.memory.plan import WeightSettings
from elbowroom.memory.weights.arrivals import Arrivals
from elbowroom.memory.weights.homes import HostHomes
from elbowroom.memory.weights.units import find_units
from elbowroom.testing import SimulatedAccelerator, simulated_accelerator
from tests.support.models import BUILDERS, INPUTS, add_lora, step

WIDTH = 32


class Block(nn.Module):
    """Many weights, few activations."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.attn(self.norm(x)))
        return x + self.ff(x)


class Stack(nn.Module):
    def __init__(self, count: int = 4, width: int = WIDTH, block: type[nn.Module] = Block):
        super().__init__()
        torch.manual_seed(0)
        self.start, self.end = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def frozen(model: nn.Module) -> nn.Module:
    """Only the first layer is trained: every block's gradient has to pass through all blocks."""
    model.requires_grad_(False)
    model.start.requires_grad_(True)
    return model


def example(width: int = WIDTH, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> bool:
    return (
        bool(expected)
        and expected.keys() == actual.keys()
        and all(torch.equal(value, actual[name]) for name, value in expected.items())
    )


def streaming(*names: str, treatments: Treatments | None = None, count: int = 4, **weights: Any) -> Plan:
    blocks: tuple[BlockPlan, ...] = tuple(BlockPlan(f"blocks.{place}") for place in range(count))
    if treatments is not None:
        scopes = ScopeModules(("attn",), ("ff",))
        blocks = tuple(
            BlockPlan(block.name, place if treatments.rest == "recompute" else None, treatments, modules=scopes)
            for place, block in enumerate(blocks)
        )
    return Plan(blocks, streamed=names, weights=WeightSettings(**{"store": "pinned", "window": 1, **weights}))


ALL = tuple(f"blocks.{place}" for place in range(4))


@contextmanager
def device(seed: int = 0, capacity: int | None = None) -> Iterator[SimulatedAccelerator]:
    with simulated_accelerator(capacity, seed=seed) as accelerator:
        yield accelerator
        gc.collect()
        assert accelerator.violations == []


def expected_on(accelerator: SimulatedAccelerator, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return gradients(copy.deepcopy(model).to(accelerator.device), x.to(accelerator.device))


# --- the same gradients -----------------------------------------------------------------------------------------------

TREATMENTS = [None, *(Treatments.all(kind) for kind in ("recompute", "offload")),
              Treatments("keep", "recompute", "recompute"), Treatments("offload", "keep", "recompute"),
              Treatments("keep", "recompute", "keep")]  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    family=st.sampled_from(sorted(BUILDERS)),
    lora=st.booleans(),
    layers=st.booleans(),
    chosen=st.sets(st.integers(0, 60)),
    window=st.sampled_from([1, 30_000, 150_000, 400_000, 1 << 30]),
    interval=st.sampled_from([None, 1, 2]),
)
def test_any_choice_of_weights_under_an_adversary(seed, family, lora, layers, chosen, window, interval):
    """Case C01: every number of streamed blocks or layers, every window, kept and recomputed, adapters and full."""
    torch.manual_seed(seed)
    model = BUILDERS[family]()
    if lora:
        add_lora(model)
    controls = elbowroom.Controls(
        gradient_checkpointing=interval is not None, gradient_checkpointing_interval=interval or 1
    )
    plan = elbowroom.schedule(model, controls)
    names = [block.name for block in plan.blocks]
    if layers:
        names = [name for name, module in model.named_modules() if type(module) is nn.Linear and "lora" not in name]
    streamed = tuple(name for place, name in enumerate(names) if place % 61 in chosen or len(chosen) > 12)
    plan = replace(plan, streamed=streamed, weights=WeightSettings("pinned", window=window))
    with device(seed) as accelerator:
        inputs = {
            key: value.to(accelerator.device) if isinstance(value, torch.Tensor) else value
            for key, value in INPUTS[family]().items()
        }
        _, expected = step(copy.deepcopy(model).to(accelerator.device), inputs)
        before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
        with elbowroom.apply(model, plan, device=accelerator.device) as handle:
            for _ in range(3):
                _, found = step(model, inputs)
                for name, gradient in expected.items():
                    other = found[name]
                    assert (gradient is None) == (other is None), name
                    assert gradient is None or torch.equal(gradient.cpu(), other.cpu()), name
            counters = handle.report().counters
            units = find_units(model, streamed, trainable=not lora)[0]
            largest = max((unit.nbytes for unit in units), default=0)
            assert counters.weight_window <= max(window, largest)
            assert bool(counters.weight_bytes_in) == bool(streamed)
            assert bool(counters.gradient_bytes_out) == (bool(streamed) and not lora)
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(before[name], after[name].cpu()) for name in before)
        del found, expected, inputs


@pytest.mark.parametrize("treatments", TREATMENTS, ids=str)
@pytest.mark.parametrize("full", [True, False])
def test_every_treatment(treatments, full):
    with device(3) as accelerator:
        model = Stack() if full else frozen(Stack())
        x = example().to(accelerator.device)
        expected = expected_on(accelerator, model, x)
        with elbowroom.apply(model, streaming(*ALL, treatments=treatments), device=accelerator.device) as handle:
            for _ in range(2):
                assert same(expected, gradients(model, x))
            assert handle.report().counters.weight_bytes_in > 0


def test_more_than_one_forward_and_backward():
    """Case C01: accumulation, retain_graph, several forward passes before one backward pass."""
    with device(5) as accelerator:
        model = Stack()
        x, other = example().to(accelerator.device), example(rows=5).to(accelerator.device)

        def run(model: nn.Module) -> dict[str, torch.Tensor]:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            model(other).square().sum().backward()
            (model(x).square().sum() + model(other).sin().sum()).backward()
            return {name: p.grad.cpu().clone() for name, p in model.named_parameters()}

        expected = run(copy.deepcopy(model).to(accelerator.device))
        for window in (1, 30_000, 1 << 30):
            with elbowroom.apply(model, streaming(*ALL, window=window), device=accelerator.device):
                for _ in range(2):
                    assert same(expected, run(model))
                model.zero_grad()


def test_a_replay_does_not_fetch_twice():
    """What the replay of a block fetched is there when its backward pass comes."""
    with device() as accelerator:
        model, x = frozen(Stack()), example().to(accelerator.device)
        plan = streaming(*ALL, treatments=Treatments.all("recompute"))
        with elbowroom.apply(model, plan, device=accelerator.device) as handle:
            gradients(model, x)
            # Each block once in the forward pass and once in the backward pass; the last one stays in between.
            assert handle.report().counters.weight_fetches == 2 * 4 - 1


def test_autocast_casts_are_not_kept():
    """Autocast makes a copy of each weight in its dtype, which autograd saves: it is made again instead."""
    model = Stack(8)
    x = example()

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = run(model)
    names = tuple(f"blocks.{place}" for place in range(8))
    with elbowroom.apply(model, streaming(*names, count=8, store="disk")):
        assert same(expected, run(model))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        gc.collect()
        matrices = [
            each for each in gc.get_objects()
            if isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16 and each.numel() >= WIDTH * WIDTH
        ]  # fmt: skip
        del loss
    assert not matrices


# --- memory -----------------------------------------------------------------------------------------------------------


def with_gradients(model: nn.Module) -> nn.Module:
    """Gradients are there from the beginning, so that no step makes any that stay."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def accumulate(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=False)
    model(x).square().sum().backward()
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def draw(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x).cpu()


def peak_of(accelerator: SimulatedAccelerator, work: Any, model: nn.Module, x: torch.Tensor) -> tuple[int, Any]:
    """Return by how much the bytes on the device rise, and what the work returns."""
    for _ in range(2):
        work(model, x)  # the order of use is known in the second, of which nothing is left
    gc.collect()
    before = accelerator.bytes_in_use()
    accelerator.reset_peak()
    result = work(model, x)
    return accelerator.peak_bytes() - before, result


@pytest.mark.parametrize("full", [True, False], ids=["full", "frozen"])
@pytest.mark.parametrize("layers", [True, False], ids=["layers", "blocks"])
@pytest.mark.parametrize("work", [accumulate, draw])
def test_the_peak_is_what_is_counted(full, layers, work):
    """Every number of streamed blocks, windows from one layer to the whole model, copies in any order.

    Beside the weights in the window and the gradients that leave, a pass takes what it takes with resident weights: to
    the byte, where all units have one size and nothing but weights is on its way.
    """
    count = 6
    model = with_gradients(Stack(count) if full else frozen(Stack(count)))
    names = [f"blocks.{place}" for place in range(count)]
    if layers:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "." in name]
    weights = sum(parameter.nbytes for name in names for parameter in model.get_submodule(name).parameters())
    with device() as accelerator:
        x = example().to(accelerator.device)
        resident = with_gradients(copy.deepcopy(model).to(accelerator.device))
        in_hand, expected = peak_of(accelerator, work, resident, x)
        del resident
    for streamed in range(0, len(names) + 1, 3 if layers else 1):
        for seed, window in enumerate((1, 5_000, 20_000, 50_000, weights)):
            with device(10 * streamed + seed) as accelerator:
                x = example().to(accelerator.device)
                plan = streaming(*names[len(names) - streamed :], count=count, window=window)
                with elbowroom.apply(model, plan, device=accelerator.device) as handle:
                    peak, found = peak_of(accelerator, work, model, x)
                    assert same(expected, found) if work is accumulate else torch.equal(expected, found)
                    counters = handle.report().counters
                    counted = in_hand + counters.weight_window + counters.gradient_window
                    assert peak <= counted
                    assert peak == counted or layers or counters.gradient_window
                    assert counters.weight_window <= max(window, weights // count)


@pytest.mark.parametrize("full", [True, False], ids=["full", "frozen"])
@pytest.mark.parametrize("layers", [True, False], ids=["layers", "blocks"])
def test_a_model_that_does_not_fit(full, layers):
    """A cap of a quarter of the weights; the peak is what is counted."""
    count, width = 16, 64
    model = with_gradients(Stack(count, width) if full else frozen(Stack(count, width)))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    names = [f"blocks.{place}" for place in range(count)]
    if layers:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "." in name]
    with device() as accelerator:
        x = example(width).to(accelerator.device)
        resident = with_gradients(copy.deepcopy(model).to(accelerator.device))
        in_hand, expected = peak_of(accelerator, accumulate, resident, x)
        del resident
    with device(capacity=weights // 4) as accelerator, pytest.raises(torch.OutOfMemoryError):
        copy.deepcopy(model).to(accelerator.device)
    for seed in range(3):
        with device(seed, capacity=weights // 4) as accelerator:
            x = example(width).to(accelerator.device)
            plan = streaming(*names, count=count, window=weights // 20)
            with elbowroom.apply(model, plan, device=accelerator.device) as handle:
                peak, found = peak_of(accelerator, accumulate, model, x)
                assert same(expected, found)
                counters = handle.report().counters
                assert peak <= in_hand + counters.weight_window + counters.gradient_window


@pytest.mark.parametrize("treatments", [None, Treatments.all("recompute")], ids=str)
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(fails, treatments, tmp_path):
    """On the CPU: torch ends the process when a hook of the simulated device raises in a backward pass."""
    model, x = Stack(), example()
    expected = gradients(model, x)

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    plan = streaming(*ALL, treatments=treatments, store="disk", path=str(tmp_path), window=1 << 30)
    with elbowroom.apply(model, plan):
        for _ in range(2):
            block = model.blocks[1]
            hook = block.register_forward_hook if fails == "forward" else block.register_full_backward_hook
            with hook(fail), pytest.raises(KeyError):
                gradients(model, x)
            assert all(type(parameter) is nn.Parameter for parameter in model.blocks.parameters())
            for _ in range(2):
                assert same(expected, gradients(model, x))


@pytest.mark.parametrize("full", [True, False], ids=["full", "frozen"])
def test_double_backward(full, tmp_path):
    """Exact through frozen weights, refused through trained ones, on which a gradient's gradient depends."""
    model, x = (Stack() if full else frozen(Stack())), example()

    def run() -> list[torch.Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        first = torch.autograd.grad(model(x).square().sum(), trained, create_graph=True)
        return list(torch.autograd.grad(sum(each.square().sum() for each in first), trained))

    expected = run()
    with elbowroom.apply(model, streaming(*ALL, store="disk", path=str(tmp_path))):
        if full:
            with pytest.raises(RuntimeError, match="can't be differentiated again"):
                run()
        else:
            assert all(map(torch.equal, expected, run()))


def test_nothing_stays_on_the_device_between_passes():
    """After a backward pass, or a forward pass of known order, there is room for the optimizer and the decoder."""
    with device() as accelerator:
        model, x = with_gradients(Stack()), example().to(accelerator.device)
        with elbowroom.apply(model, streaming(*ALL, window=1 << 30), device=accelerator.device):
            before = accelerator.bytes_in_use()
            for work in (accumulate, accumulate, draw, draw, accumulate):
                work(model, x)
                gc.collect()
                if work is accumulate:
                    assert accelerator.bytes_in_use() == before
            draw(model, x)
            assert accelerator.bytes_in_use() == before


def test_a_forward_pass_without_enough_memory_leaves_nothing_behind():
    """Wherever memory runs out: the same step, with enough, is as exact as ever."""
    model, x = Stack(), example()
    with device() as accelerator:
        expected = expected_on(accelerator, model, x)
    with device(3) as accelerator, elbowroom.apply(model, streaming(*ALL), device=accelerator.device):
        x = x.to(accelerator.device)
        failures = 0
        for free in range(0, 1 << 20, 3000):
            gc.collect()
            accelerator.capacity = accelerator.bytes_in_use() + free
            try:
                loss = model(x).square().sum()
            except torch.OutOfMemoryError:
                failures += 1
                assert all(type(parameter) is nn.Parameter for parameter in model.blocks.parameters())
            else:
                break
        assert failures > 5
        del loss
        accelerator.capacity = None
        assert same(expected, gradients(model, x))
        model.zero_grad()


def test_copies_do_not_outlive_their_pass():
    """Anything may write into the weights between two passes, unseen by counters of writes: merging an adapter does."""
    with device() as accelerator:
        model, x = frozen(Stack()), example().to(accelerator.device)
        with elbowroom.apply(model, streaming(*ALL, window=1 << 30), device=accelerator.device):
            for _ in range(2):
                with torch.no_grad():
                    before = model(x).cpu()
                    for block in model.blocks:
                        block.attn.weight.data += 0.1
                    after = model(x).cpu()
                assert not torch.equal(before, after)
                changed = copy.deepcopy(model).to(accelerator.device)
                assert torch.equal(changed(x).cpu(), after)


class Chain(nn.Module):
    """Layers that are told apart by what they add."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
        for place, layer in enumerate(self.layers):
            layer.weight.data.fill_(place + 1)


@pytest.mark.parametrize("count", range(1, 13))
@pytest.mark.parametrize("depth", range(1, 7))
def test_each_module_finds_its_own_data(count, depth):
    """Case C02: all numbers of modules and depths; forward, backward, and forward-only passes."""
    with device(count * depth) as accelerator:
        model = Chain(count)
        units, _ = find_units(model, [f"layers.{place}" for place in range(count)], trainable=True)
        homes = HostHomes(accelerator, pinned=True)
        homes.take_in(units)
        counters = Counters()
        arrivals = Arrivals(accelerator, homes, units, depth * units[0].nbytes, counters, lambda: None)

        def use(place: int, *, backward: bool) -> None:
            arrival = arrivals.use(units[place], backward=backward)
            arrival.users += 1
            part = units[place].parts[0].at(arrival.starts[place])
            assert accelerator.view(arrival.flat, part).cpu().item() == place + 1
            arrival.users -= 1

        for _ in range(3):
            for place in range(count):
                use(place, backward=False)
            for place in reversed(range(count)):
                use(place, backward=True)
            with torch.no_grad():
                for place in range(count):
                    use(place, backward=False)
        assert counters.weight_window <= depth * units[0].nbytes
        arrivals.clear()


# --- as if nothing were streamed --------------------------------------------------------------------------------------


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Failing(Exception):
    pass


def test_evaluation_in_the_middle_of_training():
    """Case C03: forward-only passes, other shapes, an error half-way, before the first step and between steps."""
    with device(7) as accelerator:
        x, other = example().to(accelerator.device), example(rows=6).to(accelerator.device)

        def run(model: nn.Module) -> list[float]:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            found = []
            for _ in range(3):
                with torch.no_grad():
                    found.append(model(other).sum().item())
                with torch.inference_mode():
                    found.append(model(x).sum().item())
                hook = model.blocks[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Failing))
                for context in (torch.no_grad(), torch.enable_grad()):
                    with context, pytest.raises(Failing):
                        model(x)
                hook.remove()
                found += train(model, x, optimizer, 2)
            return found

        model = Stack()
        expected = run(copy.deepcopy(model).to(accelerator.device))
        for window in (1, 1 << 30):
            streamed = copy.deepcopy(model)
            with elbowroom.apply(streamed, streaming(*ALL, window=window), device=accelerator.device):
                assert run(streamed) == expected
                homes = [parameter for block in streamed.blocks for parameter in block.parameters()]
                assert all(type(parameter) is nn.Parameter and parameter.device.type == "cpu" for parameter in homes)


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_has_the_models_own_parameters(before):
    """Case C06: built before or after; every parameter changes, and equals the resident run's."""
    model = Stack()
    resident = copy.deepcopy(model)
    x = example()
    expected = train(resident, x, torch.optim.AdamW(resident.parameters()), 3)
    optimizer = torch.optim.AdamW(model.parameters()) if before else None
    identities = [id(parameter) for parameter in model.parameters()]
    with elbowroom.apply(model, streaming(*ALL, store="disk")):
        optimizer = optimizer or torch.optim.AdamW(model.parameters())
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == identities
        assert train(model, x, optimizer, 3) == expected
        assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resident.parameters(), strict=True))


def test_steps_in_the_backward_pass():
    """Each parameter is stepped as soon as its gradient is whole: no full set of gradients exists."""
    model = Stack()
    resident = copy.deepcopy(model)
    x = example()
    expected = train(resident, x, torch.optim.AdamW(resident.parameters()), 3)
    with elbowroom.apply(model, streaming(*ALL, store="disk", treatments=Treatments.all("recompute"))):
        optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}
        most = 0

        def stepped(parameter: torch.Tensor) -> None:
            nonlocal most
            most = max(most, sum(each.grad.nbytes for each in model.parameters() if each.grad is not None))
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(stepped)
        losses = []
        for _ in range(3):
            loss = model(x).square().sum()
            loss.backward()
            losses.append(loss.item())
    assert losses == expected
    assert most <= 2 * max(parameter.nbytes for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resident.parameters(), strict=True))


def test_saving_copying_and_loading_at_any_moment():
    """Case C08: before the first step, between passes, with gradients there, and after an evaluation."""
    with device(1) as accelerator:
        model = Stack()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        x = example().to(accelerator.device)
        with elbowroom.apply(model, streaming(*ALL, window=40_000), device=accelerator.device):
            for moment in ("start", "forward", "backward", "evaluation"):
                if moment == "forward":
                    loss = model(x).square().sum()
                elif moment == "backward":
                    loss.backward()
                elif moment == "evaluation":
                    with torch.no_grad():
                        model(x)
                state = model.state_dict()
                assert list(state) == list(expected)
                assert all(torch.equal(value.cpu(), expected[name]) for name, value in state.items())
                assert all(value.is_contiguous() for value in state.values())
                twin = copy.deepcopy(model)
                twins = dict(twin.named_parameters())
                assert all(torch.equal(twins[name].cpu(), expected[name]) for name in expected)
                assert all(block.forward.__self__ is block for block in twin.blocks)
                twin.blocks[0].attn.weight.data.zero_()
                assert torch.equal(model.blocks[0].attn.weight, expected["blocks.0.attn.weight"])
            changed = {name: value + 1 for name, value in expected.items()}
            model.load_state_dict(changed)
            reference = Stack()
            reference.load_state_dict(changed)
            assert same(expected_on(accelerator, reference, x), gradients(model, x))
            model.zero_grad()
            del loss, state


class Tied(Stack):
    """The last block shares a layer with the first, and the end with the start."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.blocks[3].attn = self.blocks[0].attn
        self.blocks[2].ff[0].weight = self.blocks[1].ff[0].weight
        self.end.weight = self.start.weight


def test_tied_weights_have_one_owner():
    """Case C05: streamed by none of those that share them; still tied after training."""
    model = Tied()
    resident = copy.deepcopy(model)
    x = example()
    units, tied = find_units(model, ALL, trainable=True)
    owners = [id(parameter) for unit in units for parameter in unit.parameters]
    assert (
        len(owners) == len(set(owners)) and len(tied) == 2 * 2 + 2
    )  # the shared layer's two in both, the shared weight
    with elbowroom.apply(model, streaming(*ALL, store="disk")) as handle:
        assert handle.report().counters.weights_tied > 0
        found = train(model, x, torch.optim.AdamW(model.parameters()), 3)
        assert model.blocks[3].attn is model.blocks[0].attn and model.end.weight is model.start.weight
        assert model.blocks[2].ff[0].weight is model.blocks[1].ff[0].weight
        state = model.state_dict()
    assert found == train(resident, x, torch.optim.AdamW(resident.parameters()), 3)
    assert all(torch.equal(value, state[name]) for name, value in resident.state_dict().items())


@pytest.mark.parametrize("late", [True, False])
def test_an_adapter_is_saved_under_the_same_names(late, tmp_path):
    """Case C04: added before or after; the file has every tensor, and none is empty."""
    from peft import get_peft_model_state_dict

    def trained(streamed: bool) -> dict[str, torch.Tensor]:
        with device(9) as accelerator:
            model = BUILDERS["flux"]()
            inputs = {
                key: value.to(accelerator.device) if isinstance(value, torch.Tensor) else value
                for key, value in INPUTS["flux"]().items()
            }
            if not (late and streamed):
                add_lora(model)
            if streamed:
                plan = elbowroom.schedule(model, elbowroom.Controls(weight_streaming="100%", weight_store="pinned"))
                handle = elbowroom.apply(model, plan, device=accelerator.device)
                if late:
                    add_lora(model)
                    step(model, inputs)  # brings the adapter to the device
            else:
                model.to(accelerator.device)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
            for _ in range(2):
                step(model, inputs)
                optimizer.step()
            state = {name: value.cpu().clone() for name, value in get_peft_model_state_dict(model).items()}
            if streamed:
                handle.remove()
            return state

    expected, found = trained(streamed=False), trained(streamed=True)
    assert same(expected, found) and all(value.abs().max() > 0 for value in found.values())


def test_an_adapter_is_merged_while_weights_are_streamed():
    with device(9) as accelerator:
        model = BUILDERS["flux"]()
        add_lora(model)
        inputs = {
            key: value.to(accelerator.device) if isinstance(value, torch.Tensor) else value
            for key, value in INPUTS["flux"]().items()
        }
        plan = elbowroom.schedule(model, elbowroom.Controls(weight_streaming="100%", weight_store="pinned"))
        merged = copy.deepcopy(model)
        merged.fuse_lora()
        with elbowroom.apply(model, plan, device=accelerator.device) as handle, torch.no_grad():
            before = model(**inputs).sample.cpu()
            with handle.at_home():
                model.fuse_lora()
            after = model(**inputs).sample.cpu()
            assert not torch.equal(before, after)
            assert torch.equal(after, merged.to(accelerator.device)(**inputs).sample.cpu())
            with handle.at_home():
                model.unfuse_lora()


# --- what can't be ----------------------------------------------------------------------------------------------------


class WritesIntoWeight(Block):
    def forward(self, x):
        with torch.no_grad():
            self.attn.weight.mul_(1.0)
        return super().forward(x)


def test_a_module_that_writes_into_its_weights_is_refused():
    with device() as accelerator:
        model = Stack(block=WritesIntoWeight)
        with (
            elbowroom.apply(model, streaming(*ALL), device=accelerator.device),
            pytest.raises(RuntimeError, match=r"'blocks.0' writes into its weights"),
        ):
            model(example().to(accelerator.device))


def test_a_weight_that_changes_between_forward_and_backward_is_an_error_as_without_streaming():
    model = frozen(Stack())
    with elbowroom.apply(model, streaming(*ALL, store="disk")):
        loss = model(example()).sum()
        with torch.no_grad():
            model.blocks[1].attn.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"the weight of 'blocks.1' .* modified in place"):
            loss.backward()


def test_moving_or_replacing_what_is_streamed_is_refused():
    with device() as accelerator:
        x = example().to(accelerator.device)
        for change, said in (
            (lambda model: model.to(torch.float64), "moved after `apply`"),
            (
                lambda model: setattr(model.blocks[1].attn, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
                "was replaced",
            ),
        ):
            model = Stack()
            handle = elbowroom.apply(model, streaming(*ALL), device=accelerator.device)
            change(model)
            with pytest.raises(RuntimeError, match=said):
                model(x)
            del handle


@pytest.mark.parametrize("store", ["pinned", "pageable"])
def test_host_memory_is_no_store_for_a_model_on_the_cpu(store):
    with pytest.raises(ValueError, match="weight_store: .* use 'disk'"):
        elbowroom.apply(Stack(), streaming(*ALL, store=store))


def test_names_that_the_model_does_not_have():
    with pytest.raises(ValueError, match=r"does not have: blocks.9"):
        elbowroom.apply(Stack(), streaming("blocks.9", store="disk"))


# --- limits -----------------------------------------------------------------------------------------------------------


class TwoStacks(nn.Module):
    """Two lists of blocks, and layers before, between and after them that belong to neither."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Conv1d(3, 3, 1), nn.LayerNorm(WIDTH))
        self.first = nn.ModuleList(Block() for _ in range(3))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.second = nn.ModuleList(Block() for _ in range(2))
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.head, *self.first, self.middle, *self.second, self.tail):
            x = layer(x)
        return x


BLOCKS = ["first.*", "second.*"]


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward only"])
@pytest.mark.parametrize(
    "controls",
    [{"musubi_blocks_to_swap": count} for count in range(6)]
    + [{"weight_streaming": wanted} for wanted in (*range(6), "0%", "1%", "50%", "100%")]
    + [{"ramtorch": True, "ramtorch_transformer_percent": percent} for percent in (0, 1, 50, 100)],
    ids=str,
)
def test_every_parameter_has_one_owner(controls, train):
    """Case C10: it is the unit's that streams it, or it is on the device; and both passes work at every setting."""
    with device(4) as accelerator:
        model = TwoStacks().train(train)
        x = example().to(accelerator.device)
        with torch.no_grad():
            drawn = copy.deepcopy(model).to(accelerator.device)(x).cpu()
        expected = expected_on(accelerator, model, x)
        plan = elbowroom.schedule(model, elbowroom.Controls(**controls), blocks=BLOCKS)
        streamed = [id(p) for unit in find_units(model, plan.streamed, True)[0] for p in unit.parameters]
        assert len(streamed) == len(set(streamed))
        assert bool(streamed) == (controls[[*controls][-1]] not in (0, "0%"))
        with elbowroom.apply(model, plan, device=accelerator.device):
            for name, parameter in model.named_parameters():
                assert parameter.device.type == ("cpu" if id(parameter) in streamed else "simulated"), name
            with torch.no_grad():
                assert torch.equal(drawn, model(x).cpu())
            if train:
                assert same(expected, gradients(model, x))


@pytest.mark.parametrize("room", [1.0, 2.5, 10.0])
def test_auto_leaves_half_of_the_free_memory(room):
    model = TwoStacks()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with device(capacity=int(room * weights)) as accelerator:
        plan = elbowroom.schedule(model, elbowroom.Controls(weight_streaming="auto"), blocks=BLOCKS)
        assert len(plan.streamed) == (0 if room > 2 else len(plan.blocks) - 2)
        with elbowroom.apply(model, plan, device=accelerator.device):
            assert accelerator.bytes_in_use() <= accelerator.capacity // 2


@pytest.mark.parametrize("option", ["musubi_blocks_to_swap", "weight_streaming"])
@pytest.mark.parametrize("wanted", [6, 7, -1, 0.5, 1.0, True, None])
def test_a_number_of_blocks_that_the_model_does_not_have(option, wanted):
    """Case C10: one line, with what is allowed."""
    allowed = "between 0 and 5, the number of its blocks" if type(wanted) is int and wanted > 0 else "at least 0"
    with pytest.raises(elbowroom.ControlsError, match=rf"^{option}: .*{allowed}.*, but is {wanted}$"):
        elbowroom.schedule(TwoStacks(), elbowroom.Controls(**{option: wanted}), blocks=BLOCKS)
