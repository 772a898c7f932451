"""What is already known about image files, so that an unchanged one is not read again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import astuple, dataclass
from pathlib import Path

from ..files import write_text

_VERSION = 2


@dataclass(frozen=True)
class Facts:
    """What decoding a file told: the SHA-256 of its bytes, and its size in pixels as it is seen."""

    digest: str
    width: int
    height: int


class DigestIndex:
    """A JSON file that remembers `Facts` by relative path, valid for the same file with the same size and times.

    The time of the last status change (ctime) is compared too, because it cannot be set back as the time of the last
    modification can. A missing or damaged index is an empty one. Without a path, nothing is remembered.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._entries = _read(path) if path is not None else {}
        self._changed = False

    def get(self, relative: str, status: os.stat_result) -> Facts | None:
        """The facts about a file, or None if it is new or has changed."""
        identity, facts = self._entries.get(relative, (None, None))
        return facts if identity == _identity(status) else None

    def put(self, relative: str, status: os.stat_result, facts: Facts) -> None:
        """Remember facts. `status` must have been taken before the file was read."""
        self._entries[relative] = (_identity(status), facts)
        self._changed = True

    def save(self, keep: Collection[str]) -> None:
        """Write the index, whole or not at all, forgetting all paths that are not in `keep`."""
        # A copy, because after an interruption a thread may still be adding to it.
        kept = {relative: entry for relative, entry in self._entries.copy().items() if relative in keep}
        if self._path is None or not (self._changed or len(kept) < len(self._entries)):
            return
        files = {relative: [*identity, *astuple(facts)] for relative, (identity, facts) in sorted(kept.items())}
        write_text(self._path, json.dumps({"version": _VERSION, "files": files}, indent=0))
        self._changed = False


def index_name(folder: Path) -> str:
    """The name of the index of a data folder: each has its own, since relative paths repeat."""
    return f"digests-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"


_Identity = tuple[int, int, int, int, int]


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(path: Path) -> dict[str, tuple[_Identity, Facts]]:
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != _VERSION:
            return {}
        return {
            relative: (
                (int(device), int(inode), int(size), int(mtime), int(ctime)),
                Facts(str(digest), int(width), int(height)),
            )
            for relative, (device, inode, size, mtime, ctime, digest, width, height) in content["files"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
