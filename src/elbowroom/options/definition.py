"""Every option of the trainer, each defined here once: type, limits, default, help text. (Memory: see `memory.py`.)

The command line, the environment, files and docs/options.md are made from these classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import model_validator

from elbowroom.memory.controls import Controls
from elbowroom.options.annotations import Families, FolderOrHubId, Matching, Separated
from elbowroom.options.group import Group, Option, options_in
from elbowroom.options.memory import MemoryOptions
from elbowroom.options.rules import broken_rules

Steps = Annotated[int, Ge(1), Le(10**9)]
Batch = Annotated[int, Ge(1), Le(2**16)]

BasePrecision = Literal[
    "int8-torchao", "float8-torchao", "int4-torchao", "int8-sdnq", "int8-sdnq-hadamard", "int8-sdnq-svd", "uint4-sdnq",
    "nf4-bitsandbytes",
]  # fmt: skip
"""The names in `elbowroom.quantization.FORMATS`."""

RunName = Annotated[str, Matching(r"[^./\\\0][^/\\\0]*", "a name without slashes that doesn't begin with a dot")]

Device = Annotated[
    str,
    Matching(
        r"auto|cpu|mps|(cuda|xpu)(:\d+)?",
        "auto, cpu, cuda, mps or xpu, with a number for one of several, such as cuda:1",
        spellings=("auto", "cpu", "cuda", "mps", "xpu"),
    ),
]


class ModelOptions(Group):
    """Which model is fine-tuned, and in which number format."""

    group = "model"

    model: Annotated[str, FolderOrHubId()]
    """The pipeline to fine-tune, in Diffusers' format: a folder with a model_index.json, or the id of a repository on
    the Hugging Face hub."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """Number format of the computation: bf16 takes half the memory of fp32 and has the same range with fewer digits;
    fp32 is the exact one, for comparisons and for small models on the CPU."""

    base_model_precision: BasePrecision | None = None
    """Number format of the frozen weights of a LoRA's base, in the linear layers of its blocks: a half or a quarter of
    the bytes of bf16, for a small error of each weight. int8 formats are the most exact ones; svd and hadamard spread
    outliers; nf4 and the 4-bit ones are the smallest. Computation stays in `precision`. Unset: not quantized."""


class RunOptions(Group):
    """Where a run goes, and how it starts."""

    group = "run"

    name: RunName | None = None
    """Name of the run, and of its folder below output_dir. Unset: the name of the configuration file without its
    ending, or, without a file, the names of the model and of the data folder."""

    output_dir: Path = Path("runs")
    """The folder that holds the run folders."""

    seed: Annotated[int, Ge(0), Lt(2**32)] = 42
    """Everything random in a run follows from this number: first weights, order of the data, noise, timesteps. The same
    seed and options give the same run."""

    resume: Literal["auto", "never"] = "auto"
    """What happens if the run folder exists already. With auto, the run goes on from its newest complete checkpoint,
    if model, data and options are those it was started with (the learning rate and a few more may change); with never,
    it is not started."""

    device: Device = "auto"
    """Where the computation runs. auto takes the accelerator that torch finds, else the CPU."""


class DataOptions(Group):
    """What the model learns from, and how pictures and captions are prepared."""

    group = "data"

    data: Path
    """The folder of pictures, with folders inside it, each picture with its caption in a .txt file of the same stem or
    in a metadata.jsonl."""

    resolution: Annotated[int, Ge(16), Le(16384)] = 1024
    """Side, in pixels, of the square whose area every training picture has. Pictures are resized and cropped to the
    nearest of several shapes of this area; sides are multiples of what the model requires."""

    caption_missing: Literal["skip", "empty", "error"] = "skip"
    """What to do with a picture that has no caption: skip it, train on it with the empty caption, or stop with an error
    before training."""

    repeats: Annotated[int, Ge(1), Le(1_000_000)] = 1
    """How often each picture is seen in one epoch."""

    cache_dir: Path | None = None
    """Where encoded pictures and captions are kept, so that they are encoded only once. Unset: the folder cache in
    output_dir. Several runs can share it."""

    max_sequence_length: Annotated[int, Ge(1), Le(4096)] | None = None
    """Tokens that the large text encoder pads or cuts a caption to. Unset: the default of the model's pipeline (512 for
    Flux, 256 for SD3). Pictures should later be drawn with the same number."""

    caption_dropout: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the training steps whose caption is replaced by the empty one. About 0.1 keeps a model usable with
    classifier-free guidance, which compares each prompt with the empty one."""


class TrainingOptions(Group):
    """What is trained, for how long, and with which optimizer (AdamW)."""

    group = "training"

    training_type: Literal["lora", "full"] = "lora"
    """lora trains small matrices beside the frozen layers and gives a small file; full trains all weights of the
    denoiser."""

    rank: Annotated[int, Ge(1), Le(4096)] = 16
    """Rank of the LoRA matrices: more can learn more, and takes more memory and a larger file."""

    alpha: Annotated[float, Gt(0)] | None = None
    """The LoRA's output is scaled by alpha / rank. Unset: equal to rank, a scale of 1."""

    lora_targets: Annotated[tuple[str, ...], Separated(",")] | None = None
    """Names of the layers that get a LoRA, or ends of their names, such as to_q. Unset: the layers that the model's
    family names: attention, for Flux also feed-forward."""

    steps: Steps | None = None
    """Number of optimizer steps. Give either this or epochs."""

    epochs: Steps | None = None
    """How many times the whole data is seen. Give either this or steps."""

    batch: Batch = 1
    """Pictures per forward pass (the micro batch size). Memory grows with it."""

    gradient_accumulation_steps: Batch = 1
    """Forward and backward passes per optimizer step. The effective batch is batch times this, at the memory of one
    batch."""

    learning_rate: Annotated[float, Gt(0), Le(1)] = 1e-4
    """Size of an optimizer step, after the warm-up. Usual: 1e-4 for LoRA, 1e-5 for full fine-tuning."""

    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at the last step along a line or half a cosine."""

    lr_warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps over which the learning rate rises from 0, at the first step, to its value. Fewer than steps."""

    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay, per step, of AdamW's running mean of the gradient."""

    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay, per step, of AdamW's running mean of the squared gradient."""

    adam_epsilon: Annotated[float, Ge(1e-16)] = 1e-8
    """Added to AdamW's denominator, so that tiny gradients don't become large steps."""

    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Each step shrinks the trained weights by this share of the learning rate (decoupled, as in AdamW)."""

    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Gradients whose norm over all trained weights is larger are scaled down to it. 0: never."""

    optimizer_in_backward: bool = False
    """Steps each weight as soon as its gradient is there, in the backward pass, and drops the gradient: the memory of
    all gradients is saved, which in a full fine-tune is as much as the weights take. Needs max_grad_norm=0, since the
    norm is known only at the end, and no gradient accumulation."""

    lora_format: Literal["diffusers", "comfyui"] = "diffusers"
    """The LoRA is always saved as a file that Diffusers loads; comfyui adds one with the names that ComfyUI reads."""


class ObjectiveOptions(Group):
    """What the model is asked to predict: the noise level and its distribution (flow matching)."""

    group = "objective"

    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """How noise levels are drawn: logit_normal draws the middle ones more often (Esser et al. 2024, section 3.1),
    uniform draws all equally often."""

    logit_mean: float = 0.0
    """Mean of the normal distribution behind logit_normal: above 0 means noisier pictures."""

    logit_std: Annotated[float, Gt(0)] = 1.0
    """Standard deviation of the normal distribution behind logit_normal: larger is closer to the extremes."""

    flow_shift: Annotated[float, Gt(0)] | Literal["auto"] = "auto"
    """Shifts the noise levels that are drawn towards noisier ones: t becomes shift * t / (1 + (shift - 1) * t). auto
    uses what the model's scheduler is set to."""

    guidance: Annotated[float, Ge(0), Families(("flux",))] = 1.0
    """The guidance scale that the model is told during training, for models that were distilled to take it as an
    input."""


class ValidationOptions(Group):
    """Pictures that are drawn during training, to see what the model has learned."""

    group = "validation"

    validation_prompts: Annotated[tuple[str, ...], Separated("|")] = ()
    """Captions that are drawn before and after training and every validation_steps."""

    validation_steps: Annotated[int, Ge(0)] = 0
    """Draws the prompts every this many optimizer steps. 0: only before and after training."""

    validation_seed: Annotated[int, Ge(0), Lt(2**63)] = 42
    """Seed of the first noise of validation pictures: the same each time, so that they can be compared."""

    validation_inference_steps: Annotated[int, Ge(1)] = 28
    """Denoising steps per validation picture."""

    validation_guidance: Annotated[float, Ge(0)] | None = None
    """Guidance scale of validation pictures. Unset: the pipeline's own default."""


class CheckpointOptions(Group):
    """What is saved during a run, so that it can go on after an interruption."""

    group = "checkpoints"

    checkpoint_steps: Annotated[int, Ge(0)] = 500
    """Saves everything that a run needs to go on every this many optimizer steps. 0: only at the end."""

    checkpoints_keep: Annotated[int, Ge(1)] = 3
    """Keeps this many of the newest checkpoints and removes older ones."""


class LoggingOptions(Group):
    """What is recorded about a run, beside its metrics.jsonl."""

    group = "logging"

    tensorboard: bool = True
    """Writes events for TensorBoard into the run folder."""


class Options(
    ModelOptions, RunOptions, DataOptions, TrainingOptions, ObjectiveOptions, ValidationOptions, CheckpointOptions,
    LoggingOptions, MemoryOptions,
):  # fmt: skip
    """All options of a training run, checked. Relative paths have become absolute.

    Made from Python, values are converted like those from anywhere else: `Options(model="base", data="pictures",
    steps="100")`.

    Raises:
        pydantic.ValidationError: (a `ValueError`) values are missing, unknown or not accepted, or break a rule.
    """

    def controls(self) -> Controls:
        """The memory options as the memory engine takes them."""
        return Controls(**{name: getattr(self, name) for name in MemoryOptions.model_fields})

    @property
    def run_folder(self) -> Path:
        """The folder of this run below `output_dir`."""
        # Without dots in front, as any name: the run's own configuration file names it.
        return self.output_dir / (self.name or f"{Path(self.model).name}-{self.data.name}".lstrip("."))

    @property
    def cache_folder(self) -> Path:
        """Where encoded pictures and captions are kept."""
        return self.cache_dir or self.output_dir / "cache"

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        broken = broken_rules(vars(self), defaults())
        if broken:
            raise ValueError("; ".join(f"{rule.option}: {rule.message}" for rule in broken))
        return self


GROUPS: tuple[type[Group], ...] = (
    ModelOptions, RunOptions, DataOptions, TrainingOptions, ObjectiveOptions, ValidationOptions, CheckpointOptions,
    LoggingOptions, MemoryOptions,
)  # fmt: skip
"""All groups, in the order of help texts and docs."""


def all_options() -> dict[str, Option]:
    """Every option by its name, in the order of groups and of definition."""
    return {option.name: option for group in GROUPS for option in options_in(group)}


def defaults() -> dict[str, Any]:
    """The default of every option that has one."""
    return {name: option.default for name, option in all_options().items() if not option.required}
