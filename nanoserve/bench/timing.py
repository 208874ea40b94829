"""The timing core. The clock is an argument, so that a test can pass a scripted one."""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median

import torch

Clock = Callable[[], float]  # returns seconds since any fixed moment


def median_times(
    runs: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warmup: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each run, after `warmup` rounds.

    The runs take turns, so that a slow moment of the machine affects all of them.
    """
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
    """Seconds between tokens, where run(on_token) calls on_token(token_id) for every token.

    The first number is the time to first token; the others are inter-token latencies.
    """
    stamps = [clock()]
    run(lambda _token: stamps.append(clock()))
    return [later - earlier for earlier, later in pairwise(stamps)]


def read_bandwidth(
    size: int = 1 << 29, clock: Clock = time.perf_counter, device: str | torch.device = "cpu"
) -> float:
    """Bytes per second at which a device reads its memory: the peak bandwidth of this machine.

    Takes the best of five sums over `size` bytes, far more than a processor's cache holds. A GPU
    runs asynchronously, so its clock must synchronise first (`device_clock` of runner.py).
    """
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        begin = clock()
        buffer.sum()
        best = min(best, clock() - begin)
    return size / best
