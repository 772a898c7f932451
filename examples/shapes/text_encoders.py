"""The demo's two text encoders with their tokenizers, trained on the demo's captions in a minute or two.

A caption goes to both: T5 gives the denoiser one vector per token, CLIP one pooled vector for all of it. Each
is trained with small heads that are thrown away afterwards. One set of heads must tell size, both colours and shape
from the mean token (T5) or the pooled vector (CLIP), which forces the encoder to work out which colour belongs to what.
Another must tell which pieces the caption was made of, so that a word which the captions of the base never use still
reaches the denoiser as itself: in part of the training captions, an invented word stands for the shape.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from pictures import BASE_SHAPES, PALETTE, SIZES, Description, caption, held_out_captions, parse, split

MAX_TOKENS = 24  # a caption of the demo has 8 to 16; the denoiser attends to all 24
WIDTH = 96  # of both encoders' outputs
INVENTED_SHARE = 0.3  # of the training captions have an invented word for the shape
WORD_START = "▁"  # SentencePiece's mark, U+2581
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 256))]  # what T5's tokenizer can spell: Latin-1
STEPS, BATCH, LEARNING_RATE = 1500, 64, 2e-3

ATTRIBUTES: dict[str, list[str]] = {
    "size": list(SIZES),
    "colour": list(PALETTE),
    "shape": [*BASE_SHAPES, "other"],
    "background": list(PALETTE),
}


def invented_word(generator: random.Random) -> str:
    """A pronounceable word of 3 to 6 letters, such as "tofuki"."""
    letters = ("bcdfghjklmnpqrstvwxyz", "aeiou")
    first = generator.randrange(2)
    return "".join(generator.choice(letters[(first + place) % 2]) for place in range(generator.randint(3, 6)))


def captions(seed: int) -> Iterator[tuple[str, Description]]:
    """Endless training captions; a description's shape is "other" where its word is invented."""
    generator = random.Random(seed)
    descriptions = split()[0]
    while True:
        asked = generator.choice(descriptions)
        text = caption(asked, generator)
        if generator.random() < INVENTED_SHARE:
            text = text.replace(asked.shape, invented_word(generator))
            asked = Description(asked.size, asked.colour, "other", asked.background)
        yield text, asked


def corpus(seed: int, count: int = 2000) -> list[str]:
    """Captions to train a tokenizer on: no invented words, so that only the captions' own words become whole tokens."""
    generator = random.Random(seed)
    return [caption(generator.choice(split()[0]), generator) for _ in range(count)]


def make_clip_tokenizer(seed: int) -> CLIPTokenizer:
    """Byte-pair encoding as CLIP's: whole words for the captions' words, bytes for everything else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = normalizers.Lowercase()
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])
    trained.train_from_iterator(corpus(seed), trainers.BpeTrainer(end_of_word_suffix="</w>", show_progress=False))
    merges = [tuple(merge) for merge in _serialized(trained)["model"]["merges"]]
    # Every byte, inside and at the end of a word, has a token, so no text needs an unknown token.
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *("".join(merge) for merge in merges)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    arguments: dict[str, Any] = {"vocab": vocabulary, "merges": merges}
    return CLIPTokenizer(**arguments, model_max_length=MAX_TOKENS)


def make_t5_tokenizer(seed: int) -> T5Tokenizer:
    """A unigram tokenizer as T5's: whole words for the captions' words, letters for everything else.

    The vocabulary is settled by hand, so a piece's log-likelihood is the logarithm of its share, and nothing has to be
    searched. (The trainer of the `tokenizers` library cuts "a" and "on" into letters, since few pieces pay for it.)
    """
    words = Counter(word for text in corpus(seed) for word in re.findall(r"\w+", text))
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, WORD_START: 0.0}
    pieces |= {WORD_START + word: math.log(count / words.total()) for word, count in words.most_common()}
    rarest = min(pieces.values())
    pieces |= dict.fromkeys([WORD_START, *LETTERS], rarest)  # so that a known word always beats its spelling
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=MAX_TOKENS)


def make_clip(tokenizer: CLIPTokenizer, seed: int) -> tuple[CLIPTextModel, float]:
    """A trained CLIP text model, and the share of held-out captions whose pooled vector tells every attribute."""
    torch.manual_seed(seed)
    vocabulary = tokenizer.get_vocab()
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            projection_dim=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=vocabulary["<|startoftext|>"],
            eos_token_id=vocabulary["<|endoftext|>"],
            pad_token_id=vocabulary["<|endoftext|>"],
        )
    )

    def look(ids: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        pooled = encoder(ids).pooler_output
        present = torch.zeros(len(ids), len(tokenizer)).scatter_(1, ids, 1.0)
        # Nearly all pieces are absent; weighing the present ones up keeps "none at all" from being a good answer.
        weight = torch.tensor(20.0)
        return pooled, functional.binary_cross_entropy_with_logits(heads.pieces(pooled), present, pos_weight=weight)

    accuracy = _train(encoder, tokenizer, look, seed)
    return encoder, accuracy


def make_t5(tokenizer: T5Tokenizer, seed: int) -> tuple[T5EncoderModel, float]:
    """A trained T5 encoder, and the share of held-out captions whose tokens tell every attribute."""
    torch.manual_seed(seed)
    vocabulary = tokenizer.get_vocab()
    encoder = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=WIDTH,
            d_kv=WIDTH // 4,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=MAX_TOKENS,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=vocabulary["<pad>"],
            eos_token_id=vocabulary["</s>"],
        )
    )

    def look(ids: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
        # No attention mask, because pipelines give none: the encoder has to cope with the padding.
        states = encoder(ids).last_hidden_state
        return states.mean(dim=1), functional.cross_entropy(heads.pieces(states).flatten(0, 1), ids.flatten())

    accuracy = _train(encoder, tokenizer, look, seed)
    return encoder, accuracy


class Heads(nn.Module):
    """Linear maps from a vector of `WIDTH` to the attributes and to the tokens; thrown away after training."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.attributes = nn.ModuleDict({name: nn.Linear(WIDTH, len(values)) for name, values in ATTRIBUTES.items()})
        self.pieces = nn.Linear(WIDTH, vocabulary)


Look = Callable[[Tensor, Heads], tuple[Tensor, Tensor]]  # token ids, (B, L) -> summaries, (B, WIDTH); loss of pieces


def _train(encoder: nn.Module, tokenizer: CLIPTokenizer | T5Tokenizer, look: Look, seed: int) -> float:
    """Train in place; returns the share of held-out captions of which all attributes are told right."""
    heads = Heads(len(tokenizer))
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    stream = captions(seed)
    encoder.train()
    for _ in range(STEPS):
        texts, asked = zip(*(next(stream) for _ in range(BATCH)), strict=True)
        summary, loss = look(_tokenize(tokenizer, texts), heads)
        for name, head in heads.attributes.items():
            loss = loss + functional.cross_entropy(head(summary), _targets(name, asked))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    encoder.eval()
    texts = held_out_captions(400)
    asked = [parse(text) for text in texts]
    with torch.no_grad():
        summary, _ = look(_tokenize(tokenizer, texts), heads)
        right = [head(summary).argmax(1) == _targets(name, asked) for name, head in heads.attributes.items()]
    return torch.stack(right).all(dim=0).float().mean().item()


def _tokenize(tokenizer: CLIPTokenizer | T5Tokenizer, texts: Sequence[str]) -> Tensor:
    return tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt").input_ids


def _targets(attribute: str, asked: Sequence[Description]) -> Tensor:
    return torch.tensor([ATTRIBUTES[attribute].index(getattr(one, attribute)) for one in asked])


def _serialized(tokenizer: Tokenizer) -> dict:
    return json.loads(tokenizer.to_str())
