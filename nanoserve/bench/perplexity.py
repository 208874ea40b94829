"""Perplexity: how well a model predicts a text, to compare formats of the weights."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from nanoserve.model import Model


def passage() -> str:
    """Chapter I of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865): 2,141 words.

    The text is in the public domain; one line is one paragraph.
    """
    return Path(__file__).with_name("alice.txt").read_text(encoding="utf-8")


@torch.no_grad()
def perplexity(model: Model, ids: Sequence[int], window: int = 512) -> float:
    """exp of the mean negative log-probability of each token, in nats (Jelinek et al. 1977).

    1 is a certain prediction; a uniform guess gives the size of the vocabulary. The ids are cut
    into pieces: the model reads at most `window` tokens and predicts the token after each of them.
    The first token of the text is not predicted; each other token is predicted once, from the
    tokens before it in its piece. Log-probabilities are computed in float32 and added in float64.
    Without a cache. Raises ValueError for fewer than two ids, and for a window below 1 or above the
    model's context.
    """
    if len(ids) < 2:
        raise ValueError(f"perplexity needs at least two tokens, got {len(ids)}")
    if not 1 <= window <= model.config.context:
        raise ValueError(
            f"window must be from 1 to the model's context of {model.config.context}, got {window}"
        )
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        piece = torch.tensor([ids[start : start + window + 1]], device=model.device)
        logits = model(piece[:, :-1])[0].float()  # [tokens, vocab]
        logprobs = logits.log_softmax(dim=-1).gather(1, piece[0, 1:, None])
        total -= logprobs.double().sum().item()
    return math.exp(total / (len(ids) - 1))
