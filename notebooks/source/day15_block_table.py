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
# **Today** a sequence gets its map. You write the table that gives, for each token, its slot in the
# pool. The table can grow, and a growth that is refused changes nothing.

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
# Attention needs the tokens of a text in order: position 0, position 1, and so on. The pool has slots,
# and the blocks of the text lie anywhere in it. A list of block ids and one line of arithmetic connect
# the two. Every read and every write of a paged engine uses that line, or a list that was made with it:
# here, in vLLM, and in the kernel that you write on Day 22.
#
# A mistake in this line raises no error. A slot that is off by one is still a slot. It holds some key, of
# this sequence or of another sequence, and the model computes with that key.

# %%
today.glossary("block table", "logical", "physical", "atomic")

# %% [markdown]
# ## One division
#
# Cut the text into pieces of `block_size` tokens. Piece 0 lies in the block that the table names
# first, piece 1 in the second, and so on. So a position needs two numbers:
#
# - its **index** in the table, the number of its piece: `position // block_size`
# - its **offset** in the block, its place in the piece: `position % block_size`
#
# Here it is by hand, for the table in the picture: the blocks are 5, 2, 7, with 4 slots each.
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
# The table itself is small. It holds the ids in the order of the text, and the allocator that gave them.

# %%
from nanoserve.cache import BLOCK_SIZE, BlockAllocator, KVCacheExhausted


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockTable
class BlockTable:
    """The blocks of one sequence, in order of position: maps each position to its slot."""

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
# A position outside the table's slots is a mistake of the caller: raise a ValueError that names the
# position. This holds for -1 too: Python's indexing would return the last block.
#
# `slot` is a method. You write it here as a function, and the check puts it into the class.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


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
        """Return (block id, offset in block) of a position. Raises ValueError past the capacity."""
        if not 0 <= position < self.capacity:
            raise ValueError(f"position {position} is outside the table's {self.capacity} slots")
        index, offset = divmod(position, self._allocator.block_size)
        return self.blocks[index], offset

    def slot(self, position: int) -> int:
        """The slot of a position, block id * block_size + offset. Errors as for locate."""
        block, offset = self.locate(position)
        return block * self._allocator.block_size + offset


# %% [markdown]
# The package does this in two steps, because some callers need the block and the offset: `locate` returns
# both, and `slot` returns one number. From here on this notebook uses the package's version. Here is the
# table of the picture:

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
# A table begins empty and takes blocks when it needs them. With blocks of 16, a prompt of 33 tokens takes
# three blocks at once. Later, each time the last block is full, the next token takes one more block.
# `grow(num_tokens)` makes sure that the table has slots for `num_tokens` tokens **in all**:
#
# - `self.capacity` tokens have slots already. Take blocks for the missing tokens from the allocator, and
#   put the new blocks behind the old.
# - If there are enough slots already, nothing changes. `grow` never gives a block back.
# - `grow` is **atomic**. If the pool has too few blocks, `KVCacheExhausted` reaches the caller, and the
#   table and the pool are unchanged.
#
# `allocate_for` of Day 14 is all or nothing, so `grow` is short.


# %%
def grow(self, num_tokens: int) -> None:
    """Own enough blocks for num_tokens tokens in all. Raises KVCacheExhausted, nothing changed."""
    raise NotImplementedError("your turn")


today.check(grow)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: BlockTable.grow
class BlockTable(BlockTable):
    def grow(self, num_tokens: int) -> None:
        """Take blocks until the table can hold num_tokens tokens in all.

        Raises KVCacheExhausted, and leaves the table unchanged, if too few blocks are free.
        """
        self.blocks += self._allocator.allocate_for(max(0, num_tokens - self.capacity))


# %% [markdown]
# One line, and its order matters: `allocate_for` runs first. If it raises, the `+=` does not run.
#
# ## Step through it
#
# Three sequences share a pool of 12 blocks. The field "what happens" holds a script: `A6` writes six tokens
# of A, and `-A` ends A, so that its blocks go back to the pool. The slider steps through the script, token
# by token. Write a script of your own. If all three sequences grow, which sequence is refused first?

# %% tags=["nbval-ignore-output"]
today.widget("block-table")

# %% [markdown]
# In the picture, at step 28 of the first script, A has ended, and C owns A's old blocks 0 and 1. (A table
# frees its last block first, and the block that was freed last is handed out first.) So C's table is 5, 0,
# 1: its text begins in the middle of the pool and continues at the beginning. Code that reads through the
# table works all the same.
#
# ## Prove it: atomic growth
#
# Three tables share a pool that is too small for them. They grow at random, and the pool runs out again
# and again. After every step, the cell checks:
#
# - If `grow` was refused, the table and the pool have not changed.
# - Each table has slots for its tokens, and fewer empty slots than one block has.
# - No slot belongs to two tokens, neither within a sequence nor across sequences.

# %%
import random


def check_tables(tables, lengths, pool):
    slots = []
    for table, length in zip(tables, lengths):
        assert length <= table.capacity < length + pool.block_size, (
            "the capacity does not fit the length"
        )
        slots += [table.slot(position) for position in range(length)]
    assert len(slots) == len(set(slots)), "two tokens in one slot"
    owned = [block for table in tables for block in table.blocks]
    assert sorted(owned + pool._free) == list(range(pool.num_blocks)), "free + owned is not all"


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
assert refused > 50
print("all three hold after each of 1,000 steps;", refused, "growths were refused")

# %% [markdown]
# A growth that is not atomic takes block after block until none is left:


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
# With `Greedy`, `second` was refused and still holds the last two blocks. Now `first` cannot take another
# block either. If each sequence waits for the other to end, both wait for ever.
#
# ## Where the tokens lie
#
# Three sequences begin with prompts of 20, 33 and 5 tokens. Then each of them writes 40 more tokens. They
# take turns, one token each, as on a server:


# %%
def in_turns(size, prompts, more):
    """The slots of sequences in one pool: prompts first, then `more` tokens each, in turns."""
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


# %% jupyter={"source_hidden": true}
# Draws the plot: Three texts in one pool
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
# A line rises without a jump while a sequence's next block lies directly behind its last block. A prompt
# takes its blocks together, so A's first 32 tokens lie side by side, and so do B's first 48. After that the
# three sequences take turns, and most new blocks lie behind a block of another sequence: the line jumps. No
# two tokens have the same slot.
#
# ## Measure it: how scattered is scattered?
#
# Memory is read fastest when neighbouring addresses are read together. So count the steps from each
# position to the next position: how many of them go to the next slot? Three sequences write 512 tokens
# each, in turns from the first token. That is a bad case for paging: between two blocks of one sequence
# lie blocks of the others.

# %%
question = "Blocks of 16: per cent of the steps that go to the next slot?"
today.predict("next", question, guess=None, low=0, high=100)

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
print("your guess for 16:", today.guess_text("next"))
assert share[0] == 0 and 93 < share[sizes.index(16)] < 95

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
# With blocks of one slot, no step goes to the next slot. With blocks of 16, about fifteen of sixteen steps
# do: only the step from one block to the next is a jump. And for 512 tokens, the table has 32 entries
# instead of 512.
#
# Day 14 measured an effect in the other direction: small blocks waste least. Blocks of 16 are a compromise:
# few slots are empty, and few steps jump. This count does not show time. Day 20 measures the time of
# attention over scattered blocks.
#
# ## Your answer is the engine
#
# The engine's paged cache calls `grow` once per step, and `slot` for each new token. Inside `today.mine()` it
# calls your methods, if they have passed their checks. The prompt is longer than a block:

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
# 2. **An address that is off by one is still an address.** So refuse a position outside the table, by name.
# 3. **Growth is all or nothing.** A half-done growth holds blocks while its sequence cannot continue, and
#    other sequences wait for these blocks.
#
# ## Tomorrow
#
# So far these are only numbers. Day 16 puts real keys and values into the slots, and reads them back:
# the same numbers, bit for bit.
#
# **In one paragraph.** A sequence counts its tokens from 0 without a gap, and its memory lies in pieces
# all over the pool. A table with one number per block connects the two: divide the position by the block
# size, look up the block id at the quotient, multiply the id by the block size, and add the remainder. The
# table grows by whole blocks, only when it must, and a growth that the pool refuses changes nothing.
