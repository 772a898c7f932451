"""How much the resident set of a training step falls when everything is offloaded to the disk.

    python benchmarks/disk_store.py

Each mode runs in a process of its own, on the CPU. The kernel says how much memory a step took at most: `VmHWM` of
/proc/self/status, after a small first step (which loads libraries and makes the gradients) and a reset of the mark.
All of them, the untouched one too, let the C library return freed blocks to the system as the engine does, so that the
difference is what offloading does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import elbowroom
from elbowroom.memory.devices import Cpu
from elbowroom.memory.host_memory import return_freed_memory
from models import build_flux, flux_inputs, step

MODES: dict[str, dict[str, Any]] = {
    "untouched": {},
    "everything on disk": {"activation_offload": ("all",)},
    "attention on disk": {"activation_offload": ("attention",)},
}


def measure(mode: str, side: int, window: int) -> dict[str, int]:
    """Run a small step and then the one that is measured in this process, and return its figures in bytes."""
    torch.set_num_threads(1)
    return_freed_memory()
    options = dict(MODES[mode])
    device = Cpu()
    return_freed_memory()  # as the disk store does, so that holes in the heap are counted in no row
    model = build_flux(width=256, double=6, single=12)
    small, inputs = flux_inputs(16), flux_inputs(side**2)
    step(model, small)  # the libraries are loaded, and gradients exist
    with tempfile.TemporaryDirectory() as folder:
        if options:
            options |= {"activation_store_path": Path(folder), "activation_window": window}
        plan = elbowroom.schedule(model, elbowroom.Controls(**options))
        with elbowroom.apply(model, plan) as handle:
            device.reset_peak()
            before = device.bytes_in_use()
            step(model, inputs)
            peak = device.peak_bytes()
            offloaded = sum(handle.report().counters.bytes_offloaded.values())
    return {"before": before, "peak": peak, "offloaded": offloaded}


def in_fresh_process(function: Callable[..., dict[str, int]], *arguments: Any) -> dict[str, int]:
    """Return what a function returns that is called in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=48, help="picture tokens in each direction (default 48: 2,304)")
    parser.add_argument("--window", type=int, default=16 << 20, help="bytes on their way (default 16 MiB)")
    parser.add_argument("--check", action="store_true", help="fail if less than 80 %% of the offloaded bytes are saved")
    arguments = parser.parse_args()
    if not Path("/proc/self/status").exists():
        raise SystemExit("disk_store.py reads VmHWM of /proc/self/status, which this system lacks; run it on Linux")
    figures = {mode: in_fresh_process(measure, mode, arguments.side, arguments.window) for mode in MODES}
    table = Table(
        "", "step takes, MiB", "offloaded, MiB", "falls by, MiB", "share", title="VmHWM of a step (Flux, float32, CPU)"
    )
    taken = {mode: values["peak"] - values["before"] for mode, values in figures.items()}
    shares = []
    for mode, values in figures.items():
        cells = [mode, f"{taken[mode] / 2**20:.0f}"]
        if values["offloaded"]:
            falls = taken["untouched"] - taken[mode]
            shares.append(falls / values["offloaded"])
            cells += [f"{values['offloaded'] / 2**20:.0f}", f"{falls / 2**20:.0f}", f"{shares[-1]:.1%}"]
        table.add_row(*cells)
    Console(width=110, markup=False).print(table)
    if arguments.check:
        raise SystemExit(min(shares) < 0.8)


if __name__ == "__main__":
    main()
