"""Aspect buckets: the few sizes that images are scaled and cropped to, so that they can share a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ASPECT = 4.0
"""Long side to short side. Images that are longer are cropped to this."""


@dataclass(frozen=True, order=True)
class Bucket:
    """The size that images are trained at, in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}×{self.height}"


def bucket_for(width: int, height: int, *, resolution: int, step: int, max_aspect: float = MAX_ASPECT) -> Bucket:
    """The bucket whose aspect ratio is nearest to the image's (as a ratio of ratios).

    For each short side there is one bucket: the longest whose area is not above resolution², so that none needs more
    memory than the square one; it is below by less than the fraction step / resolution. Both sides are multiples of
    `step`, and the aspect ratio is between 1 / `max_aspect` and `max_aspect`. A square image gets resolution ×
    resolution, an image on its side gets the bucket on its side, and of two equally near buckets the squarer one wins.

    Args:
        width, height: of the image, in pixels, as it is seen.
        resolution: side of the square bucket, in pixels; a multiple of `step`.
        step: what the model needs sides to be a multiple of (the autoencoder's scale times the patch size).

    Raises:
        ValueError: a size is not positive, or the resolution is not a multiple of the step.
    """
    if min(width, height, resolution, step) < 1 or max_aspect < 1:
        raise ValueError(
            f"sizes must be positive and max_aspect at least 1, but image {width}×{height}, resolution {resolution}, "
            f"step {step}, max_aspect {max_aspect}"
        )
    if resolution % step:
        below = resolution // step * step
        nearest = f"{below} or {below + step}" if below else f"{step}"
        raise ValueError(f"resolution {resolution} is not a multiple of {step}, which the model needs; use {nearest}")
    units = resolution // step
    wanted = math.log(max(width, height) / min(width, height))

    def distance(sides: tuple[int, int]) -> tuple[float, float]:
        aspect = math.log(sides[0] / sides[1])
        return abs(aspect - wanted), aspect

    all_sides = ((units**2 // short, short) for short in range(1, units + 1))
    long, short = min((sides for sides in all_sides if sides[0] <= max_aspect * sides[1]), key=distance)
    return Bucket(long * step, short * step) if width >= height else Bucket(short * step, long * step)


def scale_to_cover(width: int, height: int, bucket: Bucket) -> float:
    """The factor by which an image is scaled to cover a bucket; above 1 it is enlarged, and looks soft."""
    return max(bucket.width / width, bucket.height / height)


def kept_fraction(width: int, height: int, bucket: Bucket) -> float:
    """The share of an image's area, 0 to 1, that is left after scaling to cover the bucket and cropping."""
    scale = scale_to_cover(width, height, bucket)
    return bucket.width * bucket.height / (width * scale * height * scale)
