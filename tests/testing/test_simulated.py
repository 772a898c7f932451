"""The simulated accelerator computes like the CPU, counts exactly, and is not kind to copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elbowroom.testing import SimulatedTensor, simulated_accelerator
from elbowroom.testing.copies import POISON
from tests.support.models import BUILDERS, INPUTS, add_lora, step


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_models_train_on_it(family, lora):
    """The attention kernel is another one than the CPU's, so the last digits differ."""
    model = BUILDERS[family]()
    if lora:
        add_lora(model)
    expected = step(model, INPUTS[family]())
    with simulated_accelerator() as accelerator:
        model.to(accelerator.device)
        loss, gradients = step(model, {name: value.to(accelerator.device) for name, value in INPUTS[family]().items()})
        torch.testing.assert_close(loss.cpu(), expected[0])
        for name, gradient in expected[1].items():
            found = gradients[name]
            if gradient is None or found is None:
                assert gradient is None and found is None
            else:
                torch.testing.assert_close(found.cpu(), gradient, rtol=1e-3, atol=1e-5)
        assert isinstance(loss, SimulatedTensor) and accelerator.violations == []


def test_bytes_are_counted_once_a_storage_and_released_at_once():
    with simulated_accelerator() as accelerator:
        assert accelerator.bytes_in_use() == 0
        x = torch.zeros(100, device=accelerator.device)
        views = [x[10:], x.view(10, 10).t(), x.detach()]
        assert accelerator.bytes_in_use() == 400
        y = x + 1
        assert accelerator.bytes_in_use() == accelerator.peak_bytes() == 800
        del y
        assert accelerator.bytes_in_use() == 400 and accelerator.peak_bytes() == 800
        accelerator.reset_peak()
        assert accelerator.peak_bytes() == 400
        del x
        assert accelerator.bytes_in_use() == 400
        del views
        assert accelerator.bytes_in_use() == 0


def test_a_full_device():
    with simulated_accelerator(capacity=1000) as accelerator:
        x = torch.zeros(200, device=accelerator.device)
        with pytest.raises(torch.OutOfMemoryError, match="800 bytes needed, 800 of 1000 in use"):
            x + 1
        x.add_(1)
        assert x.sum().item() == 200


def test_devices_do_not_mix():
    with simulated_accelerator() as accelerator:
        x = torch.ones(3, device=accelerator.device)
        with pytest.raises(RuntimeError, match="same device, but found simulated:0 and cpu"):
            x + torch.ones(3)
        assert (x * torch.tensor(2.0)).sum().item() == 6
        layer = nn.Linear(3, 3)
        with pytest.raises(RuntimeError, match="same device"):
            layer(x)


def test_writes_in_place_are_seen_by_autograd():
    with simulated_accelerator() as accelerator:
        x = torch.ones(3, device=accelerator.device, requires_grad=True)
        y = x * 2
        z = y * y
        y.add_(1)
        assert y._version == 1 and y.view(3)._version == 1
        del z


def test_random_numbers_follow_the_seed():
    with simulated_accelerator() as accelerator:
        state = torch.get_device_module(accelerator.device).get_rng_state(accelerator.device)
        one = torch.randn(4, device=accelerator.device)
        torch.get_device_module(accelerator.device).set_rng_state(state, accelerator.device)
        assert torch.equal(one, torch.randn(4, device=accelerator.device))


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor == POISON).all())


def test_a_copy_has_happened_only_when_somebody_has_waited_for_it():
    for seed in range(20):
        with simulated_accelerator(seed=seed) as accelerator:
            source = torch.arange(50, dtype=torch.uint8).to(accelerator.device)
            host = torch.zeros(50, dtype=torch.uint8)
            event = accelerator.copy_out(source, host)
            assert poisoned(host)
            event.wait()
            assert torch.equal(host, torch.arange(50, dtype=torch.uint8)) and accelerator.violations == []


def test_memory_that_is_given_up_too_early_is_noticed():
    with simulated_accelerator() as accelerator:
        host = torch.zeros(50, dtype=torch.uint8)
        event = accelerator.copy_out(torch.ones(50, dtype=torch.uint8, device=accelerator.device), host)
        event.wait()
        assert poisoned(host) and "source of a copy out of 50 bytes was released" in accelerator.violations[0]
        target = accelerator.empty(50)
        event = accelerator.copy_in(torch.zeros(50, dtype=torch.uint8), target)
        del target
        event.wait()
        assert any("target of a copy in" in violation for violation in accelerator.violations)


def test_a_source_that_is_written_to_too_early_gives_the_later_bytes():
    with simulated_accelerator() as accelerator:
        source = torch.ones(50, dtype=torch.uint8, device=accelerator.device)
        host = torch.zeros(50, dtype=torch.uint8)
        event = accelerator.copy_out(source, host)
        seen = host.clone()
        source.fill_(7)
        event.wait()
        assert poisoned(seen) and set(host.tolist()) <= {1, 7}


def test_a_target_that_is_used_without_waiting_is_noticed():
    with simulated_accelerator() as accelerator:
        host = torch.ones(50, dtype=torch.uint8)
        target = accelerator.empty(50)
        accelerator.copy_in(host, target)
        _ = target + 1
        assert "target of a copy in of 50 bytes is used before" in accelerator.violations[0]


def test_copies_without_an_order_are_noticed_and_with_one_are_not():
    for ordered in (False, True):
        with simulated_accelerator(seed=3) as accelerator:
            host = torch.zeros(50, dtype=torch.uint8)
            first = torch.ones(50, dtype=torch.uint8, device=accelerator.device)
            target = accelerator.empty(50)
            out = accelerator.copy_out(first, host)
            back = accelerator.copy_in(host, target, after=[out] if ordered else [])
            back.hold_compute()
            out.wait()
            assert bool(accelerator.violations) != ordered
            assert not ordered or torch.equal(target.cpu(), torch.ones(50, dtype=torch.uint8))


def test_the_adversary_delays_and_reorders():
    """Over many seeds, each of two copies completes first, and some complete before anybody waits."""
    firsts, early = set(), 0
    for seed in range(60):
        with simulated_accelerator(seed=seed) as accelerator:
            sources = [torch.ones(8, dtype=torch.uint8, device=accelerator.device) for _ in range(2)]
            hosts = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
            for source, host in zip(sources, hosts, strict=True):
                accelerator.copy_out(source, host)
            torch.zeros(1, device=accelerator.device).add_(1).add_(1)
            done = [index for index, host in enumerate(hosts) if not poisoned(host)]
            early += bool(done)
            if len(done) == 1:
                firsts.add(done[0])
            accelerator.synchronize()
    assert firsts == {0, 1} and 0 < early < 60


def test_without_lateness_copies_are_done_at_once():
    with simulated_accelerator(late=False) as accelerator:
        host = torch.zeros(8, dtype=torch.uint8)
        accelerator.copy_out(torch.ones(8, dtype=torch.uint8, device=accelerator.device), host)
        assert host.tolist() == [1] * 8


def test_tensors_do_not_outlive_their_device():
    with simulated_accelerator() as accelerator:
        x = torch.ones(3, device=accelerator.device)
    with pytest.raises(RuntimeError, match="outside of `with simulated_accelerator"):
        x + 1
