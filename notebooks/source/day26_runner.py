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
# **Today** you wire the benchmark to the one method that the engine calls, and time all of it: the write, the
# mapping, the dispatch, the launch and the kernel. Live on your CPU, and as it was recorded on a card. The
# kernel's first numbers are honest ones.

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
# Every kernel comes with a benchmark, and the benchmark calls the kernel: with tensors made for it, the mapping
# ready, the keys in their slots. It is quick to write, and it times something that no user ever waits for. **The engine
# runs a path.** On a card, while the history is short, most of the path is not the kernel: you will compute how much.
#
# The other trap lies the other way round: to time the path and not notice that it took another turn. A dispatcher may
# have fallen back, a mapping may be stale. So the rule of Day 13 stands: first the gate, then the clock. A path
# that the oracle does not confirm gets no number.

# %%
today.glossary(
    "end to end", "baseline", "asynchronous", "synchronise", "multiprocessor", "power law"
)

# %% [markdown]
# ## Your turn: `attention_paths`
#
# `scattered_cache` of Day 20 gives a cache that holds `history - 1` tokens in scattered blocks, and the `q`, `k` and `v`
# of the next. Give three functions by name. Each takes a **layer**, writes this step's `k` and `v` there by
# itself, and returns what `q` finds:
#
# | name | what it runs |
# | --- | --- |
# | `"dispatched"` | the cache's own `paged_attention`, and nothing else |
# | `"gather"` | `cache.append`, then `sdpa`, as Day 20's |
# | `"reference"` | `paged_attention_reference` over the layer's pools, through a mapping **of your own** |
#
# The mapping of your own is the point of the third. The cache hands its slot mapping to the dispatcher; if the oracle took
# the same one, a stale slot in it would be wrong twice in the same way, and the gate would open. The
# block table knows the slots too: `cache.table.slot(position)`, after `cache.table.grow(tokens)`. Writing
# is `pool[layer].index_copy_(0, slots, rows)` with rows `[1, n_kv, head_dim]`. Stuck? `today.hint()`.

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
    """Three ways to write step's k and v into a layer and let its q attend: "dispatched", "gather"
    and "reference", each a function of the layer."""
    raise NotImplementedError("your turn")


today.check(attention_paths)

# %% [markdown]
# ## The paths and the gate
#
# Two shapes: of a model, a read needs only the numbers of heads and their width. Then your function, and the **gate**.
# Look at the order in it: the dispatched path goes first. Had another written for it, a path that forgets to write
# would pass.

# %%
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nanoserve.bench.decode import WrongAnswer

# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/runner.py: MODELS, HISTORIES, ROTATED, DATA, Read, attention_paths, gate
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


# %% [markdown]
# Is it shut for what is wrong? Three faults of the kind that gives plausible numbers:

# %%
honest = PagedKVCache.paged_attention


def oldest_lost(self, layer, k, v, q, n_rep, scale=None):
    keys, values = self.append(layer, k, v)
    return sdpa(q, keys[:, :, 1:], values[:, :, 1:], scale)


def never_written(self, layer, k, v, q, n_rep, scale=None):
    return honest(self, layer, torch.zeros_like(k), torch.zeros_like(v), q, n_rep, scale)


def stale_slot(self, layer, k, v, q, n_rep, scale=None):
    self._slots[7] = self._slots[3]  # the cache's own mapping is wrong, and so the read
    return honest(self, layer, k, v, q, n_rep, scale)


for fault in (oldest_lost, never_written, stale_slot, honest):
    cache, step = scattered_cache(LLAMA_1B, 64)
    PagedKVCache.paged_attention = fault
    try:
        gate(attention_paths(cache, step, LLAMA_1B.n_rep), (0, 5), " after 64 tokens")
        print(f"{fault.__name__}: may be timed")
    except WrongAnswer as error:
        print(f"{fault.__name__}: {error}")
    finally:
        PagedKVCache.paged_attention = honest

# %% [markdown]
# ## A clock that waits
#
# On a card there is one more trap, the oldest of all. A launch does not run a kernel. It puts it into a queue and comes
# back at once: the card works **asynchronously**. Here is a made-up card whose kernel takes 300 µs
# and whose launch takes 10, and two clocks:

# %%
from nanoserve.bench.timing import Clock, median_times, read_bandwidth


class Card:
    now = done = 0.0  # the program's time, and when the card will have finished

    def launch(self):
        self.now += 10e-6
        self.done = max(self.done, self.now) + 300e-6

    def plain_clock(self):
        return self.now

    def waiting_clock(self):
        self.now = max(self.now, self.done)  # synchronise, then look
        return self.now


for clock in ("plain_clock", "waiting_clock"):
    card = Card()
    times = median_times({"kernel": card.launch}, clock=getattr(card, clock))
    print(f"{clock:14} {times['kernel'] * 1e6:.0f} µs")

# %% [markdown]
# The plain clock timed the asking. Whoever published that would be thirty times too fast.
#
# ## The benchmark that lands
#
# Three rules of Day 20 return, each a little stricter. **Rotation:** the cache is laid out with as many layers as it takes to
# read 128 MiB before one comes round again, more than an H200 keeps near its processors. **Turns:** the three
# paths alternate, each in another place. **The step:** on a card one turn is as many reads as the model has
# layers, since in a real step they queue up as well, and the program waits once, not thirty times.

# %%
import time
from itertools import cycle


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/runner.py: cache_benchmark, _burst, device_clock
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


# %% [markdown]
# The rest is bookkeeping, for reading rather than writing: what has to stand beside a number so that
# somebody can doubt it. Device, driver, versions, date, the command, the roof, and Day 24's fit of every sweep.

# %%
import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from importlib import metadata

from nanoserve.bench.scaling import ScalingFit, fit_scaling
from nanoserve.kernels.dispatch import select_backend


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/runner.py: Sweep, RecordedRun, measure, main
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


# %% [markdown]
# ## Predict, then measure: your CPU
#
# Here the dispatcher has one choice: the kernel under `tlsim`, every program of it as a row of PyTorch tensors.
# The gather is two copies and PyTorch's own products. SmolLM2's shape: how many times as long
# does the dispatched read take, at 1,024 tokens?

# %%
today.predict("cost", "tlsim's time over the gather's, at 1,024 tokens?", guess=None)

# %% tags=["nbval-ignore-output"]
lengths = (64, 256, 1_024)
rows = cache_benchmark(MODELS["SmolLM2-135M"], lengths, rounds=9)
roof = read_bandwidth(1 << 28)
fits = _fits(rows)
for row in rows:
    print(
        f"{row.history:5} tokens, {row.path:10} {row.seconds * 1e6:7.0f} µs, "
        f"{row.bytes_per_second / roof:5.1%} of the roof"
    )
for path, fit in fits.items():
    print(
        f"{path:10} exponent {fit.exponent:.2f}, {fit.regime}; "
        f"{fit.seconds_per_token * 1e9:,.0f} ns a token at 1,024"
    )
cost = fits["dispatched"].seconds_per_token / fits["gather"].seconds_per_token
print(f"tlsim takes {cost:.1f} times the gather's time; your guess: {today.guess('cost')}")
at_64 = {row.path: row.seconds for row in rows if row.history == 64}
print(
    f"of its path at 64 tokens, {1 - at_64['gather'] / at_64['dispatched']:.0%} is beyond the gather's time"
)
print("backend:", select_backend("cpu"))
assert select_backend("cpu") == "tlsim" and all(row.seconds > 0 for row in rows)

# %% [markdown]
# One function draws this run and the recorded one: each path's times, its fitted line, and in black what
# reading the bytes alone would take.

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, log2_axis, prediction_marker


def draw(ax, rows, roof, names, title):
    """One sweep: dots, Day 24's line through them, and the floor that the roof sets."""
    for path, (name, colour, dashed, where) in names.items():
        at = [row.history for row in rows if row.path == path]
        took = [row.seconds * 1e6 for row in rows if row.path == path]
        fit = fit_scaling(at, took)
        style = (0, (5, 2.5)) if dashed else "solid"
        ax.plot(at, took, "o", color=COLOURS[colour])
        ax.plot(at, [fit.seconds(n) for n in at], color=COLOURS[colour], linestyle=style)
        i = len(at) // 2
        height = max(took[i - 1 : i + 1]) if where == "above" else took[i]
        label_line(ax, at[i], height, name, COLOURS[colour], where)
    floor = [row.bytes / roof * 1e6 for row in rows if row.path == "gather"]
    ax.plot(at, floor, color=COLOURS["limit"], linewidth=1.5)
    label_line(
        ax, at[len(at) // 2], 0.4 * floor[len(at) // 2], "reading\nthe bytes", COLOURS["limit"]
    )
    log2_axis(ax)
    ax.set_yscale("log")
    ax.set(xticks=at[::2] if len(at) > 5 else at, xlim=(at[0] / 2, at[-1] * 2))
    ax.set_ylim(top=4e6 * max(row.seconds for row in rows))
    ax.set_title(title, loc="left", fontweight="bold")


# %%
fig, ax = figure(height=4.4, xlabel="tokens of history", ylabel="µs for one layer's read")
here = {
    "dispatched": ("the kernel, under tlsim", "tlsim", False, "above"),
    "gather": ("gather", "contiguous", False, "above"),
    "reference": ("reference", "oracle", True, "below"),
}
draw(ax, rows, roof, here, "This machine's CPU")
if guess := today.guess("cost"):
    gathered = next(row for row in rows if row.path == "gather" and row.history == 1_024)
    prediction_marker(ax, 1_024, gathered.seconds * 1e6 * guess, where="left")
fig

# %% [markdown]
# **The kernel loses here, and by a wide margin.** tlsim is a model of a card in PyTorch: each line of the kernel is a
# tensor operation, started and finished before the next. It was built to be right and to be read.
#
# How much of its path is the kernel? The gather's path writes through the same mapping, so what the dispatched path takes
# beyond the gather's time is the kernel's, but for a few checks: by far the most of it, even at 64 tokens. Here the kernel
# *is* the path.
#
# Now look at the exponents. Between the kernel and the gather, the slower has the smaller exponent. That is Day 24's
# warning come true. The fixed cost of starting some dozens of operations hides the growth, and the *constant* tells the
# truth: what a token costs at the long end. A fit without its constant would have praised the simulator.
#
# And the gather against the reference? They do the same work: each writes one token, copies the history out through
# a mapping and lays it out as a strip, then calls `sdpa`. On a quiet machine they are close, as Day 24's two paths were. Where
# they are not, it is noise, or the turn: the gather comes right behind the simulator, whose own tensors have just
# filled the processor's caches.
#
# So why does the engine take this path on a CPU? Because it is the **same kernel** that a card runs: what you generate on a laptop
# has gone through every line of it. `NANOSERVE_BACKEND=reference` is quicker where you only want text.
#
# ## The same path on a card
#
# A recorded run comes from one command on a machine with a card, and the file carries its label:
#
# `nanoserve bench attention --cache --device cuda --record`
#
# or, where typer is missing, `python -m nanoserve.bench.runner --device cuda --record`: either does it.
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
    print(f"its memory was read at {recorded['roof'] / 1e9:,.0f} GB/s")
sweeps = [sweep for sweep in recorded["sweeps"] if sweep["dtype"] == "float16"]
for sweep in sweeps:
    print(f"\n{sweep['model']}, {sweep['dtype']}")
    rows_of = {path: [] for path in sweep["fits"]}
    for row in sweep["rows"]:
        rows_of[row["path"]].append(AttentionRow(**row))
    for path, own in rows_of.items():
        fit, end = (
            fit_scaling([row.history for row in part], [row.seconds for row in part])
            for part in (own, own[-3:])
        )
        print(
            f"  {path:10} exponent {fit.exponent:5.2f} (misfit {fit.misfit:.1f}), from "
            f"{own[-3].history:,} on {end.exponent:5.2f}; at {own[-1].history:,} tokens "
            f"{own[-1].seconds * 1e6:.0f} µs, {own[-1].bytes_per_second / recorded['roof']:.1%} of the roof"
        )
    first, *_, before, last = rows_of["dispatched"]
    token = (last.seconds - before.seconds) / (last.history - before.history)
    print(
        f"  the kernel, {before.history:,} to {last.history:,} tokens: {token * 1e9:.0f} ns a token; {first.history} "
        f"of them would be {token * first.history * 1e6:.1f} of the {first.seconds * 1e6:.0f} µs"
    )

# %% [markdown]
# Both dtypes, at both ends. And the two models' kernels at the long one:

# %%
for sweep in recorded["sweeps"]:
    at = {(row["path"], row["history"]): AttentionRow(**row) for row in sweep["rows"]}
    print(f"{sweep['model']}, {sweep['dtype']}")
    for n in (64, 16_384):
        kernel, gather = at["dispatched", n], at["gather", n]
        best = max(row.bytes_per_second for row in at.values() if row.history == n)
        print(
            f"  {n:6,} tokens: kernel {kernel.seconds * 1e6:.0f} µs, gather {gather.seconds * 1e6:.0f} µs, "
            f"{gather.seconds / kernel.seconds:.1f} times; the best of all at {best / recorded['roof']:.2%} of the roof"
        )
ends = [AttentionRow(**row) for sweep in sweeps for row in sweep["rows"]]
ends = [row for row in ends if (row.path, row.history) == ("dispatched", 16_384)]
for (name, shape), row in zip(MODELS.items(), ends):  # in float16
    print(f"{name:12} {shape.n_q:2} programs, {row.bytes / 1e6:.1f} MB: {row.seconds * 1e6:.0f} µs")

# %%
fig, axes = figure(
    height=4.6, panels=2, xlabel="tokens of history", ylabel="µs for one layer's read"
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
        draw(ax, [AttentionRow(**row) for row in sweep["rows"]], recorded["roof"], there, label)
fig

# %% [markdown]
# **The honest reading.** Look first at the black line, far below everything. No path comes near it on a short history,
# nor on a long one: the best at 16,384 tokens reads at 1 to 4 % of the roof. On a short history the time is what
# Python and PyTorch need to *ask* the card, and the card waits for them. That is the flat part. How little of it is the
# kernel? By what a token costs at the long end, 64 tokens are a microsecond or two, of more than a hundred. (An
# estimate: a tile has 128 lanes, and a launch has a start of its own. Several times as much would still be little.) On
# a card, then, most of a short read is not the kernel. The kernel wins there, since it is one launch where the gather is
# a dozen; it does not win by reading faster. Where the dots of all paths rise together, as Llama's do from 128 to 512
# tokens, that is the host: a slower moment of the machine, and nothing that a path did.
#
# At the long end the kernel climbs, and in float16 the gather stays flat until they change places. In float32, where
# it has twice the bytes to copy, its last times are higher, and at 16,384 tokens the kernel still leads.
#
# Why does the kernel climb? Because **most of the card is idle.** One program per query head is 9 programs for SmolLM2
# and 32 for Llama. The best evidence on this page is the last two lines of the table: Llama has 3.6 times the programs
# and 2.7 times the bytes, and takes hardly longer. Each program walks alone, so more of them cost no more: there
# was room. The other multiprocessors have nothing to do, however long the history is, and each busy one walks
# through all of it. The query heads that share a KV head read the same keys again, each for itself. The gather
# moves five times the bytes, but with the whole card.
#
# And the kernel's exponent over the whole sweep? "Flat", and true of no part of it: look at the misfit beside it, and at
# the exponent of the last three histories. Day 24 said so.
#
# That is no failure of the week. The kernel is right, on every engine, in the engine's own path, and the number is on the wall.
# Week 7 takes the two causes one at a time: share the keys between heads, then split the history between programs.
#
# What the plots do not show: one sequence at a time. With 64 of them there would be 64 times the programs, and the card
# far fuller. One card, one driver, one day, in float16; the file has float32 too.
#
# ## A whole answer
#
# A read is one part of a step. What is left of its price in generation? Day 13's benchmark compares our loop
# with transformers' `generate`: same weights, same tokens, taking turns. It gets a third path: the same loop
# with the paged cache, whose read goes where the dispatcher sends it.

# %%
from collections.abc import Callable

from nanoserve import load_tokenizer
from nanoserve.bench.decode import Path, _loop, decode_benchmark, engine_path, oracle_path
from nanoserve.generate import new_cache
from nanoserve.model import Model, load_model
from nanoserve.oracle import load_oracle


# %%
# lands in nanoserve/bench/decode.py: paged_path
def paged_path(model: Model) -> Path:
    """The same with the paged cache, whose read goes where select_backend sends it."""
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
generated = decode_benchmark(paths, "transformers", [prompt[:64]], tokens=5, rounds=2)
theirs = generated[-1]
for row in generated:
    print(
        f"{row.path:18} first token {row.prefill * 1e3:6.0f} ms, then {row.decode * 1e3:5.0f} ms a token: "
        f"{theirs.decode / row.decode:.2f} times transformers' speed"
    )
assert all(row.decode > 0 for row in generated)

# %% [markdown]
# All three said the same tokens, or there would be no times. The contiguous cache keeps up with transformers;
# the simulated kernel does not (`nanoserve bench decode` prints the ratios for other lengths). It is the price of running a card's program on a processor, and the engine's CPU path has
# room to grow: a later phase takes it up.
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
# 1. **Time the path you run, not the part you are proud of.** The write, the mapping and the launch are in
#    the user's way as well.
# 2. **A gate must not lean on what it judges:** the oracle makes its own mapping, and goes last.
# 3. **A launch is a promise, and a clock has to wait for it to be kept.** Else it times the asking.
#
# ## The week in questions
#
# Days 21 to 26. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# The kernel stands far below what the memory could give. How far, and what is the most that *any* kernel could
# reach? Day 27 finds the roof.
#
# **In one paragraph.** We wired a benchmark to the method that the engine itself calls, and let the oracle, with a mapping of its
# own, judge every path before a clock was read. On the CPU the kernel runs in a simulator, slow to start, and so
# its exponent is smaller than that of the gather that beats it; the constant gave it away. On the card a launch is only asked for, so the clock waits; and one
# program per query head leaves most of the card idle. The numbers are honest, and they are the ones to beat.
