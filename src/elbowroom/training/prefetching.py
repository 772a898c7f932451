"""For each shape of a run: learn the order of reloads in its first step, then find out whether to prefetch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from elbowroom.memory import Handle, OffloadSettings
from elbowroom.memory.offload.autotune import PrefetchDecision, probe_prefetch
from elbowroom.training.files import write_text


class PrefetchTuner:
    """Decides once a shape, and remembers it in a file of the run folder.

    Args:
        handle: the plan at work.
        path: the file.
        model: what is trained.
        device: where the model computes.
        say: told of each decision, with both times.
    """

    def __init__(self, handle: Handle, path: Path, model: nn.Module, device: torch.device, say: Callable[[str], None]):
        self._handle = handle
        self._path = path
        self._model = model
        self._device = device
        self._say = say
        self._seen: set[str] = set()
        self._decided = _read(path)

    def before(self, shape: str, step: Callable[[], None]) -> None:
        """Set prefetching for the step that comes next; this may run it twice, without any trace.

        Args:
            shape: what tells the batch from batches of other sizes.
            step: the forward and backward pass of that batch. It must be the same each time it is called.
        """
        plan = self._handle.plan
        key = f"{plan.strip()} {shape}, {self._device}, {_settings(plan.offload)}"
        known = any(offloader.learned() for offloader in self._handle.offloaders)
        if key not in self._decided and key in self._seen and known:
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            decision = probe_prefetch(step, self._handle.offloaders, trained, buffers=self._model.buffers())
            self._decided[key] = decision
            self._say(
                f"reload of offloaded tensors, {shape}: {decision.reason} (the summary counts these two passes as well)"
            )
            document = {known: each.to_dict() for known, each in self._decided.items()}
            write_text(self._path, json.dumps(document, indent=1))
        self._seen.add(key)
        if key in self._decided:
            self._handle.prefetch = self._decided[key].prefetch


def _settings(offload: OffloadSettings) -> str:
    """What a decision depends on besides the shape: other stores and windows take other times."""
    set_by_hand = {name: value for name, value in asdict(offload).items() if value is not None}
    return " ".join(f"{name}={value}" for name, value in set_by_hand.items())


def _read(path: Path) -> dict[str, PrefetchDecision]:
    """Return what was decided before; what can't be read is decided anew."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {key: PrefetchDecision.from_dict(values) for key, values in document.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
