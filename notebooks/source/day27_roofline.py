# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 27 · Find the roof
#
# Week 7 · Phase 2, paged memory · you need: Day 26 (Time the path you run)
#
# **Today** you count the bytes that attention must read, and measure how fast a machine can read them. Together they
# give the shortest time that any kernel can reach, and the distance of Day 22's kernel from it.

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

today = day(27)
today.picture("roofline-steps")

# %% [markdown]
# ## Why it matters
#
# "The new kernel is three times as fast" says nothing about what is left. It may be at the limit of the machine, or at
# 1 % of it. So before this week changes the kernel, you compute the limit. A machine has two: it reads so many bytes in a
# second, and it computes so many operations. The picture shows both as one black line, the **roofline**, and the steps
# of the next four days below it.
#
# The limit needs no kernel. It follows from what attention *must* read and compute, and from two numbers of the machine.

# %%
today.glossary(
    "peak bandwidth",
    "FLOP",
    "roofline",
    "arithmetic intensity",
    "ridge point",
    "yardstick",
)

# %% [markdown]
# ## What must be read
#
# One decode step, one layer, a batch of sequences. Each sequence has one new token. Its query needs every key and every
# value of **its own** sequence. In bytes:
#
# $$ 2 \cdot \sum_i \text{kv\_len}_i \cdot n_{kv} \cdot \text{head\_dim} \cdot \text{bytes per number} $$
#
# - **2**: a key and a value.
# - **The sum**: the sequences have different lengths (the batch is *ragged*). Nothing behind a sequence's last token is read.
# - **n_kv**, not n_q: the query heads of a group use the same key. It must be read once.
#
# A sequence has one row of queries and one of outputs, beside thousands of rows of K and V. So queries and outputs
# do not count.
#
# ## Your turn: `attention_bytes`
#
# Count these bytes. `kv_lens` holds the tokens of each sequence. Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
from collections.abc import Sequence

import torch


# %%
def attention_bytes(kv_lens: Sequence[int], n_kv: int, head_dim: int, dtype: torch.dtype) -> int:
    """The bytes of keys and values that attention over these sequences must read, in one layer."""
    raise NotImplementedError("your turn")


today.check(attention_bytes)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. Beside the bytes it counts the
# operations. One visible token takes `2 * head_dim` operations of a query head for its score (a product and a sum for
# each channel), and as many for its part of the weighted sum of values.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/roofline.py: attention_bytes, attention_flops
def attention_bytes(kv_lens: Sequence[int], n_kv: int, head_dim: int, dtype: torch.dtype) -> int:
    """The bytes of keys and values that attention over these sequences must read, in one layer.

    kv_lens: the tokens of each sequence. Each key and each value counts once, although n_rep query
    heads use it. Queries and outputs are small and do not count.
    """
    return 2 * sum(kv_lens) * n_kv * head_dim * dtype.itemsize


def attention_flops(
    kv_lens: Sequence[int], n_q: int, head_dim: int, query_lens: Sequence[int]
) -> int:
    """The additions and multiplications of causal attention over these sequences, in one layer.

    A query head and a visible token take 2 * head_dim operations for the score and 2 * head_dim for
    the weighted sum. Query i of a sequence sees its first kv_len - query_len + i + 1 tokens.
    """
    pairs = 0
    for kv_len, query_len in zip(kv_lens, query_lens, strict=True):
        pairs += query_len * (kv_len - query_len) + query_len * (query_len + 1) // 2
    return 4 * n_q * head_dim * pairs


# %% [markdown]
# Two questions about SmolLM2, with 3 KV heads of 64 in 30 layers: how much is one layer of a short chat, and how much do
# all layers read for **one** new token when 64 people chat at once?

# %%
one = attention_bytes([1_000], 3, 64, torch.float32)
many = 30 * attention_bytes([1_000] * 64, 3, 64, torch.float32)
weights = 134_515_008 * 4
print(f"one layer, one sequence of 1,000 tokens: {one / 1e6:.2f} MB")
print(f"30 layers, 64 sequences of 1,000 tokens: {many / 1e9:.2f} GB")
print(f"all weights of the model: {weights / 1e9:.2f} GB")
assert many > 5 * weights

# %% [markdown]
# With 64 sequences, attention reads far more than all the weights. That is why this week is about attention.
#
# ## What is read: count it
#
# Each key must be read once. How often does Day 22's kernel load a key? `tlsim.trace` of Day 21 records each load, so
# you can count. The step is a decode of SmolLM2, with 9 query heads and 3 KV heads. Predict first, from the kernel's
# grid.

# %%
today.predict("loads", "How often does Day 22's kernel load each key?", guess=None, low=0, high=40)

# %%
from nanoserve.kernels import tlsim
from nanoserve.kernels.dispatch import paged_attention_dispatch, use_backend, use_kernel

kv_len, n_rep = 40, 3
q, slots = torch.randn(1, 9, 1, 64), torch.randperm(96)[:kv_len]
k_pool, v_pool = torch.randn(2, 96, 3, 64)
with tlsim.trace() as seen, use_backend("tlsim"), use_kernel("day22"):
    paged_attention_dispatch(q, k_pool, v_pool, slots, n_rep)
must = attention_bytes([kv_len], 3, 64, torch.float32)
loads = [a for a in seen.accesses if a.kind == "load" and a.name in ("k_ptr", "v_ptr")]
asked = sum(access.bytes for access in loads)
different = sum(seen.distinct_bytes("load", name) for name in ("k_ptr", "v_ptr"))
print(f"must be read: {must:,} bytes; different bytes loaded: {different:,}")
print(
    f"loaded in all: {asked:,} bytes, {asked / must:.1f} times; your guess: {today.guess_text('loads')}"
)
assert different == must and asked == n_rep * must

# %% [markdown]
# The kernel touches exactly the bytes that it must, and no slot of another sequence. But it has one program for each query
# head, so it loads each key `n_rep` times: once for each query head of the group. A cache on the chip may answer the
# second and the third load. Then these loads cost no bandwidth, only instructions. Day 29 removes them.
#
# ## Operations per byte
#
# How much arithmetic comes with a byte? This ratio is the **arithmetic intensity**. In a decode step, a key of one KV head
# is used by `n_rep` queries, whatever the length and the batch. (Below, "32/8 heads" are 32 query heads and 8 KV heads,
# as in many Llama models.)
#
# $$ \frac{4 \cdot n_q \cdot \text{head\_dim}}{2 \cdot n_{kv} \cdot \text{head\_dim} \cdot \text{bytes per number}}
# = \frac{2 \cdot n_{rep}}{\text{bytes per number}} $$

# %%
cases = {
    "decode, SmolLM2, float32": ([1_000] * 64, 9, 3, 64, [1] * 64, torch.float32),
    "decode, SmolLM2, bfloat16": ([1_000] * 64, 9, 3, 64, [1] * 64, torch.bfloat16),
    "decode, 32/8 heads, bfloat16": ([8_192] * 64, 32, 8, 128, [1] * 64, torch.bfloat16),
    "decode, 32/32 heads, bfloat16": ([4_096] * 16, 32, 32, 128, [1] * 16, torch.bfloat16),
    "prefill, 32/8 heads, bfloat16": ([2_048], 32, 8, 128, [2_048], torch.bfloat16),
}
intensity = {}
for name, (kv_lens, n_q, n_kv, head_dim, query_lens, dtype) in cases.items():
    flops = attention_flops(kv_lens, n_q, head_dim, query_lens)
    moved = attention_bytes(kv_lens, n_kv, head_dim, dtype)
    intensity[name] = flops / moved
    print(f"{name:30} {intensity[name]:7.1f} FLOP per byte")

# %% [markdown]
# A prefill has a thousand times the intensity of a decode: all queries of the prompt use the same keys. Which limit is
# the nearer one depends on the machine, and on this number alone.
#
# ## Your turn: `roofline_seconds`
#
# The shortest time of a computation: `flops` operations and `bytes_read` bytes, on a machine that does at most
# `peak_flops` operations and reads at most `bandwidth` bytes in a second. A machine reads the next bytes while it computes
# with the last ones. Stuck? `today.hint()`.


# %%
def roofline_seconds(flops: float, bytes_read: float, peak_flops: float, bandwidth: float) -> float:
    """The shortest possible time of a computation on a device."""
    raise NotImplementedError("your turn")


today.check(roofline_seconds)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/roofline.py: roofline_seconds
def roofline_seconds(flops: float, bytes_read: float, peak_flops: float, bandwidth: float) -> float:
    """The shortest possible time of a computation on a device (Williams et al. 2009).

    flops and bytes_read: what the computation must do; peak_flops and bandwidth: what the device
    does per second at most. Arithmetic and reading run at the same time, so the longer time counts.
    """
    return max(flops / peak_flops, bytes_read / bandwidth)


# %% [markdown]
# ## Measure the two limits
#
# Never take them from a data sheet: measure them in the same run as the kernel, with the simplest program that reaches
# them.
#
# - **Reading.** Sum a buffer that is far larger than any cache. PyTorch's `sum` need not reach the limit of a GPU's
#   memory, so there a kernel of a few lines reads: each program sums a piece.
# - **Copying.** Each byte is read and written. Attention hardly writes, so this is the *wrong* limit for it, and
#   it is the limit that many people quote.
# - **Arithmetic.** A product of two large matrices.
#
# On a CPU the clock runs around one call. On a GPU the host's work must not be timed: Day 26's plots showed how large it
# is. So the calls are captured in a **CUDA graph**, a list of launches that the GPU replays by itself, and the clock runs
# around 20 ms of replays. (Day 31 returns to graphs.)
#
# In the folded cell, read `read_kernel`, and the last line of each function that has `bandwidth` or `peak` in its name: the
# bytes or the operations, divided by the seconds. The rest takes the times.

# %%
import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path

from torch.nn.functional import scaled_dot_product_attention

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import DATA, machine, save_run
from nanoserve.bench.runner import ROTATED, device_clock
from nanoserve.bench.timing import Clock, median_times
from nanoserve.kernels.paged_attention import tl, triton  # tlsim's, where Triton is missing


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/roofline.py: Run, read_kernel, read_bandwidth, copy_bandwidth and 3 more
Run = Callable[[], object]


@triton.jit
def read_kernel(x_ptr, sum_ptr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Read x [programs * PIECE] and store the sum of each program's piece: almost only reads."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, PIECE, BLOCK):
        total += tl.load(x_ptr + program * PIECE + start + tl.arange(0, BLOCK))
    tl.store(sum_ptr + program, tl.sum(total, axis=0))


def read_bandwidth(
    device: str | torch.device = "cpu",
    size: int | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
) -> float:
    """The peak rate at which a device reads its memory, in bytes per second.

    Reads `size` bytes, by default 4 GiB on a GPU and 512 MiB elsewhere: far more than a cache
    holds. On a GPU read_kernel reads, elsewhere the fastest of three sums of PyTorch. The time is
    the median of `rounds`.
    """
    device, size, clock = _defaults(device, size, clock)
    if device.type == "cuda" and type(read_kernel).__name__ == "JITFunction":
        return _kernel_bandwidth(device, size, rounds, clock)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    runs: dict[str, Run] = {"sum": x.sum, "amax": x.amax, "dot": lambda: torch.dot(x, x)}
    times = _times({name: [run] for name, run in runs.items()}, device, rounds, clock)
    return 4 * len(x) / min(times.values())


def _kernel_bandwidth(device: torch.device, size: int, rounds: int, clock: Clock) -> float:
    programs, block = 65_536, 2_048
    piece = -(-size // 4 // programs // block) * block  # floats that one program reads
    x = torch.ones(programs * piece, dtype=torch.float32, device=device)
    sums = torch.empty(programs, dtype=torch.float32, device=device)

    def read() -> None:
        read_kernel[(programs,)](x, sums, PIECE=piece, BLOCK=block, num_warps=8)

    seconds = _times({"kernel": [read]}, device, rounds, clock)["kernel"]
    if not bool((sums == piece).all()):
        raise WrongAnswer("read_kernel returns wrong sums")
    return 4 * len(x) / seconds


def copy_bandwidth(
    device: str | torch.device = "cpu",
    size: int | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
) -> float:
    """The rate of a large copy, in bytes per second: a byte that is copied is read and written.

    Arguments as for read_bandwidth: `size` bytes are read, and as many are written.
    """
    device, size, clock = _defaults(device, size, clock)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    times = _times({"copy": [lambda: y.copy_(x)]}, device, rounds, clock)
    return 8 * len(x) / times["copy"]


def peak_flops(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
    rounds: int = 5,
    clock: Clock | None = None,
) -> float:
    """The rate of arithmetic in a product of two size x size matrices, in operations per second."""
    device, _, clock = _defaults(device, None, clock)
    size = size or (8_192 if device.type == "cuda" else 1_024)
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    times = _times({"product": [lambda: a @ b]}, device, rounds, clock)
    return 2 * size**3 / times["product"]


def _defaults(
    device: str | torch.device, size: int | None, clock: Clock | None
) -> tuple[torch.device, int, Clock]:
    device = torch.device(device)
    size = size or (1 << 32 if device.type == "cuda" else 1 << 29)
    return device, size, clock or device_clock(device)


BURST = 0.02  # seconds of a timed burst on a GPU: the start of a burst takes a thousandth of it
GRAPH = 0.004  # seconds of the calls in one CUDA graph


def _times(
    calls: Mapping[str, Sequence[Run]], device: torch.device, rounds: int, clock: Clock
) -> dict[str, float]:
    """Median seconds of one call of each variant. The variants take turns, and each variant goes
    through its calls in turn."""
    bursts = {name: _burst(own, device, clock) for name, own in calls.items()}
    return _time_bursts(bursts, rounds, clock)


def _time_bursts(
    bursts: Mapping[str, tuple[Run, int]], rounds: int, clock: Clock
) -> dict[str, float]:
    runs = {name: run for name, (run, _) in bursts.items()}
    times = median_times(runs, rounds, warmup=1, clock=clock)
    return {name: took / bursts[name][1] for name, took in times.items()}


def _burst(calls: Sequence[Run], device: torch.device, clock: Clock) -> tuple[Run, int]:
    """A function that runs some of the calls, and how many it runs.

    On a GPU, the calls are captured in a CUDA graph, and a burst replays the graph: the host's work
    is not timed. Slow calls are captured two at a time: what such a call finds in the L2 cache is a
    small part of its bytes or of its time. On a CPU, a burst is the next call.
    """
    if device.type != "cuda":
        turn = cycle(calls)
        return lambda: next(turn)(), 1

    def seconds(replay: Run) -> float:
        replay()
        begin = clock()
        replay()
        return max(clock() - begin, 1e-6)

    calls = calls[:2] if seconds(calls[0]) > BURST else calls
    replay = _captured(calls, device)
    passes = -(-GRAPH // seconds(replay))
    if passes > 1:
        calls = list(calls) * int(min(passes, 1 + 2_000 // len(calls)))
        replay = _captured(calls, device)
    replays = int(-(-BURST // seconds(replay)))

    def run() -> None:
        for _ in range(replays):
            replay()

    return run, replays * len(calls)


def _captured(calls: Sequence[Run], device: torch.device) -> Run:
    """The replay of a CUDA graph of the calls, one after another."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls[0]()  # compiles: a capture must not
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


# %% [markdown]
# Does `read_kernel` read every byte once? Count again, under tlsim:

# %%
x, sums = torch.arange(5 * 96.0), torch.zeros(5)
with tlsim.trace() as seen:
    tlsim.jit(read_kernel)[(5,)](x, sums, PIECE=96, BLOCK=32)
print(
    "sums right:",
    torch.equal(sums, x.view(5, 96).sum(1)),
    "- bytes:",
    seen.bytes("load"),
    "of",
    x.nbytes,
)
assert seen.bytes("load") == seen.distinct_bytes("load", "x_ptr") == x.nbytes

# %% [markdown]
# Predict, before you run the next cell: a copy reads a byte and writes a byte. How does its rate, both counted, compare
# with the rate of reading?

# %%
today.predict("copy", "Rate of copying, divided by the rate of reading?", guess=None, low=0)

# %% tags=["nbval-ignore-output"]
where = "cuda" if torch.cuda.is_available() else "cpu"
size = None if where == "cuda" else 1 << 28
read, copied = read_bandwidth(where, size), copy_bandwidth(where, size)
peak = peak_flops(where)
print(
    f"{where}, {torch.get_num_threads()} threads: reads {read / 1e9:.1f} GB/s, copies {copied / 1e9:.1f} GB/s"
)
print(f"copying over reading: {copied / read:.2f}; your guess: {today.guess_text('copy')}")
print(
    f"multiplies {peak / 1e9:,.0f} GFLOP/s in float32: the ridge point is {peak / read:.1f} FLOP per byte"
)
for name in ("decode, SmolLM2, float32", "prefill, 32/8 heads, bfloat16"):
    bound = "memory-bound" if intensity[name] < peak / read else "compute-bound"
    print(f"{name}: {intensity[name]:,.1f} FLOP per byte, {bound} here")
assert min(read, copied, peak) > 0

# %% [markdown]
# A computation with fewer operations per byte than the **ridge point** is memory-bound on this machine; with more, it is
# compute-bound.
#
# ## The paths to compare
#
# A limit and one kernel are not enough. If the kernel is far below the limit, is it the kernel, or can nobody do
# better? So the benchmark runs every code path that a user might choose, on the same inputs: Day 22's kernel; a gather and
# PyTorch's SDPA; **SDPA over contiguous K and V**, which needs no paging and is the yardstick; FlashAttention, if it is
# installed; and the kernels of this week, "packed" of Day 29 and "split_kv" of Day 31.
#
# The next cell is for reading. Find four things in it: the eight shapes of `DECODE`; the **scattered blocks**, with NaN
# in all slots behind a last token; the scale of `q` and its reason; and the check against the oracle, which comes before
# any clock. A shape's name is for example "64 x 8,192, 32/8 x 128": 64 sequences of 8,192 tokens, 32 query heads, 8 KV
# heads of 128. (`PagedTables` is tomorrow's subject: the block tables and lengths of all sequences in one object.)

# %%
from nanoserve.bench.attention import BLOCK_SIZE
from nanoserve.kernels import split_kv
from nanoserve.kernels.dispatch import (
    launch_batch,
    paged_attention_batch_dispatch,
    why_not_triton,
)
from nanoserve.kernels.reference import PagedTables, paged_attention_reference, tolerance


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/attention.py: BatchShape, DECODE, RAGGED, PREFILL and 5 more
@dataclass(frozen=True)
class BatchShape:
    """One call of attention for a batch: sequences, tokens in each, heads, and new tokens in each.

    A ragged batch has lengths drawn uniformly from 1 to kv_len.
    """

    num_seqs: int
    kv_len: int
    n_q: int
    n_kv: int
    head_dim: int
    query_len: int = 1
    ragged: bool = False

    @property
    def name(self) -> str:
        """For example "64 x 8,192, 32/8 x 128"."""
        heads = f"{self.num_seqs} x {self.kv_len:,}, {self.n_q}/{self.n_kv} x {self.head_dim}"
        return f"{heads}, {self.kind}" if self.kind != "decode" else heads

    @property
    def kind(self) -> str:
        """ "decode", "ragged" (decode of sequences of different lengths) or "prefill"."""
        return "ragged" if self.ragged else "decode" if self.query_len == 1 else "prefill"

    @property
    def kv_lens(self) -> list[int]:
        """The tokens of each sequence; every call returns the same numbers."""
        if not self.ragged:
            return [self.kv_len] * self.num_seqs
        random = torch.Generator().manual_seed(self.kv_len)
        return torch.randint(1, self.kv_len + 1, (self.num_seqs,), generator=random).tolist()

    def smaller(self) -> "BatchShape":
        """A shape of the same form for a CPU: a 16th of the sequences and of the tokens."""
        seqs, kv_len, query_len = (
            -(-n // 16) for n in (self.num_seqs, self.kv_len, self.query_len)
        )
        return replace(self, num_seqs=seqs, kv_len=kv_len, query_len=query_len)


DECODE = (
    BatchShape(64, 8_192, 32, 8, 128),
    BatchShape(64, 8_192, 32, 8, 64),
    BatchShape(1, 65_536, 32, 8, 128),
    BatchShape(4, 32_768, 32, 8, 128),
    BatchShape(256, 1_024, 32, 8, 128),
    BatchShape(64, 2_048, 9, 3, 64),  # SmolLM2's heads
    BatchShape(16, 4_096, 32, 32, 128),  # no grouping
    BatchShape(1, 4_096, 32, 8, 64),
)
RAGGED = tuple(replace(DECODE[i], ragged=True) for i in (0, 3, 4))
PREFILL = tuple(BatchShape(1, n, 32, 8, 128, query_len=n) for n in (2_048, 8_192))


@dataclass(frozen=True)
class AttentionInputs:
    """Random inputs of a BatchShape: paged, and the same keys and values in contiguous memory.

    The tokens of a sequence are in blocks of BLOCK_SIZE slots, in random order. The slots behind
    its last token hold NaN.
    """

    shape: BatchShape
    q: torch.Tensor  # [num_tokens, n_q, head_dim]
    k_pool: torch.Tensor  # [num_slots, n_kv, head_dim]
    v_pool: torch.Tensor
    tables: PagedTables
    slots: torch.Tensor  # int64 [num_seqs, kv_len]; a shorter row repeats its first slot at its end
    k: torch.Tensor  # [num_seqs, n_kv, kv_len, head_dim]: the content of `slots`, contiguous
    v: torch.Tensor
    mask: torch.Tensor | None  # [num_seqs, 1, 1, kv_len], 0 or -inf, if the batch is ragged

    @property
    def n_rep(self) -> int:
        """Query heads of one KV head."""
        return self.shape.n_q // self.shape.n_kv

    def queries(self) -> torch.Tensor:
        """q as [num_seqs, n_q, query_len, head_dim], a view."""
        return self.q.unflatten(0, (self.shape.num_seqs, self.shape.query_len)).transpose(1, 2)

    def sequences(self) -> list[torch.Tensor]:
        """The slot mapping of each sequence: int64 [kv_len of the sequence]."""
        return [row[:n] for row, n in zip(self.slots, self.shape.kv_lens, strict=True)]


def draw_inputs(
    shape: BatchShape, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> AttentionInputs:
    """Random inputs; the same numbers for the same arguments on the same device.

    q has a standard deviation of 2. Then some keys get much more weight than others, as in a real
    model, and the output of a long sequence is not near 0, where all results are within the
    tolerance.
    """
    random = torch.Generator(device).manual_seed(seed)
    where = {"device": device, "generator": random}
    lens, longest = shape.kv_lens, shape.kv_len
    held = [-(-n // BLOCK_SIZE) for n in lens]  # blocks of each sequence
    order = torch.randperm(sum(held), **where).to(torch.int32).split(held)
    block_tables = torch.nn.utils.rnn.pad_sequence(order, batch_first=True)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    position = torch.arange(longest, device=device)
    position = torch.where(position < kv_lens[:, None], position, 0)  # [num_seqs, kv_len]
    slots = block_tables.gather(1, position // BLOCK_SIZE).long() * BLOCK_SIZE
    slots += position % BLOCK_SIZE

    num_slots, n_kv, head_dim = sum(held) * BLOCK_SIZE, shape.n_kv, shape.head_dim
    pools = [torch.randn(num_slots, n_kv, head_dim, dtype=dtype, **where) for _ in "kv"]
    owned = torch.zeros(num_slots, dtype=torch.bool, device=device)
    owned[slots.flatten()] = True
    for pool in pools:
        pool[~owned] = torch.nan
    k, v = (pool[slots].transpose(1, 2).contiguous() for pool in pools)
    starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device) * shape.query_len
    bounds = BLOCK_SIZE, shape.query_len, max(lens), sum(lens)
    tables = PagedTables(block_tables, kv_lens, starts, *bounds)
    q = 2 * torch.randn(shape.num_seqs * shape.query_len, shape.n_q, head_dim, dtype=dtype, **where)
    mask = None
    if shape.ragged:
        behind = torch.arange(longest, device=device) >= kv_lens[:, None]
        mask = torch.zeros(behind.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(behind, -torch.inf)[:, None, None]
    return AttentionInputs(shape, q, *pools, tables, slots, k, v, mask)


BatchPath = Callable[[AttentionInputs], torch.Tensor | list[torch.Tensor]]


def batch_paths() -> dict[str, BatchPath]:
    """The code paths that are installed here, by name. Each computes the attention of the inputs:
    [num_tokens, n_q, head_dim], or a list with such a tensor for each sequence.

    "split_kv" is the engine's kernel, "day22" the kernel of Day 22, and "packed", on a GPU only,
    that of Day 29, which never splits a sequence. "gather" copies K and V out of the pools and
    calls PyTorch's SDPA. "sdpa" is PyTorch's SDPA over contiguous K and V, so it
    reads no pool. "flash3" and "flash2" are FlashAttention's, where it can be imported.
    """
    paths: dict[str, BatchPath] = {
        "split_kv": _split_kv,
        "day22": _day22,
        "gather": _gather,
        "sdpa": lambda x: _sdpa(x, x.k, x.v),
    }
    if torch.cuda.is_available() and why_not_triton(torch.device("cuda")) is None:
        paths["packed"] = _packed
    with suppress(ImportError):
        from flash_attn_interface import flash_attn_with_kvcache as flash3

        paths["flash3"] = lambda x: _flash(x, flash3, page_table=x.tables.block_tables)
    with suppress(ImportError):
        from flash_attn import flash_attn_with_kvcache as flash2

        paths["flash2"] = lambda x: _flash(x, flash2, block_table=x.tables.block_tables)
    return paths


def _split_kv(x: AttentionInputs) -> torch.Tensor:
    with use_kernel("split_kv"):
        return paged_attention_batch_dispatch(x.q, x.k_pool, x.v_pool, x.tables, x.n_rep)


def _packed(x: AttentionInputs) -> torch.Tensor:
    capability = torch.cuda.get_device_capability(x.q.device)
    launch = split_kv.launch_of("packed", capability, x.shape.head_dim, x.q.dtype)
    with torch.cuda.device_of(x.q):
        return launch_batch(
            split_kv, x.q, x.k_pool, x.v_pool, x.tables, x.n_rep, scale=None, launch=launch
        )


def _day22(x: AttentionInputs) -> list[torch.Tensor]:
    """One launch for each sequence. In a CUDA graph, the launches run side by side."""
    outputs = []
    with use_kernel("day22"), _side_by_side(x.q.device, x.shape.num_seqs) as streams:
        for q, slots, stream in zip(x.queries(), x.sequences(), streams, strict=True):
            with torch.cuda.stream(stream):
                out = paged_attention_dispatch(q[None], x.k_pool, x.v_pool, slots, x.n_rep)
            outputs.append(out[0].transpose(0, 1))
    return outputs


@contextmanager
def _side_by_side(device: torch.device, count: int) -> Iterator[list["torch.cuda.Stream | None"]]:
    """`count` streams of a GPU, 32 of them different, that start after the current stream's work
    and that the current stream waits for; elsewhere None."""
    if device.type != "cuda":
        yield [None] * count
        return
    here = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(min(count, 32))]
    for stream in streams:
        stream.wait_stream(here)
    yield [streams[i % len(streams)] for i in range(count)]
    for stream in streams:
        here.wait_stream(stream)


def _gather(x: AttentionInputs) -> torch.Tensor:
    k, v = (pool[x.slots].transpose(1, 2) for pool in (x.k_pool, x.v_pool))
    return _sdpa(x, k, v)


def _sdpa(x: AttentionInputs, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's SDPA. In a ragged batch, the query heads of a KV head are passed as queries: with
    a mask, PyTorch has no fast code for grouped heads."""
    q = x.queries()
    if x.mask is None:
        causal = x.shape.query_len > 1
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    else:
        grouped = q.reshape(len(q), x.shape.n_kv, x.n_rep, x.shape.head_dim)
        mask = x.mask.expand(*grouped.shape[:3], -1)
        out = scaled_dot_product_attention(grouped, k, v, mask).reshape(q.shape)
    return out.transpose(1, 2).flatten(0, 1)


def _flash(x: AttentionInputs, flash: Callable[..., torch.Tensor], **table: object) -> torch.Tensor:
    q = x.queries().transpose(1, 2)  # [num_seqs, query_len, n_q, head_dim]
    k, v = (pool.unflatten(0, (-1, BLOCK_SIZE)) for pool in (x.k_pool, x.v_pool))
    return flash(q, k, v, cache_seqlens=x.tables.kv_lens, causal=True, **table).flatten(0, 1)


def check_path(name: str, path: BatchPath, x: AttentionInputs) -> None:
    """Compare a code path with the reference, computed in float32, at the tolerance of q's dtype.

    Compares the first, last, shortest and longest sequence, and of a long prompt the first and the
    last 256 queries: the reference needs much memory. Raises WrongAnswer if a result differs.
    """
    out = path(x)
    out = torch.cat(out) if isinstance(out, list) else out
    if (out.shape, out.dtype) != (x.q.shape, x.q.dtype):
        raise WrongAnswer(f"{name} returns {out.dtype} {list(out.shape)} at {x.shape.name}")
    atol, rtol = tolerance(x.q.dtype)
    out = out.unflatten(0, (x.shape.num_seqs, x.shape.query_len)).transpose(1, 2).float()
    lens, slots = x.shape.kv_lens, x.sequences()
    least, most = min(lens), max(lens)
    for i in sorted({0, len(lens) - 1, lens.index(least), lens.index(most)}):
        k, v = (pool[slots[i]].float() for pool in (x.k_pool, x.v_pool))
        query_len, q = x.shape.query_len, x.queries()[i : i + 1].float()
        for first in sorted({0, max(0, query_len - 256)}):
            end = min(first + 256, query_len)
            seen = torch.arange(lens[i] - query_len + end, device=k.device)
            expected = paged_attention_reference(q[:, :, first:end], k, v, seen, x.n_rep)
            if not torch.allclose(out[i : i + 1, :, first:end], expected, atol=atol, rtol=rtol):
                raise WrongAnswer(f"{name} differs from the reference at {x.shape.name}")


# %% [markdown]
# Day 22's kernel attends for one sequence. So a batch is one launch for each sequence; on a GPU, the launches of a batch run
# side by side.
#
# And how the shapes are timed. Each path goes through several **copies** of the inputs: between two visits to a copy,
# 128 MiB of other keys and values are read, so that no key is found in a cache.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/roofline.py: RooflineRow, time_shape, RooflineRun, measure, main
@dataclass(frozen=True)
class RooflineRow:
    """One code path on one shape: the median seconds of one layer's attention.

    `bytes` and `flops` are what any code path must read and compute. A path that is not right, or
    cannot run, has no time, and `note` says why.
    """

    shape: str  # BatchShape.name
    kind: str  # BatchShape.kind
    path: str
    bytes: int
    flops: int
    seconds: float | None
    note: str = ""


def time_shape(
    shape: BatchShape,
    paths: Mapping[str, BatchPath],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    rounds: int = 9,
    clock: Clock | None = None,
) -> list[RooflineRow]:
    """Check every code path on a shape; then time those that are right, in turns.

    The paths go through several copies of the inputs, so that ROTATED bytes of other keys and
    values are read before a copy is read again: then it has left the cache. A prefill has two
    copies, because its time is not that of reading.
    """
    device, _, clock = _defaults(device, None, clock)
    lens, queries = shape.kv_lens, [shape.query_len] * shape.num_seqs
    moved = attention_bytes(lens, shape.n_kv, shape.head_dim, dtype)
    flops = attention_flops(lens, shape.n_q, shape.head_dim, queries)
    copies = 2 if shape.kind == "prefill" else max(2, -(-ROTATED // moved))
    inputs = [draw_inputs(shape, dtype, device, seed) for seed in range(copies)]
    bursts, notes = {}, {}
    for name, path in paths.items():
        try:
            check_path(name, path, inputs[0])
            bursts[name] = _burst([partial(path, x) for x in inputs], device, clock)
        except WrongAnswer as error:
            notes[name] = str(error)
        except Exception as error:  # of any library: the other paths are timed all the same
            notes[name] = f"cannot run: {type(error).__name__}: {error}".splitlines()[0]
    times = _time_bursts(bursts, rounds, clock)
    return [
        RooflineRow(
            shape.name, shape.kind, name, moved, flops, times.get(name), notes.get(name, "")
        )
        for name in paths
    ]


@dataclass(frozen=True)
class RooflineRun:
    """A whole run: the machine, its peak rates, and the rows of all shapes and code paths."""

    machine: dict[str, object]  # as bench.machine describes it
    command: str
    dtype: str
    read: float  # bytes per second, read_bandwidth
    copy: float  # bytes per second, copy_bandwidth
    flops: float  # operations per second, peak_flops in the dtype
    rows: list[RooflineRow] = field(default_factory=list)

    def save(self, folder: Path = DATA) -> Path:
        """Write the run as roofline_<device>.json. Raises ValueError for a missing folder."""
        own = asdict(self)
        return save_run(own.pop("machine") | own, "roofline", folder)

    @property
    def whole(self) -> bool:
        """Whether every code path of this repository has a time on every shape."""
        return all(row.seconds or row.path.startswith("flash") for row in self.rows)

    def head(self) -> Iterator[str]:
        """The machine and its peak rates as text."""
        about = self.machine
        versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
        driver = f"driver {about['driver']}" if about["cuda"] else f"{about['threads']} threads"
        yield f"{about['device']}, {about['platform']}, {driver}, {versions}, {about['date']}"
        yield (
            f"reads {self.read / 1e9:.1f} GB/s, copies {self.copy / 1e9:.1f} GB/s, multiplies "
            f"{self.flops / 1e12:.2f} TFLOP/s in {self.dtype}"
        )

    def line(self, row: RooflineRow) -> str:
        """A row as text: its time, its rate, and the share of the peak rate that limits it.

        A row of a prefill also has its speed as a share of SDPA's.
        """
        start = f"{row.shape:<30} {row.path:<9}"
        if row.seconds is None:
            return f"{start} {row.note}"
        least = roofline_seconds(row.flops, row.bytes, self.flops, self.read)
        rate = f"{row.bytes / row.seconds / 1e9:8.1f} GB/s"
        if row.kind == "prefill":
            rate = f"{row.flops / row.seconds / 1e12:8.2f} TFLOP/s"
        text = f"{start} {row.seconds * 1e6:11.1f} µs {rate}, {least / row.seconds:6.1%} of peak"
        key = (row.shape, "sdpa")
        sdpa = {(other.shape, other.path): other.seconds for other in self.rows}.get(key)
        if row.kind == "prefill" and sdpa:
            text += f", {sdpa / row.seconds:.2f} of sdpa's speed"
        return text


def measure(
    device: str | None = None,
    dtype: torch.dtype | None = None,
    rounds: int = 9,
    paths: Sequence[str] = (),
    command: str = "",
    show: Callable[[str], object] = lambda line: None,
) -> RooflineRun:
    """Measure a device's peak rates and time every installed code path on all shapes.

    device: a GPU if there is one, else the CPU. dtype: on a CPU float32, on a GPU bfloat16, or
    float16 if its capability is below 8. A CPU gets smaller shapes of the same form. paths: names
    of batch_paths, by default all. `show` is called with each line of text. Raises ValueError for
    another device or path, and for rounds below 1.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot be timed; supported: cpu, cuda")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    installed = batch_paths()
    if unknown := sorted(set(paths) - set(installed)):
        raise ValueError(f"there is no path {unknown[0]!r} here: only {', '.join(installed)}")
    chosen = {name: path for name, path in installed.items() if not paths or name in paths}
    gpu = where.type == "cuda"
    if dtype is None and gpu:
        old = torch.cuda.get_device_capability(where) < (8, 0)
        dtype = torch.float16 if old else torch.bfloat16
    dtype = dtype or torch.float32
    shapes = [shape if gpu else shape.smaller() for shape in (*DECODE, *RAGGED, *PREFILL)]
    run = RooflineRun(
        machine=machine(where),
        command=command,
        dtype=str(dtype).removeprefix("torch."),
        read=read_bandwidth(where),
        copy=copy_bandwidth(where),
        flops=peak_flops(where, dtype),
    )
    for line in run.head():
        show(line)
    for shape in shapes:
        try:
            rows = time_shape(shape, chosen, dtype, where, rounds)
        except torch.OutOfMemoryError:
            show(f"{shape.name:<30} does not fit in the memory of this GPU")
            rows = []
        run.rows.extend(rows)
        for row in rows:
            show(run.line(row))
        if gpu:
            torch.cuda.empty_cache()  # the inputs of the next shape need the memory
    return replace(run, read=max(run.read, read_bandwidth(where)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this file. It needs no third-party package but torch.

    If a code path has no time, exit with code 1 after all lines are printed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="nanoserve.bench.roofline",
        description="Time attention on all shapes, as a share of the peak bandwidth.",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each code path")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--path", action="append", help="only this code path; repeatable")
    parser.add_argument("--record", action="store_true", help=f"write {DATA}/roofline_DEVICE.json")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m nanoserve.bench.roofline", *arguments])
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        run = measure(options.device, dtype, options.rounds, options.path or (), command, print)
        if options.record:
            print(f"recorded in {run.save(DATA).as_posix()}")
    except (ValueError, RuntimeError, AssertionError) as error:  # from torch, without a GPU
        parser.exit(2, f"{parser.prog}: {error}\n")
    if not run.whole:
        sys.exit(1)


# %% [markdown]
# A check that has never refused anything proves nothing. Three plausible faults on a small ragged batch, and an honest path:

# %%
small = BatchShape(3, 37, 6, 2, 16, ragged=True)


def changed(**changes):
    """Day 22's kernel, with other inputs than those that were asked for."""
    return lambda x: _day22(replace(x, **{name: change(x) for name, change in changes.items()}))


faults = {
    "another sequence's keys": changed(slots=lambda x: x.slots.roll(1, 0)),
    "one slot too far": changed(slots=lambda x: (x.slots + 1) % len(x.k_pool)),
    "keys for values": changed(v_pool=lambda x: x.k_pool),
    "day22": _day22,
}
for row in time_shape(small, faults, rounds=1):
    print(row.note or f"{row.path} is timed")

# %% [markdown]
# ## Predict, then measure: this machine
#
# A batch of 8 sequences of 256 tokens with SmolLM2's heads, and a prompt of 128 tokens. On a CPU, Day 22's kernel runs under
# tlsim; on a GPU, Triton compiles it. Which share of the roofline does it reach in the decode step?

# %%
today.predict(
    "share", "Day 22's kernel: percent of the roofline, decode?", guess=None, low=0, high=100
)

# %% tags=["nbval-ignore-output"]
decode, prompt = BatchShape(8, 256, 9, 3, 64), BatchShape(1, 128, 9, 3, 64, query_len=128)
paths = {name: path for name, path in batch_paths().items() if name in ("day22", "gather", "sdpa")}
rows = [
    row for shape in (decode, prompt) for row in time_shape(shape, paths, device=where, rounds=3)
]
shares = {}
for row in rows:
    least = roofline_seconds(row.flops, row.bytes, peak, read)
    shares[row.kind, row.path] = least / row.seconds
    print(
        f"{row.kind:8} {row.path:7} {row.seconds * 1e6:9.1f} µs, {row.bytes / row.seconds / 1e9:6.2f} GB/s, "
        f"{row.flops / row.seconds / 1e9:7.2f} GFLOP/s, {shares[row.kind, row.path]:6.1%} of the roofline"
    )
print(
    f"Day 22's kernel, decode: {shares['decode', 'day22']:.1%}; your guess: {today.guess_text('share')} %"
)
assert len(rows) == 6 and all(row.seconds > 0 for row in rows)

# %% jupyter={"source_hidden": true}
# Draws the plot: this machine's roofline
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(
    height=4.6,
    xlabel="arithmetic intensity (FLOP per byte)",
    ylabel="GFLOP/s",
    title="The roofline of this machine, and attention below it",
)
kernel = "triton" if where == "cuda" else "tlsim"
look = {
    "day22": ("Day 22's kernel", kernel),
    "gather": ("gather, SDPA", "contiguous"),
    "sdpa": ("SDPA, contiguous", "oracle"),
}
ridge = peak / read
ends = (0.3, ridge, max(8 * ridge, 1_000))
ax.plot(ends, [min(peak, read * x) / 1e9 for x in ends], color=COLOURS["limit"], linewidth=1.5)
label_line(ax, ridge, peak / 1e9, "limit: reading", COLOURS["limit"], "above left")
label_line(ax, ends[2], peak / 1e9, "limit: arithmetic", COLOURS["limit"], "above left")
for row in rows:
    at, rate = row.flops / row.bytes, row.flops / row.seconds / 1e9
    name, colour = look[row.path]
    ax.plot([at], [rate], "o", color=COLOURS[colour])
    if row.kind == "decode":
        label_line(ax, at, rate, name, COLOURS[colour], "right")
for kind in ("decode", "prefill"):
    at = next(row.flops / row.bytes for row in rows if row.kind == kind)
    low = min(row.flops / row.seconds / 1e9 for row in rows)
    label_line(ax, at, low / 4, kind, COLOURS["muted"], "below")
ax.set(xscale="log", yscale="log", xlim=(0.2, 2.5 * ends[2]), ylim=(low / 12, 4 * peak / 1e9))
if guess := today.guess("share"):
    at = rows[0].flops / rows[0].bytes
    prediction_marker(ax, at, guess / 100 * min(peak, read * at) / 1e9, where="left")
fig

# %% [markdown]
# Read the plot upwards from a point: the distance to the black line is what a better kernel could win, and nothing can
# pass the line. Where a point of yours is above it, either the measurement of the limit was disturbed or the keys came from
# a cache: run the cells again.
#
# On a CPU, tlsim is a simulator, and its distance says little about the kernel. For the kernel itself we need a GPU.
#
# ## Predict, then look: an H200
#
# The recorded run below comes from one command at the root of a clone, on a machine with a GPU:
#
# `nanoserve bench roofline --record`
#
# or, where typer is missing, `python -m nanoserve.bench.roofline --record`. Eight decode shapes in bfloat16.
# Day 22's kernel has one program for each query head of each sequence. So one sequence with 32 heads gives 32 programs
# for 132 multiprocessors, and 64 sequences give 2,048 programs. What share of the bandwidth does it reach with 64
# sequences of 8,192 tokens?

# %%
today.predict(
    "h200", "Day 22's kernel on an H200, 64 sequences: percent?", guess=None, low=0, high=100
)

# %%
from nanoserve.course.exercise import CourseError

try:
    recorded = today.data("roofline_h200")
except CourseError:  # not in this copy of the course
    recorded = {"rows": []}
else:
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    print(f"{recorded['device']}, driver {recorded['driver']}, {versions}, {recorded['date']}")
    print(recorded["command"])
    print(f"reads {recorded['read'] / 1e9:,.0f} GB/s, copies {recorded['copy'] / 1e9:,.0f} GB/s")
    print(
        f"multiplies {recorded['flops'] / 1e12:,.0f} TFLOP/s: ridge point {recorded['flops'] / recorded['read']:.0f}"
    )
there = {}
for row in recorded["rows"]:
    if row["seconds"] and row["kind"] == "decode":
        there[row["shape"], row["path"]] = row["bytes"] / row["seconds"] / recorded["read"]
shapes = list(dict.fromkeys(shape for shape, _ in there))
for shape in shapes:
    own = [f"{path} {there[shape, path]:6.1%}" for path in look if (shape, path) in there]
    print(f"{shape:25}", "   ".join(own))

# %% [markdown]
# What must hold in any such run, and holds here:

# %%
for shape in shapes:
    assert max(there[shape, "day22"], there[shape, "gather"]) < there[shape, "sdpa"] < 1.03, shape
if shapes:
    assert recorded["flops"] / recorded["read"] > 10 * intensity["decode, 32/8 heads, bfloat16"]
    batch, alone = (there[shape, "day22"] for shape in (DECODE[0].name, DECODE[2].name))
    assert batch > 4 * alone and there[DECODE[6].name, "day22"] > 2 * batch
    print(
        f"64 sequences: {batch:.1%}, your guess: {today.guess_text('h200')}; one sequence: {alone:.1%}"
    )

# %% jupyter={"source_hidden": true}
# Draws the plot: the share of an H200's bandwidth, by shape
fig, ax = figure(
    height=5.2,
    xlabel="share of the measured read bandwidth (%)",
    title="Decode on an H200, bfloat16, scattered 16-token blocks",
)
look["day22"] = ("Day 22's kernel", "triton")
for path, (name, colour) in look.items():
    at = [(100 * there[shape, path], i) for i, shape in enumerate(shapes) if (shape, path) in there]
    ax.plot([x for x, _ in at], [i for _, i in at], "o", color=COLOURS[colour])
    if at:
        label_line(ax, *at[0], name, COLOURS[colour], "above", also=at[1:])
ax.axvline(100, color=COLOURS["limit"], linewidth=1.5)
label_line(ax, 100, len(shapes) - 0.5, "peak", COLOURS["limit"], "left")
ax.set(xlim=(-2, 106), ylim=(len(shapes) - 0.3, -0.9), yticks=range(len(shapes)))
ax.set_yticklabels(shapes)
if (guess := today.guess("h200")) is not None:
    prediction_marker(ax, guess, 0, where="below")
fig

# %% [markdown]
# Day 22's kernel is below SDPA on every shape, as the cell above asserts. There are two causes, and you know both already.
#
# - **One long sequence:** most multiprocessors have no program at all (Day 26). More sequences help: the batch of 64 reaches
#   more than four times the share of the single sequence.
# - **A full batch:** now every multiprocessor has programs, and the kernel itself is slow. Each program multiplies one query
#   with one key at a time, without the GPU's matrix units, and it loads each key again for every query head. Compare the
#   row with 32/32 heads: there every query head has keys of its own, nothing is loaded again, and the same kernel reaches
#   more than twice the share.
#
# The grey dots show that the limit can be approached: that is PyTorch's own kernel over contiguous memory. Paged memory
# has to show that it can do the same. The gather cannot: it moves each byte several times (Day 20). Where a grey dot is far
# from the limit too, the shape is small: to start the kernel and to fill the GPU takes a large part of the time.
#
# The run is one GPU, one driver, one day. It shows decode; the file has ragged batches and prefills as well.
#
# ## With your own code

# %%
from nanoserve.bench import roofline

with today.mine():
    mine = roofline.time_shape(small, {"sdpa": roofline.batch_paths()["sdpa"]}, rounds=1)
    least = roofline.roofline_seconds(mine[0].flops, mine[0].bytes, peak_flops=1e12, bandwidth=1e11)
print(mine[0].path, mine[0].bytes, "bytes")
print(f"at 1 TFLOP/s and 100 GB/s: at least {least * 1e6:.2f} µs")
assert mine[0].bytes == attention_bytes(small.kv_lens, 2, 16, torch.float32)

# %% [markdown]
# ## What you learned
#
# 1. **A speed is a number only beside its limit.** The limit follows from what must be read and computed, and from two
#    measured rates of the machine.
# 2. **The arithmetic intensity of a decode grows neither with the batch nor with the length:** each key serves `n_rep`
#    queries. A prefill of 2,048 tokens has a thousand times as many operations per byte.
# 3. **Count what a kernel loads, not only what it touches.** Day 22's kernel loads each key once for every query head.
#
# ## Tomorrow
#
# One launch for each sequence does not scale, and no server has only one sequence. Day 28 puts many sequences into one
# launch, and each token is found through a block table.
#
# **In one paragraph.** We counted the bytes of keys and values that a decode step must read, and the operations that come
# with them, and measured what a machine can read and compute. The roofline is the lower of the two limits, and on the H200
# of the recorded run a decode lies far on the reading side of it. tlsim's trace showed that Day 22's kernel loads every key
# once for each query head. In the recorded run it is below PyTorch's attention over contiguous memory on every shape.
