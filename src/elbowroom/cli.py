"""The command line: train, sample, inspect, options."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from elbowroom.options.command_line import OptionsCommand, train_command
from elbowroom.options.definition import Options
from elbowroom.options.reading import Resolved

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Fine-tune large diffusion models in the memory you have.",
    pretty_exceptions_enable=False,
)

FAILED = 1
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main() -> None:
    """Entry point of the `elbowroom` command."""
    # Read when the libraries are imported; they would otherwise talk over our output. Errors still come through.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # About kernels and formats of files that the libraries of number formats can do without.
    for library in ("torchao", "sdnq", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # A hint about speed from torch that users can't act on: Diffusers keeps some norms in float32 on purpose.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    app()


def _no_bars_of_libraries() -> None:
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def _failures_in_one_line(console: Console, options: Options | None = None) -> Iterator[None]:
    """Print what went wrong and what to do, without a traceback, for every error that the user can act on."""
    from elbowroom.training.checkpoints import CheckpointError
    from elbowroom.training.encoding import CacheMissError
    from elbowroom.training.loop import NonFiniteError
    from elbowroom.training.lora import LoraFileError
    from elbowroom.training.memory_use import is_out_of_memory, what_needs_less
    from elbowroom.training.run_folder import RunFolderError

    # Bad options, data and models are ValueErrors.
    expected = (ValueError, CheckpointError, CacheMissError, LoraFileError, NonFiniteError, RunFolderError, OSError)
    try:
        yield
    except expected as error:
        console.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
        raise typer.Exit(FAILED) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        measures = "smaller pictures, or precision bf16" if options is None else what_needs_less(options)
        text = f"error: there is not enough memory ({said}). Less is needed with {measures}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
        raise typer.Exit(FAILED) from None


def train(
    resolved: Resolved,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen, and where each value comes from; train nothing.")
    ] = False,
) -> None:
    """Fine-tune a Diffusers pipeline on a folder of pictures.

    Every option can stand in CONFIG.toml, in the environment (ELBOWROOM_RANK=8) or here (--rank 8); the command line
    wins over the environment, and the environment over the file.

    Example: elbowroom train --model flux-folder --data pictures --steps 1000 --gradient-checkpointing
    """
    console, errors = Console(), Console(stderr=True)
    with _failures_in_one_line(errors, resolved.options):
        from elbowroom.training.display import Display
        from elbowroom.training.job import prepare
        from elbowroom.training.loop import Interrupted
        from elbowroom.training.loop import train as run

        _no_bars_of_libraries()
        display = Display(console)
        try:
            with display.warnings():
                with display.bars():
                    job = prepare(resolved, dry_run=dry_run, progress=display.progress)
                display.announce(job, sources=dry_run)
                if dry_run:
                    display.say("Dry run: nothing was trained.")
                    return
                if job.resume and job.resume.step >= job.steps:
                    display.say(
                        f"Nothing to do: {job.run.path} is at step {job.resume.step}, and {job.steps} are asked for. "
                        "More steps or epochs go on from there."
                    )
                outcome = run(job, display)
        except (KeyboardInterrupt, Interrupted) as stop:
            saved = "The state is saved" if isinstance(stop, Interrupted) else "What was encoded is in the cache"
            display.warn(f"Stopped. {saved}; the same command goes on from there:\n  {_this_command()}")
            raise typer.Exit(INTERRUPTED) from None
        display.say(f"Result: {outcome.result}")
        if outcome.comparison:
            display.say(f"Before and after: {outcome.comparison}")


app.command("train", cls=OptionsCommand)(train_command(train))


@app.command()
def sample(
    source: Annotated[str, typer.Argument(help="A run folder, a pipeline folder, or the id of a pipeline on the hub.")],
    prompt: Annotated[list[str], typer.Option(help="What to draw; may be given several times.")],
    lora: Annotated[Path | None, typer.Option(help="A LoRA file, or the folder that holds it.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("samples"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture; the next one has the next seed.")] = 42,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale; unset: the pipeline's own.")] = None,
    width: Annotated[int | None, typer.Option(min=16, help="Width in pixels.")] = None,
    height: Annotated[int | None, typer.Option(min=16, help="Height in pixels.")] = None,
    max_sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32; unset: that of the run, else bf16.")] = None,
) -> None:
    """Draw pictures with a finished run, or with any pipeline and LoRA.

    Given a run folder, model, LoRA, size, steps and precision are those of the run.
    """
    console, errors = Console(), Console(stderr=True)
    with _failures_in_one_line(errors):
        from elbowroom.training.sampling import Request, draw

        _no_bars_of_libraries()
        request = Request(
            source,
            tuple(prompt),
            lora,
            output,
            seed,
            steps,
            guidance,
            width,
            height,
            max_sequence_length,
            device,
            precision,
        )
        for path in draw(request):
            console.print(Text(str(path)), soft_wrap=True)


@app.command()
def inspect(
    data: Annotated[Path, typer.Argument(help="The folder of pictures.")],
    resolution: Annotated[int, typer.Option(min=16, help="As in `train`.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="As in `train`.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="As in `train`.")] = 1,
    gradient_accumulation_steps: Annotated[int, typer.Option(min=1, help="As in `train`.")] = 1,
    caption_missing: Annotated[str, typer.Option(help="As in `train`: skip, empty or error.")] = "skip",
    step: Annotated[int, typer.Option(min=1, help="Sides are multiples of this: 16 for Flux and SD3.")] = 16,
    contact_sheet: Annotated[Path | None, typer.Option(help="Write a PNG of the pictures as they are cropped.")] = None,
) -> None:
    """Look at a folder of pictures: what would be trained on, in which buckets, and what is wrong with the rest."""
    console, errors = Console(), Console(stderr=True)
    with _failures_in_one_line(errors):
        from elbowroom.training.data import sheet
        from elbowroom.training.data.buckets import bucket_for
        from elbowroom.training.data.scan import require_samples, scan
        from elbowroom.training.data.summary import render, summarize
        from elbowroom.training.display import Display

        if caption_missing not in ("skip", "empty", "error"):
            raise ValueError(f"caption-missing must be skip, empty or error, but is {caption_missing!r}")
        display = Display(console)
        with display.bars():
            found = scan(
                data,
                caption_missing=caption_missing,
                progress=lambda done, total: display.progress("pictures looked at", done, total),
            )
        buckets = tuple(bucket_for(s.width, s.height, resolution=resolution, step=step) for s in found.samples)
        if found.samples:
            summary = summarize(found, buckets, batch=batch, repeats=repeats, accumulation=gradient_accumulation_steps)
            console.print(render(summary, most=None))
        require_samples(found)
        if contact_sheet is not None:
            sheet.contact_sheet(found, buckets, contact_sheet)
            console.print(Text(f"Contact sheet: {contact_sheet}"), soft_wrap=True)


@app.command()
def options() -> None:
    """List all options of `train`: values, defaults, meaning."""
    from elbowroom.options.export import to_table

    Console().print(to_table())


def _this_command() -> str:
    import shlex

    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


if __name__ == "__main__":
    main()
