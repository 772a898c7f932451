"""The families that elbowroom knows. Nothing outside this folder names one."""

from __future__ import annotations

from collections.abc import KeysView, Mapping

from torch import nn

from elbowroom.families.base import Family
from elbowroom.families.flux import Flux
from elbowroom.families.sd3 import StableDiffusion3

FAMILIES: tuple[Family, ...] = (Flux(), StableDiffusion3())


def family_of_pipeline(pipeline_class: str) -> Family:
    """Return the family whose released checkpoints are of the Diffusers class `pipeline_class`.

    Raises:
        ValueError: no family has it; the message lists what is known.
    """
    for family in FAMILIES:
        if family.pipeline_class == pipeline_class:
            return family
    known = ", ".join(f"{family.pipeline_class} ({family.name})" for family in FAMILIES)
    raise ValueError(f"pipelines of class {pipeline_class!r} can't be trained; supported are {known}")


def block_patterns(model: nn.Module) -> tuple[str, ...]:
    """Return the block patterns of a model: its family's, else those that a Diffusers transformer declares itself.

    Diffusers transformers list the class names of their blocks in `_repeated_blocks`, else in `_no_split_modules`; the
    lists that hold them are taken in the order in which they are registered, which is that of execution. Lists inside
    lists don't count: those of U-Nets are not registered in the order of execution.

    Raises:
        ValueError: the model is of neither kind, so the caller has to name the blocks.
    """
    for name in _class_names(model):
        for family in FAMILIES:
            if name in family.blocks:
                return family.blocks[name]
    declared = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None) or ()
    patterns = tuple(
        f"{path}.*"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(not _class_names(block).isdisjoint(declared) for block in module)
        and not any(part.isdigit() for part in path.split("."))
    )
    if not patterns:
        raise ValueError(
            f"the blocks of {type(model).__name__} are not known; name them in execution order, for example "
            'blocks=["encoder.layers.*", "decoder.layers.*"]'
        )
    return patterns


def scope_patterns(block: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Return the patterns of a block's scopes that its family states; empty where names and kinds tell."""
    names = _class_names(block)
    return next((patterns for family in FAMILIES for name, patterns in family.scopes.items() if name in names), {})


def _class_names(module: nn.Module) -> KeysView[str]:
    """Return the names of a module's class and those above it: FSDP and others put a class of their own in front."""
    return dict.fromkeys(kind.__name__ for kind in type(module).__mro__).keys()
