"""Step time and peak bytes of every mode of the engine, beside those of others that mean the same.

    python benchmarks/engine.py

A Flux and an SD3 of about 100 million parameters with 1,024 picture tokens and 128 text tokens are trained in full on
the CPU in float32. Each row is one way of training with less memory:

- untouched: no measure taken;
- torch checkpoint: `torch.utils.checkpoint` (non-reentrant) around each block;
- Diffusers' checkpointing: `model.enable_gradient_checkpointing()`;
- save_on_cpu: `torch.autograd.graph.save_on_cpu` around the step (on the CPU it moves nothing, so the rows that move
  tensors to the disk have nobody to be compared with);
- selective, kernel: `create_selective_checkpoint_contexts` that saves what the attention kernel returns;
- selective, attention: the same, saving whatever autograd saves of what attention computes;
- ours, by options. The last columns are the ratios of ours to the row that means the same.

Peaks are counted by torch's profiler, allocation by allocation. Times are medians of rounds that visit all rows in
turn, and ratios of times are medians of the ratios of each round, in which what is compared ran one right after the
other: the machine is shared, and gets faster and slower. Gradients are compared with the untouched model's, bit for
bit.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import elbowroom
from counting import median_ratio, peak_bytes, timed
from models import build_flux, build_sd3, flux_inputs, sd3_inputs, step
from peers import SaveAttention, diffusers_checkpointing, save_kernel, torch_checkpoint

Ready = Callable[[Any, Path], Any]
"""Makes a model ready for a row: a context; the step runs inside it."""

SAME_BYTES = 0.03
WINDOW = 32 << 20
"""Bytes on their way to or from the disk: the default is made for cards with gigabytes."""

NOISE = 0.02
"""Two medians that differ by less say nothing on a shared machine."""


@dataclass(frozen=True)
class Row:
    """One way of training.

    Attributes:
        name: for the table.
        ready: makes a model ready for it.
        peers: the rows that mean the same.
        faster: it has to be faster than its peers, not only as fast.
    """

    name: str
    ready: Ready
    peers: tuple[str, ...] = ()
    faster: bool = False

    def peers_in(self, figures: Collection[str]) -> list[str]:
        """Return those of its peers that were measured."""
        return [peer for peer in self.peers if peer in figures]


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(**options: Any) -> Ready:
    """The engine with these options, on the model."""
    moves = "activation_offload" in options or options.get("gradient_checkpointing_backend") == "unsloth"

    @contextmanager
    def ready(model: Any, folder: Path) -> Iterator[None]:
        where = {"activation_store_path": folder, "activation_window": WINDOW} if moves else {}
        plan = elbowroom.schedule(model, elbowroom.Controls(**options, **where))
        with elbowroom.apply(model, plan):
            yield

    return ready


def rows(model: Any, inputs: dict[str, torch.Tensor]) -> list[Row]:
    attention = SaveAttention(model, inputs)
    kernel = functools.partial(create_selective_checkpoint_contexts, save_kernel)
    checkpointed = {"gradient_checkpointing": True}
    return [
        Row("untouched", lambda model, folder: nullcontext()),
        Row("torch checkpoint", lambda model, folder: torch_checkpoint(model)),
        Row("Diffusers' checkpointing", lambda model, folder: diffusers_checkpointing(model)),
        Row("save_on_cpu", lambda model, folder: torch.autograd.graph.save_on_cpu()),
        Row("selective, kernel", lambda model, folder: torch_checkpoint(model, context_fn=kernel)),
        Row("selective, attention", lambda model, folder: attention.ready()),
        Row("recompute blocks", ours(**checkpointed), ("torch checkpoint", "Diffusers' checkpointing")),
        Row("segments of 2", ours(**checkpointed, gradient_checkpointing_interval=2)),
        Row("segments of 4", ours(**checkpointed, gradient_checkpointing_interval=4)),
        Row(
            "2 of 4",
            ours(**checkpointed, gradient_checkpointing_interval=2, gradient_checkpointing_segment_stride=4),
        ),
        Row("feed-forward only", ours(**checkpointed, gradient_checkpointing_backend="torch-ffn")),
        Row(
            "keep attention kernel",
            ours(**checkpointed, gradient_checkpointing_keep_attention="kernel"),
            ("selective, kernel",),
        ),
        Row(
            "keep attention",
            ours(**checkpointed, gradient_checkpointing_keep_attention=True),
            ("selective, attention",),
            faster=True,
        ),
        Row("boundary on disk", ours(**checkpointed, gradient_checkpointing_backend="unsloth")),
        Row("attention on disk", ours(activation_offload=("attention",))),
        Row("attention on disk, rest recomputed", ours(**checkpointed, activation_offload=("attention",))),
        Row("everything on disk", ours(activation_offload=("all",))),
    ]


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """The seconds of each round, and the most bytes at one time."""

    times: list[float]
    peak: int

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    def over(self, other: Figures) -> tuple[float, float]:
        """Return the ratios of these figures to others: bytes, seconds."""
        return self.peak / other.peak, median_ratio(self.times, other.times)


def measure(model: Any, inputs: dict[str, torch.Tensor], chosen: list[Row], rounds: int) -> dict[str, Figures]:
    """Return the figures of each row, after its gradients were found equal to the untouched model's."""
    step(model, inputs)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    peaks = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in track(chosen, "peaks and gradients", console=Console(stderr=True)):
            with row.ready(model, folder):
                step(model, inputs)  # what is learned or allocated once is not counted
                peaks[row.name] = peak_bytes(lambda: step(model, inputs))
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                if not torch.equal(parameter.grad, gradient):
                    raise SystemExit(f"{row.name}: gradients differ from the untouched model's")
            gc.collect()
        del expected
        times = timed(
            {row.name: functools.partial(step, model, inputs) for row in chosen},
            rounds,
            around={row.name: functools.partial(row.ready, model, folder) for row in chosen},
            warm={row.name for row in chosen if "disk" in row.name},
            together=[(row.name, *row.peers_in(peaks)) for row in chosen if row.peers_in(peaks)],
        )
    return {row.name: Figures(times[row.name], peaks[row.name]) for row in chosen}


def table_of(title: str, chosen: list[Row], figures: dict[str, Figures]) -> Table:
    table = Table(title=title)
    for column in ("", "peak MiB", "seconds", "means the same", "peak ratio", "time ratio"):
        table.add_column(column, justify="left" if column in ("", "means the same") else "right")
    for row in chosen:
        mine = figures[row.name]
        cells = [row.name, f"{mine.peak / 2**20:.1f}", f"{mine.seconds:.3f}"]
        ratios = [[peer, *(f"{ratio:.3f}" for ratio in mine.over(figures[peer]))] for peer in row.peers_in(figures)]
        table.add_row(*cells, *(ratios[0] if ratios else ()))
        for others in ratios[1:]:
            table.add_row("", "", "", *others)
    return table


def broken(chosen: list[Row], figures: dict[str, Figures]) -> list[str]:
    """Return what ours does worse than the row that means the same."""
    problems = []
    for row in chosen:
        for peer in row.peers_in(figures):
            bytes_, seconds = figures[row.name].over(figures[peer])
            if bytes_ > 1 + SAME_BYTES:
                problems.append(f"{row.name} takes more bytes than {peer}")
            if seconds > (1 if row.faster else 1 + NOISE):
                problems.append(f"{row.name} is not {'faster than' if row.faster else 'as fast as'} {peer}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flux", "sd3", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--side", type=int, default=32, help="picture tokens in each direction (default 32: 1,024)")
    parser.add_argument("--width", type=int, default=None, help="hidden size (default: about 100 M parameters)")
    parser.add_argument("--layers", type=int, default=None, help="number of blocks (default 20 for Flux, 15 for SD3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1, the least noisy)")
    parser.add_argument("--rows", nargs="+", default=None, help="names of rows to run (default all)")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="fail if ours is worse than what means the same")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    problems, document = [], {}
    for name in ("flux", "sd3") if arguments.model == "both" else (arguments.model,):
        if name == "flux":
            layers = arguments.layers or 20
            model: Any = build_flux(arguments.width or 448, double=layers // 2, single=layers - layers // 2)
            inputs = flux_inputs(arguments.side**2)
        else:
            model = build_sd3(arguments.width or 448, layers=arguments.layers or 15, side=2 * arguments.side)
            inputs = sd3_inputs(2 * arguments.side)
        known = rows(model, inputs)
        unknown = set(arguments.rows or ()) - {row.name for row in known}
        if unknown:
            parser.error(f"no row is named {', '.join(sorted(unknown))}; see the list in rows()")
        chosen = [row for row in known if not arguments.rows or row.name in arguments.rows]
        figures = measure(model, inputs, chosen, arguments.rounds)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        Console(width=130, markup=False).print(
            table_of(f"{name}, {millions:.0f} M parameters, {arguments.side**2} picture tokens", chosen, figures)
        )
        problems += [f"{name}: {problem}" for problem in broken(chosen, figures)]
        document[name] = {row: vars(value) for row, value in figures.items()}
        del model
        gc.collect()
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1))
    if problems:
        print("\n".join(problems), file=sys.stderr)
    if arguments.check:
        raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
