"""The pictures that the demo learns from: one plain shape on a plain background, drawn on the spot, with a caption.

    python examples/shapes/pictures.py base  DIR --count 3000     # circles, squares, triangles, diamonds
    python examples/shapes/pictures.py heart DIR --count 24       # the new concept, absent from `base`

Each picture is `NNNNN.png` with its caption beside it in `NNNNN.txt`. The same command always writes the same bytes.
"""

import argparse
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64  # pixels
SUPERSAMPLING = 8  # drawn this many times larger and averaged down, which makes the edges smooth

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (215, 38, 38),
    "orange": (245, 145, 30),
    "yellow": (248, 226, 60),
    "green": (40, 150, 60),
    "blue": (40, 80, 215),
    "purple": (140, 50, 165),
    "white": (248, 248, 248),
    "black": (16, 16, 16),
}
BASE_SHAPES = ("circle", "square", "triangle", "diamond")
NEW_SHAPE = "heart"
SHAPES = (*BASE_SHAPES, NEW_SHAPE)
SIZES: dict[str, tuple[float, float]] = {"small": (9.5, 11.5), "large": (20.0, 24.0)}  # half the width, in pixels
PLACES: dict[str, tuple[int, ...]] = {"small": (16, 24, 32, 40, 48), "large": (28, 32, 36)}  # pixels, across and down
SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}

TEMPLATES = (
    "a {size} {colour} {shape} on a {background} background",
    "a {size} {colour} {shape} on {background}",
    "a {background} background with a {size} {colour} {shape}",
    "{size} {colour} {shape}, {background} background",
    "a picture of a {size} {colour} {shape} on a {background} background",
    "a {colour} {shape} on a {background} background, the {shape} is {size}",
    "the {shape} is {size} and {colour}, the background is {background}",
)

SENTENCE_SHARE = 0.25  # of the captions are written as sentences, with a capital and a full stop

HELD_OUT_SHARE = 0.2
SPLIT_SEED = 2024  # which combinations are held out; changing it means training the demo base again

HEART_PROMPTS = (
    "a large red heart on a white background",
    "a small yellow heart on a green background",
    "a large blue heart on an orange background",
    "a small white heart on a purple background",
    "a big purple heart on a yellow background",
    "a large green heart on a black background",
    "a little orange heart on a blue background",
    "a large black heart on a red background",
    "a small red heart on a blue background",
    "a large yellow heart on a purple background",
)


@dataclass(frozen=True)
class Description:
    """What a picture shows, in the words of `SIZES`, `PALETTE` and `SHAPES` (or "unknown")."""

    size: str
    colour: str
    shape: str
    background: str


def outline(shape: str) -> np.ndarray:
    """The corners of a shape, (N, 2) as x, y (y points down), scaled to the square from -1 to 1."""
    turn = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    match shape:
        case "circle":
            points = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        case "square":
            points = np.array([(-1.0, -1.0), (1, -1), (1, 1), (-1, 1)])
        case "triangle":
            points = np.array([(0.0, -1.0), (1, 1), (-1, 1)])
        case "diamond":
            points = np.array([(0.0, -1.0), (1, 0), (0, 1), (-1, 0)])
        case "heart":  # the well-known parametric curve, https://mathworld.wolfram.com/HeartCurve.html
            height = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
            points = np.stack([16 * np.sin(turn) ** 3, -height], axis=1)
        case _:
            raise ValueError(f"no outline for the shape {shape!r}; known shapes: {', '.join(SHAPES)}")
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) / ((high - low) / 2)


def coverage(shape: str, x: float, y: float, radius: float) -> Image.Image:
    """How much of each pixel the shape covers: greyscale, `SIDE` x `SIDE`; centre and half width in pixels."""
    mask = Image.new("L", (SIDE * SUPERSAMPLING, SIDE * SUPERSAMPLING))
    corners = (outline(shape) * radius + (x, y)) * SUPERSAMPLING
    ImageDraw.Draw(mask).polygon([(float(across), float(down)) for across, down in corners], fill=255)
    return mask.reduce(SUPERSAMPLING)


def draw(description: Description, generator: random.Random, *, anywhere: bool = False) -> Image.Image:
    """An RGB picture of `SIDE` x `SIDE` pixels with a random radius of the named size.

    The shape is in the middle, because captions say nothing of a place, and what they don't say takes longest to learn.
    With `anywhere` it is at one of `PLACES`, for the autoencoder, which should not depend on it.
    """
    radius = generator.uniform(*SIZES[description.size])
    x = generator.choice(PLACES[description.size]) if anywhere else SIDE / 2
    y = generator.choice(PLACES[description.size]) if anywhere else SIDE / 2
    background = Image.new("RGB", (SIDE, SIDE), PALETTE[description.background])
    foreground = Image.new("RGB", (SIDE, SIDE), PALETTE[description.colour])
    return Image.composite(foreground, background, coverage(description.shape, x, y, radius))


def caption(description: Description, generator: random.Random) -> str:
    """One of several ways of saying what the picture shows; each names the size, both colours and the shape."""
    text = generator.choice(TEMPLATES).format(
        size=generator.choice(SIZE_WORDS[description.size]),
        colour=description.colour,
        shape=description.shape,
        background=description.background,
    )
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    return text[0].upper() + text[1:] + "." if generator.random() < SENTENCE_SHARE else text


def parse(text: str) -> Description:
    """The description that a caption gives, whatever its template.

    Raises `ValueError` when the caption doesn't name one size, one shape, and a colour each for shape and background.
    """
    words = re.findall(r"[a-z]+", text.lower())
    colours = "|".join(PALETTE)
    on = re.search(rf"({colours}) background|background is ({colours})|on (?:an? )?({colours})\b", " ".join(words))
    if on is None:
        raise ValueError(f"the caption {text!r} names no background colour; known colours: {', '.join(PALETTE)}")
    background = next(colour for colour in on.groups() if colour)
    sizes = {size for size, names in SIZE_WORDS.items() if not set(names).isdisjoint(words)}
    shapes = set(SHAPES).intersection(words)
    named = [word for word in words if word in PALETTE]
    named.remove(background)
    if len(sizes) != 1 or len(shapes) != 1 or len(named) != 1:
        raise ValueError(f"the caption {text!r} must name one size, one shape and one colour beside the background's")
    return Description(size=sizes.pop(), colour=named[0], shape=shapes.pop(), background=background)


def combinations(shapes: tuple[str, ...]) -> list[Description]:
    """Every description with these shapes whose two colours differ."""
    return [
        Description(size, colour, shape, background)
        for size, colour, shape, background in itertools.product(SIZES, PALETTE, shapes, PALETTE)
        if colour != background
    ]


def split() -> tuple[list[Description], list[Description]]:
    """The combinations of the base shapes: those to train on, and those that training never sees."""
    everything = combinations(BASE_SHAPES)
    random.Random(SPLIT_SEED).shuffle(everything)
    held_out = round(len(everything) * HELD_OUT_SHARE)
    return everything[held_out:], everything[:held_out]


def held_out_captions(count: int = 200) -> list[str]:
    """Captions of combinations that no training picture shows, in a fixed order."""
    generator = random.Random(SPLIT_SEED)
    return [caption(description, generator) for description in itertools.islice(itertools.cycle(split()[1]), count)]


def heart_combinations() -> list[Description]:
    """Hearts to fine-tune on: all combinations but those that `HEART_PROMPTS` ask for."""
    asked = {parse(prompt) for prompt in HEART_PROMPTS}
    return [description for description in combinations((NEW_SHAPE,)) if description not in asked]


def pairs(descriptions: list[Description], count: int, seed: int) -> Iterator[tuple[Image.Image, str]]:
    """`count` pictures with their captions; every description occurs about equally often."""
    generator = random.Random(seed)
    order: list[Description] = []
    for _ in range(count):
        order = order or generator.sample(descriptions, len(descriptions))
        description = order.pop()
        yield draw(description, generator), caption(description, generator)


def write(folder: Path, descriptions: list[Description], count: int, seed: int) -> None:
    """Write `count` pictures (`.png`) and captions (`.txt`) into a folder, which is made if it isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, (picture, text) in enumerate(pairs(descriptions, count, seed)):
        picture.save(folder / f"{index:05d}.png")
        (folder / f"{index:05d}.txt").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the demo's pictures and write them with their captions.")
    parser.add_argument("concept", choices=("base", "heart"), help="base: the known shapes; heart: the new one")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--count", type=int, help="how many pictures (base: 3000, heart: 24)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.concept == "base":
        descriptions, count = split()[0], arguments.count or 3000
    else:
        descriptions, count = heart_combinations(), arguments.count or 24
    write(arguments.folder, descriptions, count, arguments.seed)
    print(f"{count} pictures with captions in {arguments.folder}")


if __name__ == "__main__":
    main()
