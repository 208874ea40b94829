"""Day 4's checks on the real model: norms and RoPE tables within 1e-6 of the oracle's activations.

The other RoPE checks (position 15,962, llama3 scaling, relative position) are in test_layers.py.
"""

import pytest
import torch

from nanoserve.config import load_config
from nanoserve.fetch import resolve
from nanoserve.layers import rms_norm, rope_tables
from nanoserve.oracle import load_oracle
from tests.bounds import assert_near

IDS = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30]])
NORMS = ["model.norm"] + [
    f"model.layers.{i}.{part}_layernorm" for i in range(30) for part in ("input", "post_attention")
]


@pytest.fixture(scope="module")
def oracle():
    return load_oracle("smollm2")


def test_every_norm_of_the_real_model_is_within_a_millionth(oracle):
    seen, weights = oracle.capture(IDS, NORMS), oracle.state_dict()
    eps = load_config(resolve("smollm2")).norm_eps
    for name in NORMS:
        ours, theirs = rms_norm(seen[name].input, weights[f"{name}.weight"], eps), seen[name].output
        assert_near(ours, theirs, units=8)


def test_tables_of_the_real_model_are_within_a_millionth(oracle):
    config = load_config(resolve("smollm2"))
    cos, sin = rope_tables(config, config.context)
    positions = torch.arange(config.context)[None]
    theirs = oracle.model.model.rotary_emb(torch.zeros(1), positions)
    for ours, table in zip((cos, sin), theirs, strict=True):
        assert_near(ours, table[0], units=8)
