"""The checks of Days 6 and 7 on the real model: attention and block against the oracle's hooks."""

import pytest
import torch

from nanoserve.layers import block, gqa_attention, rope_tables
from nanoserve.model import load_model
from nanoserve.oracle import load_oracle
from nanoserve.tokenizer import load_tokenizer
from tests.bounds import apart, assert_near

LAYERS = [f"model.layers.{i}" for i in range(30)]


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def seen():
    text = "The old lighthouse keeper climbed the stairs every evening, 365 times a year. 東京"
    ids = torch.tensor([load_tokenizer().encode(text)])
    return load_oracle().capture(ids, LAYERS + [f"{name}.self_attn" for name in LAYERS])


def tables(model, x):
    return rope_tables(model.config, x.shape[1])


def test_attention_of_layer_0_is_the_oracles(model, seen):
    hook = seen["model.layers.0.self_attn"]
    ours = gqa_attention(hook.input, model.layers[0], *tables(model, hook.input), model.config)
    assert_near(ours, hook.output)


def test_scrambled_kv_heads_are_far_from_the_oracle(model, seen):
    hook, layer = seen["model.layers.0.self_attn"], model.layers[0]
    for name in ("k_proj", "v_proj"):
        weight = layer[f"self_attn.{name}.weight"]
        changed = layer | {f"self_attn.{name}.weight": weight.roll(model.config.head_dim, 0)}
        del changed["self_attn.qkv_proj.weight"]
        out = gqa_attention(hook.input, changed, *tables(model, hook.input), model.config)
        assert apart(out, hook.output) > 0.05, name


def test_block_0_is_the_oracles(model, seen):
    hook = seen["model.layers.0"]
    ours = block(hook.input, model.layers[0], *tables(model, hook.input), model.config)
    assert_near(ours, hook.output)


def test_every_block_is_the_oracles(model, seen):
    """The stream of the first token grows past 20,000: each bound is relative to its block."""
    for layer, name in zip(model.layers, LAYERS, strict=True):
        hook = seen[name]
        ours = block(hook.input, layer, *tables(model, hook.input), model.config)
        assert_near(ours, hook.output)
