"""Two processes (gloo): gradients with a plan equal those without, and those of one process."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import elbowroom
from tests.support.models import BUILDERS, INPUTS, add_lora, assert_identical

WORLD = 2
PLANS: dict[str, dict[str, Any]] = {
    "segments": {"gradient_checkpointing": True, "gradient_checkpointing_interval": 2},
    "blocks": {"gradient_checkpointing": True},
    "keep attention": {"gradient_checkpointing": True, "gradient_checkpointing_keep_attention": True},
    "feed-forward": {"gradient_checkpointing": True, "gradient_checkpointing_backend": "torch-ffn"},
    "offload": {"activation_offload": ("all",)},
    "offload attention": {"gradient_checkpointing": True, "gradient_checkpointing_offload_attention": True},
}


def run(worker: Callable[..., None], *arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (folder, worker, arguments), nprocs=WORLD)


def _enter(rank: int, folder: str, worker: Callable[..., None], arguments: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        worker(rank, *arguments)
        gc.collect()  # models hold process groups, which must be gone before the other process is
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def applied(model: nn.Module, controls: dict[str, Any] | None) -> Iterator[None]:
    if controls is None:
        yield
        return
    plan = elbowroom.schedule(model, elbowroom.Controls(**controls))
    with elbowroom.apply(model, plan) as handle:
        yield
        counters = handle.report().counters
        assert counters.replays or counters.records or counters.weight_fetches, "the plan took no effect"


def inputs_of(family: str, rank: int) -> dict[str, Any]:
    """The rank's half of the batch of two."""
    return {
        name: value[rank : rank + 1] if name not in ("img_ids", "txt_ids") else value
        for name, value in INPUTS[family]().items()
    }


def loss_of(model: Callable[..., Any], inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).sample.square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else _whole(p.grad).clone()
        for name, p in model.named_parameters()
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _ddp_worker(rank: int, family: str, find_unused: bool, lora: bool) -> None:
    def train(controls: dict[str, Any] | None) -> dict[str, torch.Tensor | None]:
        model = BUILDERS[family]()
        if lora:
            add_lora(model)
        wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
        with applied(wrapped, controls):
            # Two passes are accumulated: the first without communication.
            for context in (wrapped.no_sync(), nullcontext()):
                with context:
                    loss_of(wrapped, inputs_of(family, rank)).backward()
        return gradients(model)

    expected = train(None)
    # Both ranks' halves in one process, averaged as DDP does it.
    single = BUILDERS[family]()
    if lora:
        add_lora(single)
    for half in range(WORLD):
        for _ in range(2):
            (loss_of(single, inputs_of(family, half)) / WORLD).backward()
    for name, gradient in gradients(single).items():
        if gradient is not None:
            torch.testing.assert_close(expected[name], gradient, rtol=1e-4, atol=1e-7)
    for controls in PLANS.values():
        assert_identical(expected, train(controls))


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize(("family", "lora"), [("flux", True), ("sd3", True)])
def test_ddp(family, lora, find_unused):
    run(_ddp_worker, family, find_unused, lora)


def _streamed_worker(rank: int, lora: bool) -> None:
    """Streamed before the model is given to DDP, and after."""
    controls = elbowroom.Controls(gradient_checkpointing=True, weight_streaming="100%", weight_window=1 << 16)

    def train(before: bool | None) -> dict[str, torch.Tensor | None]:
        model = BUILDERS["flux"]()
        if lora:
            add_lora(model)
        handle = elbowroom.apply(model, elbowroom.schedule(model, controls)) if before else None
        if handle is not None and lora:
            assert all("lora" not in name for name in model._ddp_params_and_buffers_to_ignore)
            assert len(model._ddp_params_and_buffers_to_ignore) == sum(
                len(unit.parameters) for unit in handle._streamer.units
            )
        wrapped = DistributedDataParallel(model)
        if before is False:
            handle = elbowroom.apply(wrapped, elbowroom.schedule(wrapped, controls))
        for context in (wrapped.no_sync(), nullcontext()):
            with context:
                loss_of(wrapped, inputs_of("flux", rank)).backward()
        if handle is not None:
            assert handle.report().counters.weight_fetches > 0
            found = gradients(model)
            handle.remove()
            assert not getattr(model, "_ddp_params_and_buffers_to_ignore", ())
            return found
        return gradients(model)

    expected = train(None)
    for before in (True, False):
        assert_identical(expected, train(before))


@pytest.mark.parametrize("lora", [True, False])
def test_streamed_weights_with_ddp(lora):
    run(_streamed_worker, lora)


def _other_values_worker(rank: int) -> None:
    model = BUILDERS["flux"]()
    model.requires_grad_(False)
    model.single_transformer_blocks[0].proj_mlp.weight += rank
    plan = elbowroom.schedule(model, elbowroom.Controls(weight_streaming="100%"))
    with pytest.raises(RuntimeError, match="the processes have other values of the weights that are streamed"):
        elbowroom.apply(model, plan)
    sharded = BUILDERS["flux"]()
    _shard(sharded, 1)
    with pytest.raises(RuntimeError, match=r"plan = elbowroom.shard\(model, plan\)"):
        elbowroom.apply(sharded, plan)


def test_streamed_weights_are_the_same_in_all_processes_and_not_sharded():
    run(_other_values_worker)


def _shard(model: Any, interval: int) -> None:
    blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]
    for start in range(0, len(blocks), interval):
        unit = blocks[start : start + interval]
        fully_shard(unit if len(unit) > 1 else unit[0])
    fully_shard(model)


def _fsdp_worker(rank: int, family: str) -> None:
    def train(controls: dict[str, Any] | None, interval: int) -> dict[str, torch.Tensor | None]:
        model = BUILDERS[family]()
        _shard(model, interval)
        with applied(model, controls):
            for _ in range(2):
                model.zero_grad()
                loss_of(model, inputs_of(family, rank)).backward()
        return gradients(model)

    for controls in PLANS.values():
        interval = controls.get("gradient_checkpointing_interval", 1)
        assert_identical(train(None, interval), train(controls, interval))


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_fsdp(family):
    run(_fsdp_worker, family)


def _offloaded_worker(rank: int, lora: bool) -> None:
    """The blocks of a segment are one unit of FSDP, whose weights it offloads where the plan would stream them."""

    def train(streaming: str | None, interval: int) -> dict[str, torch.Tensor | None]:
        model = BUILDERS["flux"]()
        if lora:
            add_lora(model)
        if streaming is None:
            _shard(model, interval)
            plan = None
        else:
            controls = elbowroom.Controls(
                gradient_checkpointing=True, gradient_checkpointing_interval=interval, weight_streaming=streaming
            )
            plan = elbowroom.shard(model, elbowroom.schedule(model, controls))
            assert not plan.streamed
            units = _units(model)
            # one unit a segment, and one of what is outside of blocks
            assert len(units) == len(plan.segments) + 1
            offloads = [isinstance(unit.offload_policy, CPUOffloadPolicy) for unit in units]
            assert all(offloads) if streaming == "100%" else not any(offloads)
        handle = None if plan is None else elbowroom.apply(model, plan)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, inputs_of("flux", rank)).backward()
            optimizer.step()
        if handle is not None:
            assert handle.report().counters.replays == 2 * len(handle.plan.segments)
            handle.remove()
        return gradients(model) | {f"stepped {name}": _whole(p.detach()) for name, p in model.named_parameters()}

    for interval in (1, 2):
        expected = train(None, interval)
        for streaming in ("off", "100%"):
            assert_identical(expected, train(streaming, interval))


def _units(model: nn.Module) -> list[Any]:
    states = {id(each): each for module in model.modules() if (each := _get_module_fsdp_state(module)) is not None}
    return [each._fsdp_param_group for each in states.values() if each._fsdp_param_group is not None]


@pytest.mark.parametrize("lora", [True, False])
def test_fsdp_offloads_what_a_plan_streams(lora):
    run(_offloaded_worker, lora)


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({"weight_streaming": "50%"}, "weight_streaming: FSDP streams the weights of all blocks or of none"),
        ({"ramtorch": True}, "weight_streaming: FSDP streams the weights of all blocks or of none"),
        ({"weight_streaming": "100%", "weight_store": "disk"}, "weight_store: FSDP streams from host memory only"),
        ({"weight_streaming": "100%", "weight_window": 1 << 20}, "weight_window: has no effect with FSDP"),
    ],
)
def test_streaming_that_fsdp_does_not_know(controls, message):
    model = BUILDERS["flux"]()
    with pytest.raises(ValueError, match=message):
        elbowroom.shard(model, elbowroom.schedule(model, elbowroom.Controls(**controls)))
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_sharding_without_processes_or_a_plan(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    model = BUILDERS["flux"]()
    plan = elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True))
    with pytest.raises(RuntimeError, match="FSDP needs a process group, and there is none: start"):
        elbowroom.shard(model, plan)
    with pytest.raises(TypeError, match="the plan must be a Plan, not a Controls"):
        elbowroom.shard(model, elbowroom.Controls())
    with pytest.raises(ValueError, match=r"names modules that Linear does not have: transformer_blocks\.0"):
        elbowroom.shard(nn.Linear(2, 2), plan)


def _refused_worker(rank: int) -> None:
    model = BUILDERS["flux"]()
    _shard(model, 1)
    plan = elbowroom.schedule(model, elbowroom.Controls(gradient_checkpointing=True, gradient_checkpointing_interval=2))
    with pytest.raises(RuntimeError, match=r"segment 0 spans 2 modules that FSDP shards apart; .*fully_shard\("):
        elbowroom.apply(model, plan)


def test_a_segment_across_units_of_fsdp_is_refused():
    run(_refused_worker)
