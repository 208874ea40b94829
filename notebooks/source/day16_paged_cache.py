# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 16 · Real keys in scattered blocks
#
# Week 4 · Phase 2, paged memory · you need: Day 15 (Logical to physical)
#
# **Today** the blocks get contents. You write a step's keys and values through their slots into a
# pool that many sequences share. Then you gather the K and V of a sequence back in order. The model computes
# the same logits with them as with the contiguous strip of Day 11.

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

today = day(16)
today.picture("paged-write")

# %% [markdown]
# ## Why it matters
#
# So far the allocator hands out numbers, and the table does arithmetic with them. Today the numbers become
# places in memory, and one user's keys lie beside another user's keys. If a slot is wrong, nothing crashes,
# but one user's answer is computed from another user's question.
#
# So today's check is strict: **the gathered keys and values must be the same to the last bit**.

# %%
today.glossary("block", "slot", "slot mapping", "scatter", "gather")

# %% [markdown]
# ## One tensor for all sequences
#
# The pool is two tensors, one for keys and one for values:
#
# | axis | size | meaning |
# | --- | --- | --- |
# | 0 | `num_layers` | each layer has its own keys |
# | 1 | `num_blocks * block_size` | the slots, block after block |
# | 2, 3 | `n_kv`, `head_dim` | the key (or value) of one token |
#
# Day 11's strip was `[num_layers, n_kv, capacity, head_dim]`. Here the slot comes **before** the heads: all
# heads of one token in one layer lie together, so a token is one row to write. One table serves all
# layers, because a token has the same slot number in each layer.
#
# Skip `poison` and `_free_poisoned` in the cell below: Day 17 explains and uses them. `_zeros` makes the memory: on a
# CPU the operating system gives a page only when something is written to it, so a large pool that is mostly free
# costs little.

# %%
import math

import numpy as np
import torch

from nanoserve.cache import BLOCK_SIZE, BlockAllocator, BlockTable, KVCacheExhausted, NaiveKVCache
from nanoserve.config import ModelConfig


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: KVPool, _zeros
class KVPool:
    """The memory for keys and values of all layers, which many sequences share.

    k and v are [num_layers, num_slots, n_kv, head_dim]; slot s is offset s % block_size of block
    s // block_size. With `poison`, free slots hold NaN, so that reading a free slot gives NaN.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        poison: bool = False,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        shape = (config.num_layers, num_blocks * block_size, config.n_kv, config.head_dim)
        self.k, self.v = (_zeros(shape, dtype, device) for _ in "kv")
        self._poison = poison
        if poison:
            self.k.fill_(torch.nan)
            self.v.fill_(torch.nan)
            self.allocator.free = self._free_poisoned

    def _free_poisoned(self, block_id: int) -> None:
        """BlockAllocator.free in a pool with poison: refuse a block whose slots are not all NaN."""
        allocator = self.allocator
        if block_id in range(allocator.num_blocks):
            slots = slice(block_id * allocator.block_size, (block_id + 1) * allocator.block_size)
            if not (self.k[:, slots].isnan().all() and self.v[:, slots].isnan().all()):
                raise ValueError(f"block {block_id} is not poisoned: use KVPool.release")
        type(allocator).free(allocator, block_id)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A tensor of zeros. On a CPU, a page of memory is taken when it is first written.

    numpy.zeros asks the operating system for pages of zeros; torch.zeros writes the zeros itself.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


# %% [markdown]
# A pool for SmolLM2, small enough to look at, in blocks of 4:

# %%
from nanoserve import load_model, load_tokenizer

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
config = model.config
pool = KVPool(config, num_blocks=12, block_size=4)
print("k and v:", list(pool.k.shape), "each")
print("free blocks:", pool.allocator.num_free)

# %% [markdown]
# ## One sequence's view
#
# A `PagedKVCache` holds no keys. It holds a table, a length, and the **slot mapping**: the slot of each
# position, as a tensor on the pool's device. The mapping is a tensor because a GPU kernel can read a tensor
# and cannot read a Python list, such as the table's.
#
# `_map(end)` extends the mapping. It never computes an old entry again: a position's slot never changes,
# so a step only adds its own slots. The tensor doubles when it is full, as Day 11's strip does.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: PagedKVCache
class PagedKVCache:
    """The paged KV cache of one sequence: its length, and its block table and slots in a pool."""

    def __init__(self, pool: KVPool) -> None:
        self.seq_len = 0
        self.pool = pool
        self.table = BlockTable(pool.allocator)
        self._slots = torch.empty(0, dtype=torch.int64, device=pool.k.device)
        self._mapped = 0  # the number of positions in _slots
        self._step_slots = self._slots  # the mapping that this step's layers use

    @property
    def slot_mapping(self) -> torch.Tensor:
        """The slot of each token held, oldest first: int64 [seq_len], on the pool's device."""
        self._map(self.seq_len)  # adds the slots of tokens that came without it
        return self._slots[: self.seq_len]

    def _map(self, end: int) -> None:
        """Extend the slot mapping to `end` positions; entries that exist are not recomputed."""
        if end <= self._mapped:
            return
        self.table.grow(end)
        if end > len(self._slots):  # the buffer doubles, so that a step costs O(1) on average
            with torch.inference_mode(False):  # else only that mode could write to this memory
                longer = self._slots.new_empty(max(end, 2 * len(self._slots)))
            longer[: self._mapped] = self._slots[: self._mapped]
            self._slots = self._step_slots = longer
        fresh = [self.table.slot(position) for position in range(self._mapped, end)]
        self._slots[self._mapped : end] = torch.tensor(fresh, device=self._slots.device)
        self._mapped = end


# %% [markdown]
# Take a pool that hands out its blocks in a mixed order, as a pool does after an hour of serving:


# %%
def shuffled(config, order, block_size=4):
    """A pool that hands out its blocks in this order."""
    pool = KVPool(config, len(order), block_size)
    pool.allocator.allocate_for(len(order) * block_size)
    for block in reversed(order):  # the block given back last is taken first
        pool.allocator.free(block)
    return pool


pool = shuffled(config, order=[4, 1, 3, 0, 5, 2])
cache = PagedKVCache(pool)
cache._map(9)
print("blocks:", cache.table.blocks)
print("slots: ", cache._slots[:9].tolist())

# %% [markdown]
# Position 7 lies in slot 7 by chance, position 8 in slot 12. The picture above shows this very table.
#
# ## Your turn: write through the slots
#
# `_write` is called once for each layer of a step, layer 0 first, with this step's `k` and `v`
# `[1, n_kv, query_len, head_dim]`.
#
# 1. A cache holds one sequence. If the batch size is not 1, raise a ValueError that names the size, before
#    anything changes.
# 2. After this step the cache holds `end = self.seq_len + query_len` tokens. `self._map(end)` makes sure
#    that there are slots for these tokens, or raises `KVCacheExhausted`. **Change nothing before this call.**
# 3. Position `p` lies in slot `self._slots[p]`. Write this step's rows into `self.pool.k[layer]` and
#    `self.pool.v[layer]`, each `[num_slots, n_kv, head_dim]`.
# 4. Set `self.seq_len = end` in the last layer only, as on Day 11. The pool has `len(self.pool.k)` layers.
# 5. Return the slots of all tokens so far, this step's included, oldest first.
#
# Two facts about PyTorch help. `pool.index_copy_(0, slots, rows)` writes row i of `rows` into row
# `slots[i]` of `pool`. And `pool[slots]`, with a tensor of slots, returns a *copy*: you can read it, but a
# change of the copy does not reach the pool. (An assignment `pool[slots] = rows` does write into the pool.)
#
# Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scatter k and v into their slots; return the slots [kv_len] of all tokens so far."""
    raise NotImplementedError("your turn")


today.check(_write)

# %% [markdown]
# ## `_write` and `append` land
#
# `append` calls `_write`, and then gathers. It has the contract of Day 11's `append`: it takes this step's
# keys and values, and returns the keys and values of all tokens so far, `[1, n_kv, kv_len, head_dim]`. So
# the model needs no change. All layers of a step use one mapping, so `_write` returns one tensor to all of them:
# later, a backend derives from it once a step what it needs. The cell below holds the package's version; from here
# on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: PagedKVCache.append, PagedKVCache._write
class PagedKVCache(PagedKVCache):
    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [1, n_kv, query_len, head_dim] of one layer to their slots; gather K and V.

        Returns contiguous copies of all K and V of the layer, [1, n_kv, kv_len, head_dim]. Raises
        KVCacheExhausted if too few blocks are free; then nothing is written and no block is taken.
        Raises ValueError for a batch of more than one sequence.
        """
        slots = self._write(layer, k, v)
        # [kv_len, n_kv, head_dim] -> [1, n_kv, kv_len, head_dim], as NaiveKVCache lays it out
        k, v = (
            pool[layer][slots].transpose(0, 1).contiguous() for pool in (self.pool.k, self.pool.v)
        )
        return k[None], v[None]

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v to their slots; return the slots of all tokens so far: [kv_len].

        The last layer advances seq_len, so that all layers of a step use the same mapping.
        """
        if k.shape[0] != 1:
            raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
        end = self.seq_len + k.shape[2]
        self._map(end)
        new = self._slots[self.seq_len : end]
        self.pool.k[layer].index_copy_(0, new, k[0].transpose(0, 1))
        self.pool.v[layer].index_copy_(0, new, v[0].transpose(0, 1))
        if layer == len(self.pool.k) - 1:
            self.seq_len = end
        if len(self._step_slots) != end:  # one tensor for all layers of a step, so that what a
            self._step_slots = self._slots[:end]  # backend derives from it is derived once
        return self._step_slots


# %% [markdown]
# Look at the transpose in `_write`. `k[0]` is `[n_kv, query_len, head_dim]`, and a slot holds
# `[n_kv, head_dim]`. A `reshape` would give the right shape too, but it mixes the numbers of heads and
# tokens:

# %%
k = torch.arange(6).view(1, 2, 3, 1)  # head 0 holds 0, 1, 2 and head 1 holds 3, 4, 5
print("transposed, token by token:", k[0].transpose(0, 1)[..., 0].tolist())
print("reshaped:                  ", k[0].reshape(3, 2, 1)[..., 0].tolist())

# %% [markdown]
# ## Prove it: the same to the last bit
#
# Write the same random keys and values into both caches, in steps of many sizes, layer by layer. Paging only
# moves numbers and computes none, so nothing may differ: `torch.equal`, without a tolerance.


# %%
def same_contents(steps, block_size, order):
    """Whether every append of every step returns equal keys and values from both caches."""
    generator = torch.Generator().manual_seed(16)
    paged, naive = PagedKVCache(shuffled(config, order, block_size)), NaiveKVCache(config)
    equal = True
    for seq in steps:
        for layer in range(config.num_layers):
            k, v = torch.randn(2, 1, config.n_kv, seq, config.head_dim, generator=generator)
            pairs = zip(paged.append(layer, k, v), naive.append(layer, k, v))
            equal &= all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return equal


order = [4, 1, 3, 0, 5, 2, 6]
for block_size in (1, 3, 4, 16):
    blocks = order if block_size > 1 else [*range(12, 6, -1), *order]
    checked = same_contents((5, 1, 1, 4, 1), block_size, blocks)
    print(f"blocks of {block_size:2}: gathered K and V equal to the strip's: {checked}")
    assert checked

# %% [markdown]
# ## Prove it: the real model
#
# Now use real keys. The model calls the cache that you pass to it, so pass the new cache. Run a prefill,
# decode steps and a chunk of four tokens, and compare the logits of both caches after each step.

# %%
text = tokenizer.encode("The tide goes out and the boats lie down in the mud, and nobody minds.")


@torch.no_grad()
def both(steps, paged, naive):
    """Whether the logits of each step are equal."""
    equal = []
    for seq in steps:
        ids = torch.tensor([text[naive.seq_len : naive.seq_len + seq]])
        equal.append(torch.equal(model(ids, paged), model(ids, naive)))
    return equal


pool = shuffled(config, order=[4, 1, 3, 0, 5, 2])
cache = PagedKVCache(pool)
equal = both((6, 1, 1, 4, 1, 1), cache, NaiveKVCache(config))
print("logits equal, step by step:", equal)
print("written into blocks", cache.table.blocks)
assert all(equal)

# %% [markdown]
# The logits are equal, not only close. Both caches give attention the same numbers in the same order, so
# every sum is rounded in the same way.
#
# ## Two sequences, one pool
#
# This is the purpose of paging. Two sequences take turns, one token each, and both grow in the same pool.
# Each is compared with a run of that sequence alone.

# %%
from nanoserve.generate import next_logits

pool = shuffled(config, order=[4, 1, 3, 0, 5, 2, 7, 6])
prompts = ["The capital of France is", "1, 2, 4, 8, 16,"]
steps = [tokenizer.encode(prompt) for prompt in prompts]
paged = [PagedKVCache(pool), PagedKVCache(pool)]
alone = [NaiveKVCache(config), NaiveKVCache(config)]
answers = [[], []]
for _ in range(6):
    for i in (0, 1):
        logits = next_logits(model, steps[i], paged[i])
        assert torch.equal(logits, next_logits(model, steps[i], alone[i]))
        answers[i].append(int(logits.argmax()))
        steps[i] = answers[i][-1:]
for cache, answer in zip(paged, answers):
    print(f"blocks {cache.table.blocks}: {tokenizer.decode(answer)!r}")

# %% [markdown]
# All logits are equal, although the blocks of the two sequences are mixed in the pool. Now a third sequence
# arrives, and the pool has too few blocks for it:

# %%
before = pool.k.clone()
third = PagedKVCache(pool)
try:
    next_logits(model, text[:14], third)
except KVCacheExhausted as error:
    print("refused:", error)
print("blocks taken:", third.table.blocks, " tokens held:", third.seq_len)
print("the pool is untouched:", torch.equal(before, pool.k))
assert torch.equal(before, pool.k) and not third.table.blocks

# %% [markdown]
# "All or nothing", the rule of Day 14, holds for the whole step. The caller can wait until another sequence
# ends, and try the same step again.
#
# ## Measure it
#
# A step needs the slots of all tokens so far. It could rebuild the whole mapping from the table. Or it can
# extend the mapping by the new slots, as `_map` does. Compare the two times at 4,096 tokens.

# %%
question = "At 4,096 tokens: time to rebuild the mapping, divided by the time to extend it?"
today.predict("rebuild", question, guess=None, low=0)

# %% tags=["nbval-ignore-output"]
from dataclasses import replace
from statistics import median
from time import perf_counter

tiny = replace(config, num_layers=1, n_kv=1, head_dim=2)  # tiny keys: only the mapping matters here
lengths = [64, 256, 1024, 4096]


def microseconds(step, times=32):
    """The median of `times` calls."""
    seconds = []
    for _ in range(times):
        begin = perf_counter()
        step()
        seconds.append(perf_counter() - begin)
    return median(seconds) * 1e6


def at(length):
    """Microseconds to extend the mapping by one token, and to rebuild it."""
    cache = PagedKVCache(KVPool(tiny, length // 16 + 8, 16))
    cache._map(length)
    extend = microseconds(lambda: cache._map(cache._mapped + 1))
    rebuild = microseconds(lambda: torch.tensor([cache.table.slot(p) for p in range(length)]), 5)
    return extend, rebuild


at(64)  # warm up
extend, rebuild = zip(*(at(length) for length in lengths))
print(f"at 4,096 tokens: {extend[-1]:.0f} µs to extend, {rebuild[-1]:,.0f} µs to rebuild")
print(f"{rebuild[-1] / extend[-1]:.0f} times as long; your guess: {today.guess_text('rebuild')}")
assert rebuild[-1] > 10 * extend[-1] and rebuild[-1] > 10 * rebuild[0]

# %% jupyter={"source_hidden": true}
# Draws the plot: The slots of a decode step
from nanoserve.course.plots import COLOURS, figure, line, log2_axis, prediction_marker

title = "The slots of a decode step"
fig, ax = figure(xlabel="tokens in the cache", ylabel="microseconds", title=title)
line(ax, lengths, rebuild, "rebuilt", COLOURS["muted"])
line(ax, lengths, extend, "extended", COLOURS["engine"])
if guess := today.guess("rebuild"):
    prediction_marker(ax, 4096, guess * extend[-1])
log2_axis(ax), ax.set_yscale("log")
ax.set(xlim=(50, 9000))
fig

# %% [markdown]
# The time to rebuild grows with the number of tokens. At 4,096 tokens it is more than ten times the time to
# extend, as the cell above asserts. To extend, a step adds one entry, whatever the length is. So if your
# machine was quiet, that line is nearly flat. An engine that rebuilds the mapping loses this time at each
# token.
#
# The plot leaves one cost out: `append` still **gathers**, and so it copies all keys and values in every
# layer of every step. Day 18 writes down what attention without this copy must compute, and Day 19 lets
# the cache compute attention.
#
# ## Your answer is the engine
#
# Inside `today.mine()` the engine writes with your `_write`, if it has passed its check.

# %%
from nanoserve import LLM, SamplingParams

llm = LLM("smollm2", cache="paged")
with today.mine():
    (completion,) = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(repr(completion.text), completion.finish_reason)

# %% [markdown]
# ## What you learned
#
# 1. **Paging moves numbers and computes none,** so its proof needs no tolerance.
# 2. **One mapping serves every layer and every step:** extend the mapping, and never rebuild it.
# 3. **Reserve first, then write.** A step that is refused before it has changed anything can be tried
#    again.
#
# ## Tomorrow
#
# The third sequence was refused because the other two own all blocks, and so far no block is ever given
# back. Day 17 gives blocks back, and looks at what is still in a block when its next owner takes it.
#
# **In one paragraph.** We gave the blocks contents: two tensors for all layers and all sequences, and
# for each sequence a slot mapping. A step scatters its keys and values through the mapping. Then all keys
# and values so far are gathered through the same mapping, in order. On random numbers and in the real model,
# the result is equal to the contiguous cache in every bit, also when two sequences share one pool.
