"""Day 5's check on the real model: the MLP within 1e-5 of the oracle's activations."""

import pytest
import torch
import torch.nn.functional as F

from nanoserve.layers import swiglu
from nanoserve.oracle import load_oracle
from tests.bounds import apart, assert_near

IDS = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30]])
MLPS = [f"model.layers.{i}.mlp" for i in range(30)]


@pytest.fixture(scope="module")
def mlps():
    """(input, the three weights, output) of each layer's MLP."""
    oracle = load_oracle("smollm2")
    seen, weights = oracle.capture(IDS, MLPS), oracle.state_dict()
    parts = ("gate", "up", "down")
    return [
        (seen[m].input, [weights[f"{m}.{part}_proj.weight"] for part in parts], seen[m].output)
        for m in MLPS
    ]


def test_layer_0_is_within_1e_5(mlps):
    x, weights, theirs = mlps[0]
    assert_near(swiglu(x, *weights), theirs)


def test_every_layer_is_within_1e_5_of_its_largest_value(mlps):
    for x, weights, theirs in mlps:
        assert_near(swiglu(x, *weights), theirs)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x, gate, up, down: swiglu(x, up, gate, down),
        lambda x, gate, up, down: F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down),
    ],
    ids=["gate and up swapped", "gelu for silu"],
)
def test_a_quiet_mistake_is_outside_in_every_layer(mlps, mistake):
    for x, weights, theirs in mlps:
        assert apart(mistake(x, *weights), theirs) > 1e-4
