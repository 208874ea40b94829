"""The timing core. Its clock is an argument, so that tests can script it."""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

import torch

Clock = Callable[[], float]  # seconds, from any origin


def median_times(
    runs: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warmup: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each run. They take turns, so that a drifting machine hurts all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name, run in runs.items():
            begin = clock()
            run()
            if turn >= warmup:
                seconds[name].append(clock() - begin)
    return {name: median(times) for name, times in seconds.items()}


def token_times(
    run: Callable[[Callable[[int], None]], object], clock: Clock = time.perf_counter
) -> list[float]:
    """Seconds that each token took: run(on_token) calls on_token as each one comes.

    The first is the time to first token, prefill included; the others are decode steps.
    """
    stamps = [clock()]
    run(lambda _token: stamps.append(clock()))
    return [later - earlier for earlier, later in pairwise(stamps)]


def read_bandwidth(
    size: int = 1 << 29, clock: Clock = time.perf_counter, device: str | torch.device = "cpu"
) -> float:
    """Bytes per second at which a device reads its memory: the roof of every decode step.

    The best of five sums over `size` bytes, far more than a cache holds. A card works while the
    program goes on: its clock has to wait for it.
    """
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        begin = clock()
        buffer.sum()
        best = min(best, clock() - begin)
    return size / best
