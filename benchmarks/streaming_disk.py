"""The resident set of a LoRA step on a model that is streamed from its own files.

    python benchmarks/streaming_disk.py

Writes a Flux-shaped checkpoint with random weights in bfloat16 (full width, 6 GB by default) to a folder, then loads it
and takes two steps of a LoRA in a process of its own, on the CPU. The kernel says how much memory that took at most:
`VmHWM` of /proc/self/status, from the start of the process: Python, torch, loading, and the steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file

HEADS = 24
SHARD = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Of a Flux: numbers of double- and single-stream blocks, and of heads of 128 channels."""

    double: int
    single: int
    heads: int


def build(shape: Shape) -> Any:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    with init_empty_weights(include_buffers=False):
        model: Any = FluxTransformer2DModel(
            num_layers=shape.double,
            num_single_layers=shape.single,
            attention_head_dim=128,
            num_attention_heads=shape.heads,
            guidance_embeds=True,
        )
    return model.to(torch.bfloat16)


def shape_for(nbytes: int, heads: int) -> Shape:
    """Return the smallest shape, of single- and double-stream blocks 2 to 1, that has at least so many bytes."""
    double = 1
    while sum(parameter.nbytes for parameter in build(Shape(double, 2 * double, heads)).parameters()) < nbytes:
        double += 1
    return Shape(double, 2 * double, heads)


def write_checkpoint(folder: Path, shape: Shape) -> int:
    """Write random weights in shards of about a gibibyte; never more than one is in memory. Returns all bytes."""
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    number = total = 0
    parameters = list(build(shape).named_parameters())
    for place, (name, parameter) in enumerate(track(parameters, "writing", console=Console(stderr=True))):
        shard[name] = torch.empty(parameter.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        total += parameter.nbytes
        last = place == len(parameters) - 1
        if last or sum(tensor.nbytes for tensor in shard.values()) >= SHARD:
            save_file(shard, folder / f"model-{number:05d}.safetensors")
            shard, number = {}, number + 1
    return total


def train(folder: Path, shape: Shape, tokens: int, window: int) -> dict[str, Any]:
    """Take two steps of a LoRA; return what the kernel and the engine have counted."""
    from peft import LoraConfig

    import elbowroom
    from elbowroom.memory.devices import Cpu
    from elbowroom.memory.weights.mapped import map_weights
    from models import flux_inputs

    before = Cpu().peak_bytes()
    model = build(shape)
    missing = map_weights(model, sorted(folder.glob("*.safetensors")))
    assert not missing, missing
    model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    controls = elbowroom.Controls(gradient_checkpointing=True, weight_streaming="100%", weight_window=window)
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in flux_inputs(tokens, joint=4096, pooled=768, channels=64, text=32).items()
    }
    inputs["guidance"] = torch.ones(1, dtype=torch.bfloat16)
    with elbowroom.apply(model, elbowroom.schedule(model, controls)) as handle:
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            loss = model(**inputs).sample.float().square().mean()
            loss.backward()
            seconds.append(time.perf_counter() - started)
        counters = handle.report().to_dict()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    return {"imports": before, "peak": Cpu().peak_bytes(), "seconds": seconds[-1], **counters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="size of the checkpoint (default 6)")
    parser.add_argument("--heads", type=int, default=HEADS, help=f"of 128 channels (default {HEADS}, FLUX.1-dev's)")
    parser.add_argument("--tokens", type=int, default=64, help="picture tokens (default 64)")
    parser.add_argument("--window", type=int, default=800 << 20, help="bytes of weights in memory (default 800 MiB)")
    parser.add_argument("--folder", type=Path, default=None, help="for the checkpoint (default: a temporary one)")
    parser.add_argument("--check", type=float, default=None, help="fail if the peak is above so many gigabytes")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    arguments = parser.parse_args()
    shape = shape_for(int(arguments.gigabytes * 1e9), arguments.heads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        total = write_checkpoint(folder, shape)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            figures = pool.submit(train, folder, shape, arguments.tokens, arguments.window).result()
    table = Table(title=f"A Flux of {shape.double} and {shape.single} blocks, streamed from its files")
    for column in ("checkpoint, GB", "VmHWM, GB", "of it imports, GB", "read per step, GB", "window, GB", "s per step"):
        table.add_column(column, justify="right")
    numbers = (
        total, figures["peak"], figures["imports"], figures["weight_bytes_in"] / 2, figures["weight_window"],
    )  # fmt: skip
    table.add_row(*(f"{number / 1e9:.2f}" for number in numbers), f"{figures['seconds']:.1f}")
    Console(width=110).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"checkpoint": total, **figures}, indent=1))
    if arguments.check is not None and figures["peak"] > arguments.check * 1e9:
        raise SystemExit(f"the peak is above {arguments.check} GB")


if __name__ == "__main__":
    main()
