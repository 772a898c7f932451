"""Peak activation bytes and step time of segments, beside Diffusers' own gradient checkpointing.

    python benchmarks/segments.py

The model is a Flux of 4 double-stream and 8 single-stream blocks with 1,024 picture tokens and 128 text tokens, trained
in full on the CPU in float32. Its gradients exist before the step, so that what is counted is activations. Every row
is measured in the same run; times are medians of rounds that visit all rows in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from rich.console import Console
from rich.table import Table

import elbowroom
from counting import median_seconds, peak_bytes
from models import build_flux, flux_inputs, step

BASELINE = "Diffusers' checkpointing"


def build_model() -> FluxTransformer2DModel:
    return build_flux(width=512, double=4, single=8)


def rows(inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Return the step of each row of the table; each has a model of its own."""
    steps: dict[str, Callable[[], None]] = {"no checkpointing": partial(step, build_model(), inputs)}
    diffusers_model = build_model()
    diffusers_model.enable_gradient_checkpointing()
    steps[BASELINE] = partial(step, diffusers_model, inputs)
    for interval, stride in ((1, None), (2, None), (4, None), (1, 4), (2, 4)):
        controls = elbowroom.Controls(
            gradient_checkpointing=True,
            gradient_checkpointing_interval=interval,
            gradient_checkpointing_segment_stride=stride,
        )
        model = build_model()
        plan = elbowroom.schedule(model, controls)
        elbowroom.apply(model, plan)
        name = f"interval {interval}" + (f", stride {stride}" if stride else "")
        steps[f"{name}  {plan.strip()}"] = partial(step, model, inputs)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--tokens", type=int, default=1024, help="picture tokens (default 1024)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1, the least noisy)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    steps = rows(flux_inputs(arguments.tokens))
    seconds = median_seconds(steps, arguments.rounds)
    peaks = {name: peak_bytes(run) for name, run in steps.items()}
    table = Table("", "peak MiB", "peak ratio", "seconds", "time ratio", title=f"Ratios to {BASELINE}")
    for name in steps:
        table.add_row(
            name,
            f"{peaks[name] / 2**20:.1f}",
            f"{peaks[name] / peaks[BASELINE]:.3f}",
            f"{seconds[name]:.3f}",
            f"{seconds[name] / seconds[BASELINE]:.3f}",
        )
    Console(width=100, markup=False).print(table)


if __name__ == "__main__":
    main()
