"""Perplexity: closed forms, pieces that meet without a gap, and the cost of four bits."""

import math
from types import SimpleNamespace

import pytest
import torch

from nanoserve import load_model, load_tokenizer
from nanoserve.bench.perplexity import passage, perplexity
from nanoserve.fetch import gguf_path
from tests.folders import write_checkpoint


class Scripted:
    """A model of eight tokens whose logits are a function of the ids that it was given."""

    def __init__(self, logits) -> None:
        self.logits, self.seen = logits, []
        self.config, self.device = SimpleNamespace(context=1024), torch.device("cpu")

    def __call__(self, ids):
        self.seen.append(ids[0].tolist())
        return torch.stack([self.logits(int(i)) for i in ids[0]])[None]


def test_a_uniform_guess_has_the_size_of_the_vocabulary():
    assert perplexity(Scripted(lambda _: torch.zeros(8)), [1, 2, 3]) == pytest.approx(8)


def test_a_certain_prediction_is_1_and_the_mean_is_geometric():
    right = Scripted(lambda i: 1000.0 * torch.eye(8)[(i + 1) % 8])
    assert perplexity(right, [1, 2, 3, 4]) == pytest.approx(1)
    halves = Scripted(lambda i: torch.tensor([0.75, 0.25, *[0.0] * 6]).log())
    assert perplexity(halves, [5, 0, 1, 1]) == pytest.approx((0.75 * 0.25 * 0.25) ** (-1 / 3))


@pytest.mark.parametrize(
    ("window", "pieces"),
    [
        (1, [[0], [1], [2], [3], [4]]),
        (2, [[0, 1], [2, 3], [4]]),
        (5, [[0, 1, 2, 3, 4]]),
        (8, [[0, 1, 2, 3, 4]]),
    ],
)
def test_each_token_after_the_first_is_predicted_once(window, pieces):
    model = Scripted(lambda i: torch.arange(8.0) * (i + 1))
    measured = perplexity(model, [0, 1, 2, 3, 4, 5], window)
    assert model.seen == pieces
    nats = [-(torch.arange(8.0) * (i + 1)).log_softmax(0)[i + 1].item() for i in range(5)]
    assert measured == pytest.approx(math.exp(sum(nats) / 5), rel=1e-5)


def test_it_is_exp_of_the_cross_entropy_and_repeats_exactly(tmp_path):
    model = load_model(write_checkpoint(tmp_path))
    ids = torch.randint(model.config.vocab_size, (31,)).tolist()
    logits = model(torch.tensor([ids[:-1]]))[0]
    entropy = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert perplexity(model, ids, 30) == pytest.approx(math.exp(entropy), rel=1e-5)
    assert perplexity(model, ids, 30) == perplexity(model, ids, 30)


@pytest.mark.parametrize(
    ("ids", "window", "message"),
    [
        ([], 5, "at least two tokens, got 0"),
        ([3], 5, "at least two tokens, got 1"),
        ([3, 4], 0, "window must be from 1 to the model's context of 1024, got 0"),
        ([3, 4], 1025, "window must be from 1 to the model's context of 1024, got 1025"),
    ],
)
def test_it_refuses_by_name(ids, window, message):
    with pytest.raises(ValueError, match=message):
        perplexity(Scripted(lambda _: torch.zeros(8)), ids, window)


def test_the_passage_is_the_first_chapter():
    text = passage()
    assert text.startswith("Alice was beginning to get very tired of sitting by her sister")
    assert text.endswith("very soon finished off the cake.\n")
    assert (len(text.split()), text.isascii()) == (2141, True)


def test_four_bits_cost_less_than_one_per_cent_of_perplexity():
    """The GGUF's own numbers, kept, against the same numbers in float32."""
    ids = load_tokenizer("smollm2").encode(passage())[:385]
    exact, kept = (
        perplexity(load_model(gguf_path(), quantization=quantization), ids, 384)
        for quantization in (None, "q4")
    )
    assert kept == pytest.approx(exact, rel=0.01)
    assert 15 < exact < 40  # the model predicts: of 49,152 tokens
