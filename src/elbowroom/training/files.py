"""Files that appear whole or not at all: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASIDE_PREFIX = ".aside-"
"""Names that begin like this are unfinished writes. A killed process may leave them; they are safe to delete."""


def flush_to_disk(path: Path) -> None:
    """Force a file's content, or a folder's list of names, onto the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds, the file that was written there becomes `path`.

    If the block raises, `path` stays as it was and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _unfinished_name(path).with_suffix(path.suffix)
    aside.touch(exist_ok=False)  # unlike tempfile's, with the permissions that the user gives to new files
    try:
        yield aside
        flush_to_disk(aside)
        aside.replace(path)
        flush_to_disk(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_written_aside(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; when the block succeeds, it becomes `path`.

    Every file in it is flushed before the rename. If the block raises, the temporary folder is removed.

    Args:
        path: the folder to make.
        replace: let the new folder take the place of one that exists.

    Raises:
        FileExistsError: `path` exists already, and `replace` is not set.
    """
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists already and is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _unfinished_name(path)
    aside.mkdir()
    try:
        yield aside
        for folder, _, names in os.walk(aside):
            for name in names:
                flush_to_disk(Path(folder) / name)
            flush_to_disk(Path(folder))
        if path.exists():
            path.rename(aside.with_name(f"{aside.name}-old"))
        aside.rename(path)
        flush_to_disk(path.parent)
    finally:
        for leftover in (aside, aside.with_name(f"{aside.name}-old")):
            shutil.rmtree(leftover, ignore_errors=True)


def _unfinished_name(path: Path) -> Path:
    return path.with_name(f"{ASIDE_PREFIX}{secrets.token_hex(8)}")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def remove_unfinished(folder: Path) -> list[Path]:
    """Remove what a killed process left half written in `folder`; return the removed paths."""
    leftovers = sorted(folder.glob(f"{ASIDE_PREFIX}*")) if folder.is_dir() else []
    for leftover in leftovers:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    return leftovers


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
