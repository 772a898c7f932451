"""How much host memory or disk a process may still use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from elbowroom.memory.plan import StoreKind

SHARE = 0.6
"""Part of what is free that the store may take by default: the rest is for the data, the optimizer, and others."""

_UNLIMITED = 1 << 60


def default_limit(kind: StoreKind, folder: Path) -> int:
    """Return how many bytes a store may hold if nobody says: 60 % of what is free."""
    free = shutil.disk_usage(folder).free if kind == "disk" else free_host_bytes()
    return int(free * SHARE)


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
    return int(figures.get("inactive_file", figures.get("total_inactive_file", 0)))
