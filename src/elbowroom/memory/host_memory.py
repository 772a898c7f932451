"""How much host memory or disk a process may still use."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from elbowroom.memory.plan import StoreKind

SHARE = 0.6
"""Part of what is free that the store may take by default: the rest is for the data, the optimizer, and others."""

_UNLIMITED = 1 << 60
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 128 << 10


def default_limit(kind: StoreKind, folder: Path) -> int:
    """Return how many bytes a store may hold if nobody says: 60 % of what is free.

    Args:
        kind: of the store.
        folder: of the disk store; it need not exist yet.
    """
    if kind != "disk":
        return int(free_host_bytes() * SHARE)
    folder = folder.absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return int(shutil.disk_usage(existing).free * SHARE)


def return_freed_memory() -> None:
    """Have the C library give large freed blocks back to the system at once, from here on, in the whole process.

    glibc raises its own threshold to the size of the blocks that it sees freed, and then keeps such blocks in a heap
    with holes: what goes to the disk would hardly make the process smaller (half of it, measured by
    `benchmarks/disk_store.py`). Elsewhere this does nothing.

    Source: `M_MMAP_THRESHOLD` in the manual page of mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take without swapping.

    The least of what the system has available and of what each control group above the process leaves (Linux,
    cgroup v1 and v2): in a container, the machine's memory says little.

    Args:
        root: where `proc` and `sys` are; another folder in tests.
    """
    return min([_system(root), *_control_groups(root)])


def _system(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figures = dict(line.split(":", 1) for line in lines)
    return int(figures["MemAvailable"].split()[0]) * 1024


def _control_groups(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")
        # A limit of any group above holds too.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(mount))):
            allowed = _number(folder / limit)
            if allowed is not None and allowed < _UNLIMITED:
                left.append(max(0, allowed - (_number(folder / used) or 0) + _reclaimable(folder)))
    return left


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(group: Path) -> int:
    """Return the bytes of the file cache that the kernel gives back when memory is short."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split() for line in lines)
    # Version 1 has both figures, and only the total one includes the groups below, as what is used does.
    return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))
