"""Peak activation bytes and step time of segments, beside Diffusers' own gradient checkpointing.

    python benchmarks/segments.py

The model is a Flux of 4 double-stream and 8 single-stream blocks with 1,024 picture tokens and 128 text tokens, trained
in full on the CPU in float32. Its gradients exist before the step, so that what is counted is activations. Every row
is measured in the same run; times are medians of rounds that visit all rows in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from rich.console import Console
from rich.table import Table

import elbowroom
from counting import median_seconds, peak_bytes
from models import build_flux, flux_inputs, step
from peers import diffusers_checkpointing

BASELINE = "Diffusers' checkpointing"

Way = Callable[[], AbstractContextManager[Any]]


def build_model() -> FluxTransformer2DModel:
    return build_flux(width=512, double=4, single=8)


def rows(model: FluxTransformer2DModel) -> dict[str, Way]:
    """Return for each row of the table a context in which the model is trained that way."""
    ways: dict[str, Way] = {"no checkpointing": nullcontext, BASELINE: partial(diffusers_checkpointing, model)}
    for interval, stride in ((1, None), (2, None), (4, None), (1, 4), (2, 4)):
        controls = elbowroom.Controls(
            gradient_checkpointing=True,
            gradient_checkpointing_interval=interval,
            gradient_checkpointing_segment_stride=stride,
        )
        plan = elbowroom.schedule(model, controls)
        name = f"interval {interval}" + (f", stride {stride}" if stride else "")
        ways[f"{name}  {plan.strip()}"] = partial(elbowroom.apply, model, plan)
    return ways


def peak_of(way: Way, run: Callable[[], None]) -> int:
    with way():
        return peak_bytes(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--tokens", type=int, default=1024, help="picture tokens (default 1024)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1, the least noisy)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # One model for all rows: where its weights lie in memory is felt in the time of a step.
    model = build_model()
    run = partial(step, model, flux_inputs(arguments.tokens))
    ways = rows(model)
    run()
    peaks = {name: peak_of(way, run) for name, way in ways.items()}
    seconds = median_seconds(dict.fromkeys(ways, run), arguments.rounds, around=ways)
    table = Table("", "peak MiB", "peak ratio", "seconds", "time ratio", title=f"Ratios to {BASELINE}")
    for name in ways:
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
