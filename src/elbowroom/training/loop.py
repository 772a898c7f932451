"""The training loop: from a job to a result, readable from top to bottom."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from diffusers.optimization import get_scheduler

from elbowroom.memory import Handle, apply
from elbowroom.memory.sizes import in_bytes
from elbowroom.options.export import to_toml
from elbowroom.quantization import quantize_base
from elbowroom.training.backward_steps import BackwardSteps
from elbowroom.training.checkpoints import CheckpointFolder
from elbowroom.training.data.batches import Batch, accumulation_groups, epoch_batches
from elbowroom.training.data.cache import TensorCache
from elbowroom.training.devices import make_current
from elbowroom.training.display import Display
from elbowroom.training.encoding import Encoded, encode_captions, encode_samples
from elbowroom.training.files import folder_written_aside, remove_unfinished, write_text
from elbowroom.training.flow_matching import FlowMatching
from elbowroom.training.job import Job
from elbowroom.training.lora import FILE_NAMES, LoraFormat, add_lora, save_lora
from elbowroom.training.memory_use import peak_memory
from elbowroom.training.prefetching import PrefetchTuner
from elbowroom.training.run_folder import RunFolderError
from elbowroom.training.sample_folders import Request, SampleFolders
from elbowroom.training.samples import draw_prompts, save_picture, sheet
from elbowroom.training.state import load_training_state, save_training_state, training_state_bytes

EMPTY_CAPTION = ""


class NonFiniteError(RuntimeError):
    """A loss, gradient or trained weight is not a finite number. It was not saved; the last checkpoint is intact."""


class Interrupted(Exception):
    """The user asked to stop; everything up to the last finished step is saved."""


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: the result's path, the last loss, and the before/after picture, if any."""

    result: Path
    loss: float | None
    comparison: Path | None


def train(job: Job, display: Display) -> Outcome:
    """Run a job to its end, or to the first Ctrl-C.

    Raises:
        Interrupted: after Ctrl-C, when the state is saved.
        NonFiniteError: the loss, a gradient or a weight became infinite or NaN.
    """
    options = job.resolved.options
    make_current(job.device)
    with job.run.locked():
        for folder in (job.run.path, job.run.samples, job.run.result):
            remove_unfinished(folder)
        write_text(job.run.configuration, to_toml(options, job.resolved.sources))
        with display.bars():
            encoded = _encode(job, display)
        with Run(job, encoded, display) as run:
            return run.to_the_end()


def _encode(job: Job, display: Display) -> Encoded:
    options = job.resolved.options
    cache = TensorCache(options.cache_folder)
    captions = {sample.caption for sample in job.data.samples} | set(options.validation_prompts) | {EMPTY_CAPTION}
    place: dict[str, Any] = {"dtype": job.dtype, "placement": job.placement, "progress": display.progress}
    return Encoded(
        cache,
        encode_captions(job.folder, sorted(captions), cache, max_sequence_length=job.max_sequence_length, **place),
        encode_samples(job.folder, job.data.samples, job.buckets, cache, **place),
    )


class Run:
    """The state of a run in memory: model, optimizer, learning-rate schedule, random numbers, files that grow."""

    def __init__(self, job: Job, encoded: Encoded, display: Display):
        options = job.resolved.options
        self.job = job
        self.encoded = encoded
        self.display = display
        self.family = job.folder.family
        set_seed(options.seed)  # Python's, NumPy's and torch's random numbers
        self.denoiser = self._load_denoiser()
        self.parameters = [parameter for parameter in self.denoiser.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
        )
        self.backward_steps = BackwardSteps(self.optimizer) if options.optimizer_in_backward else None
        warmed_constant = options.lr_scheduler == "constant" and options.lr_warmup_steps > 0
        self.lr_scheduler = get_scheduler(
            "constant_with_warmup" if warmed_constant else options.lr_scheduler,
            self.optimizer,
            num_warmup_steps=options.lr_warmup_steps,
            num_training_steps=job.steps,
        )
        self.objective = FlowMatching(
            job.folder.load_scheduler(),
            options.timestep_sampling,
            options.logit_mean,
            options.logit_std,
            None if options.flow_shift == "auto" else options.flow_shift,
        )
        self.generator = torch.Generator().manual_seed(options.seed)
        self.checkpoints = CheckpointFolder(job.run.checkpoints, options.checkpoints_keep)
        self.samples = SampleFolders(job.run.samples)
        self.step = 0
        self.loss: float | None = None
        self.handle: Handle | None = None
        self.prefetch: PrefetchTuner | None = None
        self.board: Any = None

    def __enter__(self) -> Run:
        job = self.job
        if job.plan.takes_effect:
            # Before the optimizer's state is loaded, which goes to where its parameters are.
            self.handle = apply(self.denoiser, job.plan, device=job.device if job.plan.streamed else None)
            if job.maps_weights:
                self._quantize(self.denoiser, self.handle)
            if job.plan.offloads and job.plan.offload.prefetch is None:
                self.prefetch = PrefetchTuner(
                    self.handle, job.run.prefetch, self.denoiser, job.device, self.display.say
                )
        self._resume()
        if job.resolved.options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(job.run.tensorboard), purge_step=self.step + 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            self.handle.remove()
        if self.board is not None:
            self.board.close()

    def to_the_end(self) -> Outcome:
        """Train until all steps are done, then save the result and draw the comparison."""
        options = self.job.resolved.options
        with self.display.bars():
            if self.step == 0:
                self._validate()
            with _interruptible() as interrupted:
                for epoch, group in self._groups():
                    self._training_step(epoch, group)
                    last = self.step == self.job.steps
                    if options.validation_steps and self.step % options.validation_steps == 0 and not last:
                        self._validate()
                    due = options.checkpoint_steps and self.step % options.checkpoint_steps == 0
                    if due or last or interrupted():
                        self._save_checkpoint()
                    if interrupted() and not last:
                        self._say_what_memory_options_did()
                        raise Interrupted
            result = self._save_result()
            self._validate()
        self._say_what_memory_options_did()
        return Outcome(result, self.loss, self._compare())

    def _say_what_memory_options_did(self) -> None:
        if self.handle is not None:
            self.display.say(str(self.handle.report()))

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[tuple[int, tuple[Batch, ...]]]:
        """Yield the epoch and the batches of every optimizer step that is still to do.

        The order follows from the seed and the number of the step alone, so resuming needs no state of the data.
        """
        options = self.job.resolved.options
        while self.step < self.job.steps:
            epoch, first = divmod(self.step, self.job.steps_per_epoch)
            batches = epoch_batches(
                self.job.buckets, batch=options.batch, repeats=options.repeats, seed=options.seed, epoch=epoch
            )
            for group in accumulation_groups(batches, options.gradient_accumulation_steps)[first:]:
                if self.step == self.job.steps:
                    return
                yield epoch, group

    def _training_step(self, epoch: int, group: tuple[Batch, ...]) -> None:
        """Accumulate the gradient of the mean loss over all samples of the group, then step the optimizer once."""
        started = time.perf_counter()
        samples = sum(len(batch) for batch in group)
        self.denoiser.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in group:
            if self.prefetch is not None:
                bucket = self.job.buckets[batch[0]]
                self.prefetch.before(f"{len(batch)} x {bucket.width}x{bucket.height}", partial(self._probe, batch))
            losses = self._losses(batch)
            self._check_finite(losses, batch)
            # A share of the group's true size: the last, smaller group of an epoch is not scaled down.
            (losses.sum() / samples).backward()
            total += losses.sum().item()
        if self.handle is not None:
            self.handle.settle()
        if self.step == 0:
            self._report_missing_gradients()
        learning_rate = float(self.lr_scheduler.get_last_lr()[0])
        if self.backward_steps is None:
            norm = self._clip_gradients(group)
            self.optimizer.step()
        else:
            norm = self._norm_of_dropped_gradients(self.backward_steps, group)
        self.lr_scheduler.step()
        self.step += 1
        self.loss = total / samples
        self._record(epoch, samples, learning_rate, norm, time.perf_counter() - started)

    def _probe(self, batch: Batch) -> None:
        """Run the forward and backward pass of a batch without any trace but gradients."""
        state = self.generator.get_state()
        with nullcontext() if self.backward_steps is None else self.backward_steps.probing():
            self._losses(batch).sum().backward()
        self.generator.set_state(state)

    def _losses(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each sample of a batch, shape (len(batch),)."""
        job, options = self.job, self.job.resolved.options
        captions = [job.data.samples[index].caption for index in batch]
        if options.caption_dropout:
            dropped = torch.rand(len(batch), generator=self.generator) < options.caption_dropout
            captions = [EMPTY_CAPTION if drop else text for text, drop in zip(captions, dropped.tolist(), strict=True)]
        clean = self.encoded.latents(batch, self.generator, job.device)
        noise = torch.randn(clean.shape, generator=self.generator).to(job.device)
        tokens = self.family.image_tokens(clean)
        sigmas = self.objective.draw_sigmas(len(batch), tokens, self.generator).to(job.device)
        conditioning = self.encoded.conditioning(captions, job.device)
        noisy = self.objective.mix(clean, noise, sigmas)
        with self._autocast():
            velocity = self.family.predict_velocity(self.denoiser, noisy, sigmas, conditioning, options.guidance)
        return self.objective.losses(velocity, clean, noise)

    def _autocast(self) -> Any:
        if self.job.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.job.device.type, dtype=self.job.dtype)

    def _clip_gradients(self, group: tuple[Batch, ...]) -> float:
        limit = self.job.resolved.options.max_grad_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if not torch.isfinite(norm):
            self._fail(self._not_applied("the gradient", _all(group)))
        if limit:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
        return norm.item()

    def _norm_of_dropped_gradients(self, steps: BackwardSteps, group: tuple[Batch, ...]) -> float:
        norm = steps.take_norm().item()
        if not math.isfinite(norm):
            self._fail(f"the gradient of step {self.step + 1} is not a finite number. {self._samples_of(_all(group))}")
        return norm

    def _check_finite(self, losses: torch.Tensor, batch: Batch) -> None:
        if not torch.isfinite(losses).all():
            bad = [index for index, loss in zip(batch, losses.tolist(), strict=True) if loss - loss != 0]
            self._fail(self._not_applied("the loss", tuple(bad)))

    def _check_weights(self) -> None:
        """An optimizer can turn finite gradients into weights that are not."""
        if not all(torch.isfinite(parameter).all() for parameter in self.parameters):
            self._fail(f"a trained weight is not a finite number after step {self.step}, and was not saved")

    def _not_applied(self, what: str, indices: Batch) -> str:
        not_applied = f"{what} of step {self.step + 1} is not a finite number; the step was not applied."
        return f"{not_applied} {self._samples_of(indices)}"

    def _samples_of(self, indices: Batch) -> str:
        return "Samples: " + ", ".join(dict.fromkeys(self.job.data.samples[index].relative for index in indices))

    def _fail(self, problem: str) -> None:
        """Stop before anything that is not finite gets into a checkpoint or the result."""
        tensors = [(name, p) for name, p in self.denoiser.named_parameters()]
        tensors += [(f"the gradient of {name}", p.grad) for name, p in tensors if p.grad is not None]
        bad = next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), "none of the weights")
        newest = self.checkpoints.newest()
        raise NonFiniteError(
            f"{problem}. First tensor that is not finite: {bad}. "
            f"The last good checkpoint is {newest.path if newest else 'none yet'}. "
            "A lower learning_rate or precision=fp32 helps most often"
        )

    def _report_missing_gradients(self) -> None:
        def has_none(parameter: torch.nn.Parameter) -> bool:
            stepped = self.backward_steps is not None and self.backward_steps.stepped(parameter)
            return parameter.requires_grad and parameter.grad is None and not stepped

        without = [name for name, parameter in self.denoiser.named_parameters() if has_none(parameter)]
        if without:
            shown = ", ".join(without[:5]) + (" …" if len(without) > 5 else "")
            self.display.warn(f"{len(without)} trained tensors get no gradient and will not change: {shown}")

    def _record(self, epoch: int, samples: int, learning_rate: float, norm: float, seconds: float) -> None:
        memory = peak_memory(self.job.device)
        metrics = {
            "step": self.step,
            "epoch": epoch,
            "loss": self.loss,
            "learning_rate": learning_rate,
            "gradient_norm": norm,
            "samples": samples,
        }
        self.job.run.metrics.append(metrics)
        self.job.run.timings.append({"step": self.step, "seconds": seconds, "peak_memory_bytes": memory})
        if self.board is not None:
            for name in ("loss", "learning_rate", "gradient_norm"):
                self.board.add_scalar(name, metrics[name], self.step)
            self.board.add_scalar("seconds_per_step", seconds, self.step)
        figures = {
            "loss": f"{self.loss:.4f}",
            "s/step": f"{seconds:.2f}",
            "peak": f"{memory / 2**30:.2f} GiB",
        }
        self.display.step(self.step, self.job.steps, figures)

    # ---- loading, saving, looking ------------------------------------------------------------------------------------

    def _load_denoiser(self) -> Any:
        job, options = self.job, self.job.resolved.options
        # A full fine-tune keeps its weights in float32: steps of the optimizer are too small for bfloat16's digits.
        dtype = job.dtype if job.is_lora else torch.float32
        quantizes = options.base_model_precision is not None  # then weights are read one by one
        mapped = job.maps_weights or quantizes
        denoiser = job.folder.map_denoiser(dtype) if mapped else job.folder.load_denoiser(dtype)
        if job.is_lora:
            add_lora(
                denoiser,
                rank=options.rank,
                alpha=options.alpha or options.rank,
                targets=job.lora_targets,
                seed=options.seed,
            )
        else:
            denoiser.requires_grad_(True)
        if not job.maps_weights:
            self._quantize(denoiser, None)
        return denoiser if job.plan.streamed else denoiser.to(job.device)

    def _quantize(self, denoiser: Any, handle: Handle | None) -> None:
        """Quantize the frozen base, if that is wanted.

        Before weights go to their home in host memory, which then never holds more than the quantized ones; but after
        streaming from the model's own files is set up, which then never holds more than one block.
        """
        job, precision = self.job, self.job.resolved.options.base_model_precision
        if precision is None:
            return
        done = quantize_base(
            denoiser,
            precision,
            device=None if job.device.type == "cpu" else job.device,
            handle=handle,
            progress=partial(self.display.progress, "blocks quantized"),
        )
        left = f"; {len(done.left)} layers stay, whose shape does not suit it" if done.left else ""
        self.display.say(
            f"base quantized to {precision}: {done.layers} layers, {in_bytes(done.before)} of weights are "
            f"{in_bytes(done.after)}{left}"
        )

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.denoiser,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "generators": {"training": self.generator},
        }

    def _resume(self) -> None:
        """Go on from the newest complete checkpoint; without one, start at step 0.

        Raises:
            RunFolderError: it is not the one that was announced. Only now that the folder is locked does it stay so.
        """
        self.checkpoints.clean()
        run, announced = self.job.run, self.job.resume
        newest = self.checkpoints.newest(check_contents=True)
        if newest != announced:
            raise RunFolderError(
                f"{run.path} changed meanwhile: its newest checkpoint was {announced.path if announced else 'none'}, "
                f"and is {newest.path if newest else 'none'}. Start again, and look at what will happen"
            )
        if newest is not None:
            counters = load_training_state(newest.path, **self._state())
            self.step = counters["step"]
        self.samples.remove_after(self.step)
        run.metrics.cut_after(self.step)
        run.timings.cut_after(self.step)
        recorded = run.metrics.read()
        self.loss = recorded[-1]["loss"] if recorded else None

    def _save_checkpoint(self) -> None:
        newest = self.checkpoints.newest()
        if newest is not None and newest.step == self.step:
            return
        self._check_weights()
        self.job.run.metrics.flush()
        self.job.run.timings.flush()
        counters = {"step": self.step, "setup": self.job.setup}
        self.checkpoints.save(
            self.step,
            lambda folder: save_training_state(folder, **self._state(), counters=counters),
            bytes_needed=training_state_bytes(self.denoiser, self.optimizer),
        )

    def _save_result(self) -> Path:
        job, options = self.job, self.job.resolved.options
        self._check_weights()
        if job.is_lora:
            # What draws with a run, here and elsewhere, expects the file for Diffusers; another format comes on top.
            formats: dict[LoraFormat, None] = dict.fromkeys(("diffusers", options.lora_format))
            place: dict[str, Any] = {"pipeline_class": job.folder.pipeline_class, "component": self.family.denoiser}
            paths = [save_lora(self.denoiser, job.run.result, format=each, **place) for each in formats]
            for unwanted in FILE_NAMES.keys() - formats.keys():  # left by a shorter run, and out of date now
                (job.run.result / FILE_NAMES[unwanted]).unlink(missing_ok=True)
            return paths[-1]
        path = job.run.result / self.family.denoiser
        with folder_written_aside(path, replace=True) as aside:  # a shorter run may have been here before
            self.denoiser.save_pretrained(aside)
        return path

    def _validate(self) -> None:
        """Draw the fixed prompts with the present weights, unless that was done before."""
        job, request = self.job, self._request()
        prompts = request.prompts
        if not prompts or self.samples.load(self.step, request) is not None:
            return
        pictures = draw_prompts(
            job.folder,
            self.denoiser,
            [self.encoded.conditioning([prompt], job.device) for prompt in prompts],
            self.encoded.conditioning([EMPTY_CAPTION], job.device),
            resolution=request.resolution,
            seed=request.seed,
            inference_steps=request.inference_steps,
            guidance=request.guidance,
            dtype=job.dtype,
            placement=job.placement,
            progress=self.display.progress,
        )
        folder = self.samples.save(self.step, pictures, request)
        overview = sheet([(f"step {self.step}", pictures)], prompts)
        save_picture(overview, folder.with_suffix(".png"))
        if self.board is not None:
            pixels = torch.frombuffer(bytearray(overview.tobytes()), dtype=torch.uint8)
            self.board.add_image(
                "samples", pixels.view(overview.height, overview.width, 3), self.step, dataformats="HWC"
            )

    def _compare(self) -> Path | None:
        """Save the first and the last pictures side by side."""
        request = self._request()
        prompts = request.prompts
        before, after = self.samples.load(0, request), self.samples.load(self.step, request)
        if not prompts or before is None or after is None:
            return None
        path = self.job.run.samples / "before-after.png"
        save_picture(sheet([("before", before), (f"after {self.step} steps", after)], prompts), path)
        return path

    def _request(self) -> Request:
        options = self.job.resolved.options
        return Request(
            options.validation_prompts,
            options.validation_seed,
            options.resolution,
            options.validation_inference_steps,
            self.job.validation_guidance,
        )


def _all(group: tuple[Batch, ...]) -> Batch:
    return tuple(index for batch in group for index in batch)


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Turn the first Ctrl-C into a question that the loop asks between steps; the second one stops at once."""
    asked = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    try:
        previous = signal.signal(signal.SIGINT, on_signal)
    except ValueError:  # not the main thread: nobody can press Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
