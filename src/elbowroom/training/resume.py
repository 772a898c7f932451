"""What a run may change when it goes on from a checkpoint. Everything else would make it another run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from elbowroom.options.definition import (
    CheckpointOptions,
    LoggingOptions,
    ObjectiveOptions,
    Options,
    ValidationOptions,
    all_options,
)
from elbowroom.options.memory import MemoryOptions
from elbowroom.options.reading import Source
from elbowroom.training.checkpoints import Checkpoint, CheckpointMismatchError
from elbowroom.training.data.scan import Sample
from elbowroom.training.state import read_counters

Setup = dict[str, Any]
"""What a checkpoint remembers of how it was made: JSON values by the names of options."""

FREE = frozenset(
    {"name", "output_dir", "cache_dir", "resume", "device", "lora_format", "steps", "epochs"}
    | {
        name
        for group in (ValidationOptions, CheckpointOptions, LoggingOptions, MemoryOptions)
        for name in group.model_fields
    }
)
"""Options that a checkpoint does not depend on; they are not recorded. (A schedule of the learning rate is computed for
the present number of steps.)"""

CHANGEABLE = frozenset(
    {"learning_rate", "lr_scheduler", "lr_warmup_steps", "weight_decay", "max_grad_norm", "caption_dropout"}
    | {"adam_beta1", "adam_beta2", "adam_epsilon", "optimizer_in_backward"}
    | set(ObjectiveOptions.model_fields)
)
"""Options that may change on the way: the present value holds from the checkpoint on, and the announcement says so."""


def setup_of(
    options: Options, samples: Sequence[Sample], *, lora_targets: Sequence[str], max_sequence_length: int
) -> Setup:
    """Return what a checkpoint must remember of a run, all but the model.

    Args:
        options: of the run.
        samples: what is trained on; recorded as a digest of their paths, contents and captions.
        lora_targets, max_sequence_length: with the family's defaults where the options leave them unset.
    """
    recorded = {name: getattr(options, name) for name in all_options() if name not in FREE | {"model"}}
    effective = {
        "data": _digest_of(samples),
        "alpha": float(options.alpha or options.rank),
        "lora_targets": list(lora_targets),
        "max_sequence_length": max_sequence_length,
    }
    return recorded | effective


def check_setup(checkpoint: Checkpoint, present: Setup, sources: Mapping[str, Source]) -> tuple[str, ...]:
    """Compare the setup of a checkpoint with the present one, where both have an entry; return notes about changes.

    Raises:
        CheckpointMismatchError: something changed that makes it another run. All of it is listed.
        CheckpointError: the checkpoint can't be read.
    """
    saved: Setup | None = read_counters(checkpoint.path).get("setup")
    if saved is None:
        return (f"{checkpoint.path} was saved before checkpoints recorded their options, so they are not compared",)
    changed = [name for name in present if name in saved and saved[name] != present[name]]
    other_run = [name for name in changed if name not in CHANGEABLE]
    if other_run:
        lines = [f"\n  {name} ({sources[name]}): was {saved[name]}, is {present[name]}" for name in other_run]
        raise CheckpointMismatchError(
            f"the run can't go on from {checkpoint.path}, which was made otherwise:{''.join(lines)}\n"
            "Give the run another name, or put the value back"
        )
    return tuple(
        f"{name} ({sources[name]}) was {saved[name]}, and is {present[name]} from step {checkpoint.step} on"
        for name in changed
    )


def _digest_of(samples: Sequence[Sample]) -> str:
    content = json.dumps([(sample.relative, sample.digest, sample.caption) for sample in samples])
    return f"{len(samples)} pictures (digest {hashlib.sha256(content.encode('ascii')).hexdigest()[:16]})"
