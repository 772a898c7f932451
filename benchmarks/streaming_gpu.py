"""Streamed weights on a GPU: what they cost in time, beside resident ones, what others offer, and what the link allows.

    python benchmarks/streaming_gpu.py --model sd3-medium
    python benchmarks/streaming_gpu.py --model flux.1-dev --work sample --json flux.json

Models of full width with random weights in bfloat16. The work is a step of a LoRA, of a full fine-tune, or a forward
pass as for sampling; blocks are recomputed in all rows that train. Each row has a process of its own:

- resident: all weights on the GPU;
- ours: all blocks streamed, half of them, or one at a time without fetching ahead; and single layers;
- RamTorch's linear layers, if `ramtorch` is installed; its `OffloadModel` wants a model as a list of pieces, which
  Diffusers' models are not;
- Diffusers' `enable_group_offload` by blocks and by leaves, with a stream of its own.

Times are medians of steps between CUDA events, after a warm-up that learns the order of use. The bound is what the
copies of a step take by themselves: bytes over the bandwidth that is measured first with pinned memory. No step can be
shorter than the bound, nor than with resident weights; what it takes longer than the latter is the exposed time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import elbowroom
from full_size import Inputs, Name, build, inputs, step
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

Work = Literal["lora", "full", "sample"]
Ready = Callable[[Any, torch.device, Work], AbstractContextManager[Any]]
RESIDENT = "resident"
OURS = "ours"


@dataclass(frozen=True)
class Settings:
    """What all rows have in common."""

    model: Name = "sd3-medium"
    layers: int | None = None
    work: Work = "lora"
    side: int = 64
    batch: int = 1
    window: int | None = None
    rounds: int = 9


@dataclass(frozen=True)
class Figures:
    """What a row took; None is not known.

    Attributes:
        milliseconds: of a step.
        peak: bytes, allocated on the GPU at one time.
        fetched: bytes of weights that came to the GPU in a step.
        returned: bytes of gradients that left it in a step.
        hidden: share of the time of the weights' copies during which the GPU computed.
        norms: of the gradient of each parameter.
        report: the engine's counters.
        note: why there are no other figures.
    """

    milliseconds: float | None = None
    peak: int | None = None
    fetched: float | None = None
    returned: float | None = None
    hidden: float | None = None
    norms: list[float] = field(default_factory=list)
    report: dict[str, Any] | None = None
    note: str = ""


# ---- rows ------------------------------------------------------------------------------------------------------------


def ours(**options: Any) -> Ready:
    """The engine with these options; the context is its handle."""

    def ready(model: Any, device: torch.device, work: Work) -> elbowroom.Handle:
        controls = elbowroom.Controls(gradient_checkpointing=work != "sample", **options)
        return elbowroom.apply(model, elbowroom.schedule(model, controls), device=device)

    return ready


def resident(model: Any, device: torch.device, work: Work) -> AbstractContextManager[Any]:
    return ours()(model.to(device), device, work)


@contextmanager
def ramtorch_linears(model: Any, device: torch.device, work: Work) -> Iterator[None]:
    """RamTorch's layers in the place of all linear ones but a LoRA's, with their weights in pinned memory."""
    try:
        layers = importlib.import_module("ramtorch.modules.linear")
    except ImportError as error:
        raise NotInstalled(f"left out: {error}") from error
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or ".lora_" in name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            layer = layers.Linear(
                module.in_features, module.out_features, bias=module.bias is not None, dtype=module.weight.dtype,
                device=device, skip_init=True,
            )  # fmt: skip
        with torch.no_grad():
            for parameter, original in zip(layer.parameters(), module.parameters(), strict=True):
                parameter.copy_(original)
                parameter.requires_grad_(original.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, layer)
    model.to(device)
    with _recomputed_by_diffusers(model, work):
        yield


def group_offload(kind: str, **options: Any) -> Ready:
    """Diffusers' offload of groups of modules, which fetches the next group on a stream of its own."""

    @contextmanager
    def ready(model: Any, device: torch.device, work: Work) -> Iterator[None]:
        model.enable_group_offload(device, offload_type=kind, use_stream=True, non_blocking=True, **options)
        with _recomputed_by_diffusers(model, work):
            yield

    return ready


@contextmanager
def _recomputed_by_diffusers(model: Any, work: Work) -> Iterator[None]:
    if work != "sample":
        model.enable_gradient_checkpointing()
    yield
    model.disable_gradient_checkpointing()


def rows(window: int | None) -> dict[str, Ready]:
    """Return the ways of having weights, by name.

    Args:
        window: bytes of streamed weights on the device at one time; None: the engine's choice.
    """
    return {
        RESIDENT: resident,
        f"{OURS}: blocks": ours(weight_streaming="100%", weight_window=window),
        f"{OURS}: half of the blocks": ours(weight_streaming="50%", weight_window=window),
        f"{OURS}: blocks, one at a time": ours(weight_streaming="100%", weight_window=1),
        f"{OURS}: layers": ours(ramtorch=True, weight_window=window),
        "RamTorch's linear layers": ramtorch_linears,
        "Diffusers' group offload, blocks": group_offload("block_level", num_blocks_per_group=1),
        "Diffusers' group offload, leaves": group_offload("leaf_level"),
    }


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(name: str, settings: Settings) -> Figures:
    """Return the figures of a row; to be called in a process of its own, which the row may leave in any state."""
    device = torch.device("cuda", torch.cuda.current_device())
    at: dict[str, Any] = {"dtype": torch.bfloat16}
    model = build(
        settings.model, layers=settings.layers, lora=settings.work == "lora", device=torch.device("cpu"), **at
    )
    batch = inputs(settings.model, side=settings.side, batch=settings.batch, device=device, **at)
    work = partial(run, settings.work, model, batch)
    try:
        with rows(settings.window)[name](model, device, settings.work) as handle:
            for _ in range(WARM_UP):
                work()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = counted(handle)
            taken = milliseconds(work, settings.rounds)
            after = counted(handle)
            done = {key: after[key] - before[key] for key in after}
            return Figures(
                taken,
                torch.cuda.max_memory_allocated(),
                done["weight_bytes_in"] / settings.rounds if done else None,
                done["gradient_bytes_out"] / settings.rounds if done else None,
                1 - done["weight_wait_seconds"] / done["weight_copy_seconds"] if any(done.values()) else None,
                [] if settings.work == "sample" else gradient_norms(model).tolist(),
                dict(handle.report().to_dict()) if isinstance(handle, elbowroom.Handle) else None,
            )
    except NotInstalled as error:
        return Figures(note=str(error))
    except torch.OutOfMemoryError:
        return Figures(note="out of GPU memory")
    except Exception as error:
        return Figures(note=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def run(work: Work, model: Any, batch: Inputs) -> None:
    """Take a step of the work."""
    if work == "sample":
        with torch.no_grad():
            model(**batch)
    else:
        step(model, batch)


def counted(handle: object) -> dict[str, float]:
    """Return what a handle has copied so far, and for how long; what others copy is not known."""
    if not isinstance(handle, elbowroom.Handle):
        return {}
    report = handle.report().to_dict()
    names = ("weight_bytes_in", "gradient_bytes_out", "weight_copy_seconds", "weight_wait_seconds")
    return {name: report[name] for name in names}


def problems_of(figures: dict[str, Figures]) -> list[str]:
    """Return what is wrong with rows of ours; that a peer's row has no figures is a figure by itself."""
    norms = {name: torch.tensor(each.norms) for name, each in figures.items() if each.norms}
    differing = set(strangers(norms))
    problems = []
    for name, each in figures.items():
        if not name.startswith(OURS):
            continue
        if each.milliseconds is None and each.note != "out of GPU memory":
            problems.append(f"{name}: {each.note}")
        if name in differing:
            problems.append(f"{name}: gradients are not those of the first row")
    return problems


# ---- showing ---------------------------------------------------------------------------------------------------------


def table_of(title: str, figures: dict[str, Figures], link: Link) -> Table:
    table = Table(title=title)
    table.add_column("")
    for column in ("step ms", "ratio", "peak GiB", "in GiB", "out GiB", "bound ms", "exposed ms", "hidden"):
        table.add_column(column, justify="right")
    base = figures[RESIDENT].milliseconds if RESIDENT in figures else None
    for name, each in figures.items():
        if each.milliseconds is None or each.peak is None:
            table.add_row(f"{name}: {each.note}")
            continue
        copies = None if each.fetched is None or each.returned is None else (each.returned, each.fetched)
        table.add_row(
            name,
            f"{each.milliseconds:.1f}",
            f"{each.milliseconds / base:.3f}" if base else "",
            f"{each.peak / 2**30:.2f}",
            f"{copies[1] / 2**30:.2f}" if copies else "",
            f"{copies[0] / 2**30:.2f}" if copies else "",
            f"{link.milliseconds(out=copies[0], back=copies[1]):.1f}" if copies else "",
            f"{each.milliseconds - base:.1f}" if base else "",
            f"{each.hidden:.0%}" if each.hidden is not None else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--work", choices=get_args(Work), default="lora", help="what a step is (default lora)")
    parser.add_argument("--window", type=int, default=None, help="MiB of streamed weights at a time (default: ours)")
    arguments = parser.parse_args()
    chosen = chosen_rows(parser, rows(None), arguments.rows)
    device = find_gpu(__file__)
    link = measured_link(device)
    around = surroundings(device, link)
    console = Console(width=140, markup=False)
    console.print(", ".join(f"{name} {value}" for name, value in around.items()))

    window = None if arguments.window is None else arguments.window << 20
    settings = Settings(
        arguments.model, arguments.layers, arguments.work, arguments.side, arguments.batch, window, arguments.rounds
    )
    figures = {}
    for name in chosen:
        console.print(f"{name} …")
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            figures[name] = pool.submit(measure, name, settings).result()
    title = f"{settings.model}, {settings.layers or 'all'} blocks, {settings.work}, {settings.side**2} tokens"
    console.print(table_of(title, figures, link))
    if arguments.json:
        document = {
            "settings": asdict(settings),
            "surroundings": around,
            "rows": {name: asdict(each) for name, each in figures.items()},
        }
        arguments.json.write_text(json.dumps(document, indent=1))
    problems = problems_of(figures)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
