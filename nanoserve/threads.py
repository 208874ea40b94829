"""Whether PyTorch's threads wait for one another, as they do where other programs use the cores."""

import time
from statistics import median

SLOW = 2.0  # all threads take so many times as long as one: worth a word


def measure_threads(seconds: float = 1.0) -> tuple[float, float]:
    """Median seconds of one round of small products, with all threads and with one.

    The two take turns, for about `seconds` in all, and at least three times each. A round is about
    the work of one block for eight tokens of SmolLM2. Leaves the number of threads as it was.
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
                for _ in range(10):
                    torch.nn.functional.linear(x, weight)
                times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return median(took[threads][1:]), median(took[1][1:])  # the first of each warms up


def describe_threads(count: int, all_threads: float, one_thread: float) -> str:
    """The number of threads, and what to do where they are slower than one; one line."""
    if count == 1 or all_threads < SLOW * one_thread:
        return str(count)
    return (
        f"{count}, which take {all_threads / one_thread:.1f} times as long as one: other programs "
        "keep the cores busy, and the threads wait for one another. Close those programs, or set "
        "OMP_NUM_THREADS=1 before Python starts"
    )
