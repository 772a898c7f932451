"""The stores of offloaded bytes: what holds for each of them."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.memory.devices import Cpu, Device
from elbowroom.memory.offload.disk_store import DiskStore
from elbowroom.memory.offload.host_store import HostStore
from elbowroom.memory.offload.stack import ALIGNMENT
from elbowroom.memory.offload.store import Store, Stored
from elbowroom.testing import simulated_accelerator

LIMIT = 1 << 24


def bytes_of(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


KINDS = ("disk", "simulated", "simulated disk")


@contextmanager
def opened(kind: str, folder: Path, *, seed: int = 0, slab: int = 8192, limit: int = LIMIT) -> Iterator[Opened]:
    """A store on its device; afterwards, nothing may have depended on luck, and no file may be left."""
    if kind == "disk":
        yield Opened(DiskStore(Cpu(), folder, limit=limit, slab=slab), Cpu())
    else:
        with simulated_accelerator(seed=seed) as accelerator:
            if kind == "simulated":
                yield Opened(HostStore(accelerator, pinned=True, limit=limit, slab=slab), accelerator)
            else:
                yield Opened(DiskStore(accelerator, folder, limit=limit, slab=slab, staging=30_000), accelerator)
            assert accelerator.violations == []
    assert list(folder.iterdir()) == []


class Opened:
    def __init__(self, store: Store, device: Device):
        self.store = store
        self.device = device

    def source(self, nbytes: int, seed: int) -> torch.Tensor:
        return bytes_of(nbytes, seed).to(self.device.device)

    def save(self, nbytes: int, seed: int) -> Stored:
        """Save, and hold the source for as long as one has to."""
        source = self.source(nbytes, seed)
        stored = self.store.save(source)
        assert stored is not None
        stored.saved.hold_compute()
        return stored

    def loaded(self, stored: Stored) -> torch.Tensor:
        target = self.device.empty(stored.nbytes)
        self.store.load(stored, target).hold_compute()
        return target.cpu()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=12), seed=st.integers(0, 2**16))
def test_bytes_come_back(kind, sizes, seed, tmp_path_factory):
    """Case B02: any order, read twice, freed in any order, room used again at once."""
    with opened(kind, tmp_path_factory.mktemp("store"), seed=seed) as at:
        choose = random.Random(seed)
        for round_ in range(3):
            sources = [at.source(nbytes, seed + index + round_) for index, nbytes in enumerate(sizes)]
            stored = [at.store.save(source) for source in sources]
            assert at.store.present == sum(sizes) <= at.store.peak <= at.store.allocated
            for index in choose.sample(range(len(sizes)), len(sizes)):
                entry = stored[index]
                assert entry is not None and entry.nbytes == sizes[index]
                entry.saved.hold_compute()
                sources[index] = torch.empty(0)
                for _ in range(2):
                    assert torch.equal(at.loaded(entry), bytes_of(sizes[index], seed + index + round_))
                at.store.free(entry)
        assert at.store.present == 0
        at.store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_three_hundred_steps_of_mixed_shapes_take_what_the_largest_takes(kind, tmp_path):
    shapes = [[5000] * 8, [700, 9000, 1], [3000] * 20, [20_000, 20_000]]
    rounded = [sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes) for sizes in shapes]
    allocated = []
    with opened(kind, tmp_path) as at:
        for step in range(300):
            sizes = shapes[step * 7 % len(shapes)]
            entries = [at.save(nbytes, step + nbytes) for nbytes in sizes]
            assert at.store.present == sum(sizes)
            for nbytes, entry in zip(reversed(sizes), reversed(entries), strict=True):
                if step % 30 < len(shapes):
                    assert torch.equal(at.loaded(entry), bytes_of(nbytes, step + nbytes))
                at.store.free(entry)
            assert at.store.present == 0
            allocated.append(at.store.allocated)
        assert at.store.peak == max(rounded)
        assert set(allocated[8:]) == {max(rounded)}
        at.store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_given_up_before_anybody_waited_for_the_load(kind, tmp_path):
    """The load still gets its bytes, although the room is saved into at once."""
    for seed in range(10):
        with opened(kind, tmp_path, seed=seed, limit=8192) as at:
            for number in range(6):
                first = at.save(3000, number)
                second = at.save(3000, number + 50)
                targets = [at.device.empty(3000) for _ in range(2)]
                events = [at.store.load(each, target) for each, target in zip((first, second), targets, strict=True)]
                at.store.free(first)
                at.store.free(second)
                for following in [at.save(3000, 99), at.save(3000, 98)]:
                    at.store.free(following)
                for place, (event, target) in enumerate(zip(events, targets, strict=True)):
                    event.hold_compute()
                    assert torch.equal(target.cpu(), bytes_of(3000, number + 50 * place))
            at.store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_given_up_by_the_garbage_collector_in_the_middle_of_a_save(kind, tmp_path, monkeypatch):
    with opened(kind, tmp_path) as at:
        dying: list[Stored] = [at.save(1000, 1)]
        begin: Callable[..., object] = at.store._begin_save  # type: ignore[attr-defined]

        def collected(*arguments: object) -> object:
            while dying:
                at.store.free(dying.pop())
            return begin(*arguments)

        monkeypatch.setattr(at.store, "_begin_save", collected)
        entry = at.save(1000, 2)
        assert at.store.present == 1000 and torch.equal(at.loaded(entry), bytes_of(1000, 2))
        at.store.close()
        monkeypatch.undo()


@pytest.mark.parametrize("kind", KINDS)
def test_closed_in_the_middle_of_copies(kind, tmp_path):
    """Closing waits for them, and what is asked for afterwards is refused with the reason."""
    with opened(kind, tmp_path) as at:
        source = at.source(5000, 1)
        entry = at.store.save(source)
        assert entry is not None
        target = at.device.empty(5000)
        event = at.store.load(entry, target)
        at.store.close()
        assert at.store.allocated == 0
        event.hold_compute()
        assert torch.equal(target.cpu(), bytes_of(5000, 1))
        with pytest.raises(RuntimeError, match="is closed"):
            at.store.save(source)
        with pytest.raises(RuntimeError, match="is closed"):
            at.store.load(entry, target)
        at.store.free(entry)
        at.store.close()
        assert at.store.present == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_without_being_closed(kind, tmp_path):
    """As happens when a graph dies after its handle was removed: no copy may lose its memory."""
    for seed in range(20):
        with opened(kind, tmp_path, seed=seed) as at:
            sources = [at.source(4000, number) for number in range(4)]
            entries = [at.store.save(source) for source in sources]
            target = at.device.empty(4000)
            entry = entries[2]
            assert entry is not None
            event = at.store.load(entry, target)
            at.store.free(entry)
            del at.store, entries, entry
            gc.collect()
            event.hold_compute()
            assert torch.equal(target.cpu(), bytes_of(4000, 2))


def test_room_is_not_used_again_before_the_copies_in_it_are_done():
    """Case B02: freed while the copies are pending, and saved into at once."""
    for seed in range(40):
        with simulated_accelerator(seed=seed) as accelerator:
            store = HostStore(accelerator, pinned=True, limit=1 << 16, slab=1 << 16)
            for number in range(6):
                source = bytes_of(3000, number).to(accelerator.device)
                stored = store.save(source)
                assert stored is not None
                target = accelerator.empty(3000)
                loaded = store.load(stored, target)
                store.free(stored)
                following = store.save(bytes_of(3000, 99).to(accelerator.device) if number % 2 else source)
                assert following is not None
                loaded.hold_compute()
                assert torch.equal(target.cpu(), bytes_of(3000, number))
                following.saved.wait()
                store.free(following)
            store.close()
            assert [v for v in accelerator.violations if "no order" in v or "target" in v] == []


def test_the_limit_means_no_room(tmp_path):
    with simulated_accelerator() as accelerator:
        for store in (
            HostStore(accelerator, pinned=True, limit=2000, slab=512),
            DiskStore(accelerator, tmp_path, limit=2000, slab=512),
        ):
            first = store.save(bytes_of(1500, 1).to(accelerator.device))
            assert first is not None and store.save(bytes_of(600, 1).to(accelerator.device)) is None
            store.free(first)
            assert store.save(bytes_of(600, 1).to(accelerator.device)) is not None and store.allocated <= 2000
            store.close()


def test_page_locked_memory_that_can_not_be_had_becomes_ordinary_memory(monkeypatch):
    with simulated_accelerator() as accelerator:
        ordinary = accelerator.host_memory

        def refuse(nbytes: int, *, pinned: bool) -> torch.Tensor:
            if pinned:
                raise RuntimeError("no more page-locked memory")
            return ordinary(nbytes, pinned=False)

        monkeypatch.setattr(accelerator, "host_memory", refuse)
        store = HostStore(accelerator, pinned=True, limit=LIMIT, slab=512)
        with pytest.warns(UserWarning, match="ordinary host memory, which is slower: no more page-locked") as warned:
            kept = [store.save(bytes_of(700, 1).to(accelerator.device)) for _ in range(3)]
        assert all(kept) and len(warned) == 1


@pytest.mark.parametrize("kind", ["disk", "pageable"])
def test_two_threads(kind, tmp_path):
    if kind == "disk":
        store: Store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=1 << 14)
    else:
        store = HostStore(Cpu(), pinned=False, limit=LIMIT, slab=1 << 14)
    problems: list[str] = []

    def work(seed: int) -> None:
        for number in range(50):
            wanted = bytes_of(1 + 37 * (number % 20), seed + number)
            stored = store.save(wanted.clone())
            target = torch.empty_like(wanted)
            if stored is None:
                problems.append("no room")
                return
            store.load(stored, target).wait()
            if not torch.equal(wanted, target):
                problems.append(f"{seed} {number}")
            store.free(stored)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and store.present == 0
    store.close()
