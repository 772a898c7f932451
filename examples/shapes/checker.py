"""Looks at a picture and says which shape it shows, in which colours: NumPy and Pillow, no learned part.

The colours are the nearest ones of the palette; the shape is the one whose drawn outline, moved and scaled, overlaps
best with the pixels that aren't background. A picture that fits nothing well is "unknown", never the nearest guess.
"""

import itertools

import numpy as np
from PIL import Image, ImageFilter

from pictures import PALETTE, SHAPES, SIDE, SIZES, Description, coverage, outline, parse

UNKNOWN = "unknown"
FARTHEST_COLOUR = 70.0  # a colour farther than this from all of the palette (RGB distance, 0 to 441) has no name
LEAST_OVERLAP = 0.88  # intersection over union; a heart overlaps with the best circle, triangle or diamond by less
LEAST_AREA, MOST_AREA = 0.01, 0.7  # share of the picture that the shape may cover

_NAMES = list(PALETTE)
_COLOURS = np.array(list(PALETTE.values()), dtype=np.float32)


def describe(image: Image.Image) -> Description:
    """What the picture shows; parts that can't be told are "unknown".

    The picture should be `SIDE` x `SIDE` pixels, as `pictures.draw` makes them; others are scaled to that first.
    """
    rgb = image.convert("RGB")
    if rgb.size != (SIDE, SIDE):
        rgb = rgb.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    # The median of nine pixels takes away noise and leaves edges where they are.
    pixels = np.asarray(rgb.filter(ImageFilter.MedianFilter(3)), dtype=np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background_colour = np.median(border, axis=0)
    background = _nearest_colour(background_colour)
    mask, colour = _segment(pixels, background_colour)
    if not LEAST_AREA < mask.mean() < MOST_AREA:
        return Description(size=UNKNOWN, colour=UNKNOWN, shape=UNKNOWN, background=background)
    shape, radius = _classify(mask)
    middle = (SIZES["small"][1] + SIZES["large"][0]) / 2
    size = UNKNOWN if shape == UNKNOWN else "small" if radius < middle else "large"
    return Description(size=size, colour=colour, shape=shape, background=background)


def matches(image: Image.Image, caption: str) -> bool:
    """Whether the picture shows the caption's shape in its colour on its background; the size isn't asked for."""
    seen, asked = describe(image), parse(caption)
    return (seen.shape, seen.colour, seen.background) == (asked.shape, asked.colour, asked.background)


def _nearest_colour(colour: np.ndarray) -> str:
    distances = np.linalg.norm(_COLOURS - colour, axis=1)
    return _NAMES[int(distances.argmin())] if distances.min() <= FARTHEST_COLOUR else UNKNOWN


def _segment(pixels: np.ndarray, background: np.ndarray) -> tuple[np.ndarray, str]:
    """The shape's pixels, (SIDE, SIDE) bool, and the name of their colour.

    The colour is the median of the pixels that differ most from the background. A pixel then belongs to the
    shape when it is nearer to that colour than to the background, so an edge blurred by the autoencoder is cut at
    its middle and not by how much the two colours contrast.
    """
    difference = np.linalg.norm(pixels - background, axis=2)
    sure = difference >= 0.75 * np.quantile(difference, 0.98)
    foreground = np.median(pixels[sure], axis=0)
    mask = np.linalg.norm(pixels - foreground, axis=2) < difference
    return mask, _nearest_colour(foreground)


def _classify(mask: np.ndarray) -> tuple[str, float]:
    """The shape that overlaps best with the mask and its half width in pixels; (`UNKNOWN`, 0) when none does well."""
    found = {shape: _overlap(mask, shape) for shape in SHAPES}
    best = max(found, key=lambda shape: found[shape][0])
    overlap, radius = found[best]
    return (best, radius) if overlap >= LEAST_OVERLAP else (UNKNOWN, 0.0)


def _overlap(mask: np.ndarray, shape: str) -> tuple[float, float]:
    """Best intersection over union of the mask with the shape, and the half width it was found at.

    Equal areas and equal centres of mass give the first guess; the neighbourhood of it is searched.
    """
    corners = outline(shape)
    unit_area, unit_centre = _area_and_centre(corners)
    rows, columns = np.nonzero(mask)
    guess = float(np.sqrt(mask.sum() / unit_area))
    best = (0.0, guess)
    for factor, across, down in itertools.product((0.94, 1.0, 1.06), (-1, 0, 1), (-1, 0, 1)):
        radius = guess * factor
        x = columns.mean() + 0.5 - unit_centre[0] * radius + across
        y = rows.mean() + 0.5 - unit_centre[1] * radius + down
        template = np.asarray(coverage(shape, x, y, radius)) > 127
        overlap = float((mask & template).sum() / (mask | template).sum())
        best = max(best, (overlap, radius))
    return best


def _area_and_centre(corners: np.ndarray) -> tuple[float, np.ndarray]:
    """Area and centre of mass of a polygon (the shoelace formula)."""
    following = np.roll(corners, -1, axis=0)
    cross = corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]
    area = cross.sum() / 2
    return abs(float(area)), ((corners + following) * cross[:, None]).sum(axis=0) / (6 * area)
