"""Attention and feed-forward are found by name and kind in the blocks of Diffusers, or where patterns say."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import diffusers.models.transformers as transformers
import pytest
import torch
from torch import nn

import elbowroom
from elbowroom import Controls
from elbowroom.memory import ScopeModules
from elbowroom.memory.scopes import find_scopes
from tests.support.models import flux, sd3

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WIDE = {"dim": 32, **HEADS}
GROUPED = {"num_attention_heads": 2, "num_kv_heads": 2, "norm_eps": 1e-5}
JOINT = (("attn",), ("ff", "ff_context"))
TWO = ("attn1", "attn2")

# Class of a block: arguments of its constructor, attention, feed-forward.
BLOCKS: dict[str, tuple[dict, tuple[str, ...], tuple[str, ...]]] = {
    "FluxTransformerBlock": (WIDE, *JOINT),
    "Flux2TransformerBlock": (WIDE, *JOINT),
    "ChromaTransformerBlock": (WIDE, *JOINT),
    "JointTransformerBlock": (WIDE, *JOINT),
    "AuraFlowJointTransformerBlock": (WIDE, *JOINT),
    "HunyuanVideoTransformerBlock": ({**HEADS, "mlp_ratio": 2.0}, *JOINT),
    "QwenImageTransformerBlock": (WIDE, ("attn",), ("img_mlp", "txt_mlp")),
    "WanTransformerBlock": ({"dim": 32, "ffn_dim": 64, "num_heads": 2}, TWO, ("ffn",)),
    "LTXVideoTransformerBlock": ({**WIDE, "cross_attention_dim": 32}, TWO, ("ff",)),
    "CosmosTransformerBlock": ({**HEADS, "cross_attention_dim": 32}, TWO, ("ff",)),
    "SanaTransformerBlock": (
        {**WIDE, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32},
        TWO,
        ("ff",),
    ),
    "Lumina2TransformerBlock": (
        {"dim": 32, **GROUPED, "multiple_of": 8, "ffn_dim_multiplier": 1.0},
        ("attn",),
        ("feed_forward",),
    ),
    "OmniGenBlock": (
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-5,
        },
        ("self_attn",),
        ("mlp",),
    ),
    "Kandinsky5TransformerDecoderBlock": (
        {"model_dim": 32, "time_dim": 32, "ff_dim": 64, "head_dim": 16},
        ("self_attention", "cross_attention"),
        ("feed_forward",),
    ),
    "ZImageTransformerBlock": (
        {"layer_id": 0, "dim": 32, "n_heads": 2, "n_kv_heads": 2, "norm_eps": 1e-5, "qk_norm": True},
        ("attention",),
        ("feed_forward",),
    ),
}


def classes() -> dict[str, type[nn.Module]]:
    found = {}
    for module in pkgutil.iter_modules(transformers.__path__):
        loaded = importlib.import_module(f"{transformers.__name__}.{module.name}")
        for name, value in inspect.getmembers(loaded, inspect.isclass):
            if issubclass(value, nn.Module):
                found[name] = value
    from diffusers.models.attention import JointTransformerBlock

    return {**found, "JointTransformerBlock": JointTransformerBlock}


ALL = classes()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_diffusers(name):
    options, attention, feed_forward = BLOCKS[name]
    with torch.device("meta"):
        block = ALL[name](**options)
    assert find_scopes(block) == ScopeModules(attention, feed_forward)


def test_families_say_what_names_do_not():
    blocks = {block.name: block.modules for block in elbowroom.schedule(flux(), Controls()).blocks}
    assert blocks["transformer_blocks.0"] == ScopeModules(("attn",), ("ff", "ff_context"))
    assert blocks["single_transformer_blocks.0"] == ScopeModules(("attn",), ("proj_mlp", "act_mlp", "proj_out"))
    assert elbowroom.schedule(sd3(), Controls()).blocks[-1].modules == ScopeModules(("attn",), ("ff",))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.expand, self.shrink = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm_attn, self.ff_norm, self.attn_gate = nn.LayerNorm(4), nn.LayerNorm(4), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


def test_names_that_only_sound_like_a_scope():
    assert find_scopes(Layer()) == ScopeModules()


@pytest.mark.parametrize("patterns", [["layers.*.mixer"], ["*.mixer"]])
def test_the_user_names_scopes(patterns):
    scopes = {"attention": patterns, "feed_forward": ["layers.*.expand", "layers.*.shrink"]}
    plan = elbowroom.schedule(Model(), Controls(activation_offload=("attention",)), blocks=["layers.*"], scopes=scopes)
    assert plan.strip() == "okk okk"
    assert plan.blocks[1].modules == ScopeModules(("mixer",), ("expand", "shrink"))


@pytest.mark.parametrize(
    ("scopes", "message"),
    [
        ({"attention": ["layers.*.attn"]}, r"'layers\.\*\.attn' \(attention\) names no module inside a block of Model"),
        ({"attn": ["layers.*.mixer"]}, "there is no scope 'attn'"),
        ({"attention": "layers.*.mixer"}, "must be a list"),
        ({"attention": ["*.mixer"], "feed_forward": ["*.mixer"]}, "would be in both scopes"),
    ],
)
def test_bad_scopes_are_refused(scopes, message):
    with pytest.raises(ValueError, match=message):
        elbowroom.schedule(Model(), Controls(), blocks=["layers.*"], scopes=scopes)
