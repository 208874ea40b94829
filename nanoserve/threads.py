"""PyTorch's threads on a busy machine: how long they wait, and whether that costs much here.

On Linux, PyTorch's wheels bring libgomp, GNU's OpenMP. At the end of each parallel loop, a thread
of libgomp spins for some milliseconds until the last one arrives. Where other programs use the
cores, the spinning thread keeps its core from the thread that it waits for, and every matrix
product takes several of the scheduler's time slices. A shorter spin gives the core back; the thread
then sleeps until it is woken.

libgomp reads its settings once, when torch loads it. So importing nanoserve sets a shorter spin for
a process that has not imported torch before. A setting of the environment stays as it is.
"""

import os
import time
from statistics import median

SPINS = "10000"  # a fraction of a millisecond; libgomp's own default is 300,000
SLOW = 2.0  # all threads take so many times as long as one: worth a word

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ["GOMP_SPINCOUNT"] = SPINS


def measure_threads(seconds: float = 0.5) -> tuple[float, float]:
    """Median seconds of a small matrix product, with all of PyTorch's threads and with one.

    The two take turns for about `seconds`, at least three times each. The product is of SmolLM2's
    size for eight tokens. The number of threads is as before afterwards.
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
    """The number of threads in one line, and what to do where they are slower than one thread."""
    if count == 1 or all_threads < SLOW * one_thread:
        return str(count)
    return (
        f"{count}, which take {all_threads / one_thread:.1f} times as long as one: other programs "
        "keep the cores busy, and the threads wait for one another. Close those programs, or set "
        "OMP_NUM_THREADS=1 before you start Python"
    )


def threads_here() -> str:
    """describe_threads of this process; measures for half a second where there are several."""
    import torch

    count = torch.get_num_threads()
    return describe_threads(count, *(measure_threads() if count > 1 else (0, 0)))
