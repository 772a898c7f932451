"""Checkpoints: a folder for each saved step, whole or not there at all.

`manifest.json` is written last and marks a folder as complete. What is in it is the business of `state`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from elbowroom.training.files import ASIDE_PREFIX, flush_to_disk, folder_written_aside, remove_unfinished

MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says where and what to do."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another model, adapter or optimizer than the one it is loaded into."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; `step` counts the optimizer steps since the very start of the run."""

    path: Path
    step: int


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A folder that has a checkpoint's name but can't be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class CheckpointFolder:
    """The checkpoints of one run, `step-00000020/` and so on, of which the newest `keep` stay.

    One process at a time may save into a folder.
    """

    def __init__(self, folder: Path, keep: int):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, but is {keep}")
        self.folder = folder
        self.keep = keep
        self.problems: tuple[SkippedCheckpoint, ...] = ()
        """What the last call of `newest` passed over."""

    def newest(self, *, check_contents: bool = False) -> Checkpoint | None:
        """Return the complete checkpoint with the highest step, or None.

        Complete means: the manifest is there and every file has the size that it names. With `check_contents` the
        files are read and their hashes compared too, which is right before resuming. Newer folders that fail are
        listed in `problems` afterwards, and are worth showing to the user.
        """
        skipped = []
        newest = None
        for checkpoint in reversed(self._named()):
            reason = checkpoint_problem(checkpoint.path, check_contents=check_contents)
            if reason is None:
                newest = checkpoint
                break
            skipped.append(SkippedCheckpoint(checkpoint.path, reason))
        self.problems = tuple(skipped)
        return newest

    def save(self, step: int, write: Callable[[Path], None], *, bytes_needed: int = 0) -> Path:
        """Make the checkpoint of `step` by calling `write` with an empty folder, then remove the oldest beyond `keep`.

        The checkpoint appears under its name only when all of it is on the disk, and only then are older ones removed.

        Args:
            step: optimizer steps done since the start of the run.
            write: puts the checkpoint's files into the folder that it is given.
            bytes_needed: expected size, as from `training_state_bytes`; with less free space nothing is written.

        Returns:
            The checkpoint's path.

        Raises:
            FileExistsError: a complete checkpoint of this step is there already.
            CheckpointError: the disk is full or can't be written to. Every earlier checkpoint is still there.
        """
        path = self.folder / f"step-{step:08d}"
        if path.exists():
            if checkpoint_problem(path) is None:
                raise FileExistsError(f"{path} is a complete checkpoint and is not overwritten")
            _remove(path)  # what a crash of the disk left behind would block this step for ever
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < bytes_needed:
                raise OSError("not enough free space, so nothing was written")
            with folder_written_aside(path) as aside:
                write(aside)
                _write_manifest(aside)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk by an error class of its own
            raise CheckpointError(self._failure(path, error, bytes_needed)) from error
        self._remove_oldest(but=path)
        return path

    def clean(self) -> list[Path]:
        """Remove what a killed process left unfinished; return the removed paths. Call it before saving starts."""
        return remove_unfinished(self.folder)

    def _named(self) -> list[Checkpoint]:
        """All folders with a checkpoint's name, by step as a number: as text, step 100000000 is before 99999999."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(r"step-(\d+)", path.name)
            if match and path.is_dir():
                found.append(Checkpoint(path, int(match[1])))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _remove_oldest(self, *, but: Path) -> None:
        """Keep `keep` checkpoints. Broken ones don't count, and `but`, just saved, stays even if its step is low."""
        complete = [named.path for named in self._named() if checkpoint_problem(named.path) is None]
        others = [path for path in complete if path != but]
        for path in others[: max(0, len(complete) - self.keep)]:
            _remove(path)

    def _failure(self, path: Path, error: Exception, bytes_needed: int) -> str:
        existing = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        needed = f"it needs about {bytes_needed:,} bytes, and " if bytes_needed else ""
        return (
            f"the checkpoint {path} could not be written: {error}; {needed}{free:,} bytes are free there. "
            "Earlier checkpoints are untouched. Make room there, or save to another disk."
        )


def checkpoint_problem(path: Path, *, check_contents: bool = False) -> str | None:
    """Return what makes the folder `path` unusable as a checkpoint, or None if it is complete.

    Args:
        check_contents: read every file and compare its SHA-256 hash as well as its size.
    """
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = [(path / name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so saving it was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({error})"
    for file, size, digest in expected:
        if not file.is_file():
            return f"{file.name} is missing"
        if file.stat().st_size != size:
            return f"{file.name} has {file.stat().st_size:,} bytes instead of {size:,}"
        if check_contents and _sha256(file) != digest:
            return f"the content of {file.name} was damaged after it was saved (its SHA-256 differs)"
    return None


def _write_manifest(folder: Path) -> None:
    files = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = json.dumps({"format": _FORMAT, "files": files}, indent=2)
    (folder / MANIFEST).write_text(manifest + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(path: Path) -> None:
    """Delete a checkpoint; a process killed half-way leaves an unfinished name that `clean` removes."""
    aside = Path(tempfile.mkdtemp(prefix=ASIDE_PREFIX, dir=path.parent))
    path.rename(aside / path.name)
    flush_to_disk(path.parent)  # the new name must reach the disk before the first file vanishes
    shutil.rmtree(aside)
