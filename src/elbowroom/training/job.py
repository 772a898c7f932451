"""Everything that can be known about a run before it starts, without loading any weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elbowroom.api import schedule, schedule_component
from elbowroom.memory import Plan, store_kind
from elbowroom.memory.controls import ControlsError
from elbowroom.memory.devices import free_device_bytes
from elbowroom.memory.weights.opening import weight_store_kind
from elbowroom.options.definition import all_options
from elbowroom.options.reading import Resolved
from elbowroom.quantization.base import put_stand_ins
from elbowroom.training.checkpoints import Checkpoint, CheckpointFolder, SkippedCheckpoint
from elbowroom.training.data.buckets import Bucket, bucket_for
from elbowroom.training.data.digests import index_name
from elbowroom.training.data.scan import Scan, require_samples, scan
from elbowroom.training.data.summary import Summary, summarize
from elbowroom.training.devices import device_named
from elbowroom.training.files import nearest_existing
from elbowroom.training.lora import add_lora
from elbowroom.training.pipeline import ModelError, PipelineFolder
from elbowroom.training.placement import Placement
from elbowroom.training.resume import Setup, check_setup, setup_of
from elbowroom.training.run_folder import RunFolder, RunFolderError


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
        lora_targets, max_sequence_length: as in the options, or the family's defaults.
        trainable, total: numbers of parameters of the denoiser, with the LoRA.
        run: where output goes.
        placement: where the pipeline's models compute.
        setup: what checkpoints remember of the options, the data and the model.
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
    lora_targets: tuple[str, ...]
    max_sequence_length: int
    trainable: int
    total: int
    run: RunFolder
    placement: Placement
    setup: Setup
    resume: Checkpoint | None
    skipped_checkpoints: tuple[SkippedCheckpoint, ...]
    notes: tuple[str, ...]

    @property
    def is_lora(self) -> bool:
        return self.resolved.options.training_type == "lora"

    @property
    def maps_weights(self) -> bool:
        """Whether the frozen weights are streamed from the model's own files, and so never loaded as a whole."""
        if not self.plan.streamed or not self.is_lora:
            return False
        return weight_store_kind(self.plan.weights, on_cpu=self.device.type == "cpu") == "disk"

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
        ModelError, DataError, RunFolderError, CheckpointError, ValueError: the run can't start; the message says why
            and what to do.
    """
    options = resolved.options
    folder = PipelineFolder.open(options.model, weights=False)
    device = device_named(options.device)
    resolved.check_family(folder.family.name)

    lora = options.training_type == "lora"
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    denoiser = folder.meta_denoiser(dtype if lora else torch.float32)
    pixel_step = folder.family.pixel_step(folder.vae_config(), denoiser)
    if options.resolution % pixel_step:
        below = options.resolution // pixel_step * pixel_step
        raise ModelError(
            f"resolution {options.resolution} ({resolved.sources['resolution']}): {folder.family.name} needs a "
            f"multiple of {pixel_step}, such as {max(below, pixel_step)} or {below + pixel_step}"
        )
    _check_guidance(resolved, denoiser)
    targets = options.lora_targets or folder.family.lora_targets
    if lora:
        denoiser.requires_grad_(False)
        add_lora(denoiser, rank=options.rank, alpha=options.alpha or options.rank, targets=targets, seed=options.seed)
    trainable, total = _count(denoiser, trainable_only=True), _count(denoiser)
    if options.base_model_precision is not None:
        put_stand_ins(denoiser, options.base_model_precision)  # refused now, and counted in the plan
    run = RunFolder(options.run_folder)
    placement = Placement(device, options.controls(), run.path)
    plan = _planned(denoiser, folder, placement)
    for name in ("activation_store_path", "weight_store_path"):
        _check_store_folder(resolved, name)
    if run.path.resolve() == options.cache_folder.resolve():
        raise RunFolderError(
            f"{run.path} would be the folder of the run and of the cache; give the run another name "
            f"({resolved.sources['name']}), or set cache_dir ({resolved.sources['cache_dir']}) to another folder"
        )
    checkpoints = CheckpointFolder(run.checkpoints, options.checkpoints_keep)
    resume = _resume_from(run, checkpoints, options.resume)

    if not dry_run:
        name = "output_dir" if options.cache_dir is None else "cache_dir"
        try:
            options.cache_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"{name} ({resolved.sources[name]}): {options.cache_folder} can't be made ({error.strerror}); "
                "name a folder that you may write to"
            ) from None
    data = scan(
        options.data,
        caption_missing=options.caption_missing,
        index=options.cache_folder / index_name(options.data) if options.cache_folder.is_dir() else None,
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
    if options.lr_warmup_steps >= steps:
        raise ValueError(
            f"lr_warmup_steps {options.lr_warmup_steps} ({resolved.sources['lr_warmup_steps']}): the run is only "
            f"{steps} steps long, so the learning rate would never get to its value; use at most {steps - 1}"
        )
    max_sequence_length = options.max_sequence_length or folder.family.max_sequence_length
    setup = setup_of(options, data.samples, lora_targets=targets, max_sequence_length=max_sequence_length)
    changes = check_setup(resume, setup, resolved.sources) if resume else ()
    if not (folder.complete or dry_run):
        folder = PipelineFolder.open(options.model)  # last: whatever else can be refused was refused before the wait
    if folder.complete:
        model = {"model": f"weights with the digest {folder.fingerprint(folder.components)[:16]}"}
        setup |= model
        if resume:
            check_setup(resume, model, resolved.sources)
    return Job(
        resolved=resolved,
        folder=folder,
        device=device,
        dtype=dtype,
        data=data,
        buckets=buckets,
        summary=summary,
        steps_per_epoch=summary.steps,
        steps=steps,
        plan=plan,
        lora_targets=targets,
        max_sequence_length=max_sequence_length,
        trainable=trainable,
        total=total,
        run=run,
        placement=placement,
        setup=setup,
        resume=resume,
        skipped_checkpoints=checkpoints.problems,
        notes=(*plan.notes, *changes),
    )


def _planned(denoiser: nn.Module, folder: PipelineFolder, placement: Placement) -> Plan:
    """Return the memory plan, with what it leaves open settled: disk stores are in the run folder.

    Raises:
        ValueError: an option would have no effect, or a store makes no sense on this device.
    """
    controls, on_cpu = placement.controls, placement.device.type == "cpu"
    assert controls is not None and placement.folder is not None
    plan = schedule(denoiser, controls, free_bytes=free_device_bytes(placement.device))
    if plan.offloads and store_kind(plan.offload, on_cpu=on_cpu) == "disk" and plan.offload.path is None:
        plan = replace(plan, offload=replace(plan.offload, path=str(placement.folder.absolute())))
    if controls.streams_anything:
        plan = placement.with_folder(plan)
    if controls.ramtorch_vae:
        schedule_component(folder.vae_config(), controls, "vae")
    if controls.ramtorch_controlnet:
        raise ControlsError("ramtorch_controlnet", "has no effect, for this run has no ControlNet; leave it out")
    return plan


def _check_store_folder(resolved: Resolved, option: str) -> None:
    """Raise RunFolderError if no folder can be there; it is made when it is first needed."""
    folder = getattr(resolved.options, option)
    if folder is None:
        return
    existing = nearest_existing(Path(folder))
    if not existing.is_dir():
        why = f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} can't be written to"
    else:
        return
    raise RunFolderError(f"{option} ({resolved.sources[option]}): {why}; name a folder that you may write to")


def _check_guidance(resolved: Resolved, denoiser: Any) -> None:
    option = all_options()["guidance"]
    if resolved.options.guidance != option.default and not denoiser.config.get("guidance_embeds", True):
        raise ModelError(
            f"guidance {resolved.options.guidance} ({resolved.sources['guidance']}): has no effect on this model, "
            "which has no guidance embedding (guidance_embeds is false in its configuration); leave guidance out"
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
