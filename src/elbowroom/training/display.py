"""What the user sees in the terminal: the announcement, progress bars, and plain lines where there is no terminal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from elbowroom.options.export import to_resolved_table
from elbowroom.training.data.summary import render
from elbowroom.training.job import Job

_PLAIN_LINES = 20
"""Without a terminal, this many lines are printed over the whole run."""


class Display:
    """Writes to one console. A bar appears only when there is something to wait for."""

    def __init__(self, console: Console):
        self.console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(Text(text, style="yellow"), soft_wrap=True)

    def announce(self, job: Job, *, sources: bool) -> None:
        """Show what will happen: model, what is trained, data, steps, where output goes."""
        options = job.resolved.options
        facts = Table.grid(padding=(0, 2))
        trained = f"LoRA of rank {options.rank}" if job.is_lora else "all weights"
        base = f", frozen weights in {options.base_model_precision}" if options.base_model_precision else ""
        lines = {
            "model": f"{job.folder.path} ({job.folder.family.name}, {job.total:,} parameters)",
            "trains": f"{trained}: {job.trainable:,} parameters, on {job.device} in {options.precision}{base}",
            "memory plan": job.plan.strip()
            if job.plan.takes_effect
            else "activations are kept (no gradient checkpointing)",
            "steps": f"{job.steps:,} ({job.steps_per_epoch:,} per epoch, {job.steps / job.steps_per_epoch:.1f} epochs)",
            "starts at": f"step {job.resume.step} ({job.resume.path})" if job.resume else "step 0",
            "output": str(job.run.path),
        }
        if job.plan.takes_effect:
            lines["memory plan"] += f"   ({job.plan.legend()})"
        for name, value in lines.items():
            facts.add_row(Text(name, style="bold"), Text(value))
        self.console.print(Panel(Group(facts), title="This will happen", title_align="left", expand=False))
        self.console.print(render(job.summary))
        for note in job.notes:
            self.warn(f"note: {note}")
        for skipped in job.skipped_checkpoints:
            self.warn(f"checkpoint passed over: {skipped}")
        if sources:
            self.console.print(to_resolved_table(job.resolved))

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Show Python's warnings as lines of ours while the block runs, instead of across the bars."""
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: self.warn(f"warning: {message}")
            yield

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Show progress bars while the block runs."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[details]}"),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            try:
                yield
            finally:
                self._progress = None
                self._tasks.clear()

    def progress(self, what: str, done: int, total: int) -> None:
        """Move the bar called `what`; it appears with the first call and goes when it is full."""
        if self._progress is None:
            return
        if not self.console.is_terminal and done == total:
            self.say(f"{what}: {total} done")
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, details="")
        self._progress.update(self._tasks[what], completed=done, total=total)
        if done == total:
            self._progress.remove_task(self._tasks.pop(what))

    def step(self, step: int, steps: int, figures: Mapping[str, Any]) -> None:
        """Show a finished training step with its figures."""
        details = "  ".join(f"{name} {value}" for name, value in figures.items())
        if self._progress is not None and self.console.is_terminal:
            if "training" not in self._tasks:
                self._tasks["training"] = self._progress.add_task("training", total=steps, details="")
            self._progress.update(self._tasks["training"], completed=step, details=details)
        elif step % max(1, steps // _PLAIN_LINES) == 0 or step == steps:
            self.say(f"step {step}/{steps}  {details}")
