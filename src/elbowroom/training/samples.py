"""Pictures of fixed prompts and seeds, drawn during training so that a person can see what was learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

from elbowroom.families import Conditioning
from elbowroom.training.files import written_aside
from elbowroom.training.pipeline import PipelineFolder

_MARGIN = 8
_LABEL_HEIGHT = 34


def draw_prompts(
    folder: PipelineFolder,
    denoiser: torch.nn.Module,
    conditionings: Sequence[Conditioning],
    unconditional: Conditioning,
    *,
    resolution: int,
    seed: int,
    inference_steps: int,
    guidance: float,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> list[Image.Image]:
    """Draw one picture per conditioning with the pipeline's own sampler; training is not disturbed.

    The pictures depend on the weights, the seed and the settings alone: the noise of picture i comes from a CPU
    generator with seed `seed + i`, and the global random state is put back afterwards.
    """
    was_training = denoiser.training
    denoiser.eval()
    pipeline = folder.load(["vae", "scheduler"], dtype, device, **{folder.family.denoiser: denoiser})
    pictures = []
    autocast = torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else nullcontext()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad(), autocast:
            for index, conditioning in enumerate(conditionings):
                progress("validation pictures", index, len(conditionings))
                pictures += pipeline(
                    **folder.family.sampling_arguments(conditioning, unconditional),
                    height=resolution,
                    width=resolution,
                    num_inference_steps=inference_steps,
                    guidance_scale=guidance,
                    generator=torch.Generator("cpu").manual_seed(seed + index),
                ).images
        progress("validation pictures", len(conditionings), len(conditionings))
    finally:
        denoiser.train(was_training)
    return pictures


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with written_aside(path) as aside:
        picture.save(aside, format="PNG")


def sheet(columns: Sequence[tuple[str, Sequence[Image.Image]]], prompts: Sequence[str]) -> Image.Image:
    """Return one picture with a row per prompt and a column per moment (before, after …), labelled.

    Small pictures are shown enlarged, so that a person can see them.
    """
    side = max(max(picture.size) for _, pictures in columns for picture in pictures)
    cell = side * max(1, 192 // side)
    width = _MARGIN + len(columns) * (cell + _MARGIN)
    row = _LABEL_HEIGHT + cell
    canvas = Image.new("RGB", (width, _LABEL_HEIGHT + len(prompts) * row + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(14)
    for column, (title, pictures) in enumerate(columns):
        left = _MARGIN + column * (cell + _MARGIN)
        draw.text((left, _MARGIN), title, fill="black", font=font)
        for line, picture in enumerate(pictures):
            scaled = picture.resize(
                (picture.width * cell // side, picture.height * cell // side),
                Image.Resampling.NEAREST if cell > side else Image.Resampling.LANCZOS,
            )
            canvas.paste(scaled, (left, _LABEL_HEIGHT + line * row + _LABEL_HEIGHT))
    for line, prompt in enumerate(prompts):
        top = _LABEL_HEIGHT + line * row + _MARGIN
        draw.text((_MARGIN, top), _shortened(prompt, width - 2 * _MARGIN, font), fill="black", font=font)
    return canvas


def _shortened(text: str, width: int, font: Any) -> str:
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
