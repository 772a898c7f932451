from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elbowroom.training.checkpoints import CheckpointError, CheckpointFolder, checkpoint_problem
from elbowroom.training.files import ASIDE_PREFIX

# ---- the folder


def writer(content: str) -> Callable[[Path], None]:
    """Writes two files, one in a subfolder, one in two goes, so that a kill can fall inside a file."""

    def write(folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "first.txt").write_text(content)
        for half in (content[:3], content[3:]):
            with (folder / "second.txt").open("a") as file:
                file.write(half)

    return write


def steps(folder: CheckpointFolder) -> list[int]:
    """The complete checkpoints, read from the disk afresh."""
    return sorted(int(path.name[5:]) for path in folder.folder.glob("step-*") if checkpoint_problem(path) is None)


def newest_step(folder: CheckpointFolder) -> int | None:
    newest = folder.newest(check_contents=True)
    return None if newest is None else newest.step


def test_the_newest_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    assert folder.newest() is None
    for step in (5, 10, 15):
        assert folder.save(step, writer(f"step {step}")) == tmp_path / "checkpoints" / f"step-{step:08d}"
    assert sorted(path.name for path in folder.folder.iterdir()) == ["step-00000010", "step-00000015"]
    assert newest_step(folder) == 15
    assert folder.problems == ()
    assert (folder.folder / "step-00000015" / "part" / "first.txt").read_text() == "step 15"
    manifest = json.loads((folder.folder / "step-00000015" / "manifest.json").read_text())
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {"part/first.txt": 7, "second.txt": 7}


def test_order_is_by_number(tmp_path: Path) -> None:
    """Case F01: 100 is newer than 99, also where the names are not of one length."""
    folder = CheckpointFolder(tmp_path, keep=9)
    for step in (99, 100, 99_999_999, 100_000_000):
        folder.save(step, writer("content"))
    assert newest_step(folder) == 100_000_000
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "step-99999999", "by text it would be another one"
    narrow = CheckpointFolder(tmp_path, keep=1)
    narrow.save(100_000_001, writer("content"))
    assert steps(narrow) == [100_000_001]


def test_a_complete_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.save(5, writer("first"))
    with pytest.raises(FileExistsError, match="step-00000005"):
        folder.save(5, writer("other"))
    assert (tmp_path / "step-00000005" / "part" / "first.txt").read_text() == "first"


def test_going_on_from_an_older_step_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (30, 40):
        folder.save(step, writer("content"))
    folder.save(20, writer("content"))
    assert steps(folder) == [20, 40]


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def damage(path: Path) -> None:
    file = path / "second.txt"
    file.write_bytes(b"\0" * file.stat().st_size)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (empty, "manifest.json is missing, so saving it was never finished"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 40), "manifest.json can't be read"),
    "other manifest": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json can't be read"),
    "truncated": (lambda path: os.truncate(path / "second.txt", 3), "second.txt has 3 bytes instead of 7"),
    "zero bytes": (lambda path: os.truncate(path / "second.txt", 0), "second.txt has 0 bytes instead of 7"),
    "missing file": (lambda path: (path / "part" / "first.txt").unlink(), "first.txt is missing"),
    "other content": (damage, "the content of second.txt was damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_reported(name: str, tmp_path: Path) -> None:
    """Case F01: the newest complete one is picked, what was skipped is said, and its step can be saved again."""
    harm, reason = DAMAGES[name]
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (98, 99, 100):
        folder.save(step, writer(f"step {step:02}"[:7]))
    harm(tmp_path / "step-00000100")
    harm(tmp_path / "step-00000098")  # older than the newest good one: nobody needs to hear about it
    assert newest_step(folder) == 99
    (problem,) = folder.problems
    assert problem.path == tmp_path / "step-00000100"
    assert reason in problem.reason and str(problem.path) in str(problem)
    if name != "other content":  # only reading all of it would tell
        folder.save(100, writer("again"))
        assert newest_step(folder) == 100
        assert (tmp_path / "step-00000100" / "part" / "first.txt").read_text() == "again"
        assert folder.problems == ()


def test_damaged_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20):
        folder.save(step, writer("content"))
    empty(tmp_path / "step-00000020")
    folder.save(30, writer("content"))
    assert steps(folder) == [10, 30]


def test_a_failing_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "file").write_text("content")
        raise KeyboardInterrupt

    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(10, writer("content"))
    with pytest.raises(KeyboardInterrupt):
        folder.save(20, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


# ---- kill -9

WRITES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


def killed_at(moment: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child process that gets SIGKILL just before its `moment`-th call to the file system.

    Returns whether it was killed (otherwise it made fewer calls and is through).
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def count(event: str, _: tuple) -> None:
            nonlocal calls
            if event in WRITES:
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)  # an exception: pytest must not go on in the child
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed"
    return False


def test_killed_at_every_moment_of_a_save(tmp_path: Path) -> None:
    """Case F01: SIGKILL before each single call to the file system while a save replaces the oldest checkpoint."""
    moment, kept_old, leftovers_seen, killed = 0, 0, 0, True
    while killed:
        moment += 1
        folder = CheckpointFolder(tmp_path / str(moment), keep=2)
        for step in (9, 10):
            folder.save(step, writer(f"step {step}"))
        killed = killed_at(moment, lambda folder=folder: folder.save(100, writer("step 100")))

        newest = folder.newest(check_contents=True)
        assert newest is not None and newest.step in (10, 100)
        assert (newest.path / "second.txt").read_text() == f"step {newest.step}"
        whole = [checkpoint_problem(path, check_contents=True) is None for path in folder.folder.glob("step-*")]
        assert all(whole), "whatever has a checkpoint's name is complete"
        assert steps(folder) in ([9, 10], [9, 10, 100], [10, 100]), "an old one goes only after the new one is there"
        kept_old += newest.step == 10
        leftovers_seen += bool(folder.clean())
        assert not [path for path in folder.folder.iterdir() if path.name.startswith(ASIDE_PREFIX)]

        if newest.step == 10:
            folder.save(100, writer("step 100"))
        folder.save(101, writer("step 101"))
        assert steps(folder) == [100, 101], "the run goes on as if nothing had happened"
    assert kept_old >= 5 and moment - kept_old >= 5, "the kills fell both before and after the new one appeared"
    assert leftovers_seen >= 10


# ---- full disk


@pytest.fixture
def small_files():
    """Files of more than 20,000 bytes can't be written: as on a full disk, write() fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


def write_tensors(folder: Path) -> None:
    save_file({"weights": torch.zeros(10_000)}, folder / "weights.safetensors")


def write_bytes(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(40_000))


@pytest.mark.parametrize("write", [write_tensors, write_bytes])
def test_a_full_disk_costs_no_older_checkpoint(
    write: Callable[[Path], None], tmp_path: Path, small_files: None
) -> None:
    """Case F08: older checkpoints stay, the unfinished one is gone, the message says what is needed and free."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(10, writer("content"))
    with pytest.raises(CheckpointError, match=r"step-00000020 could not be written: .*File too large") as caught:
        folder.save(20, write, bytes_needed=40_000)
    assert "it needs about 40,000 bytes" in str(caught.value)
    assert "bytes are free" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert newest_step(folder) == 10


def test_without_enough_space_nothing_is_written(tmp_path: Path) -> None:
    """Case F08: known before it starts."""

    def never(folder: Path) -> None:
        raise AssertionError("must not be called")

    folder = CheckpointFolder(tmp_path / "new", keep=1)
    with pytest.raises(CheckpointError, match="not enough free space, so nothing was written"):
        folder.save(10, never, bytes_needed=10**18)
    assert list(folder.folder.iterdir()) == []


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/checkpoints/step-00000010 could not be written"):
        CheckpointFolder(tmp_path / "file" / "checkpoints", keep=1).save(10, writer("content"))
