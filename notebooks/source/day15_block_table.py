# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 15 · Logical to physical
#
# Week 4 · Phase 2, paged memory · you need: Day 14 (A pool of blocks)
#
# **Today** a sequence gets its map. You write the table that says in which slot of the pool a token
# lies, and let it grow so that a refusal changes nothing.

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

today = day(15)
today.picture("logical-to-physical")

# %% [markdown]
# ## Why it matters
#
# Attention asks for the tokens of a text: position 0, position 1, and so on. The pool has slots, and
# the text's blocks lie in it wherever one was free. Between the two stands a list of numbers and one
# line of arithmetic. Every read and every write of a paged engine goes through that line
# or a list made by it, here, in vLLM, and in the kernel that you write on Day 22.
#
# It is also a line that fails without a sound. A slot that is off by one is still a slot. It holds
# some key, of this sequence or of another one's, and the model goes on with it.

# %%
today.glossary("block table", "logical", "physical", "atomic")

# %% [markdown]
# ## One division
#
# Cut the text into pieces of `block_size` tokens. Piece 0 lies in the block that the table names
# first, piece 1 in the second, and so on. So a position needs two numbers:
#
# - its **index** in the table: which piece is it in? `position // block_size`
# - its **offset** in the block: which place in the piece? `position % block_size`
#
# By hand, for the picture's table, 5, 2, 7 with blocks of 4:
#
# | position | index | offset | block | slot |
# | --- | --- | --- | --- | --- |
# | 0 | 0 | 0 | 5 | 5 × 4 + 0 = 20 |
# | 3 | 0 | 3 | 5 | 5 × 4 + 3 = 23 |
# | 4 | 1 | 0 | 2 | 2 × 4 + 0 = 8 |
# | 9 | 2 | 1 | 7 | 7 × 4 + 1 = 29 |
#
# From 3 to 4 the position goes up by one, and the slot goes *down* by 15.
#
# The table itself is small: the ids in the order of the text, and the allocator it gets them from.

# %%
from nanoserve.cache import BLOCK_SIZE, BlockAllocator, KVCacheExhausted


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockTable
class BlockTable:
    """The blocks of one sequence, in order: maps each position to its place in the pool."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.blocks: list[int] = []
        self._allocator = allocator

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks can hold."""
        return len(self.blocks) * self._allocator.block_size


# %% [markdown]
# ## Your turn: `slot`
#
# Give the physical slot of a position: block id × block size + offset. `self.blocks` is the list of
# ids, and the size is `self._allocator.block_size`.
#
# A position that the table has no room for is a mistake of the caller: raise ValueError and name the
# position. That includes -1, for which Python would happily answer with the last block.
#
# It is a method, written here as a function; the check puts it into the class.


# %%
def slot(self, position: int) -> int:
    """The physical slot of a position: block id * block_size + offset. Raises ValueError for a
    position outside 0 .. capacity - 1."""
    raise NotImplementedError("your turn")


today.check(slot)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockTable.locate, BlockTable.slot
class BlockTable(BlockTable):
    def locate(self, position: int) -> tuple[int, int]:
        """(block id, offset in the block) of a position. Raises ValueError past the capacity."""
        if not 0 <= position < self.capacity:
            raise ValueError(f"position {position} is outside the table's {self.capacity} slots")
        index, offset = divmod(position, self._allocator.block_size)
        return self.blocks[index], offset

    def slot(self, position: int) -> int:
        """The physical slot of a position: block id * block_size + offset."""
        block, offset = self.locate(position)
        return block * self._allocator.block_size + offset


# %% [markdown]
# The package does it in two steps, since some callers want the block and the offset apart: `locate`
# gives the pair, `slot` the one number. The picture, asked:

# %%
table = BlockTable(BlockAllocator(8, 4))
table.blocks = [5, 2, 7]
print([table.slot(position) for position in range(table.capacity)])
print("position 9 lies in (block, offset)", table.locate(9), "at slot", table.slot(9))
for position in (12, -1):
    try:
        table.slot(position)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## Your turn: `grow`
#
# A table begins empty, and blocks come when they are needed: a prompt of 33 tokens takes three blocks
# at once, and then every sixteenth token takes one more. `grow(num_tokens)` makes sure that there is
# room for `num_tokens` tokens **in all**:
#
# - `self.capacity` tokens have room already. Ask the allocator for what is missing, and put the new
#   blocks behind the old.
# - With room enough, nothing happens. `grow` never takes a block away.
# - It is **atomic**. Where the pool has too few blocks, `KVCacheExhausted` goes through to the
#   caller, and table and pool are as they were.
#
# `allocate_for` of Day 14 is all or nothing, and that makes this short.


# %%
def grow(self, num_tokens: int) -> None:
    """Own enough blocks for num_tokens tokens in all. Raises KVCacheExhausted, unchanged."""
    raise NotImplementedError("your turn")


today.check(grow)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockTable.grow
class BlockTable(BlockTable):
    def grow(self, num_tokens: int) -> None:
        """Take blocks until the table can hold num_tokens tokens in all.

        Raises KVCacheExhausted, with the table unchanged, where too few blocks are free.
        """
        self.blocks += self._allocator.allocate_for(max(0, num_tokens - self.capacity))


# %% [markdown]
# One line, and its order matters: `allocate_for` runs first. Where it raises, the `+=` is never
# reached.
#
# ## Step through it
#
# Three sequences and a pool of 12 blocks. The line of text says what happens: `A6` is six tokens of A,
# `-A` is the end of A, whose blocks go back to the pool. The slider steps through it, token by token.
# Write a story of your own, with two sequences or three. Who is refused first, if all of them grow?

# %% tags=["nbval-ignore-output"]
today.widget("block-table")

# %% [markdown]
# Here A has ended. C was given its blocks 0 and 1 (a table frees its last block first, and what
# was freed last is handed out first), so C's table reads 5, 0, 1: its text runs from the
# middle of the pool to its beginning, and nobody who goes through the table will notice.
#
# ## Prove it: atomic growth
#
# Three tables share a pool that is too small for them. They grow at random, and the pool will be
# exhausted again and again. After every step:
#
# - a refused `grow` has left table and pool as they were;
# - each table has room for its tokens, and less than a block to spare;
# - no slot belongs to two tokens, of one sequence or of two.

# %%
import random


def check_tables(tables, lengths, pool):
    slots = []
    for table, length in zip(tables, lengths):
        assert length <= table.capacity < length + pool.block_size, "room does not fit the length"
        slots += [table.slot(position) for position in range(length)]
    assert len(slots) == len(set(slots)), "two tokens in one slot"
    owned = [block for table in tables for block in table.blocks]
    assert sorted(owned + pool._free) == list(range(pool.num_blocks)), "the books are off"


# %%
chance, refused = random.Random(15), 0
pool = BlockAllocator(12, 4)
tables, lengths = [BlockTable(pool) for _ in range(3)], [0, 0, 0]
for _ in range(1_000):
    i, more = chance.randrange(3), chance.choice([1, 1, 1, 5, 11])
    before = list(tables[i].blocks), pool.num_free
    try:
        tables[i].grow(lengths[i] + more)
        lengths[i] += more
    except KVCacheExhausted:
        refused += 1
        assert before == (tables[i].blocks, pool.num_free), "a refusal changed something"
        for block in tables[i].blocks:  # this sequence ends, and a new one begins
            pool.free(block)
        tables[i], lengths[i] = BlockTable(pool), 0
    check_tables(tables, lengths, pool)
print("1,000 steps hold:", refused > 50, "with refusals among them")

# %% [markdown]
# And a growth that is not atomic? It takes block after block until there is none left:


# %%
class Greedy(BlockTable):
    def grow(self, num_tokens):
        while self.capacity < num_tokens:
            self.blocks.append(self._allocator.allocate())


for kind in (BlockTable, Greedy):
    pool = BlockAllocator(4, 4)
    first, second = kind(pool), kind(pool)
    first.grow(6)
    try:
        second.grow(10)
    except KVCacheExhausted:
        print(
            f"{kind.__name__:10} second was refused and owns {second.blocks}, {pool.num_free} free"
        )

# %% [markdown]
# With `Greedy`, `second` got nothing that it can use, and keeps the last two blocks all the same. Now
# `first` gets no further block either. If both wait for the other to end, they wait for ever.
#
# ## Where the tokens lie
#
# Three prompts of 20, 33 and 5 tokens, and then 40 more tokens each, in turns, as a server writes them:


# %%
def in_turns(size, prompts, more):
    """The slots of sequences that write a token each, in turns, into one pool."""
    longest = sum(prompts) + more * len(prompts)
    pool = BlockAllocator(longest // size + len(prompts), size)
    tables = [BlockTable(pool) for _ in prompts]
    for step in range(more + 1):
        for table, prompt in zip(tables, prompts):
            table.grow(prompt + step)
    return [
        [table.slot(position) for position in range(prompt + more)]
        for table, prompt in zip(tables, prompts)
    ]


# %%
from nanoserve.course.exercises.day15 import SHADES
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, ax = figure(
    height=4.4,
    xlabel="position in the text",
    ylabel="slot in the pool",
    title="Three texts in one pool",
)
placed = in_turns(BLOCK_SIZE, (20, 33, 5), 40)
for (name, (fill, _)), slots in zip(SHADES.items(), placed):
    ax.plot(range(len(slots)), slots, color=COLOURS["ink"], linewidth=0.6, zorder=1)
    ax.scatter(range(len(slots)), slots, s=20, color=fill, edgecolor=COLOURS["ink"], linewidth=0.5)
    label_line(ax, len(slots) - 1, slots[-1], name, COLOURS["ink"])
ax.set(yticks=range(0, 193, 16), xticks=range(0, 81, 16), xlim=(-2, 80), ylim=(-4, 196))
fig

# %% [markdown]
# A line runs on while the next block happens to lie behind the last one. A prompt takes its blocks
# together, so it often does: A's first 32 tokens, B's first 48. From then on all three take turns, and
# each line jumps to wherever a block was free. No two tokens ever stand at the same height.
#
# ## Measure it: how scattered is scattered?
#
# Memory is read fastest in one go. So count: of all steps from a position to the next one, how many go
# to the very next slot? Three sequences write 512 tokens each, in turns from the first, which is the
# worst case: each new block has strangers on both sides.

# %%
today.predict("next", "Blocks of 16: per cent of the steps that go to the next slot?", guess=None)

# %%
from itertools import pairwise

sizes = (1, 2, 4, 8, 16, 32, 64)
share = []
for size in sizes:
    steps = [b - a for slots in in_turns(size, (1, 1, 1), 511) for a, b in pairwise(slots)]
    share.append(100 * steps.count(1) / len(steps))
    print(
        f"blocks of {size:2}: {share[-1]:5.1f}% to the next slot, {-(-512 // size):3} table entries"
    )
print("your guess for 16:", today.guess("next"))
assert 93 < share[sizes.index(16)] < 95

# %%
fig, ax = figure(
    xlabel="slots of a block", ylabel="% of steps to the next slot", title="Scattered, but in runs"
)
line(ax, sizes, share, "counted", COLOURS["engine"])
prediction_marker(ax, 16, today.guess("next"), where="below")
log2_axis(ax)
ax.set(ylim=(-4, 104), xlim=(0.85, 110), xticks=sizes)
fig

# %% [markdown]
# With blocks of one slot, nothing has a neighbour. With blocks of 16, fifteen of sixteen steps are to
# the next slot: only the step over a block's edge is a jump, one in `block_size`. And the table has 32
# entries for 512 tokens instead of 512.
#
# Beside it stands Day 14's measurement, where small blocks waste least. The two pull in opposite
# directions, and 16 is where both have almost arrived. What this does not show is time: whether a jump
# costs anything is for Day 20 to measure.
#
# ## Your answer is the engine
#
# The engine's paged cache asks `grow` once per step, and `slot` for each new token. With your own
# methods, and a prompt that is longer than a block:

# %%
from nanoserve import LLM, SamplingParams

prompt = "A list of the days of the week: Monday, Tuesday, Wednesday, Thursday, Friday,"
llm = LLM("smollm2", cache="paged")
with today.mine():
    (completion,) = llm.generate(prompt, SamplingParams(max_tokens=4))
print(len(llm.tokenizer.encode(prompt)), "tokens of prompt, then", repr(completion.text))

# %% [markdown]
# ## What you learned
#
# 1. **One division turns a position into a slot:** the quotient picks the block, the remainder the
#    place in it.
# 2. **An address that is off by one is still an address.** So refuse what is outside, by name.
# 3. **Growth is all or nothing.** Half a growth holds memory that nobody can use, and everybody waits.
#
# ## Tomorrow
#
# So far all of this is bookkeeping. Day 16 puts real keys and values into the slots, and asks for them
# back: the same numbers, bit for bit.
#
# **In one paragraph.** A sequence counts its tokens from 0 without a gap, and its memory lies in pieces
# all over the pool. A table with one number per block joins the two: divide the position by the block
# size, look the quotient up, and add the remainder. The table grows by whole blocks, only when it must,
# and a growth that the pool refuses leaves no trace.
