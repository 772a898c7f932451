"""What a family does in training is what its pipeline does in sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from elbowroom.families import FAMILIES, family_of_pipeline
from elbowroom.training.flow_matching import FlowMatching
from tests.support.models import denoiser
from tests.support.pipelines import build_pipeline


@pytest.fixture(scope="module", params=["flux", "flux with guidance", "sd3"])
def pipeline(request, tmp_path_factory) -> Any:
    family, _, guided = request.param.partition(" ")
    folder: Path = build_pipeline(family, tmp_path_factory.mktemp(family))
    given = {"transformer": denoiser(family, guidance_embeds=True)} if guided else {}
    found = diffusers.DiffusionPipeline.from_pretrained(folder, **given)
    found.set_progress_bar_config(disable=True)
    return found


def test_the_denoiser_is_called_as_the_pipeline_calls_it(pipeline):
    family = family_of_pipeline(type(pipeline).__name__)
    conditioning = family.encode_captions(pipeline, ["a red circle"], 20)
    unconditional = family.encode_captions(pipeline, [""], 20)
    noisy = torch.randn(1, 4, 16, 24, generator=torch.Generator().manual_seed(1))
    packed = pipeline._pack_latents(noisy, 1, 4, 16, 24) if family.name == "flux" else noisy
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []

    def remember(module, args, kwargs, output):
        calls.append((kwargs, output[0]))

    hook = pipeline.transformer.register_forward_hook(remember, with_kwargs=True)
    arguments = family.sampling_arguments(conditioning, unconditional)
    guidance = 2.5 if family.name == "flux" else 1.0
    pipeline(**arguments, latents=packed, height=32, width=48, num_inference_steps=2, guidance_scale=guidance)
    (given, velocity), *_ = calls
    with torch.no_grad():
        predicted = family.predict_velocity(
            pipeline.transformer, noisy, given["timestep"] / (1 if family.name == "flux" else 1000), conditioning, 2.5
        )
    hook.remove()
    ours, output = calls[-1]
    assert torch.equal(output, velocity)
    assert predicted.shape == noisy.shape
    if family.name == "flux":
        assert torch.equal(pipeline._pack_latents(predicted, 1, 4, 16, 24), velocity)
        assert (ours["guidance"] is None) == (not pipeline.transformer.config.guidance_embeds)
    else:
        assert torch.equal(predicted, velocity)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, ours[name]), name


def test_latents_decode_to_the_picture(pipeline):
    """Encoding shifts and scales as the pipeline's decoding expects it."""
    family = family_of_pipeline(type(pipeline).__name__)
    pixels = torch.rand(1, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        mean, deviation = family.encode_pixels(pipeline.vae, pixels)
        plain = pipeline.vae.encode(pixels).latent_dist
    assert torch.allclose(mean / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor, plain.mean)
    assert torch.allclose(deviation / pipeline.vae.config.scaling_factor, plain.std)


def test_pixel_step_is_what_the_pipeline_accepts(pipeline):
    family = family_of_pipeline(type(pipeline).__name__)
    assert family.pixel_step(pipeline.vae, pipeline.transformer) == pipeline.vae_scale_factor * 2 == 4
    assert family.image_tokens(torch.zeros(1, 4, 16, 24)) == 8 * 12


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_default_lora_targets_exist(family):
    names = [name for name, _ in denoiser(family.name).named_modules()]
    for target in family.lora_targets:
        assert any(name == target or name.endswith(f".{target}") for name in names), target


def test_the_shift_is_the_schedulers(pipeline):
    """The noise levels of training are shifted as the scheduler shifts those of sampling."""
    scheduler = pipeline.scheduler
    uniform = torch.linspace(1.0, 0.1, 10, dtype=torch.float64)
    config = scheduler.config
    tokens = 40
    mu = None
    if config.use_dynamic_shifting:
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
    scheduler.set_timesteps(sigmas=uniform.tolist(), mu=mu)
    objective = FlowMatching(scheduler, "uniform")
    drawn = objective.draw_sigmas(10_000, tokens, torch.Generator().manual_seed(0)).double()
    plain = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).double()
    nearest = [(plain - value).abs().argmin() for value in uniform]
    at_points = torch.stack([drawn[index] for index in nearest])
    assert torch.allclose(at_points, scheduler.sigmas[:-1].double(), atol=2e-3)
    assert drawn.min() >= 0 and drawn.max() <= 1


def test_logit_normal_and_a_shift_of_ones_own():
    objective = FlowMatching(None, "logit_normal", logit_mean=0.5, logit_std=0.8, shift=3.0)
    drawn = objective.draw_sigmas(20_000, 1, torch.Generator().manual_seed(0))
    plain = drawn / (3 - 2 * drawn)  # the inverse of the shift
    logits = torch.logit(plain)
    assert logits.mean().item() == pytest.approx(0.5, abs=0.02)
    assert logits.std().item() == pytest.approx(0.8, abs=0.02)


def test_the_target_is_the_velocity_from_data_to_noise():
    clean, noise = torch.randn(3, 4, 2, 2), torch.randn(3, 4, 2, 2)
    sigmas = torch.tensor([0.0, 0.25, 1.0])
    mixed = FlowMatching.mix(clean, noise, sigmas)
    assert torch.equal(mixed[0], clean[0]) and torch.equal(mixed[2], noise[2])
    # Going along the velocity for the rest of the way arrives at the noise.
    assert torch.allclose(mixed[1] + 0.75 * (noise - clean)[1], noise[1], atol=1e-6)
    assert torch.equal(FlowMatching.losses(noise - clean, clean, noise), torch.zeros(3))
    assert FlowMatching.losses(torch.zeros_like(clean), clean, noise).shape == (3,)
