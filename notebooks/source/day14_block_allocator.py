# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 14 · A pool of blocks
#
# Week 4 · Phase 2, paged memory · you need: Day 11 (Remember the keys), Day 13 (What the cache bought)
#
# **Today** you stop guessing how long a text will be. Memory is cut into small blocks of equal size,
# and you write the allocator that hands out the blocks. A request gets all the blocks that it needs or
# none, and no block ever has two owners.

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

today = day(14)
today.picture("block-pool")

# %% [markdown]
# ## Why it matters
#
# Day 11 saved time and used memory for it. A contiguous cache must be reserved before you know how long
# the text will be. You can do this in two ways, and each has a cost:
#
# - **Reserve for the longest text.** Each sequence gets a strip of 2,048 slots. A short text leaves most
#   of them empty. This is fragmentation.
# - **Reserve little, and double.** Right after it has doubled, the strip is nearly half empty. Each growth
#   copies everything, and during the copy the old strip and the new strip are both in memory.
#
# With one sequence this does not matter. But a server runs as many sequences at once as its memory can
# hold, and its throughput grows with that number. If one sequence reserves memory and does not use it,
# another sequence may have to wait for memory.
#
# Operating systems had this problem sixty years ago. They solved it with pages: the memory is cut into
# equal pieces, and the pages of a program may lie anywhere. vLLM does the same with keys and values (Kwon et
# al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention").

# %%
today.glossary("slot", "block", "pool", "allocator", "fragmentation", "double free", "invariant")

# %% [markdown]
# ## Numbers, no tensors
#
# Today there are no keys and no values. A block is a number, its **id**. The pool has `num_blocks`
# blocks with the ids 0 to `num_blocks` - 1, and each block holds `block_size` tokens. Day 16 adds the
# memory itself. The allocator only counts, and this must always hold:
#
# **The free blocks and the owned blocks are together all blocks, and no block is both.**
#
# When there are too few free blocks, the allocator raises an error of its own, `KVCacheExhausted`. A
# server can catch it, wait until a sequence ends, and try again.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BLOCK_SIZE, KVCacheExhausted
BLOCK_SIZE = 16  # slots in a block: small blocks waste few slots, large blocks keep tables short


class KVCacheExhausted(RuntimeError):
    """The pool has too few free blocks. The call that raises this error changes nothing."""


# %% [markdown]
# ## Your turn: the allocator
#
# The allocator keeps two collections, and they are given:
#
# - `_free`, the ids of the free blocks: a list, used as a stack. The next block to hand out is the *last*
#   item. A block that is given back goes to the end of the list, so it is taken next: last in, first out.
# - `_owned`, the set of the ids that are handed out.
#
# Write the three methods:
#
# | call | returns | raises, with nothing changed |
# | --- | --- | --- |
# | `allocate()` | one id | KVCacheExhausted when none is free |
# | `allocate_for(num_tokens)` | a list of just enough ids for that many tokens, in any order | KVCacheExhausted when too few are free (all or none); ValueError when `num_tokens` is below 0 |
# | `free(block_id)` | None | ValueError for a block that is free already, or was never in the pool |
#
# How many blocks are just enough? With blocks of 16:
#
# | tokens | 0 | 1 | 15 | 16 | 17 | 32 | 33 |
# | --- | --- | --- | --- | --- | --- | --- | --- |
# | blocks | 0 | 1 | 1 | 1 | 2 | 2 | 3 |
#
# Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks))[::-1]  # a stack: the next block stands last
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take one block and return its id. Raises KVCacheExhausted when none is free."""
        raise NotImplementedError("your turn")

    def allocate_for(self, num_tokens: int) -> list[int]:
        """Take just enough blocks for num_tokens, all or none. Raises KVCacheExhausted."""
        raise NotImplementedError("your turn")

    def free(self, block_id: int) -> None:
        """Give a block back. Raises ValueError for a block that is free or not in the pool."""
        raise NotImplementedError("your turn")


today.check(BlockAllocator)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockAllocator
class BlockAllocator:
    """Hands out the blocks of a pool. Each block is free, or has one owner.

    The free list is last in, first out. Invariant: free + owned = num_blocks, and no block is both.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks free blocks of block_size slots. Raises ValueError if either is below 1."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))[::-1]
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def allocate(self) -> int:
        """Take one block and return its id. Raises KVCacheExhausted if no block is free."""
        return self.allocate_for(1)[0]

    def allocate_for(self, num_tokens: int) -> list[int]:
        """Take the fewest blocks that hold num_tokens tokens; return their ids in the order taken.

        Raises KVCacheExhausted and takes no block if too few are free. Raises ValueError for a
        negative num_tokens.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        needed = -(-num_tokens // self.block_size)  # rounded up
        if needed > self.num_free:
            raise KVCacheExhausted(f"{needed} blocks are needed and {self.num_free} are free")
        blocks = [self._free.pop() for _ in range(needed)]
        self._owned.update(blocks)
        return blocks

    def free(self, block_id: int) -> None:
        """Give a block back. Raises ValueError for a block that is free or not in the pool."""
        if block_id not in self._owned:
            known = isinstance(block_id, int) and 0 <= block_id < self.num_blocks
            reason = "is free already" if known else f"is not one of the pool's {self.num_blocks}"
            raise ValueError(f"block {block_id} {reason}")
        self._owned.remove(block_id)
        self._free.append(block_id)


# %% [markdown]
# The cell above holds the package's version; from here on this notebook uses it. Look at the order in
# `allocate_for`: count, refuse, and only then take. Suppose that an error came after half of the blocks
# were taken. Then these blocks would belong to no sequence, and no sequence would ever give them back.
#
# ## Three sequences share a pool
#
# Six blocks of 16 slots. A comes with 20 tokens, B with 40, and then C with 30:

# %%
pool = BlockAllocator(6, BLOCK_SIZE)
owns = {"A": pool.allocate_for(20), "B": pool.allocate_for(40)}
try:
    owns["C"] = pool.allocate_for(30)
except KVCacheExhausted as error:
    print("C has to wait:", error)
print(owns, pool.num_free, "free")

# %% [markdown]
# One block is still free. C needs two, so it got none. Now A ends, and C tries again:

# %%
for block in owns.pop("A"):
    pool.free(block)
owns["C"] = pool.allocate_for(30)
print(owns, pool.num_free, "free")

# %% [markdown]
# C now owns A's old blocks. The blocks of a sequence need not be neighbours, and they need not be in
# order. Any free block will do. That is the idea of paging: if all pieces have one size, there are no
# holes of the wrong size. (In a pool with real memory, A's old keys would still be in these blocks. Day 17
# deals with that.)
#
# ## Prove it: a thousand random steps
#
# A **soak test** does random steps for a long time and checks the invariant after each step. Each step
# takes blocks for a random number of tokens, or ends a random sequence. Some requests are refused, and the
# test checks that a refusal changes nothing.

# %%
import random


def soak(pool, steps, seed=14):
    """Take and free at random. After each step: free + owned = all, and no block has two owners."""
    chance, sequences, refused = random.Random(seed), [], 0
    for _ in range(steps):
        if sequences and chance.random() < 0.45:
            for block in sequences.pop(chance.randrange(len(sequences))):
                pool.free(block)
        else:
            before = pool.num_free
            try:
                sequences.append(pool.allocate_for(chance.randrange(200)))
            except KVCacheExhausted:
                refused += 1
                assert pool.num_free == before, "a refusal changed the pool"
        owned = [block for sequence in sequences for block in sequence]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert sorted(owned + pool._free) == list(range(pool.num_blocks)), "free + owned is not all"
    return refused, sequences


# %%
pool = BlockAllocator(64, BLOCK_SIZE)
refused, sequences = soak(pool, 1_000)
print("after each of 1,000 steps: free + owned = all, and nothing owned twice")
print(f"{refused} requests were refused, {len(sequences)} sequences are left")
for sequence in sequences:
    for block in sequence:
        pool.free(block)
assert 50 < refused < 500
print("everything given back:", pool.num_free == pool.num_blocks)

# %% [markdown]
# A test that always passes proves nothing, so plant a fault. This allocator trusts its callers: its
# `free` checks nothing.


# %%
class Trusting(BlockAllocator):
    def free(self, block_id):
        self._owned.discard(block_id)
        self._free.append(block_id)


pool = Trusting(4, BLOCK_SIZE)
(block,) = pool.allocate_for(10)
pool.free(block)
pool.free(block)  # a second time, by mistake
print("A gets", pool.allocate_for(10), "and B gets", pool.allocate_for(10))

# %% [markdown]
# Two sequences now own block 0, and each would overwrite the other's keys. Nothing raises an error: two
# users can get fluent answers that are made from a mixture of both texts. That is why the package's `free`
# raises an error at the moment of the mistake, and names the block:

# %%
pool = BlockAllocator(4, BLOCK_SIZE)
(block,) = pool.allocate_for(10)
pool.free(block)
for mistake in (block, 99):
    try:
        pool.free(mistake)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Measure it: what stays empty
#
# 200 requests, each with a prompt and an answer. How much of the reserved memory is used in the end?

# %%
import textwrap

recorded = today.data("request_lengths")
requests = recorded["requests"]
lengths = [prompt + answer for prompt, answer in requests]
print(textwrap.fill(recorded["what"], 96))
print()
print(f"{len(lengths)} requests of {min(lengths)} to {max(lengths):,} tokens,", end=" ")
print(f"half of them below {sorted(lengths)[100]}")

# %% [markdown]
# So these requests were not recorded from real users. We chose their lengths: many short texts and a few
# very long texts. The percentages below belong to this mix.

# %%
question = "A strip of 2,048 slots for each request: per cent that stay empty?"
today.predict("strip", question, guess=None, low=0, high=100)
question = "Blocks of 16 slots: per cent of the owned slots that stay empty?"
today.predict("blocks", question, guess=None, low=0, high=100)

# %% [markdown]
# The allocator itself does the counting. A strip for the longest text is a pool too: its blocks have
# 2,048 slots, and each request takes one block.


# %%
def owned_slots(block_size):
    """How many slots a pool has handed out once every request has its blocks."""
    pool = BlockAllocator(len(lengths) * -(-2048 // block_size), block_size)
    for tokens in lengths:
        pool.allocate_for(tokens)
    return (pool.num_blocks - pool.num_free) * block_size


def waste(slots):
    """Per cent of these slots that hold no token."""
    return 100 * (1 - sum(lengths) / slots)


# %% [markdown]
# The strip that doubles is Day 11's cache. Run each request through it: the prompt first, then token by
# token. At the end, look at the length of the strip. (One layer with one head of one number is enough
# to see the length.)

# %%
from dataclasses import replace

import torch

from nanoserve.cache import NaiveKVCache
from nanoserve.config import load_config
from nanoserve.fetch import resolve

config = load_config(resolve("smollm2"))
tiny = replace(config, num_layers=1, n_kv=1, head_dim=1)


def strip_length(prompt, answer):
    cache = NaiveKVCache(tiny)
    k = torch.zeros(1, 1, prompt, 1)
    cache.append(0, k, k)
    for _ in range(answer):
        cache.append(0, k[:, :, :1], k[:, :, :1])
    return cache._k.shape[2]


# %%
slots = {
    "a strip of 2,048": owned_slots(2048),
    "a strip that doubles": sum(strip_length(*request) for request in requests),
    "blocks of 16": owned_slots(16),
}
per_slot = 2 * config.num_layers * config.n_kv * config.head_dim * 4  # k and v, float32
for name, number in slots.items():
    print(f"{name:20} {number * per_slot / 1e9:5.2f} GB, {waste(number):4.1f}% empty")
print("your guesses, in per cent:", today.guess_text("strip"), "and", today.guess_text("blocks"))
assert waste(slots["blocks of 16"]) < 1.5 < 30 < waste(slots["a strip that doubles"])
assert 3.8 < slots["a strip of 2,048"] / slots["blocks of 16"] < 4

# %% jupyter={"source_hidden": true}
# Draws the plot: 200 requests: reserved and used
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, ax = figure(xlabel="GB of keys and values", title="200 requests: reserved and used")
used = sum(lengths) * per_slot / 1e9
colours = [COLOURS["contiguous"], COLOURS["contiguous"], COLOURS["engine"]]
for row, number in enumerate(slots.values()):
    reserved = number * per_slot / 1e9
    ax.barh(row, reserved, height=0.5, color="white", edgecolor=colours[row], linewidth=1.5)
    ax.barh(row, used, height=0.5, color=colours[row])
    label_line(ax, reserved, row, f"{waste(number):.1f}% empty", colours[row])
    guess = {0: today.guess("strip"), 2: today.guess("blocks")}.get(row)
    if guess is not None and guess < 100:
        prediction_marker(ax, used / (1 - guess / 100), row - 0.38, where="right")
ax.set(yticks=range(3), yticklabels=slots, xlim=(0, 23), ylim=(2.6, -0.6))
ax.grid(axis="y", visible=False)
fig

# %% [markdown]
# The filled part of a bar holds tokens; the white part is reserved and empty. The counts follow from the
# stored lengths, so yours are the same. With strips of 2,048, these requests reserve nearly four times the
# memory that they reserve with blocks of 16. So in the same memory, blocks hold nearly four times as many
# sequences of this mix.
#
# ## How large should a block be?
#
# Only the last block of a sequence can have empty slots: from 0 to `block_size` - 1. If each of these
# numbers is equally likely, their average is (`block_size` - 1) / 2. So you can calculate the waste on
# paper, and compare it with the count. The last number of a line is the average count of blocks per request.

# %%
sizes = (8, 16, 32, 64, 128)
counted = [waste(owned_slots(size)) for size in sizes]
half_a_block = [waste(sum(lengths) + len(lengths) * (size - 1) / 2) for size in sizes]
for size, found, paper in zip(sizes, counted, half_a_block):
    entries = owned_slots(size) // size / len(lengths)
    print(
        f"blocks of {size:3}: {found:4.1f}% empty, on paper {paper:4.1f}%, {entries:4.1f} per request"
    )
assert counted == sorted(counted) and counted[1] - counted[0] < 1

# %% jupyter={"source_hidden": true}
# Draws the plot: Waste against block size
fig, ax = figure(
    xlabel="slots of a block", ylabel="% of owned slots empty", title="Waste against block size"
)
line(ax, sizes, half_a_block, "", COLOURS["oracle"], dashed=True)
label_line(ax, 64, half_a_block[3], "half a block each", COLOURS["oracle"], "left")
line(ax, sizes, counted, "counted", COLOURS["engine"])
prediction_marker(ax, 16, today.guess("blocks"))
log2_axis(ax)
ax.set(ylim=(0, None), xlim=(7, 180), xticks=sizes)
fig

# %% [markdown]
# Small blocks waste less, so why not blocks of one slot? Each block is an entry in a list that attention
# must follow, and neighbouring slots can be read faster than scattered slots. Blocks of 16 waste about one
# slot in seventy here. Blocks of 8 would save less than one per cent of the slots, and would need twice as
# many entries. So `BLOCK_SIZE` is 16.
#
# This count does not show requests that come and go: all 200 requests were complete when we counted. While
# a request still grows, a strip of 2,048 is emptier, and blocks still waste about half a block per request.
#
# ## Your answer is the engine
#
# The package is some days ahead of you. Its paged cache, which you build from Day 15 to Day 19, takes
# every block from a `BlockAllocator`. Inside `today.mine()` the engine uses your allocator, if it has
# passed its check.

# %%
from nanoserve import LLM, SamplingParams

llm = LLM("smollm2", cache="paged")
with today.mine():
    (completion,) = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(repr(completion.text), completion.finish_reason)

# %% [markdown]
# ## What you learned
#
# 1. **If all pieces have one size, there are no holes of the wrong size.** Any free block will do.
# 2. **Count, refuse, and only then take.** An operation that fails must change nothing.
# 3. **Only the last block of a sequence can be partly empty.** So the waste is about half a block per
#    sequence, and it does not depend on the longest text.
#
# ## Tomorrow
#
# A sequence owns blocks 5, 2 and 7. Where is its token at position 9? On Day 15 you write the table that
# gives the answer.
#
# **In one paragraph.** A contiguous cache must be reserved before you know how long the text will be.
# We cut the memory into blocks of 16 slots instead. An allocator of about fifty lines hands the blocks out,
# all or nothing, and takes them back. Its invariant held through a thousand random steps, and it refused a
# double free by name. On our mix of requests, the empty part of the memory fell from three quarters to
# about one slot in seventy.
