"""Drawing pictures with a pipeline and what was trained on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elbowroom.options.reading import Resolved, read
from elbowroom.training.devices import device_named, make_current
from elbowroom.training.lora import FILE_NAMES
from elbowroom.training.pipeline import PipelineFolder
from elbowroom.training.placement import Placement
from elbowroom.training.run_folder import RunFolder
from elbowroom.training.samples import save_picture

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Request:
    """What to draw; None means: as in the run, or as the pipeline does by itself."""

    source: str
    prompts: tuple[str, ...]
    lora: Path | None
    output: Path
    seed: int
    steps: int | None
    guidance: float | None
    width: int | None
    height: int | None
    max_sequence_length: int | None
    device: str
    precision: str | None


def draw(request: Request) -> Iterator[Path]:
    """Draw one picture per prompt; yield the path of each when it is written.

    Raises:
        ValueError: the source is no run and no pipeline, or a value is not accepted.
    """
    if request.precision not in (None, *_DTYPES):
        raise ValueError(f"precision must be bf16 or fp32, but is {request.precision!r}")
    device = device_named(request.device)
    make_current(device)
    trained = _run_at(Path(request.source))
    folder = PipelineFolder.open(trained.options.model if trained else request.source)
    pipeline = _pipeline(folder, request, trained, device)
    arguments = _arguments(request, trained, folder)
    _check_size(arguments, folder, pipeline)
    for index, prompt in enumerate(request.prompts):
        generator = torch.Generator("cpu").manual_seed(request.seed + index)
        picture = pipeline(prompt, generator=generator, **arguments).images[0]
        path = _free(request.output / f"{index:02d}-{_slug(prompt)}.png")
        save_picture(picture, path)
        yield path


def _run_at(path: Path) -> Resolved | None:
    """Return the options of the run in a folder, or None if it is not a run folder."""
    configuration = RunFolder(path).configuration
    return read(configuration, {}, {}) if configuration.is_file() else None


def _pipeline(folder: PipelineFolder, request: Request, trained: Resolved | None, device: torch.device) -> Any:
    dtype = _DTYPES[request.precision or (trained.options.precision if trained else "bf16")]
    given: dict[str, Any] = {}
    lora = request.lora
    if lora is not None and RunFolder(lora).configuration.is_file():
        lora = RunFolder(lora).result  # a run folder stands for what it made
    if trained is not None:
        result = RunFolder(Path(request.source)).result
        if trained.options.training_type == "full":
            if not result.is_dir():
                raise ValueError(_unfinished(request.source))
            given[folder.family.denoiser] = folder.load_denoiser(dtype, at=result).to(device)
        else:
            lora = lora or result
    wanted = [name for name in folder.components if name not in given]
    pipeline = folder.load(wanted, dtype, Placement(device), **given)
    if lora is not None:
        file = lora / FILE_NAMES["diffusers"] if lora.is_dir() else lora
        if not file.is_file():
            raise ValueError(_no_lora(file, trained, request))
        pipeline.load_lora_weights(file.parent, weight_name=file.name)
    return pipeline


def _no_lora(file: Path, trained: Resolved | None, request: Request) -> str:
    if trained is not None and request.lora is None:
        return _unfinished(request.source)
    return f"there is no LoRA file {file}; name a .safetensors file, the folder that holds it, or a run folder"


def _unfinished(run: str) -> str:
    return f"the run {run} has no result yet; the `elbowroom train` command that started it goes on and finishes it"


def _arguments(request: Request, trained: Resolved | None, folder: PipelineFolder) -> dict[str, Any]:
    options = trained.options if trained else None
    values = {
        "width": request.width or (options.resolution if options else None),
        "height": request.height or (options.resolution if options else None),
        "num_inference_steps": request.steps or (options.validation_inference_steps if options else None),
        "guidance_scale": request.guidance
        if request.guidance is not None
        else (options.validation_guidance if options else None),
        "max_sequence_length": request.max_sequence_length
        or (options.max_sequence_length if options else None)
        or folder.family.max_sequence_length,
    }
    return {name: value for name, value in values.items() if value is not None}


def _check_size(arguments: dict[str, Any], folder: PipelineFolder, pipeline: Any) -> None:
    step = folder.family.pixel_step(pipeline.vae, getattr(pipeline, folder.family.denoiser))
    for name in ("width", "height"):
        if arguments.get(name, step) % step:
            raise ValueError(f"{name} {arguments[name]}: {folder.family.name} needs a multiple of {step}")


def _free(path: Path) -> Path:
    """Return `path`, or, if there is a file already, the same with a number: no picture is overwritten."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free


def _slug(prompt: str) -> str:
    return re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:60] or "picture"
