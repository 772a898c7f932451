"""What the hooks cost in Python: microseconds per block and step, on blocks whose own computation is negligible.

    python benchmarks/overhead.py

Ours beside `torch.utils.checkpoint` (non-reentrant), which also runs each block again. What an untouched step takes is
subtracted from both; the second run of the block is in both. Medians of rounds that visit all rows in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import elbowroom
from blocks import Stack, TransformerBlock, TwoLayers
from counting import median_seconds
from peers import torch_checkpoint

BLOCKS = 24
WIDTH = 4
REPEATS = 5
"""Steps that are timed together, for one takes but a few milliseconds."""

KINDS: dict[str, Callable[[], nn.Module]] = {
    "two layers": partial(TwoLayers, WIDTH),
    "transformer": partial(TransformerBlock, WIDTH),
    "transformer with dropout": partial(TransformerBlock, WIDTH, 0.1),
}


@contextmanager
def ours(model: nn.Module, **options: Any) -> Iterator[None]:
    controls = elbowroom.Controls(gradient_checkpointing=True, **options)
    with elbowroom.apply(model, elbowroom.schedule(model, controls, blocks=["transformer_blocks.*"])):
        yield


def rows(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return, for each row, the context in which its steps run."""
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "untouched": nullcontext,
        "torch checkpoint": partial(torch_checkpoint, model),
        "ours": partial(ours, model),
        "ours, segments of 4": partial(ours, model, gradient_checkpointing_interval=4),
    }
    if any(name.endswith(".attn") for name, _ in model.named_modules()):
        contexts["ours, attention kept"] = partial(ours, model, gradient_checkpointing_keep_attention=True)
    return contexts


def measure(model: nn.Module, rounds: int) -> dict[str, float]:
    """Return microseconds per block and step of each row."""
    x = torch.randn(1, 2, WIDTH, requires_grad=True)

    def run() -> None:
        for _ in range(REPEATS):
            model(x).sum().backward()

    contexts = rows(model)
    seconds = median_seconds(dict.fromkeys(contexts, run), rounds, around=contexts, warm=set(contexts))
    return {name: each / REPEATS / BLOCKS * 1e6 for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41, help="timed rounds (default 41)")
    parser.add_argument("--check", action="store_true", help="fail if ours is slower than torch's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("block", "", "µs per block and step", "added", "ratio", title="Overhead of the hooks")
    slower = []
    for kind, make in KINDS.items():
        micros = measure(Stack(BLOCKS, make), arguments.rounds)
        untouched, peer = micros["untouched"], micros["torch checkpoint"]
        for name, figure in micros.items():
            added = "" if name == "untouched" else f"{figure - untouched:.0f}"
            ratio = f"{(figure - untouched) / (peer - untouched):.3f}" if name.startswith("ours") else ""
            table.add_row(kind, name, f"{figure:.0f}", added, ratio)
            if name.startswith("ours") and figure > peer:
                slower.append(f"{kind}: {name} is slower than torch's checkpoint")
        table.add_section()
    Console(width=110, markup=False).print(table)
    if arguments.check and slower:
        raise SystemExit("\n".join(slower))


if __name__ == "__main__":
    main()
