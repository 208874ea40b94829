# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 20 · A number on the wall
#
# Week 5 · Phase 2, paged memory · you need: Day 19 (The fused read)
#
# **Today** you measure one layer's attention alone, from 16 to 4,096 tokens in the cache. One variant gathers
# K and V first, and the other calls the cache's own attention. The result is the number that a kernel has to
# beat.

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

today = day(20)
today.picture("gather-against-fused")

# %% [markdown]
# ## Why it matters
#
# Work on speed begins with a **baseline**: a number that is measured before the work, by a benchmark that does
# not change afterwards. If you measure the baseline later, it is easy to make it look worse than it was.
#
# Day 13's rules hold: check the result first, let the variants take turns, know the peak bandwidth. Two rules
# are new, because one layer's K and V are small, and its attention takes little time. **Read from memory**,
# not from the processor's cache: the K and V of a layer that was used a moment ago may still be in the
# processor's cache, and then you measure the cache. And **compare every bit**: two variants that compute the
# same sum must agree exactly.

# %%
today.glossary("baseline", "sweep", "memory traffic", "peak bandwidth", "bandwidth", "interleaved")

# %% [markdown]
# ## The bytes that move
#
# One new token attends in one layer. Attention needs the keys and values of all tokens:
#
# - **In place**, each number is read once, where it lies.
# - **Gathered**, each number is copied twice, and a copy is a read and a write. `pool[layer][slots]` puts the
#   tokens in order, and `.transpose(0, 1).contiguous()` puts them head by head. Then attention reads the
#   second copy.
#
# So the **memory traffic** is one to five. The picture above shows both. A kernel can read in place. The
# query, the scores and the output are small beside K and V.
#
# ## Your turn: `bytes_of_a_read`
#
# Count the bytes of K and V that move for `kv_len` tokens in **one** layer, in place or gathered. The mapping
# holds slots, not blocks, so the empty end of the last block is not read. Stuck? `today.hint()` looks at the
# case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
import torch

from nanoserve.config import ModelConfig


# %%
def bytes_of_a_read(config: ModelConfig, kv_len: int, dtype: torch.dtype, gathered: bool) -> int:
    """The bytes that one layer's attention moves to read the keys and values of `kv_len` tokens:
    where they lie, or, gathered, through a copy of them."""
    raise NotImplementedError("your turn")


today.check(bytes_of_a_read)


# %% jupyter={"source_hidden": true}
# solution: bytes_of_a_read
def bytes_of_a_read(config: ModelConfig, kv_len: int, dtype: torch.dtype, gathered: bool) -> int:
    """The bytes that one layer's attention moves to read the keys and values of `kv_len` tokens:
    where they lie, or, gathered, through a copy of them."""
    once = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize
    return 5 * once if gathered else once


# %% [markdown]
# ## The benchmark that lands
#
# The benchmark uses two shapes: the shape of our own model, and the shape of Llama-3.2-1B, from its published
# configuration. Attention needs only the shape. K and V are random numbers in **every second block of a pool,
# in descending order**, so that no two blocks lie side by side by luck. Each round uses the **next layer**,
# and the two variants use different layers. Otherwise the second variant would find in the processor's cache
# what the first variant has just read. (In a first version of this benchmark both variants used the same
# layer, one after the other. The fused variant looked 5 % faster, and was not.)
#
# Find three things in the cell: the line that compares the two results, the error that is raised if they
# differ, and the clock, which is read only after that. `attend_in_place` does what Day 19's `paged_attention`
# does. It is a function of its own, because from Day 25 on the package's method calls a dispatcher. The
# baseline stays Day 19's sum, and neither variant runs the dispatcher's checks.

# %%
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.timing import Clock, median_times, read_bandwidth
from nanoserve.cache import BLOCK_SIZE, KVPool, PagedKVCache
from nanoserve.config import parse_config
from nanoserve.kernels.reference import paged_attention_reference
from nanoserve.layers import sdpa


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/attention.py: LLAMA_1B, AttentionRow, attention_benchmark and 2 more
LLAMA_1B = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2_048,
        "intermediate_size": 8_192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
)


@dataclass(frozen=True)
class AttentionRow:
    """One code path at one length: median seconds of one layer's attention of one new token.

    `bytes` counts the layer's keys and values once: every code path must read them.
    """

    path: str
    kv_len: int
    seconds: float
    bytes: int

    @property
    def bytes_per_second(self) -> float:
        """The rate at which keys and values were read."""
        return self.bytes / self.seconds


def attention_benchmark(
    config: ModelConfig,
    kv_lens: Sequence[int] = (16, 64, 256, 1024, 4096),
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    clock: Clock = time.perf_counter,
) -> list[AttentionRow]:
    """Time one layer's attention of one new token over scattered blocks, on two code paths.

    "gather" copies K and V out of the pool, then attends; "fused" is `attend_in_place`. Raises
    WrongAnswer unless the two results are equal in every bit. Each round moves to the next layer,
    and the two code paths use different layers, so that K and V of a long sequence are no longer in
    the processor's cache.
    """
    rows = []
    for kv_len in kv_lens:
        cache, step = scattered_cache(config, kv_len, dtype)
        layers = [0] * 2  # the layers that gather and fused used last

        def gather(layers=layers, cache=cache, step=step) -> torch.Tensor:
            layers[0] = (layers[0] + 1) % (config.num_layers - 1)
            return sdpa(step["q"], *cache.append(layers[0], step["k"], step["v"]))

        def fused(layers=layers, cache=cache, step=step) -> torch.Tensor:
            layers[1] = (layers[1] + 1) % (config.num_layers - 1)
            return attend_in_place(cache, layers[1], step["k"], step["v"], step["q"], config.n_rep)

        paths = {"gather": gather, "fused": fused}
        # Run fused first: gather also writes K and V, which would hide a missing write.
        if not torch.equal(fused(), gather()):
            raise WrongAnswer(f"gather and fused differ at {kv_len} tokens")
        layers[1] += config.num_layers // 2  # far from the layer that gather read just now
        moved = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize  # keys and values
        times = median_times(paths, rounds, warmup=2, clock=clock)
        rows += [AttentionRow(path, kv_len, seconds, moved) for path, seconds in times.items()]
    return rows


def attend_in_place(
    cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, n_rep: int
) -> torch.Tensor:
    """PagedKVCache.paged_attention of Day 19: write k and v, then call the reference.

    Arguments and result as for PagedKVCache.paged_attention. "gather" runs no checks of the
    dispatcher, so this function does not call the dispatcher either: the two code paths differ only
    in how they read K and V.
    """
    slots = cache._write(layer, k, v)
    return paged_attention_reference(q, cache.pool.k[layer], cache.pool.v[layer], slots, n_rep)


def scattered_cache(
    config: ModelConfig,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[PagedKVCache, dict[str, torch.Tensor]]:
    """A cache of kv_len - 1 random tokens, and the next token's q, k and v by name.

    q is [1, n_q, 1, head_dim]; k and v are [1, n_kv, 1, head_dim]. The tokens are in every second
    block of the pool, from the last block down. The next token's step can be repeated in every
    layer but the last, because only the last layer advances seq_len.
    """
    blocks = -(-kv_len // BLOCK_SIZE)
    pool = KVPool(config, 2 * blocks, BLOCK_SIZE, dtype, device)
    taken = pool.allocator.allocate_for(2 * blocks * BLOCK_SIZE)
    for block in taken[1::2]:  # the free list is last in, first out: descending order
        pool.allocator.free(block)
    random = torch.Generator().manual_seed(kv_len)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, tokens, config.head_dim, generator=random)
        return drawn.to(device, dtype)

    cache = PagedKVCache(pool)
    for layer in range(config.num_layers):
        if kv_len > 1:
            cache.append(layer, draw(config.n_kv, kv_len - 1), draw(config.n_kv, kv_len - 1))
    return cache, {"q": draw(config.n_q, 1), "k": draw(config.n_kv, 1), "v": draw(config.n_kv, 1)}


# %% [markdown]
# `bytes` counts K and V once, for both variants: no variant can read fewer bytes. So bytes per second counts
# only the **useful** bytes. A variant that moves each byte five times reaches a lower number. The assert
# below compares `bytes` with the exercise's count in place:

# %%
from nanoserve import load_model

config = load_model("smollm2").config
rows = attention_benchmark(LLAMA_1B, [48], rounds=1)
assert rows[0].bytes == bytes_of_a_read(LLAMA_1B, 48, torch.float32, gathered=False)
for name, shape in (("SmolLM2-135M", config), ("Llama-3.2-1B", LLAMA_1B)):
    once, copied = (bytes_of_a_read(shape, 4_096, torch.float32, copy) for copy in (False, True))
    print(
        f"{name}, 4,096 tokens, one layer: {once / 1e6:.1f} MB in place, {copied / 1e6:.1f} gathered"
    )

# %% [markdown]
# ## Prove it: a benchmark that can be wrong
#
# The blocks really are scattered:

# %%
cache, _ = scattered_cache(config, 50)
print(
    "49 tokens held, in blocks", cache.table.blocks, "of a pool of", cache.pool.allocator.num_blocks
)

# %% [markdown]
# Now check the correctness check. Let the fused variant lose its oldest token: the benchmark must raise an
# error and return no time.

# %%
right = attend_in_place


def one_token_short(cache, layer, k, v, q, n_rep):
    keys, values = cache.append(layer, k, v)
    return sdpa(q, keys[:, :, 1:], values[:, :, 1:])


attend_in_place = one_token_short
try:
    attention_benchmark(config, [64])
except WrongAnswer as error:
    print(error)
finally:
    attend_in_place = right

# %% [markdown]
# And check the arithmetic with a scripted clock. The clock advances by one second each time it is read, so
# each run takes exactly one second.

# %%
ticks = count()
for row in attention_benchmark(config, [16, 64], rounds=3, clock=lambda: float(next(ticks))):
    print(
        f"{row.path:6} {row.kv_len:3} tokens: {row.seconds} s, {row.bytes_per_second:,.0f} bytes/s"
    )

# %% [markdown]
# ## Predict, then measure
#
# How fast is the fused variant at 4,096 tokens, compared with the gather? Before you guess, look once more at
# the function that `attend_in_place` calls.

# %%
question = "At 4,096 tokens: time of gather, divided by the time of fused?"
today.predict("gain", question, guess=None, low=0)

# %% tags=["nbval-ignore-output"]
lengths = (16, 64, 256, 1_024, 4_096)
peak = read_bandwidth(1 << 28)
shapes = {"SmolLM2-135M": config, "Llama-3.2-1B": LLAMA_1B}
rows = {name: attention_benchmark(shape, lengths) for name, shape in shapes.items()}
peak = max(peak, read_bandwidth(1 << 28))
print(f"peak bandwidth: {peak / 1e9:.1f} GB/s")
for name, results in rows.items():
    for gather, fused in zip(results[::2], results[1::2]):
        print(
            f"{name} {gather.kv_len:5} tokens: gather {gather.seconds * 1e6:5.0f} µs, fused "
            f"{fused.seconds * 1e6:5.0f} µs, {fused.bytes_per_second / 1e9:4.1f} GB/s, "
            f"{fused.bytes_per_second / peak:3.0%} of peak"
        )
gain = rows["Llama-3.2-1B"][-2].seconds / rows["Llama-3.2-1B"][-1].seconds
print(f"fused is {gain:.2f} times as fast at 4,096; your guess: {today.guess_text('gain')}")
assert 0.2 < gain < 5
for results in rows.values():
    assert all(row.bytes_per_second < 0.5 * peak for row in results[:2])  # at 16 tokens
    assert results[-1].seconds > 2 * results[1].seconds  # fused: 4,096 tokens against 16
assert all(0 < row.bytes_per_second < 3 * peak for results in rows.values() for row in results)

# %% jupyter={"source_hidden": true}
# Draws the plot: one layer's attention, by tokens in the cache
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, axes = figure(
    height=4.6, panels=2, xlabel="tokens in the cache", ylabel="µs for one layer's attention"
)
for ax, (name, results) in zip(axes, rows.items()):
    took = {p: [r.seconds * 1e6 for r in results if r.path == p] for p in ("gather", "fused")}
    floor = [row.bytes / peak * 1e6 for row in results[::2]]
    line(ax, lengths, took["gather"], "", COLOURS["contiguous"])
    line(ax, lengths, took["fused"], "", COLOURS["engine"])
    ax.plot(lengths, floor, color=COLOURS["limit"], linewidth=1.5)
    label_line(ax, 16, took["gather"][0], "gather", COLOURS["contiguous"], "above")
    label_line(ax, 16, took["fused"][0], "fused", COLOURS["engine"], "below")
    label_line(ax, 256, 0.4 * floor[2], "reading\nthe bytes", COLOURS["limit"])
    log2_axis(ax)
    ax.set_yscale("log")
    ax.set_title(name, loc="left", fontweight="bold")
    ax.set(xlim=(7, 24_000), ylim=(1, 4 * max(took["gather"])), xticks=lengths)
if guess := today.guess("gain"):
    prediction_marker(axes[1], 4_096, took["gather"][-1] / guess, where="right")
fig

# %% [markdown]
# The two variants do the same work: `attend_in_place` calls the reference, and the reference gathers and then
# calls `sdpa`. So the fused variant **has no reason to be faster**. If your lines differ, run the cell again:
# a difference that comes from the machine changes from run to run.
#
# Read two facts from the plot all the same:
#
# - **With few tokens, few bytes have to be read.** At 16 tokens, the useful bytes explain less than half of
#   the time, as the cell above asserts. The rest is arithmetic, and PyTorch's overhead for a dozen small
#   operations. A kernel is *one* operation.
# - **With many tokens, the time grows.** The black line shows how long the useful bytes take at peak
#   bandwidth. The distance between this line and the others is the most that a kernel can win.
#
# ## Where does the time go?
#
# How much can a kernel win if it does not copy? Measure the parts at 4,096 tokens of Llama's shape: the copy
# alone, and attention alone over K and V that are already contiguous.

# %% tags=["nbval-ignore-output"]
cache, step = scattered_cache(LLAMA_1B, 4_096)
copies = [cache.append(i, step["k"], step["v"]) for i in range(LLAMA_1B.num_layers - 1)]
turn = {part: cycle(range(len(copies))) for part in ("copy", "attend", "both")}
for _ in range(5):
    next(turn["attend"])  # each part begins at another layer, so that no part
for _ in range(10):
    next(turn["both"])  # finds in the processor's cache what another has just read


def copy():
    return cache.append(next(turn["copy"]), step["k"], step["v"])


def attend():
    return sdpa(step["q"], *copies[next(turn["attend"])])


def both():
    layer = next(turn["both"])
    return attend_in_place(cache, layer, step["k"], step["v"], step["q"], LLAMA_1B.n_rep)


parts = median_times({"copy": copy, "attend": attend, "both": both}, rounds=20, warmup=2)
once = bytes_of_a_read(LLAMA_1B, 4_096, torch.float32, gathered=False)
parts["floor"] = once / peak
print(", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items()))
assert parts["copy"] < 3 * parts["both"]

# %% jupyter={"source_hidden": true}
# Draws the plot: One layer's attention at 4,096 tokens
fig, ax = figure(height=2.9, xlabel="milliseconds", title="One layer's attention at 4,096 tokens")
bars = (
    ("copy and attention", "both", "engine"),
    ("the copy alone", "copy", "contiguous"),
    ("attention alone", "attend", "muted"),
    ("reading the bytes", "floor", "limit"),
)
for row, (_, part, colour) in enumerate(bars):
    ax.barh(row, parts[part] * 1e3, color=COLOURS[colour], height=0.6)
    label_line(ax, parts[part] * 1e3, row, f"{parts[part] * 1e3:.1f}", COLOURS[colour])
ax.set(yticks=range(4), xlim=(0, 1.15 * max(parts.values()) * 1e3))
ax.set_yticklabels([name for name, *_ in bars])
ax.invert_yaxis()
ax.grid(visible=False, axis="y")
fig

# %% [markdown]
# A kernel does not copy, so it can save the second bar. It still has to attend, as in the third bar. No
# variant that reads K and V from memory can be faster than the last bar. The second and the third bar need
# not add up to the first: right after a copy, attention may find K and V in the processor's cache.
#
# The bars show the parts. The baseline is the time of the **sweep** at 4,096 tokens. Beside it stands the time
# of the bytes at peak bandwidth. The first is the time of attention today, and the second is the least that
# it can be.
#
# These plots show one sequence, one number of threads, float32 and a CPU. With 64 sequences at once, the
# operations are larger, and the sequences share the overhead. A GPU reads memory much faster (the memory of an
# H200 reaches 4,800 GB/s by its data sheet), so the overhead of a dozen small operations weighs more there.
# Week 6 will not beat this number at once: its kernel runs in a simulator first, because it has to be right
# before it is fast.
#
# The command line runs the same benchmark, and writes its rows to a file:
#
# `nanoserve bench attention --csv attention.csv`
#
# ## What you learned
#
# 1. **Measure the baseline before the work,** with a benchmark that does not change afterwards.
# 2. **A new name is not a new speed.** The fused variant does the same work as the gather, so expect the same
#    time.
# 3. **Count the bytes that move.** With two copies, each byte moves five times instead of once. The count
#    shows how much a kernel can win, before you write the kernel.
#
# ## The week in questions
#
# Days 18 to 20. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# The target is frozen, the kernel's place is one line, and the number to beat is measured. In Week 6 you write
# the kernel. Day 21 begins with the programming model of the kernel: a grid of programs, in torch.
#
# **In one paragraph.** We compared both variants in every bit. Then we timed one layer's attention over
# scattered blocks, from 16 to 4,096 tokens. The fused variant calls the reference, so it does the same work
# as the gather. With the copies, every byte moves five times instead of once. A kernel needs neither the
# copies nor a dozen small operations.
