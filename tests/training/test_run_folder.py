"""The files that grow line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elbowroom.training.run_folder import RecordFile, RunFolderError


def written(tmp_path: Path, content: bytes) -> RecordFile:
    file = RecordFile(tmp_path / "metrics.jsonl")
    file.path.write_bytes(content)
    return file


def test_records_come_back_and_later_ones_are_cut(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "metrics.jsonl")
    assert file.read() == []
    for step in (1, 2, 3):
        file.append({"step": step, "loss": 0.5})
    file.cut_after(2)
    assert file.read() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


@pytest.mark.parametrize(
    "end", [b'{"step": 2, "lo', b'{"step": 2, "lo\n', b"\0" * 40, b"\0" * 40 + b"\n", b"\xff\xfe\n", b"5\n", b"{}\n"]
)
def test_an_unreadable_end_is_dropped(end: bytes, tmp_path: Path) -> None:
    """What a killed process, or a power failure, leaves."""
    file = written(tmp_path, b'{"step": 1}\n' + end)
    assert file.read() == [{"step": 1}]
    file.cut_after(1)
    file.append({"step": 2})
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("middle", [b"{", b"\0\0", b'{"loss": 1}', b""])
def test_an_unreadable_line_before_the_end_is_named(middle: bytes, tmp_path: Path) -> None:
    file = written(tmp_path, b'{"step": 1}\n' + middle + b'\n{"step": 3}\n')
    content = file.path.read_bytes()
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl line 2 can't be read .*put the line right or remove it"):
        file.cut_after(1)
    assert file.path.read_bytes() == content
