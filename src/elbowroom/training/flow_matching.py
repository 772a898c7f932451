"""The flow-matching objective: predict the velocity from data to noise (Lipman et al. 2023; Esser et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling


@dataclass(frozen=True)
class FlowMatching:
    """How noise levels are drawn, and the loss.

    Attributes:
        scheduler: the pipeline's `FlowMatchEulerDiscreteScheduler`, whose shift is used in training too.
        sampling: distribution of the noise levels before the shift.
        logit_mean, logit_std: of the normal distribution behind `logit_normal`.
        shift: a shift that replaces the scheduler's, or None.
    """

    scheduler: Any
    sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    shift: float | None = None

    def draw_sigmas(self, count: int, image_tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `count` noise levels between 0 and 1 as float32 on the CPU.

        Args:
            count: how many.
            image_tokens: tokens per picture; a scheduler with dynamic shifting shifts more when there are more.
            generator: a CPU generator, so that a seed means the same on every device.
        """
        drawn = compute_density_for_timestep_sampling(
            "logit_normal" if self.sampling == "logit_normal" else "none",
            count,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            generator=generator,
        )
        if self.shift is not None:
            return _shifted(drawn, self.shift)
        config = self.scheduler.config
        if not config.use_dynamic_shifting:
            return _shifted(drawn, config.shift)
        mu = calculate_shift(
            image_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        return self.scheduler.time_shift(mu, 1.0, drawn)

    @staticmethod
    def mix(clean: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
        """Return `(1 - sigma) * clean + sigma * noise`, with one sigma a sample (dimension 0)."""
        weights = sigmas.to(clean).view(-1, *[1] * (clean.dim() - 1))
        return (1 - weights) * clean + weights * noise

    @staticmethod
    def losses(velocity: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of each sample as float32, shape (batch,)."""
        return (velocity.float() - (noise - clean).float()).square().flatten(1).mean(1)


def _shifted(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * sigmas / (1 + (shift - 1) * sigmas)
