"""Finding the scopes of a block: the modules that are its attention, and those that are its feed-forward part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from elbowroom.memory.blocks import Block
from elbowroom.memory.plan import ScopeModules

ScopePatterns = Mapping[str, Sequence[str]]
"""For "attention" and "feed_forward": names of modules, with wildcards within each dotted part."""

# A module is known by its attribute's name, as models of this field have it, or by its class's.
_ATTENTION_NAME = re.compile(r"((self|cross|img|txt|image|text|audio|video|temporal|spatial|joint|.+_to_.+)_)?attn\d*|"
                             r"((self|cross|img|txt|image|text|audio|video|temporal|spatial|joint)_)?attention|"
                             r"\w+_(self|cross)_attn|\w+_cross_attn|\w+_self_attn|\w+_instruct_attn")  # fmt: skip
_FEED_FORWARD_NAME = re.compile(
    r"((img|txt|image|text|audio|video|temporal)_)?(ff|ffn|mlp|feed_?forward)(_(context|in|out|i|t))?\d*"
)
_ATTENTION_CLASS = re.compile(r"\w*(Attention|Attn)\d*")
_FEED_FORWARD_CLASS = re.compile(r"\w*(FeedForward|FFN|MLP|Mlp|GLUMBConv|GLUMBTempConv)\w*")
# Norms, gates and embeddings that carry the name of what they belong to.
_NEITHER = re.compile(r"norm|gate|embed|proj$|modulation|dropout|scale|table|rope", re.IGNORECASE)


def find_scopes(block: nn.Module, patterns: ScopePatterns | None = None) -> ScopeModules:
    """Return the modules that form the scopes of a block, in the order in which they are registered.

    Args:
        block: the block.
        patterns: where name and kind don't tell (a feed-forward part without a module of its own): names of modules
            relative to the block. A scope without patterns is looked for by name and kind.

    Raises:
        ValueError: a pattern names no module, or one module would be in both scopes.
    """
    found = {
        scope: _named(block, patterns[scope], scope) if patterns and scope in patterns else _recognised(block, scope)
        for scope in ("attention", "feed_forward")
    }
    both = [name for name in found["attention"] if any(_inside(name, other) for other in found["feed_forward"])]
    both += [name for name in found["feed_forward"] if any(_inside(name, other) for other in found["attention"])]
    if both:
        raise ValueError(f"{', '.join(sorted(set(both)))} of {type(block).__name__} would be in both scopes")
    return ScopeModules(**found)


def modules_in_blocks(
    model: nn.Module, blocks: Sequence[Block], scopes: ScopePatterns
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return, for each block, the names within it of the modules that patterns name within the model.

    Raises:
        ValueError: a scope has no such name, or a pattern names no module inside a block.
    """
    unknown = sorted(set(scopes) - {"attention", "feed_forward"})
    if unknown:
        raise ValueError(f"there is no scope {unknown[0]!r}; scopes are 'attention' and 'feed_forward'")
    found: dict[str, dict[str, tuple[str, ...]]] = {block.name: {} for block in blocks}
    for scope, patterns in scopes.items():
        if isinstance(patterns, str):
            raise ValueError(f"the patterns of a scope must be a list, as in {{{scope!r}: [{patterns!r}]}}")
        unused = set(patterns)
        for block in blocks:
            names = [name for name, _ in block.module.named_modules() if name]
            matching = {
                name: [pattern for pattern in patterns if _matches_end(f"{block.name}.{name}", pattern)]
                for name in names
            }
            found[block.name][scope] = tuple(name for name in names if matching[name])
            unused -= {pattern for used in matching.values() for pattern in used}
        if unused:
            raise ValueError(
                f"the pattern {sorted(unused)[0]!r} ({scope}) names no module inside a block of {type(model).__name__}"
            )
    return found


def _matches_end(name: str, pattern: str) -> bool:
    """Whether a pattern fits a name; `*.attn` fits at any depth, as fnmatch has it."""
    return _matches(name, pattern) or (pattern.startswith("*.") and fnmatchcase(name, pattern))


def _named(block: nn.Module, patterns: Sequence[str], scope: str) -> tuple[str, ...]:
    names = [name for name, _ in block.named_modules() if name]
    missing = [pattern for pattern in patterns if not any(_matches(name, pattern) for name in names)]
    if missing:
        raise ValueError(f"{', '.join(map(repr, missing))} ({scope}) names no module of {type(block).__name__}")
    return _outermost([name for name in names if any(_matches(name, pattern) for pattern in patterns)])


def _recognised(block: nn.Module, scope: str) -> tuple[str, ...]:
    return _outermost([name for name, module in block.named_modules() if name and _scope_of(name, module) == scope])


def _scope_of(path: str, module: nn.Module) -> str | None:
    name, kind = path.rsplit(".", 1)[-1], type(module).__name__
    if not any(True for _ in module.parameters()) or _NEITHER.search(name):
        return None
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None  # only what is called can be treated
    if _ATTENTION_NAME.fullmatch(name) or _ATTENTION_CLASS.fullmatch(kind):
        return "attention"
    if _FEED_FORWARD_NAME.fullmatch(name) or _FEED_FORWARD_CLASS.fullmatch(kind):
        return "feed_forward"
    return None


def _outermost(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(name != other and _inside(name, other) for other in names))


def _inside(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _matches(name: str, pattern: str) -> bool:
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))
