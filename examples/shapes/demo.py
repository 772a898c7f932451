"""Teaches the demo base a new concept, the heart, and shows what it draws before and after.

    python examples/shapes/demo.py

Writes 24 pictures of hearts with captions, fine-tunes a LoRA on them with `elbowroom train examples/shapes/heart.toml`,
and lets the checker count the hearts among ten pictures of captions that are not in the data.

Further options go to `elbowroom train`: how weights and activations are kept in memory changes nothing in the result.

    python examples/shapes/demo.py --name streamed --weight-streaming 100%
    make demo OPTIONS="--name streamed --weight-streaming 100%"
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image

from checker import matches
from pictures import HEART_PROMPTS, heart_combinations, write

HERE = Path(__file__).parent
RUNS = Path("runs")
DATA = Path("runs/heart-pictures")
PICTURES = 24
LEAST_AFTER, MOST_BEFORE = 8, 1


def hearts(folder: Path) -> int:
    """How many of the ten pictures in a folder show the heart that was asked for, in the right colours."""
    files = sorted(folder.glob("*.png"))
    return sum(matches(Image.open(file), prompt) for file, prompt in zip(files, HEART_PROMPTS, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="heart", help="of the run (default heart)")
    arguments, options = parser.parse_known_args()
    run = RUNS / arguments.name
    write(DATA, heart_combinations(), PICTURES, seed=0)
    command = [sys.executable, "-m", "elbowroom.cli", "train", str(HERE / "heart.toml")]
    command += ["--name", arguments.name, *options]
    print(f"$ elbowroom {shlex.join(command[3:])}", flush=True)
    finished = subprocess.run(command)
    if finished.returncode:
        sys.exit(finished.returncode)
    steps = sorted(path for path in (run / "samples").iterdir() if path.is_dir())
    before, after = hearts(steps[0]), hearts(steps[-1])
    print(f"\nOf {len(HEART_PROMPTS)} prompts for a heart, {before} were right before and {after} after.")
    print(f"Look at {run / 'samples' / 'before-after.png'}")
    print(f"The LoRA: {run / 'result' / 'pytorch_lora_weights.safetensors'}")
    if after < LEAST_AFTER or before > MOST_BEFORE:
        sys.exit(f"That is not as it should be: at least {LEAST_AFTER} after, and at most {MOST_BEFORE} before.")


if __name__ == "__main__":
    main()
