"""The decode benchmark: our loop, with a cache and without, beside transformers' generate."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from nanoserve.bench.timing import Clock, token_times
from nanoserve.cache import NaiveKVCache
from nanoserve.config import ModelConfig
from nanoserve.generate import generate_tokens, new_cache
from nanoserve.layers import Cache
from nanoserve.model import Model
from nanoserve.oracle import Oracle
from nanoserve.sampling import SamplingParams
from nanoserve.weights import expected_shapes

Path = Callable[[Sequence[int], int, Callable[[int], None]], list[int]]


class WrongAnswer(RuntimeError):
    """A path gave other tokens than the oracle, so it is not timed."""


@dataclass(frozen=True)
class DecodeRow:
    """One path at one length: seconds to the first token, and per token after it."""

    path: str
    context: int
    prefill: float
    decode: float


def decode_benchmark(
    paths: dict[str, Path],
    reference: str,
    prompts: Sequence[Sequence[int]],
    tokens: int = 8,
    rounds: int = 3,
    clock: Clock = time.perf_counter,
) -> list[DecodeRow]:
    """Time each path on each prompt, taking turns; medians over rounds and tokens.

    `paths` maps a name to run(prompt_ids, max_tokens, on_token) -> token ids. Raises WrongAnswer
    where a path's tokens differ from the reference's; that check is also the warm-up.
    """
    rows = []
    for prompt in prompts:
        expected = paths[reference](prompt, tokens, lambda _: None)
        for name, path in paths.items():
            if path(prompt, tokens, lambda _: None) != expected:
                raise WrongAnswer(f"{name} and {reference} differ after {len(prompt)} tokens")
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


def engine_path(model: Model, cached: bool) -> Path:
    """Our own loop, greedy, with the contiguous cache or none, as a path of the benchmark."""
    return _loop(model, lambda _: NaiveKVCache(model.config) if cached else None)


def paged_path(model: Model) -> Path:
    """The same with the paged cache, whose read goes where select_backend sends it."""
    return _loop(model, lambda tokens: new_cache("paged", model, tokens))


def _loop(model: Model, empty_cache: Callable[[int], Cache | None]) -> Path:
    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        cache, ids = empty_cache(len(prompt) + tokens), []
        for chosen in generate_tokens(model, prompt, SamplingParams(max_tokens=tokens), cache):
            on_token(chosen.token_id)
            ids.append(chosen.token_id)
        return ids

    return run


def oracle_path(oracle: Oracle, cached: bool) -> Path:
    """transformers' generate as a path of the benchmark."""

    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        return oracle.generate(prompt, tokens, cached, on_token, stop=False)

    return run


def bytes_per_token(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """What one cached decode step must read: every weight once, and the history's keys and values.

    The embedding is not read, but for a single row, and the head, tied to it or not, is as large.
    """
    weights = sum(map(math.prod, expected_shapes(config).values()))  # one embedding or head
    history = config.num_layers * 2 * context * config.n_kv * config.head_dim
    return (weights + history) * dtype.itemsize
