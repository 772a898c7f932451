"""Captions and pictures are encoded once, into the cache; the encoders are in memory only meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from elbowroom.families import Conditioning
from elbowroom.training.data.buckets import Bucket
from elbowroom.training.data.cache import TensorCache
from elbowroom.training.data.images import fit, load_image, to_tensor
from elbowroom.training.data.scan import Sample
from elbowroom.training.pipeline import PipelineFolder
from elbowroom.training.placement import Placement

Progress = Callable[[str, int, int], None]
"""Called with what is being encoded, how much is done, and how much there is."""


_FORMAT = 1
"""Part of every key. Raise it when captions or pictures are prepared in another way, so that they are encoded anew."""


class CacheMissError(RuntimeError):
    """Something that was encoded before training is no longer in the cache."""


@dataclass(frozen=True)
class Encoded:
    """Where the encoded captions and pictures are.

    Attributes:
        cache: holds the tensors.
        captions: key of each caption.
        samples: key of each sample, in the order of the scan.
    """

    cache: TensorCache
    captions: dict[str, str]
    samples: tuple[str, ...]

    def conditioning(self, captions: Sequence[str], device: torch.device) -> Conditioning:
        """Return the conditioning of a batch of captions."""
        entries = [self._get(self.captions[caption], f"the caption {caption!r}") for caption in captions]
        return {name: torch.cat([entry[name] for entry in entries]).to(device) for name in entries[0]}

    def latents(self, indices: Sequence[int], generator: torch.Generator, device: torch.device) -> torch.Tensor:
        """Draw latents of a batch of samples from the distributions that the autoencoder gave them."""
        entries = [self._get(self.samples[index], f"picture number {index}") for index in indices]
        mean = torch.cat([entry["mean"] for entry in entries]).float()
        deviation = torch.cat([entry["deviation"] for entry in entries]).float()
        return (mean + deviation * torch.randn(mean.shape, generator=generator)).to(device)

    def _get(self, key: str, what: str) -> dict[str, torch.Tensor]:
        tensors = self.cache.get(key)
        if tensors is None:
            raise CacheMissError(
                f"{what} is no longer in the cache {self.cache.folder}; the same command encodes it anew"
            )
        return tensors


def encode_captions(
    folder: PipelineFolder,
    captions: Iterable[str],
    cache: TensorCache,
    *,
    max_sequence_length: int,
    dtype: torch.dtype,
    placement: Placement,
    progress: Progress,
) -> dict[str, str]:
    """Make sure that every caption is in the cache, and return the key of each."""
    components = [name for name in folder.family.text_components if name in folder.components]
    settings = {
        "format": _FORMAT,
        "kind": "caption",
        "family": folder.family.name,
        "encoders": folder.fingerprint(components),
        "max_sequence_length": max_sequence_length,
        "dtype": str(dtype),
    }
    keys = {caption: cache.key(caption=caption, **settings) for caption in captions}
    missing = [caption for caption, key in keys.items() if cache.get(key) is None]
    if missing:
        pipeline = folder.load(components, dtype, placement)
        for done, caption in enumerate(missing):
            progress("captions", done, len(missing))
            # One at a time: what is stored must not depend on which other captions there are.
            with torch.no_grad():
                conditioning = folder.family.encode_captions(pipeline, [caption], max_sequence_length)
            cache.put(keys[caption], conditioning, f"the caption {caption!r}")
        progress("captions", len(missing), len(missing))
        del pipeline
        release_memory()
    return keys


def encode_samples(
    folder: PipelineFolder,
    samples: Sequence[Sample],
    buckets: Sequence[Bucket],
    cache: TensorCache,
    *,
    dtype: torch.dtype,
    placement: Placement,
    progress: Progress,
) -> tuple[str, ...]:
    """Make sure that the latents of every sample are in the cache, and return their keys in order."""
    settings = {"format": _FORMAT, "kind": "picture", "vae": folder.fingerprint(["vae"]), "dtype": str(dtype)}
    keys = [
        cache.key(file=sample.relative, digest=sample.digest, width=bucket.width, height=bucket.height, **settings)
        for sample, bucket in zip(samples, buckets, strict=True)
    ]
    missing = [index for index, key in enumerate(keys) if cache.get(key) is None]
    if missing:
        vae = folder.load_vae(dtype, placement)
        for done, index in enumerate(missing):
            progress("pictures", done, len(missing))
            sample, bucket = samples[index], buckets[index]
            pixels = to_tensor(fit(load_image(sample.path), bucket.width, bucket.height))
            with torch.no_grad():
                mean, deviation = folder.family.encode_pixels(vae, pixels[None].to(placement.device, dtype))
            cache.put(keys[index], {"mean": mean, "deviation": deviation}, sample.relative)
        progress("pictures", len(missing), len(missing))
        del vae
        release_memory()
    return tuple(keys)


def release_memory() -> None:
    """Give memory that nothing refers to any more back to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
