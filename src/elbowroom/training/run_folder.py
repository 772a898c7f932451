"""The folder of one run: what it was told, what it measured, what it made."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elbowroom.training.files import write_text


class RunFolderError(RuntimeError):
    """The run folder can't be used; the message says why and what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Paths below `runs/NAME/`."""

    path: Path

    @property
    def configuration(self) -> Path:
        """The resolved options, with where each value came from."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def result(self) -> Path:
        """What was trained: a LoRA file, or the denoiser in Diffusers' format."""
        return self.path / "result"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def prefetch(self) -> Path:
        """For each shape, whether offloaded tensors are reloaded ahead of use, and how long both ways took."""
        return self.path / "prefetch.json"

    @property
    def metrics(self) -> RecordFile:
        """A line per step with everything that is the same when the run is repeated."""
        return RecordFile(self.path / "metrics.jsonl")

    @property
    def timings(self) -> RecordFile:
        """A line per step with seconds and bytes, which differ from run to run."""
        return RecordFile(self.path / "timings.jsonl")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process. The lock goes with the process, however it ends.

        Raises:
            RunFolderError: another process trains into this folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise RunFolderError(
                f"{self.path} can't be written to ({error.strerror}); set output_dir or name to a folder that is yours"
            ) from None
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(
                    f"another process trains into {self.path}; wait for it, stop it, or give this run another name"
                ) from None
            yield


@dataclass(frozen=True)
class RecordFile:
    """One JSON object a line, each with its `step`."""

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()

    def flush(self) -> None:
        """Force what was appended onto the disk."""
        if self.path.exists():
            with self.path.open("a") as file:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return all records. A last line that a crash left half written or unreadable is dropped.

        Raises:
            RunFolderError: another line can't be read.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(_record(line))
            except ValueError as error:
                if number == len(lines):
                    break
                raise RunFolderError(
                    f"{self.path} line {number} can't be read ({error}); put the line right or remove it. Training "
                    "doesn't need it, but what was measured there can't be made again"
                ) from None
        return records

    def cut_after(self, step: int) -> None:
        """Drop the records of steps after `step`, which will be done again."""
        if self.path.exists():
            kept = [json.dumps(record) + "\n" for record in self.read() if record["step"] <= step]
            write_text(self.path, "".join(kept))


def _record(line: bytes) -> dict[str, Any]:
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("it is no record of a step")
    return record
