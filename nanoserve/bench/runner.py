"""The path that the engine runs, timed end to end: the cache's own read, on a CPU or a card.

`nanoserve bench attention --cache`, or `python -m nanoserve.bench.runner` where typer is missing.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import metadata
from itertools import cycle
from pathlib import Path

import torch

from nanoserve.bench.attention import LLAMA_1B, AttentionRow, scattered_cache
from nanoserve.bench.decode import WrongAnswer
from nanoserve.bench.scaling import ScalingFit, fit_scaling
from nanoserve.bench.timing import Clock, median_times, read_bandwidth
from nanoserve.cache import PagedKVCache
from nanoserve.config import ModelConfig
from nanoserve.kernels.dispatch import select_backend
from nanoserve.kernels.reference import paged_attention_reference, tolerance
from nanoserve.layers import sdpa

MODELS = {  # of a model, a read needs only the shape
    "SmolLM2-135M": replace(LLAMA_1B, num_layers=30, n_q=9, n_kv=3, head_dim=64),
    "Llama-3.2-1B": LLAMA_1B,
}
HISTORIES = tuple(64 << i for i in range(9))  # 64 to 16,384 tokens
ROTATED = 128 << 20  # bytes read before a layer comes round again: twice what an H200's L2 holds
DATA = Path("notebooks/data")  # in a clone, where a run is recorded

Read = Callable[[int], torch.Tensor]  # one layer's attention of one new token


def attention_paths(
    cache: PagedKVCache, step: Mapping[str, torch.Tensor], n_rep: int
) -> dict[str, Read]:
    """Three ways to write the step's k and v into a layer and let its q attend, by name.

    "dispatched" is the cache's own method, whatever that runs; "gather" copies the history out and
    attends; "reference" is the oracle, over a slot mapping made here from the block table.
    """
    q, k, v = step["q"], step["k"], step["v"]
    history = cache.seq_len + 1
    cache.table.grow(history)
    mapping = torch.tensor([cache.table.slot(p) for p in range(history)], device=q.device)

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


def gate(paths: Mapping[str, Read], layers: Sequence[int], name: str = "") -> None:
    """Let every path read these layers, the first path first, since the others would write for it.

    Raises WrongAnswer for a path that the reference does not confirm at its dtype's tolerance.
    """
    for layer in layers:
        outputs = {path: read(layer) for path, read in paths.items()}
        expected = outputs["reference"]
        atol, rtol = tolerance(expected.dtype)
        for path, out in outputs.items():
            same_kind = (out.shape, out.dtype) == (expected.shape, expected.dtype)
            if not same_kind or not torch.allclose(out, expected, atol=atol, rtol=rtol):
                raise WrongAnswer(f"{path} is not what the reference gives{name}")


def cache_benchmark(
    config: ModelConfig,
    histories: Sequence[int] = HISTORIES,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rounds: int = 20,
    clock: Clock | None = None,
) -> list[AttentionRow]:
    """Time one layer's read of one sequence in a decode step, k and v written first, on each path.

    All pass the gate, or WrongAnswer is raised and no time is given. They take turns, and before a
    layer is read again ROTATED bytes of others have been. On a card a turn is as many reads as the
    model has layers, as in a step: they queue up, and the program waits for the last of them.
    """
    clock = clock or device_clock(device)
    burst = config.num_layers if torch.device(device).type == "cuda" else 1
    rows = []
    for history in histories:
        moved = 2 * history * config.n_kv * config.head_dim * dtype.itemsize  # keys and values
        layers = max(4, -(-ROTATED // moved))  # and one more, which would move seq_len
        cache, step = scattered_cache(
            replace(config, num_layers=layers + 1), history, dtype, device
        )
        paths = attention_paths(cache, step, config.n_rep)
        gate(paths, (0, layers - 1), f" after {history} tokens")
        runs = {}
        for i, (path, read) in enumerate(paths.items()):  # each begins at another place
            start = i * layers // len(paths)
            order = cycle([(start + layer) % layers for layer in range(layers)])
            runs[path] = _burst(read, order, burst)
        times = median_times(runs, rounds, warmup=2, clock=clock)
        rows += [AttentionRow(path, history, took / burst, moved) for path, took in times.items()]
    return rows


def _burst(read: Read, order: Iterator[int], reads: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(reads):
            read(next(order))

    return run


def device_clock(device: str | torch.device) -> Clock:
    """A clock that lets a card finish first: what is launched there is queued, and not done."""
    if torch.device(device).type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


@dataclass(frozen=True)
class Sweep:
    """One model's read in one dtype, over all histories, and the fit of each path's times."""

    model: str
    dtype: str
    rows: list[AttentionRow]
    fits: dict[str, ScalingFit]  # by path; empty with fewer than three histories


@dataclass(frozen=True)
class RecordedRun:
    """A run with all that has to stand beside its numbers."""

    device: str
    driver: str
    backend: str  # what select_backend chooses there
    versions: dict[str, str]
    date: str
    command: str
    roof: float  # bytes per second that the device's memory gives
    sweeps: list[Sweep]

    @property
    def file(self) -> str:
        """attention_h200.json for an "NVIDIA H200"."""
        words = self.device.split(",")[0].lower().replace("nvidia ", "")
        return f"attention_{'_'.join(words.replace('-', ' ').split())}.json"

    def save(self, folder: Path) -> Path:
        """Write the run as JSON; ValueError where there is no such folder."""
        if not folder.is_dir():
            raise ValueError(f"no folder {folder.as_posix()} here: record at the root of a clone")
        path = folder / self.file
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    def lines(self) -> Iterator[str]:
        """The run as text: beside each time bytes per second and the share of the roof."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield f"{self.device}, driver {self.driver}, {versions}, {self.date}"
        yield f"backend {self.backend}, memory read at {self.roof / 1e9:.1f} GB/s"
        for sweep in self.sweeps:
            for row in sweep.rows:
                rate = row.bytes_per_second
                yield (
                    f"{sweep.model:<12} {sweep.dtype:<8} {row.history:>6} tokens  {row.path:<10} "
                    f"{row.seconds * 1e6:9.1f} µs  {rate / 1e9:7.2f} GB/s, "
                    f"{rate / self.roof:5.1%} of the roof"
                )
            for path, fit in sweep.fits.items():
                yield (
                    f"{'':14}{path:<10} {fit.regime}, exponent {fit.exponent:.2f}, within a factor "
                    f"of {fit.misfit:.2f}; {fit.seconds_per_token * 1e9:.2f} ns a token at the end"
                )


def measure(
    device: str = "cpu",
    histories: Sequence[int] = HISTORIES,
    dtypes: Sequence[torch.dtype] = (),
    rounds: int = 20,
    command: str = "",
) -> RecordedRun:
    """Time both models' shapes on a device, float32 by default and on a card float16 as well.

    Raises ValueError for another device than cpu or cuda, and for histories or rounds below 1.
    """
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} has no clock here: cpu or cuda")
    if min(*histories, rounds) < 1:
        raise ValueError(f"histories and rounds must be at least 1: {list(histories)}, {rounds}")
    card = where.type == "cuda"
    dtypes = dtypes or ((torch.float32, torch.float16) if card else (torch.float32,))
    size = 1 << (32 if card else 28)
    roof, sweeps = read_bandwidth(size, device_clock(where), where), []
    for model, config in MODELS.items():
        for dtype in dtypes:
            rows = cache_benchmark(config, histories, dtype, where, rounds)
            sweeps.append(Sweep(model, str(dtype).removeprefix("torch."), rows, _fits(rows)))
    return RecordedRun(
        device=_name(where),
        driver=_driver() if card else "none",
        backend=select_backend(where),
        versions={"python": platform.python_version(), **_versions("torch", "triton")},
        date=date.today().isoformat(),
        command=command,
        roof=max(roof, read_bandwidth(size, device_clock(where), where)),
        sweeps=sweeps,
    )


def _fits(rows: Sequence[AttentionRow]) -> dict[str, ScalingFit]:
    if len({row.history for row in rows}) < 3:
        return {}
    by_path: dict[str, list[AttentionRow]] = {}
    for row in rows:
        by_path.setdefault(row.path, []).append(row)
    return {
        path: fit_scaling([row.history for row in own], [row.seconds for row in own])
        for path, own in by_path.items()
    }


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def _driver() -> str:
    """The driver's version, as nvidia-smi tells it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this file, which needs nothing but torch."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="nanoserve.bench.runner", description="Time the cache's own read."
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--history", type=int, action="append", help="tokens; repeatable")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each path")
    parser.add_argument("--dtype", action="append", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--record", action="store_true", help="write notebooks/data/read_X.json")
    asked = parser.parse_args(arguments)
    command = " ".join(["python -m nanoserve.bench.runner", *arguments])
    dtypes = [getattr(torch, name) for name in asked.dtype or ()]
    try:
        run = measure(asked.device, asked.history or HISTORIES, dtypes, asked.rounds, command)
        print("\n".join(run.lines()))
        if asked.record:
            print(f"recorded in notebooks/data/{run.save(DATA).name}")
    except (ValueError, RuntimeError, AssertionError) as error:  # torch's, where there is no card
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
