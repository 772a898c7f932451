"""The checker tells what a picture shows, also when it is blurred or noisy, and admits what it can't tell."""

import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from checker import UNKNOWN, describe, matches
from pictures import PALETTE, SHAPES, SIDE, Description, combinations, coverage, draw


def plain(image):
    return image


def blurred(image):
    return image.filter(ImageFilter.GaussianBlur(1.2))


def noisy(image):
    noise = np.random.default_rng(0).normal(0, 15, (SIDE, SIDE, 3))
    return Image.fromarray((np.asarray(blurred(image)) + noise).clip(0, 255).astype(np.uint8))


def tinted(image):
    """Paler, as a picture from an autoencoder can be."""
    return Image.blend(image, Image.new("RGB", image.size, (128, 128, 128)), 0.12)


@pytest.mark.parametrize("spoil", [plain, blurred, noisy, tinted])
def test_every_part_is_told_right(spoil):
    generator = random.Random(spoil.__name__)
    for shape in SHAPES:
        for description in generator.sample(combinations((shape,)), 6):
            assert describe(spoil(draw(description, generator))) == description


def test_a_larger_picture_is_scaled_first():
    description = Description("small", "white", "heart", "purple")
    picture = draw(description, random.Random(1)).resize((256, 256), Image.Resampling.BICUBIC)
    assert describe(picture) == description


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a large red circle on a blue background", True),
        ("a small red circle on a blue background", True),  # the size isn't asked for
        ("a large red diamond on a blue background", False),
        ("a large green circle on a blue background", False),
        ("a large red circle on a white background", False),
        ("a large blue circle on a red background", False),
    ],
)
def test_matches_asks_for_shape_and_both_colours(caption, expected):
    picture = draw(Description("large", "red", "circle", "blue"), random.Random(2))
    assert matches(picture, caption) is expected


def test_a_plain_picture_has_a_background_and_nothing_else():
    picture = Image.new("RGB", (SIDE, SIDE), PALETTE["green"])
    assert describe(picture) == Description(UNKNOWN, UNKNOWN, UNKNOWN, "green")


def test_two_shapes_at_once_are_no_shape():
    picture = Image.new("RGB", (SIDE, SIDE), PALETTE["white"])
    for x in (16, 48):
        picture.paste(PALETTE["red"], mask=coverage("circle", x, 32, 10))
    assert describe(picture).shape == UNKNOWN


@pytest.mark.parametrize("corners", [[(8, 28), (56, 28), (56, 36), (8, 36)], [(10, 10), (54, 10), (54, 54), (32, 20)]])
def test_other_outlines_are_no_shape(corners):
    picture = Image.new("RGB", (SIDE, SIDE), PALETTE["white"])
    ImageDraw.Draw(picture).polygon(corners, fill=PALETTE["red"])
    assert describe(picture).shape == UNKNOWN


def test_noise_shows_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    assert describe(Image.fromarray(noise)).shape == UNKNOWN


def test_a_colour_far_from_the_palette_has_no_name():
    picture = Image.new("RGB", (SIDE, SIDE), PALETTE["white"])
    picture.paste((0, 255, 255), mask=coverage("square", 32, 32, 20))
    seen = describe(picture)
    assert (seen.shape, seen.colour, seen.background) == ("square", UNKNOWN, "white")
