"""Puts the trained denoiser into the pipeline that `make_parts.py` made.

    python examples/shapes/assemble.py PARTS DENOISER DIR

The denoiser is stored in bfloat16, which halves the folder; `from_pretrained` makes float32 of it again.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

MOST_MEGABYTES = 12.0


def weights_in_megabytes(folder: Path) -> float:
    """Size of all safetensors files below a folder, in units of a million bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e6


def assemble(parts: Path, denoiser: Path, folder: Path) -> None:
    """Write the pipeline of `parts` with the denoiser of another folder."""
    trained = FluxTransformer2DModel.from_pretrained(denoiser, dtype=torch.bfloat16)
    FluxPipeline.from_pretrained(parts, transformer=trained).save_pretrained(folder)
    for file in folder.rglob("*.json"):
        contents = json.loads(file.read_text(encoding="utf-8"))
        # Diffusers notes where a part was loaded from, which is of no use on another machine.
        if contents.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the trained denoiser into the demo pipeline.")
    parser.add_argument("parts", type=Path, help="what make_parts.py made")
    parser.add_argument(
        "denoiser", type=Path, help="what `elbowroom train base.toml` made: runs/base/result/transformer"
    )
    parser.add_argument("folder", type=Path, help="where the pipeline goes; must not exist yet")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; remove it or name another folder")
    assemble(arguments.parts, arguments.denoiser, arguments.folder)
    megabytes = weights_in_megabytes(arguments.folder)
    print(f"{arguments.folder}: {megabytes:.1f} MB of weights")
    if megabytes > MOST_MEGABYTES:
        parser.exit(1, f"that is more than the {MOST_MEGABYTES:.0f} MB which the repository should hold\n")


if __name__ == "__main__":
    main()
