"""The stores of offloaded bytes, and the arithmetic below them."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.memory.devices import Cpu
from elbowroom.memory.offload import disk_store
from elbowroom.memory.offload.disk_store import DiskStore
from elbowroom.memory.offload.host_memory import default_limit, free_host_bytes
from elbowroom.memory.offload.host_store import HostStore
from elbowroom.memory.offload.stack import ALIGNMENT, Span, SpanStack
from elbowroom.memory.offload.store import Store, StoreError
from elbowroom.testing import simulated_accelerator

LIMIT = 1 << 24


def bytes_of(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# --- the stack ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3)), max_size=60), st.integers(0, 2**16))
def test_spans_never_overlap_and_the_limit_holds(requests, seed):
    choose = random.Random(seed)
    stack, live = SpanStack(limit=60_000, slab=4096), []
    for nbytes, frees in requests:
        for _ in range(min(frees, len(live))):
            stack.free(live.pop(choose.randrange(len(live))))
        span = stack.allocate(nbytes)
        if span is None:
            continue
        live.append(span)
        assert span.offset % ALIGNMENT == 0 and span.end <= span.slab.nbytes and span.slab in stack.slabs
        assert stack.allocated <= 60_000 and stack.used == sum(each.nbytes for each in live)
        for other in live[:-1]:
            assert other.slab is not span.slab or other.end <= span.offset or span.end <= other.offset
    for span in live:
        stack.free(span)
    assert stack.used == 0 and all(not slab.spans for slab in stack.slabs)


def run_step(stack: SpanStack, sizes: list[int]) -> None:
    """Last in, first out, as a training step is."""
    stack.consolidate()
    spans = [stack.allocate(nbytes) for nbytes in sizes]
    for span in reversed(spans):
        assert isinstance(span, Span)
        stack.free(span)


@given(st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=20), min_size=1, max_size=3))
def test_nothing_grows_after_two_steps_of_each_shape(shapes):
    stack = SpanStack(limit=1 << 30, slab=2048)
    for _ in range(2):
        for sizes in shapes:
            run_step(stack, sizes)
    run_step(stack, shapes[0])
    slabs = list(stack.slabs)
    for _ in range(3):
        for sizes in shapes:
            run_step(stack, sizes)
    assert stack.slabs == slabs and len(slabs) == 1
    most = max(sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes) for sizes in shapes)
    assert stack.allocated <= max(most, 2048)


def test_a_span_is_freed_once():
    stack = SpanStack(limit=4096)
    span = stack.allocate(10)
    assert span is not None
    stack.free(span)
    with pytest.raises(ValueError, match="freed twice"):
        stack.free(span)


# --- the stores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "simulated", "simulated disk"])
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=12), seed=st.integers(0, 2**16))
def test_bytes_come_back(kind, sizes, seed, tmp_path_factory):
    """Case B02: any order, read twice, freed in any order, room used again at once."""
    folder = tmp_path_factory.mktemp("store")

    def check(store: Store, to_device, empty) -> None:
        choose = random.Random(seed)
        for round_ in range(3):
            sources = [to_device(bytes_of(nbytes, seed + index + round_)) for index, nbytes in enumerate(sizes)]
            wanted = [bytes_of(nbytes, seed + index + round_) for index, nbytes in enumerate(sizes)]
            stored = [store.save(source) for source in sources]
            assert store.present == sum(sizes) <= store.peak <= store.allocated
            for index in choose.sample(range(len(sizes)), len(sizes)):
                entry = stored[index]
                assert entry is not None
                entry.saved.hold_compute()
                sources[index] = None
                for _ in range(2):
                    target = empty(sizes[index])
                    store.load(entry, target).hold_compute()
                    assert torch.equal(target.cpu(), wanted[index])
                store.free(entry)
        assert store.present == 0
        store.close()

    if kind == "disk":
        check(DiskStore(Cpu(), folder, limit=LIMIT, slab=8192), lambda t: t, lambda n: torch.empty(n, dtype=torch.uint8))
        assert list(folder.iterdir()) == []
        return
    with simulated_accelerator(seed=seed) as accelerator:
        store: Store = (
            HostStore(accelerator, pinned=True, limit=LIMIT, slab=8192)
            if kind == "simulated"
            else DiskStore(accelerator, folder, limit=LIMIT, slab=8192, staging=30_000)
        )
        check(store, lambda t: t.to(accelerator.device), accelerator.empty)
        assert accelerator.violations == []


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


def test_a_full_disk_is_noticed_before_it_hurts_with_one_warning(tmp_path, monkeypatch):
    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=4096)
    first = store.save(bytes_of(4000, 1))
    assert first is not None
    monkeypatch.setattr(disk_store.os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match="has no room for 4096 more bytes .*No space left") as warned:
        assert store.save(bytes_of(4000, 2)) is None and store.save(bytes_of(4000, 2)) is None
    assert len(warned) == 1
    target = torch.empty(4000, dtype=torch.uint8)
    store.load(first, target).wait()
    assert torch.equal(target, bytes_of(4000, 1))
    store.close()


def test_a_really_full_file_system():
    """A limit on file sizes, in a process of its own, stands for the disk."""
    program = """
import resource, signal, tempfile, torch, elbowroom, warnings
from torch import nn
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from elbowroom.memory import BlockPlan, OffloadSettings, Plan, Treatments
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
x = torch.randn(512, 64).requires_grad_()
model(x).sum().backward(); expected = x.grad.clone(); x.grad = None
blocks = tuple(BlockPlan(str(i), treatments=Treatments.all("offload")) for i in range(3))
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with elbowroom.apply(model, Plan(blocks, OffloadSettings(path=folder, window=1))) as handle:
        model(x).sum().backward()
        assert torch.equal(expected, x.grad)
        assert handle.report().counters.bytes_refused > 0
texts = [str(entry.message) for entry in caught]
assert len([text for text in texts if "no room" in text]) == 2, texts  # the store's, and what follows from it
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr


def test_a_write_that_fails_later_is_reported_by_its_event(tmp_path, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=4096)
    monkeypatch.setattr(disk_store.os, "pwrite", broken)
    stored = store.save(bytes_of(100, 1))
    assert stored is not None
    with pytest.raises(StoreError, match="100 bytes of activations could not be written .*Input/output"):
        stored.saved.wait()
    store.close()


def test_a_failed_write_costs_an_accelerator_nothing(tmp_path, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with simulated_accelerator() as accelerator:
        store = DiskStore(accelerator, tmp_path, limit=LIMIT, slab=4096)
        monkeypatch.setattr(disk_store.os, "pwrite", broken)
        stored = store.save(bytes_of(100, 1).to(accelerator.device))
        assert stored is not None
        target = accelerator.empty(100)
        with pytest.warns(UserWarning, match="they stay in host memory"):
            store.load(stored, target).hold_compute()
        assert torch.equal(target.cpu(), bytes_of(100, 1))


def test_short_reads_and_writes_are_completed(tmp_path, monkeypatch):
    write, read = disk_store.os.pwrite, disk_store.os.preadv
    monkeypatch.setattr(disk_store.os, "pwrite", lambda file, view, at: write(file, view[:7], at))
    monkeypatch.setattr(disk_store.os, "preadv", lambda file, views, at: read(file, [views[0][:11]], at))
    store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=4096)
    stored = store.save(bytes_of(1000, 1))
    assert stored is not None
    target = torch.empty(1000, dtype=torch.uint8)
    store.load(stored, target).wait()
    assert torch.equal(target, bytes_of(1000, 1))
    store.close()


def test_two_threads(tmp_path):
    store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=1 << 14)
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


# --- how much is free -----------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_may_use_what_its_control_groups_leave(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable:    6000 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "4000000\n",
        "sys/fs/cgroup/a/memory.current": "1500000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 500000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert free_host_bytes(write(tmp_path, files)) == 3_000_000
    assert free_host_bytes(write(tmp_path, {"sys/fs/cgroup/a/memory.max": "max\n"})) == 6000 * 1024
    first = {
        "proc/self/cgroup": "9:cpu,memory:/c\n1:name=systemd:/x\n",
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "500000\n",
    }
    assert free_host_bytes(write(tmp_path, first)) == 1_500_000


def test_the_default_limit_is_a_share_of_what_is_free(tmp_path):
    assert 0 < default_limit("pinned", tmp_path) < free_host_bytes()
    assert default_limit("disk", tmp_path) > 0
