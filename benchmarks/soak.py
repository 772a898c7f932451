"""Wear: thousands of steps of mixed shapes, some of which end badly, must leave nothing behind.

    python benchmarks/soak.py

Every kind of treatment is at work on a small stack of blocks, on the simulated accelerator (whose copies are late, in
an adversarial order) and on the CPU with the disk store. Steps have random numbers of tokens. Some are dropped without
backward, run backward twice, see no gradients, or raise: in forward, in backward, or in a replay.

The store is given just the room that the largest step needs, so whatever is left in it, or in the way of others, shows:
it must be empty after every step and never refuse anything. After the warm-up the engine must not have more Python
objects than before, and the process must not grow.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import elbowroom
from blocks import Stack, TransformerBlock
from elbowroom.memory.devices import Cpu
from elbowroom.testing import simulated_accelerator
from wear import MOST_TOKENS, WIDTH, WINDOW, Wear, mixed_plan

COUNT_EVERY = 100
"""Steps between two counts of Python objects, which take longer than a step."""
UNDER_WAY = 3 * WINDOW // 4096
"""Objects by which two counts may differ: a window of small records may be on its way, with three objects each."""


def objects_of_engine() -> Counter[str]:
    """Count the Python objects whose class is the engine's."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if _is_of_engine(kind))


def _is_of_engine(kind: type) -> bool:
    return str(kind.__module__).startswith("elbowroom.memory")


@dataclass(frozen=True)
class Found:
    """What a soak found.

    Attributes:
        steps: how many of each kind there were.
        blown: how many raised.
        records: storages that were offloaded.
        limit: bytes that the store had room for.
        grown: bytes that the process grew after the warm-up.
        seconds: of all steps.
    """

    steps: Counter[str]
    blown: int
    records: int
    limit: int
    grown: int
    seconds: float


@contextmanager
def on_simulated(seed: int) -> Iterator[tuple[torch.device, Path | None]]:
    with simulated_accelerator(seed=seed) as accelerator:
        yield accelerator.device, None
        gc.collect()
        accelerator.synchronize()
        require(not accelerator.violations, f"undefined on real hardware: {accelerator.violations[:3]}")
        require(accelerator.bytes_in_use() == 0, f"{accelerator.bytes_in_use()} bytes are left on the device")


@contextmanager
def on_cpu(seed: int) -> Iterator[tuple[torch.device, Path | None]]:
    with tempfile.TemporaryDirectory() as name:
        yield torch.device("cpu"), Path(name)
        gc.collect()
        require(not list(Path(name).iterdir()), "files of the store are left")


DEVICES = {"simulated": on_simulated, "cpu": on_cpu}


def soak(name: str, steps: int, seed: int, most_growth: int) -> Found:
    """Do the steps on a device.

    Raises:
        SystemExit: something was left behind.
    """
    torch.manual_seed(seed)
    with DEVICES[name](seed) as (device, folder):
        found = _soak_on(device, folder, steps, random.Random(seed), f"{name}: {steps} steps")
    require(found.grown < most_growth, f"the process grew by {found.grown} bytes")
    return found


def _soak_on(device: torch.device, folder: Path | None, steps: int, choose: random.Random, title: str) -> Found:
    model = Stack(len(mixed_plan(folder).blocks), lambda: TransformerBlock(WIDTH, dropout=0.1)).to(device)
    wear = Wear(model, device, choose)
    before = objects_of_engine()
    limit = _largest_need(wear, folder)
    with elbowroom.apply(model, mixed_plan(folder, limit)) as handle:
        seconds, grown = _wear_down(handle, wear, steps, title)
        records = handle.report().counters.records
    due = wear.steps["raised in forward"] + wear.steps["raised in backward"]
    require(wear.blown >= due, f"{due} steps had to raise, and {wear.blown} did")
    del handle
    left = objects_of_engine() - before
    require(not left, f"the handle is gone, but not {dict(left)}")
    return Found(wear.steps, wear.blown, records, limit, grown, seconds)


def _largest_need(wear: Wear, folder: Path | None) -> int:
    """Return the bytes that the store holds in the largest kind of step."""
    with elbowroom.apply(wear.model, mixed_plan(folder)) as handle:
        wear.step("two forwards", MOST_TOKENS)
        return handle.report().counters.store_peak


def _wear_down(handle: elbowroom.Handle, wear: Wear, steps: int, title: str) -> tuple[float, int]:
    """Do the steps; return their seconds, and the bytes by which the process grew after the warm-up."""
    warm_up = max(1, steps // 10)
    usual: Counter[str] = Counter()
    resident = 0
    started = time.perf_counter()
    for number in track(range(steps), title, console=Console(stderr=True)):
        handle.prefetch = wear.choose.random() < 0.5
        wear.random_step()
        (offloader,) = handle.offloaders or (None,)
        present = 0 if offloader is None else offloader.store.present
        require(present == 0, f"step {number}: {present} bytes are still in the store")
        refused = handle.report().counters.bytes_refused
        require(refused == 0, f"step {number}: {refused} bytes did not fit into the store, though it was empty")
        if number == warm_up - 1:
            usual, resident = objects_of_engine(), Cpu().bytes_in_use()
        elif number >= warm_up and (number % COUNT_EVERY == 0 or number == steps - 1):
            more = objects_of_engine() - usual
            require(more.total() <= UNDER_WAY, f"step {number}: more objects than after the warm-up: {dict(more)}")
    return time.perf_counter() - started, Cpu().bytes_in_use() - resident


def require(true: bool, otherwise: str) -> None:
    if not true:
        raise SystemExit(otherwise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="on each device (default 10,000)")
    parser.add_argument("--device", choices=[*DEVICES, "both"], default="both")
    parser.add_argument("--seed", type=int, default=0, help="of shapes, kinds of steps, and the order of copies")
    parser.add_argument("--growth", type=int, default=64, help="most MiB that the process may grow by (default 64)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="Nothing was left behind")
    names = list(DEVICES) if arguments.device == "both" else [arguments.device]
    found = {name: soak(name, arguments.steps, arguments.seed, arguments.growth << 20) for name in names}
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for kind in sorted({kind for each in found.values() for kind in each.steps}):
        table.add_row(f"steps: {kind}", *(str(each.steps[kind]) for each in found.values()))
    rows: dict[str, Callable[[Found], str]] = {
        "exceptions": lambda each: str(each.blown),
        "records": lambda each: str(each.records),
        "room in the store, KiB": lambda each: f"{each.limit / 1024:.0f}",
        "process grew by, MiB": lambda each: f"{each.grown / 2**20:.1f}",
        "seconds": lambda each: f"{each.seconds:.0f}",
    }
    for label, value in rows.items():
        table.add_row(label, *map(value, found.values()))
    Console(width=90, markup=False).print(table)


if __name__ == "__main__":
    main()
