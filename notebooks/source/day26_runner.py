# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 26 · Time the path you run
#
# Week 6 · Phase 2, paged memory · you need: Day 24 (Flat or climbing?), Day 25 (One line moves)
#
# **Today** you connect the benchmark to the one method that the engine calls, and time all of it: the write, the
# mapping, the dispatch, the launch and the kernel. You time it live on your CPU, and then read a run that was
# recorded on a GPU.

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(26)
today.picture("time-the-path")

# %% [markdown]
# ## Why it matters
#
# Every kernel comes with a benchmark, and the benchmark calls the kernel. Its tensors are made for the call, the
# mapping is ready, and the keys are in their slots. Such a benchmark is quick to write, but it times a call that
# the engine never makes alone. **The engine runs a whole code path.** On a GPU, while `kv_len` is small, most of
# that path is not the kernel: you will compute how much.
#
# There is a second trap: to time the path and not notice that it computes something else. The dispatcher may
# have fallen back, or a slot mapping may be stale. So the rule of Day 13 holds: first the correctness check, then the
# clock. A path that differs from the oracle gets no number.

# %%
today.glossary(
    "end to end", "baseline", "asynchronous", "synchronise", "multiprocessor", "power law"
)

# %% [markdown]
# ## Your turn: `attention_paths`
#
# `scattered_cache` of Day 20 returns a cache that holds `kv_len - 1` tokens in scattered blocks, and the `q`, `k` and `v`
# of the next. Return three functions by name. Each takes a **layer**, writes this step's `k` and `v` there by
# itself, and returns the attention of `q`:
#
# | name | what it runs |
# | --- | --- |
# | `"dispatched"` | the cache's own `paged_attention`, and nothing else |
# | `"gather"` | `cache.append`, then `sdpa`, as Day 20's |
# | `"reference"` | `paged_attention_reference` over the layer's pools, through a mapping **of your own**; it writes through that mapping too |
#
# Why a mapping of your own? The cache passes its slot mapping to the dispatcher. If the oracle used
# the same mapping, a stale slot in it would be wrong in both, and the correctness check would pass. So take nothing
# from `cache.slot_mapping`, `cache._slots` or `cache._write`. The block table gives the slots too:
# `cache.table.slot(position)`, after `cache.table.grow(tokens)`. Writing is
# `pool[layer].index_copy_(0, slots, rows)` with rows `[1, n_kv, head_dim]`. The check also runs your reference on
# a cache whose own mapping is wrong. Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from nanoserve.bench.attention import LLAMA_1B, AttentionRow, scattered_cache
from nanoserve.cache import PagedKVCache
from nanoserve.config import ModelConfig
from nanoserve.kernels.reference import paged_attention_reference, tolerance
from nanoserve.layers import sdpa


# %%
def attention_paths(cache, step, n_rep) -> dict[str, Callable[[int], torch.Tensor]]:
    """Three functions of a layer, "dispatched", "gather" and "reference": each writes step's k and
    v there and returns the attention of its q."""
    raise NotImplementedError("your turn")


today.check(attention_paths)

# %% [markdown]
# ## The paths and the correctness check
#
# The cell has two shapes: attention needs no more of a model than its numbers of layers and heads and `head_dim`.
# Then come your function and the **correctness check**. Note the order of the check: the dispatched path runs
# first. If another path wrote k and v before, a missing write would not show.

# %%
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nanoserve.bench.correctness import WrongAnswer

# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/runner.py: MODELS, KV_LENS, ROTATED, AttentionPath and 2 more
MODELS = {  # attention needs only the number of layers, the heads and head_dim of a model
    "SmolLM2-135M": replace(LLAMA_1B, num_layers=30, n_q=9, n_kv=3, head_dim=64),
    "Llama-3.2-1B": LLAMA_1B,
}
KV_LENS = tuple(64 << i for i in range(9))  # 64 to 16,384 tokens
# Bytes of K and V to read between two visits to a layer, so that the layer has left the L2 cache:
# an H200's L2 holds half as many.
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


# %% [markdown]
# Does it refuse wrong paths? Three faults that give plausible numbers:

# %%
honest = PagedKVCache.paged_attention


def oldest_lost(self, layer, k, v, q, n_rep, scale=None):
    keys, values = self.append(layer, k, v)
    return sdpa(q, keys[:, :, 1:], values[:, :, 1:], scale)


def never_written(self, layer, k, v, q, n_rep, scale=None):
    return honest(self, layer, torch.zeros_like(k), torch.zeros_like(v), q, n_rep, scale)


def stale_slot(self, layer, k, v, q, n_rep, scale=None):
    self._slots[7] = self._slots[3]  # the cache's own mapping is wrong, and so is attention
    return honest(self, layer, k, v, q, n_rep, scale)


for fault in (oldest_lost, never_written, stale_slot, honest):
    cache, step = scattered_cache(LLAMA_1B, 64)
    PagedKVCache.paged_attention = fault
    try:
        check_paths(attention_paths(cache, step, LLAMA_1B.n_rep), (0, 5), " at 64 tokens")
        print(f"{fault.__name__}: may be timed")
    except WrongAnswer as error:
        print(f"{fault.__name__}: {error}")
    finally:
        PagedKVCache.paged_attention = honest

# %% [markdown]
# ## A clock that waits
#
# On a GPU there is one more trap. A launch does not run a kernel. It puts the kernel into a queue and returns
# at once: the GPU works **asynchronously**. Here is a made-up GPU whose kernel takes 300 µs
# and whose launch takes 10, and two clocks:

# %%
from nanoserve.bench.timing import Clock, median_times, read_bandwidth


class GPU:
    now = done = 0.0  # the program's time, and when the GPU will have finished

    def launch(self):
        self.now += 10e-6
        self.done = max(self.done, self.now) + 300e-6

    def plain_clock(self):
        return self.now

    def waiting_clock(self):
        self.now = max(self.now, self.done)  # synchronise, then look
        return self.now


for clock in ("plain_clock", "waiting_clock"):
    gpu = GPU()
    times = median_times({"kernel": gpu.launch}, clock=getattr(gpu, clock))
    print(f"{clock:14} {times['kernel'] * 1e6:.0f} µs")

# %% [markdown]
# The plain clock timed the launch alone: here that is a thirtieth of the kernel's time.
#
# ## The benchmark that lands
#
# Three rules of Day 20 return, each a little stricter. **Rotation:** the cache has many layers, and between two
# visits to one layer 128 MiB of other layers are read. That is more than an H200's L2 cache holds. **Turns:** the
# three paths take turns, each at another layer. **The step:** on a GPU one turn covers as many layers as the model
# has. In a real step the launches of all layers queue up as well, and the program waits once, not thirty times.

# %%
import time
from itertools import cycle


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/runner.py: cache_benchmark, _burst, device_clock
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


# %% [markdown]
# The rest is bookkeeping, for reading rather than writing. A number can be checked only with its label: device,
# driver, versions, date and the command. `machine` makes the label, for every recorded run and for
# `nanoserve doctor`, and `save_run` writes the file.

# %%
import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from datetime import date
from importlib import metadata

from nanoserve.bench.scaling import ScalingFit, fit_scaling
from nanoserve.kernels.dispatch import select_backend, use_backend


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/machine.py: DATA, machine, _driver, _version, save_run
DATA = Path("notebooks/data")  # where runs are recorded, from the root of a clone


def machine(
    device: torch.device | str, packages: Sequence[str] = ("torch", "triton")
) -> dict[str, object]:
    """The description of this machine in every recorded run and in `nanoserve doctor`.

    Keys: device, driver and cuda (None without an NVIDIA GPU), platform, threads, versions (None
    for a package that is not installed), date.
    """
    device = torch.device(device)
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else device.type.upper(),
        "driver": _driver() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
        "date": date.today().isoformat(),
    }


def _driver() -> str | None:
    """The driver's version as nvidia-smi prints it; None where nvidia-smi gives no version."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    printed = subprocess.run(query, capture_output=True, text=True)
    lines = printed.stdout.split() if printed.returncode == 0 else []
    return lines[0] if lines else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save_run(run: Mapping[str, object], benchmark: str, folder: Path = DATA) -> Path:
    """Write a run as JSON, for example as attention_h200.json for an "NVIDIA H200".

    `run` holds the keys of `machine` and its own. Raises ValueError if the folder is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder {folder.as_posix()} here: run this at the root of a clone")
    device = str(run["device"]).lower().removeprefix("nvidia ")
    path = folder / f"{benchmark}_{re.sub(r'[^a-z0-9]+', '_', device).strip('_')}.json"
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return path


# %% [markdown]
# A run adds the peak bandwidth, and Day 24's fit of every sweep.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/runner.py: Sweep, RecordedRun, measure, _fits, main
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


# %% [markdown]
# ## Predict, then measure: your CPU
#
# Here the dispatcher has one choice: the kernel under `tlsim`. Each program of the kernel is a row of PyTorch
# tensors. The gather is two copies and PyTorch's own products. SmolLM2's shape: how many times as long does the
# dispatched path take, at 1,024 tokens?
#
# (Week 7 gives the engine a faster kernel. `use_kernel("day22")` runs the kernel that you know.)

# %%
today.predict("cost", "tlsim's time over the gather's, at 1,024 tokens?", guess=None)

# %% tags=["nbval-ignore-output"]
from nanoserve.kernels.dispatch import use_kernel

lengths = (64, 256, 1_024)
with use_backend("tlsim"), use_kernel("day22"):
    rows = cache_benchmark(MODELS["SmolLM2-135M"], lengths, rounds=9)
    backend = select_backend("cpu")
bandwidth = read_bandwidth(1 << 28)
fits = _fits(rows)
for row in rows:
    print(
        f"{row.kv_len:5} tokens, {row.path:10} {row.seconds * 1e6:7.0f} µs, "
        f"{row.bytes_per_second / bandwidth:5.1%} of peak bandwidth"
    )
for path, fit in fits.items():
    print(
        f"{path:10} exponent {fit.exponent:.2f}, {fit.regime}; "
        f"{fit.seconds_per_token * 1e9:,.0f} ns a token at 1,024"
    )
cost = fits["dispatched"].seconds_per_token / fits["gather"].seconds_per_token
print(f"tlsim takes {cost:.1f} times the gather's time")
if (guess := today.guess("cost")) is not None:
    print(f"your guess: {guess}")
at_64 = {row.path: row.seconds for row in rows if row.kv_len == 64}
print(
    f"of the dispatched time at 64 tokens, {1 - at_64['gather'] / at_64['dispatched']:.0%} is beyond the gather's time"
)
print("backend:", backend)
assert backend == "tlsim" and all(row.seconds > 0 for row in rows)

# %% [markdown]
# One function draws this run and the recorded one: each path's times, its fitted line, and in black what
# reading the bytes alone would take.

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, log2_axis, prediction_marker


def draw(ax, rows, bandwidth, names, title):
    """One sweep: dots, Day 24's line through them, and the time to read the bytes alone."""
    for path, (name, colour, dashed, where) in names.items():
        at = [row.kv_len for row in rows if row.path == path]
        took = [row.seconds * 1e6 for row in rows if row.path == path]
        fit = fit_scaling(at, took)
        style = (0, (5, 2.5)) if dashed else "solid"
        ax.plot(at, took, "o", color=COLOURS[colour])
        ax.plot(at, [fit.seconds(n) for n in at], color=COLOURS[colour], linestyle=style)
        i = len(at) // 2
        height = max(took[i - 1 : i + 1]) if where == "above" else took[i]
        label_line(ax, at[i], height, name, COLOURS[colour], where)
    floor = [row.bytes / bandwidth * 1e6 for row in rows if row.path == "gather"]
    ax.plot(at, floor, color=COLOURS["limit"], linewidth=1.5)
    label_line(
        ax, at[len(at) // 2], 0.4 * floor[len(at) // 2], "reading\nthe bytes", COLOURS["limit"]
    )
    log2_axis(ax)
    ax.set_yscale("log")
    ax.set(xticks=at[::2] if len(at) > 5 else at, xlim=(at[0] / 2, at[-1] * 2))
    ax.set_ylim(top=4e6 * max(row.seconds for row in rows))
    ax.set_title(title, loc="left", fontweight="bold")


# %% jupyter={"source_hidden": true}
# Draws the plot: one layer's attention, by tokens in the cache
fig, ax = figure(
    height=4.4, xlabel="kv_len (tokens in the cache)", ylabel="µs for one layer's attention"
)
here = {
    "dispatched": ("the kernel, under tlsim", "tlsim", False, "above"),
    "gather": ("gather (grey: reference)", "contiguous", False, "below"),
    "reference": ("", "oracle", True, "below"),
}
draw(ax, rows, bandwidth, here, "This machine's CPU")
if guess := today.guess("cost"):
    gathered = next(row for row in rows if row.path == "gather" and row.kv_len == 1_024)
    prediction_marker(ax, 1_024, gathered.seconds * 1e6 * guess, where="left")
fig

# %% [markdown]
# **How does the kernel do here?** tlsim simulates a GPU in PyTorch: each line of the kernel is a
# tensor operation, started and finished before the next. It was built to be right and to be read, and on a CPU it is
# usually several times slower than the gather. Your factor stands above the plot.
#
# How much of the dispatched path's time is the kernel's? The gather writes through the same mapping. So nearly all
# the time beyond the gather's is the kernel's; the rest is a few checks. Your share at 64 tokens stands above too.
#
# Now look at the exponents. If the slower path has the smaller exponent, that is Day 24's warning: the fixed cost
# of starting some dozens of operations hides the growth, and the *constant* shows it, the cost of a token at the
# largest `kv_len`. If the slower path has the larger exponent, the kernel's own work already dominates its fixed
# cost on your machine.
#
# And the gather against the reference? They do the same work: each writes one token, copies K and V out through a
# mapping, then calls `sdpa`. If your two differ, the reason is noise or the order of turns: the gather runs right
# after the simulator, whose own tensors have just filled the processor's caches.
#
# So why does the engine take this path on a CPU? Because it is the **same kernel** that a GPU runs: text that you
# generate on a laptop has gone through every line of it. `NANOSERVE_BACKEND=reference` is faster where you only want text.
#
# ## The same code path on a GPU
#
# A recorded run comes from one command on a machine with a GPU, and the file carries its label:
#
# `nanoserve bench attention --cache --device cuda --record`
#
# or, where typer is missing, `python -m nanoserve.bench.runner --device cuda --record`: both do the same.
#
# Before you look: the kernel has one program per query head. How many of an H200's 132
# multiprocessors can it use, for SmolLM2 and for Llama?

# %%
for name, shape in MODELS.items():
    print(f"{name}: {shape.n_q} programs in a decode step of one sequence, for 132 multiprocessors")

# %%
from nanoserve.course.exercise import CourseError

try:
    recorded = today.data("attention_h200")
except CourseError:  # not in this copy of the course
    recorded = {"sweeps": []}
else:
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    print(f"{recorded['device']}, driver {recorded['driver']}, {versions}")
    print(f"{recorded['date']}, backend {recorded['backend']}: {recorded['command']}")
    print(f"its memory was read at {recorded['bandwidth'] / 1e9:,.0f} GB/s")
sweeps = [sweep for sweep in recorded["sweeps"] if sweep["dtype"] == "float16"]
for sweep in sweeps:
    print(f"\n{sweep['model']}, {sweep['dtype']}")
    rows_of = {path: [] for path in sweep["fits"]}
    for row in sweep["rows"]:
        rows_of[row["path"]].append(AttentionRow(**row))
    for path, own in rows_of.items():
        fit, end = (
            fit_scaling([row.kv_len for row in part], [row.seconds for row in part])
            for part in (own, own[-3:])
        )
        print(
            f"  {path:10} exponent {fit.exponent:5.2f} (misfit {fit.misfit:.1f}), from "
            f"{own[-3].kv_len:,} on {end.exponent:5.2f}; at {own[-1].kv_len:,} tokens "
            f"{own[-1].seconds * 1e6:.0f} µs, {own[-1].bytes_per_second / recorded['bandwidth']:.1%} of peak"
        )
    first, *_, before, last = rows_of["dispatched"]
    token = (last.seconds - before.seconds) / (last.kv_len - before.kv_len)
    print(
        f"  the kernel, {before.kv_len:,} to {last.kv_len:,} tokens: {token * 1e9:.0f} ns a token; {first.kv_len} "
        f"of them would be {token * first.kv_len * 1e6:.1f} of the {first.seconds * 1e6:.0f} µs"
    )

# %% [markdown]
# Both dtypes, at both ends. And the two models' kernels at the long one:

# %%
for sweep in recorded["sweeps"]:
    at = {(row["path"], row["kv_len"]): AttentionRow(**row) for row in sweep["rows"]}
    print(f"{sweep['model']}, {sweep['dtype']}")
    for n in (64, 16_384):
        kernel, gather = at["dispatched", n], at["gather", n]
        best = max(row.bytes_per_second for row in at.values() if row.kv_len == n)
        faster = n == 64 or sweep["dtype"] == "float32"  # the kernel, in this run
        assert (kernel.seconds < gather.seconds) == faster and best < 0.05 * recorded["bandwidth"]
        print(
            f"  {n:6,} tokens: kernel {kernel.seconds * 1e6:.0f} µs, gather {gather.seconds * 1e6:.0f} µs, "
            f"{gather.seconds / kernel.seconds:.1f} times; the best of all at {best / recorded['bandwidth']:.2%} of peak"
        )
ends = [AttentionRow(**row) for sweep in sweeps for row in sweep["rows"]]
ends = [row for row in ends if (row.path, row.kv_len) == ("dispatched", 16_384)]
for (name, shape), row in zip(MODELS.items(), ends):  # in float16
    print(f"{name:12} {shape.n_q:2} programs, {row.bytes / 1e6:.1f} MB: {row.seconds * 1e6:.0f} µs")

# %% jupyter={"source_hidden": true}
# Draws the plot: one layer's attention, by tokens in the cache
fig, axes = figure(
    height=4.6,
    panels=2,
    xlabel="kv_len (tokens in the cache)",
    ylabel="µs for one layer's attention",
)
there = {
    "dispatched": ("the kernel", "triton", False, "below"),
    "gather": ("gather (grey: reference)", "contiguous", False, "above"),
    "reference": ("", "oracle", True, "below"),
}
for ax, name in zip(axes, MODELS):
    ax.set_title(name, loc="left", fontweight="bold")
    for sweep in (sweep for sweep in sweeps if sweep["model"] == name):
        label = f"{name}, {recorded['device']}"
        draw(
            ax, [AttentionRow(**row) for row in sweep["rows"]], recorded["bandwidth"], there, label
        )
fig

# %% [markdown]
# **The honest reading of the recorded run** (one H200, the label above). Look first at the black line, far below
# everything. No path comes near it at any `kv_len`: the best at 16,384 tokens reaches 1 to 4 % of peak bandwidth.
# At a small `kv_len` the time is what Python and PyTorch need to launch, and the GPU waits for them. That is the
# flat part. How much of it is the kernel's? Take the cost of a token at the long end: 64 tokens cost a microsecond
# or two of more than a hundred. (This is an estimate. A tile has 128 lanes, and a launch has a fixed cost; several
# times as much would still be little.) So on that GPU, most of the time at a small `kv_len` is not the kernel's.
# The kernel is faster there because it is one launch, and the gather is a dozen; it does not read faster. Where
# the dots of all paths rise together, as Llama's do from 128 to 512 tokens, the host was slower for a moment, and
# no path caused it.
#
# At the long end the kernel climbs, and in float16 the gather stays flat until they change places. In float32 the gather
# has twice the bytes to copy. Its last times are higher, and at 16,384 tokens the kernel is still the faster one.
#
# Why does the kernel climb? Because **most of the GPU is idle.** One program per query head is 9 programs for SmolLM2
# and 32 for Llama. The best evidence on this page is the last two lines of the table: Llama has 3.6 times the programs
# and 2.7 times the bytes, and takes hardly longer. Each program runs on a multiprocessor of its own, so
# more programs took no longer. The other multiprocessors have nothing to do, however large `kv_len` is, and each busy
# one walks through all keys. The query heads that share a KV head load the same keys again. The gather
# moves five times the bytes, but with the whole GPU.
#
# And the kernel's exponent over the whole sweep? It is near 0, and describes no part of the sweep: look at the misfit
# beside it, and at the exponent of the last three lengths.
#
# The kernel is right, in every runtime and in the engine's own code path, and it is slow. Week 7 takes the two causes
# one at a time: share the keys between heads, then split the keys between programs.
#
# The plots show one sequence at a time. With 64 sequences there would be 64 times as many programs, and fewer idle
# multiprocessors. It is one run of one GPU, in float16; the file has float32 too.
#
# ## A whole answer
#
# Attention is one part of a step. How much of the time of generation does it take? Day 13's benchmark compares our
# loop with transformers' `generate`: they have the same weights and the same tokens, and they take turns. Today
# the benchmark gets a third path: the same loop with the paged cache, whose attention goes through the dispatcher.

# %%
from collections.abc import Callable

from nanoserve import load_tokenizer
from nanoserve.bench.decode import DecodePath, _loop, decode_benchmark, engine_path, oracle_path
from nanoserve.generate import new_cache
from nanoserve.model import Model, load_model
from nanoserve.oracle import load_oracle


# %%
# lands in nanoserve/bench/decode.py: paged_path
def paged_path(model: Model) -> DecodePath:
    """Our own greedy loop with the paged cache, and the backend that select_backend chooses."""
    return _loop(model, lambda tokens: new_cache("paged", model, tokens))


# %% tags=["nbval-ignore-output"]
model = load_model("smollm2")
prompt = load_tokenizer("smollm2").encode(
    "The tide goes out and the boats lie down in the mud. " * 6
)
paths = {
    "paged, dispatched": paged_path(model),
    "contiguous": engine_path(model, cached=True),
    "transformers": oracle_path(load_oracle("smollm2"), cached=True),
}
with use_kernel("day22"):
    generated = decode_benchmark(paths, "transformers", [prompt[:64]], tokens=5, rounds=2)
theirs = generated[-1]
for row in generated:
    print(
        f"{row.path:18} first token {row.ttft * 1e3:6.0f} ms, then {row.tpot * 1e3:5.0f} ms a token: "
        f"{theirs.tpot / row.tpot:.2f} times transformers' speed"
    )
assert all(row.tpot > 0 for row in generated)

# %% [markdown]
# All three generated the same tokens, or there would be no times. Compare the two lines of our own loop: their
# difference is the price of running a GPU's program on a CPU (`nanoserve bench decode` prints the ratios for other
# lengths, with the engine's own kernel). Week 7 makes this path faster.
#
# ## With your own code

# %%
from nanoserve.bench import runner

with today.mine():
    mine = runner.cache_benchmark(replace(LLAMA_1B, n_q=8, n_kv=2), [2_048], rounds=1)
print([row.path for row in mine])

# %% [markdown]
# ## What you learned
#
# 1. **Time the code path that the engine runs.** The user waits for the write, the mapping and the launch as well.
# 2. **A correctness check must not depend on what it checks:** the oracle makes its own mapping, and runs last.
# 3. **A launch returns before its kernel has run.** A clock that does not wait times the launch alone.
#
# ## The week in questions
#
# Days 21 to 26. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# On the recorded GPU the kernel stays far below the memory's peak bandwidth. How far, and what is the most that *any*
# kernel could reach? Day 27 computes it.
#
# **In one paragraph.** We connected a benchmark to the method that the engine itself calls, and compared
# every path with the oracle, over a mapping of its own, before a clock was read. On the CPU the kernel runs in a
# simulator with a large fixed cost, so its exponent alone misleads, and the constant is needed. On the GPU a launch
# returns early, so the clock waits; and one program per query head leaves most of the GPU idle.
