"""Short training runs on tiny pipelines and drawn pictures."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console
from safetensors.torch import load_file

from elbowroom.options.reading import read
from elbowroom.training.display import Display
from elbowroom.training.job import Job, prepare
from elbowroom.training.loop import Outcome, train

BASICS = {
    "resolution": "32",
    "precision": "fp32",
    "max_sequence_length": "20",
    "tensorboard": "false",
    "device": "cpu",
}


def draw_pictures(folder: Path, count: int) -> Path:
    """Circles on plain backgrounds, each with a caption; the last one is wide, for a second bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        size = (64, 32) if index == count - 1 else (48, 48)
        picture = Image.new("RGB", size, (30 * index % 256, 100, 200))
        ImageDraw.Draw(picture).ellipse((8, 8, 28, 28), fill=(255, 25 * index % 256, 0))
        picture.save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"circle number {index}")
    return folder


def job(**options: Any) -> Job:
    """A prepared run with the given options, as if they had been flags."""
    given = {**BASICS, **{name: str(value) for name, value in options.items()}}
    return prepare(read(None, {}, given), progress=lambda *_: None)


def run(**options: Any) -> tuple[Job, Outcome, str]:
    """Train; return the job, its outcome, and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    prepared = job(**options)
    outcome = train(prepared, Display(console))
    return prepared, outcome, console.file.getvalue()  # type: ignore[attr-defined]


def weights(folder: Path) -> dict[str, bytes]:
    """The tensors of a run's result."""
    return {
        name: tensor.numpy().tobytes()
        for path in sorted((folder / "result").rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def command(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start the `elbowroom` command in a process of its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "250", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "elbowroom.cli", *map(str, arguments)],
        env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def flags(**options: Any) -> list[str]:
    """The flags that set the basic options and the given ones."""
    given = {**BASICS, **{name: str(value) for name, value in options.items()}}
    return [part for name, value in given.items() for part in (f"--{name}", value)]
