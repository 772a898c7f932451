"""Every treatment of every scope: gradients bit for bit, and nothing is run twice that need not be."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.memory import BlockPlan, OffloadSettings, Plan, ScopeModules, Treatments
from elbowroom.memory.scopes import find_scopes
from tests.support.models import BUILDERS, INPUTS, add_lora, assert_identical, flux, flux_inputs, step

TREATMENTS = ("keep", "recompute", "offload")
COMBINATIONS = [Treatments(*combination) for combination in itertools.product(TREATMENTS, repeat=3)]


def letters(treatments: Treatments) -> str:
    return "".join(treatment[0] for treatment in (treatments.attention, treatments.feed_forward, treatments.rest))


def plan_for(
    model: nn.Module,
    treatments: Treatments | Sequence[Treatments],
    *,
    interval: int = 1,
    boundary: Any = "keep",
    **settings: Any,
) -> Plan:
    """A plan by hand: the same treatments for all blocks, or one after the other in turn."""
    cycle = itertools.cycle([treatments] if isinstance(treatments, Treatments) else treatments)
    kept = elbowroom.schedule(model, elbowroom.Controls()).blocks
    blocks = []
    for position, (block, chosen) in enumerate(zip(kept, cycle, strict=False)):
        modules = find_scopes(model.get_submodule(block.name), None)
        if block.modules.feed_forward:
            modules = block.modules
        segment = position // interval if chosen.rest == "recompute" else None
        blocks.append(BlockPlan(block.name, segment, chosen, boundary if "recompute" in chosen else "keep", modules))
    return Plan(tuple(blocks), OffloadSettings(**{"smallest": 0, **settings}))


def moved(handle: elbowroom.Handle) -> int:
    return sum(handle.report().counters.bytes_offloaded.values())


@pytest.mark.parametrize("boundary", ["keep", "offload"])
@pytest.mark.parametrize("treatments", COMBINATIONS, ids=letters)
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_every_combination(family, treatments, boundary, tmp_path):
    if boundary == "offload" and "recompute" not in treatments:
        return  # refused: there is no boundary
    model = BUILDERS[family]()
    add_lora(model)
    inputs = INPUTS[family]()
    expected = step(model, inputs)
    plan = plan_for(model, treatments, boundary=boundary, path=str(tmp_path))
    with elbowroom.apply(model, plan) as handle:
        for _ in range(2):
            loss, gradients = step(model, inputs)
            assert torch.equal(loss, expected[0])
            assert_identical(expected[1], gradients)
        counters = handle.report().counters
        assert (counters.blocks_recomputed > 0) == (treatments.rest == "recompute")
        for scope in ("attention", "feed_forward", "rest"):
            assert (counters.bytes_offloaded[scope] > 0) == (getattr(treatments, scope) == "offload"), scope
        assert (counters.bytes_offloaded["boundary"] > 0) == (boundary == "offload")
    assert_identical(expected[1], step(model, inputs)[1])


@pytest.mark.parametrize("interval", [2, 3])
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_blocks_of_one_segment_may_differ(family, interval, tmp_path):
    model = BUILDERS[family]()
    inputs = INPUTS[family](residuals=True)
    expected = step(model, inputs)
    mixed = [
        Treatments("keep", "recompute", "recompute"),
        Treatments("offload", "recompute", "recompute"),
        Treatments("recompute", "offload", "recompute"),
        Treatments.all("recompute"),
    ]
    plan = plan_for(model, mixed, interval=interval, boundary="offload", path=str(tmp_path))
    with elbowroom.apply(model, plan, check_determinism=True):
        for _ in range(2):
            assert_identical(expected[1], step(model, inputs)[1])


# --- small models with awkward habits -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Stands for attention: two products, a dropout, and two results."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.to_q, self.to_k, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.__dict__["calls"] = self.__dict__.get("calls", [])
        self.calls.append(1)
        weights = self.dropout((self.to_q(x) @ self.to_k(x).transpose(-1, -2)).softmax(-1))
        return weights @ x, weights.sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attn = Attention(dropout)
        self.ff = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, weights = self.attn(self.norm(x))
        x = x + mixed * weights.sigmoid()
        return x + self.ff(torch.nn.functional.dropout(x, self.attn.dropout.p, self.training))


class Stack(nn.Module):
    def __init__(self, block: type[Block] = Block, count: int = 3, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(**options) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def example(size: int = 4) -> torch.Tensor:
    return torch.randn(2, size, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    x = example() if x is None else x
    model(x).square().mean().backward()
    found = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {**found, "input": x.grad}


def stack_plan(treatments: Treatments, interval: int = 1, boundary: Any = "keep", **settings: Any) -> Plan:
    scopes = ScopeModules(("attn",), ("ff",))
    return Plan(
        tuple(
            BlockPlan(
                f"blocks.{index}",
                index // interval if treatments.rest == "recompute" else None,
                treatments,
                boundary,
                scopes,
            )
            for index in range(3)
        ),
        OffloadSettings(**{"smallest": 0, **settings}),
    )


NOT_RERUN = [t for t in COMBINATIONS if t.rest == "recompute" and t.attention != "recompute"]


@pytest.mark.parametrize("treatments", NOT_RERUN, ids=letters)
def test_a_kept_or_offloaded_scope_in_a_recomputed_block_runs_once(treatments, tmp_path):
    model = Stack()
    with elbowroom.apply(model, stack_plan(treatments, path=str(tmp_path))) as handle:
        gradients(model)
        assert handle.report().counters.scopes_reused >= 3
        assert handle.report().counters.blocks_recomputed == 3
    assert [len(block.attn.calls) for block in model.blocks] == [1, 1, 1]


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("treatments", COMBINATIONS, ids=letters)
def test_random_numbers_after_a_scope_that_is_not_rerun(treatments, interval, tmp_path):
    """Case A02: attention draws a dropout mask, and what comes after it must draw what it drew in the forward pass."""
    model = Stack(dropout=0.5)
    expected = gradients(model)
    after = torch.rand(3)
    with elbowroom.apply(model, stack_plan(treatments, interval, path=str(tmp_path)), check_determinism=True):
        actual = gradients(model)
        assert torch.equal(after, torch.rand(3))
    assert_identical(expected, actual)


class WritesIntoAttention(Block):
    def forward(self, x):
        mixed, weights = self.attn(self.norm(x))
        mixed.mul_(2)
        return x + self.ff(mixed + weights)


@pytest.mark.filterwarnings("ignore:block .* writes into what the attention")
def test_a_block_that_writes_into_what_its_attention_returned_is_kept():
    model = Stack(WritesIntoAttention)
    expected = gradients(model)
    with elbowroom.apply(model, stack_plan(Treatments("keep", "recompute", "recompute"))) as handle:
        assert_identical(expected, gradients(model))
        assert handle.report().counters.blocks_kept == 3


class CallsAttentionTwice(Block):
    def forward(self, x):
        first, _ = self.attn(self.norm(x))
        second, weights = self.attn(first)
        return x + self.ff(second + weights)


class SkipsAttentionOfZeros(Block):
    """Runs its attention or not, as the input is: what is handed back follows the calls of the forward pass."""

    def forward(self, x):
        if x.mean() > 0:
            x = x + self.attn(x)[0]
        return x + self.ff(x)


class NoGradAttention(Block):
    def forward(self, x):
        with torch.no_grad():
            weights = self.attn(x)[1]
        return super().forward(x * weights)


@pytest.mark.parametrize("boundary", ["keep", "offload"])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("treatments", COMBINATIONS, ids=letters)
@pytest.mark.parametrize("block", [CallsAttentionTwice, SkipsAttentionOfZeros, NoGradAttention])
def test_awkward_blocks(block, treatments, interval, boundary, tmp_path):
    if boundary == "offload" and "recompute" not in treatments:
        return
    model = Stack(block)
    expected = gradients(model)
    with elbowroom.apply(model, stack_plan(treatments, interval, boundary, path=str(tmp_path))):
        for _ in range(2):
            assert_identical(expected, gradients(model))


SOME = [
    Treatments("keep", "recompute", "recompute"),
    Treatments("offload", "recompute", "recompute"),
    Treatments("keep", "recompute", "keep"),
    Treatments.all("offload"),
    Treatments.all("recompute"),
]
some = pytest.mark.parametrize("treatments", SOME, ids=letters)


@some
def test_saved_tensors_read_twice(treatments, tmp_path):
    """Case B09: retain_graph, two backward passes, then a gradient of a gradient."""
    model = Stack()

    def twice() -> list[torch.Tensor]:
        x = example()
        loss = model(x).square().mean()
        parameters = [x, *model.parameters()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in second)
        assert isinstance(penalty, torch.Tensor)
        return [*first, *(gradient.detach() for gradient in second), *torch.autograd.grad(penalty, parameters)]

    expected = twice()
    with elbowroom.apply(model, stack_plan(treatments, boundary="keep", path=str(tmp_path))):
        for one, other in zip(expected, twice(), strict=True):
            assert torch.equal(one, other)


@some
def test_several_forwards_before_one_backward(treatments, tmp_path):
    model = Stack()

    def run() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        losses = [model(example(size)).square().mean() for size in (4, 6, 4)]
        (losses[1] + losses[0]).backward()
        losses[2].backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = run()
    with elbowroom.apply(model, stack_plan(treatments, path=str(tmp_path))):
        assert_identical(expected, run())
        assert_identical(expected, run())


@some
def test_eval_no_grad_and_inference_mode(treatments, tmp_path):
    model = Stack(dropout=0.5).eval()
    expected = gradients(model)
    with torch.no_grad():
        wanted = model(example())
    with elbowroom.apply(model, stack_plan(treatments, path=str(tmp_path))) as handle:
        with torch.no_grad():
            assert torch.equal(model(example()), wanted)
        with torch.inference_mode():
            assert torch.equal(model(example()), wanted)
        assert not moved(handle) and not handle.report().counters.blocks_recorded
        assert_identical(expected, gradients(model))


class Failing(Block):
    fail = False

    def forward(self, x):
        x = super().forward(x)
        if self.fail:
            raise KeyError("in the middle")
        return x


@some
def test_an_exception_leaves_nothing_behind(treatments, tmp_path):
    model = Stack(Failing)
    expected = gradients(model)
    with elbowroom.apply(model, stack_plan(treatments, path=str(tmp_path))) as handle:
        model.blocks[1].fail = True
        with pytest.raises(KeyError):
            model(example())
        model.blocks[1].fail = False
        x = example()
        loss = model(x).square().mean()
        x.register_hook(lambda _: (_ for _ in ()).throw(KeyError("in backward")))
        with pytest.raises(KeyError):
            loss.backward()
        del loss
        gc.collect()
        for offloader in handle.offloaders:
            assert offloader.store.present == 0
        assert_identical(expected, gradients(model))


@some
def test_a_graph_that_is_dropped_frees_everything(treatments, tmp_path):
    model = Stack()
    with elbowroom.apply(model, stack_plan(treatments, boundary="keep", path=str(tmp_path))) as handle:
        loss = model(example()).square().mean()
        reference = weakref.ref(loss)
        del loss
        gc.collect()
        assert reference() is None
        for offloader in handle.offloaders:
            assert offloader.store.present == 0


@some
def test_nested_in_saved_tensor_hooks_and_checkpoint_of_torch(treatments, tmp_path):
    from torch.utils.checkpoint import checkpoint

    model = Stack()
    expected = gradients(model)
    with elbowroom.apply(model, stack_plan(treatments, path=str(tmp_path))):
        with torch.autograd.graph.save_on_cpu():
            assert_identical(expected, gradients(model))
        outer = nn.Module()
        outer.inner = model
        outer.forward = lambda x: checkpoint(model, x, use_reentrant=False)
        found = gradients(outer)
        assert_identical(expected, {name.removeprefix("inner."): gradient for name, gradient in found.items()})


@some
def test_autocast(treatments, tmp_path):
    """Case A04: the replay computes in the dtypes of the forward pass, though backward runs outside autocast."""
    model = flux()
    inputs = flux_inputs()
    context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    expected = step(model, inputs, context)
    with elbowroom.apply(model, plan_for(model, treatments, path=str(tmp_path))):
        for _ in range(2):
            assert_identical(expected[1], step(model, inputs, context)[1])


@some
def test_lora_added_after_apply(treatments, tmp_path):
    """PEFT puts its layers in the place of the scopes' parts; the treatment moves to them."""
    model = flux()
    add_lora(model)
    expected = step(model, flux_inputs())
    late = flux()
    with elbowroom.apply(late, plan_for(late, treatments, path=str(tmp_path))) as handle:
        add_lora(late)
        for _ in range(2):
            assert_identical(expected[1], step(late, flux_inputs())[1])
        single = late.get_submodule("single_transformer_blocks.0.proj_mlp")
        if treatments.feed_forward != treatments.rest:
            assert "forward" in single.__dict__ and "forward" not in single.base_layer.__dict__
        assert handle.report().counters.replays or moved(handle)


class OnlyAttention(Block):
    def forward(self, x):
        return self.attn(self.norm(x))[0]


class WritesBetween(Stack):
    """Writes into what the first block's attention returned, after the block is done."""

    def forward(self, x):
        y = self.blocks[0](x)
        y.mul_(2)
        return self.blocks[2](self.blocks[1](y))


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("attention", ["keep", "offload"])
def test_the_model_writes_into_what_a_scope_returned(attention, interval, tmp_path):
    """Case A08: what can't be handed back is computed again."""
    model = WritesBetween(OnlyAttention)
    expected = gradients(model)
    plan = stack_plan(Treatments(attention, "recompute", "recompute"), interval=interval, path=str(tmp_path))
    with elbowroom.apply(model, plan):
        assert_identical(expected, gradients(model))


# --- the attention kernel alone -------------------------------------------------------------------------------------


def kernel_plan(model: nn.Module, treatments: Treatments, interval: int = 1) -> Plan:
    plan = plan_for(model, treatments, interval=interval)
    return replace(plan, blocks=tuple(replace(block, keep_kernel=True) for block in plan.blocks))


def kernel_runs(run: Any) -> int:
    with torch.profiler.profile() as recorded:
        run()
    return sum(event.count for event in recorded.key_averages() if event.key == "aten::scaled_dot_product_attention")


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(
    "treatments",
    [
        Treatments.all("recompute"),
        Treatments("recompute", "keep", "recompute"),
        Treatments("recompute", "recompute", "keep"),
        Treatments("recompute", "keep", "keep"),
    ],
    ids=letters,
)
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_a_kept_kernel_runs_once(family, treatments, interval):
    model = BUILDERS[family]()
    add_lora(model)
    inputs = INPUTS[family]()
    expected = step(model, inputs)
    once = kernel_runs(lambda: step(model, inputs))
    with elbowroom.apply(model, plan_for(model, treatments, interval=interval)):
        assert kernel_runs(lambda: step(model, inputs)) == 2 * once
    with elbowroom.apply(model, kernel_plan(model, treatments, interval), check_determinism=True) as handle:
        for _ in range(2):
            assert_identical(expected[1], step(model, inputs)[1])
        assert kernel_runs(lambda: step(model, inputs)) == once
        assert handle.report().counters.scopes_reused >= once


class DroppingAttention(nn.Module):
    """The kernel draws a dropout mask."""

    def __init__(self, dropout: float):
        super().__init__()
        self.to_q, self.to_k, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x):
        query, key = self.to_q(x)[:, None], self.to_k(x)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(query, key, x[:, None], dropout_p=self.dropout.p)
        return mixed[:, 0], key[:, 0].mean(-1, keepdim=True)


class DroppingBlock(Block):
    def __init__(self, dropout: float):
        super().__init__(dropout)
        self.attn = DroppingAttention(dropout)


def test_a_kept_kernel_with_dropout():
    """Case A02: what comes after the kernel draws what it drew in the forward pass."""
    model = Stack(DroppingBlock, dropout=0.5)
    expected = gradients(model)
    plan = stack_plan(Treatments.all("recompute"))
    plan = replace(plan, blocks=tuple(replace(block, keep_kernel=True) for block in plan.blocks))
    with elbowroom.apply(model, plan, check_determinism=True):
        assert_identical(expected, gradients(model))


def test_a_kernel_of_another_library_is_refused_by_name():
    model = Stack(Block)
    plan = stack_plan(Treatments.all("recompute"))
    plan = replace(plan, blocks=tuple(replace(block, keep_kernel=True) for block in plan.blocks))
    with (
        elbowroom.apply(model, plan),
        pytest.raises(RuntimeError, match=r"keep_attention=kernel has no effect: the kernel of the attention 'attn'"),
    ):
        gradients(model)
    gradients(model)  # nothing is left behind
