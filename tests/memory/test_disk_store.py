"""The store in files: full and broken disks, threads, and what is left behind (nothing)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.memory import BlockPlan, OffloadSettings, Plan, Treatments
from elbowroom.memory.devices import Cpu
from elbowroom.memory.offload import disk_store
from elbowroom.memory.offload.disk_store import DiskStore
from elbowroom.memory.offload.store import Store, Stored, StoreError
from elbowroom.testing import SimulatedAccelerator, simulated_accelerator
from tests.memory.test_stores import LIMIT, bytes_of


def loaded(store: Store, stored: Stored) -> torch.Tensor:
    target = torch.empty(stored.nbytes, dtype=torch.uint8)
    store.load(stored, target).wait()
    return target


def test_a_full_disk_is_noticed_before_it_hurts(tmp_path, monkeypatch):
    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=4096)
    first = store.save(bytes_of(4000, 1))
    assert first is not None
    monkeypatch.setattr(disk_store.os, "posix_fallocate", full)
    assert store.trouble is None
    assert store.save(bytes_of(4000, 2)) is None and store.save(bytes_of(4000, 2)) is None
    assert store.trouble is not None and "can't take a file of 4.0 KiB (No space left" in store.trouble
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
x = torch.randn(2048, 64).requires_grad_()
model(x).sum().backward(); expected = x.grad.clone(); x.grad = None
blocks = tuple(BlockPlan(str(i), treatments=Treatments.all("offload")) for i in range(3))
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with elbowroom.apply(model, Plan(blocks, OffloadSettings(path=folder, window=1))) as handle:
        model(x).sum().backward()
        assert torch.equal(expected, x.grad)
        assert handle.report().counters.bytes_refused > 0
texts = [str(entry.message) for entry in caught]
assert len(texts) == 1 and "can't take" in texts[0] and "activation_store_path" in texts[0], texts
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
    with pytest.raises(StoreError, match="100 bytes could not be written .*Input/output"):
        stored.saved.wait()
    store.close()


def test_a_failed_write_costs_an_accelerator_nothing(tmp_path, monkeypatch):
    """What was to be written stays in host memory, and nothing more is saved: no save may wait for room for ever."""

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_store.os, "pwrite", broken)
    with simulated_accelerator() as accelerator:
        store = DiskStore(accelerator, tmp_path, limit=LIMIT, slab=4096, staging=2000)
        sources = [bytes_of(900, seed).to(accelerator.device) for seed in range(20)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            entries = [store.save(source) for source in sources]
            saved = [entry for entry in entries if entry is not None]
            assert 1 <= len(saved) <= 2 and all(entry is None for entry in entries[len(saved) :])
            assert store.trouble is not None and "900 bytes could not be written" in store.trouble
            for _ in range(2):
                for seed, entry in enumerate(saved):
                    target = accelerator.empty(900)
                    store.load(entry, target).hold_compute()
                    assert torch.equal(target.cpu(), bytes_of(900, seed))
            for entry in saved:
                store.free(entry)
            assert store.present == 0
            store.close()
        assert accelerator.violations == []


def test_after_a_failed_write_the_cpu_keeps_what_follows(tmp_path, monkeypatch):
    store = DiskStore(Cpu(), tmp_path, limit=LIMIT, slab=4096)
    first = store.save(bytes_of(100, 1))
    assert first is not None
    first.saved.wait()

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_store.os, "pwrite", broken)
    second = store.save(bytes_of(100, 2))
    assert second is not None
    with pytest.raises(StoreError):
        second.saved.wait()
    monkeypatch.undo()
    assert store.save(bytes_of(100, 3)) is None
    store.free(second)
    assert torch.equal(loaded(store, first), bytes_of(100, 1)) and store.present == 100
    store.close()


def test_a_failed_write_leaks_nothing(tmp_path, monkeypatch):
    """The error of a copy must not hold on to the frames that it passed, and to the tensors in them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    blocks = tuple(BlockPlan(str(place), treatments=Treatments.all("offload")) for place in range(2))
    x = torch.randn(50, 8, requires_grad=True)
    with elbowroom.apply(model, Plan(blocks, OffloadSettings(smallest=0, window=1, path=str(tmp_path)))) as handle:
        model(x).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.warns(UserWarning, match="could not be written") as warned:
                for _ in range(3):
                    model(x).sum().backward()
            assert len(warned) == 1
        gc.collect()
        assert all(offloader.store.present == 0 for offloader in handle.offloaders)


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


# --- a full disk ----------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own, in memory, of that size."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_small_disk_is_used_as_far_as_it_goes(tmp_path):
    """Also in the steps that follow, when the files become one."""
    with small_disk(tmp_path, 1 << 20) as folder:
        store = DiskStore(Cpu(), folder, limit=LIMIT, slab=400_000)
        fitting = []
        for step in range(4):
            entries = [store.save(bytes_of(100_000, step + seed)) for seed in range(14)]
            saved = [entry for entry in entries if entry is not None]
            fitting.append(len(saved))
            assert store.allocated <= 1 << 20
            for seed, entry in reversed(list(enumerate(saved))):
                assert torch.equal(loaded(store, entry), bytes_of(100_000, step + seed))
                store.free(entry)
        assert fitting == sorted(fitting) and fitting[0] >= 7 and fitting[-1] >= 9, fitting
        store.close()
        assert os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize == 1 << 20
        assert store.trouble is not None and str(folder) in store.trouble


def test_a_folder_that_can_not_be_written_to_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskStore(Cpu(), tmp_path / "file" / "folder", limit=LIMIT)


def test_a_folder_that_vanishes_is_as_good_as_a_full_disk(tmp_path):
    folder = tmp_path / "folder"
    store = DiskStore(Cpu(), folder, limit=LIMIT, slab=1000)
    folder.rmdir()
    assert store.save(bytes_of(100, 1)) is None
    assert store.trouble is not None and "folder can't take" in store.trouble and "No such file" in store.trouble
    store.close()


# --- threads --------------------------------------------------------------------------------------------------------


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.opened = threading.Event()
        write = disk_store.os.pwrite

        def held(file: int, view: memoryview, at: int) -> int:
            assert self.opened.wait(30)
            return write(file, view, at)

        monkeypatch.setattr(disk_store.os, "pwrite", held)


def test_a_load_waits_for_its_own_write(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    store = DiskStore(Cpu(), tmp_path, limit=LIMIT)
    entries = [store.save(bytes_of(1000, seed)) for seed in range(5)]
    targets = [torch.zeros(1000, dtype=torch.uint8) for _ in entries]
    events = []
    for entry, target in zip(entries, targets, strict=True):
        assert entry is not None
        events.append(store.load(entry, target))
    assert not any(event.done() for event in events)
    gate.opened.set()
    for seed, (event, target) in enumerate(zip(events, targets, strict=True)):
        event.wait()
        assert event.done() and torch.equal(target, bytes_of(1000, seed))
    store.close()


def test_what_is_not_written_yet_is_loaded_from_its_staging_buffer(tmp_path, monkeypatch):
    """The last that was saved is the first that backward needs: it must not wait for all that is written before."""
    gate = Gate(monkeypatch)
    for seed in range(10):
        gate.opened.clear()
        with simulated_accelerator(seed=seed) as accelerator:
            store = DiskStore(accelerator, tmp_path, limit=LIMIT, staging=10_000)
            source = bytes_of(5000, 1).to(accelerator.device)
            entry = store.save(source)
            assert entry is not None
            target = accelerator.empty(5000)
            event = store.load(entry, target)
            store.free(entry)
            gate.opened.set()  # the buffer is free as soon as it is written, but not before the copy from it
            others = [bytes_of(5000, number).to(accelerator.device) for number in range(2, 5)]
            following = [store.save(other) for other in others]
            event.hold_compute()
            assert torch.equal(target.cpu(), bytes_of(5000, 1))
            assert all(following)
            store.close()
            assert accelerator.violations == []


def test_loads_that_wait_for_their_turn_do_not_stop_saves(tmp_path):
    """A thread that has loaded ahead may save before it uses what it has loaded."""
    with simulated_accelerator() as accelerator:
        store = DiskStore(accelerator, tmp_path, limit=LIMIT, staging=2000)
        entries = []
        for seed in range(6):
            source = bytes_of(1000, seed).to(accelerator.device)
            entry = store.save(source)
            assert entry is not None
            entry.saved.hold_compute()
            entries.append(entry)
        written(store)
        targets = [accelerator.empty(1000) for _ in entries]
        events = [store.load(entry, target) for entry, target in zip(entries, targets, strict=True)]
        source = bytes_of(1000, 99).to(accelerator.device)
        for _ in range(6):
            assert store.save(source) is not None
        for seed, (event, target) in enumerate(zip(events, targets, strict=True)):
            event.hold_compute()
            assert torch.equal(target.cpu(), bytes_of(1000, seed))
        store.close()
        assert accelerator.violations == []


def written(store: DiskStore) -> None:
    """Wait until everything is written."""
    store._writer.submit(lambda: None).result()


def test_only_who_waits_for_a_load_has_it_copied_to_the_device(tmp_path, monkeypatch):
    """Another thread would not know what of the device's work the copy has to wait for."""
    with simulated_accelerator() as accelerator:
        copied_by: list[int] = []
        copy_in = SimulatedAccelerator.copy_in

        def noted(self: SimulatedAccelerator, *arguments: object) -> object:
            copied_by.append(threading.get_ident())
            return copy_in(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(SimulatedAccelerator, "copy_in", noted)
        store = DiskStore(accelerator, tmp_path, limit=1024)
        source = bytes_of(1000, 1).to(accelerator.device)
        entry = store.save(source)
        assert entry is not None
        written(store)
        target = accelerator.empty(1000)
        event = store.load(entry, target)
        store.free(entry)
        other = bytes_of(1000, 2).to(accelerator.device)
        following = store.save(other)  # into the same room, which the writer may use only after the read
        assert following is not None
        written(store)
        assert copied_by == []
        event.hold_compute()
        assert copied_by == [threading.get_ident()] and torch.equal(target.cpu(), bytes_of(1000, 1))
        store.close()


def test_a_store_that_is_dropped_while_it_writes_writes_to_its_own_file(tmp_path, monkeypatch):
    """The number of a file that is closed is given to the next one that is opened."""
    gate = Gate(monkeypatch)
    store = DiskStore(Cpu(), tmp_path, limit=LIMIT)
    entry = store.save(bytes_of(1000, 1))
    assert entry is not None
    saved = entry.saved
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    del store, entry
    gc.collect()
    others = [(tmp_path / str(number)).open("w+b") for number in range(20)]
    gate.opened.set()
    saved.wait()
    for other in others:
        assert other.read() == b""
        other.close()
    del saved
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) < before, "the file of the store is closed in the end"  # noqa: PTH208


def test_staging_is_bounded_and_settles(tmp_path, monkeypatch):
    """After some steps of mixed sizes, no buffer is made any more."""
    made: list[int] = []
    host_memory = SimulatedAccelerator.host_memory

    def noted(self: SimulatedAccelerator, nbytes: int, *, pinned: bool) -> torch.Tensor:
        made.append(nbytes)
        return host_memory(self, nbytes, pinned=pinned)

    monkeypatch.setattr(SimulatedAccelerator, "host_memory", noted)
    with simulated_accelerator() as accelerator:
        store = DiskStore(accelerator, tmp_path, limit=LIMIT, staging=4000)
        for step in range(30):
            before = len(made)
            for nbytes in (900, 2000, 300, 3500) if step % 2 else (1500, 1500):
                source = bytes_of(nbytes, step).to(accelerator.device)
                entry = store.save(source)
                assert entry is not None
                written(store)
                target = accelerator.empty(nbytes)
                store.load(entry, target).hold_compute()
                assert torch.equal(target.cpu(), bytes_of(nbytes, step))
                store.free(entry)
            if step >= 4:
                assert len(made) == before, made
        store.close()


# --- what is left behind --------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    program = f"""
import os, signal, torch
from pathlib import Path
from elbowroom.memory.devices import Cpu
from elbowroom.memory.offload.disk_store import DiskStore
store = DiskStore(Cpu(), Path({str(tmp_path)!r}), limit=1 << 24)
store.save(torch.ones(1000, dtype=torch.uint8)).saved.wait()
assert store.allocated == 1 << 24
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == -signal.SIGKILL, finished.stderr
    assert list(tmp_path.iterdir()) == []
