from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elbowroom.training.data.buckets import MAX_ASPECT, Bucket, bucket_for, kept_fraction, scale_to_cover

sides = st.integers(1, 20_000)
steps = st.sampled_from([8, 16, 32, 64])
units = st.integers(1, 128)


@given(sides, sides, units, steps)
def test_sides_are_multiples_and_the_area_is_about_right(width: int, height: int, unit: int, step: int):
    resolution = unit * step
    bucket = bucket_for(width, height, resolution=resolution, step=step)
    assert bucket.width % step == 0 and bucket.height % step == 0
    assert min(bucket.width, bucket.height) >= step
    assert 1 - step / resolution < bucket.width * bucket.height / resolution**2 <= 1
    assert max(bucket.width, bucket.height) / min(bucket.width, bucket.height) <= MAX_ASPECT


@given(sides, units, steps)
def test_a_square_image_gets_the_resolution(side: int, unit: int, step: int):
    assert bucket_for(side, side, resolution=unit * step, step=step) == Bucket(unit * step, unit * step)


@given(sides, sides, units, steps)
def test_a_turned_image_gets_the_turned_bucket(width: int, height: int, unit: int, step: int):
    bucket = bucket_for(width, height, resolution=unit * step, step=step)
    assert bucket_for(height, width, resolution=unit * step, step=step) == Bucket(bucket.height, bucket.width)


@given(sides, sides, sides, units, steps)
def test_a_wider_image_never_gets_a_narrower_bucket(height: int, width: int, more: int, unit: int, step: int):
    narrow = bucket_for(width, height, resolution=unit * step, step=step)
    wide = bucket_for(width + more, height, resolution=unit * step, step=step)
    assert wide.width >= narrow.width and wide.height <= narrow.height


@given(sides, sides, st.integers(2, 30), units, steps)
def test_only_the_aspect_ratio_matters(width: int, height: int, factor: int, unit: int, step: int):
    small = bucket_for(width, height, resolution=unit * step, step=step)
    large = bucket_for(width * factor, height * factor, resolution=unit * step, step=step)
    # A rounding error may decide between two buckets that are equally near.
    ratios = sorted(bucket.width / bucket.height / (width / height) for bucket in (small, large))
    assert small == large or ratios[0] * ratios[1] == pytest.approx(1)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1920, 1080, Bucket(1360, 768)),
        (1080, 1920, Bucket(768, 1360)),
        (3000, 2000, Bucket(1248, 832)),
        (1, 2000, Bucket(512, 2048)),
    ],
)
def test_common_sizes(width: int, height: int, expected: Bucket):
    assert bucket_for(width, height, resolution=1024, step=16) == expected


@pytest.mark.parametrize("size", [(300, 200), (7, 9), (1000, 333), (640, 480), (5, 4), (1, 9)])
def test_the_nearest_of_all_buckets_is_chosen(size: tuple[int, int]):
    every = {bucket_for(width, 997, resolution=256, step=16) for width in range(100, 6000, 7)}
    assert len(every) == 17  # Short sides from 8 to 16 steps; all but the square one lying and standing.

    def distance(bucket: Bucket) -> float:
        return abs(math.log(bucket.width / bucket.height) - math.log(size[0] / size[1]))

    assert bucket_for(*size, resolution=256, step=16) == min(every, key=distance)


@pytest.mark.parametrize(
    ("resolution", "message"), [(500, "use 496 or 512"), (10, "use 16$"), (0, "must be positive"), (-16, "positive")]
)
def test_resolutions_that_do_not_fit_the_model(resolution: int, message: str):
    with pytest.raises(ValueError, match=message):
        bucket_for(100, 100, resolution=resolution, step=16)


def test_what_scaling_and_cropping_do():
    """E07: images smaller than the resolution, and long strips."""
    assert scale_to_cover(512, 256, Bucket(256, 256)) == 1
    assert scale_to_cover(128, 512, Bucket(256, 256)) == 2
    assert kept_fraction(512, 256, Bucket(256, 256)) == pytest.approx(0.5)
    assert kept_fraction(100, 100, Bucket(256, 256)) == pytest.approx(1)
    assert kept_fraction(1, 2000, Bucket(512, 2048)) == pytest.approx(0.002)
