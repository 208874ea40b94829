"""The decode benchmark: our loop with and without a cache, and transformers' generate."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.timing import Clock, token_times
from nanoserve.cache import NaiveKVCache
from nanoserve.config import ModelConfig
from nanoserve.generate import generate_tokens, new_cache
from nanoserve.layers import Cache
from nanoserve.model import Model
from nanoserve.oracle import Oracle
from nanoserve.sampling import SamplingParams
from nanoserve.weights import expected_shapes

# called with (prompt_ids, max_tokens, on_token); returns the generated token ids
DecodePath = Callable[[Sequence[int], int, Callable[[int], None]], list[int]]


@dataclass(frozen=True)
class DecodeRow:
    """One code path on one prompt: time to first token and time per output token, in seconds."""

    path: str
    context: int  # tokens in the prompt
    ttft: float
    tpot: float


def decode_benchmark(
    paths: dict[str, DecodePath],
    reference: str,
    prompts: Sequence[Sequence[int]],
    tokens: int = 8,
    rounds: int = 3,
    clock: Clock = time.perf_counter,
) -> list[DecodeRow]:
    """Time each code path on each prompt, interleaved; rows hold medians over rounds and tokens.

    `paths` maps a name to a DecodePath, and `reference` is one of the names. Raises WrongAnswer if
    a code path's tokens differ from the reference's; this check is also the warm-up.
    """
    rows = []
    for prompt in prompts:
        expected = paths[reference](prompt, tokens, lambda _: None)
        for name, path in paths.items():
            if path(prompt, tokens, lambda _: None) != expected:
                raise WrongAnswer(f"{name} and {reference} differ at prompt length {len(prompt)}")
        times: dict[str, list[list[float]]] = {name: [] for name in paths}
        for _ in range(rounds):
            for name, path in paths.items():
                run = lambda on_token, path=path: path(prompt, tokens, on_token)
                times[name].append(token_times(run, clock))
        for name, runs in times.items():
            first = median(run[0] for run in runs)
            steps = median(step for run in runs for step in run[1:])
            rows.append(DecodeRow(name, len(prompt), first, steps))
    return rows


def engine_path(model: Model, cached: bool) -> DecodePath:
    """Our own greedy loop with the contiguous cache, or without a cache."""
    return _loop(model, lambda _: NaiveKVCache(model.config) if cached else None)


def paged_path(model: Model) -> DecodePath:
    """Our own greedy loop with the paged cache, and the backend that select_backend chooses."""
    return _loop(model, lambda tokens: new_cache("paged", model, tokens))


def _loop(model: Model, empty_cache: Callable[[int], Cache | None]) -> DecodePath:
    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        cache, ids = empty_cache(len(prompt) + tokens), []
        for chosen in generate_tokens(model, prompt, SamplingParams(max_tokens=tokens), cache):
            on_token(chosen.token_id)
            ids.append(chosen.token_id)
        return ids

    return run


def oracle_path(oracle: Oracle, cached: bool) -> DecodePath:
    """transformers' greedy generate, with its cache or without."""

    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        return oracle.generate(prompt, tokens, cached, on_token, stop=False)

    return run


def bytes_per_token(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """The bytes that one cached decode step must read: each weight once, and the cached K and V.

    `context` is the number of cached tokens. The step reads all of the head, tied to the embedding
    or not, and one row of the embedding, which is not counted.
    """
    # expected_shapes has the embedding and no head; both have the same size
    weights = sum(map(math.prod, expected_shapes(config).values()))
    cached = config.num_layers * 2 * context * config.n_kv * config.head_dim
    return (weights + cached) * dtype.itemsize
