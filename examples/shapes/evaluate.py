"""Samples the demo pipeline with plain Diffusers and counts how many pictures show what their captions say.

    python examples/shapes/evaluate.py examples/shapes/base --held-out --at-least 0.9
    python examples/shapes/evaluate.py examples/shapes/base --heart --lora runs/heart/lora.safetensors --at-least 0.8

Prints a table of scores and writes a contact sheet of the pictures. Ends with status 1 below the share of `--at-least`.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from PIL import Image

from checker import describe
from pictures import HEART_PROMPTS, SIDE, Description, held_out_captions, parse

BATCH = 25
MARGIN = 3  # pixels around each picture of the contact sheet; green where the picture is right, red where not
RIGHT, WRONG = (60, 190, 90), (225, 60, 60)


def load(folder: Path, lora: Path | None) -> FluxPipeline:
    """The pipeline of a folder, in float32 on the CPU, with a LoRA (a file or its folder) if one is given."""
    pipeline = FluxPipeline.from_pretrained(str(folder))
    if lora is not None:
        pipeline.load_lora_weights(str(lora))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: FluxPipeline, prompts: list[str], steps: int, seed: int) -> list[Image.Image]:
    """One picture a prompt; each has its own seed, so the batch size doesn't change what it shows."""
    pictures: list[Image.Image] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        drawn: Any = pipeline(
            batch,
            height=SIDE,
            width=SIDE,
            num_inference_steps=steps,
            guidance_scale=1.0,
            max_sequence_length=pipeline.tokenizer_2.model_max_length,
            generator=[torch.Generator().manual_seed(seed + start + index) for index in range(len(batch))],
        )
        pictures += drawn.images
    return pictures


def verdict(seen: Description, asked: Description) -> dict[str, bool]:
    """Which parts of the caption the picture shows; "all" is shape and both colours, the size doesn't count."""
    parts = {name: getattr(seen, name) == getattr(asked, name) for name in ("shape", "colour", "background", "size")}
    return {"all": parts["shape"] and parts["colour"] and parts["background"], **parts}


def table(asked: list[Description], verdicts: list[dict[str, bool]]) -> str:
    """Shares of right pictures, a line for every shape that was asked for and one for all of them."""
    rows: dict[str, list[dict[str, bool]]] = defaultdict(list)
    for description, result in zip(asked, verdicts, strict=True):
        rows[description.shape].append(result)
    rows["every shape"] = verdicts
    columns = list(verdicts[0])
    lines = [f"{'':12} pictures" + "".join(f"{column:>12}" for column in columns)]
    for name, results in rows.items():
        shares = (sum(result[column] for result in results) / len(results) for column in columns)
        lines.append(f"{name:12} {len(results):8}" + "".join(f"{share:12.1%}" for share in shares))
    return "\n".join(lines)


def contact_sheet(pictures: list[Image.Image], right: list[bool], columns: int) -> Image.Image:
    """All pictures in rows, each in a green frame if it is right and in a red one if it is wrong."""
    cell = SIDE + 2 * MARGIN
    sheet = Image.new("RGB", (columns * cell, -(-len(pictures) // columns) * cell), "white")
    for index, (picture, good) in enumerate(zip(pictures, right, strict=True)):
        corner = (index % columns * cell, index // columns * cell)
        sheet.paste(RIGHT if good else WRONG, (*corner, corner[0] + cell, corner[1] + cell))
        sheet.paste(picture, (corner[0] + MARGIN, corner[1] + MARGIN))
    return sheet


def share(text: str) -> float:
    """An argument between 0 and 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the pictures that show what their captions say.")
    parser.add_argument("pipeline", type=Path, help="folder of a FluxPipeline")
    parser.add_argument("--lora", type=Path, help="LoRA to load: a .safetensors file or the folder with it")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--held-out", action="store_true", help="200 captions that training didn't see (the default)")
    prompts.add_argument("--heart", action="store_true", help="the 10 fixed prompts of the new concept")
    parser.add_argument("--at-least", type=share, default=0.0, help="share of right pictures, 0 to 1")
    parser.add_argument("--steps", type=int, default=16, help="sampling steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first picture; the next ones count up")
    parser.add_argument(
        "--sheet", type=Path, default=Path("build/shapes/contact-sheet.png"), help="where the pictures go"
    )
    arguments = parser.parse_args()

    texts: list[str] = [*HEART_PROMPTS] if arguments.heart else held_out_captions(200)
    pictures = sample(load(arguments.pipeline, arguments.lora), texts, arguments.steps, arguments.seed)
    asked = [parse(text) for text in texts]
    verdicts = [verdict(describe(picture), want) for picture, want in zip(pictures, asked, strict=True)]
    right = [result["all"] for result in verdicts]
    arguments.sheet.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(pictures, right, columns=5 if arguments.heart else 20).save(arguments.sheet)
    print(table(asked, verdicts))
    print(f"{sum(right)} of {len(right)} pictures show shape and colours of their caption: {arguments.sheet}")
    if sum(right) < arguments.at_least * len(right):
        print(f"fewer than the {arguments.at_least:.0%} asked for", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
