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
# **Today** a sequence ends. You give its blocks back to the pool, so that a pool with room for a few
# sequences can serve a thousand. And you fill the freed slots with poison, so that a read of old data does
# not go unnoticed.

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
# A server runs for months and a sequence for seconds. So each sequence must give back all its memory.
# Two mistakes are likely here, and neither raises an error:
#
# - **A leak.** One request in a hundred does not give back a block. The server works on Monday, and
#   refuses requests on Friday.
# - **A stale read.** A block is handed out with the last owner's keys still in it. Code that reads one
#   slot too many gets plausible numbers, and the model mixes another user's text into the answer.
#
# If you count the free blocks, you find a leak. Poison, a debugging technique, shows a stale read.

# %%
today.glossary("leak", "stale", "poison", "NaN", "double free")

# %% [markdown]
# ## The table gives its blocks back
#
# `BlockTable.free` gives the blocks back to the allocator one by one, and removes each block from the
# table's list. A second call does nothing, because the list is empty.

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
# The loop begins at the end of the list, so a sequence's first block is given back last. The free list is
# last in, first out, so this block is handed out next.
#
# ## Poison
#
# Poison fills freed slots with NaN. Suppose that attention reads a slot that it should not read. Then the
# output depends on what is in that slot:
#
# | content of the slot | score of the slot | output of attention |
# | --- | --- | --- |
# | zeros | 0, a valid score | wrong, and finite |
# | the last owner's keys | any number | wrong, with another user's text in it |
# | NaN | NaN | NaN, everywhere |
#
# Here are four keys, and a fifth key that should not be read:

# %%
generator = torch.Generator().manual_seed(17)
q, keys = torch.randn(8, generator=generator), torch.randn(4, 8, generator=generator)
for name, fifth in (("zeros", torch.zeros(1, 8)), ("NaN", torch.full((1, 8), torch.nan))):
    weights = torch.softmax(torch.cat([keys, fifth]) @ q, dim=0)
    print(f"{name:5} in the fifth slot: weights", [round(w, 2) for w in weights.tolist()])
    assert weights.isnan().all() if name == "NaN" else 0.2 < weights[4] < 0.3

# %% [markdown]
# A key of zeros takes about a quarter of the attention weights here. The result is finite, so a test that
# looks for NaN or infinity does not find the mistake. NaN in one slot makes all five weights NaN.
#
# ## Your turn: `release`
#
# `release` is a method of `KVPool`, because the pool owns the memory. `table` is one sequence's
# `BlockTable`.
#
# 1. If `self._poison` is set, fill the slots of each block in `table.blocks` with `torch.nan`: keys and
#    values, in every layer. `self.k` and `self.v` are `[num_layers, num_slots, n_kv, head_dim]`. With
#    `size = self.allocator.block_size`, block b has the slots `b * size : (b + 1) * size`.
# 2. If `self._poison` is not set, do not change the numbers: writing them costs time.
# 3. After that, give the blocks back: `table.free()`. The order matters. A pool with poison refuses a block
#    whose slots still hold numbers (`_free_poisoned`, which landed on Day 16).
#
# Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def release(self, table: BlockTable) -> None:
    """Take a sequence's blocks back, and poison their slots if self._poison is set."""
    raise NotImplementedError("your turn")


today.check(release)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: KVPool.release
class KVPool(KVPool):
    def release(self, table: BlockTable) -> None:
        """Give a table's blocks back to the allocator; with `poison`, first write NaN to them."""
        size = self.allocator.block_size
        for block in table.blocks if self._poison else ():
            self.k[:, block * size : (block + 1) * size] = torch.nan
            self.v[:, block * size : (block + 1) * size] = torch.nan
        table.free()


# %% [markdown]
# Without the poison, `table.free()` would give the blocks back with their old content, and a stale read would
# go unnoticed. A pool with poison does not allow this. Its allocator's `free` is replaced by Day 16's
# `_free_poisoned`, which raises a ValueError unless all slots of the block hold NaN.
#
# ## Your turn: `free`
#
# `free` is a method of `PagedKVCache`: one sequence gives its blocks back. The cache stores `self.table`,
# `self.seq_len`, and `self._mapped`, the number of positions that have a slot.
#
# 1. Give the blocks back through `self.pool.release`.
# 2. `self.seq_len` and `self._mapped` describe the old text: set them to their first values. The tensor
#    `self._slots` may stay, because only its first `_mapped` entries count.
# 3. After `free()` the cache is as new: it owns no block, and it can be used for another text. This must
#    hold for every state of a cache. For example, a first step can fail in layer 1. Then the cache owns
#    blocks, and `seq_len` is still 0.
# 4. A second call must change nothing. Code that cleans up after a failure may call `free` on a cache that
#    was freed before.


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
# The package's `free` has two lines, and the second line matters as much as the first. If `seq_len` is not
# reset, the next text begins behind a text that is gone. If `_mapped` is not reset, `_map` takes no blocks
# for the next text, and the new keys go into blocks that may have another owner. From here on this notebook
# uses the package's version.
#
# ## Prove it: a thousand sequences
#
# A small pool serves a thousand requests of random lengths, up to four at a time. All keys and values of
# request n are the number n, so the test finds even a single key of another request.

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
print(f"{total:,} tokens in all, {total / 1000:.0f} per request, {max(map(sum, requests))} at most")
assert -(-max(map(sum, requests)) // 16) == 12


# %%
def feed(cache, number, tokens):
    """Append tokens whose keys and values are `number`; whether all K and V so far are `number`."""
    k = torch.full((1, 1, tokens, 2), float(number))
    return all(bool((kept == number).all()) for kept in cache.append(0, k, k))


def serve(pool, requests, at_once=4, give_back=True):
    """Serve the requests in order; return the number of owned blocks as each request ends."""
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
# The largest request needs 12 blocks of 16, so 48 blocks are enough for any four requests. After the last
# request the pool must be as before: every block is free exactly once, and poison is in every slot.

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
# If no sequence reads the slots of another sequence, it does not matter what these slots hold. Run the same
# prompt through the real model three times: with the contiguous strip; in a pool that still holds the keys
# of an earlier text; and in a pool that was poisoned after the earlier text. Compare all logits exactly.

# %%
from nanoserve.generate import next_logits
from nanoserve.kernels.dispatch import use_backend

first, second = (tokenizer.encode(t) for t in ("My name is Anna and I live in", "My name is"))


def answer(cache, ids, tokens=8):
    """The logits of each greedy step, and the ids chosen."""
    step, logits, chosen = ids, [], []
    for _ in range(tokens):
        with use_backend("reference"):  # the plain sum of Day 18; the default is Day 22's kernel
            logits.append(next_logits(model, step, cache))
        step = [int(logits[-1].argmax())]
        chosen += step
    return torch.stack(logits), chosen


def after_another(poison, kind=PagedKVCache):
    """The logits and ids for `second`, in a pool that `first` has just left."""
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
# A test that cannot fail proves nothing, so plant the bug. This cache reads its last block to the end,
# although the sequence may end earlier. The mistake is a likely one: kernels read whole tiles, and must mask
# the slots past the end. They must mask the scores *and* the values, because a weight of 0 times NaN is NaN.
# (The extra slots also shift the causal mask, so each query sees a few slots too many.)


# %%
class ReadsTheWholeBlock(PagedKVCache):
    """Returns all slots of its blocks, instead of the slots of its tokens."""

    def _write(self, layer, k, v):
        super()._write(layer, k, v)
        return torch.tensor([self.table.slot(p) for p in range(self.table.capacity)])


for poison in (False, True):
    logits, chosen = after_another(poison, ReadsTheWholeBlock)
    finite = bool(logits.isfinite().all())
    print(
        f"poison={poison}: logits finite: {finite}, equal to the strip's: {torch.equal(logits, alone)}"
    )
    if finite:
        print("  the text:", repr(tokenizer.decode(chosen)))
    assert finite != poison and not torch.equal(logits, alone)
    assert not poison or logits[0].isnan().all()

# %% [markdown]
# Without poison, the logits are finite and you get words. You can see the mistake only if you know the right
# words. With poison, the first logits are NaN already. From now on, each test for stale reads poisons its
# pool first, and so do the tests of the kernels.
#
# Poison does **not** find a stale *write*: a cache that keeps its old mapping writes plausible numbers into
# another sequence's block. Two sequences then use one block, and the invariant of Day 14 is broken.
# `today.check(free)` has a case for this mistake.
#
# ## Measure it
#
# How much memory do you save if you give blocks back? Run the thousand requests once more, and count the
# owned blocks. If no block is given back, the count only rises. If every sequence gives its blocks back,
# what is the largest count?

# %%
question = "A thousand requests, four at a time, blocks given back: how many blocks at most?"
today.predict("peak", question, guess=None, low=1)

# %%
never = serve(KVPool(tiny, num_blocks=8000, block_size=16), requests, give_back=False)
print(f"with reuse {max(reused)} blocks at the peak, without {max(never):,}")
print(f"without reuse {max(never) / max(reused):.0f} times as many")
print("your guess of the blocks with reuse:", today.guess_text("peak"))

# %% jupyter={"source_hidden": true}
# Draws the plot: Four at a time
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
# The scale is logarithmic. One line grows with the number of all requests so far. The other line depends
# only on the requests that run *now*, so it would look the same after a million requests. The size that a
# pool needs depends on how many sequences you serve at once and on how long they are. It does not depend on
# how many sequences came before.
#
# This plot does not show a full pool: here four requests always fit. If they do not fit, one request has
# to wait, or is interrupted. Later in the course, a scheduler decides which request this is.
#
# ## Your answer is the engine
#
# Two prompts run through one poisoned pool of three blocks, with the engine's own cache. The second prompt
# needs the blocks of the first. Inside `today.mine()`, your `release` and your `free` give them back, if they
# have passed their checks.

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
# 1. **The size of a pool depends on what runs now,** and not on all that ever ran, because blocks come back.
# 2. **Poison makes a silent bug visible.** Zero is a plausible number. NaN is not, and it spreads.
# 3. **`free` must be complete and repeatable:** every block goes back, the old mapping no longer counts, and
#    a second call changes nothing.
#
# ## Tomorrow
#
# Memory management is complete: blocks, tables, real keys, reuse. Attention over this memory is not complete:
# `append` still copies all keys and values in every layer of every step. Before you make attention fast, Day
# 18 writes down exactly what it must compute, and freezes it.
#
# **In one paragraph.** A sequence ends, its blocks go back, and the next sequence takes them. We ran a
# thousand sequences through a pool of 48 blocks, and afterwards every block was free exactly once. We
# filled freed slots with NaN, and no logit changed, so the second sequence read no slot of the first. Then
# we planted a cache that reads too many slots, and its first logits were NaN.
