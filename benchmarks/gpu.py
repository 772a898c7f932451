"""What the benchmarks for a GPU have in common: times, the bandwidth of the link, and what figures depend on."""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import diffusers
import torch

from full_size import Name

WARM_UP = 3
SAME_GRADIENTS = 0.02
"""Kernels of the backward pass add in another order each time, so norms of gradients differ in bfloat16."""


class NotInstalled(RuntimeError):
    """A peer is missing, so its row is left out."""


@dataclass(frozen=True)
class Link:
    """Bandwidth from the GPU to pinned memory, and from there to the GPU, in bytes per second."""

    out: float
    back: float

    def milliseconds(self, *, out: float, back: float) -> float:
        """Return how long it takes to copy so many bytes in each direction, one after the other."""
        return (out / self.out + back / self.back) * 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both programs are told: the model, its size, the batch, and what to do with the figures."""
    parser.add_argument("--model", choices=get_args(Name), default="sd3-medium")
    parser.add_argument("--layers", type=int, default=None, help="number of blocks (default: all, 24 or 57)")
    parser.add_argument("--side", type=int, default=64, help="picture tokens in each direction (default 64: 4,096)")
    parser.add_argument("--batch", type=int, default=1, help="pictures in a step (default 1)")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each row (default 9)")
    parser.add_argument("--rows", nargs="+", default=None, help="only rows whose names begin with one of these")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")


def chosen_rows(parser: argparse.ArgumentParser, names: Iterable[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the names that begin with what is wanted; all of them if nothing is."""
    chosen = [name for name in names if name.startswith(tuple(wanted or ("",)))]
    if not chosen:
        parser.error(f"--rows: no row begins with {' or '.join(wanted or ())}; there are: {'; '.join(names)}")
    return chosen


def find_gpu(program: str) -> torch.device:
    """Return the GPU, or end the program with a sentence."""
    if not torch.cuda.is_available():
        name = Path(program).name
        raise SystemExit(f"{name} measures a GPU, and torch finds none here (torch.cuda.is_available() is False)")
    return torch.device("cuda", torch.cuda.current_device())


def milliseconds(work: Callable[[], Any], rounds: int) -> float:
    """Return the median time of `work` between CUDA events."""
    measured = []
    for _ in range(rounds):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        measured.append(started.elapsed_time(ended))
    return statistics.median(measured)


def measured_link(device: torch.device, nbytes: int = 256 << 20) -> Link:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    out = partial(host.copy_, there, non_blocking=True)
    back = partial(there.copy_, host, non_blocking=True)
    for copy in (out, back):
        copy()
    return Link(*(nbytes / (milliseconds(copy, 9) / 1000) for copy in (out, back)))


def gradient_norms(model: Any) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([gradient.float().norm() for gradient in gradients]).cpu()


def strangers(norms: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Return the rows whose norms of gradients are not those of the first row that has any."""
    known = {name: each for name, each in norms.items() if each is not None}
    expected = next(iter(known.values()), torch.zeros(0))
    return [name for name, each in known.items() if not (each - expected).norm() <= SAME_GRADIENTS * expected.norm()]


def surroundings(device: torch.device, link: Link) -> dict[str, Any]:
    """Return what the figures depend on besides the code."""
    card = torch.cuda.get_device_properties(device)
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "card": card.name,
        "memory GiB": round(card.total_memory / 2**30, 1),
        "driver": driver,
        "CUDA": torch.version.cuda or torch.version.hip,
        "torch": torch.__version__,
        "Diffusers": diffusers.__version__,
        "Python": platform.python_version(),
        "GB/s out": round(link.out / 1e9, 2),
        "GB/s back": round(link.back / 1e9, 2),
    }
