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
turn. Gradients are compared with the untouched model's, bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import elbowroom
from counting import median_seconds, peak_bytes
from models import build_flux, build_sd3, flux_inputs, sd3_inputs, step

Ready = Callable[[Any, Path], Any]
"""Makes a model ready for a row: a context; the step runs inside it."""

SAME_BYTES = 0.03
WINDOW = 32 << 20
"""Bytes on their way to or from the disk: the default is made for cards with gigabytes."""

NOISE = 0.02
"""Two medians that differ by less say nothing on a shared machine."""


@dataclass(frozen=True)
class Row:
    """One way of training. `peer` is the row that means the same."""

    name: str
    ready: Ready
    peer: str | None = None


# ---- peers -----------------------------------------------------------------------------------------------------------


def blocks_of(model: Any) -> list[nn.Module]:
    return [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]


@contextmanager
def torch_checkpoint(model: Any, **options: Any) -> Iterator[None]:
    """`torch.utils.checkpoint` around each block."""
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks_of(model):
            del block.forward


@contextmanager
def diffusers_checkpointing(model: Any) -> Iterator[None]:
    model.enable_gradient_checkpointing()
    try:
        yield
    finally:
        model.disable_gradient_checkpointing()


def save_kernel(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if "scaled_dot_product" in str(operation):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class SaveAttention:
    """A policy that saves what autograd saves of an attention module's computations, and what the module returns.

    Which of its operations these are is found out once, in an untouched run. It counts the operations inside each
    attention module, in the forward pass and in the recomputation alike.
    """

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]):
        self._model = model
        self._wanted = _saved_operations(model, inputs)

    @contextmanager
    def ready(self) -> Iterator[None]:
        position: dict[str, Any] = {"module": None, "count": 0}
        hooks = []
        for name, module in _attention_modules(self._model):

            def enter(_: Any, __: Any, name: str = name) -> None:
                position.update(module=name, count=0)

            def leave(_: Any, __: Any, ___: Any) -> None:
                position.update(module=None)

            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if position["module"] is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = position["count"]
            position["count"] += 1
            saved = number in self._wanted[position["module"]]
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        try:
            with torch_checkpoint(
                self._model, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _attention_modules(model: Any) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in ("attn", "attn2")]


def _saved_operations(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, set[int]]:
    """Return, for each attention module, the numbers of its operations whose results autograd saves or it returns."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made: dict[str, dict[int, int]] = {}
    wanted: dict[str, set[int]] = {}
    current: list[str | None] = [None]
    alive: list[torch.Tensor] = []

    class Numbers(TorchDispatchMode):
        def __init__(self, name: str):
            super().__init__()
            self.name, self.count = name, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in SAC_IGNORED_OPS:  # policies are not asked about these
                return result
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    alive.append(leaf)  # so that no address is used twice
                    address = leaf.untyped_storage()._cdata
                    if func._schema.is_mutable or address not in made[self.name]:  # a view makes nothing
                        made[self.name][address] = self.count
            self.count += 1
            return result

    def note(name: str, tensor: torch.Tensor) -> None:
        number = made[name].get(tensor.untyped_storage()._cdata)
        if number is not None:
            wanted[name].add(number)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if current[0] is not None:
            note(current[0], tensor)
        return tensor.detach()

    originals = {}
    for name, module in _attention_modules(model):
        made[name], wanted[name] = {}, set()
        originals[name] = (module, module.forward)

        def forward(*args: Any, _name: str = name, _original: Any = module.forward, **kwargs: Any) -> Any:
            current[0] = _name
            with Numbers(_name):
                result = _original(*args, **kwargs)
            current[0] = None
            for leaf in tree_leaves(result):
                note(_name, leaf)
            return result

        module.forward = forward
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).sample.square().mean()
    del loss
    for module, _ in originals.values():
        del module.forward
    return wanted


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(**options: Any) -> Ready:
    """The engine with these options, on the model."""

    @contextmanager
    def ready(model: Any, folder: Path) -> Iterator[None]:
        if "activation_offload" in options or options.get("gradient_checkpointing_backend", "").startswith("unsloth"):
            options.setdefault("activation_store", "disk")
            options.update(activation_store_path=folder, activation_window=WINDOW)
        plan = elbowroom.schedule(model, elbowroom.Controls(**options))
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
        Row("recompute blocks", ours(**checkpointed), "torch checkpoint"),
        Row("recompute blocks ", ours(**checkpointed), "Diffusers' checkpointing"),
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
            "selective, kernel",
        ),
        Row("keep attention", ours(**checkpointed, gradient_checkpointing_keep_attention=True), "selective, attention"),
        Row("boundary on disk", ours(**checkpointed, gradient_checkpointing_backend="unsloth")),
        Row("attention on disk", ours(activation_offload=("attention",))),
        Row("attention on disk, rest recomputed", ours(**checkpointed, activation_offload=("attention",))),
        Row("everything on disk", ours(activation_offload=("all",))),
    ]


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    seconds: float
    peak: int


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
        seconds = median_seconds(
            {row.name: functools.partial(step, model, inputs) for row in chosen},
            rounds,
            around={row.name: functools.partial(row.ready, model, folder) for row in chosen},
            warm={row.name for row in chosen if "disk" in row.name},
        )
    return {row.name: Figures(seconds[row.name], peaks[row.name]) for row in chosen}


def table_of(title: str, chosen: list[Row], figures: dict[str, Figures]) -> Table:
    table = Table(title=title)
    for column in ("", "peak MiB", "seconds", "means the same", "peak ratio", "time ratio"):
        table.add_column(column, justify="left" if column in ("", "means the same") else "right")
    for row in chosen:
        mine = figures[row.name]
        cells = [row.name, f"{mine.peak / 2**20:.1f}", f"{mine.seconds:.3f}"]
        if row.peer in figures:
            peer = figures[row.peer]
            cells += [row.peer, f"{mine.peak / peer.peak:.3f}", f"{mine.seconds / peer.seconds:.3f}"]
        table.add_row(*cells)
    return table


def broken(chosen: list[Row], figures: dict[str, Figures]) -> list[str]:
    """Return what ours does worse than the row that means the same."""
    problems = []
    for row in chosen:
        if row.peer not in figures:
            continue
        mine, peer = figures[row.name], figures[row.peer]
        if mine.peak > peer.peak * (1 + SAME_BYTES):
            problems.append(f"{row.name} takes more bytes than {row.peer}")
        if mine.seconds > peer.seconds * (1 + NOISE):
            problems.append(f"{row.name} takes longer than {row.peer}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("flux", "sd3", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--side", type=int, default=32, help="picture tokens in each direction (default 32: 1,024)")
    parser.add_argument("--width", type=int, default=None, help="hidden size (default: about 100 M parameters)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1, the least noisy)")
    parser.add_argument("--rows", nargs="+", default=None, help="names of rows to run (default all)")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    parser.add_argument("--check", action="store_true", help="fail if ours is worse than what means the same")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    problems, document = [], {}
    for name in ("flux", "sd3") if arguments.model == "both" else (arguments.model,):
        if name == "flux":
            model: Any = build_flux(arguments.width or 448, double=10, single=10)
            inputs = flux_inputs(arguments.side**2)
        else:
            model = build_sd3(arguments.width or 448, layers=15, side=2 * arguments.side)
            inputs = sd3_inputs(2 * arguments.side)
        chosen = [row for row in rows(model, inputs) if not arguments.rows or row.name.strip() in arguments.rows]
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
