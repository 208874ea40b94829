# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 31 · At the roof
#
# Week 7 · Phase 2, paged memory · you need: Day 30 (Split the history)
#
# **Today** you choose the launch: how many keys a tile has, how many warps compute it, and how many tiles are
# loaded ahead. The kernel's source does not change. Then eight shapes are compared with PyTorch's own attention,
# and a launch is recorded once and replayed: on a GPU, and on your CPU.

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

today = day(31)
today.picture("roofline-steps")

# %% [markdown]
# ## Why it matters
#
# Day 29 removed the repeated loads, and Day 30 gave every multiprocessor work. One thing is left: waiting. A
# program requests a tile, waits until it arrives, computes, and requests the next tile. While it waits, it computes
# nothing. While it computes, the memory delivers nothing to it. The remedy is to **request tiles early**. How
# early, and how many bytes? One product answers both, and it holds for every GPU.
#
# The faster the kernel, the more the work around it counts: Python checks the arguments and launches, in every
# layer of every token. The second half of the day removes that work too. It begins at "Record once, replay many
# times": a good place for a pause.

# %%
today.glossary(
    "memory latency", "in flight", "Little's law", "pipeline stage", "warp", "CUDA graph"
)

# %% [markdown]
# ## How many bytes must be in flight?
#
# A number from a GPU's memory arrives some hundreds of nanoseconds after its request: the **memory latency**. In
# that time the memory could deliver `bandwidth * latency` bytes, but it delivers only bytes that somebody has
# requested. So this many bytes must be **in flight** at every moment: requested, and not yet arrived.
#
# $$ \text{bytes in flight} = \text{bandwidth} \cdot \text{latency} $$
#
# This is **Little's law**, and it holds for every queue. If ten people arrive per minute and each stays for five
# minutes, then 50 people are inside.
#
# The recorded GPU reads 4.5 TB in a second (Day 27), and it has 132 multiprocessors. Assume a latency of 600 ns. How
# many KiB must each multiprocessor have in flight, so that the memory is never idle?

# %%
today.predict("flight", "KiB in flight for each multiprocessor?", guess=None, low=0)

# %%
recorded = today.data("roofline_h200")
versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
print(f"{recorded['device']}, driver {recorded['driver']}, {versions}, {recorded['date']}")
print(f"{recorded['command']}: reads {recorded['read'] / 1e12:.2f} TB/s, {recorded['dtype']}")
latency, multiprocessors = 600e-9, 132  # the latency is assumed; the number is an H200's
needed = recorded["read"] * latency / multiprocessors
print(f"in flight: {recorded['read'] * latency / 1e6:.1f} MB, {needed / 1024:.0f} KiB for each one")
if (guess := today.guess("flight")) is not None:
    print(f"your guess: {guess:g} KiB")

# %% [markdown]
# If you have a GPU, measure the latency there. The kernel follows a chain: each load returns the address of the
# next one, so no load can be requested early. One program does that, in a buffer far larger than any cache.

# %%
import torch

from nanoserve.kernels.dispatch import select_backend
from nanoserve.kernels.split_kv import tl, triton


@triton.jit
def follow(next_ptr, last_ptr, STEPS: tl.constexpr):
    at = tl.load(next_ptr)
    for _ in range(STEPS):
        at = tl.load(next_ptr + at)
    tl.store(last_ptr, at)


# %% tags=["nbval-ignore-output"]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if select_backend(device) == "triton" and device.type == "cuda":
    from triton.testing import do_bench

    order = torch.randperm(1 << 26, device=device)  # 512 MiB of addresses, in one circle
    chain = torch.empty_like(order).index_copy_(0, order, order.roll(-1))
    last, steps = torch.empty_like(order[:1]), 10_000
    milliseconds = do_bench(lambda: follow[(1,)](chain, last, STEPS=steps, num_warps=1))
    print(f"this GPU: {milliseconds * 1e6 / steps:.0f} ns from a load to the next")
    assert 100 < milliseconds * 1e6 / steps < 5_000
else:
    print("no GPU here: 600 ns stays an assumption")

# %% [markdown]
# ## Who has them in flight?
#
# The loop of the kernel, with `num_stages=5`. While a program computes tile 0, the loads of later tiles have
# already been requested:
#
# | | table entries | keys and values | computes |
# | --- | --- | --- | --- |
# | tile 0 | arrived | arrived | **now** |
# | tiles 1, 2 | arrived | in flight | |
# | tiles 3, 4 | in flight | | |
#
# A contiguous cache has no table entries to load: the address of every key is known. A **paged** key takes two loads
# that follow each other, since the block's number must arrive before the key can be requested. So each tile ahead
# takes two stages, and one stage computes. With 5 stages, 2 tiles of keys and values are in flight.
#
# Each tile in flight needs a place where it can arrive: **shared memory**, the fast memory inside a multiprocessor.
# Shared memory is small, and all programs on a multiprocessor share it. A program that does not fit waits until
# another one has ended.
#
# ## Your turn: `bytes_in_flight`
#
# Return the bytes of keys and values that **one multiprocessor** has in flight.
#
# | argument | what it is |
# | --- | --- |
# | `tile`, `head_dim`, `itemsize` | a tile has `tile` keys and `tile` values, each of `head_dim` numbers of `itemsize` bytes |
# | `num_stages` | 1, or at least 3; a program keeps `(num_stages - 1) // 2` tiles in flight while it computes, and needs shared memory for all of them |
# | `programs` | how many programs were launched for this multiprocessor |
# | `shared` | bytes of its shared memory |
#
# As many programs run at once as fit into the shared memory, but not more than were launched. If the tiles of one
# program do not fit, raise ValueError with a message that names the shared memory. Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def bytes_in_flight(tile, num_stages, head_dim, itemsize, programs, shared) -> int:
    """Bytes of K and V that the programs of one multiprocessor have in flight."""
    raise NotImplementedError("your turn")


today.check(bytes_in_flight)


# %% jupyter={"source_hidden": true}
# solution: bytes_in_flight
def bytes_in_flight(tile, num_stages, head_dim, itemsize, programs, shared) -> int:
    """Bytes of K and V that the programs of one multiprocessor have in flight."""
    need = (num_stages - 1) // 2 * 2 * tile * head_dim * itemsize
    if need == 0:
        return 0
    if need > shared:
        raise ValueError(f"a program needs {need} bytes of shared memory, and there are {shared}")
    return min(programs, shared // need) * need


# %% [markdown]
# ## Prove it: what the compiler does
#
# Is it true that a tile ahead takes two stages? A compiler needs no GPU. As on Day 23, `shared_memory` names the types
# of all arguments and compiles the kernel for a target:


# %%
import os

from nanoserve.kernels.dispatch import has_triton
from nanoserve.kernels.split_kv import packed_kernel


def shared_memory(capability, stages, tile=64, head_dim=128):
    """Bytes of shared memory that a program of packed_kernel needs, in float16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = packed_kernel.arg_names
    sizes = {"N_REP": 4, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK_SIZE": 16}
    sizes |= {"ROWS": 16, "TILE": tile, "SEQS": 1, "LONG": False}
    types = dict.fromkeys(names, "i32") | {"scale": "fp32"}
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp16")
    types |= dict.fromkeys(("table_ptr", "kv_len_ptr", "start_ptr"), "*i32")
    types |= dict.fromkeys(sizes, "constexpr")
    aligned = [n for n in names if n.endswith("_ptr") or n[:2] in ("k_", "v_", "q_")]
    sixteens = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(packed_kernel, types, sizes, attrs=sixteens)
    options = {"num_warps": 4, "num_stages": stages}
    return compile(source, GPUTarget("cuda", capability, 32), options).metadata.shared


# %% [markdown]
# The shared memory of a program, for two GPUs and by the number of stages:

# %% tags=["nbval-ignore-output"]
able = has_triton() and os.environ.get("TRITON_INTERPRET") != "1"
a_tile = 2 * 64 * 128 * 2  # 64 keys and 64 values of 128 numbers, in 16 bits
for capability, name, choices in ((75, "T4", (3, 5)), (90, "H200", (3, 5, 7))) if able else ():
    found = {stages: shared_memory(capability, stages) for stages in choices}
    steps = [found[stages] - found[stages - 2] for stages in choices[1:]]
    print(f"{name:5} shared memory by stages {found}: two more stages take {steps} bytes")
    expected = 0 if name == "T4" else a_tile
    assert all(expected <= step <= 1.02 * expected for step in steps)
print(f"a tile of 64 keys and 64 values: {a_tile} bytes")
if not able:
    print("To compile here, install Triton and unset TRITON_INTERPRET.")

# %% [markdown]
# On an H200, two more stages take one more tile of shared memory. (The few bytes on top are table entries.) On a T4
# the number of stages changes nothing: a T4 has no instruction that loads into shared memory while the program goes
# on. There, only **more programs** keep more bytes in flight, or more warps in a program.
#
# Now apply your function to an H200. Suppose that a launch gives two programs to each multiprocessor, as for one
# long sequence:

# %%
H200, choices = 228 * 1024, (1, 3, 5, 7)  # bytes of shared memory of a multiprocessor; stages
flight = {
    tile: [bytes_in_flight(tile, stages, 128, 2, 2, H200) / 1024 for stages in choices]
    for tile in (16, 32, 64, 128)
}
for tile, kib in flight.items():
    print(f"{tile:3} keys a tile, {choices} stages: {kib} KiB")

# %% jupyter={"source_hidden": true}
# Draws the plot: bytes in flight of a multiprocessor, by tile and stages
from nanoserve.course.plots import COLOURS, figure, label_line, limit_line, prediction_marker

fig, ax = figure(
    height=3.2,
    xlabel="stages",
    ylabel="KiB in flight",
    title="One multiprocessor, two programs, head_dim 128",
)
for tile, kib in flight.items():
    ax.plot(choices, kib, "o-", color=COLOURS["triton"])
    label_line(ax, choices[-1], kib[-1], f"{tile} keys", COLOURS["triton"])
limit_line(ax, needed / 1024, "needed at 600 ns")
prediction_marker(ax, choices[0], today.guess("flight"))
ax.set(xticks=choices, xlim=(0.5, 8.2))
fig

# %% [markdown]
# Above the line, enough bytes are in flight to keep the memory busy. The law does not say which of these choices is the
# best. A large tile wastes more at the end of a sequence. Many stages leave less shared memory for other programs:
# with 128 keys, 5 stages have no more bytes in flight than 3, because the second program no longer fits. More warps
# share the arithmetic of one tile, and wait for one another. So the last step is to measure.
#
# ## Your turn: `newest_row`
#
# The best parameters that were measured stand in a table, by compute capability. Not every GPU has a row. The rule: a
# GPU takes the **newest row that is not newer than the GPU**, because it has all instructions of older GPUs. Its
# shared memory can still be smaller: a consumer GPU of capability 12.0 has 100 KiB, an H200 228. So the row of an older
# GPU has to be checked on the newer one too.
#
# `rows` is a list of pairs `(capability, launch)` in **any order**; a capability is a pair such as `(7, 5)`. Return
# the launch. If every row is newer than the GPU, raise ValueError with the capability in the message.


# %%
def newest_row(rows, capability):
    """The launch of the newest row that is not newer than a GPU of this compute capability."""
    raise NotImplementedError("your turn")


today.check(newest_row)


# %% jupyter={"source_hidden": true}
# solution: newest_row
def newest_row(rows, capability):
    """The launch of the newest row that is not newer than a GPU of this compute capability."""
    usable = [row for row in rows if row[0] <= capability]
    if not usable:
        raise ValueError(f"no row for compute capability {capability}")
    return max(usable, key=lambda row: row[0])[1]


# %% [markdown]
# The package's table has two keys more: the kernel, and the largest `head_dim`, since a wider key needs more shared
# memory. "packed" and "waves" are both Day 29's kernel without a split: with "packed" all programs run at once, with
# "waves" there are more programs than the GPU runs at once. Unfold the cell below and read the comments: they say
# what chose a row. In float32 one row serves all GPUs. Tensor cores would round the factors to 10 bits after the
# point (TF32), so the kernel does not use them, and arithmetic is its limit.

# %%
from dataclasses import dataclass, replace


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: Launch, LAUNCHES, FLOAT32, launch_of
@dataclass(frozen=True)
class Launch:
    """The launch parameters of a kernel.

    rows and tile are the queries' rows and the keys of a tile; num_warps of 32 threads compute it;
    num_stages iterations are in flight. `programs` is the number of a split's programs for each
    multiprocessor.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs: int = 1


# By kernel, compute capability and the largest head_dim. The comments give what was measured on an
# H200 (9.0) in bfloat16, as a share of the peak read bandwidth or of SDPA's speed. The rows of 7.5
# and 8.0 were compiled, not measured: fewer stages, since these GPUs have less shared memory.
LAUNCHES = {
    ("split", (7, 5), 256): Launch(16, 32, 2, 2, programs=4),
    ("split", (8, 0), 256): Launch(16, 32, 1, 4, programs=4),
    ("split", (9, 0), 64): Launch(16, 64, 1, 5, programs=3),  # 64 x 2,048: 72%; 2 warps: 66%
    ("split", (9, 0), 128): Launch(16, 64, 2, 5, programs=2),  # 4 x 32,768: 93%; 1 warp: 91%
    ("packed", (7, 5), 256): Launch(16, 32, 2, 2),
    ("packed", (8, 0), 256): Launch(16, 32, 1, 4),
    ("packed", (9, 0), 64): Launch(16, 64, 1, 5),  # 64 x 8,192: 97%; 2 warps: 96%
    ("packed", (9, 0), 128): Launch(16, 64, 2, 4),  # 64 x 8,192: 98%; 1 warp, tile 32: 95%
    ("waves", (7, 5), 256): Launch(16, 32, 2, 2),
    ("waves", (8, 0), 256): Launch(16, 32, 1, 4),
    ("waves", (9, 0), 128): Launch(16, 64, 2, 5),  # 256 x 1,024: 95%, ragged 89%; 4 stages: 83%
    ("prefill", (7, 5), 128): Launch(64, 32, 4, 2),
    ("prefill", (7, 5), 256): Launch(32, 16, 4, 2),
    ("prefill", (8, 0), 128): Launch(64, 64, 4, 2),
    ("prefill", (8, 0), 256): Launch(64, 32, 4, 2),
    ("prefill", (9, 0), 64): Launch(64, 128, 4, 2),  # 8,192 tokens: 0.73 of SDPA; tile 64: 0.71
    ("prefill", (9, 0), 128): Launch(128, 128, 8, 3),  # 8,192 tokens: 0.63; 64 rows: 0.55
}
FLOAT32 = Launch(16, 32, 4, 2, programs=2)  # every kernel's: tensor cores would round to TF32


def launch_of(
    kernel: str, capability: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> Launch:
    """The launch parameters of a kernel, by its name in LAUNCHES, on a GPU of a compute capability.

    The row is the newest that is not newer than the GPU. ValueError if there is none.
    """
    if dtype == torch.float32:
        return FLOAT32 if head_dim <= 128 else replace(FLOAT32, tile=16)
    rows = [
        (since, -widest, launch)
        for (name, since, widest), launch in LAUNCHES.items()
        if name == kernel and since <= capability and head_dim <= widest
    ]
    if not rows:
        raise ValueError(
            f"no launch parameters for the kernel {kernel!r} with head_dim {head_dim} on compute "
            f"capability {'.'.join(map(str, capability))}"
        )
    return max(rows, key=lambda row: row[:2])[2]


# %%
for capability, name in (((7, 5), "T4"), ((8, 9), "L4"), ((9, 0), "H200"), ((12, 0), "RTX 5090")):
    found = launch_of("split", capability, 128, torch.bfloat16)
    rows = [
        (since, launch)
        for (kernel, since, widest), launch in LAUNCHES.items()
        if kernel == "split" and widest >= 128
    ]
    print(f"{name:9} {found}: as your rule: {found == newest_row(rows, capability)}")
    assert found == newest_row(rows, capability)

# %% [markdown]
# ## Split, or not?
#
# Yesterday's rule splits a batch unless its sequences make eight programs for each multiprocessor. The sweep on the
# H200 showed one more case. Take 64 sequences of 8,192 tokens with 8 KV heads: 512 programs, four for each
# multiprocessor. All of them run at once. If their sequences are equally long, they also end together, and a split
# can only add the work of the merge: 97% of the bandwidth with it, 98% without. If the lengths differ, most
# programs end early and the GPU runs half empty: there the split keeps 93%, and without it 70% remain.
#
# So the host must know whether the lengths are about equal. It may not read `kv_lens` from the GPU, which would
# wait. But it made the lengths itself, so it knows their sum: `PagedTables.total_kv_len`.

# %%
from nanoserve.kernels.reference import PagedTables
from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.split_kv import num_workers


# %%
# lands in nanoserve/kernels/split_kv.py: choose_launch
def choose_launch(
    tables: PagedTables,
    n_rep: int,
    n_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    multiprocessors: int,
) -> tuple[Launch, int]:
    """The launch parameters of a batch, and the number of workers; 0 workers: no split.

    Queries that need more than one tile are a prefill. Otherwise num_workers decides, with two
    exceptions. Sequences of about equal length that make three or four programs for each
    multiprocessor are not split: these programs run all at once, and end together. And there is no
    worker without tiles: 48 workers of 64 tiles would have two each, so 32 workers are enough.
    """
    num_seqs = len(tables.kv_lens)
    split = launch_of("split", capability, head_dim, dtype)
    if tables.max_query_len > max(split.rows, next_power_of_2(n_rep)) // n_rep:
        return launch_of("prefill", capability, head_dim, dtype), 0
    longest = num_seqs * tables.max_kv_len
    even = tables.total_kv_len is None or tables.total_kv_len >= 0.9 * longest
    if even and 3 * multiprocessors <= num_seqs * n_kv <= 4 * multiprocessors:
        return launch_of("packed", capability, head_dim, dtype), 0
    tiles = num_seqs * max(1, -(-tables.max_kv_len // split.tile))
    workers = num_workers(multiprocessors, n_kv, num_seqs, tiles, split.programs)
    if not workers:
        return launch_of("waves", capability, head_dim, dtype), 0
    share = -(-tiles // workers)
    return split, -(-tiles // share)


# %%
def decode_tables(kv_lens: list[int]) -> PagedTables:
    """Tables of a decode step; a launch is chosen from their sizes only."""
    blocks = torch.zeros(len(kv_lens), 1, dtype=torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    starts = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
    return PagedTables(blocks, lens, starts, 16, 1, max(kv_lens), sum(kv_lens))


batches = {
    "64 of 8,192 tokens": [8_192] * 64,
    "64 of 128 to 8,192": list(range(128, 8_193, 128)),
    "256 of 1,024 tokens": [1_024] * 256,
    "1 of 65,536 tokens": [65_536],
}
for name, kv_lens in batches.items():
    row, workers = choose_launch(
        decode_tables(kv_lens), 4, 8, 128, torch.bfloat16, (9, 0), multiprocessors=132
    )
    print(f"{name:20} {f'{workers} workers' if workers else 'no split':10} {row}")

# %% [markdown]
# ## The launchers
#
# One function launches the kernels of Days 29 and 30, for Triton and for tlsim. Its arguments are what differs: the
# kernels, the row of the table, and the number of workers. With 0 workers it launches `packed_kernel`, and no merge.
# `overlap` is for newer GPUs: the programs of the merge start while the split still runs, and wait inside the kernel
# until the parts are stored. That hides the time to start the second kernel.

# %%
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from types import SimpleNamespace

from nanoserve.kernels import split_kv, tlsim
from nanoserve.kernels.dispatch import (
    _once,
    check_attention,
    check_batch,
    launch,
    paged_attention_dispatch,
    select_backend,
)
from nanoserve.kernels.paged_attention import paged_attention_kernel
from nanoserve.kernels.reference import (
    by_sequence,
    paged_attention_batch_reference,
    paged_attention_reference,
    tolerance,
)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: launch_batch, LOG2_E
def launch_batch(
    kernels: object,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None,
    launch: Launch,
    workers: int = 0,
    overlap: bool = False,
    once: bool = False,
) -> torch.Tensor:
    """Launch packed_kernel; or, with workers, split_kv_kernel and merge_kernel.

    `kernels` has the three under these names, jitted by Triton or by tlsim. Other arguments and
    result as for paged_attention_batch_reference. A split needs sequences whose queries fit in the
    rows of one tile. `overlap` starts the merge early, which needs compute capability 9.0. `once`
    says that each sequence has 1 to launch.tile keys; it has no effect on a split.
    """
    num_tokens, _, head_dim = q.shape
    num_seqs, n_kv = len(tables.kv_lens), k_pool.shape[1]
    rows = max(launch.rows, next_power_of_2(n_rep))
    one_tile = tables.max_query_len <= rows // n_rep  # for each sequence
    longest = max(x.stride(0) * len(x) for x in (k_pool, v_pool))
    shape = {
        "N_REP": n_rep,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "ROWS": rows,
        "TILE": launch.tile,
    }
    sizes = {"BLOCK_SIZE": tables.block_size, "LONG": longest >= 1 << 31, **shape}
    compiler = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    blocks = tables.block_tables.contiguous()  # the engine's tables are: no copy
    kv_lens, starts = tables.kv_lens.contiguous(), tables.query_starts.contiguous()
    scale = head_dim**-0.5 if scale is None else float(scale)
    if scale <= 0:  # the kernels take the largest score before they scale it
        q, scale = q * scale, 1.0
    scale *= LOG2_E
    strides = (*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], blocks.stride(0))
    inputs = (q, k_pool, v_pool, blocks, kv_lens, starts)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    seqs = next_power_of_2(num_seqs)
    if not workers:
        tiles = num_seqs if one_tile else num_tokens // (rows // n_rep) + num_seqs
        seqs = 1 if one_tile else max(2, seqs)
        kernels.packed_kernel[(n_kv, tiles)](
            *inputs, out, scale, num_seqs, *strides, SEQS=seqs, ONCE=once, **sizes, **compiler
        )
        return out
    parts = (workers + num_seqs, n_kv, rows)
    part = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    both = {"SEQS": seqs, "OVERLAP": overlap}
    kernels.split_kv_kernel[(n_kv, workers)](
        *inputs, out, part, lse, scale, num_seqs, *strides, **both, **sizes, **compiler
    )
    parts_at_once = min(  # what the registers of a warp hold; but no more than a sequence has
        max(1, 4096 // shape["BLOCK_D"]), next_power_of_2(-(-workers // num_seqs) + 1)
    )
    compiler = {"num_warps": 1} | ({"launch_pdl": True} if overlap else {})
    kernels.merge_kernel[(n_kv, workers, n_rep * tables.max_query_len)](
        part, lse, kv_lens, starts, out, num_seqs, PARTS=parts_at_once, **both, **shape, **compiler
    )
    return out


LOG2_E = math.log2(math.e)  # 2 ** (x * LOG2_E) is e ** x

# %% [markdown]
# With Triton, `choose_launch` decides. A prefill has no split and larger tiles, because many queries share each key.
#
# Under tlsim each line of a kernel is one operation of torch for all programs, and warps and stages mean nothing. A
# large tile needs fewer turns of the loop, and so fewer operations. Nothing is split, since there are no idle
# multiprocessors. If every sequence has a key, and no history is longer than a tile, the launch sets Day 29's `ONCE`.
# `_graph_of` and `replay=graph` are the subject of the second half of this day.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: paged_attention_batch_triton, paged_attention_batch_tlsim
def paged_attention_batch_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences by Triton: compiled, or interpreted.

    Arguments and result as for paged_attention_batch_reference; ValueError as for check_batch.
    """
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return _batch_triton(q, k_pool, v_pool, tables, n_rep, scale)


def _batch_triton(q, k_pool, v_pool, tables, n_rep, scale):
    capability, multiprocessors = _gpu(q.device)
    launch, workers = choose_launch(
        tables, n_rep, k_pool.shape[1], q.shape[2], q.dtype, capability, multiprocessors
    )
    overlap = capability >= (9, 0) and _can_overlap()
    with torch.cuda.device_of(q):
        return launch_batch(
            split_kv, q, k_pool, v_pool, tables, n_rep, scale, launch, workers, overlap
        )


@cache
def _gpu(device: torch.device) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors) of a GPU. Triton's interpreter acts as a small GPU."""
    if device.type != "cuda":
        return (8, 0), 4
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count


@cache
def _can_overlap() -> bool:
    """Whether this Triton has programmatic dependent launch (3.4 and newer)."""
    import triton.language as tl

    return hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")


def paged_attention_batch_tlsim(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences by the same kernel under tlsim, without tlsim's checks.

    Arguments and result as for paged_attention_batch_reference; ValueError as for check_batch.
    """
    integers = tables.block_tables, tables.kv_lens, tables.query_starts
    graph = _graph_of(q, k_pool, v_pool, integers, tables, n_rep, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if graph.replay(q, k_pool, v_pool, out):
        return out
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return _batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale, graph)


def _batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale, graph):
    rows = next_power_of_2(n_rep * tables.max_query_len)
    rows = min(rows, max(128, next_power_of_2(n_rep)))
    tile = min(1024 if rows < 128 else 256, max(16, next_power_of_2(tables.max_kv_len)))
    n_kv, lens = k_pool.shape[1], tables.kv_lens
    once = tables.max_kv_len <= tile and lens.device.type == "cpu" and bool(lens.min() > 0)
    wave = n_kv * max(1, LANES // (rows * tile * n_kv))  # the programs of whole tiles of queries
    graph = True if scale is not None and scale <= 0 else graph  # the launch replaces q
    with tlsim.options(checks=False, replay=graph, wave=wave):
        kernels, launch = _simulated_kernels(), Launch(rows, tile, 1, 1)
        return launch_batch(kernels, q, k_pool, v_pool, tables, n_rep, scale, launch, once=once)


def _graph_of(q, k_pool, v_pool, integers: tuple[torch.Tensor, ...], *rest) -> tlsim.Graph:
    """The launch of an equal call, checked and captured; an empty graph for the first such call.

    The layers of a step make equal calls: only the numbers in q and the pools differ. A change in
    place of `integers`, the slots or the tables, makes the call another one, since a tensor counts
    such changes. It does not count a change through numpy. A tensor made in torch.inference_mode
    counts none, so no graph is kept for it.
    """
    if any(x.is_inference() for x in integers):
        return _new_graph.__wrapped__()
    shapes = [(x.shape, x.stride(), x.dtype, x.device) for x in (q, k_pool, v_pool)]
    return _new_graph(*rest, *shapes, *(x._version for x in integers))


@lru_cache(maxsize=4)
def _new_graph(*_) -> tlsim.Graph:
    return tlsim.Graph("q_ptr", "k_ptr", "v_ptr", "out_ptr")


@cache
def _simulated_kernels() -> SimpleNamespace:
    """The kernels of split_kv under tlsim, which reads their source once."""
    names = ("packed_kernel", "split_kv_kernel", "merge_kernel")
    return SimpleNamespace(**{name: tlsim.jit(getattr(split_kv, name)) for name in names})


# %% [markdown]
# Last, the functions that the engine calls. The functions for one sequence keep their names and arguments of Day 23.
# From today they call the same kernels: a slot mapping is a block table whose blocks hold one token (Day 28). The
# kernel of Day 22 stays as the baseline, by `use_kernel("day22")`.

# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: KERNELS, use_kernel, paged_attention_triton and 3 more
KERNELS = ("split_kv", "day22")


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Run paged attention with one kernel of KERNELS inside a `with` block, for comparisons.

    "split_kv" is the engine's; "day22" is paged_attention_kernel, one program for each query and
    head. Under "day22" a batch runs sequence by sequence, and reads the tables on the host. Raises
    ValueError for another name.
    """
    if name not in KERNELS:
        raise ValueError(f"there is no kernel {name!r}: the kernels are {', '.join(KERNELS)}")
    token = _kernel.set(name)
    try:
        yield
    finally:
        _kernel.reset(token)


_kernel: ContextVar[str] = ContextVar("kernel", default="split_kv")


def paged_attention_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by Triton: compiled, or interpreted if TRITON_INTERPRET=1 was set.

    Arguments and result as for paged_attention_reference; ValueError as for check_attention.
    """
    check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    if _kernel.get() == "day22":
        with torch.cuda.device_of(q):
            return launch(paged_attention_kernel, q, k_pool, v_pool, slot_mapping, n_rep, scale)
    tables = _once(_tables_of, slot_mapping, q.shape[2])
    return _one_sequence(_batch_triton(_packed(q), k_pool, v_pool, tables, n_rep, scale))


def paged_attention_tlsim(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention by the same kernel under tlsim, with tlsim's checks off for speed.

    Arguments and result as for paged_attention_reference; ValueError as for check_attention.
    """
    if _kernel.get() == "day22":
        check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
        programs = min(q.shape[1] * q.shape[2], 512)
        tile = next_power_of_2(min(len(slot_mapping), 512, (1 << 15) // programs))
        with tlsim.options(checks=False, wave=512):
            kernel = _simulated(paged_attention_kernel)
            return launch(kernel, q, k_pool, v_pool, slot_mapping, n_rep, scale, tile)
    graph = _graph_of(q, k_pool, v_pool, (slot_mapping,), slot_mapping, n_rep, scale)
    if graph.run is None:
        check_attention(q, k_pool, v_pool, slot_mapping, n_rep)
    q = _packed(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not graph.replay(q, k_pool, v_pool, out):
        tables = _once(_tables_of, slot_mapping, len(q))
        out = _batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale, graph)
    return _one_sequence(out)


_simulated = cache(tlsim.jit)  # reads the source of a kernel once
LANES = 1 << 18  # scores of one loop iteration, over all programs of a wave


@lru_cache(maxsize=16)
def _tables_of(slot_mapping: torch.Tensor, _version: int, query_len: int) -> PagedTables:
    with torch.inference_mode(False):  # made in that mode, nothing derived from them would be kept
        return PagedTables.from_slots(slot_mapping, query_len)


def _packed(q: torch.Tensor) -> torch.Tensor:
    """[1, n_q, query_len, head_dim] -> [query_len, n_q, head_dim], a view."""
    return q[0].transpose(0, 1)


def _one_sequence(out: torch.Tensor) -> torch.Tensor:
    """[query_len, n_q, head_dim] -> [1, n_q, query_len, head_dim], a view."""
    return out.transpose(0, 1)[None]


def paged_attention_batch_dispatch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences, by the backend that select_backend chooses.

    Arguments and result as for paged_attention_batch_reference; every backend's result is within
    `tolerance` of the reference's. Raises ValueError as check_batch and select_backend do.
    """
    backend = select_backend(q.device)
    if _kernel.get() == "day22":
        check_batch(q, k_pool, v_pool, tables, n_rep)
        return by_sequence(paged_attention_dispatch, q, k_pool, v_pool, tables, n_rep, scale)
    if backend == "triton":
        return paged_attention_batch_triton(q, k_pool, v_pool, tables, n_rep, scale)
    if backend == "tlsim":
        return paged_attention_batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale)
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return paged_attention_batch_reference(q, k_pool, v_pool, tables, n_rep, scale)


# %% [markdown]
# Prove it: a prefill of 40 tokens, a chunk of 7 after 33, and a decode after 99, in one launch and in one pool. Every
# slot that no sequence owns is NaN.

# %%
from nanoserve.kernels.dispatch import use_backend

generator = torch.Generator().manual_seed(30)
query_lens, kv_lens = (40, 7, 1), (40, 40, 100)
ids = torch.randperm(30, generator=generator)[:21].view(3, 7)
mixed = PagedTables(
    block_tables=ids.int(),
    kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
    query_starts=torch.tensor([0, 40, 47, 48], dtype=torch.int32),
    block_size=16,
    max_query_len=40,
    max_kv_len=100,
)
pools = torch.full((2, 30 * 16, 2, 64), float("nan"))
for i in range(3):
    pools[:, mixed.slot_mapping(i)] = torch.randn(2, kv_lens[i], 2, 64, generator=generator)
queries = torch.randn(48, 6, 64, generator=generator)
expected = paged_attention_batch_reference(queries, *pools, mixed, 3)
atol, rtol = tolerance(torch.float32)
out = paged_attention_batch_tlsim(queries, *pools, mixed, 3)
print("one launch, as the oracle:", torch.allclose(out, expected, atol=atol, rtol=rtol))
assert torch.allclose(out, expected, atol=atol, rtol=rtol)

# %% [markdown]
# And both kernels, in the form for one sequence:

# %%
slots = mixed.slot_mapping(2)
one = queries[47:].transpose(0, 1)[None]  # [1, n_q, 1, head_dim]
expected = paged_attention_reference(one, *pools, slots, 3)
for name in KERNELS:
    with use_kernel(name):
        out = paged_attention_tlsim(one, *pools, slots, 3)
    print(f"{name:9} as the oracle:", torch.allclose(out, expected, atol=atol, rtol=rtol))
    assert torch.allclose(out, expected, atol=atol, rtol=rtol)

# %% [markdown]
# ## Measure a row
#
# A row of the table comes from measuring candidates on the machine that the row is for. On a GPU the cell below tries
# tiles and stages; under tlsim it tries tiles alone. Which tile is the fastest on your machine?

# %%
today.predict("tile", "The fastest tile here?", guess=None, choices=("16", "32", "64", "128"))

# %%
from nanoserve.bench.attention import BatchShape, draw_inputs
from nanoserve.bench.timing import median_times

gpu = device.type == "cuda" and select_backend(device) == "triton"
batch = BatchShape(64, 4_096, 32, 8, 64) if gpu else BatchShape(4, 512, 9, 3, 64)
inputs = draw_inputs(batch, torch.float16 if gpu else torch.float32, device)
arguments = inputs.q, inputs.k_pool, inputs.v_pool, inputs.tables, inputs.n_rep, None


def candidate(tile, stages):
    how = Launch(16, tile, 4, stages)
    with tlsim.options(checks=False, replay=True):  # of no effect on Triton
        return launch_batch(split_kv if gpu else _simulated_kernels(), *arguments, how)


# %% tags=["nbval-ignore-output"]
tried = [(tile, stages) for stages in ((1, 3, 5) if gpu else (1,)) for tile in (16, 32, 64, 128)]
if gpu:
    times = {how: do_bench(lambda: candidate(*how)) / 1e3 for how in tried}
else:
    runs = {how: lambda how=how: candidate(*how) for how in tried}
    times = median_times(runs, rounds=5, warmup=2)
for (tile, stages), seconds in times.items():
    print(f"tile {tile:3}, {stages} stages: {seconds * 1e6:7.0f} µs")
print("the fastest tile:", min(times, key=times.get)[0])
if (guess := today.guess("tile")) is not None:
    print(f"your guess: {guess}")
assert all(seconds > 0 for seconds in times.values())

# %% [markdown]
# If large tiles are the fastest under tlsim, the reason is the number of torch calls: each turn of the loop makes the
# same calls, and a larger tile needs fewer turns. On a GPU the candidates differ in the bytes that they have in flight.

# %% [markdown]
# ## Eight shapes
#
# The recorded run has eight batches of decode, in bfloat16, with tokens in scattered blocks of 16. `sdpa` is
# PyTorch's own attention over **contiguous** keys and values: it has no table to read, and no block to find. `packed`
# is Day 29's kernel without a split, and `split_kv` is what the engine runs: all of Days 29 to 31. The times include
# the merge, and the inputs are rotated so that the L2 cache does not hold them.
#
# Before you look: with SmolLM2's heads, 64 sequences of 2,048 tokens are 192 programs of Day 29's grid, one or two for
# each multiprocessor. Day 29's plot has the packed kernel's share of the peak bandwidth there, and Day 27's has SDPA's.
# How many percent does the engine's kernel reach, with the history split?

# %%
today.predict(
    "smollm2", "64 x 2,048, 9/3 x 64: percent of the peak bandwidth?", guess=None, low=0, high=100
)

# %%
rows = {(row["shape"], row["path"]): row for row in recorded["rows"] if row["kind"] == "decode"}
shapes = list(dict.fromkeys(shape for shape, _ in rows))
paths = list(dict.fromkeys(path for _, path in rows))


def share(shape, path):
    """The share of the recorded GPU's peak bandwidth, or None where the path has no time."""
    row = rows[shape, path]
    return row["seconds"] and row["bytes"] / row["seconds"] / recorded["read"]


print(f"{'share of the peak bandwidth':28}", *(f"{path:>9}" for path in paths))
for shape in shapes:
    cells = (share(shape, path) for path in paths)
    print(f"{shape:28}", *(f"{cell:9.1%}" if cell else f"{'-':>9}" for cell in cells))
of_sdpa = [share(shape, "split_kv") / share(shape, "sdpa") for shape in shapes]
print(f"split_kv has {min(of_sdpa):.0%} to {max(of_sdpa):.0%} of SDPA's speed")
assert all(share(shape, "split_kv") > share(shape, "day22") for shape in shapes)
long, packed, day22 = (share("1 x 65,536, 32/8 x 128", p) for p in ("split_kv", "packed", "day22"))
assert long > 10 * packed and packed < day22
assert share("64 x 2,048, 9/3 x 64", "split_kv") > share("64 x 2,048, 9/3 x 64", "packed")
if (guess := today.guess("smollm2")) is not None:
    print(f"your guess for SmolLM2's heads: {guess:g}%")

# %% jupyter={"source_hidden": true}
# Draws the plot: each shape's share of the peak bandwidth, by code path
LOOKS = {  # name, colour, marker, and the shape at which the name stands
    "day22": ("Day 22", "engine", "v", 6),
    "packed": ("Day 29", "engine", "s", 1),
    "split_kv": ("Day 31", "triton", "o", 2),
    "sdpa": ("SDPA, contiguous", "contiguous", "|", 5),
    "gather": ("gather", "contiguous", "x", 3),
    "flash3": ("FlashAttention-3", "muted", "+", 4),
}
fig, ax = figure(height=4.3, xlabel="share of the peak bandwidth", title=recorded["device"])
for path in (path for path in LOOKS if path in paths):
    name, colour, marker, named = LOOKS[path]
    at = [(share(shape, path), i) for i, shape in enumerate(shapes) if share(shape, path)]
    x, y = zip(*at)
    ax.plot(x, y, marker, color=COLOURS[colour], markersize=11 if marker == "|" else 7)
    where = "left" if path in ("packed", "split_kv") else "right"
    label_line(ax, x[named], y[named], name, COLOURS[colour], where)
ax.axvline(1, color=COLOURS["limit"], linewidth=1.5)
if (guess := today.guess("smollm2")) is not None:
    prediction_marker(ax, guess / 100, shapes.index("64 x 2,048, 9/3 x 64"))
ax.set(
    yticks=range(len(shapes)), yticklabels=shapes, xlim=(0, 1.05), ylim=(len(shapes) - 0.5, -0.8)
)
ax.xaxis.set_major_formatter("{x:.0%}")
fig

# %% [markdown]
# **The honest reading.** On every shape the engine's kernel is faster than Day 22's. For one long sequence the packed
# heads alone are slower than Day 22's kernel: they make fewer programs, 8 instead of 32, and most multiprocessors are
# idle. There the split counts most. Where the kernel is slower than SDPA, you see the price of paging: SDPA finds its
# keys without a table, and in one piece. In return, no memory is reserved for tokens that never come (Day 14).
#
# Where a batch reads hundreds of megabytes, the time of the first and the last tiles hardly counts. The last shape
# reads 8 MB:

# %%
small = rows["1 x 4,096, 32/8 x 64", "split_kv"]
alone = small["bytes"] / recorded["read"]
print(f"{small['bytes'] / 1e6:.1f} MB at the peak bandwidth: {alone * 1e6:.1f} µs")
print(f"its attention took {small['seconds'] * 1e6:.1f} µs; one latency is {latency * 1e6:.1f} µs")
waits = ("lengths and table entries", "keys and values", "parts of the merge", "the last store")
print(f"{len(waits)} waits, one after another: {len(waits) * latency * 1e6:.1f} µs at least")
assert len(waits) * latency > alone

# %% [markdown]
# The waits alone take longer than the read at the peak bandwidth would, because each of them must end before the next
# can begin. To start two kernels, the split and its merge, takes time as well. No choice of tile, warps and stages
# removes that. A share of the peak bandwidth measures a kernel only where there are enough bytes to read.
#
# On your own GPU, `nanoserve bench roofline` measures the same rows.
#
# ## Record once, replay many times

# %%
today.picture("capture-replay")

# %% [markdown]
# A decode step launches the same kernels in every layer of every token, with the same shapes. Only the numbers in the
# tensors change. So record the launches once, and repeat the recording. On a GPU this is a **CUDA graph**. On a CPU,
# `tlsim` does the same with the torch calls that the kernel's lines have made.
#
# It works because a launch reads no length and no table on the host (Day 28): it takes upper bounds. Here is one step
# of three sequences, at most 96 tokens each:

# %%
random = torch.Generator().manual_seed(31)
q = torch.randn(3, 6, 64, generator=random).to(device)  # 3 sequences, 6 query heads, 2 KV heads
k_pool, v_pool = torch.randn(2, 40 * 16, 2, 64, generator=random).to(device)
tables = PagedTables(
    block_tables=torch.randperm(40, generator=random)[:18].view(3, 6).int().to(device),
    kv_lens=torch.tensor([96, 41, 1], dtype=torch.int32, device=device),
    query_starts=torch.arange(4, dtype=torch.int32, device=device),
    block_size=16,
    max_query_len=1,
    max_kv_len=96,
)


def attend():
    return paged_attention_batch_dispatch(q, k_pool, v_pool, tables, 3)


def right(out):
    expected = paged_attention_batch_reference(q, k_pool, v_pool, tables, 3)
    atol, rtol = tolerance(q.dtype)
    return torch.allclose(out, expected, atol=atol, rtol=rtol)


def next_step():
    """New queries, other lengths and other blocks, in the same tensors."""
    q.copy_(torch.randn(q.shape, generator=random))
    tables.kv_lens.copy_(torch.tensor([17, 80, 96]))
    tables.block_tables.copy_(torch.randperm(40, generator=random)[:18].view(3, 6))


# %% [markdown]
# On a GPU, the first call compiles, the second is captured, and `replay` runs what was captured, without Python.

# %%
if device.type == "cuda":
    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    graph.replay()
    captured = right(out)
    next_step()
    graph.replay()  # the same addresses, new numbers
    print("CUDA graph, as captured and with new numbers:", captured, right(out))
    assert captured and right(out)
else:
    print("no GPU here: the next cell does the same on the CPU")

# %% [markdown]
# On a CPU, the launcher switches tlsim's replay on. The first call of a kind is recorded; a later call with the same
# shapes finds the recording. To count the recordings, the cell puts `keep` in the place of the class that makes them.

# %%
from unittest.mock import patch

from nanoserve.kernels.tlsim import replay

made, Recording = [], replay.Recording


def keep(*args):
    made.append(Recording(*args))
    return made[-1]


names = ("block_tables", "kv_lens", "query_starts")
tables = replace(tables, **{name: getattr(tables, name).cpu() for name in names})
q, k_pool, v_pool = (x.cpu() for x in (q, k_pool, v_pool))
_simulated_kernels.cache_clear()  # forgets all recordings
with use_backend("tlsim"), patch.object(replay, "Recording", keep):
    captured = right(attend())
    next_step()
    again = right(attend())
print("tlsim, as recorded and with new numbers:", captured, again)
print("recordings:", len(made))
assert captured and again and len(made) == 1

# %% [markdown]
# The same recording served other queries, other lengths and other blocks. It is a flat list of torch calls. The
# kernel's own Python and the types of the simulator are gone. Calls that depend on the tables alone stand in a
# function of their own, `prepare`. The layers of a step have the same tables, so the launcher keeps the results of
# `prepare` in a `tlsim.Graph`: `_graph_of` finds it by the tables and the shapes, and every layer after the first runs
# `replay` alone. A tensor counts its changes in place, and a changed table has no graph yet.

# %% tags=["nbval-ignore-output"]
source = made[0].source.splitlines()
first = next(i for i, line in enumerate(source) if "replay(" in line)
for line in [source[first][:60] + " ...", "    ...", *source[-16:]]:
    print(line[:96].rstrip())
print(len(source) - first, "lines")

# %% [markdown]
# How many times as fast is the replayed launch? (The tile has 4 rows here: three heads of one query. The 16 rows of
# Day 29 are for tensor cores, and tlsim has none.)

# %%
today.predict("replay", "Time of an ordinary launch over a replayed one?", guess=None, low=0)

# %% tags=["nbval-ignore-output"]


def launch_once(replayed):
    with tlsim.options(checks=False, replay=replayed):
        how = Launch(4, 128, 1, 1)
        return launch_batch(_simulated_kernels(), q, k_pool, v_pool, tables, 3, None, how)


equal = torch.equal(launch_once(False), launch_once(True))
runs = {"ordinary": lambda: launch_once(False), "replayed": lambda: launch_once(True)}
times = median_times(runs, rounds=50, warmup=3)
for name, seconds in times.items():
    print(f"{name:9} {seconds * 1e6:6.0f} µs")
print(f"ordinary over replayed: {times['ordinary'] / times['replayed']:.1f}")
print("equal in every bit:", equal)
if (guess := today.guess("replay")) is not None:
    print(f"your guess: {guess:g}")
assert equal and all(seconds > 0 for seconds in times.values())

# %% [markdown]
# Both launches make the same torch calls on the same numbers, so their results are equal in every bit. The difference
# of their times is the simulator's own work: it walks through the lines of the kernel and checks shapes and types. With
# longer sequences the torch calls themselves take longer, and the ratio falls.
#
# A recording is right only for what it has fixed. A CUDA graph fixes the shapes, the grid and the **addresses** of all
# tensors: new numbers must be copied into the same tensors. tlsim fixes shapes, constants and the turns of the loop, and
# takes the tensors of each launch; where something differs, it records again. It does not see a table that numpy has
# changed, because the tensor does not count that change. And if a launcher read a length on the
# host, a CUDA graph would repeat the old length without an error. That is why a launch takes upper bounds.

# %% [markdown]
# ## The engine on your CPU
#
# Day 26 ended with the price of a GPU's program on a CPU. Since then each key is read once for all its query heads,
# and the launch is replayed. At 256 tokens, how fast is the default path, as a share of the contiguous cache's
# speed?

# %%
today.predict("engine", "Paged speed over contiguous speed, at 256 tokens?", guess=None, low=0)

# %% tags=["nbval-ignore-output"]
from nanoserve import load_model, load_tokenizer
from nanoserve.bench.decode import decode_benchmark, engine_path, paged_path

model = load_model("smollm2")
text = "The tide goes out and the boats lie down in the mud. " * 24
prompt = load_tokenizer("smollm2").encode(text)[:256]
both = {"paged, dispatched": paged_path(model), "contiguous": engine_path(model, cached=True)}
generated = decode_benchmark(both, "contiguous", [prompt], tokens=6, rounds=2)
for row in generated:
    print(
        f"{row.path:18} {1 / row.tpot:5.1f} tokens per second, first token {row.ttft * 1e3:.0f} ms"
    )
paged, contiguous = generated
print(f"the paged cache has {contiguous.tpot / paged.tpot:.2f} of the contiguous cache's speed")
if (guess := today.guess("engine")) is not None:
    print(f"your guess: {guess:g}")
assert all(row.tpot > 0 for row in generated)

# %% [markdown]
# Both lines generated the same tokens, or there would be no times. If the paged cache is slower on your machine, there
# are two reasons: keys and values are copied out of scattered blocks, and each layer makes more torch calls than `sdpa`
# does. In return, every token has gone through the kernel that a GPU runs.
#
# ## With your own code
#
# Everything that you wrote in Phase 2 in one run: the allocator, the block table, the cache, and, by
# `use_kernel("day22")`, your kernel. On a GPU, the engine's own kernel has as many workers as your `num_workers` returns.
# The last line computes that for one long sequence on an H200.

# %%
from nanoserve import LLM, SamplingParams
from nanoserve.kernels import dispatch

llm = LLM("smollm2")
long = PagedTables.from_slots(torch.arange(65_536), query_len=1)
with dispatch.use_kernel("day22"), today.mine(everything=True):
    (answer,) = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
    _, workers = split_kv.choose_launch(long, 4, 8, 128, torch.bfloat16, (9, 0), 132)
print(repr(answer.text))
print("65,536 tokens, 8 KV heads:", workers, "workers")
assert answer.text.startswith(" Paris") and workers == 32

# %% [markdown]
# ## What you learned
#
# 1. **Bytes in flight = bandwidth · latency.** Tiles, stages and programs are three ways to request early; shared
#    memory limits all three.
# 2. **A launch parameter is a measurement.** It belongs in a table with the GPU it was measured on, not in the
#    kernel.
# 3. **What only repeats can be recorded.** A replay leaves out the host's work, and the numbers in the tensors may
#    change.
#
# ## Review of Week 7 and of Phase 2
#
# The first seven questions are about Days 27 to 31, the others about all of Phase 2. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# On the recorded GPU, large batches read their keys and values close to the limit of the memory. A step also reads
# all weights: the model came in four bits per weight, and the engine reads 16 or 32. Day 32 keeps the four bits.
#
# **In one paragraph.** A load takes time to arrive, so bandwidth times latency bytes must be in flight. They need
# shared memory, and a paged key takes two stages to arrive. A table by compute capability holds the launch parameters
# that were measured, and a GPU without a row takes the newest older one. A recorded run compares eight shapes with
# PyTorch's attention over contiguous memory. A launch that reads no length on the host can be recorded and replayed: as a CUDA
# graph on a GPU, and as a list of torch calls on a CPU. The engine runs one kernel on both.
