# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 21 · A grid of programs
#
# Week 6 · Phase 2, paged memory · you need: Day 16 (Real keys in scattered blocks)
#
# **Today** you write your first kernel: a small program that runs many times at once, each time on
# another piece of the work. It gathers keys out of the pool, on your laptop, under a model of Triton
# that watches every address.

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

today = day(21)
today.picture("tlsim-grid")

# %% [markdown]
# ## Why it matters
#
# A GPU does one thing well: it runs the same short program thousands of times, side by side.
# **Triton** is a language for such programs; vLLM and SGLang both have attention
# kernels in it. The week's goal is a kernel that loads keys and values from the pool in place.
#
# There are two obstacles. You may not own a GPU. And on a GPU a wrong kernel rarely crashes: it
# loads the number beside the right one, and returns something plausible.
#
# `tlsim` removes both. It is Triton's programming model written in torch: the same source runs on
# any laptop, and each load and store is checked. On Day 23 that source goes to Triton without
# a change.

# %%
today.glossary()

# %% [markdown]
# ## The first kernel
#
# Add eight numbers to eight others. In Python that is a loop over elements. A kernel has no such loop. It says
# what **one program** does with **one block** of elements. Then many programs are launched.

# %%
import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl


# %%
@tlsim.jit
def plus(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, x + y)


x, y, out = torch.arange(8.0), torch.full((8,), 10.0), torch.zeros(8)
plus[(2,)](x, y, out, BLOCK=4)
out

# %% [markdown]
# Read it word by word:
#
# | in the kernel | what it is |
# | --- | --- |
# | `plus[(2,)](...)` | the **launch**: a grid of 2 programs, and their arguments |
# | `tl.program_id(0)` | which program this is, along axis 0 of the grid: 0 or 1 |
# | `tl.arange(0, BLOCK)` | a block of **lanes**: 0, 1, 2, 3, all at once |
# | `BLOCK: tl.constexpr` | known when the kernel is compiled, so that a block has a fixed size: a power of two |
# | `x_ptr` | a **pointer**. The tensor `x` is passed in. In the kernel it is the place of its first element |
# | `x_ptr + offsets` | four pointers, one for each lane |
#
# **Block** has two meanings this week: a kernel's block of *lanes*, and the 16 *slots* that the pool
# hands out together. `BLOCK`, and later `BLOCK_D`, count lanes.
#
# A **trace** records each load and store while a kernel runs. It shows which elements each program touched:

# %%
with tlsim.trace() as seen:
    plus[(2,)](x, y, out, BLOCK=4)
for access in seen.accesses:
    touched = [access.of(program)[0].tolist() for program in (0, 1)]
    print(f"{access.kind:5} {access.name:7} program 0: {touched[0]}   program 1: {touched[1]}")

# %% [markdown]
# ## Ten numbers, three programs
#
# A second kernel doubles ten numbers. Three programs of four lanes make twelve lanes, and two lanes
# have no number. Look at the result:


# %%
@tlsim.jit
def double(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * 2)


# %%
from nanoserve.course.show import wrapped


def attempt(kernel, *arguments, grid=(3,), **constants):
    """Launch, and print what went wrong."""
    try:
        tlsim.jit(kernel)[grid](*arguments, **constants)
        print("no fault")
    except tlsim.KernelError as error:
        print(wrapped(str(error)))


x, out = torch.arange(10.0), torch.zeros(10)
attempt(double, x, out, BLOCK=4)

# %% [markdown]
# That is tlsim's **sanitizer**. The error names line, program, lane, buffer and offset. A GPU would have loaded
# whatever lies behind `x` and, worse, **stored** behind `out`, into another tensor.
#
# The cure is a **mask**: one boolean for each lane. A lane whose boolean is false neither loads nor stores.


# %%
@tlsim.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x * 2, mask=inside)


double[(3,)](x, out, len(x), BLOCK=4)
out

# %% [markdown]
# `tl.load(..., mask=inside, other=0)` also says what a masked lane gets. Without `other` its value is
# undefined on a GPU. tlsim puts NaN there.
#
# ## Your turn: `offsets_and_mask`
#
# Offsets and mask begin nearly every kernel. Write them in plain torch, for one program:
#
# - **offsets**, int64 `[tile]`: program 0 has the elements 0 to `tile - 1`, program 1 the next `tile`,
#   and so on;
# - **mask**, bool `[tile]`: whether each offset is one of the `n` elements.
#
# `BLOCK` above is called `tile` here. Both have `tile` lanes in every program, also in the last one.
# Stuck? `today.hint()` looks at the case that failed.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def offsets_and_mask(program: int, tile: int, n: int):
    """(offsets int64 [tile], mask bool [tile]) of the lanes of a program, for n elements."""
    raise NotImplementedError("your turn")


today.check(offsets_and_mask)


# %% jupyter={"source_hidden": true}
# solution: offsets_and_mask
def offsets_and_mask(program: int, tile: int, n: int):
    """(offsets int64 [tile], mask bool [tile]) of the lanes of a program, for n elements."""
    offsets = program * tile + torch.arange(tile)
    return offsets, offsets < n


# %% [markdown]
# ## Two more faults
#
# Leave out `program_id`. `planted` copies a kernel with one piece of its source replaced, so that the
# fault is the only difference.

# %%
from nanoserve.course.exercises.day21 import planted

attempt(planted(double, ("tl.program_id(0) * BLOCK + ", "")), x, out, 10, BLOCK=4)

# %% [markdown]
# All three programs do the first block. The result would depend on which program stores last. So two
# programs that store to one address are an error here, even if they store the same number. (Programs that
# must add to one number use `tl.atomic_add`.)
#
# And why a mask? In Python you would write `if offsets < n`. Try it:


# %%
@tlsim.jit
def with_an_if(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if offsets < n:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * 2)


attempt(with_an_if, x, out, 10, BLOCK=4)

# %% [markdown]
# An `if` runs one branch or the other. In the last program two lanes would need one branch and two the
# other. A GPU's lanes run together, one instruction at a time. So all lanes run the same instructions, and a mask
# says which lanes count.

# %% [markdown]
# ## Rows of a pool
#
# The pool has three axes, `[num_slots, n_kv, head_dim]`, and memory has one. Between them stand the
# **strides**: how many elements it is from one slot to the next, and from one head to the next.

# %%
n_kv, head_dim = 3, 64  # SmolLM2's
pool = torch.randn(32, n_kv, head_dim, generator=torch.Generator().manual_seed(21))
print("strides:", pool.stride())
print("slot 20, head 1 begins at", 20 * pool.stride(0) + 1 * pool.stride(1))

# %% [markdown]
# A program that reads several rows has a block with two axes: rows down, lanes across. It comes from
# two blocks with one axis each. `[:, None]` makes a column of one, `[None, :]` makes a row of the other, and
# their sum holds every row's beginning plus every lane:

# %%
row, dim = torch.tensor([60, 0, 20]), torch.arange(4)
row[:, None] + dim[None, :]

# %% [markdown]
# One trap is here. Triton's integers have 32 bits unless you say otherwise, and offsets in a large pool need
# more:

# %%
slot = torch.tensor([2_097_152], dtype=torch.int32)
print(slot * 1_024, slot.long() * 1_024)  # 8 KV heads of 128: 1,024 elements per slot

# %% [markdown]
# So cast a slot to 64 bits, `.to(tl.int64)`, before you multiply it. Our slot mapping is int64 already; the cast
# guards against a caller with int32. Your laptop has no pool of that size, and no test there would fail. A GPU of
# 80 GB has memory for such a pool.
#
# ## Your turn: `paged_gather`
#
# Day 16 gathered with `pool[slot_mapping]`. Now as a grid of programs. **One program copies one tile of
# positions of one KV head**:
#
# - axis 0 of the grid: tiles of `TILE` positions, the last one ragged; axis 1: the KV heads;
# - load `slot_ptr[position]` for the tile's positions, through a mask, and cast them to int64;
# - load the rows of these slots and this head: a block `[TILE, BLOCK_D]`;
# - store the rows to the output, at `position` and this head.
#
# | argument | what it is |
# | --- | --- |
# | `pool_ptr` | `[num_slots, n_kv, head_dim]` |
# | `slot_ptr` | int64 `[kv_len]` |
# | `out_ptr` | `[kv_len, n_kv, head_dim]` |
# | `kv_len` | how many positions there are |
# | `pool_slot`, `pool_head` | the pool's strides, in elements, from slot to slot and from head to head |
# | `out_row`, `out_head` | the output's, from position to position and from head to head |
# | `HEAD_DIM`, `BLOCK_D` | numbers in a head; the same, padded to a power of two |
# | `TILE` | positions of a program |
#
# A block has two masks: positions below `kv_len`, and lanes below `HEAD_DIM`. With
# `held[:, None] & in_head[None, :]` a lane takes part if both are true. The numbers of a row lie side by
# side, so the last stride is 1 and is no argument.
#
# Write the function without a decorator: a kernel cannot `raise`, so the check adds `@tlsim.jit`.


# %%
def paged_gather(
    pool_ptr,
    slot_ptr,
    out_ptr,
    kv_len,
    pool_slot,
    pool_head,
    out_row,
    out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program copies one KV head's rows of one tile of positions."""
    raise NotImplementedError("your turn")


today.check(paged_gather)

# %% [markdown]
# One solution, folded. It lands nowhere, since the engine's kernel of Day 22 copies no keys. But that kernel
# finds a key's row in the same way, line for line.


# %% jupyter={"source_hidden": true}
# solution: paged_gather
@tlsim.jit
def paged_gather(
    pool_ptr,  # [num_slots, n_kv, head_dim]
    slot_ptr,  # [kv_len]
    out_ptr,  # [kv_len, n_kv, head_dim]
    kv_len,
    pool_slot,  # strides, in elements; head_dim's are 1
    pool_head,
    out_row,
    out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program copies one KV head's rows of one tile of positions."""
    head = tl.program_id(1)
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = position < kv_len
    slot = tl.load(slot_ptr + position, mask=held, other=0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (dim < HEAD_DIM)[None, :]
    row = slot * pool_slot + head * pool_head
    rows = tl.load(pool_ptr + row[:, None] + dim[None, :], mask=mask)
    row = position * out_row + head * out_head
    tl.store(out_ptr + row[:, None] + dim[None, :], rows, mask=mask)


# %% [markdown]
# The launch runs on the host, where the shapes are known: how many programs, which strides, how large a
# block.


# %%
# lands in nanoserve/kernels/sizes.py: next_power_of_2
def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, as triton.next_power_of_2 returns it."""
    return 1 << max(0, n - 1).bit_length()


# %%
def gather(kernel, pool, slot_mapping, tile):
    """[kv_len, n_kv, head_dim] by a kernel; NaN where no program stored."""
    kv_len, (_, n_kv, head_dim) = len(slot_mapping), pool.shape
    out = torch.full((kv_len, n_kv, head_dim), torch.nan)
    grid = (tlsim.cdiv(kv_len, tile), n_kv)  # rounded up
    kernel[grid](
        pool,
        slot_mapping,
        out,
        kv_len,
        *pool.stride()[:2],
        *out.stride()[:2],
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        TILE=tile,
    )
    return out


# %% [markdown]
# ## Prove it: every tile, both orders
#
# tlsim has two orders. In **lockstep**, the usual one, all programs run one line, then all run the next line.
# In the **serial** order one whole program runs after another, in a shuffled order. No program may depend on
# another having run, so a right kernel gives the same in both.
#
# A copy has no rounding, so the word is *equal*. Eleven positions, in blocks 5, 2 and 7 of four slots:

# %%
slot_mapping = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30])
for tile in (1, 2, 4, 8, 16, 32):
    equal = []
    for order in ("lockstep", "serial"):
        with tlsim.options(order=order):
            got = gather(paged_gather, pool, slot_mapping, tile)
        equal.append(torch.equal(got, pool[slot_mapping]))
    print(f"tiles of {tile:2}: a grid of ({tlsim.cdiv(11, tile):2}, 3), equal: {equal}")
    assert all(equal)

# %% [markdown]
# And the model's own keys, in blocks that lie anywhere, with NaN in all slots of other sequences. The
# option `poison` makes loading a NaN an error, even where the number is not used.

# %%
from nanoserve import load_model, load_tokenizer
from nanoserve.cache import KVPool, PagedKVCache

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
ids = tokenizer.encode("The tide goes out, and the boats lie down in the mud. " * 3)
memory = KVPool(model.config, num_blocks=12, poison=True)
mine, neighbour = PagedKVCache(memory), []
with torch.no_grad():
    for start in range(0, len(ids), 7):
        neighbour.append(memory.allocator.allocate())  # another sequence takes blocks in between
        model(torch.tensor([ids[start : start + 7]]), mine)

# %%
print("blocks", mine.table.blocks, "for", mine.seq_len, "tokens")
for tile in (4, 16, 64):
    with tlsim.options(poison=True):
        got = gather(paged_gather, memory.k[17], mine.slot_mapping, tile)
    equal = torch.equal(got, memory.k[17][mine.slot_mapping])
    print(f"layer 17 by tiles of {tile:2}, equal: {equal}")
    assert equal

# %% [markdown]
# ## Step through the grid
#
# Pick a program, a tile and a head. What you see is drawn from the trace of a real launch: the lanes of
# this program in the slot mapping, the rows it loads, the rows it stores.

# %% tags=["nbval-ignore-output"]
today.widget("launch-grid")

# %% [markdown]
# The two halves of a slot are its two heads. The program with `program_id(1)` 1 loads the lower halves only.
# Its last lane is off, because position 11 does not exist.
#
# ## Six planted bugs
#
# Each differs from the right kernel in one line. Before you run them: which bugs can the
# sanitizer find, and which bugs only a comparison with the right answer?


# %%
def examine(kernel):
    """What is wrong with a gather: the sanitizer's words, or the first difference."""
    try:
        got = gather(tlsim.jit(kernel), pool, slot_mapping, 4)
    except tlsim.KernelError as error:
        return wrapped(f"sanitizer: {error}").replace("\n", "\n    ")
    wrong = (got != pool[slot_mapping]).any(-1).nonzero().tolist()
    return "comparison: differs first at position {}, head {}".format(*wrong[0]) if wrong else ""


bugs = {
    "the tail's mask forgotten": ("position < kv_len", "position >= 0"),
    "one too many in the last tile": ("position < kv_len", "position <= kv_len"),
    "program_id forgotten": ("tl.program_id(0) * TILE + ", ""),
    "one place for all heads": (" + head * out_head", ""),
    "the slot without its stride": ("slot * pool_slot", "slot"),
    "the row of the wrong KV head": (" + head * pool_head", ""),
}
for name, change in bugs.items():
    verdict = examine(planted(paged_gather, change))
    print(f"{name}\n    {verdict}\n")
    assert verdict

# %% [markdown]
# The sanitizer names four of them, with line and lane. Two leave their buffers, two store where another
# program has stored. The last two never leave the pool, and the sanitizer cannot find them. Slot 20
# without its stride is element 20, which is a valid number of slot 0. Only the comparison
# shows it. That is why Day 18 fixed the oracle before there was a kernel.
#
# Here is the first bug in the picture. The lane without a mask, in vermilion, points past the end:

# %% tags=["nbval-ignore-output"]
today.widget("launch-grid", fault="tail mask forgotten")

# %% [markdown]
# ## Measure it: neighbours move together
#
# Why does it matter whether lanes lie side by side? A GPU does not fetch single numbers. It fetches
# **sectors** of 32 bytes, eight float32s, and drops the part of a sector that it does not need.
#
# Take a matrix of 64 x 64 numbers, 16 KiB. Each program reads 64 of them: a tile of `ROWS` x `COLS`.
# With 1 x 64, a program's lanes lie in one row; with 64 x 1, in a column, where neighbours are
# 64 elements apart. Counted besides: a **stretch** is a run of lanes that are neighbours in memory too.


# %%
@tlsim.jit
def read_tile(x_ptr, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    tl.load(x_ptr + row[:, None] * stride + column[None, :])


def sectors(access):
    """The bytes that a GPU fetches for an access, each program by itself, in sectors of 32 bytes.
    Sectors are counted from the buffer's first element."""
    each = (access.offsets * access.itemsize // 32).flatten(1)
    return 32 * sum(
        len(program[live].unique()) for program, live in zip(each, access.live.flatten(1))
    )


# %% [markdown]
# Every program reads each of its numbers once, in all of the tilings. Guess, for the columns:

# %%
today.predict("fetched", "By columns: how many times 16 KiB does a GPU fetch?", guess=None)

# %%
matrix, widths, found = torch.zeros(64, 64), (64, 32, 16, 8, 4, 2, 1), []
for cols in widths:
    rows = 64 // cols
    with tlsim.trace() as seen:
        read_tile[(64 // rows, 64 // cols)](matrix, 64, ROWS=rows, COLS=cols)
    (access,) = seen.accesses
    found.append((access.rows, sectors(access) / 1024))
    print(
        f"{rows:2} x {cols:2}: asked for {access.bytes // 1024} KiB in {access.rows:5,} stretches, "
        f"fetched {found[-1][1]:3.0f} KiB"
    )
assert found[0] == (64, 16) and found[-1] == (4096, 128)

# %% jupyter={"source_hidden": true}
# Draws the plot: The same 16 KiB, by tiles
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis, prediction_marker

fig, (left, right) = figure(
    panels=2, height=4.2, xlabel="lanes side by side in a row", title="The same 16 KiB, by tiles"
)
left.set(ylabel="stretches of memory")
right.set(ylabel="KiB that a GPU fetches")
backwards = range(len(widths) - 1, -1, -1)
for ax, column in ((left, 0), (right, 1)):
    line(
        ax,
        [widths[i] for i in backwards],
        [found[i][column] for i in backwards],
        "",
        COLOURS["tlsim"],
    )
    log2_axis(ax)
    log2_axis(ax, "y")
    ax.set(xticks=widths)
right.axhline(16, color=COLOURS["limit"], linestyle="--", linewidth=1.2)
label_line(right, 8, 16, "asked for", COLOURS["limit"], "below")
if guess := today.guess("fetched"):
    prediction_marker(right, 1, 16 * guess, where="right")
right.set(ylim=(8, max(256, 24 * (guess or 0))))
fig

# %% [markdown]
# Down to eight lanes side by side nothing is lost: they fill a sector. Below that a smaller part of
# each sector is used, and by columns a GPU moves eight times the bytes of the lanes. Nothing
# in the kernel's result would show it. The word for the good case is **coalesced**.
#
# Paged memory is scattered memory. Does it waste sectors?

# %%
with tlsim.trace() as seen:
    gather(paged_gather, memory.k[17], mine.slot_mapping, 16)
for access in seen.accesses:
    ratio = sectors(access) / access.bytes
    print(
        f"{access.kind:5} {access.name:8} {access.bytes:7,} bytes in {access.rows:3} stretches, "
        f"fetched {ratio:.2f} times"
    )
whole = [sectors(access) == access.bytes for access in seen.accesses if access.name == "pool_ptr"]
assert whole == [True]

# %% [markdown]
# No. A row of one head is 64 numbers side by side, 256 bytes, eight whole sectors. Where the next row
# lies does not matter; that a row is *whole* does. This is why the pool ends in `head_dim`. The slot
# mapping's ratio is above 1 because its bytes are no whole number of sectors: a GPU also fetches the
# rest of the last sector, once for each head.
#
# The count leaves out two things. A GPU's caches may hold a sector that another program has fetched.
# And a count says nothing about time: Day 27 measures a GPU.

# %% [markdown]
# ## Open the box
#
# How can torch simulate a GPU? By the shape of its tensors. What one program holds, a number or a block, tlsim holds
# **for all programs in one tensor**. The grid's three axes come first:

# %%
today.picture("leading-axis")

# %% [markdown]
# That is lockstep. The serial order is the same with one program at a time.
#
# Five cells hold the core of tlsim. Each has a sentence on what to look for. They run here, and between them you run
# a kernel's lines by hand on them. The types, the messages and the checks are imported; Appendix A opens those. (So is
# `one_step`: replay, in Appendix A, records a function under it as one call.) Kernels go on using `tlsim` and `tl`,
# whose source this is. No kernel of a later day needs these cells. If your hour is over, go on at "Lockstep against
# serial", and come back another day.

# %%
import inspect
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any

from nanoserve.kernels.tlsim import rules
from nanoserve.kernels.tlsim.grid import KernelError, _options, _wave, fault, refuse
from nanoserve.kernels.tlsim.launch import Source, translate
from nanoserve.kernels.tlsim.memory import refuse_lanes, watch
from nanoserve.kernels.tlsim.replay import Recordings, one_step
from nanoserve.kernels.tlsim.rules import One, block_shape

# %% [markdown]
# ### 1. The programs that run together
#
# A **wave** is a set of programs that run side by side. `waves` cuts a large grid into several waves, so that memory
# stays bounded. In the serial order each wave is one program. Look for `ids`: the numbers of the programs along each axis
# of the grid, shaped so that torch broadcasts them.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/grid.py: Options, Wave, options_now, options, current and 2 more
@dataclass(frozen=True)
class Options:
    """Options of a run.

    order   "lockstep": all programs side by side; "serial": one by one, in random order
    checks  refuse wrong accesses; and run code that no program runs, because Triton compiles it
    poison  also refuse a load of NaN
    seed    of the random order
    wave    about the largest number of programs that run side by side; it limits the memory used
    replay  record a launch once, then replay its torch calls; in lockstep, without checks or poison
    trace   a Trace, which records each load and store
    """

    order: str = "lockstep"
    checks: bool = True
    poison: bool = False
    seed: int = 0
    wave: int = 1024
    replay: bool = False
    trace: object = None

    def __post_init__(self) -> None:
        if self.order not in ("lockstep", "serial") or self.wave < 1:
            raise ValueError(f"order must be lockstep or serial, wave at least 1: got {self}")


@dataclass
class Wave:
    """Programs that run side by side, part of a grid. Every Value starts with the axes x, y, z."""

    grid: tuple[int, int, int]
    ids: tuple[torch.Tensor, ...]  # int32 [x, 1, 1], [1, y, 1], [1, 1, z]
    options: Options
    accessed: dict  # of the sanitizer: who has accessed what, for all waves of a launch
    active: torch.Tensor | None = None  # broadcasts to [x, y, z]: programs that run; None: all
    at: tuple[str, int] = ("no kernel", 0)  # file and line of the statement that runs

    @property
    def programs(self) -> torch.Tensor:
        """The number of each program in the grid, axis 0 fastest: int64 [x, y, z]."""
        x, y, z = (ids.long() for ids in self.ids)
        return x + self.grid[0] * (y + self.grid[1] * z)

    @property
    def off(self) -> bool:
        """Whether no program runs: the code runs only to be checked."""
        return self.options.checks and self.active is not None and not self.active.any()


options_now = _options.get  # the options that hold now


@contextmanager
def options(**changes: object) -> Iterator[Options]:
    """Launch kernels with changed Options inside a `with` block; `changes` are fields."""
    token = _options.set(replace(options_now(), **changes))
    try:
        yield options_now()
    finally:
        _options.reset(token)


def current() -> Wave:
    """The wave that runs now. Raises KernelError outside a kernel."""
    if (wave := _wave.get(None)) is None:
        raise KernelError("this works only inside a kernel: launch a kernel with kernel[grid](...)")
    return wave


@contextmanager
def running(wave: Wave) -> Iterator[None]:
    """Run a kernel's code for a wave. An error of Python or torch gets the kernel's line."""
    token = _wave.set(wave)
    try:
        yield
    except KernelError:
        raise
    except Exception as error:
        raise fault(f"{type(error).__name__}: {error}") from error
    finally:
        _wave.reset(token)


def waves(grid: tuple[int, int, int], device, at: tuple[str, int]) -> Iterator[Wave]:
    """The waves of a launch: as many programs as there is room for. In serial order it is one."""
    options, accessed, parts = options_now(), {}, [()]
    serial = options.order == "serial"
    room = 1 if serial else options.wave
    for axis, n in enumerate(grid):
        ids = torch.arange(n, dtype=torch.int32, device=device)
        cuts = ids.view([-1 if i == axis else 1 for i in range(3)]).split(min(n, room) or 1, axis)
        parts = [(*part, cut) for part in parts for cut in cuts if n]
        room = max(1, room // max(1, n))
    shuffled = torch.Generator().manual_seed(options.seed)
    for i in torch.randperm(len(parts), generator=shuffled) if serial else range(len(parts)):
        yield Wave(grid, parts[i], options, accessed, at=at)


# %% [markdown]
# Make a wave of three programs by hand:

# %%
ids = torch.arange(3, dtype=torch.int32).view(3, 1, 1)
zero = torch.zeros(1, 1, 1, dtype=torch.int32)
three = Wave((3, 1, 1), (ids, zero, zero), Options(), {})
print("programs:", three.programs.flatten().tolist(), "   shape:", list(three.ids[0].shape))

# %% [markdown]
# ### 2. What a kernel computes with
#
# A **Buffer** is the memory behind a tensor, laid flat. A **Value** is a number, a block or a pointer: `data`, in the
# shape of the picture, and for a pointer its buffer. A pointer is a buffer and offsets, never an address, so an offset
# outside can be noticed. Look for `width`: neighbouring lanes are not written out. Only the first lane of a row is
# kept, so that a load of a row is one look-up. Look for `combine` too: every operator ends there.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: Buffer, PointerType, flattened, pointer and 7 more
Buffer = namedtuple("Buffer", ["name", "flat"])  # an argument's memory, as flattened() returns it
PointerType = namedtuple("PointerType", ["element_ty"])  # a pointer's dtype


@one_step
def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, as one axis."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def pointer(name: str, flat: torch.Tensor) -> "Value":
    """A pointer to the first element of an argument."""
    return Value(torch.zeros(1, 1, 1, dtype=torch.int64, device=flat.device), Buffer(name, flat))


def add(a, b) -> "Value":
    """a + b. A pointer moves by integers. A row stays a row if all its lanes move alike."""
    a, b = paired(a, b)
    buffer = rules.moved_buffer(a, b)
    row, by = (a, b) if a.width > 1 else (b, a)
    alike = by.width == 1 and by.shape[-1:] in ((), (1,))
    sum = combine(operator.add, *(Value(x.data if alike else x.lanes) for x in (row, by)))
    return Value(sum.data, buffer, row.width if alike else 1)


def _operator(op: Callable, divides: bool = False) -> tuple[Callable, Callable]:
    """The methods for `value op other` and for `number op value`."""

    def forward(a, b) -> "Value":
        return combine(op, *paired(a, b, divides))

    return forward, lambda a, b: forward(b, a)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    refuse(a.is_floating_point(), "// is for integers: use / and tl.floor")
    return torch.div(a, b, rounding_mode="trunc")  # towards 0, as in C: -7 // 2 is -3


class Value:
    """A tl.tensor of every program: a number, a block of numbers, or pointers.

    `data` is [x, y, z, *shape]: the grid's axes, then the block's. A grid axis has size 1 where no
    program differs along it. A pointer is a buffer and offsets into it, in elements, never an
    address. `width` above 1 means rows of neighbours: the last axis of `data` has size 1 and holds
    the first lane of `width`; each other lane is one more than the lane before it.
    """

    T = property(lambda self: Value(self.lanes.transpose(-2, -1), self.buffer))

    def __init__(self, data: torch.Tensor, buffer: Buffer | None = None, width: int = 1) -> None:
        self.data, self.buffer, self.width = data, buffer, width
        self.dtype = PointerType(buffer.flat.dtype) if buffer else data.dtype
        self.shape = (*data.shape[3:-1], width) if width > 1 else tuple(data.shape[3:])

    @property
    def lanes(self) -> torch.Tensor:
        """data, with all lanes of a row."""
        if self.width == 1:
            return self.data
        return self.data + torch.arange(self.width, dtype=self.data.dtype, device=self.data.device)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        """The same numbers in another dtype; with bitcast, the same bits."""
        width = self.width if dtype in (self.dtype, torch.int64) else 1  # which hold every lane
        data = self.data if width > 1 else rules.number(self).lanes
        return Value((rules.bitcast if bitcast else torch.Tensor.to)(data, dtype), None, width)

    def expand_dims(self, axis: int) -> "Value":
        """The same lanes, with a new axis of size 1."""
        axis = rules.torch_axis(axis, len(self.shape) + 1) if self.shape else 3
        stands = axis == self.data.dim()  # a row that stands up has one lane in each row
        data = (self.lanes if stands else self.data).unsqueeze(axis)
        return Value(data, self.buffer, 1 if stands else self.width)

    def __getitem__(self, index) -> "Value":
        """x[:, None] and the like: None is a new axis of size 1. Triton has no other index."""
        out = self
        for axis, i in enumerate(index if isinstance(index, tuple) else (index,)):
            known = i is None or i == slice(None)
            refuse(not known, "a block can be indexed only by None and :")
            out = out.expand_dims(axis) if i is None else out
        return out

    def __index__(self) -> int:
        raise fault("this value must be known at compile time: a number or tl.constexpr")

    def __repr__(self) -> str:
        kind = f"pointer into {self.buffer.name}" if self.buffer else str(self.dtype)[6:]
        return f"<{list(self.shape)} {kind}>\n{self.lanes}"

    def __neg__(self) -> "Value":
        return combine(operator.neg, self)

    def __invert__(self) -> "Value":
        return combine(operator.invert, self)

    def __sub__(self, other) -> "Value":
        moves = self.buffer or self.width > 1
        return add(self, -other) if moves else combine(operator.sub, *paired(self, other))

    __bool__, __getattr__ = rules.truth, rules.method
    __add__ = __radd__ = add
    __rsub__ = _operator(operator.sub)[1]
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv, divides=True)
    __floordiv__, __rfloordiv__ = _operator(_quotient, divides=True)
    __mod__, __rmod__ = _operator(torch.fmod, divides=True)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __eq__, __ne__ = _operator(operator.eq)[0], _operator(operator.ne)[0]
    __lt__, __gt__ = _operator(operator.lt)
    __le__, __ge__ = _operator(operator.le)


def as_value(x, beside=None, device: torch.device | None = None) -> Value:
    """A number as a Value, in the dtype that it has beside another operand."""
    if isinstance(x, Value):
        return x
    near = beside.dtype if isinstance(beside, Value) and not beside.buffer else None
    dtype, device = rules.number_dtype(x, near), device or current().ids[0].device
    return Value(torch.tensor([[[x]]], dtype=dtype, device=device))


def paired(a, b, divides: bool = False) -> tuple[Value, Value]:
    """Two operands in the dtype in which they meet."""
    a, b = as_value(a, b), as_value(b, a)
    if a.buffer or b.buffer or (a.dtype == b.dtype and not divides):
        return a, b
    dtype = rules.joint_dtype(a.dtype, b.dtype, divides)
    return a.to(dtype), b.to(dtype)


def combine(op: Callable, *values: Value) -> Value:
    """op on every lane of every program, with the shapes broadcast."""
    rules.joint_shape(*(rules.number(x).shape for x in values))
    return Value(op(*aligned(*(x.lanes for x in values))))


def fitting(x, shape: tuple[int, ...]) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to this shape of a block."""
    x = as_value(x)
    larger = rules.joint_shape(x.shape, shape) != shape
    refuse(larger, f"a block of shape {list(x.shape)} does not broadcast to {list(shape)}")
    return aligned(x.lanes, rank=len(shape))[0]


def aligned(*tensors: torch.Tensor, rank: int = 0) -> list[torch.Tensor]:
    """Tensors [x, y, z, ...] with axes of size 1 after the grid's axes, up to the largest rank."""
    rank, out = max(rank + 3, *(x.dim() for x in tensors)), []
    for x in tensors:
        while x.dim() < rank:
            x = x.unsqueeze(3)
        out.append(x)
    return out


# %% [markdown]
# Now type the first line of `double`. `running` makes the three programs the current ones:

# %%
with running(three):
    lanes = Value(torch.zeros(1, 1, 1, 1, dtype=torch.int32), width=4)
    offsets = Value(ids) * 4 + lanes
print("a block of", list(offsets.shape), "in each program; tlsim holds", list(offsets.data.shape))
print(offsets.lanes.view(3, 4))

# %% [markdown]
# Three numbers stand for twelve lanes.
#
# ### 3. Loads and stores
#
# `access` finds the lanes that take part. `watch` is the sanitizer and the trace. Then `take` reads memory, or `store`
# writes it. Look for `clamp` and `torch.where`: a masked lane may point anywhere, and its number is replaced.
# `joined` saves time: if the programs read rows that lie side by side, `take` reads them as one longer row.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: load, store, access, joined, take
def load(pointer: Value, mask=None, other=None, **_) -> Value:
    """tl.load: the elements at the pointers where the mask is true, and `other` elsewhere.

    Without `other`, the other lanes are undefined on a GPU, and NaN in tlsim (0 for integers).
    Hints about caches are accepted and ignored.
    """
    refuse(other is not None and mask is None, "tl.load takes `other` only with a mask")
    mask, live = access("load", pointer, mask)
    flat, at, width = pointer.buffer.flat, pointer.data, pointer.width
    if live is not None:  # lanes that take no part may point anywhere
        at = torch.where(live.any(-1, keepdim=True) if width > 1 else live, at, 0)
    shape = at.shape if width == 1 else (*at.shape[:-1], width)
    starts = joined(at, width) if live is None else at.flatten()
    data = take(flat, starts, width, at.numel(), shape, live is not None)
    if mask is not None:
        other = (torch.nan if flat.is_floating_point() else 0) if other is None else other
        data = torch.where(mask, data, fitting(other, pointer.shape).to(flat.dtype))
    if current().options.poison:
        refuse_lanes(data.isnan(), pointer, live, "loads a NaN, so a slot without an owner,")
    return Value(data)


def store(pointer: Value, value, mask=None, adds: bool = False, **_) -> None:
    """tl.store: write value's lanes to the pointers where the mask is true."""
    _, live = access("atomic_add" if adds else "store", pointer, mask)
    flat, shape = pointer.buffer.flat, (*current().programs.shape, *pointer.shape)
    data = fitting(value, pointer.shape).to(flat.dtype)
    at, data = (x.expand(shape).flatten() for x in (pointer.lanes, data))
    if live is not None:
        lanes = live.expand(shape).flatten().nonzero().squeeze(1)
        at, data = at.index_select(0, lanes), data.index_select(0, lanes)
    (flat.index_add_ if adds else flat.index_copy_)(0, at, data)


def access(kind: str, pointer: Value, mask) -> tuple:
    """Return (mask, live): the mask, and the mask within the programs that run, each broadcast to
    [x, y, z, *shape]; None stands for all lanes. The sanitizer and the trace see the access."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    if mask is not None:
        mask = fitting(mask, pointer.shape)
        refuse(mask.dtype != torch.bool, f"a mask must be int1, got {mask.dtype}")
    live = mask
    if (active := current().active) is not None:
        (active,) = aligned(active, rank=len(pointer.shape))
        live = active if mask is None else mask & active
    watch(kind, pointer, live)
    return mask, live


@one_step
def joined(at: torch.Tensor, width: int) -> torch.Tensor:
    """The offsets of rows. Where the programs of axis 0 load neighbouring rows, as the KV heads of
    a token are, these become one long row: then only the first program's offsets."""
    if width > 1 and len(at) > 1 and at.shape[1] * at.shape[2] == 1:
        at = at[:1] if bool((at[1:] - at[:-1] == width).all()) else at
    return at.flatten()


@one_step
def take(flat, at: torch.Tensor, width: int, rows: int, shape: tuple, masked: bool):
    """Rows of `width` neighbours in flat, from the offsets `at` on, viewed as shape. Of a masked
    row, the lanes outside flat give any number."""
    rows //= len(at)  # in one joined row
    try:
        if masked and flat.is_cuda:  # a GPU reports an index outside too late to catch
            raise IndexError
        data = flat.unfold(0, rows * width, 1).index_select(0, at)  # all rows, by their start
        data = data.view(-1, rows, width).transpose(0, 1) if rows > 1 else data
    except (IndexError, RuntimeError):  # a row is partly outside
        if not masked:
            raise
        at = at[:, None] + torch.arange(width, device=at.device)
        data = flat[at.clamp(max=len(flat) - 1)] if len(flat) else flat.new_zeros(at.shape)
    return data.view(shape)


# %% [markdown]
# The rest of `double`, by hand: pointers, the mask, the load and the store.

# %%
x, out = torch.arange(10.0), torch.zeros(10)
x_ptr, out_ptr = pointer("x", x), pointer("out", out)
with running(three):
    inside = offsets < 10
    store(out_ptr + offsets, load(x_ptr + offsets, inside) * 2, inside)
print(out)
assert torch.equal(out, 2 * torch.arange(10.0))

# %% [markdown]
# ### 4. The first words of the language
#
# Which program this is, and blocks of numbers. Look at `arange`: it holds one lane, and a `width`.


# %%
# lands in nanoserve/kernels/tlsim/language.py: program_id, num_programs, arange, full and 2 more
def program_id(axis: int) -> Value:
    """The index of this program along an axis of the grid: int32."""
    return Value(current().ids[axis])


def num_programs(axis: int) -> Value:
    """The number of programs along an axis of the grid: int32."""
    return as_value(current().grid[axis])


def arange(start: int, end: int) -> Value:
    """start, start + 1, ... end - 1: an int32 block whose length is a power of two."""
    (length,) = block_shape(end - start)
    return Value(as_value(start).data[..., None], width=length)


def full(shape: tuple[int, ...], value, dtype: torch.dtype) -> Value:
    """A block with `value` in every lane."""
    return broadcast_to(as_value(value).to(dtype), shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def broadcast_to(x, shape: tuple[int, ...]) -> Value:
    """The same lanes repeated along axes of size 1."""
    x, shape = as_value(x), block_shape(*shape)
    return Value(fitting(x, shape).expand(-1, -1, -1, *shape), x.buffer)


# %%
with running(three):
    print((program_id(0) * 4 + arange(0, 4)).lanes.view(3, 4))

# %% [markdown]
# ### 5. The launch
#
# A **Kernel** holds a function and its source. `bind` gives each argument its name, `_argument` makes pointers of
# tensors, and `run` runs the function once for each wave. Look for `source.run`: it runs the statements of the function,
# with `tl` meaning tlsim, whatever it meant outside.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: HINTS, Kernel, jit
HINTS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # for a compiler: accepted and ignored


class Kernel:
    """A function in Triton's language, launched as kernel[grid](*args, **meta)."""

    def __init__(self, fn: Callable) -> None:
        while hasattr(fn, "fn"):  # wrapped by triton.jit or triton.autotune
            fn = fn.fn
        update_wrapper(self, fn)
        self.fn, self.source, self.recordings = fn, Source(fn), Recordings(self)
        self.constants = {n for n, kind in fn.__annotations__.items() if "constexpr" in str(kind)}
        # bind(*args, **kwargs) gives the arguments by name, by Python's own rules
        self.bind = eval(f"lambda {', '.join(inspect.signature(fn).parameters)}: locals()")
        self.bind.__defaults__, self.bind.__qualname__ = fn.__defaults__, fn.__name__

    def __getitem__(self, grid) -> Callable:
        return partial(self.launch, grid)

    def __call__(self, *args, **kwargs):
        """Run this kernel inside another kernel, which calls it."""
        return self.source.run(self.bind(*args, **kwargs))

    @torch.no_grad()
    def launch(self, grid, *args, **kwargs) -> None:
        """Run every program of the grid: up to three sizes, or a function that returns them.

        Tensors become pointers to their first elements, and numbers become scalars; tl.constexpr
        parameters stay as they are. Raises TypeError for arguments that do not fit the signature,
        ValueError for a wrong grid, and KernelError for an error in the kernel.
        """
        given = self.bind(*args, **{name: x for name, x in kwargs.items() if name not in HINTS})
        grid = grid(given) if callable(grid) else grid
        sizes = grid if isinstance(grid, tuple) else (grid,)
        if not all(isinstance(n, int) and n >= 0 for n in sizes) or not 1 <= len(sizes) <= 3:
            raise ValueError(f"{self.__name__}: a grid must be one to three sizes, got {grid}")
        options = options_now()
        watched = options.checks or options.poison or options.trace or options.order == "serial"
        run = self.recordings.launch if options.replay and not watched else self.run
        run((*sizes, 1, 1)[:3], given)

    def run(self, grid: tuple[int, int, int], given: dict, inputs=()) -> None:
        """Run the kernel for each wave of programs. `inputs`: numbers that are tensors already."""
        devices = (x.device for x in given.values() if isinstance(x, torch.Tensor))
        device = next(devices, torch.device("cpu"))
        arguments = {name: self._argument(name, x, device) for name, x in given.items()}
        arguments |= {name: Value(inputs[name]) for name in inputs}
        for wave in waves(grid, device, self.source.at):
            with running(wave):
                self.source.run(arguments)

    def _argument(self, name: str, x, device: torch.device):
        if x is None or name in self.constants:
            return translate(x)
        if isinstance(x, torch.Tensor):
            return pointer(name, flattened(x))
        if not isinstance(x, int | float):
            raise TypeError(f"{self.__name__}: {name} must not be a {type(x).__name__}")
        return One(1) if type(x) is int and x == 1 else as_value(x, device=device)


def jit(fn: Callable) -> Kernel:
    """Make a tlsim kernel from a function, or from a kernel of triton.jit."""
    return fn if isinstance(fn, Kernel) else Kernel(fn)


# %% [markdown]
# What does a kernel get? Launch one that only prints, by the `jit` of the cell above:


# %%
@jit
def show(x_ptr, n, BLOCK: tl.constexpr):
    print(x_ptr)
    print(n)
    print(BLOCK)


show[(3,)](x, 10, BLOCK=4)

# %% [markdown]
# ## Lockstep against serial
#
# Last, the price of the model itself. The same gather of 128 positions is 96 programs by tiles of 4,
# 24 by tiles of 16, 6 by tiles of 64. Side by side they are one pass over large tensors; one after
# another, a pass over small ones for each program.

# %% tags=["nbval-ignore-output"]
from nanoserve.bench.timing import median_times

long_pool = torch.randn(256, n_kv, head_dim)
scattered = torch.randperm(256, generator=torch.Generator().manual_seed(21))[:128]


def timed(order, tile, checks=True):
    with tlsim.options(order=order, checks=checks):
        return gather(paged_gather, long_pool, scattered, tile)


for tile in (4, 16, 64):
    runs = {
        "serial": lambda tile=tile: timed("serial", tile),
        "lockstep": lambda tile=tile: timed("lockstep", tile),
        "without checks": lambda tile=tile: timed("lockstep", tile, checks=False),
        "pool[slot_mapping]": lambda: long_pool[scattered],
    }
    seconds = median_times(runs, rounds=3)
    words = ", ".join(f"{name} {taken * 1e3:.2f}" for name, taken in seconds.items())
    print(f"tiles of {tile:2}, in ms: {words}")
    assert tile > 4 or seconds["serial"] > 3 * seconds["lockstep"]

# %% [markdown]
# Serial has a cost for each program, however little the program does. In lockstep all programs share each
# operation, and a part of the time is the checks: compare your lines with and without them. An engine may switch
# the checks off once the kernel is proven, as Day 25 does.
#
# tlsim simulates a GPU, and the ratio of these times says nothing about one. The serial order is a test: in
# another order, with another seed, the result must stay the same.
#
# ## What you learned
#
# 1. **A kernel says what one program does; its number says which part.** All that differs between two
#    programs is `program_id`.
# 2. **An address is a buffer and an offset.** Keep both, and an error can name every load outside; inside the
#    buffer, only a comparison with an oracle finds a fault.
# 3. **Scattered rows cost nothing extra as long as each row is whole.** Memory moves in sectors, and the last
#    axis decides how much of a sector is used.
#
# ## Tomorrow
#
# The gather copies keys so that attention can read them. Day 22 leaves the copy out: a program loads a
# tile of keys, uses it, and drops it. For that the softmax is computed tile by tile.
#
# **In one paragraph.** We launched programs instead of writing loops. Each computes its offsets
# from its number, and loads and stores through a mask, because lanes that run together cannot
# branch. Under a model of Triton made of torch we gathered the pool's rows through their slots, equal
# to `pool[slot_mapping]` for every tile, and planted six bugs. Four the sanitizer named to
# the lane; two stayed inside and were found by comparison alone. A trace showed that scattered rows cost
# nothing, and single scattered numbers cost eight times their size.
