from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from elbowroom.training.data import DataError, Scan, bucket_for, epoch_batches, load_image, require_samples, scan

from .pictures import picture, save


def names(scanned: Scan) -> list[str]:
    return [sample.relative for sample in scanned.samples]


def reasons(scanned: Scan) -> dict[str, str]:
    assert len({skip.relative for skip in scanned.skipped}) == len(scanned.skipped), "a file is listed twice"
    return {skip.relative: skip.reason for skip in scanned.skipped}


def test_samples_tell_size_digest_and_caption(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "sub" / "b.jpg", picture(48, 32), "turned", exif=exif)
    save(tmp_path / "a.png", picture(48, 32), "upright")
    first, second = scan(tmp_path, caption_missing="error").samples
    assert (first.relative, first.caption, first.width, first.height) == ("a.png", "upright", 48, 32)
    assert (second.relative, second.caption, second.width, second.height) == ("sub/b.jpg", "turned", 32, 48)
    assert second.path == tmp_path / "sub" / "b.jpg"
    assert first.digest != second.digest and len(first.digest) == 64


def test_damaged_images_are_listed_once_and_the_rest_is_used(tmp_path: Path):
    """E01: damaged images pass the quick scan."""
    for number in range(10):
        save(tmp_path / f"good{number}.png", picture(seed=number), "caption")
    cut = ["png", "jpg", "webp", "bmp", "tiff", "gif", "avif"]
    for extension in cut:
        path = save(tmp_path / f"cut.{extension}", picture(160, 128), "caption")
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.4)])
    (tmp_path / "zero.png").touch()
    (tmp_path / "page.jpg").write_text("<html><body>404</body></html>")
    save(tmp_path / "folder.png" / "inside.png", caption="inside")
    scanned = scan(tmp_path, caption_missing="empty")
    assert names(scanned) == ["folder.png/inside.png", *(f"good{number}.png" for number in range(10))]
    assert set(reasons(scanned)) == {*(f"cut.{extension}" for extension in cut), "zero.png", "page.jpg", "folder.png"}
    assert reasons(scanned)["zero.png"] == "the file is empty"
    assert "not an image" in reasons(scanned)["page.jpg"]
    assert "truncated" in reasons(scanned)["cut.jpg"]
    for sample in scanned.samples:
        assert load_image(sample.path).size == (sample.width, sample.height)


def test_hidden_files_odd_names_and_nesting(tmp_path: Path):
    """E08: hidden files, odd folder names, symlinks, nesting."""
    wanted = ["[set] a/x.png", "it's 50% #1/y.png", "😀/z.png", "1/2/3/deep.png", "star*?.png"]
    wanted.append("/".join(["long" * 20] * 4) + "/far.png")
    for name in wanted:
        save(tmp_path / name, caption=f"caption of {name}")
    save(tmp_path / "real.png").rename(tmp_path / "._x.png")
    save(tmp_path / ".hidden" / "x.png")
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "Thumbs.db").write_bytes(b"\0")
    scanned = scan(tmp_path, caption_missing="error")
    assert names(scanned) == sorted(wanted)
    assert [sample.caption for sample in scanned.samples] == [f"caption of {name}" for name in sorted(wanted)]
    assert scanned.skipped == () and scanned.warnings == ()


def test_links_are_followed_but_each_real_folder_is_read_once(tmp_path: Path):
    """E08: a link to a folder, a circle of links, a link to itself, a broken link."""
    save(tmp_path / "elsewhere" / "far.png", caption="far")
    data = tmp_path / "data"
    save(data / "sub" / "near.png", caption="near")
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "a_second_name").symlink_to(data / "sub")  # Sorted before "sub", yet the real name must win.
    (data / "sub" / "circle").symlink_to(data)
    (data / "broken.png").symlink_to(data / "nothing.png")
    (data / "itself.png").symlink_to(data / "itself.png")
    scanned = scan(data, caption_missing="error")
    assert names(scanned) == ["linked/far.png", "sub/near.png"]
    assert reasons(scanned) == {
        "a_second_name": "a link to a folder that is read already",
        "sub/circle": "a link to a folder that is read already",
        "broken.png": "a link that leads nowhere",
        "itself.png": "a link that leads nowhere",
    }


def test_files_that_cannot_be_read_are_listed(tmp_path: Path):
    """E08: unreadable files; here also those that would block a reader, and names that are not text."""
    save(tmp_path / "good.png", caption="good")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "phone.HEIC").write_bytes(b"ftypheic")
    expected = {"pipe.png": "not a regular file", "phone.HEIC": ".heic files are not read; convert it to PNG or JPEG"}
    if sys.platform == "linux":
        (tmp_path / os.fsdecode(b"bad\xff.png")).touch()
        expected["bad\\udcff.png"] = "the name is not valid UTF-8; rename it"
    scanned = scan(tmp_path, caption_missing="empty")
    assert names(scanned) == ["good.png"]
    assert reasons(scanned) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read every file")
def test_files_and_folders_without_permission_are_listed(tmp_path: Path):
    """E08: chmod 000."""
    save(tmp_path / "good.png")
    save(tmp_path / "locked.png").chmod(0)
    save(tmp_path / "closed" / "x.png").parent.chmod(0)
    try:
        scanned = scan(tmp_path, caption_missing="empty")
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert names(scanned) == ["good.png"]
    assert reasons(scanned) == {
        "locked.png": "cannot be read (Permission denied)",
        "closed": "the folder cannot be read (Permission denied)",
    }


def test_read_errors_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path / "bad.png")
    save(tmp_path / "good.png")

    real_open = Path.open

    def failing_open(self: Path, *args, **options):
        if self.name == "bad.png":
            raise OSError(5, "Input/output error")
        return real_open(self, *args, **options)

    monkeypatch.setattr(Path, "open", failing_open)
    scanned = scan(tmp_path, caption_missing="empty")
    assert names(scanned) == ["good.png"]
    assert reasons(scanned) == {"bad.png": "cannot be read (Input/output error)"}


def test_very_large_images_are_listed(tmp_path: Path):
    """E09: a decompression bomb, an image above the limit, a bomb of text."""
    save(tmp_path / "bomb.png", Image.new("1", (16000, 12000)))
    assert (tmp_path / "bomb.png").stat().st_size < 100_000
    save(tmp_path / "large.jpg", Image.new("L", (1001, 1000)))
    save(tmp_path / "just.png", Image.new("L", (1000, 1000)))
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * 70_000_000, zip=True)
    save(tmp_path / "text.png", pnginfo=text)
    scanned = scan(tmp_path, caption_missing="empty", max_pixels=1_000_000)
    assert names(scanned) == ["just.png"]
    assert "more pixels than Pillow decodes safely" in reasons(scanned)["bomb.png"]
    assert "1001×1000 is 1,001,000 pixels, above the limit of 1,000,000" in reasons(scanned)["large.jpg"]
    assert "too large" in reasons(scanned)["text.png"]


@pytest.mark.filterwarnings("error")
def test_a_large_photograph_within_the_limit_is_used_without_noise(tmp_path: Path):
    """E09: 90 megapixels are above the size at which Pillow warns."""
    save(tmp_path / "a.jpg", Image.new("L", (10000, 9000)))
    (sample,) = scan(tmp_path, caption_missing="empty").samples
    assert (sample.width, sample.height) == (10000, 9000)


def test_limit_also_holds_for_remembered_images(tmp_path: Path):
    save(tmp_path / "data" / "a.png", picture(48, 32))
    index = tmp_path / "index.json"
    assert scan(tmp_path / "data", caption_missing="empty", index=index).samples
    assert not scan(tmp_path / "data", caption_missing="empty", index=index, max_pixels=100).samples


def test_unchanged_images_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, index = tmp_path / "data", tmp_path / "index.json"
    for number in range(5):
        save(data / f"{number}.png", picture(seed=number))
    read: list[str] = []

    def counting_load(stream, **options):
        read.append(Path(stream.name).name)
        return load_image(stream, **options)

    monkeypatch.setattr(sys.modules[scan.__module__], "load_image", counting_load)
    first = scan(data, caption_missing="empty", index=index)
    assert sorted(read) == [f"{number}.png" for number in range(5)]
    read.clear()
    assert scan(data, caption_missing="empty", index=index) == first
    assert read == []
    save(data / "3.png", picture(seed=99))
    (data / "4.png").unlink()
    second = scan(data, caption_missing="empty", index=index)
    assert read == ["3.png"]
    assert [new == old for new, old in zip(second.samples, first.samples, strict=False)] == [True, True, True, False]


def test_an_edit_is_noticed_although_size_and_time_are_the_same(tmp_path: Path):
    """E10: edited pixels under the same name, size and modification time."""
    data, index = tmp_path / "data", tmp_path / "index.json"
    path = save(data / "a.bmp", picture(seed=1))
    before = path.stat()
    (first,) = scan(data, caption_missing="empty", index=index).samples
    save(path, picture(seed=2))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    (second,) = scan(data, caption_missing="empty", index=index).samples
    assert second.digest != first.digest


def test_an_edit_right_after_the_scan_is_noticed(tmp_path: Path):
    """E10: file systems count time in steps, and an edit within the same step must not be missed."""
    data, index = tmp_path / "data", tmp_path / "index.json"
    contents = [save(tmp_path / f"{seed}.bmp", picture(8, 8, seed)).read_bytes() for seed in range(2)]
    path = data / "a.bmp"
    data.mkdir()
    for turn in range(20):
        path.write_bytes(contents[turn % 2])
        (sample,) = scan(data, caption_missing="empty", index=index).samples
        path.write_bytes(contents[(turn + 1) % 2])
        (edited,) = scan(data, caption_missing="empty", index=index).samples
        assert edited.digest != sample.digest


def test_an_interrupted_scan_remembers_what_it_read(tmp_path: Path):
    data, index = tmp_path / "data", tmp_path / "index.json"
    for number in range(8):
        save(data / f"{number}.png", picture(seed=number))

    def interrupt(done: int, total: int) -> None:
        assert total == 8
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(data, caption_missing="empty", index=index, progress=interrupt)
    assert all(f'"{number}.png"' in index.read_text() for number in range(3))


def test_progress_counts_every_image(tmp_path: Path):
    for number in range(3):
        save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_bytes(b"bad")
    calls: list[tuple[int, int]] = []
    scan(tmp_path, caption_missing="empty", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_names_that_differ_little_stay_apart(tmp_path: Path):
    """E06: same stem, dots in names."""
    images = [
        "a.png",
        "a.jpg",
        "aaa.bbb.jpg",
        "aaa.ccc.jpg",
        "one/same.png",
        "two/same.png",
        "x_0001.png",
        "X_0001.png",
    ]
    for seed, name in enumerate(images):
        path = save(tmp_path / name, picture(seed=seed))
        path.with_name(path.name + ".txt").write_text(name)
    if len(list(tmp_path.rglob("?_0001.png"))) == 1:
        images.remove("x_0001.png")  # A file system that does not tell cases apart.
    scanned = scan(tmp_path, caption_missing="error")
    assert names(scanned) == sorted(images)
    assert len({sample.digest for sample in scanned.samples}) == len(images)
    assert all(sample.caption.lower() == sample.relative.lower() for sample in scanned.samples)


@pytest.mark.parametrize(
    ("policy", "captions", "skipped"), [("skip", ["text"], ["blank.png", "none.png"]), ("empty", ["", "text", ""], [])]
)
def test_missing_captions_follow_the_policy(tmp_path: Path, policy, captions: list[str], skipped: list[str]):
    """E05: missing and empty captions, and a warning that cannot be missed."""
    save(tmp_path / "blank.png", caption=" \r\n ")
    save(tmp_path / "full.png", caption="text")
    save(tmp_path / "none.png")
    scanned = scan(tmp_path, caption_missing=policy)
    assert [sample.caption for sample in scanned.samples] == captions
    assert reasons(scanned) == dict.fromkeys(skipped, "no caption")
    assert (scanned.found, scanned.captions_missing) == (3, 2)
    assert scanned.warnings[0].startswith("MORE THAN HALF OF THE IMAGES HAVE NO CAPTION")
    assert "2 of 3" in scanned.warnings[0]


def test_missing_captions_can_be_an_error(tmp_path: Path):
    """E05: the strict policy stops before any work, with numbers and names."""
    save(tmp_path / "full.png", caption="text")
    save(tmp_path / "none.png")
    with pytest.raises(DataError, match=r"1 of 2 images in .* have no caption: none\.png"):
        scan(tmp_path, caption_missing="error")


def test_half_of_the_captions_missing_is_not_yet_an_alarm(tmp_path: Path):
    save(tmp_path / "full.png", caption="text")
    save(tmp_path / "none.png")
    assert scan(tmp_path, caption_missing="empty").warnings == ()


def test_folder_must_exist(tmp_path: Path):
    with pytest.raises(DataError, match="missing; name a folder"):
        scan(tmp_path / "nothing", caption_missing="skip")
    with pytest.raises(DataError, match="not a folder"):
        scan(save(tmp_path / "a.png"), caption_missing="skip")


def test_nothing_usable_is_an_error_that_helps(tmp_path: Path):
    """E07: zero usable images: numbers, and the smallest change that helps."""
    with pytest.raises(DataError, match=r"0 found, 0 without caption, 0 usable\. Put an image there"):
        require_samples(scan(tmp_path, caption_missing="skip"))
    save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"1 found, 1 without caption, 0 usable\. Write a .* such as a\.png, or set"):
        require_samples(scan(tmp_path, caption_missing="skip"))
    (tmp_path / "a.png").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"0 usable\. One good image is enough to start\. Left out: a\.png \(not an"):
        require_samples(scan(tmp_path, caption_missing="empty"))


def test_one_image_is_enough_for_any_batch(tmp_path: Path):
    """E07: one small image with batch 4 trains, as a partial batch."""
    save(tmp_path / "a.png", picture(1, 2000), "strip")
    scanned = scan(tmp_path, caption_missing="skip")
    require_samples(scanned)
    buckets = [bucket_for(sample.width, sample.height, resolution=64, step=16) for sample in scanned.samples]
    assert epoch_batches(buckets, batch=4, repeats=1, seed=0, epoch=0) == ((0,),)
