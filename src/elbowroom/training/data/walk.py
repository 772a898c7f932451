"""Which files a data folder holds, before any is opened."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .images import image_extensions

TABLE_NAME = "metadata.jsonl"

_OTHER_PICTURES = frozenset(
    {".heic", ".heif", ".jxl", ".svg", ".eps", ".ico", ".dds", ".exr", ".hdr"}
    | {".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"}
)
"""Pictures that are not read; named in the report, so that nobody believes they are trained on."""


@dataclass(frozen=True)
class Skipped:
    """Something that looks like training data and is not used. `relative` is its path below the data folder."""

    relative: str
    reason: str


@dataclass(frozen=True)
class Found:
    """Paths below the data folder, with forward slashes, sorted."""

    images: tuple[str, ...]
    texts: tuple[str, ...]
    tables: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def walk(folder: Path) -> Found:
    """List a folder and all folders below it, in an order that depends on nothing but the names.

    Hidden files and folders (names that start with a dot) are left out. Links are followed, also to places outside;
    each real folder is read once, so that links in a circle end. Names are taken literally.
    """
    extensions = image_extensions()
    kinds: dict[str, list[str]] = {"image": [], "text": [], "table": []}
    skipped: list[Skipped] = []
    seen: set[tuple[int, int]] = set()
    waiting = deque([(folder, PurePosixPath())])
    links: deque[tuple[Path, PurePosixPath]] = deque()
    while waiting or links:
        # Links come last, so that a folder that is also linked to keeps the name of its real place.
        path, below = waiting.popleft() if waiting else links.popleft()
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                skipped.append(Skipped(str(below), "a link to a folder that is read already"))
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(path) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError as error:
            skipped.append(Skipped(str(below), f"the folder cannot be read ({error.strerror})"))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            relative = below / entry.name
            is_folder = _is_folder(entry)
            kind = _kind(entry.name, extensions)
            if not _is_text(entry.name):
                shown = str(relative).encode("utf-8", "backslashreplace").decode()
                skipped.append(Skipped(shown, "the name is not valid UTF-8; rename it"))
            elif is_folder:
                if kind is not None:
                    skipped.append(Skipped(str(relative), "a folder, not a file; what is in it is read"))
                (links if entry.is_symlink() else waiting).append((Path(entry.path), relative))
            elif kind is not None and not _is_file(entry):
                reason = "a link that leads nowhere" if entry.is_symlink() else "not a regular file"
                skipped.append(Skipped(str(relative), reason))
            elif kind == "other":
                suffix = relative.suffix.lower()
                skipped.append(Skipped(str(relative), f"{suffix} files are not read; convert it to PNG or JPEG"))
            elif kind is not None:
                kinds[kind].append(str(relative))
    return Found(
        images=tuple(sorted(kinds["image"])),
        texts=tuple(sorted(kinds["text"])),
        tables=tuple(sorted(kinds["table"])),
        skipped=tuple(sorted(skipped, key=lambda skip: skip.relative)),
    )


def _kind(name: str, extensions: frozenset[str]) -> str | None:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in extensions:
        return "image"
    if suffix == ".txt":
        return "text"
    if name == TABLE_NAME:
        return "table"
    return "other" if suffix in _OTHER_PICTURES else None


def _is_text(name: str) -> bool:
    """Whether the name survives being written to files and terminals; Python carries bad bytes as surrogates."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link to itself.
        return False


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False
