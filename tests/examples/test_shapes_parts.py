"""The demo's tokenizers, captions for the text encoders, denoiser and assembly; the base itself, if it is there."""

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

import assemble
import evaluate
import make_parts
import text_encoders
from checker import matches
from pictures import NEW_SHAPE, SIDE, caption, combinations, parse, split

UNSEEN = ["a heart", "Zebra, 3 violins & a QUARTZ sphinx!", "déjà vu", "xylophonists' jukebox"]


@pytest.fixture(scope="module", params=[text_encoders.make_clip_tokenizer, text_encoders.make_t5_tokenizer])
def tokenizer(request):
    return request.param(0)


def test_words_of_captions_are_whole_tokens_and_captions_fit(tokenizer):
    generator = random.Random(5)
    for description in split()[1]:
        text = caption(description, generator)
        ids = tokenizer(text).input_ids
        pieces = len(text.replace(",", " ,").replace(".", " .").split())
        assert len(ids) - pieces in (1, 2), (text, tokenizer.convert_ids_to_tokens(ids))  # end, and CLIP's start
        assert len(ids) <= text_encoders.MAX_TOKENS


def test_captions_with_hearts_fit_too(tokenizer):
    generator = random.Random(5)
    for description in combinations((NEW_SHAPE,)):
        assert len(tokenizer(caption(description, generator)).input_ids) <= text_encoders.MAX_TOKENS


@pytest.mark.parametrize("text", UNSEEN)
def test_words_that_were_never_seen_are_spelled_and_not_unknown(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids
    assert tokenizer.unk_token_id not in ids
    spelled = tokenizer.decode(ids).replace(" ", "").lower()
    assert spelled == text.replace(" ", "").lower()


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    assert loaded.model_max_length == text_encoders.MAX_TOKENS
    for text in [*UNSEEN, "a large red circle on a blue background"]:
        options = {"padding": "max_length", "truncation": True}
        assert loaded(text, **options).input_ids == tokenizer(text, **options).input_ids


def test_part_of_the_training_captions_have_an_invented_shape():
    texts = list(islice(text_encoders.captions(0), 400))
    invented = [text for text, asked in texts if asked.shape == "other"]
    assert 0.2 < len(invented) / len(texts) < 0.4
    for text, asked in texts:
        if asked.shape == "other":
            with pytest.raises(ValueError, match="one shape"):
                parse(text)
        else:
            assert parse(text) == asked
    assert not any("heart" in text.lower() for text, _ in texts)


def test_the_denoiser_fits_into_the_repository_and_starts_the_same_every_time():
    first, second = make_parts.make_denoiser(0), make_parts.make_denoiser(0)
    assert sum(weight.numel() for weight in first.parameters()) * 2 / 1e6 < 8, "megabytes in bfloat16"
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def parts(tmp_path):
    """A pipeline with the demo's tokenizers, scheduler and denoiser, but tiny untrained other parts."""
    clip_tokenizer, t5_tokenizer = text_encoders.make_clip_tokenizer(0), text_encoders.make_t5_tokenizer(0)
    width = text_encoders.WIDTH
    clip = CLIPTextConfig(
        vocab_size=len(clip_tokenizer),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=text_encoders.MAX_TOKENS,
        eos_token_id=clip_tokenizer.eos_token_id,
    )
    t5 = T5Config(vocab_size=len(t5_tokenizer), d_model=width, d_kv=16, d_ff=width, num_layers=1, num_heads=2)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=16,
        norm_num_groups=1,
        shift_factor=0.1,
    )
    pipeline = FluxPipeline(
        scheduler=make_parts.make_scheduler(),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=clip_tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=t5_tokenizer,
        transformer=make_parts.make_denoiser(0),
    )
    pipeline.save_pretrained(tmp_path / "parts")
    return tmp_path / "parts"


def test_assembling_keeps_all_parts_but_the_denoiser_which_is_halved(parts, tmp_path):
    trained = make_parts.make_denoiser(1)
    trained.save_pretrained(tmp_path / "trained")
    assemble.assemble(parts, tmp_path / "trained", tmp_path / "whole")
    size = {path: assemble.weights_in_megabytes(path / "transformer") for path in (parts, tmp_path / "whole")}
    assert size[tmp_path / "whole"] == pytest.approx(size[parts] / 2, rel=0.01)
    whole, before = FluxPipeline.from_pretrained(tmp_path / "whole"), FluxPipeline.from_pretrained(parts)
    assert torch.equal(whole.vae.decoder.conv_out.weight, before.vae.decoder.conv_out.weight)
    for loaded, weight in zip(whole.transformer.parameters(), trained.parameters(), strict=True):
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, weight.bfloat16().float())
    for file in (tmp_path / "whole").rglob("*.json"):
        assert str(tmp_path) not in file.read_text(encoding="utf-8"), f"{file} tells where it was made"


def test_evaluating_an_untrained_pipeline_finds_nothing_and_says_so(parts, tmp_path, monkeypatch, capsys):
    sheet = tmp_path / "sheets" / "sheet.png"
    arguments = [str(parts), "--heart", "--steps", "2", "--at-least", "0.5", "--sheet", str(sheet)]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *arguments])
    assert evaluate.main() == 1
    captured = capsys.readouterr()
    assert "0 of 10 pictures" in captured.out
    assert "fewer than the 50%" in captured.err
    with evaluate.Image.open(sheet) as image:
        assert image.size == (5 * (SIDE + 6), 2 * (SIDE + 6))


def test_a_picture_is_the_same_in_every_batch(parts, monkeypatch):
    pipeline = evaluate.load(parts, lora=None)
    prompts = ["a large red circle on white", "a small blue square on black", "a small white diamond on red"]
    together = evaluate.sample(pipeline, prompts, steps=2, seed=3)
    monkeypatch.setattr(evaluate, "BATCH", 2)
    apart = evaluate.sample(pipeline, prompts, steps=2, seed=3)
    for one, other in zip(together, apart, strict=True):
        difference = np.asarray(one, dtype=int) - np.asarray(other, dtype=int)
        assert abs(difference).max() <= 1


def test_the_table_counts_by_shape_and_in_all():
    asked = [parse("a large red circle on white"), parse("a large red square on white")]
    verdicts = [evaluate.verdict(asked[0], asked[0]), evaluate.verdict(asked[0], asked[1])]
    lines = evaluate.table(asked, verdicts).splitlines()
    assert lines[1].split() == ["circle", "1", "100.0%", "100.0%", "100.0%", "100.0%", "100.0%"]
    assert lines[2].split() == ["square", "1", "0.0%", "0.0%", "100.0%", "100.0%", "100.0%"]
    assert lines[3].split() == ["every", "shape", "2", "50.0%", "50.0%", "100.0%", "100.0%", "100.0%"]


BASE = Path(evaluate.__file__).parent / "base"
base = pytest.mark.skipif(not BASE.is_dir(), reason="the base is not trained yet (examples/shapes/README)")


@base
def test_the_base_is_a_whole_flux_pipeline_of_at_most_12_megabytes():
    index = json.loads((BASE / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    assert assemble.weights_in_megabytes(BASE) <= assemble.MOST_MEGABYTES
    pipeline = FluxPipeline.from_pretrained(BASE)
    assert isinstance(pipeline.tokenizer, CLIPTokenizer)
    assert isinstance(pipeline.tokenizer_2, T5Tokenizer)
    assert isinstance(pipeline.transformer, FluxTransformer2DModel)


@base
def test_the_base_draws_what_held_out_captions_say():
    pipeline = evaluate.load(BASE, lora=None)
    texts = evaluate.held_out_captions(25)
    right = [
        matches(picture, text) for picture, text in zip(evaluate.sample(pipeline, texts, 16, 0), texts, strict=True)
    ]
    assert sum(right) >= 20
