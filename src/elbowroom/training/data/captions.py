"""Which caption belongs to which image."""

from __future__ import annotations

import json
import posixpath
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import DataError, some
from .walk import Found


@dataclass(frozen=True)
class Captions:
    """What the text files say.

    texts: image -> caption; images without one are missing here.
    unreadable: image -> why its caption cannot be used, naming the file.
    warnings: captions that somebody may have meant otherwise.
    """

    texts: dict[str, str]
    unreadable: dict[str, str]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    where: str
    text: str
    error: str | None = None


def read_captions(folder: Path, found: Found) -> Captions:
    """Find the caption of each image. The first of these that is not empty wins:

    1. `photo.png.txt` for `photo.png`,
    2. `photo.txt`, which all images of that stem share,
    3. the entry of `photo.png` in a `metadata.jsonl` (`{"file_name": "photo.png", "text": "..."}`, as in a Hugging
       Face `imagefolder`) in the image's folder or one above it; the nearest one first.

    `.txt` may be written in capitals; the stem may not differ. Captions are UTF-8. A byte-order mark is removed, and
    lines are joined by a space. Two sources that disagree, text files that several images share and captions without an
    image become warnings.

    Raises:
        DataError: a line of a `metadata.jsonl` is malformed.
    """
    files: dict[str, list[_Source]] = defaultdict(list)
    for name in sorted(found.texts, key=lambda name: (not name.endswith(".txt"), name)):
        files[name[: -len(".txt")]].append(_read_text(folder, name))
    entries: dict[str, list[_Source]] = defaultdict(list)
    for table in sorted(found.tables, key=lambda name: -name.count("/")):
        for image, source in _read_table(folder, table):
            entries[image].append(source)

    texts: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    ambiguous: list[str] = []
    users: dict[str, list[str]] = {name: [] for name in found.texts}
    for image in found.images:
        from_files = files.get(image, []) + files.get(str(PurePosixPath(image).with_suffix("")), [])
        for source in from_files:
            users[source.where].append(image)
        sources = [source for source in from_files + entries.get(image, []) if source.text or source.error]
        if not sources:
            continue
        first = sources[0]
        if first.error is not None:
            unreadable[image] = first.error
            continue
        texts[image] = first.text
        others = [source.where for source in sources[1:] if source.text != first.text]
        if others:
            ambiguous.append(f"{image} (from {first.where}, not from {', '.join(others)})")

    shared = [f"{name} ({', '.join(images)})" for name, images in users.items() if len(images) > 1]
    lonely = [name for name, images in users.items() if not images]
    lonely += [source.where for image in entries.keys() - set(found.images) for source in entries[image]]
    return Captions(
        texts,
        unreadable,
        tuple(
            _warnings(
                ("several captions that differ for one image, the first is used", ambiguous),
                ("one caption file for several images, all of them get it", shared),
                ("captions without an image", sorted(lonely)),
            )
        ),
    )


def _warnings(*kinds: tuple[str, list[str]]) -> Iterable[str]:
    return (f"{len(cases)} × {meaning}: {some(cases)}" for meaning, cases in kinds if cases)


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _read_text(folder: Path, name: str) -> _Source:
    try:
        text = (folder / name).read_bytes().decode("utf-8-sig")
        if "\0" in text:  # UTF-16 without a mark decodes as UTF-8 with a zero after each letter.
            raise ValueError("it contains zero bytes")
    except OSError as error:
        return _Source(name, "", f"its caption {name} cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        return _Source(name, "", f"its caption {name} is not UTF-8 ({bad}); save it as UTF-8")
    except ValueError as error:
        return _Source(name, "", f"its caption {name} is not UTF-8 ({error}); save it as UTF-8")
    return _Source(name, _one_line(text))


def _read_table(folder: Path, name: str) -> Iterable[tuple[str, _Source]]:
    try:
        lines = (folder / name).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{folder / name} cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                file_name, text = _read_entry(line)
            except ValueError as error:
                raise DataError(
                    f"{folder / name}, line {number}: {error}. "
                    'A line looks like {"file_name": "photo.png", "text": "the caption"}'
                ) from error
            image = posixpath.normpath(posixpath.join(posixpath.dirname(name), file_name))
            yield image, _Source(f"{name} line {number}", text)


def _read_entry(line: bytes) -> tuple[str, str]:
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(entry, dict):
        raise ValueError("is not an object in braces")
    for key, allowed in (("file_name", str), ("text", str | None)):
        if key not in entry:
            raise ValueError(f"has no {key!r}, only {', '.join(map(repr, entry)) or 'nothing'}")
        if not isinstance(entry[key], allowed):
            raise ValueError(f"has {entry[key]!r} as {key!r}, which is not a text")
    return entry["file_name"], _one_line(entry["text"] or "")
