# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 17 · Give it back
#
# Week 4 · Phase 2, paged memory · you need: Day 16 (Real keys in scattered blocks)
#
# **Today** a sequence ends. You give its blocks back to the pool, so that a thousand sequences fit
# where half a dozen would, and you fill what they leave behind with poison, so that nobody reads it unseen.

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

today = day(17)
today.picture("reuse")

# %% [markdown]
# ## Why it matters
#
# A server runs for months and a sequence for seconds. So memory that is taken must come back, all of
# it, each time. Two things go wrong here, and both are quiet:
#
# - **A leak.** One block in a hundred answers is not given back. The server works on Monday and turns
#   people away on Friday.
# - **A stale read.** A block comes back with the last owner's keys still in it. Code that reads one
#   slot too many finds good numbers there, and the model mixes another user's text into the answer.
#
# Against the first there is counting. Against the second there is a trick from the debuggers' box.

# %%
today.glossary("leak", "stale", "poison", "NaN", "double free")

# %% [markdown]
# ## The table lets go
#
# `BlockTable.free` hands the blocks to the allocator one by one, and takes each off its list as it
# does. That is why a second call is harmless: there is nothing left on the list.

# %%
import torch

from nanoserve.cache import BlockTable, KVPool, NaiveKVCache, PagedKVCache


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockTable.free
class BlockTable(BlockTable):
    def free(self) -> None:
        """Give every block back to the allocator; a second call does nothing."""
        while self.blocks:
            self._allocator.free(self.blocks[-1])
            self.blocks.pop()


# %% [markdown]
# It pops from the end, so a sequence's first block is given back last and, the free list being a
# stack, is taken next. The memory that is handed out is memory that was just in use.
#
# ## Poison
#
# Why NaN? Because of what the softmax does with a slot that it should not see:
#
# | what lies there | its score | what reaches the output |
# | --- | --- | --- |
# | zeros | 0, which is a perfectly good score | the answer, off, and finite |
# | the last owner's keys | any number | the answer, with somebody else's text in it |
# | NaN | NaN | NaN, everywhere |
#
# See it happen. Four keys, and a fifth that nobody should have looked at:

# %%
generator = torch.Generator().manual_seed(17)
q, keys = torch.randn(8, generator=generator), torch.randn(4, 8, generator=generator)
for name, fifth in (("zeros", torch.zeros(1, 8)), ("NaN", torch.full((1, 8), torch.nan))):
    weights = torch.softmax(torch.cat([keys, fifth]) @ q, dim=0)
    print(f"{name:5} in the fifth slot: weights", [round(w, 2) for w in weights.tolist()])

# %% [markdown]
# A key of zeros takes a quarter of the attention for itself, and no test for "is it finite" will ever
# say so. With NaN, one slot spoils all five.
#
# ## Your turn: `release`
#
# A method of `KVPool`, since the pool is what has the memory. `table` is one sequence's `BlockTable`.
#
# 1. Where `self._poison` is set, fill the slots of each of `table.blocks` with `torch.nan`: keys and
#    values, in every layer. `self.k` and `self.v` are `[num_layers, num_slots, n_kv, head_dim]`, and
#    block b is the slots `b * size` to `(b + 1) * size`, `size` being `self.allocator.block_size`.
# 2. Where it is not set, leave the numbers alone: writing all that costs time.
# 3. Give the blocks back: `table.free()`.
#
# Stuck? `today.hint()` looks at the case that failed.


# %%
def release(self, table: BlockTable) -> None:
    """Take a sequence's blocks back, and poison their slots where that was asked for."""
    raise NotImplementedError("your turn")


today.check(release)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: KVPool.release
class KVPool(KVPool):
    def release(self, table: BlockTable) -> None:
        """Give a table's blocks back to the allocator; with `poison`, fill their slots with NaN."""
        size = self.allocator.block_size
        for block in table.blocks if self._poison else ():
            self.k[:, block * size : (block + 1) * size] = torch.nan
            self.v[:, block * size : (block + 1) * size] = torch.nan
        table.free()


# %% [markdown]
# `table.free()` alone would give the blocks back with their content, and a stale read would go unnoticed. A pool
# with poison does not allow that: Day 16's `_free_poisoned` takes the place of the allocator's `free` there, and
# refuses a block whose slots do not all hold NaN.
#
# ## Your turn: `free`
#
# And the sequence's side of it, a method of `PagedKVCache`. It remembers three things: `self.table`,
# `self.seq_len`, and `self._mapped`, how many positions have a slot. Give the blocks back through
# `self.pool.release`. The slots themselves, `self._slots`, may stay: `_mapped` says how much of them
# counts. After `free()` the cache is as new: it owns nothing, and may be used for another text. A
# second call does no harm, because whoever cleans up after a failure cannot know whether somebody did it before.


# %%
def free(self) -> None:
    """Give every block back and forget the sequence; may be called twice."""
    raise NotImplementedError("your turn")


today.check(free)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: PagedKVCache.free
class PagedKVCache(PagedKVCache):
    def free(self) -> None:
        """Give every block back and set the length to 0; a second call does nothing."""
        self.pool.release(self.table)
        self.seq_len = self._mapped = 0


# %% [markdown]
# Two lines, and each half of the second is a bug when it is missing. Keep `seq_len`, and the next
# text begins behind one that is gone. Keep `_mapped`, and `_map` thinks that the slots are there: the
# next text takes no blocks, and is written over the keys of whoever has them now.
#
# ## Prove it: a thousand sequences
#
# A small pool, a thousand requests of random lengths, up to four at a time. The keys and values of
# request n are all the number n, so that a single foreign key in its history would show.

# %%
import random
from dataclasses import replace

from nanoserve import load_model, load_tokenizer

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
config = model.config
tiny = replace(config, num_layers=1, n_kv=1, head_dim=2)

draw = random.Random(17)
requests = [(draw.randint(8, 150), draw.randint(1, 40)) for _ in range(1000)]  # prompt, answer
total = sum(map(sum, requests))
print(
    f"{total:,} tokens in all, {total / 1000:.0f} for a request, {max(map(sum, requests))} at most"
)


# %%
def feed(cache, number, tokens):
    """A step of `tokens` tokens whose keys and values all say `number`; is the history all it?"""
    k = torch.full((1, 1, tokens, 2), float(number))
    return all(bool((history == number).all()) for history in cache.append(0, k, k))


def serve(pool, requests, at_once=4, give_back=True):
    """Serve them in order; the blocks owned after each request is done."""
    waiting, running, owned = list(enumerate(requests)), [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            number, (prompt, answer) = waiting.pop(0)
            running.append([PagedKVCache(pool), number, answer])
            assert feed(running[-1][0], number, prompt)
        for job in running:
            assert feed(job[0], job[1], 1)
            job[2] -= 1
        for cache, _, left in running:
            if left == 0:
                owned.append(pool.allocator.num_blocks - pool.allocator.num_free)
                cache.free() if give_back else None
        running = [job for job in running if job[2]]
    return owned


# %% [markdown]
# The largest request needs 12 blocks of 16, so 48 are enough for any four. Is the pool afterwards what
# it was before? As many free blocks, each exactly once, and poison in every slot:

# %%
pool = KVPool(tiny, num_blocks=48, block_size=16, poison=True)
reused = serve(pool, requests)
back = sorted(pool.allocator.allocate() for _ in range(pool.allocator.num_free))
print("requests served:", len(reused))
print("every block free, each once:", back == list(range(48)))
print("nothing left in any slot:", bool(pool.k.isnan().all() and pool.v.isnan().all()))
assert back == list(range(48)) and pool.k.isnan().all() and pool.v.isnan().all()

# %% [markdown]
# ## Prove it: poison changes nothing
#
# If nobody reads what is not theirs, then it does not matter what lies there. The same prompt with the
# real model, three times: in the contiguous strip; in a pool that another text has just left, its keys
# still lying about; and in one that was poisoned behind it. All logits, compared exactly.

# %%
from nanoserve.generate import next_logits
from nanoserve.kernels.dispatch import use_backend

first, second = (tokenizer.encode(t) for t in ("My name is Anna and I live in", "My name is"))


def answer(cache, ids, tokens=8):
    """The logits of each greedy step, and the ids chosen."""
    step, logits, chosen = ids, [], []
    for _ in range(tokens):
        with use_backend("reference"):  # the plain sum; from Day 25 on a kernel reads, close to it
            logits.append(next_logits(model, step, cache))
        step = [int(logits[-1].argmax())]
        chosen += step
    return torch.stack(logits), chosen


def after_another(poison, kind=PagedKVCache):
    """What `second` is answered in a pool that `first` has just left."""
    pool = KVPool(config, num_blocks=6, block_size=4, poison=poison)
    cache = PagedKVCache(pool)
    answer(cache, first)
    cache.free()
    return answer(kind(pool), second)


alone, words = answer(NaiveKVCache(config), second)
print(repr(tokenizer.decode(words)))
for poison in (False, True):
    logits, _ = after_another(poison)
    print(f"second-hand blocks, poison={poison}: equal to the strip: {torch.equal(logits, alone)}")
    assert torch.equal(logits, alone)

# %% [markdown]
# ## A stale read, planted
#
# Is the proof any good? A proof that cannot fail proves nothing, so plant the bug. This cache reads
# its last block to the end, though the sequence may stop before it. It is a likely mistake: kernels
# read whole tiles, and have to mask what lies past the end: the scores *and* the values, since a weight
# of 0 times NaN is NaN. (The longer history also shifts the causal band, so that each query sees a few
# slots too far.)


# %%
class ReadsTheWholeBlock(PagedKVCache):
    """Gives back the slots of its blocks, all of them, instead of those of its history."""

    def _write(self, layer, k, v):
        super()._write(layer, k, v)
        return torch.tensor([self.table.slot(p) for p in range(self.table.capacity)])


for poison in (False, True):
    logits, chosen = after_another(poison, ReadsTheWholeBlock)
    finite = bool(logits.isfinite().all())
    print(
        f"poison={poison}: logits finite: {finite}, as they should be: {torch.equal(logits, alone)}"
    )
    if finite:
        print("  it says", repr(tokenizer.decode(chosen)))
    assert finite != poison and not torch.equal(logits, alone)

# %% [markdown]
# Without poison there are readable words, and only somebody who knows the right one could tell. With
# it, the very first logits are NaN. From now on, a test that looks for stale reads poisons its pool first,
# and the kernels will be tested so too.
#
# What poison does **not** see is a stale *write*: a cache that believes its old mapping puts good
# numbers into somebody else's block. Against that there are the rules of Day 14, checked after every
# step: no block has two owners. `today.check(free)` had a case for it.
#
# ## Measure it
#
# What does giving back save? The thousand requests once more, and this time count the blocks that are
# owned. If nobody gives anything back, the count only climbs. And if everybody does?

# %%
today.predict(
    "peak", "A thousand requests, four at a time: how many blocks at the peak?", guess=None
)

# %%
never = serve(KVPool(tiny, num_blocks=8000, block_size=16), requests, give_back=False)
print(f"with reuse {max(reused)} blocks at the peak, without {max(never):,}")
print(f"{max(never) / max(reused):.0f} times fewer; your guess: {today.guess('peak')}")

# %%
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(xlabel="requests served", ylabel="blocks owned", title="Four at a time")
done = range(1, 1001)
ax.plot(done, never, color=COLOURS["fault"])
label_line(ax, 1000, never[-1], "never freed", COLOURS["fault"])
ax.plot(done, reused, color=COLOURS["engine"], linewidth=1)
label_line(ax, 1000, 30, "freed and reused", COLOURS["engine"])
prediction_marker(ax, 500, today.guess("peak"))
ax.set(yscale="log", ylim=(3, 20000), xlim=(0, 1330), xticks=range(0, 1001, 200))
fig

# %% [markdown]
# The scale is logarithmic. One line follows the number of requests there have *ever* been, and the other
# the number there are *now*: it would look the same after a million. So the size of a pool is decided
# by how many sequences you want to serve at once and how long they are, not by how many there have ever
# been.
#
# What it does not show: the order of arrivals was kind. Four requests always fitted here. When they do
# not, somebody has to wait or be interrupted, and to decide who is the scheduler's work, later in the
# course.
#
# ## Your answer is the engine
#
# Two prompts through one poisoned pool of three blocks, with the engine's own cache. Inside
# `today.mine()`, it is your `release` and your `free` that make room for the second.

# %%
from nanoserve import SamplingParams, cache as engine
from nanoserve.generate import generate_tokens

with today.mine():
    pool = engine.KVPool(config, num_blocks=3, block_size=4, poison=True)
    for prompt in ("The capital of France is", "1, 2, 4"):
        cache, ids = engine.PagedKVCache(pool), tokenizer.encode(prompt)
        chosen = [
            s.token_id for s in generate_tokens(model, ids, SamplingParams(max_tokens=6), cache)
        ]
        print(repr(tokenizer.decode(chosen)), "in blocks", cache.table.blocks)
        cache.free()
print("free blocks:", pool.allocator.num_free)
assert pool.allocator.num_free == 3

# %% [markdown]
# ## Week 4 in review
#
# Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## What you learned
#
# 1. **A pool is sized by what runs now,** not by what has ever run: that is what giving back buys.
# 2. **Poison makes the quiet bug loud.** A zero is a good number; NaN is not, and it spreads.
# 3. **Freeing must be complete and repeatable:** every block, every memory of them, and no harm in
#    doing it twice.
#
# ## Tomorrow
#
# Memory is done: blocks, tables, real keys, reuse. The read is not. `append` still copies the whole
# history in every layer of every step. Before anybody makes that fast, Day 18 writes down exactly what
# it must compute, and freezes it.
#
# **In one paragraph.** A sequence ends, its blocks go back, and the next one takes them. We ran a
# thousand through a pool of 48 blocks and found it as it had been, every block free and once only.
# What they left behind we filled with NaN, and nothing changed, which proves that nobody reads it;
# then we planted a cache that does, and it was caught at its first token.
