"""Everything that can be known about a run before it starts, without loading any weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from elbowroom.api import schedule
from elbowroom.memory import Plan
from elbowroom.options.reading import Resolved
from elbowroom.training.checkpoints import Checkpoint, CheckpointFolder, SkippedCheckpoint
from elbowroom.training.data.buckets import Bucket, bucket_for
from elbowroom.training.data.scan import Scan, require_samples, scan
from elbowroom.training.data.summary import Summary, summarize
from elbowroom.training.devices import device_named
from elbowroom.training.lora import add_lora
from elbowroom.training.pipeline import ModelError, PipelineFolder
from elbowroom.training.run_folder import RunFolder, RunFolderError

INDEX_NAME = "digests.json"


@dataclass(frozen=True)
class Job:
    """A run that is ready to start.

    Attributes:
        resolved: the options and where each came from.
        folder: the pipeline that is trained.
        device, dtype: where and in which number format the frozen parts compute.
        data, buckets, summary: the pictures, the bucket of each, and what a person should know about them.
        steps_per_epoch, steps: optimizer steps.
        plan: the memory plan of the denoiser.
        trainable, total: numbers of parameters of the denoiser, with the LoRA.
        run: where output goes.
        resume: the checkpoint to go on from, or None.
        skipped_checkpoints: newer checkpoints that can't be used.
        notes: remarks that the user should see before the run starts.
    """

    resolved: Resolved
    folder: PipelineFolder
    device: torch.device
    dtype: torch.dtype
    data: Scan
    buckets: tuple[Bucket, ...]
    summary: Summary
    steps_per_epoch: int
    steps: int
    plan: Plan
    trainable: int
    total: int
    run: RunFolder
    resume: Checkpoint | None
    skipped_checkpoints: tuple[SkippedCheckpoint, ...]
    notes: tuple[str, ...]

    @property
    def is_lora(self) -> bool:
        return self.resolved.options.training_type == "lora"

    @property
    def max_sequence_length(self) -> int:
        return self.resolved.options.max_sequence_length or self.folder.family.max_sequence_length

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.resolved.options.lora_targets or self.folder.family.lora_targets

    @property
    def validation_guidance(self) -> float:
        guidance = self.resolved.options.validation_guidance
        return self.folder.family.guidance if guidance is None else guidance


def prepare(resolved: Resolved, *, dry_run: bool = False, progress: Callable[[str, int, int], None]) -> Job:
    """Check everything that can be checked before a run, and return what will happen.

    Args:
        resolved: the options.
        dry_run: fetch no weights when the model is on the Hugging Face hub, and make no folders.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        ModelError, DataError, RunFolderError, ValueError: the run can't start; the message says why and what to do.
    """
    options = resolved.options
    folder = PipelineFolder.open(options.model, weights=not dry_run)
    device = device_named(options.device)
    resolved.check_family(folder.family.name)

    denoiser = folder.meta_denoiser()
    pixel_step = folder.family.pixel_step(folder.vae_config(), denoiser)
    if options.resolution % pixel_step:
        below = options.resolution // pixel_step * pixel_step
        raise ModelError(
            f"resolution {options.resolution} ({resolved.sources['resolution']}): {folder.family.name} needs a "
            f"multiple of {pixel_step}, such as {max(below, pixel_step)} or {below + pixel_step}"
        )
    if options.training_type == "lora":
        targets = options.lora_targets or folder.family.lora_targets
        add_lora(denoiser, rank=options.rank, alpha=options.alpha or options.rank, targets=targets, seed=options.seed)
    plan = schedule(denoiser, options.controls())

    run = RunFolder(options.run_folder)
    checkpoints = CheckpointFolder(run.checkpoints, options.checkpoints_keep)
    resume = _resume_from(run, checkpoints, options.resume)

    if not dry_run:
        options.cache_folder.mkdir(parents=True, exist_ok=True)
    data = scan(
        options.data,
        caption_missing=options.caption_missing,
        index=options.cache_folder / INDEX_NAME if options.cache_folder.is_dir() else None,
        progress=lambda done, total: progress("pictures looked at", done, total),
    )
    require_samples(data)
    buckets = tuple(
        bucket_for(sample.width, sample.height, resolution=options.resolution, step=pixel_step)
        for sample in data.samples
    )
    summary = summarize(
        data,
        buckets,
        batch=options.batch,
        repeats=options.repeats,
        accumulation=options.gradient_accumulation_steps,
    )
    steps = options.steps or (options.epochs or 0) * summary.steps
    if options.lr_warmup_steps > steps:
        raise ValueError(
            f"lr_warmup_steps {options.lr_warmup_steps} ({resolved.sources['lr_warmup_steps']}): the run is only "
            f"{steps} steps long, so the learning rate would never get to its value; use at most {steps}"
        )
    return Job(
        resolved=resolved,
        folder=folder,
        device=device,
        dtype=torch.bfloat16 if options.precision == "bf16" else torch.float32,
        data=data,
        buckets=buckets,
        summary=summary,
        steps_per_epoch=summary.steps,
        steps=steps,
        plan=plan,
        trainable=_count(denoiser, trainable_only=True),
        total=_count(denoiser),
        run=run,
        resume=resume,
        skipped_checkpoints=checkpoints.problems,
        notes=plan.notes,
    )


def _resume_from(run: RunFolder, checkpoints: CheckpointFolder, resume: str) -> Checkpoint | None:
    used = run.path.is_dir() and any(path.name != ".lock" for path in run.path.iterdir())
    if used and resume == "never":
        raise RunFolderError(
            f"{run.path} exists already and resume is never; give this run another name, or set resume to auto to go on"
        )
    return checkpoints.newest(check_contents=True) if used else None


def _count(model: nn.Module, *, trainable_only: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)
