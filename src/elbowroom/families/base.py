"""What the trainer needs to know about one kind of model: data first, code where data is not enough."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

Conditioning = dict[str, torch.Tensor]
"""What a caption becomes: named tensors, each with the batch as dimension 0."""


class Family(ABC):
    """One kind of diffusion model. Subclasses are stateless; the registry holds one instance of each.

    Attributes:
        name: short name, as users type it.
        modality: what the model generates.
        pipeline_class: name of the Diffusers pipeline class that loads a released checkpoint.
        denoiser: name of the pipeline component that is trained.
        denoiser_class: name of its Diffusers class.
        text_components: names of the components that turn captions into conditioning.
        blocks: for the denoiser's class, and for related classes that are trained with it (ControlNets): patterns of
            the blocks in execution order (see `elbowroom.memory.find_blocks`).
        scopes: for classes of blocks whose parts can't be told by name and kind: patterns of the modules that form each
            scope, relative to the block (see `elbowroom.memory.scopes`).
        lora_targets: default names of the linear layers that get a LoRA (PEFT's `target_modules`).
        max_sequence_length: default number of tokens that a caption is padded or cut to by the large text encoder.
        guidance: what `guidance_scale` means for the pipeline when it draws validation pictures; the default value.
        tiny_denoiser: a configuration of the denoiser for tests: every kind of block, at most a second a step.
    """

    name: ClassVar[str]
    modality: ClassVar[str]
    pipeline_class: ClassVar[str]
    denoiser: ClassVar[str]
    denoiser_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    blocks: ClassVar[Mapping[str, tuple[str, ...]]]
    scopes: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}
    lora_targets: ClassVar[tuple[str, ...]]
    max_sequence_length: ClassVar[int]
    guidance: ClassVar[float]
    tiny_denoiser: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def pixel_step(self, vae: Any, denoiser: Any) -> int:
        """Return what width and height of a picture must be multiples of, in pixels."""

    @abstractmethod
    def encode_captions(self, pipeline: Any, captions: Sequence[str], max_sequence_length: int) -> Conditioning:
        """Run the text encoders of `pipeline` (whose other components may be None) on a batch of captions."""

    @abstractmethod
    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of the normalised latents of `pixels`.

        Args:
            vae: the pipeline's autoencoder.
            pixels: (batch, 3, height, width), from -1 to 1.

        Returns:
            Two tensors of shape (batch, channels, height / scale, width / scale).
        """

    @abstractmethod
    def image_tokens(self, latents: torch.Tensor) -> int:
        """Return the number of tokens that the denoiser makes of one sample of `latents`."""

    @abstractmethod
    def predict_velocity(
        self, denoiser: Any, noisy: torch.Tensor, sigmas: torch.Tensor, conditioning: Conditioning, guidance: float
    ) -> torch.Tensor:
        """Run the denoiser once.

        Args:
            denoiser: the model.
            noisy: (batch, channels, height, width) latents, `(1 - sigma) * clean + sigma * noise`.
            sigmas: (batch,) noise levels between 0 and 1.
            conditioning: what `encode_captions` returned, batched.
            guidance: value for models with a guidance embedding; others have none and ignore it.

        Returns:
            The predicted velocity `noise - clean`, in the shape of `noisy`.
        """

    @abstractmethod
    def sampling_arguments(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, Any]:
        """Return the arguments that make the pipeline draw from encoded captions instead of from text."""
