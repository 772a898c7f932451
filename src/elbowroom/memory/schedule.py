"""From controls to a plan: a pure function of the blocks' names and scopes."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.memory.controls import Controls, ControlsError
from elbowroom.memory.plan import (
    BlockPlan,
    OffloadSettings,
    Plan,
    Scope,
    ScopeModules,
    StoreKind,
    Treatments,
    WeightSettings,
)
from elbowroom.memory.weights.selection import NOTHING, Selection

ScopedBlock = tuple[str, ScopeModules]
"""A block's dotted name, and the modules that form its scopes."""


def schedule_blocks(blocks: Sequence[ScopedBlock], controls: Controls, streamed: Selection = NOTHING) -> Plan:
    """Return the plan that `controls` describe for a block sequence.

    With interval N and stride M, blocks 0 … N-1 form the first segment, blocks M … M+N-1 the second, and so on over the
    whole sequence in execution order, across the model's stacks; the blocks between are not recomputed. Where
    feed-forward alone is recomputed, the same numbers choose the blocks.

    Args:
        blocks: name and scopes of each block, in execution order. A scope that a block lacks is treated like its rest.
        controls: the knobs.
        streamed: the modules whose weights are streamed.

    Raises:
        ControlsError: an option needs a scope that no block has, so it would have no effect.
    """
    _refuse_missing_scopes(blocks, controls)
    interval = controls.gradient_checkpointing_interval
    stride = controls.gradient_checkpointing_segment_stride or interval
    planned = tuple(
        _plan_block(
            name,
            modules,
            controls,
            position // stride if controls.gradient_checkpointing and position % stride < interval else None,
        )
        for position, (name, modules) in enumerate(blocks)
    )
    return Plan(
        planned,
        _settings(controls),
        streamed.names,
        weight_settings(controls),
        notes=(*_notes(len(blocks), controls), *streamed.notes),
    )


def _plan_block(name: str, modules: ScopeModules, controls: Controls, segment: int | None) -> BlockPlan:
    offloads = controls.offloads
    scopes: dict[Scope, str] = dict.fromkeys(("attention", "feed_forward", "rest"), "keep")
    whole = segment is not None and not controls.recomputes_feed_forward_alone
    if whole:
        scopes = dict.fromkeys(scopes, "recompute")
        if controls.gradient_checkpointing_keep_attention is True:
            scopes["attention"] = "keep"
    elif "all" in offloads:
        scopes["rest"] = "offload"
    for scope in ("attention", "feed_forward"):
        if offloads & {scope, "all"}:
            scopes[scope] = "offload"
    if segment is not None and not whole:
        scopes["feed_forward"] = "recompute"
    for scope in ("attention", "feed_forward"):
        if not getattr(modules, scope):
            scopes[scope] = scopes["rest"]
    treatments = Treatments(**scopes)  # type: ignore[arg-type]
    return BlockPlan(
        name,
        segment if whole else None,
        treatments,
        "offload" if offloads & {"boundary", "all"} and "recompute" in treatments else "keep",
        modules,
        whole and controls.gradient_checkpointing_keep_attention == "kernel" and bool(modules.attention),
    )


def _refuse_missing_scopes(blocks: Sequence[ScopedBlock], controls: Controls) -> None:
    needed: list[tuple[Scope, str]] = []
    if controls.gradient_checkpointing_keep_attention:
        needed.append(("attention", "gradient_checkpointing_keep_attention"))
    if controls.gradient_checkpointing_offload_attention:
        needed.append(("attention", "gradient_checkpointing_offload_attention"))
    if controls.recomputes_feed_forward_alone:
        needed.append(("feed_forward", "gradient_checkpointing_backend"))
    for scope in _SCOPES:
        if scope in controls.activation_offload:
            needed.append((scope, "activation_offload"))
    for scope, option in needed:
        if not any(getattr(modules, scope) for _, modules in blocks):
            raise ControlsError(
                option,
                f"has no effect on this model: no part of its blocks is known as {scope}; name it, as in "
                f'scopes={{"{scope}": [{_EXAMPLES[scope]!r}]}}',
            )


_EXAMPLES: dict[Scope, str] = {"attention": "layers.*.attn", "feed_forward": "layers.*.mlp"}
_SCOPES: tuple[Scope, ...] = ("attention", "feed_forward")


def _settings(controls: Controls) -> OffloadSettings:
    store: StoreKind | None = controls.activation_store
    if controls.gradient_checkpointing_offload_pin_memory_max_buckets == 0 and controls.offloads:
        store = "pageable"
    prefetch = controls.gradient_checkpointing_offload_prefetch
    return OffloadSettings(
        store=store,
        limit=controls.activation_store_limit,
        path=None if controls.activation_store_path is None else str(controls.activation_store_path),
        window=controls.activation_window,
        prefetch=None if prefetch == "auto" else prefetch,
    )


def weight_settings(controls: Controls) -> WeightSettings:
    """Return how streamed weights live and visit."""
    path = controls.weight_store_path
    return WeightSettings(controls.weight_store, None if path is None else str(path), controls.weight_window)


def _notes(count: int, controls: Controls) -> tuple[str, ...]:
    notes = []
    interval, stride = controls.gradient_checkpointing_interval, controls.gradient_checkpointing_segment_stride
    if interval > count:
        notes.append(
            f"gradient_checkpointing_interval is {interval} and the model has {count} blocks: they form one segment"
        )
    elif stride is not None and stride > count:
        notes.append(
            f"gradient_checkpointing_segment_stride is {stride} and the model has {count} blocks: "
            f"only the first {interval} are recomputed"
        )
    buckets = controls.gradient_checkpointing_offload_pin_memory_max_buckets
    if buckets is not None:
        name = "gradient_checkpointing_offload_pin_memory_max_buckets"
        if not controls.offloads:
            notes.append(f"{name} is ignored: nothing is offloaded")
        elif buckets == 0:
            notes.append(f"{name} is 0: taken as activation_store=pageable")
        else:
            notes.append(f"{name} is ignored: activation_store_limit limits the store, in bytes")
    return tuple(notes)
