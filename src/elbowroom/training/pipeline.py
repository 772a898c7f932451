"""A Diffusers pipeline on disk, opened one component at a time: what is not needed is never in memory."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from elbowroom.families import Family, family_of_pipeline
from elbowroom.memory.weights.mapped import map_weights
from elbowroom.training.placement import Placement

# Diffusers exports its classes lazily and by name, which type checkers can not follow.
diffusers: Any = importlib.import_module("diffusers")

MODEL_INDEX = "model_index.json"
_WHOLE_FILE_BYTES = 1 << 20


class ModelError(ValueError):
    """The model can't be trained or found; the message says why and what to do."""


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline in Diffusers' folder format, and the family it belongs to.

    Attributes:
        complete: whether the weights are there, and not only the configurations.
    """

    path: Path
    family: Family
    complete: bool = True

    @classmethod
    def open(cls, model: str, *, weights: bool = True) -> PipelineFolder:
        """Find a pipeline: a local folder, or the id of a repository on the Hugging Face hub.

        Args:
            model: path or id.
            weights: for an id, fetch everything; otherwise only the configurations, which is enough to check options.

        Raises:
            ModelError: there is no such folder or repository, or its kind of pipeline can't be trained.
        """
        local = Path(model).exists()
        path = Path(model) if local else _downloaded(model, weights=weights)
        if not (path / MODEL_INDEX).is_file():
            raise ModelError(
                f"{path} is not a pipeline in Diffusers' format: it has no {MODEL_INDEX}. A single checkpoint file is "
                "converted by Diffusers: FluxPipeline.from_single_file(FILE).save_pretrained(FOLDER)"
            )
        try:
            index = diffusers.DiffusionPipeline.load_config(str(path))
            name = index["_class_name"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path / MODEL_INDEX} can't be read: {error!r}") from None
        try:
            return cls(path, family_of_pipeline(name), complete=local or weights)
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from None

    @cached_property
    def components(self) -> tuple[str, ...]:
        """Names of the components that the folder holds."""
        index: dict[str, Any] = diffusers.DiffusionPipeline.load_config(str(self.path))
        return tuple(name for name, value in index.items() if isinstance(value, list) and value[0] is not None)

    @property
    def pipeline_class(self) -> Any:
        """The Diffusers class of the pipeline."""
        return getattr(diffusers, self.family.pipeline_class)

    def load(self, wanted: Sequence[str], dtype: torch.dtype, placement: Placement, **given: Any) -> Any:
        """Return a pipeline with the components in `wanted` loaded, those in `given` as they are, and no others."""
        absent = {name: None for name in self.components if name not in wanted and name not in given}
        pipeline = self.pipeline_class.from_pretrained(str(self.path), dtype=dtype, **absent, **given)
        pipeline.set_progress_bar_config(disable=True)
        for name in wanted:
            component = getattr(pipeline, name)
            if isinstance(component, nn.Module):
                placement.place(name, component)
        return pipeline

    def load_vae(self, dtype: torch.dtype, placement: Placement) -> Any:
        """Return the autoencoder, without gradients."""
        vae = diffusers.AutoencoderKL.from_pretrained(str(self.path), subfolder="vae", dtype=dtype)
        vae.eval().requires_grad_(False)
        placement.place("vae", vae)
        return vae

    def load_scheduler(self) -> Any:
        """Return the scheduler that the pipeline samples with."""
        return diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(str(self.path), subfolder="scheduler")

    def load_denoiser(self, dtype: torch.dtype, at: Path | None = None) -> Any:
        """Return the model that is trained, with its weights (those in the folder `at`, if given), on the CPU."""
        return self._denoiser_class.from_pretrained(str(at or self.path), subfolder=self.family.denoiser, dtype=dtype)

    def map_denoiser(self, dtype: torch.dtype) -> Any:
        """Return the model that is trained as it lies in its files, which are not read; it needs no gradients.

        Files in another number format have to be converted, so they are loaded.
        """
        kind = self._denoiser_class
        with init_empty_weights(include_buffers=False), _default_dtype(dtype):
            denoiser = kind.from_config(kind.load_config(str(self.path / self.family.denoiser)))
        denoiser.to(dtype)
        try:
            missing = map_weights(denoiser, self._weight_files(self.family.denoiser))
        except (OSError, ValueError):
            missing = [self.family.denoiser]
        if missing:
            return self.load_denoiser(dtype)
        precise = kind._keep_in_fp32_modules or ()
        for name, parameter in denoiser.named_parameters():
            if set(precise) & set(name.split(".")):
                parameter.data = parameter.data.float()
        denoiser.register_to_config(_name_or_path=str(self.path))
        return denoiser.eval()

    def meta_denoiser(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model that is trained on the meta device: all shapes, no memory."""
        config = self._denoiser_class.load_config(str(self.path / self.family.denoiser))
        with torch.device("meta"):
            return self._denoiser_class.from_config(config).to(dtype)

    def _weight_files(self, component: str) -> list[Path]:
        """Return the safetensors files of a component: those that the index names, or the only one."""
        folder = self.path / component
        index = folder / "diffusion_pytorch_model.safetensors.index.json"
        if not index.is_file():
            return [folder / "diffusion_pytorch_model.safetensors"]
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]

    def vae_config(self) -> Any:
        """Return the autoencoder on the meta device, for its configuration."""
        with torch.device("meta"):
            return diffusers.AutoencoderKL.from_config(diffusers.AutoencoderKL.load_config(str(self.path / "vae")))

    @property
    def _denoiser_class(self) -> Any:
        return getattr(diffusers, self.family.denoiser_class)

    def fingerprint(self, components: Sequence[str]) -> str:
        """Return a digest of the files of some components, which changes when their weights or settings do.

        Large files count by their size, first and last mebibyte: the first holds the header of a safetensors file with
        the name, type and place of every tensor.
        """
        digest = hashlib.sha256()
        for component in sorted(components):
            for file in sorted(path for path in (self.path / component).rglob("*") if path.is_file()):
                size = file.stat().st_size
                digest.update(f"{file.relative_to(self.path).as_posix()} {size}\n".encode())
                with file.open("rb") as stream:
                    digest.update(stream.read(_WHOLE_FILE_BYTES))
                    if size > _WHOLE_FILE_BYTES:
                        stream.seek(max(_WHOLE_FILE_BYTES, size - _WHOLE_FILE_BYTES))
                        digest.update(stream.read())
        return digest.hexdigest()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _downloaded(model: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        if weights:
            return Path(diffusers.DiffusionPipeline.download(model))
        return Path(snapshot_download(model, allow_patterns=["*.json", "*/*.json"]))
    except HFValidationError:
        raise ModelError(f"{model} does not exist, and is not the id of a repository (owner/name) either") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{model} is no local folder, and could not be fetched from the Hugging Face hub: {first_line}"
        ) from None
