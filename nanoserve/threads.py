"""PyTorch's threads on a busy machine: shorten their wait, and measure whether they help.

On Linux, PyTorch's wheels contain libgomp, GNU's OpenMP. At the end of each parallel loop, every
thread of libgomp spins (checks in a tight loop) for some milliseconds until the last thread
arrives. If other programs use the cores, a spinning thread occupies the core that the last thread
needs. Every matrix product then takes several time slices of the scheduler. With a shorter spin,
the waiting thread goes to sleep and frees its core.

libgomp reads its settings once, when torch loads it. So `import nanoserve` sets a shorter spin; the
setting has no effect if torch was imported before. A setting already in the environment is kept.
"""

import os
import time
from statistics import median

SPINS = "10000"  # a fraction of a millisecond; libgomp's own default is 300,000
SLOW = 2.0  # describe_threads gives advice if all threads take this many times as long as one

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ["GOMP_SPINCOUNT"] = SPINS


def measure_threads(seconds: float = 0.5) -> tuple[float, float]:
    """Median seconds of a small matrix product, with all of PyTorch's threads and with one.

    The two alternate for about `seconds`, at least three times each. The product has SmolLM2's
    size for eight tokens. Restores the number of threads at the end.
    """
    import torch

    x, weight = torch.ones(8, 576), torch.ones(1536, 576)
    threads = torch.get_num_threads()
    took: dict[int, list[float]] = {threads: [], 1: []}
    end = time.perf_counter() + seconds
    try:
        while len(took[1]) < 4 or time.perf_counter() < end:
            for count, times in took.items():
                torch.set_num_threads(count)
                start = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return median(took[threads][1:]), median(took[1][1:])  # the first of each is a warm-up


def describe_threads(count: int, all_threads: float, one_thread: float) -> str:
    """The number of threads, with advice if `count` threads are much slower than one.

    all_threads and one_thread are seconds, as measure_threads returns them.
    """
    if count == 1 or all_threads < SLOW * one_thread:
        return str(count)
    return (
        f"{count}, which take {all_threads / one_thread:.1f} times as long as one: other programs "
        "keep the cores busy, and the threads wait for one another. Close those programs, or set "
        "OMP_NUM_THREADS=1 before you start Python"
    )


def threads_here() -> str:
    """describe_threads for this process; measures for half a second if it has several threads."""
    import torch

    count = torch.get_num_threads()
    return describe_threads(count, *(measure_threads() if count > 1 else (0, 0)))
