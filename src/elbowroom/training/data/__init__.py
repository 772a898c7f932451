"""From a folder of images to batches: scan it, choose buckets, order batches, cache what is encoded, tell it all."""

from .batches import Batch, accumulation_groups, batches_per_bucket, epoch_batches, steps_per_epoch
from .buckets import Bucket, bucket_for
from .cache import TensorCache
from .errors import DataError
from .images import MAX_PIXELS, ImageError, fit, load_image, to_tensor
from .scan import Sample, Scan, require_samples, scan
from .sheet import contact_sheet
from .summary import Summary, render, summarize
from .walk import Skipped

__all__ = [
    "MAX_PIXELS",
    "Batch",
    "Bucket",
    "DataError",
    "ImageError",
    "Sample",
    "Scan",
    "Skipped",
    "Summary",
    "TensorCache",
    "accumulation_groups",
    "batches_per_bucket",
    "bucket_for",
    "contact_sheet",
    "epoch_batches",
    "fit",
    "load_image",
    "render",
    "require_samples",
    "scan",
    "steps_per_epoch",
    "summarize",
    "to_tensor",
]
