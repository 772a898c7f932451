"""Small pictures for tests, drawn from a seed, and files that look like pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """Coloured tiles: enough detail that a compressed file is cut within the pixels when it is cut in the middle."""
    tiles = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(tiles, np.ones((4, 4, 1), np.uint8))[:height, :width])


def save(path: Path, image: Image.Image | None = None, caption: str | None = None, **options: Any) -> Path:
    """Save a picture, with a caption of the same stem if one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture()).save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path
