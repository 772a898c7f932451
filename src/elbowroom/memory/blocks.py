"""Finding the blocks of an unmodified model by their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Block:
    """A repeated module, with its dotted name in the unwrapped model."""

    name: str
    module: nn.Module


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of PEFT, `torch.compile` and `DistributedDataParallel`.

    Names of blocks are relative to this model, so that a plan made before wrapping also fits afterwards.
    """
    while True:
        inner: Any = model
        if hasattr(model, "get_base_model"):  # PeftModel
            inner = inner.get_base_model()
        elif hasattr(model, "_orig_mod"):  # torch.compile's OptimizedModule
            inner = inner._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def find_blocks(model: nn.Module, patterns: Sequence[str]) -> tuple[Block, ...]:
    """Return the blocks that `patterns` name, in execution order.

    A pattern is a dotted name in which `*`, `?` and `[…]` match within one part (fnmatch): `"encoder.layers.*"` names
    the members of a list, and nothing inside them. The order of the patterns, and within a pattern the order in which
    the modules are registered, must be the order in which the model calls them.

    Raises:
        ValueError: a pattern matches nothing, a module is named twice, or one block lies inside another.
    """
    if isinstance(patterns, str):
        raise ValueError(f"blocks must be a list of patterns, as in blocks=[{patterns!r}]")
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError('blocks must be patterns of names, as in blocks=["encoder.layers.*"], not modules')
    if not patterns:
        raise ValueError('no blocks were named; pass patterns such as blocks=["encoder.layers.*"]')
    modules = dict(unwrap(model).named_modules())
    found: dict[str, Block] = {}
    for pattern in patterns:
        names = [name for name in modules if name and _matches(name, pattern)]
        if not names:
            raise ValueError(
                f"the pattern {pattern!r} names no module of {type(unwrap(model)).__name__}{_hint(pattern, modules)}"
            )
        for name in names:
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
                kind = type(modules[name]).__name__
                raise ValueError(f"{name!r} is a {kind}, which is never called; did you mean {f'{name}.*'!r}?")
            if name in found:
                raise ValueError(f"the pattern {pattern!r} names {name!r}, which an earlier pattern names already")
            found[name] = Block(name, modules[name])
    refuse_nested(list(found))
    return tuple(found.values())


def refuse_nested(names: Sequence[str]) -> None:
    """Raise `ValueError` if one of the named modules lies inside another: each block has one treatment."""
    known = set(names)
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            outer = ".".join(parts[:depth])
            if outer in known:
                raise ValueError(f"the block {name!r} lies inside the block {outer!r}; name only one of them")


def _matches(name: str, pattern: str) -> bool:
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def _hint(pattern: str, modules: dict[str, nn.Module]) -> str:
    lists = [f"{name}.*" for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    near = difflib.get_close_matches(pattern, lists, n=3, cutoff=0.3) or lists[:3]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
