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
# ## The smallest kernel
#
# Double ten numbers. In Python that is a loop over elements. A kernel has no such loop: it says what
# **one program** does with **one block** of elements, and then many programs are launched.

# %%
import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl


# %%
@tlsim.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x * 2, mask=inside)


x, out = torch.arange(10.0), torch.zeros(10)
double[(3,)](x, out, len(x), BLOCK=4)
out

# %% [markdown]
# Read it word by word:
#
# | in the kernel | what it is |
# | --- | --- |
# | `double[(3,)](...)` | the **launch**: a grid of 3 programs, and their arguments |
# | `tl.program_id(0)` | which program this is, along axis 0 of the grid: 0, 1 or 2 |
# | `tl.arange(0, BLOCK)` | a block of **lanes**: 0, 1, 2, 3, all at once |
# | `BLOCK: tl.constexpr` | known when the kernel is compiled, so that a block has a fixed size: a power of two |
# | `x_ptr` | a **pointer**. The tensor `x` came in, and in the kernel it is the place where its first element lies |
# | `x_ptr + offsets` | four pointers, one for each lane |
# | `mask=inside` | the lanes that take part. The others neither load nor store |
# | `other=0` | not needed here: what a masked lane gets, as in `tl.load(..., mask=inside, other=0)`. Without it the lane's value is undefined: tlsim puts NaN there |
#
# **Block** has two meanings this week: a kernel's block of *lanes*, and the 16 *slots* that the pool
# hands out as one. `BLOCK`, and later `BLOCK_D`, count lanes.
#
# Three programs of four lanes make twelve, and there are ten numbers. A **trace** records each load
# and store while a kernel runs, and so which elements each program touched.

# %%
with tlsim.trace() as seen:
    double[(3,)](x, out, len(x), BLOCK=4)
load = seen.accesses[0]
for program in range(3):
    offsets, live = load.of(program)
    print(f"program {program}: {load.kind}s {load.name} at {offsets.tolist()}", live.tolist())

# %% [markdown]
# ## Your turn: `offsets_and_mask`
#
# These two lines begin nearly every kernel there is. Write them in plain torch, for one program:
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
# ## What the sanitizer says
#
# Now leave something out. `planted` copies a kernel with one piece of its source replaced, so that the
# fault is all that differs. First the masks:

# %%
from nanoserve.course.exercises.day21 import planted
from nanoserve.course.show import wrapped


def attempt(kernel, *arguments, grid=(3,), **constants):
    """Launch, and print what went wrong."""
    try:
        tlsim.jit(kernel)[grid](*arguments, **constants)
        print("no fault")
    except tlsim.KernelError as error:
        print(wrapped(str(error)))


attempt(planted(double, (", mask=inside", "")), x, out, 10, BLOCK=4)

# %% [markdown]
# The error names line, program, lane, buffer and offset. A GPU would have loaded whatever
# lies behind `x` and, worse, **stored** behind `out`, into another tensor. The second common fault:

# %%
attempt(planted(double, ("tl.program_id(0) * BLOCK + ", "")), x, out, 10, BLOCK=4)

# %% [markdown]
# Without `program_id` all three programs do the first block. The result depends on which program stores last, so
# two programs that store to one address are an error here, even if they store the same number. (Programs that
# must add to one number use `tl.atomic_add`.)
#
# ### Why a mask, and not an if
#
# In Python you would write `if offsets < n`. Try it:


# %%
@tlsim.jit
def with_an_if(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if offsets < n:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * 2)


attempt(with_an_if, x, out, 10, BLOCK=4)

# %% [markdown]
# An `if` runs one branch or the other, and in the last program two lanes would need one branch and two the
# other. A GPU's lanes run together, one instruction at a time. So nothing branches: all lanes run
# the same instructions, and a mask says which lanes count.
#
# A condition that is one number for the whole program is another matter. Triton accepts it. tlsim accepts
# it when it runs the programs one after another. When all programs run side by side, tlsim refuses a condition that
# differs between programs; one that is the same in all of them may stand, in an `if` or a `while`:


# %%
@tlsim.jit
def first_two_alone(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) < 2:
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * 2)


attempt(first_two_alone, x, out, 10, BLOCK=4)
with tlsim.options(order="serial"):
    attempt(first_two_alone, x, out, 10, BLOCK=4)

# %% [markdown]
# Those are the two orders. **Lockstep**, the usual one: each line for all programs before the
# next line, which makes it fast. **Serial**: one whole program after another, in a shuffled order. A
# right kernel gives the same in both, since no program may depend on another having run.
#
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
# two blocks with one axis each. `[:, None]` stands one up, `[None, :]` lays the other down, and the sum
# is every row's beginning plus every lane:

# %%
row, dim = torch.tensor([60, 0, 20]), torch.arange(4)
row[:, None] + dim[None, :]

# %% [markdown]
# One trap waits here. Triton's integers have 32 bits unless you say otherwise, and a large pool is
# larger than that:

# %%
slot = torch.tensor([2_097_152], dtype=torch.int32)
print(slot * 1_024, slot.long() * 1_024)  # 8 KV heads of 128: 1,024 elements per slot

# %% [markdown]
# So a slot is brought to 64 bits, `.to(tl.int64)`, before it is multiplied. Your laptop has no pool of
# that size, and no test there would fail. A GPU of 80 GB has memory for one.
#
# Our slot mapping is int64 already, so here the cast changes nothing; it guards against a caller with
# int32. `position * out_row` has 32 bits, enough while the output has fewer than 2**31 numbers.
#
# ## Your turn: `paged_gather`
#
# Day 16 gathered with `pool[slot_mapping]`. Now as a grid of programs. **One program copies one tile of
# positions of one KV head**:
#
# - axis 0 of the grid: tiles of `TILE` positions, the last one ragged; axis 1: the KV heads;
# - load `slot_ptr[position]` for the tile's positions, through a mask, and make them int64;
# - load those slots' rows of this head: a block `[TILE, BLOCK_D]`;
# - store them to the output, where row `position` of this head belongs.
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
# Two masks meet in a block: positions that are there, and lanes that are less than `HEAD_DIM`. With
# `held[:, None] & in_head[None, :]` a lane takes part if both are true. Each row's numbers lie side by
# side, so its last stride is 1 and is no argument.
#
# Write the function alone; the check puts `@tlsim.jit` above it, for a kernel cannot `raise`.


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
# One solution, folded. It lands nowhere, since the engine's kernel of Day 22 copies no keys. But the way
# from a position to a key's row is the same there, line for line.


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
# The launch belongs to the host, which knows the shapes: how many programs, which strides, how large a
# block.


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
        BLOCK_D=tlsim.next_power_of_2(head_dim),
        TILE=tile,
    )
    return out


# %% [markdown]
# ## Prove it: every tile, both orders
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
# The two halves of a slot are its two heads; the program with `program_id(1)` 1 sees the lower ones
# alone. Its last lane is off, because position 11 does not exist.
#
# ## Six planted bugs
#
# Each differs from the right kernel in one line. Before you run them: which can the
# sanitizer find, and which only a comparison with the right answer?


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
# The sanitizer names four of them, line and lane: two leave their buffers, two store where another
# program has stored. The last two never leave the pool, and the sanitizer cannot find them. Slot 20
# without its stride is element 20, which is a valid number of slot 0. Only the comparison
# shows it. That is why the oracle was fixed before the kernel.
#
# Here is the first one in the picture. The lane without a mask, in vermilion, points past the end:

# %% tags=["nbval-ignore-output"]
today.widget("launch-grid", fault="tail mask forgotten")

# %% [markdown]
# ## Inside tlsim (for reading)
#
# Skip to "Measure it" now if you like; nothing there needs it.
#
# How can torch simulate a GPU? By the shape of its tensors. What Triton holds per program, a number or a
# block of numbers, tlsim holds **for all programs in one tensor**, the grid's three axes in front:
#
# | in the kernel | one program has | tlsim holds |
# | --- | --- | --- |
# | `tl.program_id(0)` | a number | `[x, 1, 1]` |
# | `tl.arange(0, 4)` | `[4]` | `[1, 1, 1, 4]`: the same for all |
# | `program_id(0) * 4 + arange(0, 4)` | `[4]` | `[x, 1, 1, 4]` |
#
# An axis of size 1 stands for "the same for all programs along it", and torch's broadcasting does the
# rest. That is lockstep. The serial order is the same thing with one program at a time.
#
# The cells below are the source of tlsim's first half, five short files. Open them one at a time; each
# has a sentence on what to look for. They run here, and further down you launch a grid by hand with
# them. Kernels go on using `tlsim` and `tl` as imported, whose source this is.

# %%
import ast
import inspect
import linecache
import operator
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial, update_wrapper
from itertools import product, zip_longest
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

# %% [markdown]
# ### The programs that run together
#
# **Options** are what you set with `tlsim.options`. **Wave** is a set of programs that run side by
# side, with their numbers as three small tensors. A grid of a million programs runs as many waves, so
# that memory stays bounded. `current()` returns the wave that is running.
#
# Options and waves are kept in a **ContextVar**: a global variable that is set for a while. `set` gives a token, and
# `reset` with that token brings back what stood there before.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/grid.py: KernelError, Options, _options, options
class KernelError(ValueError):
    """A kernel broke a rule of Triton or accessed wrong memory. The message names the line."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    order   "lockstep": all programs side by side; "serial": one by one, in random order
    checks  refuse accesses outside a buffer, and stores of two programs to one address
    poison  also refuse a load of NaN
    seed    of the random order
    wave    the largest number of programs that run side by side; it limits only the memory used
    """

    order: str = "lockstep"
    checks: bool = True
    poison: bool = False
    seed: int = 0
    wave: int = 1024

    def __post_init__(self) -> None:
        if self.order not in ("lockstep", "serial"):
            raise ValueError(f'order must be "lockstep" or "serial", got {self.order!r}')
        if self.wave < 1:
            raise ValueError(f"wave must be at least 1, got {self.wave}")


_options: ContextVar[Options] = ContextVar("options")


@contextmanager
def options(**changes: object) -> Iterator[Options]:
    """Launch kernels with changed Options inside a `with` block; `changes` are fields."""
    token = _options.set(replace(_options.get(Options()), **changes))
    try:
        yield _options.get()
    finally:
        _options.reset(token)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/grid.py: Wave, _wave, current
@dataclass
class Wave:
    """Programs that run side by side, part of a grid. Every Value starts with the axes x, y, z."""

    grid: tuple[int, int, int]
    ids: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # int32 [x, 1, 1], [1, y, 1], [1, 1, z]
    options: Options
    writers: dict[tuple[int, int], torch.Tensor]  # by buffer: each element's last writer, or -1
    active: torch.Tensor | None = None  # [x, y, z], programs still in the loop; None: all

    @property
    def programs(self) -> torch.Tensor:
        """The number of each program in the grid, axis 0 fastest: int64 [x, y, z]."""
        x, y, z = (ids.long() for ids in self.ids)
        return x + self.grid[0] * (y + self.grid[1] * z)


_wave: ContextVar[Wave] = ContextVar("wave")


def current() -> Wave:
    """The wave that runs now. Raises KernelError outside a kernel."""
    wave = _wave.get(None)
    if wave is None:
        raise KernelError("this works only inside a kernel: launch a kernel with kernel[grid](...)")
    return wave


# %% [markdown]
# **fault** makes the messages you have read: it looks up the call stack for the innermost function that
# tlsim built out of a kernel, and takes file and line from there.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/grid.py: kernel_line, source_name, fault
def kernel_line() -> tuple[str, int]:
    """File and line of the running kernel, from the innermost frame that tlsim compiled."""
    frame = sys._getframe(1)
    while frame and "__tlsim__" not in frame.f_globals:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("no kernel", 0)


def source_name(file: str) -> str:
    """A file's name for messages; "cell" for a cell of a notebook."""
    return "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name


def fault(what: str, program: int | None = None, lane: tuple[int, ...] = ()) -> KernelError:
    """A KernelError that names the kernel's line and, if given, a program and a lane."""
    file, line = kernel_line()
    where = f"{source_name(file)}, line {line}"
    if program is not None:
        x, y, z = current().grid
        place = (program % x, program // x % y, program // (x * y))
        where += f", program {place[: 3 if z > 1 else 2 if y > 1 else 1]}"
    if lane:
        where += f", lane {list(lane)}"
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())


# %% [markdown]
# ### What a kernel computes with
#
# **Buffer** is the memory behind a tensor, laid flat from its first element to the last it can reach.
# A pointer is a buffer and offsets, never an address: that is how out of bounds can be noticed at all.

# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: HALVES, Buffer, PointerType
HALVES = (torch.float16, torch.bfloat16)


class Buffer:
    """The memory of a tensor argument, flat, from its first element to its last."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = last + 1 if tensor.numel() else 0
        self.name = name
        self.flat = tensor.detach().as_strided((size,), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class PointerType:
    """The dtype of a pointer, for `out_ptr.dtype.element_ty`."""

    element_ty: torch.dtype


# %% [markdown]
# **Value** is the tensor of every program: `data` in the shape above, and for a pointer its buffer. Look
# for `ramp`: offsets that count up by one along the last axis are not written out. Only the first is
# kept, so that a load of a row is one look-up, however long the row.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: Value
class Value:
    """A tl.tensor of every program: a number, a block of numbers, or pointers.

    `data` is [x, y, z, *shape], the grid's axes first. An axis of size 1 stands for all indices
    along it, so that a value that many programs share is stored and computed once. A pointer is a
    buffer and offsets into it, in elements, never an address. With `ramp`, data holds only the
    first lane of the last axis; lane i is the first lane plus i. A load then reads whole rows.
    """

    __slots__ = ("buffer", "data", "ramp", "shape")

    def __init__(
        self,
        data: torch.Tensor,
        shape: tuple[int, ...] = (),
        buffer: Buffer | None = None,
        ramp: bool = False,
    ) -> None:
        self.data, self.shape, self.buffer, self.ramp = data, shape, buffer, ramp

    @property
    def lanes(self) -> torch.Tensor:
        """data, with all lanes of a ramp."""
        if not self.ramp:
            return self.data
        lane = torch.arange(self.shape[-1], dtype=self.data.dtype, device=self.data.device)
        return self.data + lane

    @property
    def whole(self) -> torch.Tensor:
        """All lanes, expanded to shape: [x or 1, y or 1, z or 1, *shape]."""
        return self.lanes.expand(-1, -1, -1, *self.shape)

    @property
    def dtype(self) -> torch.dtype | PointerType:
        return PointerType(self.buffer.flat.dtype) if self.buffer else self.data.dtype

    def summed(self, axes: list[int]) -> torch.Tensor:
        """The sum over axes of data."""
        return self.whole.sum(axes, dtype=self.data.dtype)

    @property
    def T(self) -> "Value":
        shape = (*self.shape[:-2], *self.shape[:-3:-1])
        return Value(self.whole.transpose(-2, -1), shape, self.buffer)

    def to(self, dtype: torch.dtype) -> "Value":
        """The same numbers in another dtype."""
        if dtype == self.dtype:
            return self
        if self.buffer:
            raise fault(f"a pointer into {self.buffer.name} cannot be cast")
        ramp = self.ramp and dtype == torch.int64  # int64 can hold every lane
        return Value((self.data if ramp else self.lanes).to(dtype), self.shape, None, ramp)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: Value.__getitem__, Value.__index__ and 2 more
class Value(Value):
    def __getitem__(self, index: Any) -> "Value":
        """x[:, None] and the like: new axes of size 1, the only index that Triton has."""
        index = index if isinstance(index, tuple) else (index,)
        if [i for i in index if i is not None] != [slice(None)] * len(self.shape):
            raise fault(f"a block of shape {list(self.shape)} can be indexed only by None and :")
        ramp, sizes = self.ramp and index[-1] is not None, iter(self.shape)
        data = self.data if ramp else self.lanes
        for axis, i in enumerate(index):
            data = data.unsqueeze(3 + axis) if i is None else data
        shape = tuple(1 if i is None else next(sizes) for i in index)
        return Value(data, shape, self.buffer, ramp)

    def __index__(self) -> int:
        raise fault("this value must be known at compile time: a number or tl.constexpr")

    def __bool__(self) -> bool:
        if self.shape:
            raise fault("a block is neither true nor false: use tl.where, or &, | and ~ on masks")
        if self.data.numel() > 1:
            raise fault(
                "in lockstep all programs take the same branch, but this condition depends on the "
                'program: use a mask, or tlsim.options(order="serial")'
            )
        return bool(self.data)

    def __repr__(self) -> str:
        kind = f"pointer into {self.buffer.name}" if self.buffer else str(self.dtype)[6:]
        return f"<{list(self.shape)} {kind}>\n{self.lanes}"


# %% [markdown]
# The operators. Nearly all are one line, since `combine` further down does the work. Two are Triton's
# and not Python's: `//` rounds towards 0, as C does, and 16-bit numbers are divided in 32.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: _operator, _division, _quotient, _comparison
def _operator(op: Callable) -> tuple[Callable, Callable]:
    """The methods for `value op other` and for `number op value`."""
    return (lambda a, b: combine(op, *paired(a, b))), (lambda a, b: combine(op, *paired(b, a)))


def _division(op: Callable) -> tuple[Callable, Callable]:
    """The same for divisions: halves are divided in float32."""

    def divide(a: "Operand", b: "Operand") -> "Value":
        a, b = paired(a, b)
        if a.dtype in HALVES:
            a, b = a.to(torch.float32), b.to(torch.float32)
        return combine(op, a, b)

    return divide, lambda a, b: divide(b, a)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        raise fault("// is for integers: use / and tl.floor")
    return torch.div(a, b, rounding_mode="trunc")  # towards 0, as in C: -7 // 2 is -3


def _comparison(op: Callable) -> Callable:
    """The method of a comparison. A mask that is true everywhere is stored as one True."""

    def compare(a: "Value", b: "Operand") -> "Value":
        mask = combine(op, *paired(a, b))
        if mask.shape and bool(mask.data.all()):
            mask.data = mask.data.new_ones((1,) * mask.data.dim())
        return mask

    return compare


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: Value.__add__, Value.__radd__ and 28 more
class Value(Value):
    def __add__(self, other: "Operand") -> "Value":
        return _sum(self, other)

    __radd__ = __add__

    def __sub__(self, other: "Operand") -> "Value":
        if self.ramp or self.buffer:
            return self + -other
        return combine(operator.sub, *paired(self, other))

    def __rsub__(self, other: "Operand") -> "Value":
        return combine(operator.sub, *paired(other, self))

    def __neg__(self) -> "Value":
        return combine(operator.neg, self)

    def __invert__(self) -> "Value":
        return combine(operator.invert, self)

    def __mul__(self, other: "Operand") -> "Value":
        blocks = isinstance(other, Value) and self.shape and other.shape
        if blocks and self.dtype == other.dtype == torch.float32:
            return Product(self, other)
        return combine(operator.mul, *paired(self, other))

    __rmul__ = __mul__
    __truediv__, __rtruediv__ = _division(operator.truediv)
    __floordiv__, __rfloordiv__ = _division(_quotient)
    __mod__, __rmod__ = _division(torch.fmod)
    __and__, __rand__ = _operator(operator.and_)
    __or__, __ror__ = _operator(operator.or_)
    __xor__, __rxor__ = _operator(operator.xor)
    __lshift__, __rlshift__ = _operator(operator.lshift)
    __rshift__, __rrshift__ = _operator(operator.rshift)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)


# %% [markdown]
# A product of two blocks gets a class of its own on Day 22; until then it is multiplied like
# everything else.


# %%
# until day 22: lands in nanoserve/kernels/tlsim/values.py: Product
def Product(a, b):
    return combine(operator.mul, a, b)


# %% [markdown]
# **combine** brings shapes together and applies an operator to all lanes of all programs; **paired**
# finds the dtype that Triton would compute in; **_sum** keeps a pointer a pointer and a ramp a ramp.

# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: Operand, as_value, _constant, _kind, paired
Operand = Value | int | float | bool


def as_value(x: Operand, beside: Value | None = None) -> Value:
    """A number as a Value. It has the dtype of `beside`, the other operand, if that is of the same
    kind or a wider kind (bool, integer, float); else int1, int32 (int64 if large) or float32."""
    if isinstance(x, Value):
        return x
    if not isinstance(x, int | float):
        raise fault(f"a kernel computes with numbers and tensors, not with {type(x).__name__}")
    dtype = torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    if not isinstance(x, int) or isinstance(x, bool):
        dtype = torch.bool if isinstance(x, bool) else torch.float32
    if beside is not None and not beside.buffer and _kind(dtype) <= _kind(beside.dtype):
        dtype = beside.dtype
    try:
        return _constant(x, dtype, current().ids[0].device)
    except RuntimeError:
        raise fault(f"{x} is out of range for {dtype}") from None


@lru_cache(maxsize=1024)
def _constant(x: int | float, dtype: torch.dtype, device: torch.device) -> Value:
    return Value(torch.tensor([[[x]]], dtype=dtype, device=device))


def _kind(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 1 + dtype.is_floating_point


def paired(a: Operand, b: Operand) -> tuple[Value, Value]:
    """Two operands in the dtype that Triton computes in. This is torch's choice, except that
    bfloat16 with float16 gives float16, and bfloat16 with any other dtype gives float32."""
    if not isinstance(a, Value):
        a = as_value(a, b if isinstance(b, Value) else None)
    if not isinstance(b, Value):
        b = as_value(b, a)
    if a.buffer or b.buffer or a.dtype == b.dtype:
        return a, b
    dtype, both = torch.promote_types(a.dtype, b.dtype), {a.dtype, b.dtype}
    if torch.bfloat16 in both:
        half = torch.float16 in both
        dtype = torch.float16 if half else torch.promote_types(dtype, torch.float32)
    return a.to(dtype), b.to(dtype)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/values.py: joint_shape, broadcasts, spread, combine, _sum
@cache
def joint_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that blocks of these shapes broadcast to, aligned at the last axis."""
    sizes = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    joint = tuple(map(max, sizes))[::-1]
    if not all(broadcasts(shape, joint) for shape in shapes):
        raise fault(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
    return joint


@cache
def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a block of one shape broadcasts to another shape."""
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(n in (1, size) for n, size in pairs)


def spread(data: torch.Tensor, rank: int) -> torch.Tensor:
    """Give data [x, y, z, ...] axes of size 1 after the grid's axes, up to a block's rank."""
    for _ in range(rank + 3 - data.dim()):
        data = data.unsqueeze(3)
    return data


def combine(op: Callable, *values: Value) -> Value:
    """op on every lane of every program, with the shapes broadcast."""
    shape = joint_shape(*[x.shape for x in values])
    for x in values:
        if x.buffer:
            raise fault(f"a pointer into {x.buffer.name} allows only + and - of integers")
    try:
        return Value(op(*[spread(x.lanes, len(shape)) for x in values]), shape)
    except RuntimeError as error:  # of torch, for a dtype that the operator does not support
        raise fault(str(error)) from None


def _sum(a: Operand, b: Operand) -> Value:
    """a + b. A pointer stays a pointer. Adding the same number to all lanes keeps a ramp a ramp."""
    a, b = paired(a, b)
    buffer = a.buffer or b.buffer
    if buffer and ((a.buffer and b.buffer) or _kind(a.data.dtype) + _kind(b.data.dtype) != 2):
        raise fault(f"a pointer into {buffer.name} allows only + and - of integers")
    ramp, other = (a, b) if a.ramp else (b, a)
    stays = ramp.ramp and not other.ramp and (not other.shape or other.data.shape[-1] == 1)
    shape = joint_shape(a.shape, b.shape)
    x, y = (spread(v.data if stays else v.lanes, len(shape)) for v in (a, b))
    return Value(x + y, shape, buffer, stays)


# %% [markdown]
# ### Loads, stores and the sanitizer
#
# Three steps: **_access** finds the lanes that take part, **_check** refuses what is outside or was
# stored to by another program, and then memory is read or written. In `load`, look at the branch for a
# ramp, `unfold`: whole rows, by their first element.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: load, store, atomic_add, _write
def load(pointer: Value, mask: Operand | None = None, other: Operand | None = None, **_) -> Value:
    """tl.load: the elements at the pointers where the mask is true, and `other` elsewhere.

    Without `other`, the other lanes are undefined on a GPU, and NaN in tlsim (0 for integers). If
    the last axis is a ramp, whole rows are read. Hints about caches are accepted and ignored.
    """
    if other is not None and mask is None:
        raise fault("tl.load takes `other` only with a mask")
    mask, live = _access("load", pointer, mask)
    flat, first = pointer.buffer.flat, pointer.data
    width = pointer.shape[-1] if pointer.ramp else 1
    if pointer.ramp and first.min() >= 0 and first.max() <= len(flat) - width:
        data = flat.unfold(0, width, 1)[first.squeeze(-1)]  # all windows of `width`, by start
    elif len(flat):  # lanes outside the mask may point anywhere
        data = flat[pointer.lanes.clamp(0, len(flat) - 1)]
    else:
        data = flat.new_zeros(())
    if mask is not None:
        if other is None:
            other = torch.nan if flat.is_floating_point() else 0
        data = torch.where(mask, data, _lanes_for(pointer, other, "a value").to(flat.dtype))
    if current().options.poison and flat.is_floating_point():
        stale = data.isnan() if live is None else data.isnan() & live
        _refuse(stale, pointer, "loads a NaN, so a slot without an owner,")
    return Value(data, pointer.shape)


def store(pointer: Value, value: Operand, mask: Operand | None = None, **_) -> None:
    """tl.store: write value's lanes to the pointers where the mask is true."""
    _write("store", pointer, value, mask)


def atomic_add(pointer: Value, value: Operand, mask: Operand | None = None, **_) -> None:
    """tl.atomic_add: add to memory. Several lanes or programs may add to one address.

    Triton returns the old values. They depend on the order of programs, so tlsim returns None.
    """
    _write("atomic_add", pointer, value, mask)


def _write(kind: str, pointer: Value, value: Operand, mask: Operand | None) -> None:
    offsets, live = _everywhere(pointer, _access(kind, pointer, mask)[1])
    flat, data = pointer.buffer.flat, _lanes_for(pointer, value, "a value")
    data = data.to(flat.dtype).expand(offsets.shape)[live]
    flat.index_put_((offsets[live],), data, accumulate=kind == "atomic_add")


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: _lanes_for, _everywhere, _access
def _lanes_for(pointer: Value, x: Operand, what: str) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to the pointer's lanes."""
    x = as_value(x)
    if not broadcasts(x.shape, pointer.shape):
        raise fault(f"{what} of shape {list(x.shape)} does not fit pointers {list(pointer.shape)}")
    return spread(x.lanes, len(pointer.shape))


def _everywhere(pointer: Value, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and mask, expanded to every lane of every program: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    live = pointer.data.new_ones((), dtype=torch.bool) if live is None else live
    return pointer.lanes.expand(shape), live.expand(shape)


def _access(
    kind: str, pointer: Value, mask: Operand | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (mask, mask within active programs); None stands for all lanes. Check and record."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    wave, trace = current(), _trace.get()
    if mask is not None:
        mask = _lanes_for(pointer, mask, "a mask")
        if mask.dtype != torch.bool:
            raise fault(f"a mask must be int1, as a comparison returns it, got {mask.dtype}")
        mask = None if mask.numel() == 1 and bool(mask) else mask
    live = mask
    if wave.active is not None:
        active = spread(wave.active, len(pointer.shape))
        live = active if mask is None else mask & active
    if wave.options.checks:
        _check(kind, pointer, live)
    if trace is not None:
        trace.record(kind, pointer, live)
    return mask, live


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: _check, _refuse
def _check(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse offsets outside the buffer, and stores of two programs to one address.

    `live` [x, y, z, *shape] is true in lanes that take part; None: all lanes.
    """
    flat, wave = pointer.buffer.flat, current()
    outside = (pointer.lanes < 0) | (pointer.lanes >= len(flat))
    _refuse(outside if live is None else outside & live, pointer, f"{kind}s outside")
    if kind == "store":
        place = flat.data_ptr(), flat.element_size()
        writers = wave.writers.get(place, flat.new_empty(0, dtype=torch.int64))
        if len(writers) < len(flat):  # first store, or first to a longer argument at this address
            rest = torch.full_like(flat[len(writers) :], -1, dtype=torch.int64)
            writers = wave.writers[place] = torch.cat([writers, rest])
        offsets, live = _everywhere(pointer, live)
        mine = spread(wave.programs, len(pointer.shape)).expand(offsets.shape)[live]
        before = writers[offsets[live]]
        writers[offsets[live]] = mine
        clash = torch.zeros_like(live)
        clash[live] = ((before != -1) & (before != mine)) | (writers[offsets[live]] != mine)
        _refuse(clash, pointer, "stores where another program has stored,")


def _refuse(wrong: torch.Tensor, pointer: Value, action: str) -> None:
    """Raise KernelError for the first lane where `wrong` is true."""
    if wrong.any():
        offsets, wrong = _everywhere(pointer, wrong)
        first = tuple(int(i) for i in wrong.nonzero()[0])
        buffer, program = pointer.buffer, int(current().programs[first[:3]])
        what = f"{action} {buffer.name}[{int(offsets[first])}] of {len(buffer.flat)} elements"
        raise fault(what, program, first[3:])


# %% [markdown]
# **Access** is one load or store as a trace keeps it. `bytes` is what the lanes asked for, and `rows`
# the number of stretches it lies in: where a lane's neighbour is not its neighbour in memory, a new
# stretch begins. You measure with it below. `coalesced` means here only that the last axis is a ramp,
# however short.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: Access
@dataclass(frozen=True)
class Access:
    """One load, store or atomic_add of a wave of programs, recorded by a trace."""

    kind: str
    name: str  # of the argument
    line: int
    itemsize: int
    programs: torch.Tensor  # [programs], their numbers in the grid
    offsets: torch.Tensor  # [programs, *shape], in elements
    live: torch.Tensor  # [programs, *shape], the lanes that were accessed
    coalesced: bool  # the lanes of a row have consecutive offsets

    @property
    def bytes(self) -> int:
        """The bytes of all accessed lanes; an address counts as often as it is accessed."""
        return int(self.live.sum()) * self.itemsize

    @property
    def rows(self) -> int:
        """The number of pieces of consecutive offsets: one per row if coalesced."""
        offsets, live = self.offsets.flatten(0, -2), self.live.flatten(0, -2)
        joined = live[:, 1:] & live[:, :-1] & (offsets[:, 1:] == offsets[:, :-1] + 1)
        return int(live.sum() - joined.sum())

    def of(self, program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offsets, live) of the program with this number, each in the block's shape."""
        index = int((self.programs == program).nonzero())
        return self.offsets[index], self.live[index]


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: Trace, _trace, trace
@dataclass
class Trace:
    """All loads and stores inside the `with` block, in order."""

    accesses: list[Access] = field(default_factory=list)

    def bytes(self, kind: str) -> int:
        """The bytes of all accesses of a kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def distinct_bytes(self, kind: str, name: str) -> int:
        """The bytes of one argument that were accessed at least once."""
        chosen = [a for a in self.accesses if (a.kind, a.name) == (kind, name)]
        touched = [a.offsets[a.live] for a in chosen]
        return len(torch.cat(touched).unique()) * chosen[0].itemsize if chosen else 0

    def record(self, kind: str, pointer: Value, live: torch.Tensor | None) -> None:
        """Append one access of the running wave; `live` is as for _check."""
        buffer, coalesced = pointer.buffer, pointer.ramp or not pointer.shape
        at = (kernel_line()[1], buffer.flat.itemsize, current().programs.flatten())
        lanes = (x.flatten(0, 2) for x in _everywhere(pointer, live))
        self.accesses.append(Access(kind, buffer.name, *at, *lanes, coalesced))


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the loads and stores of kernels launched inside the `with` block."""
    token = _trace.set(Trace())
    try:
        yield _trace.get()
    finally:
        _trace.reset(token)


# %% [markdown]
# ### The words of the language
#
# Today's part of `tl`: the types, which program this is, and the lanes. The rest comes tomorrow.

# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/language.py: int1, int8, int16, int32, int64, uint8 and 7 more
int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64


class constexpr:
    """A value known at compile time: annotates a parameter, or wraps a global."""

    def __init__(self, value: Any) -> None:
        self.value = value


def program_id(axis: int) -> Value:
    """The index of this program along an axis of the grid: int32."""
    return Value(current().ids[axis])


def num_programs(axis: int) -> Value:
    """The number of programs along an axis of the grid: int32."""
    return as_value(current().grid[axis])


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/language.py: arange, _block_shape
def arange(start: int, end: int) -> Value:
    """start, start + 1, ... end - 1: an int32 block whose length is a power of two."""
    if not (isinstance(start, int) and isinstance(end, int)):
        raise fault("the bounds of tl.arange must be tl.constexpr, known at compile time")
    (length,) = _block_shape(end - start)
    return Value(as_value(start).data[..., None], (length,), ramp=length > 1)


def _block_shape(*shape: Any) -> tuple[int, ...]:
    """The shape of a block, by Triton's rules: constants that are powers of two."""
    for size in shape:
        if not isinstance(size, int):
            raise fault("the shape of a block must be tl.constexpr, known at compile time")
        if size < 1 or size & (size - 1):
            raise fault(f"the sizes of a block must be powers of two, got {size}")
    return shape


# %% [markdown]
# ### A launch by hand
#
# That is enough to run a kernel's lines without a kernel. Make a wave of three programs, and type what
# stood in `double`. These are the notebook's own definitions, from the cells above:

# %%
along_x = torch.arange(3, dtype=torch.int32).view(3, 1, 1)
one = torch.zeros(1, 1, 1, dtype=torch.int32)
hand = _wave.set(Wave((3, 1, 1), (along_x, one, one), Options(), {}))

offsets = program_id(0) * 4 + arange(0, 4)
print("one program has", list(offsets.shape), "and tlsim holds", list(offsets.data.shape))
print("the ramps begin at", offsets.data.flatten().tolist())
print(offsets.lanes.view(3, 4))

# %% [markdown]
# Three numbers stand for twelve lanes. Then the pointers, the mask, the load and the store:

# %%
x, out = torch.arange(10.0), torch.zeros(10)
x_ptr, out_ptr = (
    Value(torch.zeros(1, 1, 1, dtype=torch.int64), buffer=Buffer(name, tensor))
    for name, tensor in (("x", x), ("out", out))
)
inside = offsets < 10
store(out_ptr + offsets, load(x_ptr + offsets, inside) * 2, inside)
print(out)
assert torch.equal(out, 2 * torch.arange(10.0))

# %%
try:
    load(x_ptr + offsets)
except KernelError as error:
    print(error)
_wave.reset(hand)

# %% [markdown]
# ### Reading a kernel
#
# What is left is `@tlsim.jit`. A **Kernel** reads the function's source, as Triton does; refuses what
# Triton has not got; and builds a Python function in which `tl` means tlsim, whatever it meant outside.
# Then `launch` turns tensors into pointers and runs the function once per wave. `Loop`, `Rewrite` and
# `named` are tomorrow's; take them as given.

# %%
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.loops import Loop, Rewrite, named

# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: HINTS, One
HINTS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # for a compiler: accepted and ignored


class One(int):
    """An integer argument equal to 1: Triton compiles it as a constant."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an integer argument equal to 1 is a constant in Triton, and has no .{name}: "
            "this kernel would fail only when the argument is 1"
        )


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: Kernel
class Kernel:
    """A function in Triton's language, launched as kernel[grid](*args, **meta)."""

    def __init__(self, fn: Callable) -> None:
        while hasattr(fn, "fn"):  # wrapped by triton.jit or triton.autotune
            fn = fn.fn
        self.fn = fn
        update_wrapper(self, fn)
        self.signature = inspect.signature(fn)
        self._code, self._names = _read(fn)

    def __getitem__(self, grid: Any) -> Callable:
        return partial(self.launch, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run this kernel inside another kernel, which calls it."""
        current()
        return self._function()(*args, **kwargs)

    def launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Run every program of the grid: up to three sizes, or a function that returns them.

        Tensors become pointers to their first elements, and numbers become scalars; tl.constexpr
        parameters stay as they are. Raises TypeError for arguments that do not fit the signature,
        ValueError for a wrong grid or several devices, and KernelError for an error in the kernel.
        """
        try:
            bound = self.signature.bind(
                *args, **{k: v for k, v in kwargs.items() if k not in HINTS}
            )
        except TypeError as error:
            raise TypeError(f"{self.__name__}: {error}") from None
        bound.apply_defaults()
        grid = grid(bound.arguments) if callable(grid) else grid
        grid = (grid,) if isinstance(grid, int) else grid
        sizes = isinstance(grid, tuple) and all(isinstance(n, int) and n >= 0 for n in grid)
        if not sizes or not 1 <= len(grid) <= 3:
            raise ValueError(f"{self.__name__}: a grid must be one to three sizes, got {grid}")
        grid += (1,) * (3 - len(grid))
        devices = {x.device for x in bound.arguments.values() if isinstance(x, torch.Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{self.__name__}: needs one device, got {sorted(map(str, devices))}")
        options = _options.get(Options())
        function, writers = self._function(), {}
        for ids in _waves(grid, options):
            ids = tuple(part.to(*devices) for part in ids)
            token = _wave.set(Wave(grid, ids, options, writers))
            try:
                function(*(self._argument(name, x) for name, x in bound.arguments.items()))
            finally:
                _wave.reset(token)

    def _argument(self, name: str, x: Any) -> Any:
        annotation = self.signature.parameters[name].annotation
        if x is None or getattr(annotation, "__name__", str(annotation)).endswith("constexpr"):
            return _translate(x)
        if isinstance(x, torch.Tensor):
            start = torch.zeros(1, 1, 1, dtype=torch.int64, device=x.device)
            return Value(start, buffer=Buffer(name, x))
        if not isinstance(x, int | float):
            raise TypeError(f"{self.__name__}: {name} must not be a {type(x).__name__}")
        return One(1) if x is not True and x == 1 and isinstance(x, int) else as_value(x)

    def _function(self) -> Callable:
        """The kernel as a Python function, with the present values of its globals."""
        known = {**self.fn.__globals__, **inspect.getclosurevars(self.fn).nonlocals}
        namespace = {
            "__tlsim__": True,
            "__Loop": Loop,
            "__named": named,
            "__builtins__": BUILTINS,
        }
        for name in self._names & known.keys():
            namespace[name] = _translate(known[name], f"{self.__name__} reads the global {name}")
        exec(self._code, namespace)
        return namespace[self.fn.__name__]


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: _waves, jit
def _waves(grid: tuple[int, int, int], options: Options) -> Iterator[tuple[torch.Tensor, ...]]:
    """The ids of each wave's programs, in the form of Wave.ids."""
    x, y, z = grid
    if options.order == "serial":
        shuffled = torch.Generator().manual_seed(options.seed)
        for program in torch.randperm(x * y * z, generator=shuffled).tolist():
            place = (program % x, program // x % y, program // (x * y))
            yield tuple(torch.full((1, 1, 1), i, dtype=torch.int32) for i in place)
        return
    deep = min(z, options.wave)
    high = min(y, options.wave // max(deep, 1))
    wide = min(x, options.wave // max(deep * high, 1))
    if x * y * z:
        sizes = zip(grid, (wide, high, deep), strict=True)
        along = (torch.arange(n, dtype=torch.int32).split(size) for n, size in sizes)
        for i, j, k in product(*along):
            yield i.view(-1, 1, 1), j.view(1, -1, 1), k.view(1, 1, -1)


def jit(fn: Callable) -> Kernel:
    """Make a tlsim kernel from a function, or from a kernel of triton.jit."""
    return fn if isinstance(fn, Kernel) else Kernel(fn)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/sizes.py: next_power_of_2
def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, as triton.next_power_of_2 returns it."""
    return 1 << max(0, n - 1).bit_length()


# %% [markdown]
# The source as a tree: what is refused, and what the names of the surroundings mean in a kernel.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: _read, BUILTINS, REFUSED, _DTYPES, _translate, _TRITON
def _read(fn: Callable) -> tuple[CodeType, set[str]]:
    """Return (the kernel compiled with its loops rewritten, the global names that it uses)."""
    try:
        lines, first = inspect.getsourcelines(fn)
    except (OSError, TypeError):
        raise KernelError(f"{fn.__name__}: the source of this kernel cannot be read") from None
    tree, file = ast.parse(textwrap.dedent("".join(lines))), inspect.getsourcefile(fn)
    ast.increment_lineno(tree, first - 1)
    [function] = tree.body
    for node in ast.walk(function):
        kind = type(node).__name__
        inside = [type(n).__name__ for n in ast.walk(node)] if kind in ("For", "While") else []
        if kind in REFUSED or "Return" in inside or (inside and node.orelse):
            what = kind.lower() if kind in REFUSED else "return or else in a loop"
            raise KernelError(f"{source_name(file)}, line {node.lineno}: Triton has no {what}")
    function.decorator_list, function.returns = [], None
    for arg in ast.walk(function.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    names -= {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}  # the kernel's own variables
    return compile(ast.fix_missing_locations(Rewrite().visit(tree)), file, "exec"), names


BUILTINS = {  # the built-in functions that a kernel may use
    **{f.__name__: f for f in (len, list, float, int, isinstance, getattr, hasattr, print, locals)},
    "range": language.range,
    "min": language.minimum,
    "max": language.maximum,
}
REFUSED = {"Break", "Continue", "Try", "Raise", "With", "Lambda", "ClassDef", "Yield", "Import"}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def _translate(x: Any, use: str = "") -> Any:
    """tlsim's counterpart of a global of a kernel; KernelError for a global that Triton refuses."""
    home, kind = getattr(x, "__module__", None) or "", type(x)
    if isinstance(x, ModuleType):
        if x.__name__.startswith("triton.language"):
            return language
        return _TRITON if x.__name__ in ("triton", __package__) else x
    if kind.__name__ == "constexpr":
        return x.value
    if kind.__module__.startswith("triton.language"):  # tl.float32 and the like
        return getattr(language, _DTYPES.get(x.name, x.name))
    if home.startswith("triton.language"):  # from triton.language import exp
        return getattr(language, x.__name__)
    if hasattr(x, "fn") or isinstance(x, Kernel):
        return jit(x)
    if not use or home.startswith(__package__) or isinstance(x, type | torch.dtype):
        return x
    rule = "is not marked @triton.jit" if callable(x) else "is not wrapped in tl.constexpr"
    raise KernelError(f"{use}, which {rule}: a kernel can use no other globals")


_TRITON = SimpleNamespace(
    language=language, jit=jit, cdiv=language.cdiv, next_power_of_2=next_power_of_2
)


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
    """The bytes a card fetches for an access, each program by itself, in sectors of 32: these are
    counted from the buffer's first element."""
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
# mapping's 1.02: each head's reading ends in the middle of a sector.
#
# The count leaves out a GPU's caches, which may hold a sector that another program has
# fetched, and time. It is the count of a model. Day 27 measures a GPU.
#
# ## Lockstep against serial
#
# Last, the price of the model itself. The same gather of 512 positions is 384 programs by tiles of 4,
# 96 by tiles of 16, 24 by tiles of 64. Side by side they are one pass over large tensors; one after
# another, a pass over small ones for each program.

# %% tags=["nbval-ignore-output"]
from nanoserve.bench.timing import median_times

long_pool = torch.randn(1_024, n_kv, head_dim)
scattered = torch.randperm(1_024, generator=torch.Generator().manual_seed(21))[:512]


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
