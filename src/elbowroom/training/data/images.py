"""Image files to pixels: decoded whole, turned upright, in sRGB, without transparency; then cropped, then a tensor."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

MAX_PIXELS = 128_000_000
"""Images with more pixels are refused by default, so that memory is bounded: just above the largest common cameras.
Pillow itself refuses everything above 179 million, because a tiny file can claim to be that large."""

FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PCX", "PNG",
    "PPM", "PSD", "QOI", "SGI", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""Pillow's formats that hold pixels. Those that run a program (EPS) or hold vectors, video or science data stay out."""

_WHITE = {"I;16": (65535,), "I;16B": (65535,), "I;16L": (65535,), "I": (65535,), "F": (1, 255, 65535)}
"""For modes with more than 8 bits: the values that may mean white, see `_to_8_bit`."""


class ImageError(ValueError):
    """A file that cannot be used as an image. `reason` is one line without the file's name."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.reason = reason


def image_extensions() -> frozenset[str]:
    """The lower-case file extensions, with their dot, of the formats that `load_image` reads."""
    formats = {*FORMATS, "MPO"}  # Several views in one file; Pillow opens it as JPEG.
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in formats)


def load_image(source: Path | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image (the first frame, if it is animated) into RGB as a photographer expects to see it.

    Turned by its EXIF orientation; an embedded ICC profile is converted to sRGB; transparency is laid on white;
    more than 8 bits are scaled to 8, not clipped. The whole file is decoded, so that a truncated one is noticed.

    Args:
        source: a path, or a binary stream.
        max_pixels: images with more pixels are refused before they are decoded.

    Raises:
        ImageError: the file is not an image, damaged, unreadable or too large.
    """
    name = str(source) if isinstance(source, Path) else str(getattr(source, "name", "image"))
    try:
        with Image.open(source, formats=FORMATS) as image:
            if problem := too_many_pixels(image.width, image.height, max_pixels):
                raise ImageError(name, problem)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _to_srgb(image)
    except ImageError:
        raise
    # Pillow's decoders raise nearly anything on damaged bytes: OSError, SyntaxError, ValueError, struct.error, ...
    except Exception as error:
        raise ImageError(name, _reason(error)) from error


def too_many_pixels(width: int, height: int, max_pixels: int) -> str | None:
    """Why an image is too large, or None if it is not."""
    if width * height <= max_pixels:
        return None
    return (
        f"{width}×{height} is {width * height:,} pixels, above the limit of {max_pixels:,}; "
        "make the image smaller or raise the limit"
    )


def fit(image: Image.Image, width: int, height: int) -> Image.Image:
    """Scale with Lanczos until the image covers `width` × `height`, then cut out the centre."""
    return ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB image as a float32 tensor of shape (3, height, width), black -1 and white 1."""
    if image.mode != "RGB":
        raise ValueError(f"an RGB image is needed, but this one has mode {image.mode}; use load_image")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def _to_srgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    colour, alpha = _split_alpha(_to_8_bit(image))
    rgb = _convert_colour(colour, profile)
    if alpha is None:
        return rgb
    return Image.composite(rgb, Image.new("RGB", rgb.size, "white"), alpha)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Grey with 16 or 32 bits, or floats, as 8-bit grey; other modes as they are.

    White is the smallest usual white (65535 for integers; 1, 255 or 65535 for floats) that no pixel exceeds.
    Where there is none, or where pixels are negative, the darkest pixel becomes black and the brightest white.
    """
    if image.mode not in _WHITE:
        return image
    values = np.asarray(image, dtype=np.float32)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("has pixels that are not finite numbers")
    white = next((white for white in _WHITE[image.mode] if low >= 0 and high <= white), None)
    if white is None:
        values, white = values - low, max(high - low, 1e-12)
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colour (grey stays grey, because its profile does) and opacity, if the image has any."""
    grey = image.mode in ("1", "L", "LA", "La")
    if image.has_transparency_data:
        image = image.convert("LA" if grey else "RGBA")
        return image.convert("L" if grey else "RGB"), image.getchannel("A")
    if grey:
        return image.convert("L"), None
    return (image if image.mode in ("RGB", "CMYK", "LAB") else image.convert("RGB")), None


def _convert_colour(image: Image.Image, profile: bytes | None) -> Image.Image:
    """L, RGB, CMYK or LAB to sRGB, through the ICC profile if there is one that fits the pixels."""
    if image.mode == "LAB":
        return _through_profile(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if profile:
        try:
            return _through_profile(image, ImageCms.getOpenProfile(BytesIO(profile)))
        except ImageCms.PyCMSError:
            pass  # The profile is damaged, or one for another kind of pixels: show the picture as viewers do, without.
    return image if image.mode == "RGB" else image.convert("RGB")


def _through_profile(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    converted = ImageCms.profileToProfile(
        image,
        profile,
        ImageCms.createProfile("sRGB"),
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        outputMode="RGB",
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    assert converted is not None  # Only an in-place conversion returns nothing.
    return converted


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, damaged at its start, or a format that is not supported"
    if isinstance(error, Image.DecompressionBombError):
        return f"more pixels than Pillow decodes safely ({error})"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    return f"damaged ({error or type(error).__name__})"
