from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from elbowroom.training.data import Bucket, Scan, bucket_for, contact_sheet, render, scan, summarize

from .pictures import picture, save


def buckets_of(scanned: Scan) -> list[Bucket]:
    return [bucket_for(sample.width, sample.height, resolution=64, step=16) for sample in scanned.samples]


def text(renderable, width: int = 120) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def scanned(tmp_path: Path) -> Scan:
    data = tmp_path / "data"
    for number in range(5):
        save(data / f"square{number}.png", picture(80, 80, number), f"number {number}" + "!" * number)
    save(data / "[red] wide/w.png", picture(160, 80), "wide")
    save(data / "small.png", picture(20, 20), "a small one")
    save(data / "strip.png", picture(2000, 100), "x")
    save(data / "none.png", picture(80, 80))
    (data / "[bold]bad.png").write_bytes(b"<html>")
    (data / "[bold]bad.txt").write_text("bad")
    return scan(data, caption_missing="skip")


def test_numbers(scanned: Scan):
    """E07: what is used, what is dropped and why, and where the steps come from."""
    summary = summarize(scanned, buckets_of(scanned), batch=4, repeats=2, accumulation=3)
    assert (summary.found, summary.used, summary.captions_missing) == (10, 8, 1)
    assert [skip.relative for skip in summary.skipped] == ["[bold]bad.png", "none.png"]
    assert summary.upscaled == ("small.png",)
    assert summary.heavily_cropped == ("strip.png",)
    assert summary.shortest_caption == ("strip.png", 1)
    assert summary.longest_caption == ("square4.png", 12)
    assert [(use.bucket, use.samples, use.batches) for use in summary.buckets] == [
        (Bucket(64, 64), 6, 3),
        (Bucket(80, 48), 1, 1),
        (Bucket(128, 32), 1, 1),
    ]
    assert (summary.batches, summary.steps) == (5, 2)


def test_rendering_tells_everything_literally(scanned: Scan):
    shown = text(render(summarize(scanned, buckets_of(scanned), batch=4, repeats=2, accumulation=3)))
    for expected in (
        "8 used, 2 left out",
        "1 missing; shortest 1 characters (strip.png), longest 12 (square4.png)",
        "1, smaller than their bucket: small.png",
        "1 by more than half: strip.png",
        "8 images × 2 = 16 in 5 batches of at most 4; 2 optimizer steps of at most 3 batches",
        "[bold]bad.png",
        "not an image",
        "Left out (2)",
    ):
        assert expected in shown
    assert any(line.split() == ["│", "64×64", "│", "6", "│", "3", "│", "4", "│"] for line in shown.splitlines())


def test_warnings_come_first(tmp_path: Path):
    """E05: impossible to miss."""
    for number in range(3):
        save(tmp_path / f"{number}.png")
    scanned = scan(tmp_path, caption_missing="skip")
    lines = text(render(summarize(scanned, [], batch=1, repeats=1, accumulation=1))).splitlines()
    assert "Warning" in lines[0]
    assert "MORE THAN HALF OF THE IMAGES HAVE NO CAPTION" in lines[1]


def test_long_lists_of_files_are_cut_unless_asked_for(tmp_path: Path):
    for number in range(30):
        save(tmp_path / f"{number:02}.png", picture(8, 8))
    summary = summarize(scan(tmp_path, caption_missing="skip"), [], batch=1, repeats=1, accumulation=1)
    shown = text(render(summary))
    assert "19.png" in shown and "20.png" not in shown and "and 10 more" in shown
    assert "29.png" in text(render(summary, most=None))


def test_an_empty_folder_is_summed_up_without_error(tmp_path: Path):
    """E07: 0 images."""
    scanned = scan(tmp_path, caption_missing="skip")
    summary = summarize(scanned, [], batch=4, repeats=1, accumulation=1)
    assert (summary.used, summary.batches, summary.steps, summary.shortest_caption) == (0, 0, 0, None)
    assert "0 used, 0 left out" in text(render(summary))


def test_every_sample_needs_a_bucket(scanned: Scan):
    with pytest.raises(ValueError):
        summarize(scanned, buckets_of(scanned)[:-1], batch=1, repeats=1, accumulation=1)


def test_contact_sheet_shows_the_crops_in_a_row_per_bucket(tmp_path: Path):
    wide = Image.new("RGB", (600, 100), "red")
    wide.paste("lime", (100, 0, 500, 100))  # At 4:1 the red ends are cut off.
    save(tmp_path / "data" / "a.png", wide)
    save(tmp_path / "data" / "b.png", Image.new("RGB", (100, 100), "blue"))
    scanned = scan(tmp_path / "data", caption_missing="empty")
    path = tmp_path / "new" / "sheet.png"
    contact_sheet(scanned, buckets_of(scanned), path)
    sheet = np.asarray(Image.open(path).convert("RGB")).astype(int)

    def area(colour: tuple[int, int, int]) -> int:
        return int((np.abs(sheet - colour).max(axis=2) < 30).sum())

    assert area((0, 0, 255)) == pytest.approx(160 * 160, rel=0.02)
    assert area((0, 255, 0)) == pytest.approx(160 * 40, rel=0.05)
    assert area((255, 0, 0)) < 100
    rows = [
        np.flatnonzero((np.abs(sheet - colour).max(axis=2) < 30).any(axis=1)) for colour in ((0, 0, 255), (0, 255, 0))
    ]
    assert rows[0].max() < rows[1].min()
    assert list(path.parent.iterdir()) == [path]


def test_contact_sheet_is_bounded_and_needs_pictures(tmp_path: Path):
    for number in range(4):
        save(tmp_path / "data" / f"{number}.png", picture(64, 64, number))
    scanned = scan(tmp_path / "data", caption_missing="empty")
    contact_sheet(scanned, buckets_of(scanned), tmp_path / "two.png", most=2)
    contact_sheet(scanned, buckets_of(scanned), tmp_path / "four.png")
    with Image.open(tmp_path / "two.png") as two, Image.open(tmp_path / "four.png") as four:
        assert two.width < four.width
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no usable images"):
        contact_sheet(scan(tmp_path / "empty", caption_missing="empty"), [], tmp_path / "none.png")
