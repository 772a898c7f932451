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
from elbowroom.training.placement import Placement

# In pixels, of a sheet of pictures.
_MARGIN = 8
_LABEL = 36
_LEAST_SIDE = 128
_SHEET_WIDTH = 1600


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
    placement: Placement,
    progress: Callable[[str, int, int], None],
) -> list[Image.Image]:
    """Draw one picture per conditioning with the pipeline's own sampler; training is not disturbed.

    The pictures depend on the weights, the seed and the settings alone: the noise of picture i comes from a CPU
    generator with seed `seed + i`, and the global random state is put back afterwards.
    """
    device = placement.device
    was_training = denoiser.training
    denoiser.eval()
    pipeline = folder.load(["vae", "scheduler"], dtype, placement, **{folder.family.denoiser: denoiser})
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


def sheet(moments: Sequence[tuple[str, Sequence[Image.Image]]], prompts: Sequence[str]) -> Image.Image:
    """Return one picture with a cell per prompt, in which the pictures of several moments stand side by side.

    Small pictures are shown enlarged, so that a person can see them.

    Args:
        moments: title (before, after, step 100 ...) and the pictures of all prompts at that moment.
        prompts: the texts, in the order of the pictures.
    """
    side = max(max(picture.size) for _, pictures in moments for picture in pictures)
    scale = max(1, _LEAST_SIDE // side)
    side *= scale
    width = len(moments) * (side + _MARGIN)
    height = _LABEL + side + _MARGIN
    columns = min(len(prompts), max(1, _SHEET_WIDTH // width))
    rows = -(-len(prompts) // columns)
    canvas = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(13)
    for index, prompt in enumerate(prompts):
        left, top = _MARGIN + index % columns * width, _MARGIN + index // columns * height
        draw.text((left, top), _shortened(prompt, width - _MARGIN, font), fill="black", font=font)
        for title, pictures in moments:
            draw.text((left, top + _LABEL // 2), title, fill="dimgray", font=font)
            picture = pictures[index]
            enlarged = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
            canvas.paste(enlarged, (left, top + _LABEL))
            left += side + _MARGIN
    return canvas


def _shortened(text: str, width: int, font: Any) -> str:
    """The beginning of a text that is not wider than `width` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
