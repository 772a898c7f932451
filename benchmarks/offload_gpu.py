"""Activation offload on a GPU: what it costs in time, beside what others offer, and beside what the link allows.

    python benchmarks/offload_gpu.py --model sd3-medium
    python benchmarks/offload_gpu.py --model flux.1-dev --layers 12 --json flux.json

Models of full width with random weights in bfloat16, training a LoRA (or, with --train full, everything). The rows:

- no offload;
- ours: attention, or everything, offloaded to pinned memory; reloaded on demand, or prefetched; and attention offloaded
  with the rest of the block recomputed;
- torchtune's `OffloadActivations`, if torchtune is installed, and `torch.autograd.graph.save_on_cpu(pin_memory=True)`:
  both offload everything, the latter the weights too;
- blocks recomputed, nothing offloaded.

Times are medians of steps between CUDA events, after a warm-up that learns the order of reloads and fills the store.
The bound is what the copies of a step take by themselves: the bytes, out and back, over the bandwidth that is measured
first with pinned memory. What a step takes longer than without offload is the exposed time.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import elbowroom
from full_size import Inputs, build, inputs, step
from gpu import (
    WARM_UP,
    Link,
    NotInstalled,
    add_arguments,
    chosen_rows,
    find_gpu,
    gradient_norms,
    measured_link,
    milliseconds,
    strangers,
    surroundings,
)

NO_OFFLOAD = "no offload"


@dataclass(frozen=True)
class Row:
    """One way of training; the steps run inside the context that `ready` makes for a model."""

    name: str
    ready: Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Figures:
    """What a row took; None is not known.

    Attributes:
        milliseconds: of a step.
        peak: bytes, allocated on the GPU at one time.
        offloaded: bytes, in a step.
        norms: of the gradient of each parameter.
        report: the engine's counters.
        note: why there are no other figures.
        failed: for a reason that is a fault, unlike a small card or a peer that is not installed.
    """

    milliseconds: float | None = None
    peak: int | None = None
    offloaded: float | None = None
    norms: torch.Tensor | None = None
    report: dict[str, Any] | None = None
    note: str = ""
    failed: bool = False


# ---- rows ------------------------------------------------------------------------------------------------------------


def ours(window: int | None = None, **options: Any) -> Callable[[Any], AbstractContextManager[Any]]:
    """The engine with these options; the context is its handle."""

    def ready(model: Any) -> elbowroom.Handle:
        controls = elbowroom.Controls(activation_window=window, **options)
        return elbowroom.apply(model, elbowroom.schedule(model, controls))

    return ready


def rows(window: int | None) -> list[Row]:
    attention = {"activation_offload": ("attention",), "window": window}
    everything = {"activation_offload": ("all",), "window": window}
    prefetched = {"gradient_checkpointing_offload_prefetch": True}
    on_demand = {"gradient_checkpointing_offload_prefetch": False}
    recompute = {"gradient_checkpointing": True}
    return [
        Row(NO_OFFLOAD, lambda model: nullcontext()),
        Row("ours: attention, on demand", ours(**attention, **on_demand)),
        Row("ours: attention, prefetched", ours(**attention, **prefetched)),
        Row("ours: attention, rest recomputed", ours(**attention, **prefetched, **recompute)),
        Row("ours: everything, on demand", ours(**everything, **on_demand)),
        Row("ours: everything, prefetched", ours(**everything, **prefetched)),
        Row("ours: blocks recomputed", ours(**recompute)),
        Row("torchtune OffloadActivations", lambda model: torchtune_offload()),
        Row("save_on_cpu(pin_memory=True)", lambda model: torch.autograd.graph.save_on_cpu(pin_memory=True)),
    ]


def torchtune_offload() -> AbstractContextManager[Any]:
    try:
        from torchtune.training import OffloadActivations  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotInstalled(f"left out: {error}") from error
    return OffloadActivations(use_pin_memory=True, use_streams=True)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(row: Row, model: Any, batch: Inputs, rounds: int) -> Figures:
    """Return the figures of a row; a row that fails says why, and the others go on."""
    gc.collect()  # here, not after a failure: its traceback still holds the graph
    torch.cuda.empty_cache()
    try:
        with row.ready(model) as handle:
            for _ in range(WARM_UP):
                step(model, batch)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = offloaded_bytes(handle)
            taken = milliseconds(partial(step, model, batch), rounds)
            return Figures(
                taken,
                torch.cuda.max_memory_allocated(),
                (offloaded_bytes(handle) - before) / rounds,
                gradient_norms(model),
                dict(handle.report().to_dict()) if isinstance(handle, elbowroom.Handle) else None,
            )
    except NotInstalled as error:
        return Figures(note=str(error))
    except torch.OutOfMemoryError:
        return Figures(note="out of GPU memory")
    except RuntimeError as error:
        return Figures(note=str(error).splitlines()[0], failed=True)


def offloaded_bytes(handle: object) -> int:
    """Return how many bytes a handle has offloaded so far; what others have is not known, and counts as none."""
    if not isinstance(handle, elbowroom.Handle):
        return 0
    return sum(handle.report().counters.bytes_offloaded.values())


# ---- showing ---------------------------------------------------------------------------------------------------------


def table_of(title: str, figures: dict[str, Figures], link: Link) -> Table:
    table = Table(title=title)
    table.add_column("")
    for column in ("step ms", "ratio", "peak GiB", "offloaded GiB", "bound ms", "exposed ms"):
        table.add_column(column, justify="right")
    base = figures[NO_OFFLOAD].milliseconds if NO_OFFLOAD in figures else None
    for name, each in figures.items():
        if each.milliseconds is None or each.peak is None:
            table.add_row(f"{name}: {each.note}")
            continue
        table.add_row(
            name,
            f"{each.milliseconds:.1f}",
            f"{each.milliseconds / base:.3f}" if base else "",
            f"{each.peak / 2**30:.2f}",
            f"{each.offloaded / 2**30:.2f}" if each.offloaded else "",
            f"{link.milliseconds(out=each.offloaded, back=each.offloaded):.1f}" if each.offloaded else "",
            f"{each.milliseconds - base:.1f}" if base else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--train", choices=("lora", "full"), default="lora")
    parser.add_argument("--window", type=int, default=None, help="MiB on their way each way (default: the engine's)")
    arguments = parser.parse_args()
    window = None if arguments.window is None else arguments.window << 20
    ways = {row.name: row for row in rows(window)}
    chosen = chosen_rows(parser, ways, arguments.rows)
    device = find_gpu(__file__)
    link = measured_link(device)
    around = surroundings(device, link)
    console = Console(width=130, markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in around.items()))

    at: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    model = build(arguments.model, layers=arguments.layers, lora=arguments.train == "lora", **at)
    batch = inputs(arguments.model, side=arguments.side, batch=arguments.batch, **at)
    figures = {}
    for name in chosen:
        console.print(f"{name} …")
        figures[name] = measure(ways[name], model, batch, arguments.rounds)
    title = f"{arguments.model}, {arguments.layers or 'all'} blocks, {arguments.train}, {arguments.side**2} tokens"
    console.print(table_of(title, figures, link))
    if arguments.json:
        entries = {name: asdict(each) | {"norms": None} for name, each in figures.items()}
        document = {"title": title, "surroundings": around, "rows": entries}
        arguments.json.write_text(json.dumps(document, indent=1))
    problems = [f"{name}: {each.note}" for name, each in figures.items() if each.failed]
    norms = {name: each.norms for name, each in figures.items()}
    problems += [f"{name}: gradients are not those of the first row" for name in strangers(norms)]
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
