"""Steps in the backward pass: the same weights as steps after it, and never a full set of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from elbowroom.training import loop
from elbowroom.training.backward_steps import BackwardSteps
from elbowroom.training.loop import NonFiniteError
from tests.support.runs import job, run, weights


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(6)))


def two_groups(trained: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in trained.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in trained.parameters() if parameter.dim() < 2]
    return kind([{"params": matrices, "lr": 1e-2}, {"params": others, "lr": 1e-3, "weight_decay": 0.0}])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adafactor])
def test_the_same_weights_and_state(kind):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    plain, other = model(), model()
    ends = []
    for trained, in_backward in ((plain, False), (other, True)):
        optimizer = two_groups(trained, kind)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        steps = BackwardSteps(optimizer) if in_backward else None
        norms = []
        for _ in range(4):
            trained(x).square().sum().backward()
            if steps is None:
                gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
                norms.append(torch.nn.utils.get_total_norm(gradients).item())
                optimizer.step()
                optimizer.zero_grad()
            else:
                norms.append(steps.take_norm().item())
                assert all(parameter.grad is None for parameter in trained.parameters())
            schedule.step()
        ends.append((norms, optimizer.state_dict()["state"], [g["lr"] for g in optimizer.param_groups]))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    assert ends[0][0] == ends[1][0] and ends[0][2] == ends[1][2]
    for number, state in ends[0][1].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ends[1][1][number][name]))


def test_gradients_are_not_there_at_the_same_time():
    trained = model()
    largest = 0

    def count(_: nn.Parameter) -> None:
        nonlocal largest
        largest = max(largest, sum(each.grad.nbytes for each in trained.parameters() if each.grad is not None))

    for parameter in trained.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # called before those that come later
    BackwardSteps(torch.optim.SGD(trained.parameters(), lr=0.1))
    trained(torch.randn(4, 16)).square().sum().backward()
    assert 0 < largest == max(parameter.nbytes for parameter in trained.parameters())


def test_a_probe_leaves_no_trace_and_remove_leaves_the_optimizer():
    trained = model()
    before = copy.deepcopy(trained.state_dict())
    optimizer = torch.optim.AdamW(trained.parameters())
    steps = BackwardSteps(optimizer)
    with steps.probing():
        trained(torch.ones(1, 16)).sum().backward()
    assert all(parameter.grad is None for parameter in trained.parameters())
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert not optimizer.state and steps.take_norm() == 0
    steps.remove()
    trained(torch.ones(1, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())


@pytest.mark.parametrize("training_type", ["full", "lora"])
@pytest.mark.parametrize(
    "memory", [{}, {"weight_streaming": "100%", "gradient_checkpointing": True}, {"activation_offload": "all"}]
)
def test_a_run_ends_in_the_same_weights(training_type, memory, basics):
    options = basics("flux", "plain") | {"training_type": training_type, "max_grad_norm": 0, "steps": 4}
    if "weight_streaming" in memory and training_type == "full":
        memory = memory | {"weight_store": "disk"}
    plain, _, _ = run(**options)
    fused, _, _ = run(**options | {"name": "fused", "optimizer_in_backward": True, **memory})
    assert weights(fused.run.path) == weights(plain.run.path)
    assert fused.run.metrics.read() == plain.run.metrics.read()


def test_a_run_goes_on_with_and_without(basics):
    options = basics("flux", "whole") | {"training_type": "full", "max_grad_norm": 0, "checkpoint_steps": 2}
    whole, _, _ = run(**options | {"steps": 4})
    begun, _, _ = run(**options | {"name": "begun", "steps": 2, "optimizer_in_backward": True})
    assert weights(begun.run.path) != weights(whole.run.path)
    resumed, _, _ = run(**options | {"name": "begun", "steps": 4})
    assert weights(resumed.run.path) == weights(whole.run.path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "max_grad_norm"),
        ({"max_grad_norm": 0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    ],
)
def test_what_needs_all_gradients_is_refused(options, said, basics):
    with pytest.raises(Exception, match=f"{said}.*with optimizer_in_backward"):
        job(**basics("flux", "refused"), optimizer_in_backward=True, **options)


def test_a_gradient_that_is_not_finite_ends_the_run(basics, monkeypatch):
    original = loop.Run._losses

    def poisoned(self, batch):
        losses = original(self, batch)
        return losses + torch.sqrt(losses * 0) if self.step == 2 else losses  # finite, with an infinite slope

    monkeypatch.setattr(loop.Run, "_losses", poisoned)
    said = r"the gradient of step 3 is not a finite number\. Samples: .*step-00000002"
    with pytest.raises(NonFiniteError, match=said):
        run(**basics("flux", "poisoned"), checkpoint_steps=1, max_grad_norm=0, optimizer_in_backward=True)
