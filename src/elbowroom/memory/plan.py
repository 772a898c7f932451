"""A plan: an immutable value that says what happens to the memory of each block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

FORMAT_VERSION = 3

Scope = Literal["attention", "feed_forward", "rest"]
"""A part of a block; `rest` is the block without the other two."""

Treatment = Literal["keep", "recompute", "offload"]
"""What happens to the tensors that autograd saves in a scope."""

StoreKind = Literal["pinned", "pageable", "disk"]
"""Where offloaded bytes live: page-locked host memory, ordinary host memory, a file."""


Residency = Literal["resident", "streamed", "layers"]
"""Where a block's weights live: on the device, in the store, or in the store for some of its layers."""


@dataclass(frozen=True)
class Treatments:
    """The treatment of each scope of a block."""

    attention: Treatment = "keep"
    feed_forward: Treatment = "keep"
    rest: Treatment = "keep"

    def __post_init__(self) -> None:
        for scope in fields(self):
            if getattr(self, scope.name) not in get_args(Treatment):
                raise ValueError(
                    f"{scope.name} must be one of {', '.join(get_args(Treatment))}, not {getattr(self, scope.name)!r}"
                )

    @classmethod
    def all(cls, treatment: Treatment) -> Treatments:
        """Return the same treatment for the whole block."""
        return cls(treatment, treatment, treatment)

    def __contains__(self, treatment: object) -> bool:
        return treatment in (self.attention, self.feed_forward, self.rest)


@dataclass(frozen=True)
class ScopeModules:
    """The modules that form the scopes of a block, as dotted names within the block; all else is `rest`."""

    attention: tuple[str, ...] = ()
    feed_forward: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for scope in fields(self):
            names = getattr(self, scope.name)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{scope.name} must be a tuple of names, as in ('attn',), not {names!r}")
        names = (*self.attention, *self.feed_forward)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: a module can be in one scope, and once")


@dataclass(frozen=True)
class BlockPlan:
    """What happens to one block.

    Attributes:
        name: dotted name of the block in the unwrapped model.
        segment: number of the segment that the block is recomputed with: exactly if its `rest` is recomputed.
        treatments: what becomes of the saved tensors of each scope. Attention or feed-forward alone is recomputed as a
            unit of its own. A scope that is kept or offloaded in a recomputed block is not run a second time.
        boundary: what becomes of the tensors that enter what is recomputed (a segment, or a scope alone).
        modules: where the scopes are.
        keep_kernel: where attention is recomputed, keep the result of its kernel (softmax(QKᵀ)V), so that only the
            projections around it are run again.

    Raises:
        ValueError: the parts contradict one another.
    """

    name: str
    segment: int | None = None
    treatments: Treatments = Treatments()
    boundary: Literal["keep", "offload"] = "keep"
    modules: ScopeModules = ScopeModules()
    keep_kernel: bool = False

    def __post_init__(self) -> None:
        if self.boundary not in ("keep", "offload"):
            raise ValueError(f"{self.name}: the boundary must be 'keep' or 'offload', not {self.boundary!r}")
        if (self.segment is not None) != (self.treatments.rest == "recompute"):
            raise ValueError(
                f"{self.name}: a block is in a segment exactly if its rest is recomputed, but the segment is "
                f"{self.segment} and the treatment {self.treatments.rest!r}"
            )
        if self.boundary == "offload" and "recompute" not in self.treatments:
            raise ValueError(f"{self.name}: nothing is recomputed, so there is no boundary to offload")
        for scope in ("attention", "feed_forward"):
            if getattr(self.treatments, scope) != self.treatments.rest and not getattr(self.modules, scope):
                raise ValueError(
                    f"{self.name}: its {scope} can't be treated apart, for no module of the block is known to be it"
                )

        if self.keep_kernel and (self.treatments.attention != "recompute" or not self.modules.attention):
            raise ValueError(f"{self.name}: attention is not recomputed, so there is no kernel to keep")

    def apart(self, scope: Scope) -> bool:
        """Whether a scope's calls are treated by themselves."""
        treatment = getattr(self.treatments, scope)
        if scope == "attention" and self.keep_kernel:
            return True
        # Offloaded like the rest, it is still counted apart.
        return treatment != self.treatments.rest or treatment == "offload"

    @property
    def scopes_apart(self) -> tuple[str, ...]:
        """The modules, by their names within the block, whose calls are treated by themselves."""
        scopes: tuple[Scope, ...] = ("attention", "feed_forward")
        return tuple(name for scope in scopes if self.apart(scope) for name in getattr(self.modules, scope))

    def cell(self) -> str:
        """One letter where the whole block is treated alike, else three: attention, feed-forward, rest.

        `k` kept, `r` recomputed, `o` offloaded; a capital `K` for attention whose kernel alone is kept.
        """
        treatments = self.treatments
        letters = treatments.attention[0] + treatments.feed_forward[0] + treatments.rest[0]
        if self.keep_kernel:
            letters = "K" + letters[1:]
        return letters[0] if len(set(letters)) == 1 else letters

    @property
    def offloads(self) -> bool:
        """Whether any tensor of the block goes to the store."""
        return "offload" in self.treatments or self.boundary == "offload"


def _check_store_settings(settings: OffloadSettings | WeightSettings) -> None:
    if settings.store not in (None, *get_args(StoreKind)):
        raise ValueError(f"there is no store {settings.store!r}")
    if settings.path is not None and not isinstance(settings.path, str):
        raise ValueError(f"'path' must be text, not {settings.path!r}")
    if settings.window is not None and not _is_size(settings.window):
        raise ValueError(f"'window' must be a number of bytes, not {settings.window!r}")


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class OffloadSettings:
    """How offloaded tensors are stored and moved.

    Attributes:
        store: where they live; None means pinned memory for an accelerator, and the disk for the CPU.
        limit: most bytes in the store; beyond it, tensors are kept. None: 60 % of the host memory that is free (the
            control group's limit counts), or of the disk.
        path: folder for the disk store; None means the system's folder for temporary files.
        window: bytes that may be on their way in each direction; None means a quarter of a gibibyte.
        prefetch: reload ahead of use, in the order learned in the step before; None lets a timed probe decide.
        smallest: tensors with fewer bytes than this stay: a copy has a price of its own.
    """

    store: StoreKind | None = None
    limit: int | None = None
    path: str | None = None
    window: int | None = None
    prefetch: bool | None = None
    smallest: int = 4096

    def __post_init__(self) -> None:
        _check_store_settings(self)
        for name, value in (("limit", self.limit), ("smallest", self.smallest)):
            if not _is_size(value) and not (value is None and name == "limit"):
                raise ValueError(f"{name!r} must be a number of bytes, not {value!r}")
        if self.prefetch is not None and type(self.prefetch) is not bool:
            raise ValueError(f"'prefetch' must be true, false or null, not {self.prefetch!r}")


@dataclass(frozen=True)
class WeightSettings:
    """Where streamed weights live, and how they visit.

    Attributes:
        store: their home; None means pinned memory for an accelerator, and the disk for the CPU.
        path: folder for weights that move to the disk; None means the system's folder for temporary files.
        window: bytes of weights on the device at one time (a single module may need more); None means a quarter of a
            gibibyte, or twice the largest module.
    """

    store: StoreKind | None = None
    path: str | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        _check_store_settings(self)


@dataclass(frozen=True, repr=False)
class Plan:
    """The blocks of a model in execution order, each with its treatment, and the modules whose weights are streamed.

    Attributes:
        blocks: one `BlockPlan` a block; the blocks of a segment are consecutive and share the boundary's treatment.
        offload: settings of the store of activations.
        streamed: dotted names of the modules (blocks or layers) whose weights are streamed, in execution order.
        weights: settings of the store of weights.
        notes: remarks for the reader; they do not count when plans are compared.

    Raises:
        ValueError: a block is planned twice, a segment has a gap or two kinds of boundary, or a streamed module lies
            inside another one.
    """

    blocks: tuple[BlockPlan, ...]
    offload: OffloadSettings = OffloadSettings()
    streamed: tuple[str, ...] = ()
    weights: WeightSettings = WeightSettings()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        names = [block.name for block in self.blocks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"the plan names {', '.join(repeated)} more than once")
        finished: set[int] = set()
        previous: BlockPlan | None = None
        for block in self.blocks:
            if block.segment is not None:
                joins = previous is not None and previous.segment == block.segment
                if not joins and block.segment in finished:
                    raise ValueError(
                        f"segment {block.segment} has a gap before {block.name}; its blocks must be consecutive"
                    )
                if joins and previous is not None and previous.boundary != block.boundary:
                    raise ValueError(f"segment {block.segment}: the boundary is both kept and offloaded")
                finished.add(block.segment)
            previous = block
        if len(set(self.streamed)) != len(self.streamed):
            raise ValueError("the plan streams a module twice")
        for name in self.streamed:
            outer = next((other for other in self.streamed if name.startswith(f"{other}.")), None)
            if outer is not None:
                raise ValueError(f"the plan streams {name} and {outer}, which holds it; name only one of them")

    @property
    def segments(self) -> tuple[tuple[BlockPlan, ...], ...]:
        """The segments in execution order, each with its blocks."""
        members: dict[int, list[BlockPlan]] = {}
        for block in self.blocks:
            if block.segment is not None:
                members.setdefault(block.segment, []).append(block)
        return tuple(tuple(blocks) for blocks in members.values())

    @property
    def offloads(self) -> bool:
        """Whether any tensor goes to the store."""
        return any(block.offloads for block in self.blocks)

    @property
    def takes_effect(self) -> bool:
        """Whether anything is recomputed, offloaded or streamed."""
        return bool(self.streamed) or any(block.treatments != Treatments() for block in self.blocks)

    def residency(self, block: BlockPlan) -> Residency:
        """Return where the weights of a block live between their uses."""
        if block.name in self.streamed:
            return "streamed"
        return "layers" if any(name.startswith(f"{block.name}.") for name in self.streamed) else "resident"

    def strip(self) -> str:
        """One cell a block: `k` kept, `r` recomputed, `o` offloaded.

        Three letters where attention, feed-forward and rest differ: `krr` keeps attention and recomputes the others,
        `Krr` keeps the attention kernel alone.
        Brackets enclose a segment, `[rr][rr]kk`; angle brackets one whose boundary is offloaded, `<rr>`. `~` follows a
        block whose weights are streamed, `.` one of which single layers are.
        """
        groups: list[list[BlockPlan]] = []
        for block in self.blocks:
            if groups and block.segment is not None and groups[-1][0].segment == block.segment:
                groups[-1].append(block)
            else:
                groups.append([block])
        marks = {"resident": "", "streamed": "~", "layers": "."}
        cells_of = {block.name: block.cell() + marks[self.residency(block)] for block in self.blocks}
        narrow = all(len(cell) == 1 for cell in cells_of.values())
        cells = [_enclosed(group, [cells_of[block.name] for block in group], narrow) for group in groups]
        return ("" if narrow else " ").join(cells)

    def legend(self) -> str:
        """Explain the letters and brackets that `strip` uses, in one line."""
        strip = self.strip()
        words = {
            "k": "k kept", "r": "r recomputed", "o": "o offloaded", "K": "K attention kernel kept",
            "[": "[ ] a segment, recomputed as one", "<": "< > the same, with what enters it offloaded",
            "~": "~ weights streamed", ".": ". weights of single layers streamed",
        }  # fmt: skip
        used = [text for letter, text in words.items() if letter in strip]
        if any(len(block.cell()) > 1 for block in self.blocks):
            used.append("three letters: attention, feed-forward, rest")
        return ", ".join(used)

    def __repr__(self) -> str:
        return f"Plan({len(self.blocks)} blocks, {len(self.segments)} segments: {self.strip()})"

    def to_json(self) -> str:
        """Return the plan as a JSON document; `from_json` gives an equal plan back."""
        document = {
            "version": FORMAT_VERSION,
            "blocks": [asdict(block) for block in self.blocks],
            "offload": asdict(self.offload),
            "streamed": list(self.streamed),
            "weights": asdict(self.weights),
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not a plan; the message says what is wrong with it.
        """
        try:
            document: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a plan: it is not JSON ({error})") from None
        if not isinstance(document, dict) or document.get("version") != FORMAT_VERSION:
            raise ValueError(f"this is not a plan of format version {FORMAT_VERSION}")
        unknown = sorted(set(document) - {"version", "blocks", "offload", "streamed", "weights", "notes"})
        if unknown:
            raise ValueError(f"this is not a plan: it has unknown parts ({', '.join(unknown)})")
        blocks, notes = document.get("blocks"), document.get("notes", [])
        if not isinstance(blocks, list) or not isinstance(notes, list):
            raise ValueError("this is not a plan: 'blocks' and 'notes' must be lists")
        streamed = document.get("streamed", [])
        if not _is_list_of_names(streamed):
            raise ValueError("this is not a plan: 'streamed' must be a list of names")
        return cls(
            tuple(map(_block_from_json, blocks)),
            _settings_from_json(OffloadSettings, "offload", document.get("offload", {})),
            tuple(streamed),
            _settings_from_json(WeightSettings, "weights", document.get("weights", {})),
            tuple(map(str, notes)),
        )


def _enclosed(group: Sequence[BlockPlan], cells_: Sequence[str], narrow: bool) -> str:
    cells = ("" if narrow else " ").join(cells_)
    if group[0].boundary == "offload":
        return f"<{cells}>"
    return f"[{cells}]" if group[0].segment is not None else cells


def _block_from_json(entry: Any) -> BlockPlan:
    known = {part.name for part in fields(BlockPlan)}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or set(entry) - known:
        raise ValueError(f"this is not a plan: {entry!r} is not a block with a 'name' and parts of {sorted(known)}")
    segment, boundary = entry.get("segment"), entry.get("boundary", "keep")
    if segment is not None and type(segment) is not int:
        raise ValueError(f"this is not a plan: the segment of {entry['name']} must be a number or null")
    if boundary not in ("keep", "offload"):
        raise ValueError(f"this is not a plan: the boundary of {entry['name']} must be 'keep' or 'offload'")
    if type(entry.get("keep_kernel", False)) is not bool:
        raise ValueError(f"this is not a plan: keep_kernel of {entry['name']} must be true or false")
    treatments = _parts(entry, "treatments", Treatments, lambda value: value in get_args(Treatment))
    modules = _parts(entry, "modules", ScopeModules, _is_list_of_names)
    return BlockPlan(
        entry["name"],
        segment,
        Treatments(**treatments),
        boundary,
        ScopeModules(**{scope: tuple(names) for scope, names in modules.items()}),
        entry.get("keep_kernel", False),
    )


def _parts(entry: dict[str, Any], key: str, kind: type, valid: Any) -> dict[str, Any]:
    parts = entry.get(key, {})
    known = {part.name for part in fields(kind)}
    if not isinstance(parts, dict) or set(parts) - known or not all(map(valid, parts.values())):
        raise ValueError(f"this is not a plan: {key} of {entry['name']} can't be {parts!r}")
    return parts


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _settings_from_json(kind: Any, part: str, entry: Any) -> Any:
    if not isinstance(entry, dict) or set(entry) - {each.name for each in fields(kind)}:
        raise ValueError(f"this is not a plan: {part!r} can't be {entry!r}")
    try:
        return kind(**entry)
    except ValueError as error:
        raise ValueError(f"this is not a plan: {part!r}: {error}") from None
