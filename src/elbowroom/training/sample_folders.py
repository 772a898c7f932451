"""The folders of validation pictures, one for each step, with a record of what was asked for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

from elbowroom.training.files import folder_written_aside

RECORD = "prompts.json"


@dataclass(frozen=True)
class Request:
    """What the pictures of a step depend on, beside the weights.

    resolution: width and height in pixels. inference_steps: of the sampler. seed: of the first picture.
    """

    prompts: tuple[str, ...]
    seed: int
    resolution: int
    inference_steps: int
    guidance: float


@dataclass(frozen=True)
class SampleFolders:
    """`samples/step-00000100/` and so on."""

    path: Path

    def of(self, step: int) -> Path:
        """The folder of a step."""
        return self.path / f"step-{step:08d}"

    def save(self, step: int, pictures: Sequence[Image.Image], request: Request) -> Path:
        """Write the pictures of a step, whole or not at all, in the place of earlier ones; return the folder."""
        folder = self.of(step)
        with folder_written_aside(folder, replace=True) as aside:
            for index, picture in enumerate(pictures):
                picture.save(aside / _file_name(index))
            (aside / RECORD).write_text(_text(request), encoding="utf-8")
        return folder

    def load(self, step: int, request: Request) -> list[Image.Image] | None:
        """Return the pictures of a step, or None if there are none or they were drawn for another request."""
        folder = self.of(step)
        files = [folder / _file_name(index) for index in range(len(request.prompts))]
        try:
            if (folder / RECORD).read_text(encoding="utf-8") != _text(request):
                return None
            return [Image.open(file).convert("RGB") for file in files]
        except (OSError, UnicodeDecodeError):
            return None

    def remove_after(self, step: int) -> None:
        """Remove the pictures of steps after `step`, which will be done again."""
        for path in self.path.glob("step-*"):
            match = re.fullmatch(r"step-(\d+)(\.png)?", path.name)
            if match and int(match[1]) > step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _file_name(index: int) -> str:
    return f"{index:02d}.png"


def _text(request: Request) -> str:
    return json.dumps(asdict(request), indent=2, ensure_ascii=False) + "\n"
