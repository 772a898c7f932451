"""Tiny pipelines with random weights, in Diffusers' folder format, with tokenizers made on the spot."""

from __future__ import annotations

import json
import string
from pathlib import Path

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.models import denoiser

TEXT_WIDTH = {"flux": 32, "sd3": 32}


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """Every byte is a token, at the end of a word or not: any text can be encoded."""
    letters = sorted(ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {word: index for index, word in enumerate(words)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=24)


def t5_tokenizer() -> transformers.T5Tokenizer:
    """Every printable character is a token."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in string.printable if not letter.isspace()]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=24)


def clip(width: int, projection: int | None = None) -> torch.nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=len(clip_tokenizer()), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=24, projection_dim=projection or width, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(config)


def t5(width: int) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=len(t5_tokenizer()), d_model=width, d_kv=8, d_ff=2 * width, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5EncoderModel(config)


def autoencoder(channels: int) -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, latent_channels=channels,
        scaling_factor=1.5, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def build_pipeline(family: str, folder: Path, seed: int = 0) -> Path:
    """Save a tiny pipeline of the family into `folder` and return it. Pictures are multiples of 4 pixels."""
    torch.manual_seed(seed)
    scheduler = {
        "flux": {"use_dynamic_shifting": True, "base_image_seq_len": 16, "max_image_seq_len": 64},
        "sd3": {"shift": 3.0},
    }[family]
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduler),
        "vae": autoencoder(4),
        "transformer": denoiser(family),
        "tokenizer": clip_tokenizer(),
    }
    if family == "flux":
        parts |= {"text_encoder": clip(32), "text_encoder_2": t5(32), "tokenizer_2": t5_tokenizer()}
    else:
        parts |= {"text_encoder": clip(16, 32), "text_encoder_2": clip(16, 32), "tokenizer_2": clip_tokenizer()}
        parts |= {"text_encoder_3": t5(32), "tokenizer_3": t5_tokenizer()}
    name = {"flux": "FluxPipeline", "sd3": "StableDiffusion3Pipeline"}[family]
    getattr(diffusers, name)(**parts).save_pretrained(folder)
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == name
    return folder
