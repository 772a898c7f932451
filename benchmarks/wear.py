"""Steps that wear a model down: of every treatment and shape, some of which end badly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elbowroom import BlockPlan, Plan
from elbowroom.memory import OffloadSettings, ScopeModules, Treatments

WIDTH, MOST_TOKENS, LEAST_TOKENS = 64, 48, 17
WINDOW = 64 << 10
"""Bytes on their way: a few records, so that waiting for room is part of the wear."""
MODULES = ScopeModules(attention=("attn",), feed_forward=("ff",))


def mixed_plan(folder: Path | None, limit: int | None = None) -> Plan:
    """Every treatment of every scope, and both boundaries, in nine blocks."""

    def block(number: int, attention: Any, feed_forward: Any, rest: Any, **more: Any) -> BlockPlan:
        treatments = Treatments(attention, feed_forward, rest)
        return BlockPlan(f"transformer_blocks.{number}", treatments=treatments, modules=MODULES, **more)

    blocks = (
        block(0, "offload", "offload", "offload"),
        block(1, "keep", "recompute", "recompute", segment=0, boundary="offload"),
        block(2, "recompute", "offload", "recompute", segment=0, boundary="offload"),
        block(3, "offload", "recompute", "keep", boundary="offload"),
        block(4, "offload", "recompute", "recompute", segment=1),
        block(5, "recompute", "recompute", "recompute", segment=2, keep_kernel=True),
        block(6, "recompute", "recompute", "recompute", segment=2),
        block(7, "keep", "keep", "offload"),
        block(8, "recompute", "keep", "offload", boundary="offload"),
    )
    path = None if folder is None else str(folder)
    return Plan(blocks, OffloadSettings(path=path, limit=limit, window=WINDOW))


class Blown(Exception):
    """What a fuse raises."""


class Fuse:
    """A hook on modules that raises where and when it is told to."""

    def __init__(self, model: nn.Module):
        names = (".norm1", ".attn.q", ".attn.out", ".ff.0", ".ff.3")
        self.modules = [module for name, module in model.named_modules() if name.endswith(names)]
        self.module: nn.Module | None = None
        self.when = ""
        for module in self.modules:
            module.register_forward_hook(self._hook)

    def arm(self, module: nn.Module, when: str) -> None:
        """Raise when the module is called next ("forward"), or when backward comes to its result ("backward")."""
        self.module, self.when = module, when

    def disarm(self) -> None:
        self.module = None

    def _hook(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor | None:
        if module is not self.module:
            return None
        if self.when == "forward":
            raise Blown
        return _BlowsInBackward.apply(result)


class _BlowsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise Blown


@dataclass
class Wear:
    """A model under a plan, and the ways in which its steps go.

    Attributes:
        steps: how many of each kind there were.
        blown: how many raised.
    """

    model: nn.Module
    device: torch.device
    choose: random.Random
    steps: Counter[str] = field(default_factory=Counter)
    blown: int = 0

    def __post_init__(self) -> None:
        self.fuse = Fuse(self.model)
        self.kinds: dict[str, tuple[Callable[[torch.Tensor], None], float]] = {
            "trained": (self._train, 0.7),
            "dropped": (self._drop, 0.06),
            "backward twice": (self._backward_twice, 0.04),
            "two forwards": (self._two_forwards, 0.04),
            "no gradients": (self._no_gradients, 0.04),
            "raised in forward": (self._raise_in_forward, 0.04),
            "raised in backward": (self._raise_in_backward, 0.04),
        }
        # torch ends the process when a hook raises in the backward pass of a device that is written in Python.
        if self.device.type == "cpu":
            self.kinds["raised in replay"] = (self._raise_in_replay, 0.04)

    def random_step(self) -> None:
        (kind,) = self.choose.choices(list(self.kinds), [share for _, share in self.kinds.values()])
        self.step(kind, self.choose.randint(LEAST_TOKENS, MOST_TOKENS))
        self.steps[kind] += 1

    def step(self, kind: str, tokens: int) -> None:
        x = torch.randn(1, tokens, WIDTH).to(self.device).requires_grad_()
        try:
            self.kinds[kind][0](x)
        except Blown:
            self.blown += 1
        finally:
            self.fuse.disarm()
        self.model.zero_grad()

    def _train(self, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()

    def _drop(self, x: torch.Tensor) -> None:
        self.model(x)

    def _backward_twice(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    def _two_forwards(self, x: torch.Tensor) -> None:
        first = self.model(x).square().mean()
        (first + self.model(x[:, :LEAST_TOKENS]).square().mean()).backward()

    def _no_gradients(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.model(x)

    def _raise_in_forward(self, x: torch.Tensor) -> None:
        self.fuse.arm(self.choose.choice(self.fuse.modules), "forward")
        self._train(x)

    def _raise_in_backward(self, x: torch.Tensor) -> None:
        self.fuse.arm(self.choose.choice(self.fuse.modules), "backward")
        self._train(x)

    def _raise_in_replay(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean()
        self.fuse.arm(self.choose.choice(self.fuse.modules), "forward")
        loss.backward()  # goes well where the module is not run again
