"""A picture of the training pictures, so that a person can look at what is cut off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..files import written_aside
from .buckets import Bucket
from .images import fit, load_image
from .scan import Sample, Scan

_LONG_SIDE = 160
_GAP = 8
_LINE = 20


def contact_sheet(scan: Scan, buckets: Sequence[Bucket], path: Path, *, most: int = 12) -> None:
    """Write a PNG of the pictures as they will be trained on, cropped, one row for each bucket.

    Args:
        buckets: the bucket of each sample of the scan.
        path: where to write, whole or not at all.
        most: how many pictures of a bucket are shown, the first ones by name; the row says how many there are.

    Raises:
        ImageError: a picture has been damaged since the scan.
        ValueError: there are no samples, or not one bucket for each.
    """
    rows: dict[Bucket, list[Sample]] = defaultdict(list)
    for sample, bucket in zip(scan.samples, buckets, strict=True):
        rows[bucket].append(sample)
    if not rows:
        raise ValueError(f"there are no pictures to show: {scan.folder} has no usable images")
    strips = [_strip(bucket, samples, most) for bucket, samples in sorted(rows.items())]
    sheet = Image.new("RGB", (max(strip.width for strip in strips), sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    with written_aside(path) as aside:
        sheet.save(aside, format="PNG")


def _strip(bucket: Bucket, samples: Sequence[Sample], most: int) -> Image.Image:
    shown = samples[:most]
    shrink = _LONG_SIDE / max(bucket.width, bucket.height)
    width, height = round(bucket.width * shrink), round(bucket.height * shrink)
    # A plain x: the font that comes with Pillow has no multiplication sign.
    label = f"{bucket.width} x {bucket.height}: {len(samples)} images"
    if len(samples) > most:
        label += f", the first {most} shown"
    font = ImageFont.load_default(14)
    needed = max(len(shown) * (width + _GAP), round(font.getlength(label)) + _GAP)
    strip = Image.new("RGB", (needed + _GAP, height + _LINE + 2 * _GAP), "white")
    ImageDraw.Draw(strip).text((_GAP, _GAP // 2), label, fill="black", font=font)
    for position, sample in enumerate(shown):
        trained_on = fit(load_image(sample.path), bucket.width, bucket.height)
        small = trained_on.resize((width, height), Image.Resampling.LANCZOS)
        strip.paste(small, (_GAP + position * (width + _GAP), _LINE + _GAP))
    return strip
