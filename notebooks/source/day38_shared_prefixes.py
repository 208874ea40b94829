# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 38 · Shared prefixes
#
# Week 10 · Phase 4, many requests · you need: Day 37 (When memory runs out)
#
# **Today** requests that begin with the same tokens share the blocks of these tokens. You write the hash by which a
# block is found again, and the rule for how many blocks a prompt may take. A system prompt is then computed once.

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

today = day(38)
today.picture("shared-prefixes")

# %% [markdown]
# ## Why it matters
#
# A service puts the same system prompt before every question. In a conversation, each turn begins with all earlier
# turns. Until now the engine computes these tokens again for every request, and keeps one copy of their keys and
# values for each.
#
# Day 16 put keys and values into blocks, and a table says which blocks belong to a sequence. Nothing says that a block
# belongs to **one** table only. If two sequences begin with equal tokens, their keys and values are equal too. (A key
# depends on its own token and on all tokens before it, and on nothing else.) So both tables can name the same block.
# vLLM and SGLang do this (Kwon et al. 2023; Zheng et al. 2024).

# %%
today.glossary()

# %% [markdown]
# ## Find a block by its tokens
#
# Which blocks hold the start of a new prompt already? A dictionary can say so, if a block has a key that stands for
# all tokens up to its end. Those can be thousands. So hash them, block by block, as a chain:
#
# `hash of block i  =  a hash of (hash of block i - 1, the tokens of block i)`, and 0 stands before the first block.
#
# | block | its tokens | text before it | may share with the first row? |
# | --- | --- | --- | --- |
# | 1 | `[21, 22]` | `[11, 12]` | |
# | 1 | `[21, 22]` | `[11, 12]` | yes |
# | 1 | `[21, 22]` | `[13, 14]` | no: other keys and values |
# | 1 | `[22, 21]` | `[11, 12]` | no: another order |
#
# ## Your turn: `chained_hash`
#
# `before` is the hash of the block before, an integer. `tokens` is a list of token ids. Return an integer that depends
# on `before` and on all tokens in their order. Python's `hash` of a tuple of integers is good enough.
#
# Stuck? `today.hint()`. After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
from collections.abc import Sequence

from nanoserve.cache import BlockTable, KVCacheExhausted, KVPool, PagedKVCache


def chained_hash(before: int, tokens: Sequence[int]) -> int:
    """The hash of a block's tokens and of the hash of the block before it."""
    raise NotImplementedError("your turn")


today.check(chained_hash)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: chained_hash
def chained_hash(before: int, tokens: Sequence[int]) -> int:
    """The hash of a block: of its tokens in order, and of `before`, the hash of the block before
    it (0 for the first block). So it stands for all tokens up to the block's end."""
    return hash((before, *tokens))


# %% [markdown]
# The cell above holds the package's version; from here on this notebook uses it.
#
# ## A hash is not a proof
#
# A hash has 64 bits, and there are more texts than that. So two different prefixes can have equal hashes: a
# collision. By chance this is very rare. But somebody may look for one on purpose, and Python's `hash` was not made
# against that. An engine that trusts the hash would then answer one user from the text of another.
#
# So the tokens themselves are compared before a block is shared. `Prefix` does it: its `__hash__` is the chained hash,
# and its `__eq__` compares the tokens of this block and of all blocks before it. A Python dictionary uses both: it
# looks for the hash, and then compares with `==`. The comparison stops where both chains go on in one object. So a
# lookup compares each block once.


# %%
# lands in nanoserve/cache.py: Prefix
class Prefix:
    """The tokens of a full block, and all tokens before them.

    Two prefixes are equal if all their tokens are equal. A dict finds a prefix by its hash and then
    compares the tokens, so a collision of hashes shares nothing.
    """

    def __init__(self, before: "Prefix | None", tokens: Sequence[int]) -> None:
        """before: the prefix that ends where the block begins, or None for the first block."""
        self.before, self.tokens = before, tuple(tokens)
        self._hash = chained_hash(0 if before is None else hash(before), self.tokens)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        a, b = self, other
        while a is not b:  # one object stands for equal tokens: the rest need not be compared
            if not (isinstance(a, Prefix) and isinstance(b, Prefix)) or a.tokens != b.tokens:
                return False
            a, b = a.before, b.before
        return True


# %%
system = list(range(11, 19))
first = Prefix(Prefix(None, system[:4]), system[4:])
again = Prefix(Prefix(None, system[:4]), system[4:])
other = Prefix(Prefix(None, [99, *system[1:4]]), system[4:])
print("equal tokens, equal prefix:", first == again, "· found in a dict:", again in {first: 5})
print("equal tokens, another prefix:", first == other)
assert first == again and again in {first: 5} and first != other

# %% [markdown]
# ## How many blocks may a prompt take?
#
# Two rules:
#
# 1. **Only full blocks are shared.** A block that is partly full is still being written by its owner.
# 2. **The last token is always computed.** The first logits come from its hidden state, and the cache holds keys and
#    values, no hidden states.
#
# With both rules nobody ever writes to a shared block: what a request computes goes into blocks behind it.
#
# ## Your turn: `shareable_blocks`
#
# `num_tokens` is at least 1. Return the largest number of blocks, an integer, that a prompt of that many tokens may
# take from the cache.


# %%
def shareable_blocks(num_tokens: int, block_size: int) -> int:
    """How many blocks of num_tokens tokens may come from the cache."""
    raise NotImplementedError("your turn")


today.check(shareable_blocks)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: shareable_blocks
def shareable_blocks(num_tokens: int, block_size: int) -> int:
    """How many blocks of num_tokens tokens may come from the cache.

    Only full blocks, and never the last token: its hidden state gives the first logits.
    """
    return (num_tokens - 1) // block_size


# %%
for tokens in (1, 15, 16, 17, 32, 33, 1000):
    print(f"{tokens:5} tokens: {shareable_blocks(tokens, 16):2} of the blocks of 16")
assert shareable_blocks(32, 16) == 1

# %% [markdown]
# A prompt of 32 tokens that was computed before, whole: one block of two is taken, and the last 16 tokens are computed
# again. It would be possible to copy the block and to compute one token; this engine keeps the simpler rule.
#
# ## Count the references
#
# `BlockAllocator` does not change. It knows two states, free and owned. `PrefixCache` stands between the tables and the
# allocator, and splits "owned" into two:
#
# - **referenced**: in one table or more. `PrefixCache` counts the tables of each *known* block, one that can be found.
#   A block that is not known has one owner, as before.
# - **cached**: in no table. When the last table gives a known block back, the block keeps its content, and a later
#   request can find it.
#
# free + cached + referenced = all blocks. `num_free` counts the free blocks only, `num_cached` the cached ones.
#
# When a table needs a block and none is free, `allocate_for` evicts the cached block that was not used for the longest
# time. Only now its slots are poisoned (Day 17), and nobody finds it any more. `BlockTable.free` gives the last block
# back first. So the end of a prefix is evicted before its start, which more requests can use.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: PrefixCache
class PrefixCache:
    """Shares the full blocks of a pool between sequences. Tables use it in place of the allocator.

    Each block is free, referenced (in one table or more) or cached (in no table, its content kept).
    Invariant: free + cached + referenced = num_blocks. A known block can be found by its tokens; a
    block that is not known has one owner. Only full blocks are known, and nothing writes to them.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._allocator = pool.allocator
        self._blocks: dict[Prefix, int] = {}  # the known blocks
        self._prefixes: dict[int, Prefix] = {}  # the same, by block
        self._references: dict[int, int] = {}  # the number of tables that have a known block
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
        return self._allocator.num_blocks

    @property
    def block_size(self) -> int:
        """The number of slots in a block."""
        return self._allocator.block_size

    @property
    def num_free(self) -> int:
        """The number of free blocks, without the cached ones."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks that are in no table and keep their content."""
        return len(self._cached)

    def references(self, block_id: int) -> int:
        """The number of tables that have a known block; 0 for a block that is not known."""
        return self._references.get(block_id, 0)

    def find(self, ids: Sequence[int]) -> list[int]:
        """The known blocks that hold the start of ids, in order: at most shareable_blocks."""
        size, blocks, prefix = self.block_size, [], None
        for i in range(shareable_blocks(len(ids), size)):
            block = self._blocks.get(Prefix(prefix, ids[i * size : (i + 1) * size]))
            if block is None:
                break
            blocks.append(block)
            prefix = self._prefixes[block]
        return blocks

    def take(self, ids: Sequence[int]) -> list[int]:
        """Find the blocks that hold the start of ids, for one more table."""
        blocks = self.find(ids)
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)
        return blocks

    def add(self, block_id: int, prefix: Prefix) -> None:
        """Make a full block known. Call this after the step that filled the block.

        If the same tokens are known in another block, this one stays with its one owner.
        """
        if prefix not in self._blocks:
            self._blocks[prefix], self._prefixes[block_id] = block_id, prefix
            self._references[block_id] = 1

    def allocate_for(self, num_tokens: int) -> list[int]:
        """As BlockAllocator.allocate_for. If too few blocks are free, evicts cached blocks.

        Raises KVCacheExhausted, and evicts nothing, if both together are too few.
        """
        missing = -(-num_tokens // self.block_size) - self.num_free
        if missing > self.num_cached:
            raise KVCacheExhausted(
                f"{missing + self.num_free} blocks are needed, {self.num_free} are free and "
                f"{self.num_cached} are cached"
            )
        for _ in range(missing):
            self._evict()
        return self._allocator.allocate_for(num_tokens)

    def free(self, block_id: int) -> None:
        """Give back a table's reference to a block. Raises ValueError if no table has the block.

        A known block that no table has any more becomes cached. Any other block becomes free.
        """
        if block_id not in self._prefixes:
            self._release(block_id)
            return
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is in no table")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            self._cached[block_id] = None

    def _evict(self) -> None:
        """Forget the least recently used cached block, and free it."""
        block_id = next(iter(self._cached))
        del self._cached[block_id], self._references[block_id]
        del self._blocks[self._prefixes.pop(block_id)]
        self._release(block_id)

    def _release(self, block_id: int) -> None:
        """Give a block back to the pool, which poisons the block if it has poison."""
        table = BlockTable(self._allocator)
        table.blocks.append(block_id)
        self.pool.release(table)


# %% [markdown]
# A cache of one sequence has two new methods. `reuse` begins with the known blocks of a prompt, and sets `seq_len` as
# if they had been computed. `share` makes the blocks known that are full by now. If two requests computed equal blocks
# in the same step, the first becomes known, and the second stays with its owner until the end.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: SharedKVCache
class SharedKVCache(PagedKVCache):
    """The paged KV cache of one sequence that shares full blocks through a PrefixCache."""

    def __init__(self, prefixes: PrefixCache) -> None:
        super().__init__(prefixes.pool)
        self.table = BlockTable(prefixes)
        self._prefixes = prefixes
        self._chain: list[Prefix] = []  # one for each block that was taken or shared

    def reuse(self, ids: Sequence[int]) -> None:
        """Begin an empty cache with the known blocks that hold the start of ids.

        Raises ValueError if the cache has tokens or blocks.
        """
        if self.seq_len or self.table.blocks:
            raise ValueError(f"the cache is not empty: it holds {self.seq_len} tokens")
        self.table.blocks += self._prefixes.take(ids)
        self.seq_len = self.table.capacity
        self._extend(ids)

    def share(self, ids: Sequence[int]) -> None:
        """Make the blocks known that are full. ids begins with the tokens that the cache holds."""
        for i in range(len(self._chain), self._extend(ids)):
            self._prefixes.add(self.table.blocks[i], self._chain[i])

    def free(self) -> None:
        """Give every block back and set the length to 0; a second call does nothing."""
        self.table.free()
        self._chain.clear()
        self.seq_len = self._mapped = 0

    def _extend(self, ids: Sequence[int]) -> int:
        """Chain the prefixes of all full blocks; return how many blocks are full."""
        size = self.pool.allocator.block_size
        for i in range(len(self._chain), self.seq_len // size):
            before = self._chain[-1] if self._chain else None
            self._chain.append(Prefix(before, ids[i * size : (i + 1) * size]))
        return len(self._chain)


# %% [markdown]
# ## Watch the counts
#
# A pool of six blocks of four slots. A sequence of nine tokens fills two blocks and begins a third. (The keys are not
# needed to count blocks, so the length is set by hand.)

# %%
from nanoserve import load_model, load_tokenizer

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
prefixes = PrefixCache(KVPool(model.config, 6, 4))


def show(moment):
    held = prefixes.num_blocks - prefixes.num_free - prefixes.num_cached
    print(f"{moment:26} free {prefixes.num_free}, cached {prefixes.num_cached}, referenced {held}")
    return held


ids, a, b = [*system, 7], SharedKVCache(prefixes), SharedKVCache(prefixes)
a.table.grow(9)
a.seq_len = 9
a.share(ids)
show("A has computed 9 tokens")
b.reuse([*system, 8, 9])
print("  B begins with blocks", b.table.blocks, "and", b.seq_len, "tokens")
assert show("B has begun") == 3 and b.table.blocks == a.table.blocks[:2]
a.free()
assert show("A has ended") == 2
b.free()
assert show("B has ended") == 0 and prefixes.num_cached == 2

# %% [markdown]
# The third block of A was not full, so it became free at once. The two full blocks are cached.
#
# ## The scheduler and the engine
#
# `PrefixScheduler` adds four things to the scheduler of Days 35 to 37:
#
# - `schedule` first shares the blocks that the last step filled. A block is shared only **after** the step that filled
#   it: within a step, another request could read slots that are not written yet.
# - `remove` shares the full blocks of a request before it gives them back, also when it is aborted.
# - `_can_admit` counts a block that another request holds as one that need not be free.
# - `_take` begins a request with the blocks that hold its start. A preempted request (Day 37) comes back this way too:
#   what nobody has evicted in the meantime is not computed again.


# %%
from collections.abc import Iterable
from itertools import count

from nanoserve.cache import BLOCK_SIZE
from nanoserve.engine.engine import Engine, default_num_blocks
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Output, Sequence
from nanoserve.model import Model
from nanoserve.sampling import SamplingParams
from nanoserve.tokenizer import Tokenizer


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/scheduler.py: PrefixScheduler
class PrefixScheduler(Scheduler):
    """A scheduler whose requests begin with the blocks that hold the start of their tokens.

    Every request's cache is a SharedKVCache. A block is shared after the step that filled it.
    """

    def __init__(
        self, prefixes: PrefixCache, max_num_seqs: int = 64, max_batch_tokens: int = 2048
    ) -> None:
        """As for Scheduler."""
        super().__init__(prefixes, max_num_seqs, max_batch_tokens)
        self._prefixes = prefixes

    def schedule(self) -> dict[Sequence, int]:
        """Share the blocks that the last step filled, then choose the next step."""
        for sequence in self.running:
            sequence.cache.share(sequence.ids)
        return super().schedule()

    def remove(self, sequence: Sequence) -> None:
        """Take out a request. Its full blocks stay in the prefix cache until they are evicted."""
        sequence.cache.share(sequence.ids)
        super().remove(sequence)

    def _can_admit(self, sequence: Sequence) -> bool:
        """Whether one more request may run: the blocks that are free, cached, or in the table of
        a request that runs, and hold its start, are enough for its tokens so far."""
        if len(self.running) >= self.max_num_seqs:
            return False
        needed = -(-len(sequence.ids) // self._prefixes.block_size)
        found = self._prefixes.find(sequence.ids)
        shared = sum(self._prefixes.references(block) > 0 for block in found)
        return needed - shared <= self._prefixes.num_free + self._prefixes.num_cached

    def _take(self, sequence: Sequence) -> None:
        """Take a request's prefix from the cache first, if it has computed nothing yet."""
        if sequence in self.running and not sequence.cache.table.blocks:
            sequence.cache.reuse(sequence.ids)
        super()._take(sequence)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/engine.py: Engine.__init__, Engine.num_free_blocks, Engine.add
class Engine(Engine):
    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        num_blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 2048,
        prefix_sharing: bool = True,
    ) -> None:
        """num_blocks: the size of the pool, by default that of default_num_blocks.

        At most max_num_seqs requests run at a time, and max_batch_tokens tokens in a step. With
        prefix_sharing, the full blocks of equal prefixes are computed once. Without a tokenizer,
        outputs have no text. Raises ValueError if a number is below 1.
        """
        if num_blocks is None:
            num_blocks = default_num_blocks(model, block_size)
        self.model, self.tokenizer = model, tokenizer
        self.pool = KVPool(model.config, num_blocks, block_size, model.dtype, model.device)
        self.prefixes = PrefixCache(self.pool) if prefix_sharing else None
        if self.prefixes is None:
            self.scheduler = Scheduler(self.pool.allocator, max_num_seqs, max_batch_tokens)
        else:
            self.scheduler = PrefixScheduler(self.prefixes, max_num_seqs, max_batch_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[Output] = []  # for the next step to return
        self._numbers = count()

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds: free, or kept for their content."""
        cached = 0 if self.prefixes is None else self.prefixes.num_cached
        return self.pool.allocator.num_free + cached

    def add(
        self, prompt_ids: Iterable[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id, by default a new one.

        Raises ValueError, and changes nothing, for the id of a request that is not finished and for
        a request that `check` refuses.
        """
        ids = self.check(prompt_ids, params)
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            request_id = next(name for name in names if name not in self._sequences)
        if request_id in self._sequences:
            raise ValueError(f"there is a request {request_id!r} already")
        limit = min(params.max_tokens, self.model.config.context - len(ids) + 1)
        shares = self.prefixes is not None
        cache = SharedKVCache(self.prefixes) if shares else PagedKVCache(self.pool)
        eos_ids = self.model.config.eos_ids
        sequence = Sequence(request_id, ids, params, cache, limit, eos_ids, self.tokenizer)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return request_id


# %% [markdown]
# `Engine.num_free_blocks` counts the cached blocks too, because a request that needs them gets them.
#
# ## Prove it: the same tokens
#
# Six prompts with a common start, in a pool of 12 blocks, so that blocks are evicted and requests are preempted. All run
# with and without sharing. Then once more, with a hash that gives 0 for every block: now **all** blocks collide.

# %%
TEXT = "You are a helpful assistant. Answer in one short sentence. "
QUESTIONS = ("What is a tide?", "Who wrote Faust?", "Why is the sky blue?", "What is a prime?")
prompts = [tokenizer.encode(TEXT * n + question) for n, question in zip((1, 2, 1, 2), QUESTIONS)]
prompts += [prompts[1][:16], prompts[1][:17]]


def answers(sharing):
    """The greedy tokens of each prompt, the tokens that were computed, the preemptions."""
    engine = Engine(model, tokenizer, 12, 8, max_batch_tokens=40, prefix_sharing=sharing)
    tokens = {engine.add(ids, SamplingParams(max_tokens=8)): [] for ids in prompts}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    assert engine.num_free_blocks == engine.num_blocks
    return list(tokens.values()), engine.scheduler.num_preemptions


shared, _ = answers(True)
alone, _ = answers(False)
print("with and without sharing, the same tokens:", shared == alone)
assert shared == alone

# %%
good_hash, chained_hash = chained_hash, lambda before, tokens: 0
collided, _ = answers(True)
chained_hash = good_hash
print("every hash is 0, the same tokens:", collided == alone)
assert collided == alone

# %% [markdown]
# The second cell replaces `chained_hash`, which `Prefix` calls. With equal hashes the dictionary compares every known
# prefix, so it is slow, and it is right.
#
# ## Measure it: time to first token
#
# A system prompt of 1,000 tokens, and a question behind it. The first request is cold. Then more questions come, one
# after another, and each is warm: 62 full blocks of 16, which are 992 tokens, come from the cache.
#
# How long does a warm request take for its first token, as a percentage of the cold one?

# %%
question = "TTFT of a warm request, as a percentage of the cold one?"
today.predict("warm", question, guess=None, low=0, high=100)

# %% tags=["nbval-ignore-output"]
import time
from dataclasses import replace

model.config = replace(model.config, eos_ids=())  # so that each answer has all its tokens
SYSTEM = tokenizer.encode("You are a careful assistant. Say what you do not know. " * 100)[:1000]
asked = [tokenizer.encode(f" What is {i} plus {3 * i}?") for i in range(32)]
engine = Engine(model, tokenizer, 300)


def time_to_first(ids):
    """Seconds until the first token of one request, and the tokens that were computed for it."""
    known = 16 * len(engine.prefixes.find(ids))
    engine.add(ids, SamplingParams(max_tokens=1))
    begin = time.perf_counter()
    engine.step()
    return time.perf_counter() - begin, len(ids) - known


cold, computed = time_to_first(SYSTEM + asked[0])
print(f"cold: {cold * 1e3:5.0f} ms, {computed} tokens computed")
warm = [time_to_first(SYSTEM + ids) for ids in asked[1:6]]
for seconds, computed in warm:
    print(
        f"warm: {seconds * 1e3:5.0f} ms, {computed} tokens computed, {seconds / cold:.0%} of cold"
    )
percent = 100 * sorted(seconds for seconds, _ in warm)[2] / cold
print("your guess:", today.guess_text("warm"))
assert percent < 25

# %% [markdown]
# The first request computes about a thousand tokens, each later one only its own question and the 8 tokens of the
# system prompt that do not fill a block.
#
# Now 31 questions arrive **together**, after the first. All 31 are computed in one step, so each waits for all.

# %% tags=["nbval-ignore-output"]
begin, first_at = time.perf_counter(), {}
for ids in asked[1:]:
    engine.add(SYSTEM + ids, SamplingParams(max_tokens=9))
for _ in range(2):  # the first token of each answer, then the second
    for output in engine.step():
        first_at.setdefault(output.request_id, time.perf_counter() - begin)
held = engine.num_blocks - engine.num_free_blocks
for request in first_at:
    engine.abort(request)
assert len(first_at) == 31 and engine.num_free_blocks == engine.num_blocks
together = max(first_at.values())
tokens = sum(len(SYSTEM + ids) - 992 for ids in asked[1:])
print(f"31 together: {together * 1e3:.0f} ms for {tokens} tokens, {together / cold:.0%} of cold")
print(f"that is {together / 31 * 1e3:.0f} ms for each of the 31")

# %% [markdown]
# Read the percentage with care. The step computes 31 questions, not one, and each of their tokens attends to a thousand
# keys. The keys are stored once. But the kernel of Week 7 reads them again for every sequence. (Kernels that read a
# shared prefix once for all sequences exist: cascade attention in FlashInfer, Hydragen.) And 8 tokens of the system
# prompt fill no block, so all 31 compute them. Without sharing, the step would have had about 31,000 tokens.
#
# ## Measure it: the blocks
#
# Count first: 62 blocks for the system prompt, once. For each request, what stands behind: the last 8 tokens of the
# system prompt, its question, and one token of its answer. (After two steps an answer has two tokens, and the second
# is not computed yet.)

# %%
own = [-(-(len(SYSTEM + ids) + 1) // 16) - 62 for ids in asked[1:]]
print(f"counted: 62 + {sum(own)} = {62 + sum(own)} blocks; the engine held {held}")
print(f"without sharing: {sum(62 + n for n in own):,} blocks")
assert held == 62 + sum(own)

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
# Draws the plots: time to first token, and blocks by the number of requests
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, (left, right) = figure(height=3.8, panels=2)
times = [cold, *(seconds for seconds, _ in warm)]
left.bar(
    range(1, 7),
    [100 * t / cold for t in times],
    color=[COLOURS["contiguous"]] + [COLOURS["engine"]] * 5,
)
left.set(
    xlabel="request",
    ylabel="% of the cold request",
    ylim=(0, 118),
    xlim=(0.3, 7.6),
    xticks=range(1, 7),
)
left.set_title("Time to first token", loc="left", fontweight="bold")
if guess := today.guess("warm"):
    prediction_marker(left, 4, guess)
count = range(1, 32)
for name, line, colour in (
    ("not shared", [sum(own[:n]) + 62 * n for n in count], "contiguous"),
    ("shared", [sum(own[:n]) + 62 for n in count], "engine"),
):
    right.plot(count, line, color=COLOURS[colour], lw=2)
    label_line(right, 31, line[-1], name, COLOURS[colour], "right")
right.plot([31], [held], "o", color=COLOURS["engine"])
right.set(xlabel="requests at the same time", ylabel="blocks", yscale="log", xlim=(0, 44))
right.set_yticks([100, 1000], ["100", "1,000"])
right.set_title("Blocks (dot: measured)", loc="left", fontweight="bold")
fig

# %% [markdown]
# The lines on the right are counted and the dot is the engine's. What the plots do not show: sharing helps only where
# prompts begin alike. A time or a name at the start of a system prompt makes every prompt different from its first
# block on. So put what changes at the end.
#
# ## Your answer is the engine
#
# The package's engine runs two requests with one prefix, with your functions if they have passed.

# %%
from nanoserve.engine import Engine as PackageEngine

with today.mine():
    mine = PackageEngine(model, tokenizer, 40)
    for ids in prompts[:2]:
        mine.add(ids, SamplingParams(max_tokens=4))
        while mine.has_work:
            mine.step()
print("blocks kept for the next request:", mine.prefixes.num_cached)
assert mine.num_free_blocks == 40

# %% [markdown]
# ## What you learned
#
# 1. **A block may be in many tables, if nobody writes to it.** So only full blocks are shared, and the last token is
#    always computed.
# 2. **A hash finds, a comparison proves.** With all hashes equal, not one token changes.
# 3. **Free memory can still hold something useful.** A released block keeps its content until its slots are needed.
#
# ## Tomorrow
#
# The engine now computes little that it has computed before. Is the GPU busy all the time? Day 39 looks at what happens
# between two steps: the host samples, packs and waits.
#
# **In one paragraph.** Requests with a common start share its blocks. A chained hash finds them, their tokens are
# compared before they are shared, and a count says how many tables have each. A block that no table has keeps its
# content, and is evicted when others need its slots. The tokens were the same with sharing, without, and with a hash
# that always collides; a warm request had its first token in less than a quarter of the cold one's time, and the
# engine held exactly the blocks that we had counted.
