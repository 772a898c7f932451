"""The demo's pictures and captions: the same every time, understood by the parser, and split without leaks."""

import random
from itertools import combinations as choose

import numpy as np
import pytest
from PIL import Image

import pictures


def test_writing_twice_gives_the_same_bytes_and_one_caption_per_picture(tmp_path):
    for name in ("first", "second"):
        pictures.write(tmp_path / name, pictures.split()[0], count=12, seed=7)
    first = sorted((tmp_path / "first").iterdir())
    assert [path.name for path in first[:2]] == ["00000.png", "00000.txt"]
    assert len(first) == 24
    for path in first:
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_pictures_are_small_rgb_with_smooth_edges_and_plain_corners():
    description = pictures.Description("large", "black", "circle", "white")
    picture = pictures.draw(description, random.Random(0))
    assert (picture.mode, picture.size) == ("RGB", (64, 64))
    pixels = np.asarray(picture).reshape(-1, 3)
    between = (pixels[:, 0] > 20) & (pixels[:, 0] < 240)
    assert 0 < between.mean() < 0.1, "only the edge is neither black nor white"
    assert picture.getpixel((0, 0)) == picture.getpixel((63, 63)) == pictures.PALETTE["white"]


@pytest.mark.parametrize("shape", pictures.SHAPES)
def test_shapes_touch_all_sides_of_their_box(shape):
    corners = pictures.outline(shape)
    assert np.allclose([corners.min(axis=0), corners.max(axis=0)], [[-1, -1], [1, 1]])


def test_the_parser_understands_every_caption_that_is_written():
    generator = random.Random(3)
    seen = set()
    for description in pictures.combinations(pictures.SHAPES):
        for _ in range(3):
            text = pictures.caption(description, generator)
            seen.add(text)
            assert pictures.parse(text) == description, text
    assert any("an orange" in text for text in seen)
    assert not any("a orange" in text for text in seen)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a large red circle", "no background colour"),
        ("a large circle on a blue background", "one colour beside"),
        ("a red circle on a blue background", "one size"),
        ("a large red circle and a small square on blue", "one size"),
        ("a large red dog on a blue background", "one shape"),
    ],
)
def test_a_caption_that_leaves_something_open_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        pictures.parse(text)


def test_held_out_combinations_are_new_but_all_their_pairs_are_known():
    trained, held_out = pictures.split()
    assert not set(trained) & set(held_out)
    assert len(trained) + len(held_out) == 2 * 8 * 4 * 7
    fields = ("size", "colour", "shape", "background")
    for one, other in choose(fields, 2):

        def pair(description, one=one, other=other):
            return getattr(description, one), getattr(description, other)

        assert set(map(pair, held_out)) <= set(map(pair, trained))


def test_held_out_captions_are_fixed_and_never_about_a_trained_combination():
    captions = pictures.held_out_captions(200)
    assert captions == pictures.held_out_captions(200)
    assert len(captions) == 200
    trained = set(pictures.split()[0])
    assert not trained & {pictures.parse(text) for text in captions}


def test_hearts_to_learn_from_are_not_those_that_are_asked_for():
    asked = {pictures.parse(prompt) for prompt in pictures.HEART_PROMPTS}
    assert len(asked) == 10
    assert {one.shape for one in asked} == {"heart"}
    assert not asked & set(pictures.heart_combinations())
    assert "heart" not in {one.shape for one in pictures.combinations(pictures.BASE_SHAPES)}


def test_a_few_pictures_cover_many_descriptions():
    shown = [text for _, text in pictures.pairs(pictures.heart_combinations(), count=24, seed=0)]
    colours = {pictures.parse(text).colour for text in shown}
    assert len({pictures.parse(text) for text in shown}) == 24, "no description twice before all were drawn"
    assert len(colours) >= 6


def test_command_line_writes_the_heart_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pictures.py", "heart", str(tmp_path / "hearts"), "--count", "5"])
    pictures.main()
    assert "5 pictures" in capsys.readouterr().out
    texts = [path.read_text() for path in sorted((tmp_path / "hearts").glob("*.txt"))]
    assert len(texts) == 5
    assert all("heart" in text for text in texts)
    with Image.open(tmp_path / "hearts" / "00004.png") as picture:
        assert picture.size == (64, 64)
