"""How much host memory or disk a process may still use."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

from elbowroom.memory.host_memory import SHARE, default_limit, free_host_bytes


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
        "sys/fs/cgroup/memory/c/memory.stat": "inactive_file 7\ntotal_inactive_file 100000\n",
    }
    assert free_host_bytes(write(tmp_path, first)) == 1_600_000


def test_the_default_limit_is_a_share_of_what_is_free(tmp_path):
    assert 0 < default_limit("pinned", tmp_path) < free_host_bytes()
    assert default_limit("disk", tmp_path) > 0


def test_the_folder_of_the_disk_store_need_not_exist_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free={tmp_path: 1000}[folder]))
    assert default_limit("disk", tmp_path / "not" / "yet") == 1000 * SHARE
