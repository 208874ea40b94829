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
# **Today** you measure the read, alone and at every length from 16 to 4,096 tokens: gathering the
# history first, against the cache's own read. The result will not flatter anybody. It goes on the wall,
# for a kernel to beat.

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
# Work on speed begins with a **baseline**: a number taken before the work, by a benchmark that will not
# be changed after it. Taken later, it is always a little worse than it was, because by then somebody
# wants to look good.
#
# Day 13's rules hold: correct first, take turns, know the roof. Two are new, since a read is a hundred
# times shorter than a token, or more. **Read from memory**, not from the processor's cache: a
# layer that was read a moment ago may still lie there, and then a clock measures the wrong thing. (Long
# histories cannot wait there; short ones may.) And **compare to the last bit**: two paths that do the same sum have no excuse to differ.

# %%
today.glossary("baseline", "sweep", "memory traffic", "peak bandwidth", "bandwidth", "interleaved")

# %% [markdown]
# ## What has to move
#
# One new token asks, in one layer. To answer, attention reads the keys and values of the history:
#
# - **in place**, each number is read once, where it lies;
# - **gathered**, each is copied twice, and a copy is a read and a write: `pool[layer][slots]` puts the
#   tokens in order, `.transpose(0, 1).contiguous()` turns them to lie head by head. Then attention reads.
#
# That is a **memory traffic** of five to one; a kernel needs the one. The picture above shows both. Everything
# else (the query, the scores, the output) is small beside it.
#
# ## Your turn: `bytes_of_a_read`
#
# Count the bytes that move for `kv_len` tokens in **one** layer. The mapping names slots, not blocks: the
# empty end of the last block is not read. Stuck? `today.hint()` looks at the case that failed.

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
# Two shapes: our own model's, and that of Llama-3.2-1B, from the configuration that is published with it.
# The read needs only the shape. The history is random numbers in **every second block of a pool, in
# descending order**, so that no lucky neighbourhood helps. And each round reads the **next layer**, another
# one for each path: else the second path would find near the processor what the first has just read. (A first version
# of this benchmark let both read the same layer in turn. The fused read looked 5 % faster, and was not.)
#
# Look for three things in the cell: where the paths are compared, what is raised if they differ, and that
# the clock has not been read by then. And one line looks ahead: Week 6 puts a kernel into the package's cache.
# A baseline has to stay what it was, so `use_backend("reference")` holds the fused read to Day 18's sum.

# %%
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.timing import Clock, median_times, read_bandwidth
from nanoserve.cache import BLOCK_SIZE, KVPool, PagedKVCache
from nanoserve.config import parse_config
from nanoserve.kernels.dispatch import use_backend
from nanoserve.layers import sdpa


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/attention.py: LLAMA_1B, AttentionRow, attention_benchmark and 1 more
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

    `bytes` counts the keys and values once: every code path has to read them.
    """

    path: str
    kv_len: int
    seconds: float
    bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds


def attention_benchmark(
    config: ModelConfig,
    kv_lens: Sequence[int] = (16, 64, 256, 1024, 4096),
    dtype: torch.dtype = torch.float32,
    rounds: int = 20,
    clock: Clock = time.perf_counter,
) -> list[AttentionRow]:
    """Time one layer's attention of one new token, with K and V in scattered blocks, two ways.

    "gather" copies K and V out of the pool, then attends; "fused" is `attend_in_place`. Raises
    WrongAnswer unless the two results are equal in every bit. Each round moves to the next layer,
    and the two code paths use different layers, so that a long sequence's K and V are not left in
    the processor's cache by the round before.
    """
    rows = []
    for kv_len in kv_lens:
        cache, step = scattered_cache(config, kv_len, dtype)
        layers = [0] * 2  # of gather and of fused: the layer that each used last

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
        layers[1] += config.num_layers // 2  # far from the layer that gather has just read
        moved = 2 * kv_len * config.n_kv * config.head_dim * dtype.itemsize  # keys and values
        times = median_times(paths, rounds, warmup=2, clock=clock)
        rows += [AttentionRow(path, kv_len, seconds, moved) for path, seconds in times.items()]
    return rows


def scattered_cache(
    config: ModelConfig,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[PagedKVCache, dict[str, torch.Tensor]]:
    """A cache of kv_len - 1 random tokens, and q, k and v of the next token by name.

    The tokens lie in every second block of the pool, the last block first. The step of the next
    token can be repeated in any layer but the last: only the last layer advances seq_len.
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
# `bytes` counts what no path can avoid, the history once, for both paths alike. So bytes per second is a
# speed at which the **useful** bytes came, and a path that moves each of them five times cannot hide it.
# It is your count, for a read in place:

# %%
from nanoserve import load_model

config = load_model("smollm2").config
rows = attention_benchmark(LLAMA_1B, [48], rounds=1)
assert rows[0].bytes == bytes_of_a_read(LLAMA_1B, 48, torch.float32, gathered=False)
for name, shape in (("SmolLM2-135M", config), ("Llama-3.2-1B", LLAMA_1B)):
    once, copied = (bytes_of_a_read(shape, 4_096, torch.float32, way) for way in (False, True))
    print(
        f"{name}, 4,096 tokens, one layer: {once / 1e6:.1f} MB in place, {copied / 1e6:.1f} gathered"
    )

# %% [markdown]
# ## Prove it: a benchmark that can be wrong
#
# The history really is scattered:

# %%
cache, _ = scattered_cache(config, 50)
print(
    "49 tokens held, in blocks", cache.table.blocks, "of a pool of", cache.pool.allocator.num_blocks
)

# %% [markdown]
# The gate. Let the fused read lose its oldest token, and no time comes out:

# %%
honest = PagedKVCache.paged_attention


def one_token_short(self, layer, k, v, q, n_rep, scale=None):
    keys, values = self.append(layer, k, v)
    return sdpa(q, keys[:, :, 1:], values[:, :, 1:], scale)


PagedKVCache.paged_attention = one_token_short
try:
    attention_benchmark(config, [64])
except WrongAnswer as error:
    print(error)
finally:
    PagedKVCache.paged_attention = honest

# %% [markdown]
# And the arithmetic, with a clock that follows a script: it shows one second more at each look, so each
# read takes exactly one second.

# %%
ticks = count()
for row in attention_benchmark(config, [16, 64], rounds=3, clock=lambda: float(next(ticks))):
    print(
        f"{row.path:6} {row.kv_len:3} tokens: {row.seconds} s, {row.bytes_per_second:,.0f} bytes/s"
    )

# %% [markdown]
# ## Predict, then measure
#
# The fused read against the gather, at 4,096 tokens. Before you guess, look once more at what
# `paged_attention` called yesterday.

# %%
today.predict("gain", "At 4,096 tokens, how many times as fast as the gather is it?", guess=None)

# %% tags=["nbval-ignore-output"]
lengths = (16, 64, 256, 1_024, 4_096)
roof = read_bandwidth(1 << 28)
shapes = {"SmolLM2-135M": config, "Llama-3.2-1B": LLAMA_1B}
rows = {name: attention_benchmark(shape, lengths) for name, shape in shapes.items()}
roof = max(roof, read_bandwidth(1 << 28))
print(f"this machine reads {roof / 1e9:.1f} GB/s")
for name, results in rows.items():
    for gather, fused in zip(results[::2], results[1::2]):
        print(
            f"{name} {gather.kv_len:5} tokens: gather {gather.seconds * 1e6:5.0f} µs, fused "
            f"{fused.seconds * 1e6:5.0f} µs, {fused.bytes_per_second / 1e9:4.1f} GB/s, "
            f"{fused.bytes_per_second / roof:3.0%} of the roof"
        )
gain = rows["Llama-3.2-1B"][-2].seconds / rows["Llama-3.2-1B"][-1].seconds
print(f"fused is {gain:.2f} times as fast at 4,096; your guess: {today.guess('gain')}")
assert 0.2 < gain < 5
assert all(0 < row.bytes_per_second < 3 * roof for results in rows.values() for row in results)

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, axes = figure(
    height=4.6, panels=2, xlabel="tokens of history", ylabel="µs for one layer's read"
)
for ax, (name, results) in zip(axes, rows.items()):
    took = {p: [r.seconds * 1e6 for r in results if r.path == p] for p in ("gather", "fused")}
    floor = [row.bytes / roof * 1e6 for row in results[::2]]
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
# Two lines, one over the other. The **fused read is no faster**, and it could not be: it calls the
# reference, which gathers and attends. It is the same sum. Where the lines part, now one way
# and now the other, it is the machine's mood, and whoever quotes that as a gain is reading noise.
#
# Three honest things to read from it all the same:
#
# - **Short histories cost the same.** At 16 tokens there is next to nothing to read, and the time is what
#   PyTorch needs to start a dozen small operations. A kernel is *one* operation.
# - **Long ones grow with the bytes,** so something like bandwidth is at work,
# - **but far above the floor.** The useful bytes come at a fraction of the roof.
#
# ## Where does the time go?
#
# How much could a kernel win by not copying? Take the read apart, at 4,096 tokens of Llama's shape: the
# copy alone, and attention alone over a history that lies there already.

# %% tags=["nbval-ignore-output"]
cache, step = scattered_cache(LLAMA_1B, 4_096)
copies = [cache.append(i, step["k"], step["v"]) for i in range(LLAMA_1B.num_layers - 1)]
turn = {part: cycle(range(len(copies))) for part in ("copy", "attend", "both")}  # its own for each
for _ in range(5):
    next(turn["attend"])  # and apart, so that no part finds what another has just read
for _ in range(10):
    next(turn["both"])


def copy():
    return cache.append(next(turn["copy"]), step["k"], step["v"])


def attend():
    return sdpa(step["q"], *copies[next(turn["attend"])])


def both():
    layer = next(turn["both"])
    with use_backend("reference"):
        return cache.paged_attention(layer, step["k"], step["v"], step["q"], LLAMA_1B.n_rep)


parts = median_times({"copy": copy, "attend": attend, "both": both}, rounds=20, warmup=2)
once = bytes_of_a_read(LLAMA_1B, 4_096, torch.float32, gathered=False)
parts["floor"] = once / roof
print(", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items()))
assert parts["copy"] < 3 * parts["both"]

# %%
fig, ax = figure(height=2.9, xlabel="milliseconds", title="One read of 4,096 tokens, taken apart")
bars = (
    ("today's read", "both", "engine"),
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
# The copy is the larger part of the read on the machine where this ran, and a kernel does without it.
# What it must still do is the third bar or something like it, and nothing can be shorter than the last.
# The parts do not add up to the whole: right after a copy, attention finds the history near the processor.
#
# The bars are a breakdown. The number for the wall is the **sweep**'s, at 4,096 tokens, and beside it the
# floor: what a read costs today, and what it cannot cost less than.
#
# What the plots do not show: one sequence, one thread count, float32, a CPU. With 64 sequences at once
# the operations are larger and the start-up costs shared. On a GPU the floor lies a hundred times lower,
# and the dozen small operations weigh far more. And Week 6 will not beat this number at once: its kernel
# runs first in a simulator, slower than anything here, because what it has to be first is right.
#
# The same from the command line, with the rows as a file for your wall:
#
# `nanoserve bench attention --csv read.csv`
#
# ## What you learned
#
# 1. **Take the baseline before the work,** with a benchmark that you will not touch afterwards.
# 2. **A new name is not a new speed.** The fused read does the same sum today, and the clock says so.
# 3. **Count what moves.** Two copies make five trips of one; the bytes say what a kernel can win, before
#    anybody has written it.
#
# ## The week in questions
#
# Days 18 to 20. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# The target is frozen, the place for a kernel is one line wide, and the number to beat hangs on the wall.
# Week 6 writes the kernel. Day 21 begins with the machine that it runs on: a grid of programs, in torch.
#
# **In one paragraph.** We timed one layer's read over scattered blocks, from 16 to 4,096 tokens, after
# comparing both ways in every bit. Gathering first and the cache's own read take the same time, since
# inside they are the same; both reach a fraction of what the memory could give. The copies move every
# byte five times instead of once. That, and a dozen small operations, is what a kernel can win.
