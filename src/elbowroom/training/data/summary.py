"""What would be trained on, told before it starts: numbers, and a picture of the crops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .batches import batches_per_bucket, steps_per_epoch
from .buckets import Bucket, kept_fraction, scale_to_cover
from .errors import some
from .scan import Sample, Scan
from .walk import Skipped

_HEAVY_CROP = 0.5
"""An image that loses more than this share of its area is pointed out."""


@dataclass(frozen=True)
class BucketUse:
    """A bucket, its samples, and its batches in one epoch."""

    bucket: Bucket
    samples: int
    batches: int


@dataclass(frozen=True)
class Summary:
    """The numbers of a data folder as it would be trained on.

    shortest_caption, longest_caption: (relative path, number of characters), empty captions aside; None without any.
    upscaled: images smaller than their bucket. heavily_cropped: images that lose more than half of their area.
    """

    folder: Path
    found: int
    used: int
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...]
    captions_missing: int
    shortest_caption: tuple[str, int] | None
    longest_caption: tuple[str, int] | None
    upscaled: tuple[str, ...]
    heavily_cropped: tuple[str, ...]
    buckets: tuple[BucketUse, ...]
    batch: int
    repeats: int
    accumulation: int
    batches: int
    steps: int


def summarize(scan: Scan, buckets: Sequence[Bucket], *, batch: int, repeats: int, accumulation: int) -> Summary:
    """Count what a scan gives when sample i is trained on in `buckets[i]`. An empty scan gives zeros, no error."""
    pairs = list(zip(scan.samples, buckets, strict=True))
    batches = batches_per_bucket(buckets, batch=batch, repeats=repeats)
    counts = Counter(buckets)
    captions = sorted((len(sample.caption), sample.relative) for sample in scan.samples if sample.caption)
    return Summary(
        folder=scan.folder,
        found=scan.found,
        used=len(scan.samples),
        skipped=scan.skipped,
        warnings=scan.warnings,
        captions_missing=scan.captions_missing,
        shortest_caption=(captions[0][1], captions[0][0]) if captions else None,
        longest_caption=(captions[-1][1], captions[-1][0]) if captions else None,
        upscaled=_names(pairs, lambda sample, bucket: scale_to_cover(sample.width, sample.height, bucket) > 1),
        heavily_cropped=_names(
            pairs, lambda sample, bucket: kept_fraction(sample.width, sample.height, bucket) < 1 - _HEAVY_CROP
        ),
        buckets=tuple(BucketUse(bucket, counts[bucket], count) for bucket, count in batches.items()),
        batch=batch,
        repeats=repeats,
        accumulation=accumulation,
        batches=sum(batches.values()),
        steps=steps_per_epoch(buckets, batch=batch, repeats=repeats, accumulation=accumulation) if buckets else 0,
    )


def render(summary: Summary, *, most: int | None = 20) -> RenderableType:
    """A summary for the terminal, warnings first. At most `most` of the files left out are listed; None lists all."""
    parts: list[RenderableType] = [
        Panel(Text(warning), title="Warning", title_align="left", border_style="bold red")
        for warning in summary.warnings
    ]
    parts.append(_facts(summary))
    if summary.buckets:
        parts.append(_bucket_table(summary))
    if summary.skipped:
        parts.append(_skipped_table(summary.skipped, most))
    return Group(*parts)


def _names(pairs: Sequence[tuple[Sample, Bucket]], test: Callable[[Sample, Bucket], bool]) -> tuple[str, ...]:
    return tuple(sample.relative for sample, bucket in pairs if test(sample, bucket))


def _facts(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def add(name: str, value: str) -> None:
        table.add_row(name, Text(value))  # Text, because names with [brackets] would be read as markup.

    add("Data", str(summary.folder))
    add("Images", f"{summary.used} used, {len(summary.skipped)} left out")
    captions = f"{summary.captions_missing} missing"
    if summary.shortest_caption and summary.longest_caption:
        (shortest, few), (longest, many) = summary.shortest_caption, summary.longest_caption
        captions += f"; shortest {few} characters ({shortest}), longest {many} ({longest})"
    add("Captions", captions)
    if summary.upscaled:
        add("Enlarged", f"{len(summary.upscaled)}, smaller than their bucket: {some(summary.upscaled)}")
    if summary.heavily_cropped:
        add("Cropped", f"{len(summary.heavily_cropped)} by more than half: {some(summary.heavily_cropped)}")
    add(
        "One epoch",
        f"{summary.used} images × {summary.repeats} = {summary.used * summary.repeats} in {summary.batches} batches of "
        f"at most {summary.batch}; {summary.steps} optimizer steps of at most {summary.accumulation} batches",
    )
    return table


def _bucket_table(summary: Summary) -> Table:
    table = Table("Bucket", title="Buckets (width × height)", title_justify="left")
    for name in ("Images", "Batches an epoch", "Last batch holds"):
        table.add_column(name, justify="right")
    for use in summary.buckets:
        last = use.samples * summary.repeats - (use.batches - 1) * summary.batch
        table.add_row(str(use.bucket), str(use.samples), str(use.batches), str(last))
    return table


def _skipped_table(skipped: Sequence[Skipped], most: int | None) -> Table:
    table = Table(title=f"Left out ({len(skipped)})", title_justify="left")
    table.add_column("File", overflow="fold")
    table.add_column("Reason", overflow="fold")
    for skip in skipped[:most]:
        table.add_row(Text(skip.relative), Text(skip.reason))
    if most is not None and len(skipped) > most:
        table.add_row(f"and {len(skipped) - most} more", "elbowroom inspect lists all")
    return table
