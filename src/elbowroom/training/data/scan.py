"""What a data folder holds: the samples that can be trained on, and what is left out and why."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .captions import read_captions
from .digests import DigestIndex, Facts
from .errors import DataError, some
from .images import MAX_PIXELS, ImageError, load_image, too_many_pixels
from .walk import Skipped, walk

Progress = Callable[[int, int], None]
"""Called with how many images have been examined, and how many there are."""

_NO_CAPTION = "no caption"

_CLOCK_TICK_SECONDS = 0.02
"""Above the step in which common file systems count time (up to 10 ms)."""


@dataclass(frozen=True)
class Sample:
    """An image with its caption.

    relative: its path below the data folder, with forward slashes and its extension.
    width, height: in pixels, as the image is seen after the EXIF rotation.
    digest: the SHA-256 of the file, in hexadecimal.
    """

    relative: str
    path: Path
    caption: str
    width: int
    height: int
    digest: str


@dataclass(frozen=True)
class Scan:
    """The content of a data folder. `found` counts the images by name; `captions_missing` those without a caption."""

    folder: Path
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...]
    found: int
    captions_missing: int


def scan(
    folder: Path,
    *,
    caption_missing: Literal["skip", "empty", "error"],
    index: Path | None = None,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
) -> Scan:
    """Look at every image in a folder and below, decode it whole, and pair it with its caption.

    Whatever this returns as a sample, `load_image` loads. Which files count is told by `walk`, which caption belongs
    to an image by `read_captions`. The order of the samples is that of their relative paths.

    Args:
        caption_missing: what happens to an image without a caption, or with an empty one: left out (and listed), used
            with an empty caption, or an error.
        index: a JSON file that remembers digests and sizes, so that unchanged images are not read again.
        max_pixels: larger images are left out (and listed).

    Raises:
        DataError: the folder does not exist, a `metadata.jsonl` is malformed, or a caption is missing and
            `caption_missing` is "error".
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is {'not a folder' if folder.exists() else 'missing'}; name a folder with images")
    found = walk(folder)
    captions = read_captions(folder, found)
    without = [image for image in found.images if image not in captions.texts and image not in captions.unreadable]
    if without and caption_missing == "error":
        raise DataError(
            f"{len(without)} of {len(found.images)} images in {folder} have no caption: {some(without)}. "
            "Write a .txt file of the same name beside each, or set caption_missing to skip or empty"
        )
    skipped = [*found.skipped, *(Skipped(*item) for item in captions.unreadable.items())]
    if caption_missing == "skip":
        skipped += [Skipped(image, _NO_CAPTION) for image in without]
    left_out = {skip.relative for skip in skipped}
    images = [image for image in found.images if image not in left_out]

    samples: list[Sample] = []
    known = DigestIndex(index)
    try:
        for image, result in _examine_all(folder, images, known, max_pixels, progress):
            if isinstance(result, str):
                skipped.append(Skipped(image, result))
            else:
                caption = captions.texts.get(image, "")
                samples.append(Sample(image, folder / image, caption, result.width, result.height, result.digest))
    finally:
        known.save(keep=set(found.images))  # Also when interrupted: what has been read need not be read again.
    return Scan(
        folder=folder,
        samples=tuple(samples),
        skipped=tuple(sorted(skipped, key=lambda skip: skip.relative)),
        warnings=(*_caption_alarm(without, len(found.images), caption_missing), *captions.warnings),
        found=len(found.images),
        captions_missing=len(without),
    )


def require_samples(scanned: Scan) -> None:
    """Stop, with numbers and the smallest change that helps, if there is nothing to train on.

    Raises:
        DataError: the scan has no samples.
    """
    if scanned.samples:
        return
    lacking = [skip.relative for skip in scanned.skipped if skip.reason == _NO_CAPTION]
    if lacking:
        help_ = (
            f"Write a caption into a .txt file of the same name beside one of them, such as {lacking[0]}, or set "
            "caption_missing to empty to train without captions"
        )
    elif scanned.skipped:
        reasons = some([f"{skip.relative} ({skip.reason})" for skip in scanned.skipped])
        help_ = f"One good image is enough to start. Left out: {reasons}"
    else:
        help_ = "Put an image there (.png, .jpg, .webp, ...) and a .txt of the same name, or name another folder"
    raise DataError(
        f"There is no image to train on in {scanned.folder}: {scanned.found} found, {scanned.captions_missing} without "
        f"caption, 0 usable. {help_}"
    )


def _caption_alarm(without: list[str], found: int, policy: str) -> tuple[str, ...]:
    if 2 * len(without) <= found:
        return ()
    consequence = {"skip": "THEY ARE LEFT OUT", "empty": "THEY ARE TRAINED WITH AN EMPTY CAPTION"}[policy]
    return (
        f"MORE THAN HALF OF THE IMAGES HAVE NO CAPTION, {consequence}: {len(without)} of {found} ({some(without, 3)}). "
        "A caption is a .txt file (UTF-8, not empty) with the name of its image",
    )


def _examine_all(
    folder: Path, images: list[str], known: DigestIndex, max_pixels: int, progress: Progress | None
) -> Iterator[tuple[str, Facts | str]]:
    """Yield each image, in order, with its facts or the reason why it cannot be used."""
    # Pillow decodes outside the interpreter lock; few threads, because each may hold one large image.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # What matters of them is in the reasons.
        results = threads.map(lambda image: _examine(folder, image, known, max_pixels), images)
        try:
            for done, (image, result) in enumerate(zip(images, results, strict=True), start=1):
                yield image, result
                if progress is not None:
                    progress(done, len(images))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _examine(folder: Path, image: str, known: DigestIndex, max_pixels: int) -> Facts | str:
    path = folder / image
    try:
        status = path.stat()
        if status.st_size == 0:
            return "the file is empty"
        facts = known.get(image, status)
        if facts is None:
            _outlast_clock_tick(status)
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                stream.seek(0)
                pixels = load_image(stream, max_pixels=max_pixels)
            facts = Facts(digest, pixels.width, pixels.height)
            known.put(image, status, facts)
        return too_many_pixels(facts.width, facts.height, max_pixels) or facts
    except ImageError as error:
        return error.reason
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _outlast_clock_tick(status: os.stat_result) -> None:
    """Wait until a change made from now on would show in the file's times; needed only for a file just written."""
    age = time.time() - status.st_ctime_ns / 1e9
    if 0 <= age < _CLOCK_TICK_SECONDS:
        time.sleep(_CLOCK_TICK_SECONDS - age)
