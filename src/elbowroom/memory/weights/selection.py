"""Which modules of a model have their weights streamed: a pure function of the controls and of the model's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from elbowroom.memory.control_values import ControlsError
from elbowroom.memory.module_state import modules_of
from elbowroom.memory.weight_controls import Component, WeightControls
from elbowroom.memory.weights.parts import stored_bytes


@dataclass(frozen=True)
class Candidate:
    """A module whose weights can be streamed.

    Attributes:
        name: dotted name in the unwrapped model.
        kind: name of its class.
        nbytes: of its weights.
    """

    name: str
    kind: str
    nbytes: int

    @property
    def plain_name(self) -> str:
        """The name without the wrappers of PEFT, as people know it."""
        return self.name.replace(".base_layer", "")


@dataclass(frozen=True)
class Selection:
    """Names of the modules to stream, in execution order, and remarks for the reader."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING = Selection()


def select(
    model: nn.Module,
    blocks: Sequence[str],
    controls: WeightControls,
    component: Component = "transformer",
    free_bytes: Callable[[], int] | None = None,
) -> Selection:
    """Return what `controls` stream of a model.

    Args:
        model: the unwrapped model; it is only looked at.
        blocks: names of its blocks, in execution order.
        controls: the knobs.
        component: which options are meant.
        free_bytes: memory of the device that is free, for `weight_streaming="auto"`.

    Raises:
        ControlsError: an option would have no effect on this model, or two options stream the same.
    """
    if component != "transformer":
        return _layers_of(model, blocks, controls, component)
    if controls.ramtorch:
        layers = _layers_of(model, blocks, controls, component)
        swapped = _last(block_candidates(model, blocks), controls.musubi_blocks_to_swap)
        _refuse_overlap(layers.names, swapped)
        return Selection(_in_order((*layers.names, *swapped), model, blocks), layers.notes)
    if controls.musubi_blocks_to_swap:
        return Selection(_last(block_candidates(model, blocks), controls.musubi_blocks_to_swap))
    return _blocks_of(block_candidates(model, blocks), controls, model, free_bytes)


def block_candidates(model: nn.Module, blocks: Sequence[str]) -> list[Candidate]:
    """Return the blocks of a model with the bytes of weights that can be streamed."""
    frozen = has_frozen(model)
    modules = [(name, model.get_submodule(name)) for name in blocks]
    return [Candidate(name, type(module).__name__, _bytes(modules_of(module), frozen)) for name, module in modules]


def layer_candidates(model: nn.Module, blocks: Sequence[str], *, linear_only: bool) -> list[Candidate]:
    """Return the layers of a model that have weights of their own, in the order in which they run.

    Args:
        model: the unwrapped model.
        blocks: names of its blocks, in execution order; what lies outside of them is taken to run before.
        linear_only: linear layers only.
    """
    frozen = has_frozen(model)
    found = []
    for name, module in model.named_modules():
        if any(True for _ in module.children()) or (linear_only and not _is_linear(module)):
            continue
        nbytes = _bytes([module], frozen)
        if nbytes:
            found.append(Candidate(name, type(module).__name__, nbytes))
    return sorted(found, key=lambda candidate: _place(candidate.name, blocks))


def evenly(sizes: Sequence[int], share: float) -> list[bool]:
    """Choose items so that up to each place their bytes are as near as can be to a share of all bytes up to there.

    A share above zero chooses at least one item, the smallest: a setting never does nothing.
    """
    chosen, seen, taken = [], 0, 0
    for size in sizes:
        seen += size
        take = share > 0 and taken + size / 2 <= share * seen
        taken += size if take else 0
        chosen.append(take)
    if share > 0 and sizes and not any(chosen):
        chosen[sizes.index(min(sizes))] = True
    return chosen


def evenly_counted(count: int, wanted: int) -> list[bool]:
    """Choose `wanted` of `count` items, as far from one another as can be."""
    return [(place + 1) * wanted // count > place * wanted // count for place in range(count)]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _blocks_of(
    candidates: Sequence[Candidate],
    controls: WeightControls,
    model: nn.Module,
    free_bytes: Callable[[], int] | None,
) -> Selection:
    wanted = controls.weight_streaming
    sizes = [candidate.nbytes for candidate in candidates]
    notes: tuple[str, ...] = ()
    if wanted == "off":
        return NOTHING
    if wanted == "auto":
        assert free_bytes is not None
        free = free_bytes()
        share = auto_share(sum(sizes), _bytes(modules_of(model), frozen_only=False) - sum(sizes), free)
        chosen = evenly(sizes, share)
        notes = (f"weight_streaming=auto: {sum(chosen)} of {len(sizes)} blocks, for {free / 2**30:.1f} GiB are free",)
    elif isinstance(wanted, str):
        chosen = evenly(sizes, float(wanted.removesuffix("%")) / 100)
    else:
        _check_count("weight_streaming", wanted, len(candidates))
        chosen = evenly_counted(len(candidates), wanted)
    return Selection(tuple(candidate.name for candidate, take in zip(candidates, chosen, strict=True) if take), notes)


def auto_share(streamable: int, rest: int, free: int) -> float:
    """Return the share of the blocks' weights to stream, so that all weights on the device take half of what is free.

    Args:
        streamable: bytes of the blocks' weights.
        rest: bytes of all other weights.
        free: bytes of the device that are free before the model is there.
    """
    if streamable == 0:
        return 0.0
    room = max(0, free // 2 - rest)
    return 1 - min(1.0, room / streamable)


def _last(candidates: Sequence[Candidate], count: int) -> tuple[str, ...]:
    _check_count("musubi_blocks_to_swap", count, len(candidates))
    return tuple(candidate.name for candidate in candidates[len(candidates) - count :])


def _check_count(option: str, count: int, blocks: int) -> None:
    if count > blocks:
        raise ControlsError(option, f"must be between 0 and {blocks}, the number of its blocks, but is {count}")


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers_of(model: nn.Module, blocks: Sequence[str], controls: WeightControls, component: Component) -> Selection:
    option = {"transformer": "ramtorch"}.get(component, f"ramtorch_{component}")
    if not getattr(controls, option):
        return NOTHING
    candidates = layer_candidates(model, blocks, linear_only=controls.ramtorch_disable_extensions)
    if component == "transformer" and controls.ramtorch_target_modules:
        candidates = _matching(candidates, controls.ramtorch_target_modules)
    first = next(iter(model.named_parameters()), ("", None))[0].rpartition(".")[0]
    notes = tuple(
        f"{candidate.plain_name} stays on the device: its weight is the model's first, which other libraries ask where "
        "the model is"
        for candidate in candidates
        if candidate.name == first
    )
    candidates = [candidate for candidate in candidates if candidate.name != first]
    if not candidates:
        hint = "; set ramtorch_disable_extensions to false" if controls.ramtorch_disable_extensions else ""
        raise ControlsError(option, f"has no effect: {type(model).__name__} has no layer that it could stream{hint}")
    percent = {
        "transformer": controls.ramtorch_transformer_percent,
        "text_encoder": controls.ramtorch_text_encoder_percent,
    }.get(component)
    chosen = evenly([candidate.nbytes for candidate in candidates], 1.0 if percent is None else percent / 100)
    return Selection(tuple(each.name for each, take in zip(candidates, chosen, strict=True) if take), notes)


def _matching(candidates: Sequence[Candidate], patterns: Sequence[str]) -> list[Candidate]:
    for pattern in patterns:
        if not any(_matches(candidate, pattern) for candidate in candidates):
            examples = ", ".join(dict.fromkeys(candidate.kind for candidate in candidates[:20]))
            raise ControlsError(
                "ramtorch_target_modules",
                f"{pattern!r} matches no layer; name layers (such as {candidates[0].plain_name!r}), blocks, or classes "
                f"({examples})"
                if candidates
                else f"{pattern!r} matches no layer",
            )
    return [each for each in candidates if any(_matches(each, pattern) for pattern in patterns)]


def _matches(candidate: Candidate, pattern: str) -> bool:
    name = candidate.plain_name
    return fnmatchcase(name, pattern) or fnmatchcase(candidate.kind, pattern) or name.startswith(f"{pattern}.")


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; those of quantization libraries say so in their names."""
    return isinstance(module, nn.Linear) or "Linear" in type(module).__name__


def _refuse_overlap(layers: Sequence[str], swapped: Sequence[str]) -> None:
    both = [block for block in swapped if any(name.startswith(f"{block}.") for name in layers)]
    if both:
        raise ControlsError(
            "musubi_blocks_to_swap",
            f"and ramtorch both stream {', '.join(both)}; let ramtorch_target_modules name others, or leave one out",
        )


# ---- shared ----------------------------------------------------------------------------------------------------------


def has_frozen(model: nn.Module) -> bool:
    """Whether something is frozen: then what is trained is an adapter, which stays on the device."""
    return any(not parameter.requires_grad for parameter in model.parameters())


def _bytes(modules: Sequence[nn.Module], frozen_only: bool) -> int:
    parameters = {
        id(parameter): stored_bytes(parameter)
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None and not (frozen_only and parameter.requires_grad)
    }
    return sum(parameters.values())


def _place(name: str, blocks: Sequence[str]) -> int:
    """Return the place of the block that holds a module, -1 if none does. (Sorting keeps the order within a block.)"""
    return next((place for place, block in enumerate(blocks) if name == block or name.startswith(f"{block}.")), -1)


def _in_order(names: Sequence[str], model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    registered = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(names, key=lambda name: (_place(name, blocks), registered[name])))
