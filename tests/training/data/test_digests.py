from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elbowroom.training.data.digests import DigestIndex, Facts, index_name

FACTS = Facts("0" * 64, 4, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    path.write_bytes(b"1234")
    return path


def test_facts_come_back_in_another_process(tmp_path: Path, file: Path):
    index = DigestIndex(tmp_path / "cache" / "index.json")
    assert index.get("a.png", file.stat()) is None
    index.put("a.png", file.stat(), FACTS)
    index.save(keep={"a.png"})
    again = DigestIndex(tmp_path / "cache" / "index.json")
    assert again.get("a.png", file.stat()) == FACTS
    assert again.get("b.png", file.stat()) is None


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime", "ctime"])
def test_any_change_makes_a_file_unknown(tmp_path: Path, file: Path, field: str):
    """E10: an edited file is read again."""
    index = DigestIndex(None)
    index.put("a.png", file.stat(), FACTS)
    values = list(file.stat())
    times = {name: getattr(file.stat(), name) for name in dir(file.stat()) if name.endswith("_ns")}
    if field in ("device", "inode", "size"):
        values[{"inode": 1, "device": 2, "size": 6}[field]] += 1
    else:
        times[f"st_{field}_ns"] += 1
    assert index.get("a.png", os.stat_result(values, times)) is None


def test_each_folder_has_its_own_index(tmp_path: Path):
    """Two folders with the same relative names must not push each other's entries out, or take them for their own."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert index_name(tmp_path / "a") != index_name(tmp_path / "b")
    assert index_name(tmp_path / "a") == index_name(tmp_path / "link") == index_name(tmp_path / "b" / ".." / "a")


def test_without_a_path_nothing_is_written(tmp_path: Path, file: Path):
    index = DigestIndex(None)
    index.put("a.png", file.stat(), FACTS)
    index.save(keep={"a.png"})
    assert list(tmp_path.iterdir()) == [file]


def test_an_index_that_did_not_change_is_not_written(tmp_path: Path, file: Path):
    path = tmp_path / "index.json"
    index = DigestIndex(path)
    index.put("a.png", file.stat(), FACTS)
    index.save(keep={"a.png"})
    before = path.stat().st_ino
    DigestIndex(path).save(keep={"a.png"})
    assert path.stat().st_ino == before
    DigestIndex(path).save(keep=set())
    assert json.loads(path.read_text())["files"] == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 0, "files": {}}', b'{"version": 2}', b'{"version": 2, "files": [1]}',
     b'{"version": 2, "files": {"a.png": [1, 2]}}',
     b'{"version": 2, "files": {"a.png": [1, 2, 3, 4, 5, "d", "x", 4]}}'],
)  # fmt: skip
def test_a_damaged_index_is_rebuilt(tmp_path: Path, file: Path, content: bytes):
    path = tmp_path / "index.json"
    path.write_bytes(content)
    index = DigestIndex(path)
    assert index.get("a.png", file.stat()) is None
    index.put("a.png", file.stat(), FACTS)
    index.save(keep={"a.png"})
    assert DigestIndex(path).get("a.png", file.stat()) == FACTS
