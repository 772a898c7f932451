from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from elbowroom.training.data.images import ImageError, fit, image_extensions, load_image, to_tensor

from .pictures import picture, save

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners() -> Image.Image:
    """4 × 2: red, green / blue, white, in 2 × 1 tiles; every flip and rotation looks different."""
    image = Image.new("RGB", (4, 2))
    for box, colour in (((0, 0, 2, 1), RED), ((2, 0, 4, 1), GREEN), ((0, 1, 2, 2), BLUE), ((2, 1, 4, 2), WHITE)):
        image.paste(colour, box)
    return image


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("extension", ["png", "jpg", "webp", "bmp", "tiff", "gif", "avif", "jp2", "tga", "ppm", "qoi"])
def test_common_formats_are_read(tmp_path: Path, extension: str):
    flat = Image.new("RGB", (16, 8), (200, 40, 60))
    loaded = load_image(save(tmp_path / f"flat.{extension}", flat))
    assert (loaded.mode, loaded.size) == ("RGB", (16, 8))
    assert np.abs(pixels(loaded) - (200, 40, 60)).max() <= 6
    assert f".{extension}" in image_extensions()


def test_formats_that_run_programs_are_not_read(tmp_path: Path):
    assert image_extensions().isdisjoint({".eps", ".ps", ".pdf", ".wmf", ".h5", ".mpg"})
    with pytest.raises(ImageError, match="not supported"):
        load_image(save(tmp_path / "a.eps"))


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, None),
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_270),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_90),
    ],
)
@pytest.mark.parametrize("extension", ["png", "tiff", "webp"])
def test_every_exif_orientation_is_applied(tmp_path: Path, orientation: int, turned, extension: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True, "exact": True} if extension == "webp" else {}
    loaded = load_image(save(tmp_path / f"a.{extension}", corners(), exif=exif, **options))
    expected = corners() if turned is None else corners().transpose(turned)
    assert loaded.size == expected.size
    assert (pixels(loaded) == pixels(expected)).all()


def test_transparency_is_laid_on_white(tmp_path: Path):
    rgba = Image.new("RGBA", (3, 1))
    rgba.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 127)])
    assert pixels(load_image(save(tmp_path / "rgba.png", rgba))).tolist() == [[[255, 0, 0], [255] * 3, [128] * 3]]

    grey = Image.new("LA", (2, 1))
    grey.putdata([(10, 255), (10, 0)])
    assert pixels(load_image(save(tmp_path / "la.png", grey))).tolist() == [[[10] * 3, [255] * 3]]


def test_transparent_palette_entries_and_colours_are_white(tmp_path: Path):
    palette = Image.new("P", (3, 1))
    palette.putpalette([*RED, *GREEN, *BLUE])
    palette.putdata([0, 1, 2])
    opaque = load_image(save(tmp_path / "opaque.png", palette))
    assert pixels(opaque).tolist() == [[[*RED], [*GREEN], [*BLUE]]]
    for name, transparency in (("p.png", b"\xff\x00\xff"), ("p.gif", 1)):
        loaded = load_image(save(tmp_path / name, palette, transparency=transparency))
        assert pixels(loaded).tolist() == [[[*RED], [*WHITE], [*BLUE]]]
    keyed = Image.new("RGB", (2, 1), RED)
    keyed.putpixel((1, 0), GREEN)
    loaded = load_image(save(tmp_path / "keyed.png", keyed, transparency=GREEN))
    assert pixels(loaded).tolist() == [[[*RED], [*WHITE]]]


def test_one_bit_is_black_and_white(tmp_path: Path):
    image = Image.new("1", (2, 1))
    image.putdata([0, 255])
    assert pixels(load_image(save(tmp_path / "a.png", image))).tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("extension", ["png", "tiff", "pgm"])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, extension: str):
    values = np.array([[0, 300, 32896, 65535]], dtype=np.uint16)
    loaded = load_image(save(tmp_path / f"a.{extension}", Image.fromarray(values)))
    assert pixels(loaded)[..., 0].tolist() == [[0, 1, 128, 255]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 100.0, 255.0]], np.float32), [0, 100, 255]),
        (np.array([[0.0, 32767.5, 60000.0]], np.float32), [0, 128, 233]),
        (np.array([[-1.0, 0.0, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0, 50000, 100000]], np.int32), [0, 128, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[7.5, 7.5, 7.5]], np.float32), [8, 8, 8]),
    ],
)
def test_floats_and_32_bit_integers_keep_their_range(tmp_path: Path, values: np.ndarray, expected: list[int]):
    loaded = load_image(save(tmp_path / "a.tiff", Image.fromarray(values)))
    assert pixels(loaded)[0, :, 0].tolist() == expected


def test_pixels_that_are_not_numbers_are_refused(tmp_path: Path):
    path = save(tmp_path / "a.tiff", Image.fromarray(np.array([[0.0, np.nan]], np.float32)))
    with pytest.raises(ImageError, match="not finite"):
        load_image(path)


def test_cmyk_jpeg_and_tiff_have_their_colours(tmp_path: Path):
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    for name in ("a.jpg", "a.tiff"):
        red, green, blue = pixels(load_image(save(tmp_path / name, cyan)))[8, 8]
        assert red < 10 and green > 245 and blue > 245, name


def test_lab_and_ycbcr_are_converted(tmp_path: Path):
    flat = Image.new("RGB", (16, 16), (200, 40, 60))
    lab = ImageCms.profileToProfile(
        flat, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    for name, image in (("lab.tiff", lab), ("ycbcr.tiff", flat.convert("YCbCr"))):
        assert image is not None
        assert np.abs(pixels(load_image(save(tmp_path / name, image))) - (200, 40, 60)).max() <= 3, name


def swapped_profile() -> bytes:
    """An RGB profile whose red and green primaries are exchanged, so that its conversion cannot be overlooked."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = int.from_bytes(profile[128:132], "big")  # Then 12 bytes for each: a name, where its value is, its length.
    at = {bytes(profile[start : start + 4]): start for start in range(132, 132 + 12 * tags, 12)}
    red, green = at[b"rXYZ"], at[b"gXYZ"]
    profile[red + 4 : red + 12], profile[green + 4 : green + 12] = (
        profile[green + 4 : green + 12],
        profile[red + 4 : red + 12],
    )
    return bytes(profile)


def test_embedded_profile_is_converted_to_srgb(tmp_path: Path):
    red = Image.new("RGB", (8, 8), RED)
    loaded = load_image(save(tmp_path / "a.png", red, icc_profile=swapped_profile()))
    assert np.abs(pixels(loaded) - GREEN).max() <= 2
    transparent = red.convert("RGBA")
    transparent.putalpha(0)
    loaded = load_image(save(tmp_path / "b.png", transparent, icc_profile=swapped_profile()))
    assert (pixels(loaded) == 255).all()


@pytest.mark.parametrize("profile", [b"not a profile", swapped_profile()])
def test_profile_that_does_not_fit_is_ignored(tmp_path: Path, profile: bytes):
    grey = Image.new("L", (8, 8), 77)
    assert (pixels(load_image(save(tmp_path / "a.png", grey, icc_profile=profile))) == 77).all()


def test_first_frame_of_an_animation(tmp_path: Path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    for name in ("a.gif", "a.webp", "a.png", "a.tiff"):
        loaded = load_image(save(tmp_path / name, frames[0], save_all=True, append_images=frames[1:]))
        assert np.abs(pixels(loaded) - RED).max() <= 5, name


def test_error_names_the_file_and_the_reason(tmp_path: Path):
    path = tmp_path / "page.jpg"
    path.write_text("<html>404</html>")
    with pytest.raises(ImageError, match=r"page\.jpg: not an image") as caught:
        load_image(path)
    assert "page.jpg" not in caught.value.reason
    with pytest.raises(ImageError, match=r"gone\.jpg: cannot be read"):
        load_image(tmp_path / "gone.jpg")


def test_size_limit_is_checked_before_decoding(tmp_path: Path):
    path = save(tmp_path / "a.png", picture(40, 30))
    path.write_bytes(path.read_bytes()[:60])  # Decoding would report the damage instead.
    with pytest.raises(ImageError, match="40×30 is 1,200 pixels, above the limit of 1,199"):
        load_image(path, max_pixels=1199)
    with pytest.raises(ImageError, match="damaged"):
        load_image(path, max_pixels=1200)


def test_streams_are_read_too():
    stream = BytesIO()
    corners().save(stream, format="PNG")
    stream.seek(0)
    assert (pixels(load_image(stream)) == pixels(corners())).all()


def test_fit_crops_the_centre_without_distortion():
    wide = Image.new("RGB", (300, 100), RED)
    wide.paste(GREEN, (100, 0, 200, 100))
    fitted = fit(wide, 50, 50)
    assert fitted.size == (50, 50)
    assert (pixels(fitted)[:, 6:44] == GREEN).all()
    assert fit(wide, 150, 50).getpixel((10, 25)) == RED


def test_fit_of_a_long_strip_needs_no_huge_picture_in_between():
    """E07: a 1 × 2000 strip, enlarged 512 times, would be a gigapixel."""
    strip = Image.new("RGB", (1, 2000), RED)
    assert (pixels(fit(strip, 512, 2048)) == RED).all()


def test_tensor_is_channels_first_from_minus_one_to_one():
    tensor = to_tensor(corners())
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 2, 4), torch.float32, True)
    assert tensor[:, 0, 0].tolist() == [1, -1, -1]
    assert tensor[:, 1, 0].tolist() == [-1, -1, 1]
    grey = to_tensor(Image.new("RGB", (1, 1), (51, 51, 51)))
    assert grey.flatten().tolist() == pytest.approx([-0.6] * 3)
    with pytest.raises(ValueError, match="mode L"):
        to_tensor(Image.new("L", (1, 1)))
