"""Blocks and scopes that do more than compute what they return: exact, kept with a warning, or refused by name."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.memory import BlockPlan, OffloadSettings, Plan, ScopeModules, Treatments
from elbowroom.memory.errors import ReplayError
from elbowroom.testing import simulated_accelerator

WIDTH = 8
SCOPES = ScopeModules(("attn",), ("ff",))
APART = [
    Treatments("keep", "recompute", "recompute"),
    Treatments("recompute", "keep", "recompute"),
    Treatments("keep", "keep", "recompute"),
    Treatments("offload", "offload", "recompute"),
    Treatments("offload", "recompute", "recompute"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        x = x + torch.tanh(self.attn(self.norm(x)))
        return x + self.ff(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], loop: Any = None):
        super().__init__()
        self.blocks, self.loop = nn.ModuleList(blocks), loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.loop is not None:
            return self.loop(self.blocks, x)
        for block in self.blocks:
            x = block(x)
        return x


def seeded(kind: type[nn.Module], count: int = 2, loop: Any = None) -> Model:
    torch.manual_seed(0)
    return Model([kind() for _ in range(count)], loop)


def plan_of(
    count: int, treatments: Treatments, segment: int = 1, scopes: ScopeModules = SCOPES, **settings: Any
) -> Plan:
    numbers = [place // segment if treatments.rest == "recompute" else None for place in range(count)]
    blocks = [BlockPlan(f"blocks.{place}", number, treatments, modules=scopes) for place, number in enumerate(numbers)]
    return Plan(tuple(blocks), OffloadSettings(**{"smallest": 0, **settings}))


def run(model: nn.Module, rows: int = 8) -> list[torch.Tensor]:
    """Gradients of the input and of every parameter that has one."""
    model.zero_grad()
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(3)
    model(x).square().sum().backward()
    return [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]


def same(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


def assert_exact(model: nn.Module, plan: Plan) -> elbowroom.memory.Handle:
    expected = run(model)
    with elbowroom.apply(model, plan) as handle:
        for _ in range(2):
            assert same(expected, run(model))
    return handle


# --- what a scope does besides returning something --------------------------------------------------------------------


class WritesIntoArgument(Block):
    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, *_):
        return x + self.ff(self.attn(x))


class RemembersTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x)
        self.last = y.exp()
        return y


class ReadsAttribute(Block):
    def __init__(self):
        super().__init__()
        self.attn = RemembersTensor()

    def forward(self, x, *_):
        y = self.attn(self.norm(x))
        return x + self.ff(y) * self.attn.last.sin()


class AppendsToList(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, collected):
        y = self.inner(x)
        collected.append(y.exp())
        return y


class ReadsList(Block):
    def __init__(self):
        super().__init__()
        self.attn = AppendsToList()

    def forward(self, x, *_):
        collected = []
        y = self.attn(self.norm(x), collected)
        return x + self.ff(y) * collected[0].sin()


class Counts(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class ReadsCounter(Block):
    def __init__(self):
        super().__init__()
        self.attn = Counts()

    def forward(self, x, *_):
        self.attn.calls = 0
        y = self.attn(self.norm(x))
        return x + self.ff(y) * self.attn.calls


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class ReturnsObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Output(torch.tanh(self.inner(x)))


class TakesObject(Block):
    def __init__(self):
        super().__init__()
        self.attn = ReturnsObject()

    def forward(self, x, *_):
        return x + self.ff(self.attn(x).hidden)


def twice(blocks, x):
    for block in (*blocks, *blocks):
        x = block(x)
    return x


@pytest.mark.filterwarnings("ignore:block .* can't be run again")
@pytest.mark.parametrize("treatments", APART, ids=str)
@pytest.mark.parametrize("loop", [None, twice])
@pytest.mark.parametrize(
    "kind", [WritesIntoArgument, ReadsAttribute, ReadsList, ReadsCounter, TakesObject], ids=lambda kind: kind.__name__
)
def test_a_scope_that_does_more_than_return(kind, loop, treatments, tmp_path):
    assert_exact(seeded(kind, loop=loop), plan_of(2, treatments, path=str(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (WritesIntoArgument, "has the feed-forward 'ff' of block 'blocks.0' write into its argument"),
        (ReadsAttribute, "has the attention 'attn' of block 'blocks.0' change its attribute 'last'"),
        (ReadsList, "change a list or dict that it was given"),
        (TakesObject, "return a Output that holds tensors"),
    ],
)
def test_the_warning_names_what_the_scope_does(kind, said):
    model = seeded(kind)
    with (
        elbowroom.apply(model, plan_of(2, Treatments("keep", "keep", "recompute"))) as handle,
        pytest.warns(UserWarning, match=said),
    ):
        run(model)
    assert handle.report().counters.blocks_kept == 2


def test_results_that_can_not_be_looked_into_leak_nothing():
    model = seeded(TakesObject)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    with elbowroom.apply(model, plan_of(2, Treatments("keep", "recompute", "recompute"))):
        with pytest.warns(UserWarning):
            model(torch.randn(5, WIDTH))
            before = tensors()
            for _ in range(5):
                model(torch.randn(5, WIDTH))  # dropped without a backward pass
        assert tensors() <= before


# --- what happens between blocks, and to their arguments --------------------------------------------------------------


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.one(x)) * self.other(x)


def cut_off(blocks, x):
    a = blocks[0](x)
    kept = a * 1
    a.detach_()
    return blocks[1](a) + kept


def test_an_output_that_is_cut_off_from_its_history_is_no_link():
    assert_exact(seeded(Product, loop=cut_off), plan_of(2, Treatments.all("recompute"), 2, ScopeModules()))


class State:
    step = 0


class TakesState(Block):
    def forward(self, x, state=None, *_):
        state.step += 1
        return super().forward(x * state.step)


def with_state(blocks, x):
    state = State()
    for block in blocks:
        x = block(x, state)
    return x


def test_an_argument_that_a_block_changes():
    model = seeded(TakesState, loop=with_state)
    with pytest.warns(UserWarning, match="block 'blocks.0' changes its argument, a State, so it can't be run again"):
        assert_exact(model, plan_of(2, Treatments.all("recompute")))


class ReadsState(Block):
    def forward(self, x, state=None, *_):
        return super().forward(x * state.step)


def changed_between(blocks, x):
    state = State()
    for block in blocks:
        state.step += 1
        x = block(x, state)
    return x


def test_an_argument_that_changes_between_the_passes_is_refused():
    model = seeded(ReadsState, loop=changed_between)
    with (
        elbowroom.apply(model, plan_of(2, Treatments.all("recompute"))),
        pytest.raises(ReplayError, match="an argument of block 'blocks.0', a State, was changed between"),
    ):
        run(model)


class RunsBackward(Block):
    def forward(self, x, given=None, *_):
        (force,) = torch.autograd.grad(torch.tanh(self.attn(x)).sum(), given, create_graph=True)
        return x + self.ff(x) + force


def test_a_backward_pass_inside_a_block_that_goes_through_an_earlier_one():
    torch.manual_seed(0)
    model = Model([Block(), RunsBackward()], lambda blocks, x: blocks[1](blocks[0](x), x))
    with pytest.warns(UserWarning, match="block 'blocks.1' runs a backward pass inside its forward pass"):
        assert_exact(model, plan_of(2, Treatments.all("recompute"), 2))


class Wrapper:
    """A user's own wrapper of a forward, with attributes that have the names of ours."""

    def __init__(self, module: nn.Module):
        self.original, self.module, self.name = module.forward, module, "wrapper"

    def __call__(self, *args):
        return self.original(*args) * 2


def test_a_forward_that_was_wrapped_before():
    model = seeded(Block)
    model.blocks[0].forward = Wrapper(model.blocks[0])
    assert_exact(model, plan_of(2, Treatments.all("recompute")))


@pytest.mark.parametrize("inner", APART, ids=str)
def test_plans_inside_plans(inner, tmp_path):
    """A second plan on modules inside the blocks of the first."""
    model = seeded(Block)
    expected = run(model)
    outer = Plan(tuple(BlockPlan(f"blocks.{place}.ff", None) for place in range(2)))
    recomputed = Plan(tuple(BlockPlan(f"blocks.{p}.ff", p, Treatments.all("recompute")) for p in range(2)))
    for second in (outer, recomputed):
        with elbowroom.apply(model, plan_of(2, inner, path=str(tmp_path))), elbowroom.apply(model, second):
            assert same(expected, run(model))
    assert same(expected, run(model))


# --- memory -----------------------------------------------------------------------------------------------------------


class Narrow(Block):
    def forward(self, x, *_):
        x = x + self.attn(self.norm(x)).tanh()
        return x + self.ff(self.norm(x)).tanh()


def test_what_an_offloaded_scope_returned_leaves_the_device():
    with simulated_accelerator(seed=1) as accelerator:
        model = seeded(Narrow, 8).to(accelerator.device)
        x = torch.randn(256, WIDTH).to(accelerator.device)
        plan = plan_of(8, Treatments("offload", "offload", "recompute"), window=1)
        plan = dataclasses.replace(
            plan, blocks=tuple(dataclasses.replace(block, boundary="offload") for block in plan.blocks)
        )
        with elbowroom.apply(model, plan) as handle:
            y = model(x)
            before = accelerator.bytes_in_use()
            z = model(x)
            for offloader in handle.offloaders:
                offloader._make_room(1 << 60)
            # The result, and what is too small or not the block's own.
            assert accelerator.bytes_in_use() - before <= 2 * x.nbytes
            del y, z
        assert accelerator.violations == []


@pytest.mark.parametrize("treatments", [Treatments.all("offload"), Treatments("offload", "keep", "recompute")], ids=str)
def test_nothing_stays_on_the_device_between_steps(treatments):
    with simulated_accelerator(seed=1) as accelerator:
        model = seeded(Block, 4).to(accelerator.device)
        x = torch.randn(512, WIDTH).to(accelerator.device)
        model.requires_grad_(False)
        model.blocks[0].attn.requires_grad_(True)
        (model(x).square().sum()).backward()
        with elbowroom.apply(model, plan_of(4, treatments)) as handle:
            for drop in (True, False, True):
                model.zero_grad()
                gc.collect()
                before = accelerator.bytes_in_use()
                loss = model(x).square().sum()
                if not drop:
                    loss.backward()
                    model.zero_grad()
                del loss
                gc.collect()
                handle.settle()
                assert accelerator.bytes_in_use() <= before
                assert all(offloader.store.present == 0 for offloader in handle.offloaders)
        assert accelerator.violations == []


# --- taking a plan off ------------------------------------------------------------------------------------------------


def test_a_plan_that_can_not_be_taken_off_stays_on_as_a_whole():
    model = seeded(Block)
    expected = run(model)
    handle = elbowroom.apply(model, plan_of(2, Treatments("keep", "recompute", "recompute")))
    attention = model.blocks[1].attn
    ours = attention.forward
    attention.forward = lambda *args: ours(*args)
    with pytest.raises(RuntimeError, match="the forward of the attention 'attn' of block 'blocks.1' was replaced"):
        handle.remove()
    assert same(expected, run(model))
    attention.forward = ours
    handle.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_blocks_that_share_a_module():
    model = seeded(Block)
    model.blocks[1].ff = model.blocks[0].ff
    assert_exact(model, elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True), blocks=["blocks.*"]))
    assert_exact(model, plan_of(2, Treatments("keep", "recompute", "recompute")))
    with pytest.raises(RuntimeError, match="'ff' of block 'blocks.1' is also part of block 'blocks.0'"):
        elbowroom.apply(model, plan_of(2, Treatments("recompute", "keep", "recompute")))


def test_a_store_that_makes_no_sense_is_refused_by_apply(tmp_path):
    offloaded = Treatments.all("offload")
    model = seeded(Block)
    with pytest.raises(ValueError, match="activation_store: 'pinned' is host memory"):
        elbowroom.apply(model, plan_of(2, offloaded, store="pinned"))
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(OSError):
        elbowroom.apply(model, plan_of(2, offloaded, path=str(occupied)))
    assert not any("forward" in module.__dict__ for module in model.modules())


class LibraryAttention(Block):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x, *_):
        return x + self.ff(self.attn(x[None], x[None], x[None], need_weights=False)[0][0])


def test_a_kernel_that_is_out_of_sight_is_refused():
    model = seeded(LibraryAttention)
    plan = plan_of(2, Treatments.all("recompute"))
    plan = dataclasses.replace(
        plan, blocks=tuple(dataclasses.replace(block, keep_kernel=True) for block in plan.blocks)
    )
    with elbowroom.apply(model, plan), pytest.raises(RuntimeError, match="keep_attention=kernel has no effect"):
        run(model)
    controls = elbowroom.Controls(gradient_checkpointing=True, gradient_checkpointing_keep_attention="kernel")
    with pytest.raises(
        elbowroom.ControlsError, match=r"keep_attention: kernel .* nn.MultiheadAttention.* set it to true"
    ):
        elbowroom.schedule(model, controls, blocks=["blocks.*"])


@pytest.mark.parametrize("treatments", [*APART, Treatments.all("recompute"), Treatments.all("offload")], ids=str)
def test_a_graph_that_was_built_before_the_plan_was_taken_off(treatments, tmp_path):
    model = seeded(Block)
    expected = run(model)
    model.zero_grad()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(3)
    with elbowroom.apply(model, plan_of(2, treatments, path=str(tmp_path))):
        loss = model(x).square().sum()
    loss.backward()
    assert same(expected, [x.grad, *(p.grad for p in model.parameters())])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_lists_are_no_blocks_and_blocks_that_are_not_called_are_reported():
    model = seeded(Block, loop=lambda blocks, x: blocks[0](x))
    controls = elbowroom.Controls(gradient_checkpointing=True)
    with pytest.raises(ValueError, match=r"'blocks' is a ModuleList, which is never called; did you mean 'blocks.\*'"):
        elbowroom.schedule(model, controls, blocks=["blocks"])
    with elbowroom.apply(model, elbowroom.schedule(model, controls, blocks=["blocks.*"])) as handle:
        assert "never called" not in str(handle.report())
        run(model)
        assert "never called: blocks.1; the plan has no effect" in str(handle.report())


def test_blocks_that_are_called_in_another_order_than_the_plans_are_reported():
    def backwards(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(blocks):
            x = block(x)
        return x

    model = seeded(Block, loop=backwards)
    expected = run(model)
    model.zero_grad()
    with elbowroom.apply(model, plan_of(2, Treatments.all("recompute"))) as handle:
        assert same(expected, run(model))
        assert handle.report().out_of_order == ("blocks.1",)
        assert "called early: blocks.1, before blocks that precede them in the plan" in str(handle.report())
