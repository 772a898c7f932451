"""The demo's recipes agree with its scripts, and the trainer accepts them."""

from pathlib import Path

import pytest

import pictures
import text_encoders
from elbowroom.options.reading import read

FOLDER = Path(pictures.__file__).parent


@pytest.mark.parametrize("recipe", ["base.toml", "heart.toml"])
def test_the_trainer_accepts_the_recipe(recipe):
    options = read(FOLDER / recipe, {}, {}).options
    assert options.resolution == pictures.SIDE
    assert options.max_sequence_length == text_encoders.MAX_TOKENS
    assert options.run_folder.resolve() == FOLDER.parents[1] / "runs" / options.name


def test_the_heart_recipe_draws_the_prompts_that_the_demo_counts():
    options = read(FOLDER / "heart.toml", {}, {}).options
    assert tuple(options.validation_prompts) == pictures.HEART_PROMPTS


def test_no_caption_of_the_base_mentions_a_heart():
    assert not any(pictures.NEW_SHAPE in text for _, text in pictures.pairs(pictures.split()[0], count=400, seed=0))
