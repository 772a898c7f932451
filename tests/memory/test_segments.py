"""Segments on models of every awkward shape: exact, or refused with the name of the block."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.memory import ReplayError
from tests.support.models import assert_identical


class Toy(nn.Module):
    """Three blocks in a list, called in turn. Subclasses change what happens between them."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Feed(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


def make(model_class: type[Toy] = Toy, block_class: type[nn.Module] = Feed, count: int = 3, **options) -> Toy:
    torch.manual_seed(0)
    return model_class(*(block_class(**options) for _ in range(count)))


def example() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    x = (example() if x is None else x).requires_grad_()
    model(x).square().mean().backward()
    found = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {**found, "input": x.grad}


def apply(model: nn.Module, interval: int = 1, stride: int | None = None, **options) -> elbowroom.Handle:
    controls = elbowroom.Controls(
        gradient_checkpointing=True,
        gradient_checkpointing_interval=interval,
        gradient_checkpointing_segment_stride=stride,
    )
    return elbowroom.apply(model, elbowroom.schedule(model, controls, blocks=["blocks.*"]), **options)


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "stride"), [(1, None), (2, None), (3, None), (1, 2)])
def test_dropout(interval, stride):
    """Case A02: the replay draws the same dropout masks, and later draws are not disturbed."""
    model = make(dropout=0.5)
    expected = gradients(model)
    after = torch.rand(3)
    with apply(model, interval, stride, check_determinism=True):
        actual = gradients(model)
        assert torch.equal(after, torch.rand(3))
    assert_identical(expected, actual)


class PythonRandom(Feed):
    def forward(self, x):
        return super().forward(x * random.random())


class PrivateGenerator(Feed):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return super().forward(x * torch.rand(1, generator=self.generator))


@pytest.mark.parametrize("block_class", [PythonRandom, PrivateGenerator])
def test_random_numbers_from_elsewhere_are_found_by_the_check(block_class):
    """Case A02: such randomness is not restored; the determinism check names the block."""
    model = make(block_class=block_class)
    with apply(model, check_determinism=True), pytest.raises(ReplayError, match=r"'blocks\.2' is not deterministic"):
        gradients(model)


# --- writes in place ------------------------------------------------------------------------------------------------


class InPlaceBetween(Toy):
    """Writes into a block's output and passes the same object on (as Wan-S2V and Chroma's ControlNet do)."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x[:, :4] = x[:, :4] * 1.5
        return x


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_same_object_in_another_version(interval):
    model = make(InPlaceBetween)
    expected = gradients(model)
    with apply(model, interval, check_determinism=True):
        assert_identical(expected, gradients(model))


class ScalesItsInput(Feed):
    def forward(self, x):
        x.mul_(1.5)
        return super().forward(x)


class AddsToItsInput(Feed):
    def forward(self, x):
        x += self.down(nn.functional.gelu(self.up(x + 1)))
        return x


class ReluOnAView(Feed):
    def forward(self, x):
        y = x + self.up.bias[:8]
        y[:].relu_()
        return y * self.down.bias


class InPlaceModel(Toy):
    """Gives the blocks a tensor that may be written to."""

    def forward(self, x):
        return super().forward(x * 1)


@pytest.mark.filterwarnings("ignore:block .* writes into its own input")
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("block_class", [ScalesItsInput, AddsToItsInput, ReluOnAView])
def test_writes_in_place_at_a_segment_border(block_class, interval):
    """Case A08: gradients equal the untouched model's; a block that writes into its input is kept, and counted."""
    model = make(InPlaceModel, block_class)
    expected = gradients(model)
    with apply(model, interval) as handle:
        assert_identical(expected, gradients(model))
    writes = block_class is not ReluOnAView
    assert (handle.report().counters.blocks_kept > 0) == writes


def test_a_block_that_writes_into_its_input_is_named():
    model = make(InPlaceModel, ScalesItsInput)
    with apply(model), pytest.warns(UserWarning, match=r"block 'blocks\.0' writes into its own input"):
        gradients(model)


class ChangesTheInputLater(Toy):
    def forward(self, x):
        side = x * 1
        y = self.blocks[0](side)
        side.zero_()
        return self.blocks[2](self.blocks[1](y))


def test_an_input_that_is_overwritten_later_is_refused():
    """Case A08: never a stale value. The untouched model refuses this too."""
    model = make(ChangesTheInputLater)
    with pytest.raises(RuntimeError, match="inplace"):
        gradients(model)
    with apply(model), pytest.raises(ReplayError, match=r"input of block 'blocks\.0' was modified"):
        gradients(model)


@pytest.mark.parametrize("name", ["up.bias", "down.weight", "frozen", "table"])
def test_weights_that_change_between_forward_and_backward_are_refused(name):
    """Also those that autograd does not save, such as a bias, and buffers."""
    model = make()
    block = model.blocks[1]
    block.register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))
    block.register_buffer("table", torch.ones(1))
    with apply(model):
        loss = model(example()).square().mean()
        with torch.no_grad():
            dict([*block.named_parameters(), *block.named_buffers()])[name].mul_(2)
        with pytest.raises(ReplayError, match=f"'{name}' of block 'blocks.1' was replaced or modified"):
            loss.backward()


def test_weights_that_are_swapped_for_the_forward_only_are_refused():
    model = make()
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    with apply(model):
        loss = torch.func.functional_call(model, others, example().requires_grad_()).square().mean()
        with pytest.raises(ReplayError, match="was replaced or modified"):
            loss.backward()


class CountsCalls(Feed):
    """Writes into a buffer of its own, and computes with it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


class Normalised(Feed):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(super().forward(x))


class SpectrallyNormalised(Feed):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


@pytest.mark.filterwarnings("ignore:block .* changes its own parameters or buffers")
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("block_class", [CountsCalls, Normalised, SpectrallyNormalised])
def test_blocks_that_change_their_own_buffers_are_kept(block_class, interval):
    """Running them again would count twice; their activations are kept, and gradients and buffers are exact."""
    model, reference = make(block_class=block_class), make(block_class=block_class)
    expected = gradients(reference)
    with apply(model, interval) as handle:
        assert_identical(expected, gradients(model))
    assert handle.report().counters.blocks_kept == 3
    for (name, buffer), (_, other) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name


# --- settings of modules ----------------------------------------------------------------------------------------------


class Scaled(Feed):
    """A plain attribute, a dict and a cache that are set for the forward pass only."""

    def __init__(self):
        super().__init__()
        self.scale, self.scaling, self.cache, self.calls = 1.0, {"default": 1.0}, None, 0

    def forward(self, x):
        self.calls += 1
        if self.cache is None:
            self.cache = x.detach().mean()
        gain = self.scale * self.scaling["default"] * (1.5 if self.calls % 2 else 1.0)
        return super().forward(x * gain)


class SetsAttributes(Toy):
    def forward(self, x):
        for block in self.blocks:
            block.scale, block.scaling["default"] = 2.0, 3.0
        x = super().forward(x)
        for block in self.blocks:
            block.scale, block.scaling["default"] = 1.0, 1.0
        return x


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_settings_are_those_of_the_forward_pass(interval):
    model, reference = make(SetsAttributes, Scaled), make(SetsAttributes, Scaled)
    with apply(model, interval, check_determinism=True):
        for _ in range(2):
            assert_identical(gradients(reference), gradients(model))
    for block in model.blocks:
        assert (block.scale, block.scaling, block.calls) == (1.0, {"default": 1.0}, 2)
        assert isinstance(block.cache, torch.Tensor)


@pytest.mark.parametrize("interval", [1, 2])
def test_eval_between_forward_and_backward(interval):
    model = make(dropout=0.5)
    expected = gradients(model)
    with apply(model, interval):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        x = example().requires_grad_()
        loss = model(x).square().mean()
        model.eval()
        loss.backward()
        assert not model.blocks[0].training
    assert_identical(expected, {**{name: p.grad for name, p in model.named_parameters()}, "input": x.grad})


# --- identity and objects ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """`nn.MultiheadAttention` asks whether query, key and value are the same object."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, y, z):
        return self.attention(x, y, z)[0]


class AttentionModel(Toy):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, x, x)
        return x


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_arguments_that_are_one_object_stay_one_object(interval):
    model = make(AttentionModel, Attention)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    expected = gradients(model, x.clone())
    with apply(model, interval):
        assert_identical(expected, gradients(model, x.clone()))


class Carrier:
    def __init__(self, x):
        self.x = x


class MutatesAnObject(Feed):
    def forward(self, carrier):
        carrier.x = super().forward(carrier.x)
        return carrier


class CarrierModel(Toy):
    def forward(self, x):
        return super().forward(Carrier(x)).x


@pytest.mark.parametrize("interval", [1, 3])
def test_objects_that_hide_tensors_are_not_guessed_at(interval):
    model = make(CarrierModel, MutatesAnObject)
    expected = gradients(model)
    with (
        apply(model, interval) as handle,
        pytest.warns(UserWarning, match="'blocks.0' gets a Carrier that holds tensors"),
    ):
        assert_identical(expected, gradients(model))
    assert handle.report().counters.blocks_kept == 3


class PenalizesItself(Feed):
    """Differentiates inside its forward pass."""

    def forward(self, x):
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


@pytest.mark.filterwarnings("ignore:block .* runs a backward pass inside")
@pytest.mark.parametrize("interval", [1, 2])
def test_a_backward_pass_inside_a_forward_pass(interval):
    model = make(block_class=PenalizesItself)
    expected = gradients(model)
    with apply(model, interval) as handle:
        assert_identical(expected, gradients(model))
    assert handle.report().counters.blocks_kept == 3


# --- what is passed between blocks ----------------------------------------------------------------------------------


class Skips(Toy):
    """U-ViT: the outputs of the first half are inputs of the second, and one output is tapped."""

    def forward(self, x):
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](torch.cat([second, first]).sum(0, keepdim=True) + second)
        return third + first * 0.5


@dataclass
class Streams:
    image: torch.Tensor
    text: list[torch.Tensor]


torch.utils._pytree.register_dataclass(Streams)


class Containers(Feed):
    """Takes and returns a dataclass with a list, a tuple with None, and keyword-only arguments."""

    def forward(self, streams, *extra, scale, settings):
        image = super().forward(streams.image) * scale * settings["gain"]
        return Streams(image, [text + image.mean() for text in streams.text]), (None, image.detach())


class ContainerModel(Toy):
    def forward(self, x):
        streams = Streams(x, [x * 2, x * 3])
        for block in self.blocks:
            streams, (nothing, copy_of_image) = block(streams, 1, None, scale=x.mean(), settings={"gain": 2.0})
            assert nothing is None and copy_of_image.shape == x.shape
        return streams.image + sum(streams.text)


class CalledTwice(Toy):
    def forward(self, x):
        return super().forward(super().forward(x))


class SkipsABlock(Toy):
    """SD3's `skip_layers`: a block in the middle of a segment is not called."""

    def forward(self, x):
        return self.blocks[2](self.blocks[0](x))


class PassesThrough(Feed):
    def forward(self, x, side):
        return super().forward(x) + side, side


class PassThroughModel(Toy):
    def forward(self, x):
        side = x * 2
        for block in self.blocks:
            x, side = block(x, side)
        return x


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("model_class", "block_class"),
    [
        (Skips, Feed),
        (ContainerModel, Containers),
        (CalledTwice, Feed),
        (SkipsABlock, Feed),
        (PassThroughModel, PassesThrough),
    ],
)
def test_models_that_are_not_a_chain(model_class, block_class, interval):
    model = make(model_class, block_class)
    expected = gradients(model)
    with apply(model, interval, check_determinism=True):
        assert_identical(expected, gradients(model))
        assert_identical(expected, gradients(model))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return gradient * (first + second) / 2


class ReadsTwiceBlock(Feed):
    def forward(self, x):
        return ReadsTwice.apply(super().forward(x))


@pytest.mark.parametrize("interval", [1, 3])
def test_a_saved_tensor_that_is_read_twice(interval):
    """Case B09."""
    model = make(block_class=ReadsTwiceBlock)
    expected = gradients(model)
    with apply(model, interval):
        assert_identical(expected, gradients(model))


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_double_backward(interval):
    """Case B09: a gradient penalty, through `create_graph=True`."""
    model = make()

    def penalty():
        model.zero_grad(set_to_none=True)
        x = example().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        slope.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = penalty()
    with apply(model, interval):
        assert_identical(expected, penalty())


class Picky(Feed):
    """Swallows exceptions of its own, as a fallback from a fast kernel to a slow one does."""

    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:
            return x


def test_the_early_stop_can_not_be_swallowed():
    model = make(block_class=Picky)
    expected = gradients(model)
    with apply(model, 2):
        assert_identical(expected, gradients(model))


# --- exceptions, lifetime, removal ----------------------------------------------------------------------------------


class Fails(Feed):
    failing: ClassVar[list[nn.Module]] = []  # not an attribute of the instance: settings are those of the forward pass

    def forward(self, x):
        y = super().forward(x)
        if self in self.failing:
            raise KeyError("on purpose")
        return y


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_an_exception_in_the_middle_of_a_forward(interval, failing):
    model = make(block_class=Fails)
    expected = gradients(model)
    with apply(model, interval):
        Fails.failing.append(model.blocks[failing])
        with pytest.raises(KeyError, match="on purpose"):
            gradients(model)
        Fails.failing.clear()
        assert_identical(expected, gradients(model))


def test_a_failing_replay_leaves_no_state_behind():
    model = make(block_class=Fails, dropout=0.5)
    expected = gradients(model)
    with apply(model, 2):
        torch.manual_seed(5)
        loss = model(example()).square().mean()
        state = torch.get_rng_state()
        Fails.failing.append(model.blocks[0])
        with pytest.raises(KeyError, match="on purpose"):
            loss.backward()
        assert torch.equal(state, torch.get_rng_state())
        Fails.failing.clear()
        assert_identical(expected, gradients(model))


class Unstable(Feed):
    calls = iter(range(100))  # shared by all instances, so no setting of a module

    def forward(self, x):
        return super().forward(x) if next(self.calls) < 3 else x * self.up.bias[:8]


def test_a_replay_that_saves_other_tensors_is_refused():
    model = make(block_class=Unstable)
    with apply(model), pytest.raises(ReplayError, match=r"block 'blocks\.2' did not repeat itself"):
        gradients(model)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_nothing_outlives_the_graph(interval):
    """A graph that is dropped without a backward pass, and one that is used, free all that was recorded."""
    model = make(InPlaceBetween)
    with apply(model, interval):
        gc.disable()  # references alone must do: the cycle collector can't see through autograd's graph
        try:
            for backward in (False, True):
                x = example().requires_grad_()
                inner = x * 1
                watched = weakref.ref(inner)
                loss = model(inner).square().mean()
                if backward:
                    loss.backward()
                del inner, loss
                assert watched() is None
        finally:
            gc.enable()


def test_remove_leaves_the_model_as_it_was():
    model = make()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    handle = apply(model)
    assert "forward" in model.blocks[0].__dict__
    loss = model(example()).square().mean()
    handle.remove()
    handle.remove()
    assert before == {name: dict(module.__dict__) for name, module in model.named_modules()}
    loss.backward()  # a graph from before still works


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_plain_models(duplicate):
    """A copy (an EMA) must not run the blocks of the original."""
    model = make()
    expected = gradients(model)
    with apply(model, 2) as handle:
        twin = duplicate(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_identical(expected, gradients(twin))
        assert handle.report().counters.blocks_recorded == 0


def test_what_can_not_be_applied_is_refused():
    model = make()
    plan = elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True), blocks=["blocks.*"])
    with elbowroom.apply(model, plan), pytest.raises(RuntimeError, match="applied to block 'blocks.0' already"):
        elbowroom.apply(model, plan)
    with pytest.raises(ValueError, match="does not have: blocks.2"):
        elbowroom.apply(make(count=2), plan)


def test_a_model_whose_own_checkpointing_is_on_is_refused():
    from tests.support.models import flux, flux_inputs

    model = flux()
    model.enable_gradient_checkpointing()
    plan = elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True))
    with pytest.raises(RuntimeError, match=r"model\.disable_gradient_checkpointing\(\)"):
        elbowroom.apply(model, plan)
    model.disable_gradient_checkpointing()
    with elbowroom.apply(model, plan):
        model.enable_gradient_checkpointing()  # later is no better
        with pytest.raises(RuntimeError, match=r"model\.disable_gradient_checkpointing\(\)"):
            model(**flux_inputs())


def test_other_things_than_models_controls_and_plans_are_refused():
    model, controls = make(), elbowroom.Controls(gradient_checkpointing=True)
    plan = elbowroom.schedule(model, controls, blocks=["blocks.*"])
    with pytest.raises(TypeError, match="schedule takes a torch.nn.Module and Controls, not Toy and dict"):
        elbowroom.schedule(model, {"gradient_checkpointing": True}, blocks=["blocks.*"])
    with pytest.raises(TypeError, match="not list and Controls"):
        elbowroom.schedule([model], controls)
    with pytest.raises(TypeError, match="the plan must be a Plan, not a Controls; .* makes one of"):
        elbowroom.apply(model, controls)
    with pytest.raises(TypeError, match="the model must be a torch.nn.Module, not a Plan"):
        elbowroom.apply(plan, model)


def test_wrappers_put_on_later_are_not_lost():
    model = make()
    handle = apply(model)
    ours = model.blocks[0].forward
    model.blocks[0].forward = lambda x: ours(x)
    with pytest.raises(RuntimeError, match="'blocks.0' was replaced after"):
        handle.remove()
    model.blocks[0].forward = ours
    handle.remove()
    assert all("forward" not in block.__dict__ for block in model.blocks)
