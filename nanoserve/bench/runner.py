"""Times paged attention as the engine calls it, through the cache's method, on a CPU or a GPU.

`nanoserve bench attention --cache`, or `python -m nanoserve.bench.runner` where typer is missing.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path

import torch

from nanoserve.bench.attention import LLAMA_1B, AttentionRow, scattered_cache
from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import DATA, machine, save_run
from nanoserve.bench.scaling import ScalingFit, fit_scaling
from nanoserve.bench.timing import Clock, median_times, read_bandwidth
from nanoserve.cache import PagedKVCache
from nanoserve.config import ModelConfig
from nanoserve.kernels.dispatch import select_backend
from nanoserve.kernels.reference import paged_attention_reference, tolerance
from nanoserve.layers import sdpa

MODELS = {  # attention needs only the number of layers, the heads and head_dim of a model
    "SmolLM2-135M": replace(LLAMA_1B, num_layers=30, n_q=9, n_kv=3, head_dim=64),
    "Llama-3.2-1B": LLAMA_1B,
}
KV_LENS = tuple(64 << i for i in range(9))  # 64 to 16,384 tokens
# Bytes of K and V to read between two visits to a layer, so that the layer has left the L2 cache.
# An H200's L2 cache holds less than half as many bytes.
ROTATED = 128 << 20
AttentionPath = Callable[[int], torch.Tensor]  # called with a layer: the attention of one new token


def attention_paths(
    cache: PagedKVCache, step: Mapping[str, torch.Tensor], n_rep: int
) -> dict[str, AttentionPath]:
    """Three code paths, by name. Each writes the step's k and v to a layer; then q attends.

    "dispatched" is the cache's own method, with the backend that select_backend chooses. "gather"
    copies K and V out of the pool and attends. "reference" is the oracle, with a slot mapping of
    its own, made from the block table: a wrong mapping in the cache then shows as a difference.
    """
    q, k, v = step["q"], step["k"], step["v"]
    kv_len = cache.seq_len + 1
    cache.table.grow(kv_len)
    mapping = torch.tensor([cache.table.slot(p) for p in range(kv_len)], device=q.device)

    def dispatched(layer: int) -> torch.Tensor:
        return cache.paged_attention(layer, k, v, q, n_rep)

    def gather(layer: int) -> torch.Tensor:
        return sdpa(q, *cache.append(layer, k, v))

    def reference(layer: int) -> torch.Tensor:
        k_pool, v_pool = cache.pool.k[layer], cache.pool.v[layer]
        k_pool.index_copy_(0, mapping[-1:], k[0].transpose(0, 1))
        v_pool.index_copy_(0, mapping[-1:], v[0].transpose(0, 1))
        return paged_attention_reference(q, k_pool, v_pool, mapping, n_rep)

    return {"dispatched": dispatched, "gather": gather, "reference": reference}


def check_paths(paths: Mapping[str, AttentionPath], layers: Sequence[int], where: str = "") -> None:
    """Compare every code path with "reference" on these layers, at the tolerance of the dtype.

    The code paths run in the order of `paths`. The path under test must come first: the others also
    write K and V, which would hide a missing write. Raises WrongAnswer for the first path that
    differs; the message ends with `where`.
    """
    for layer in layers:
        outputs = {path: attend(layer) for path, attend in paths.items()}
        expected = outputs["reference"]
        atol, rtol = tolerance(expected.dtype)
        for path, out in outputs.items():
            same_kind = (out.shape, out.dtype) == (expected.shape, expected.dtype)
            if not same_kind or not torch.allclose(out, expected, atol=atol, rtol=rtol):
                raise WrongAnswer(f"{path} differs from the reference{where}")


def cache_benchmark(
    config: ModelConfig,
    kv_lens: Sequence[int] = KV_LENS,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rounds: int = 20,
    clock: Clock | None = None,
) -> list[AttentionRow]:
    """Time one layer's attention in a decode step of one sequence, on each of attention_paths.

    Each time includes writing k and v. check_paths runs first and may raise WrongAnswer. The code
    paths take turns. A path returns to a layer only after it has read ROTATED bytes of other
    layers. On a GPU, one turn launches as many layers as the model has and waits once at the end,
    as a decode step does; a row holds the time per layer.
    """
    clock = clock or device_clock(device)
    burst = config.num_layers if torch.device(device).type == "cuda" else 1
    rows = []
    for kv_len in kv_lens:
        moved = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize  # keys and values
        layers = max(4, -(-ROTATED // moved))
        cache, step = scattered_cache(  # one more layer: the last layer would advance seq_len
            replace(config, num_layers=layers + 1), kv_len, dtype, device
        )
        paths = attention_paths(cache, step, config.n_rep)
        check_paths(paths, (0, layers - 1), f" at {kv_len} tokens")
        runs = {}
        for i, (path, attend) in enumerate(paths.items()):  # each path starts at another layer
            start = i * layers // len(paths)
            order = cycle([(start + layer) % layers for layer in range(layers)])
            runs[path] = _burst(attend, order, burst)
        times = median_times(runs, rounds, warmup=2, clock=clock)
        rows += [AttentionRow(path, kv_len, took / burst, moved) for path, took in times.items()]
    return rows


def _burst(attend: AttentionPath, order: Iterator[int], layers: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(layers):
            attend(next(order))

    return run


def device_clock(device: str | torch.device) -> Clock:
    """time.perf_counter for a CPU. For a GPU, a clock that first waits for all launched kernels,
    because a launch returns before its kernel has run."""
    if torch.device(device).type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


@dataclass(frozen=True)
class Sweep:
    """One model's shape in one dtype, at all lengths, and the scaling fit of each code path."""

    model: str
    dtype: str
    rows: list[AttentionRow]
    fits: dict[str, ScalingFit]  # by code path; empty with fewer than three lengths


@dataclass(frozen=True)
class RecordedRun:
    """A whole run: the machine, the command, the peak bandwidth and all sweeps."""

    machine: dict[str, object]  # as bench.machine describes it
    command: str
    backend: str  # the choice of select_backend
    bandwidth: float  # bytes per second at which the device reads its memory
    sweeps: list[Sweep]

    def save(self, folder: Path = DATA) -> Path:
        """Write the run as attention_<device>.json. Raises ValueError for a missing folder."""
        own = asdict(self)
        return save_run(own.pop("machine") | own, "attention", folder)

    def lines(self) -> Iterator[str]:
        """The run as text: times, bytes per second, shares of the peak bandwidth, fits."""
        about = self.machine
        versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
        driver = f"driver {about['driver']}" if about["cuda"] else f"{about['threads']} threads"
        yield f"{about['device']}, {about['platform']}, {driver}, {versions}, {about['date']}"
        yield f"backend {self.backend}, peak bandwidth {self.bandwidth / 1e9:.1f} GB/s"
        for sweep in self.sweeps:
            for row in sweep.rows:
                rate = row.bytes_per_second
                yield (
                    f"{sweep.model:<12} {sweep.dtype:<8} {row.kv_len:>6} tokens  {row.path:<10} "
                    f"{row.seconds * 1e6:9.1f} µs  {rate / 1e9:7.2f} GB/s, "
                    f"{rate / self.bandwidth:5.1%} of peak"
                )
            for path, fit in sweep.fits.items():
                yield (
                    f"{'':14}{path:<10} {fit.regime}, exponent {fit.exponent:.2f}, within a factor "
                    f"of {fit.misfit:.2f}; {fit.seconds_per_token * 1e9:.2f} ns per token at the "
                    "longest length"
                )


def measure(
    device: str = "cpu",
    kv_lens: Sequence[int] = KV_LENS,
    dtypes: Sequence[torch.dtype] = (),
    rounds: int = 20,
    command: str = "",
) -> RecordedRun:
    """Time both models' shapes on a device: by default in float32, on a GPU also in float16.

    Raises ValueError for a device other than cpu and cuda, and for lengths or rounds below 1.
    """
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot be timed; supported: cpu, cuda")
    if min(*kv_lens, rounds) < 1:
        raise ValueError(f"kv_lens and rounds must be at least 1, got {list(kv_lens)}, {rounds}")
    gpu = where.type == "cuda"
    dtypes = dtypes or ((torch.float32, torch.float16) if gpu else (torch.float32,))
    size = 1 << (32 if gpu else 28)
    bandwidth, sweeps = read_bandwidth(size, device_clock(where), where), []
    for model, config in MODELS.items():
        for dtype in dtypes:
            rows = cache_benchmark(config, kv_lens, dtype, where, rounds)
            sweeps.append(Sweep(model, str(dtype).removeprefix("torch."), rows, _fits(rows)))
    return RecordedRun(
        machine=machine(where),
        command=command,
        backend=select_backend(where),
        bandwidth=max(bandwidth, read_bandwidth(size, device_clock(where), where)),
        sweeps=sweeps,
    )


def _fits(rows: Sequence[AttentionRow]) -> dict[str, ScalingFit]:
    if len({row.kv_len for row in rows}) < 3:
        return {}
    by_path: dict[str, list[AttentionRow]] = {}
    for row in rows:
        by_path.setdefault(row.path, []).append(row)
    return {
        path: fit_scaling([row.kv_len for row in own], [row.seconds for row in own])
        for path, own in by_path.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this file. It needs no third-party package but torch."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="nanoserve.bench.runner", description="Time paged attention as the engine calls it."
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--kv-len", type=int, action="append", help="tokens in cache; repeatable")
    parser.add_argument("--rounds", type=int, default=20, help="runs of each code path")
    parser.add_argument("--dtype", action="append", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--record", action="store_true", help=f"write {DATA}/attention_DEVICE.json")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m nanoserve.bench.runner", *arguments])
    dtypes = [getattr(torch, name) for name in options.dtype or ()]
    kv_lens = options.kv_len or KV_LENS
    try:
        run = measure(options.device, kv_lens, dtypes, options.rounds, command)
        print("\n".join(run.lines()))
        if options.record:
            print(f"recorded in {run.save(DATA).as_posix()}")
    except (ValueError, RuntimeError, AssertionError) as error:  # from torch, without a GPU
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
