# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 33 · A kernel for four bits
#
# Week 8 · Phase 3, fewer bytes · you need: Day 29 (Share the keys), Day 32 (Keep the four bits)
#
# **Today** you write the product of one row with a weight in four bits, as a kernel. It reads the packed numbers and
# unpacks them in registers, so that no unpacked weight is ever in memory. Then you make it faster in three steps.

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

today = day(33)
today.picture("four-bit-kernel")

# %% [markdown]
# ## Why it matters
#
# In a decode step, every weight meets one row of activations: a matrix-vector product. It reads each weight once and
# does two operations with it, so on a GPU the bytes of the weights are its time. Four bits are fewer bytes, but only if
# the **memory** holds four bits. A step that first writes the dequantised weight reads and writes more than before.
#
# On a CPU, PyTorch has such a product (Day 32). For a GPU we write it. The format stays the same: two numbers in a
# byte, and a scale and a minimum in bfloat16 for each group of 32.

# %%
today.glossary("Q4_1", "nibble", "matrix-vector product", "subnormal number", "bitcast")

# %%
today.predict(
    "speed-up",
    "The head of Llama-3.2-1B, 128,256 x 2,048, on an H200: how many times as fast as bfloat16?",
    guess=None,
    low=0,
    high=10,
)

# %% [markdown]
# ## Your turn: `q4_bytes`
#
# First the limit. How many bytes does a weight `[num_out, width]` have in four bits? A byte holds two numbers. Each 32
# numbers of a row have a scale and a minimum, in bfloat16. The row of activations and the result are small and do not
# count.
#
# Stuck? `today.hint()`. After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def q4_bytes(num_out, width):
    """The bytes of a weight [num_out, width] in four bits, with its scales and minimums."""
    raise NotImplementedError("your turn")


today.check(q4_bytes)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. It also has the shapes that we measure:
# the products of Llama-3.2-1B.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/matvec.py: SHAPES, q4_bytes
# [out, in] of the products of Llama-3.2-1B: q, k and v; o; gate and up; down; the head
SHAPES = ((3_072, 2_048), (2_048, 2_048), (16_384, 2_048), (2_048, 8_192), (128_256, 2_048))


def q4_bytes(num_out: int, width: int) -> int:
    """The bytes of a weight [num_out, width] in four bits, with its scales and minimums."""
    return num_out * width // 2 + 2 * 2 * num_out * (width // 32)


# %%
for num_out, width in SHAPES:
    ours, theirs = q4_bytes(num_out, width), 2 * num_out * width
    print(f"{num_out:7,} x {width:5,}: {ours / 1e6:6.1f} MB, bfloat16 {theirs / 1e6:6.1f} MB")
    assert theirs == 3.2 * ours

# %% [markdown]
# Five bits a number, all told: 3.2 times fewer than bfloat16. No kernel for this format is more than 3.2 times as fast as
# a bfloat16 product that reads at the full bandwidth.
#
# ## Your turn: `unpack`
#
# Now the kernel. Two numbers leave a byte: the low four bits are the first number, the high four bits the second. Write
# a kernel that unpacks `n` bytes. Program i has the bytes from `i * BLOCK` on.
#
# - `two & 15` keeps the low four bits; `two >> 4` moves the high four bits down.
# - Byte j gives `out[2 * j]` and `out[2 * j + 1]`.
# - The last program has lanes without a byte: mask the load and the stores.

# %%
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl

from nanoserve.kernels import tlsim


# %%
def unpack(byte_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[2j] and out[2j + 1]: the low and the high four bits of byte j. BLOCK bytes a program."""
    raise NotImplementedError("your turn")


today.check(unpack)

# %% [markdown]
# One way to write it, on a row that Day 32 has packed:


# %% jupyter={"source_hidden": true}
# unpack
def unpack(byte_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out[2j] and out[2j + 1]: the low and the high four bits of byte j. BLOCK bytes a program."""
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < n
    two = tl.load(byte_ptr + byte, mask=inside, other=0)
    tl.store(out_ptr + 2 * byte, two & 15, mask=inside)
    tl.store(out_ptr + 2 * byte + 1, two >> 4, mask=inside)


# %%
from nanoserve.quant import quantize, unpack_nibbles

random = torch.Generator().manual_seed(33)
weight = quantize(torch.randn(40, 256, generator=random))  # numbers, scales and minimums
row = weight.numbers[0]
out = torch.zeros(256)
tlsim.jit(unpack)[(2,)](row, out, len(row), BLOCK=64)
print("as Day 32 unpacks it:", torch.equal(out, unpack_nibbles(row).float()))
assert torch.equal(out, unpack_nibbles(row).float())

# %% [markdown]
# ## A first kernel
#
# With this, a product is a short kernel: a byte a lane, two numbers out of each byte, `q * scale + minimum` for each
# number, times `x`, and one sum at the end. Every lane loads the scale and the minimum of its group.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/matvec.py: by_bytes_kernel
@triton.jit
def by_bytes_kernel(
    x_ptr,
    byte_ptr,
    scale_ptr,
    minimum_ptr,
    y_ptr,
    num_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The first step: a byte a lane; scale and minimum for each number. Programs: [out / OUT]."""
    out = (tl.program_id(0) * OUT + tl.arange(0, OUT)).to(tl.int64)
    acc = tl.zeros((OUT, BYTES), tl.float32)
    for start in range(0, IN // 2, BYTES):
        byte = start + tl.arange(0, BYTES)
        used = byte < IN // 2
        mask = (out < num_out)[:, None] & used[None, :]
        two = tl.load(byte_ptr + (out * (IN // 2))[:, None] + byte[None, :], mask, 0)
        at = (out * (IN // 32))[:, None] + (byte // 16)[None, :]
        scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + at, mask, 0.0).to(tl.float32)
        x_even = tl.load(x_ptr + 2 * byte, used, 0.0).to(tl.float32)
        x_odd = tl.load(x_ptr + 2 * byte + 1, used, 0.0).to(tl.float32)
        acc += ((two & 15).to(tl.float32) * scale + minimum) * x_even[None, :]
        acc += ((two >> 4).to(tl.float32) * scale + minimum) * x_odd[None, :]
    tl.store(y_ptr + out, tl.sum(acc, axis=1), mask=out < num_out)


# %% [markdown]
# The oracle is the product with the dequantised weight. Both sum in float32, in different orders; so a difference is
# compared with the size of the terms, `abs(x) @ abs(weight).T`.

# %%
values = weight.dequantize(torch.float32)
x = torch.randn(1, 256, generator=random)
parts = weight.numbers, weight.scales, weight.minimums


def right(y, x=x, values=values, tolerance=1e-6):
    """Whether y is the product with the dequantised weight."""
    size = x.abs() @ values.abs().T
    return bool(((y - x @ values.T).abs() <= tolerance * size).all())


y = torch.full((1, 40), torch.nan)
with tlsim.trace() as traced:
    tlsim.jit(by_bytes_kernel)[(10,)](x, *parts, y, 40, IN=256, OUT=4, BYTES=32)
print("as the dequantised product:", right(y))
assert right(y)

# %% [markdown]
# How many bytes does it load, beside the bytes of the weight?

# %%
names = {"byte_ptr": "numbers", "word_ptr": "numbers", "x_ptr": "x", "y_ptr": "y"}
names |= {"scale_ptr": "scales, minimums", "minimum_ptr": "scales, minimums"}


def loaded(traced):
    """The bytes of a trace's accesses, by argument."""
    found = dict.fromkeys(("numbers", "scales, minimums"), 0)
    for access in traced.accesses:
        found[names[access.name]] = found.get(names[access.name], 0) + access.bytes
    return found


print("the weight:", q4_bytes(40, 256), "bytes;", "loaded:", loaded(traced))
assert loaded(traced)["numbers"] == 40 * 256 // 2
assert loaded(traced)["scales, minimums"] == 16 * (weight.scales.nbytes + weight.minimums.nbytes)

# %% [markdown]
# The numbers are loaded once. Scales and minimums are loaded **16 times**: each of the 16 bytes of a group asks for them.
# On a GPU the caches answer most of these loads, so few of them reach the memory. But each is an instruction, and so are the
# shifts, the conversions from integer to float, and two multiplications where one would do.
#
# ## Your turn: `finish`
#
# All 32 numbers of a group share the scale $s_g$ and the minimum $m_g$. So they can be taken out of the sum:
#
# $$ y = \sum_g \sum_{i \in g} (q_i s_g + m_g)\, x_i = \sum_g \Big( s_g \sum_{i \in g} q_i x_i + m_g \sum_{i \in g} x_i \Big) $$
#
# `dots` `[out, groups]` holds $\sum q_i x_i$ of each group, and `sums` `[groups]` holds $\sum x_i$. The second does not
# depend on the weight at all: every row of the weight uses the same sums. Return `y` `[out]`.


# %%
def finish(dots, sums, scales, minimums):
    """dots [out, groups], sums [groups], scales and minimums [out, groups] -> y [out]."""
    raise NotImplementedError("your turn")


today.check(finish)

# %% [markdown]
# One way to write it:


# %% jupyter={"source_hidden": true}
# finish
def finish(dots, sums, scales, minimums):
    """dots [out, groups], sums [groups], scales and minimums [out, groups] -> y [out]."""
    return (scales * dots + minimums * sums).sum(1)


# %%
numbers = unpack_nibbles(weight.numbers).float().view(40, 8, 32)
in_groups = x.view(8, 32)
y = finish((numbers * in_groups).sum(-1), in_groups.sum(-1), weight.scales, weight.minimums)
print("as the dequantised product:", right(y[None]))
assert right(y[None])

# %% [markdown]
# ## The second kernel: a group a thread
#
# A group's numbers are 16 bytes: as much as a thread of a GPU can load at once. So the tile becomes
# `[OUT, GROUPS, 4]` words of 32 bits. Number k of a word is `(word >> 4 * k) & 15`. For each k, a word meets number k of
# its eight neighbours in `x`. Scale and minimum are applied once a group.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/matvec.py: by_groups_kernel
@triton.jit
def by_groups_kernel(
    x_ptr,
    word_ptr,
    scale_ptr,
    minimum_ptr,
    y_ptr,
    num_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The second step: 16 bytes a thread; scale and minimum once for each group."""
    out = (tl.program_id(0) * OUT + tl.arange(0, OUT)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    used = group < IN // 32
    mask = (out < num_out)[:, None] & used[None, :]
    word = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    words_at = word_ptr + (out * (IN // 8))[:, None, None] + word[None]
    words = tl.load(words_at, mask[:, :, None], 0)  # [OUT, GROUPS, 4]
    at = (out * (IN // 32))[:, None] + group[None, :]
    scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
    minimum = tl.load(minimum_ptr + at, mask, 0.0).to(tl.float32)
    dot = tl.zeros((OUT, GROUPS, 4), tl.float32)
    total = tl.zeros((GROUPS, 4), tl.float32)
    for k in tl.static_range(8):
        x_k = tl.load(x_ptr + word * 8 + k, used[:, None], 0.0).to(tl.float32)
        dot += ((words >> (4 * k)) & 15).to(tl.float32) * x_k[None]
        total += x_k
    sums = scale * tl.sum(dot, axis=2) + minimum * tl.sum(total, axis=1)[None, :]
    tl.store(y_ptr + out, tl.sum(sums, axis=1), mask=out < num_out)


# %%
y.fill_(torch.nan)
words = weight.numbers.view(torch.int32)  # the same bytes, four at a time
with tlsim.trace() as traced:
    tlsim.jit(by_groups_kernel)[(10,)](x, words, *parts[1:], y, 40, IN=256, OUT=4, GROUPS=8)
found = loaded(traced)
print("as the dequantised product:", right(y), "  loaded:", found)
assert right(y) and found["numbers"] + found["scales, minimums"] == q4_bytes(40, 256)

# %% [markdown]
# Each byte of the weight is loaded once.
#
# ## A float without a conversion
#
# What is left is the unpacking: for each number a shift, an `&` and a conversion from integer to float. Two of them can go.
#
# A float32 is a sign, 8 bits of exponent and 23 bits of digits. If all exponent bits are 0, the number is **subnormal**:
# its value is the digits as an integer, times $2^{-149}$. So take a word, and set all bits but number k's to 0. Read as a
# float32, with the same bits (a **bitcast**), it is
#
# $$ q \cdot 2^{4k} \cdot 2^{-149} $$
#
# No shift and no conversion: one `&`. Multiply `x` by a power of two beforehand, and the product has a normal size.

# %%
q = torch.arange(16, dtype=torch.int32)
for k in (0, 1, 4):
    floats = (q << 4 * k).view(torch.float32)
    exact = torch.equal(floats.double(), q.double() * 2.0 ** (4 * k - 149))
    print(f"k = {k}: number 3 is {floats[3]:.4e} as a float32; all 16 are exact: {exact}")
    assert exact

# %% [markdown]
# It works for k from 0 to 4, bits 0 to 19. Numbers 5 to 7 reach into the exponent, so they are shifted down by 12 bits
# first: one shift for three numbers. `x` gets the factor $2^{88 - 4k}$, and a product is $q x \cdot 2^{-61}$. The last line
# of the sum multiplies by $2^{61}$. Powers of two change no digit. But a float32 has limits: an `x` beyond $2^{35}$ would
# overflow, and an `x` below $2^{-65}$ loses digits. Activations are far from both.
#
# ## The third kernel lands
#
# `dequant_matvec_kernel` is the second one with three changes:
#
# - The numbers are bits that are read as floats.
# - `x` is loaded once, in pieces of 16 bytes, as `[GROUPS, 4, 8]`, and stays in registers. Column k is a sum over the last
#   axis in which all other columns are -0.0. A compiler leaves out the addition of -0.0, so nothing is added on a GPU.
# - A program goes through several tiles of rows, so loads of `x` are a small share of its work. `load_groups` requests the
#   next tile before this one is summed: bytes in flight (Day 31), here in registers.
#
# `OVERLAP` is Day 31's early start: a GPU starts this kernel's programs while the last ones of the kernel before still run.
#
# One line adds `tl.program_id(2)`, which is 0. Without it the compiler sees that scales lie side by side, gives each
# thread eight of them, and moves them to the right threads through shared memory. Such a line comes from reading what the
# compiler made, and from measuring.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dequant_matvec.py: load_groups, dequant_matvec_kernel
@triton.jit
def load_groups(
    tile,
    word_ptr,
    scale_ptr,
    minimum_ptr,
    num_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """OUT rows of the weight, from row tile * OUT on; 0 in rows and groups that do not exist.

    Returns words [OUT, GROUPS, 4], scales and minimums [OUT, GROUPS]. A thread loads the four words
    of a group, 16 bytes.
    """
    out = (tile * OUT + tl.arange(0, OUT)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    mask = (out < num_out)[:, None] & (group < IN // 32)[None, :]
    word = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    words_at = word_ptr + (out * (IN // 8))[:, None, None] + word[None]
    words = tl.load(words_at, mask[:, :, None], 0, eviction_policy="evict_first")
    # The third axis of the grid has one program, so this adds 0. But the compiler no longer sees
    # neighbours here: a thread loads the scale of its own group, not of eight groups in a row.
    at = (out * (IN // 32))[:, None] + (group.to(tl.int64) + tl.program_id(2))[None, :]
    scale = tl.load(scale_ptr + at, mask, 0.0, eviction_policy="evict_first")
    minimum = tl.load(minimum_ptr + at, mask, 0.0, eviction_policy="evict_first")
    return words, scale, minimum


@triton.jit
def dequant_matvec_kernel(
    x_ptr,  # [rows, in]
    word_ptr,  # int32 [out, in / 8], contiguous: 8 numbers each, the first in the lowest bits
    scale_ptr,  # [out, in / 32], contiguous
    minimum_ptr,  # [out, in / 32], contiguous
    y_ptr,  # [rows, out], contiguous
    num_out,
    x_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,  # results of one iteration of the loop
    GROUPS: tl.constexpr,  # in / 32, padded to a power of two
    OVERLAP: tl.constexpr,  # start the next kernel early (CUDA's programmatic dependent launch)
):
    """y = x @ weight.T, row by row. Programs: [at most out / OUT, rows]. Sums in float32.

    Bits 4k to 4k + 3 of a word, the others 0, are as a float32 the subnormal number
    q * 2**(4k - 149): no conversion is needed. x has the factor 2**(88 - 4k), so that a product is
    q * x * 2**-61. This is exact for x from 2**-65 to 2**35.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    words, scale, minimum = load_groups(
        tl.program_id(0), word_ptr, scale_ptr, minimum_ptr, num_out, IN, OUT, GROUPS
    )
    group, place = tl.arange(0, GROUPS), tl.arange(0, 8)
    word = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = x_ptr + tl.program_id(1) * x_row + word[:, :, None] * 8 + place[None, None, :]
    x = tl.load(x_at, (group < IN // 32)[:, None, None], 0.0).to(tl.float32)  # [GROUPS, 4, 8]
    total = tl.sum(tl.sum(x, axis=2), axis=1) * 2.0**-61
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_out, OUT), tl.num_programs(0)):
        next_words, next_scale, next_minimum = (
            load_groups(  # these arrive while this tile is summed
                tile + tl.num_programs(0),
                word_ptr,
                scale_ptr,
                minimum_ptr,
                num_out,
                IN,
                OUT,
                GROUPS,
            )
        )
        dot = tl.zeros((OUT, GROUPS, 4), tl.float32)
        for k in tl.static_range(8):
            # Column k of x: adding -0.0 changes nothing, so the compiler leaves the sum out.
            x_k = tl.sum(tl.where((place == k)[None, None, :], x, -0.0), axis=2)
            if k < 5:
                bits = words & (15 << (4 * k))
                x_k = x_k * 2.0 ** (88 - 4 * k)
            else:  # a float32 has 23 bits for its digits
                bits = (words >> 12) & (15 << (4 * k - 12))
                x_k = x_k * 2.0 ** (100 - 4 * k)
            dot += bits.to(tl.float32, bitcast=True) * x_k[None]
        sums = scale.to(tl.float32) * tl.sum(dot, axis=2) + minimum.to(tl.float32) * total[None, :]
        y = tl.sum(sums, axis=1) * 2.0**61
        out = (tile * OUT + tl.arange(0, OUT)).to(tl.int64)
        tl.store(y_ptr + tl.program_id(1).to(tl.int64) * num_out + out, y, mask=out < num_out)
        words, scale, minimum = next_words, next_scale, next_minimum


# %% [markdown]
# For a few rows of `x`, this kernel runs once for each. For more rows, each weight meets many numbers, and tensor cores
# pay (Day 29). Their operands have 16 bits, so the next kernel rounds the values to `x`'s dtype, as a dequantised weight
# has them.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dequant_matvec.py: dequant_rows_kernel
@triton.jit
def dequant_rows_kernel(
    x_ptr,  # as for dequant_matvec_kernel
    word_ptr,
    scale_ptr,
    minimum_ptr,
    y_ptr,
    num_out,
    x_row,
    rows,
    IN: tl.constexpr,
    ROWS: tl.constexpr,  # rows, padded to 16
    OUT: tl.constexpr,
    WORDS: tl.constexpr,  # words of one iteration of the loop
):
    """y = x @ weight.T for 2 to 16 rows, by tensor cores. Programs: [out / OUT].

    Values are rounded to x's dtype, as in a dequantised weight. Sums in float32.
    """
    out = (tl.program_id(0) * OUT + tl.arange(0, OUT)).to(tl.int64)
    row = tl.arange(0, ROWS)
    acc = tl.zeros((OUT, ROWS), tl.float32)
    for start in range(0, IN // 8, WORDS):
        word = start + tl.arange(0, WORDS)
        used = word < IN // 8
        mask = (out < num_out)[:, None] & used[None, :]
        words = tl.load(word_ptr + (out * (IN // 8))[:, None] + word[None, :], mask, 0)
        at = (out * (IN // 32))[:, None] + (word // 4)[None, :]
        scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + at, mask, 0.0).to(tl.float32)
        x_at = x_ptr + (row * x_row)[None, :] + (word * 8)[:, None]
        x_mask = used[:, None] & (row < rows)[None, :]
        for k in tl.static_range(8):
            x = tl.load(x_at + k, x_mask, 0.0)  # [WORDS, ROWS]
            number = (words >> (4 * k)) & 15
            values = (number.to(tl.float32) * scale + minimum).to(x.dtype)
            acc = tl.dot(values, x, acc, input_precision="ieee")
    y_at = y_ptr + (row * num_out)[None, :] + out[:, None]
    tl.store(y_at, acc, mask=(out < num_out)[:, None] & (row < rows)[None, :])


# %% [markdown]
# ## Launch it
#
# The rest of the file is what you know from Days 23 and 31: a check that names the argument, a table of launch parameters
# by compute capability, one launcher for tlsim and Triton, and a function that chooses the backend. `q4_linear` of Day 32
# calls `dequant_matvec` on a GPU.

# %%
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from nanoserve.kernels.dispatch import DTYPES, _can_overlap, _gpu, select_backend
from nanoserve.kernels.sizes import next_power_of_2


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dequant_matvec.py: GROUP, MOST_ROWS, MatvecLaunch, FEW_ROWS and 11 more
GROUP = 32  # numbers that share a scale and a minimum
MOST_ROWS = 16


@dataclass(frozen=True)
class MatvecLaunch:
    """The launch parameters of a product with a weight in four bits.

    out: rows of the weight in one iteration, or one program; num_warps of 32 threads compute them.
    programs: at most so many for each multiprocessor; 0: as many as there is work for. words:
    those of one iteration of dequant_rows_kernel.
    """

    out: int
    num_warps: int
    programs: int = 0
    words: int = 0


# By compute capability and the largest `in`. The comments give what was measured on an H200 (9.0)
# in bfloat16, one row. The launches of 7.5 were compiled, not measured.
FEW_ROWS = {
    ((7, 5), 2_048): MatvecLaunch(4, 4, programs=4),
    ((7, 5), 16_384): MatvecLaunch(1, 8, programs=4),
    ((7, 5), 1 << 30): MatvecLaunch(1, 16, programs=2),
    ((9, 0), 2_048): MatvecLaunch(4, 4, programs=4),  # 16,384 x 2,048: 9.2 µs; 6 programs: 12.0
    ((9, 0), 16_384): MatvecLaunch(1, 8, programs=4),  # 2,048 x 8,192: 6.0 µs; 4 warps: 6.2
    ((9, 0), 1 << 30): MatvecLaunch(1, 16, programs=2),
}
# 16,384 x 2,048 with 5 to 16 rows: 47 to 49 µs; 4 warps and 64 words: 62.
MANY_ROWS = {(7, 5): MatvecLaunch(16, 1, words=32)}
FEW = 4  # up to so many rows, the product row by row was faster


def dequant_matvec(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """x [rows, in] times a weight [out, in] in four bits -> [rows, out], for 1 to 16 rows.

    The weight is as this file's first lines say; x may have any strides. The backend is that of
    select_backend for x's device. Raises ValueError as check_matvec and select_backend do.
    """
    check_matvec(x, numbers, scales, minimums)
    backend = select_backend(x.device)
    if backend == "triton":
        return dequant_matvec_triton(x, numbers, scales, minimums)
    if backend == "tlsim":
        return dequant_matvec_tlsim(x, numbers, scales, minimums)
    return dequant_matvec_reference(x, numbers, scales, minimums)


def check_matvec(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> None:
    """Raise a ValueError that names the argument if a kernel would compute a wrong result."""
    if x.dim() != 2 or not 1 <= len(x) <= MOST_ROWS:
        raise ValueError(f"x must be [rows, in] with 1 to {MOST_ROWS} rows, got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    width = x.shape[1]
    if width == 0 or width % GROUP:
        raise ValueError(f"x's `in` must be a multiple of {GROUP}, got {width}")
    if numbers.dtype != torch.uint8 or numbers.dim() != 2 or numbers.shape[1] != width // 2:
        raise ValueError(
            f"numbers must be uint8 [out, {width // 2}] as x has {width} columns, got "
            f"{numbers.dtype} {list(numbers.shape)}"
        )
    shape = (len(numbers), width // GROUP)
    for name, part in (("scales", scales), ("minimums", minimums)):
        if part.dtype != torch.bfloat16 or part.shape != shape:
            raise ValueError(
                f"{name} must be bfloat16 {list(shape)}, got {part.dtype} {list(part.shape)}"
            )
    for name, part in (("numbers", numbers), ("scales", scales), ("minimums", minimums)):
        if part.device != x.device:
            raise ValueError(f"{name} is on {part.device}, but x is on {x.device}")
        if not part.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(part.stride())}")
    if numbers.storage_offset() % 4:
        raise ValueError("numbers must begin at a multiple of 4 bytes: kernels read 4 at a time")


def dequant_matvec_reference(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """The oracle: dequantise the whole weight in float32, multiply, and round to x's dtype."""
    return (x.float() @ dequantize(numbers, scales, minimums).T).to(x.dtype)


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """The values of a weight in four bits: float32 [out, in]."""
    bits = torch.stack([numbers & 15, numbers >> 4], dim=-1)  # [out, in / 2, 2]
    groups = bits.view(*scales.shape, GROUP).float()
    return (groups * scales.float()[..., None] + minimums.float()[..., None]).flatten(1)


def launch_matvec(
    kernels: object,
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    launch: MatvecLaunch,
    multiprocessors: int = 0,
    overlap: bool = False,
) -> torch.Tensor:
    """Launch dequant_matvec_kernel, or dequant_rows_kernel if `launch` has words.

    `kernels` has the two under these names, jitted by Triton or by tlsim. `overlap` starts the next
    kernel early, which needs compute capability 9.0. Other arguments and result as for
    dequant_matvec.
    """
    (rows, width), num_out = x.shape, len(numbers)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(rows, num_out, dtype=x.dtype, device=x.device)
    arguments = (x, numbers.view(torch.int32), scales, minimums, y, num_out, x.stride(0))
    tiles = -(-num_out // launch.out)
    sizes = {"IN": width, "OUT": launch.out, "num_warps": launch.num_warps}
    if launch.words:
        kernels.dequant_rows_kernel[(tiles,)](
            *arguments, rows, ROWS=MOST_ROWS, WORDS=launch.words, **sizes
        )
        return y
    programs = min(tiles, launch.programs * multiprocessors or tiles)
    pdl = {"launch_pdl": True} if overlap else {}
    kernels.dequant_matvec_kernel[(programs, rows)](
        *arguments, GROUPS=next_power_of_2(width // 32), OVERLAP=overlap, **sizes, **pdl
    )
    return y


def matvec_launch(rows: int, width: int, capability: tuple[int, int]) -> MatvecLaunch:
    """The launch parameters for x [rows, width] on a GPU of a compute capability.

    The row is the newest that is not newer than the GPU, and of these the narrowest that is wide
    enough.
    """
    if rows > FEW:
        return MANY_ROWS[max(since for since in MANY_ROWS if since <= capability)]
    fits = [(since, -widest) for since, widest in FEW_ROWS if since <= capability]
    since, widest = max((since, widest) for since, widest in fits if width <= -widest)
    return FEW_ROWS[since, -widest]


def dequant_matvec_triton(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """The kernels by Triton: compiled, or interpreted. Arguments as for dequant_matvec."""
    capability, multiprocessors = _gpu(x.device)
    launch = matvec_launch(*x.shape, capability)
    overlap = capability >= (9, 0) and _can_overlap()
    with torch.cuda.device_of(x):
        return launch_matvec(
            _compiled_kernels(), x, numbers, scales, minimums, launch, multiprocessors, overlap
        )


def dequant_matvec_tlsim(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """The kernels under tlsim, without tlsim's checks. Arguments as for dequant_matvec."""
    words = min(64, max(16, next_power_of_2(x.shape[1] // 8))) if len(x) > FEW else 0
    with tlsim.options(checks=False, wave=32):
        return launch_matvec(
            _simulated_kernels(), x, numbers, scales, minimums, MatvecLaunch(16, 1, words=words)
        )


NAMES = ("dequant_matvec_kernel", "dequant_rows_kernel")


@cache
def _compiled_kernels() -> SimpleNamespace:
    return SimpleNamespace(**{name: globals()[name] for name in NAMES})


@cache
def _simulated_kernels() -> SimpleNamespace:
    """The kernels under tlsim, which reads their source once."""
    return SimpleNamespace(**{name: tlsim.jit(globals()[name]) for name in NAMES})


# %% [markdown]
# ## Prove it: 1 to 16 rows, odd shapes
#
# From here on, weights whose rows are no multiple of a tile, and rows of `x` that lie apart in memory.

# %%
for num_out, width in ((17, 96), (40, 256), (3, 1_024)):
    other = quantize(torch.randn(num_out, width, generator=random))
    fields, dense = (other.numbers, other.scales, other.minimums), other.dequantize(torch.float32)
    for rows in (1, 2, 5, 16):
        x = torch.randn(2 * rows, width, generator=random)[::2]
        assert right(dequant_matvec(x, *fields), x, dense)
    print(f"{num_out:3} x {width:5}, 1, 2, 5 and 16 rows: as the dequantised product")

# %% [markdown]
# And in bfloat16, where the result is rounded once:

# %%
x = torch.randn(1, 256, generator=random).bfloat16()
y = dequant_matvec(x, *parts)
print(y.dtype, right(y.float(), x.float(), tolerance=torch.finfo(torch.bfloat16).eps))
assert right(y.float(), x.float(), tolerance=torch.finfo(torch.bfloat16).eps)

# %% [markdown]
# ## Measure it
#
# The benchmark runs every variant on the five shapes of Llama-3.2-1B, checks each against the dequantised product, and
# goes through several weights, so that the L2 cache does not hold them.

# %%
import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.machine import DATA, machine, save_run
from nanoserve.bench.roofline import _burst, _time_bursts, read_bandwidth
from nanoserve.bench.runner import ROTATED, device_clock
from nanoserve.bench.timing import Clock
from nanoserve.kernels import dequant_matvec as q4


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/matvec.py: Product, draw_product, by_bytes, by_groups, by_bits and 8 more
class Product(NamedTuple):
    """The inputs of a product: a row, a weight in four bits, and the same weight dequantised."""

    x: torch.Tensor  # [1, in]
    numbers: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    weight: torch.Tensor  # [out, in]

    @property
    def q4(self) -> tuple[torch.Tensor, ...]:
        """The arguments of dequant_matvec."""
        return self[:4]


def draw_product(
    num_out: int, width: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Product:
    """Random numbers, scales and minimums, for values near 0.1 on both sides of 0."""
    drawn = torch.Generator(device).manual_seed(seed)
    options = {"device": device, "generator": drawn}
    numbers = torch.randint(0, 256, (num_out, width // 2), dtype=torch.uint8, **options)
    scales = (0.01 + 0.01 * torch.rand(num_out, width // 32, **options)).bfloat16()
    minimums = -7.5 * scales
    x = torch.randn(1, width, **options).to(dtype)
    weight = q4.dequantize(numbers, scales, minimums).to(dtype)
    return Product(x, numbers, scales, minimums, weight)


def by_bytes(product: Product) -> torch.Tensor:
    """The product by the first step's kernel."""
    x, numbers, scales, minimums = product.q4
    y = torch.empty(1, len(numbers), dtype=x.dtype, device=x.device)
    sizes = {"IN": x.shape[1], "OUT": 1, "BYTES": 1_024, "num_warps": 4}
    by_bytes_kernel[(len(numbers),)](x, numbers, scales, minimums, y, len(numbers), **sizes)
    return y


def by_groups(product: Product) -> torch.Tensor:
    """The product by the second step's kernel."""
    x, numbers, scales, minimums = product.q4
    y = torch.empty(1, len(numbers), dtype=x.dtype, device=x.device)
    groups, words = triton.next_power_of_2(x.shape[1] // 32), numbers.view(torch.int32)
    sizes = {"IN": x.shape[1], "OUT": 4, "GROUPS": groups, "num_warps": max(1, groups // 32)}
    programs = triton.cdiv(len(numbers), 4)
    by_groups_kernel[(programs,)](x, words, scales, minimums, y, len(numbers), **sizes)
    return y


def by_bits(product: Product) -> torch.Tensor:
    """The product by the engine's kernel with a plain launch: a program for every four results."""
    groups = triton.next_power_of_2(product.x.shape[1] // 32)
    launch = q4.MatvecLaunch(4, max(1, groups // 32))
    return q4.launch_matvec(q4._compiled_kernels(), *product.q4, launch)


Path4 = Callable[[Product], torch.Tensor]


def matvec_paths(device: torch.device) -> dict[str, Path4]:
    """The variants: F.linear, the three steps where Triton compiles, and the engine's product."""
    compiled = device.type == "cuda" and select_backend(device) == "triton"
    steps = {"bytes": by_bytes, "groups": by_groups, "bits": by_bits} if compiled else {}
    linear = {"linear": lambda product: F.linear(product.x, product.weight)}
    return linear | steps | {"q4": lambda product: q4.dequant_matvec(*product.q4)}


def check_product(name: str, path: Path4, product: Product) -> None:
    """Raise WrongAnswer if a variant is not as near the float32 product as its dtype allows."""
    expected = product.x.float() @ product.weight.float().T
    apart = (path(product).float() - expected).norm() / expected.norm()
    if not apart < 1e-5 + torch.finfo(product.x.dtype).eps:
        raise WrongAnswer(f"{name} is {float(apart):.1e} from the dequantised product")


@dataclass(frozen=True)
class MatvecRow:
    """One variant on one shape: the median seconds of a product, and the bytes of its weight."""

    out: int
    width: int
    path: str
    bytes: int
    seconds: float


def time_product(
    num_out: int,
    width: int,
    paths: Mapping[str, Path4],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 9,
    clock: Clock | None = None,
) -> list[MatvecRow]:
    """Check every variant; then time them in turns, by a CUDA graph on a GPU.

    The variants go through several weights, so that ROTATED bytes in four bits are read before a
    weight is read again: then it has left the cache.
    """
    small = q4_bytes(num_out, width)
    copies = max(2, -(-ROTATED // small)) if device.type == "cuda" else 2
    products = [draw_product(num_out, width, dtype, device, seed) for seed in range(copies)]
    for name, path in paths.items():
        check_product(name, path, products[0])
    bursts = {
        name: _burst([partial(path, product) for product in products], device, clock)
        for name, path in paths.items()
    }
    moved = dict.fromkeys(paths, small) | {"linear": num_out * width * dtype.itemsize}
    times = _time_bursts(bursts, rounds, clock)
    return [MatvecRow(num_out, width, name, moved[name], times[name]) for name in paths]


@dataclass(frozen=True)
class MatvecRun:
    """A whole run: the machine, its peak bandwidth, and the rows of all shapes and variants."""

    machine: dict[str, object]  # as bench.machine describes it
    command: str
    dtype: str
    read: float  # bytes per second, read_bandwidth
    rows: list[MatvecRow] = field(default_factory=list)

    def save(self, folder: Path = DATA) -> Path:
        """Write the run as matvec_<device>.json. Raises ValueError for a missing folder."""
        own = asdict(self)
        return save_run(own.pop("machine") | own, "matvec", folder)

    def line(self, row: MatvecRow) -> str:
        """A row as text: its time, its share of the peak bandwidth, its speed beside F.linear."""
        linear = next(r for r in self.rows if (r.out, r.width) == (row.out, row.width))
        return (
            f"{row.out:>7,} x {row.width:<5,} {row.path:<7} {row.seconds * 1e6:9.2f} µs, "
            f"{row.bytes / row.seconds / self.read:6.1%} of the bandwidth, "
            f"{linear.seconds / row.seconds:5.2f} of F.linear's speed"
        )


def measure(
    device: str | None = None,
    rounds: int = 9,
    command: str = "",
    show: Callable[[str], object] = lambda line: None,
) -> MatvecRun:
    """Time every variant on the products of Llama-3.2-1B; on a CPU, on smaller ones in float32.

    device: a GPU if there is one, else the CPU. `show` is called with each line of text. Raises
    ValueError for another device and for rounds below 1.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} cannot be timed; supported: cpu, cuda")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    gpu, dtype = where.type == "cuda", torch.float32
    if gpu:
        old = torch.cuda.get_device_capability(where) < (8, 0)
        dtype = torch.float16 if old else torch.bfloat16
    clock, paths = device_clock(where), matvec_paths(where)
    run = MatvecRun(
        machine(where), command, str(dtype).removeprefix("torch."), read_bandwidth(where)
    )
    show(f"{run.machine['device']} reads {run.read / 1e9:.1f} GB/s; {run.dtype}")
    for num_out, width in SHAPES:
        shape = (num_out, width) if gpu else (num_out // 8, width // 8)
        run.rows.extend(time_product(*shape, paths, dtype, where, rounds, clock))
        for row in run.rows[-len(paths) :]:
            show(run.line(row))
        if gpu:
            torch.cuda.empty_cache()  # the weights of the next shape need the memory
    return replace(run, read=max(run.read, read_bandwidth(where)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of this file. It needs no third-party package but torch."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="nanoserve.bench.matvec",
        description="Time products with weights in four bits, beside F.linear.",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each variant")
    parser.add_argument("--record", action="store_true", help=f"write {DATA}/matvec_DEVICE.json")
    options = parser.parse_args(arguments)
    command = " ".join(["python -m nanoserve.bench.matvec", *arguments])
    try:
        run = measure(options.device, options.rounds, command, print)
        if options.record:
            print(f"recorded in {run.save(DATA).as_posix()}")
    except (ValueError, RuntimeError, AssertionError) as error:  # from torch, without a GPU
        parser.exit(2, f"{parser.prog}: {error}\n")


# %% [markdown]
# The recorded run, on an H200 with one row in bfloat16. Each step's share of the peak bandwidth is that of its own bytes;
# `linear` reads bfloat16. Before you look:

# %%
today.predict(
    "share",
    "The first kernel (a byte a lane) on 16,384 x 2,048: percent of the peak bandwidth?",
    guess=None,
    low=0,
    high=100,
)

# %%
recorded = today.data("matvec_h200")
times = {(row["out"], row["width"], row["path"]): row for row in recorded["rows"]}
paths = {"bytes": "1 a byte a lane", "groups": "2 a group a thread", "bits": "3 bits as floats"}
paths |= {"q4": "4 tuned", "linear": "bfloat16"}
shares, gains = {}, {}
print(f"{recorded['device']}, {recorded['dtype']}, reads {recorded['read'] / 1e12:.2f} TB/s")
print(f"{'share of the bandwidth':18}", *(f"{name:>20}" for name in paths.values()))
for shape in SHAPES:
    for path in paths:
        found = times[*shape, path]
        shares[shape, path] = found["bytes"] / found["seconds"] / recorded["read"]
        gains[shape, path] = times[*shape, "linear"]["seconds"] / found["seconds"]
    cells = (f"{shares[shape, path]:11.1%} ({gains[shape, path]:.2f}x)" for path in paths)
    print(f"{shape[0]:9,} x {shape[1]:<7,}", *(f"{cell:>20}" for cell in cells))
for shape in SHAPES:
    assert gains[shape, "groups"] < gains[shape, "bits"] < gains[shape, "q4"] < 3.2
    assert gains[shape, "q4"] > 1.6
large = [shape for shape in SHAPES if shape[0] * shape[1] > 2**24]
assert all(gains[shape, path] < 1 for shape in large for path in ("bytes", "groups"))
assert all(shares[shape, "q4"] < shares[shape, "linear"] for shape in SHAPES)

# %% tags=["nbval-ignore-output"]
print(
    f"the first kernel: {shares[SHAPES[2], 'bytes']:.0%}; you predicted", today.guess_text("share")
)
print(f"the head: {gains[SHAPES[4], 'q4']:.2f} times; you predicted", today.guess_text("speed-up"))

# %% jupyter={"source_hidden": true}
# Draws the plot: share of the read bandwidth, step by step
from nanoserve.course.plots import COLOURS, figure

fig, ax = figure(
    height=4.6,
    xlabel="share of the read bandwidth measured in this run, %",
    title=f"One row on an {recorded['device'].removeprefix('NVIDIA ')}, recorded",
)
looks = {"bytes": ("muted", 0.55), "groups": ("muted", 1), "bits": ("engine", 1)}
looks |= {"q4": ("triton", 1), "linear": ("contiguous", 1)}
for y_at, shape in enumerate(reversed(SHAPES)):
    for i, (path, (colour, alpha)) in enumerate(looks.items()):
        share = 100 * shares[shape, path]
        at = y_at + 0.32 - 0.16 * i
        ax.barh(at, share, height=0.15, color=COLOURS[colour], alpha=alpha)
        name = f"   {paths[path]}" if y_at == len(SHAPES) - 1 else ""
        inside = share > 90
        ax.text(
            share + (-1 if inside else 1),
            at,
            f"{share:.0f}{name}",
            va="center",
            ha="right" if inside else "left",
            fontsize=8,
        )
ax.axvline(100, color=COLOURS["limit"], linewidth=1.5)
ax.set(yticks=range(len(SHAPES)), xlim=(0, 101), ylim=(-0.6, len(SHAPES) - 0.4))
ax.set_yticklabels([f"{out:,} x {width:,}" for out, width in reversed(SHAPES)])
ax.grid(axis="y", visible=False)
fig

# %% [markdown]
# **The honest reading.** A share of the bandwidth is not a speed: bfloat16 reads 3.2 times the bytes, so it may have the
# larger share and still take longer. The numbers in brackets are the speeds.
#
# - On the large shapes the first two kernels are **slower** than bfloat16, with a third of its bytes. So bytes are not
#   what limits them. The second loads less and gains little there: its conversions are those of the first, and each
#   thread loads its 32 numbers of `x` one by one.
# - The third is faster than the second on every shape. It has several changes at once, and this run does not show how
#   much each of them gains.
# - The last step changes no instruction of the sum. It has fewer programs with more warps and more rows each, and it lets
#   a kernel start while the one before ends. It is the fastest on every shape, and at least 1.6 times as fast as bfloat16.
# - No shape reaches 3.2 times. The small ones are over in a few microseconds: to start a kernel and to wait for the first
#   bytes takes a good part of that. bfloat16 has the larger share everywhere, because its time has more bytes in it.
#
# On your own GPU, the next cell measures one shape. `nanoserve bench matvec` measures all of them.

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available() and select_backend("cuda") == "triton":
    gpu = torch.device("cuda")
    for timed in time_product(16_384, 2_048, matvec_paths(gpu), torch.float16, gpu):
        print(f"{timed.path:8} {timed.seconds * 1e6:8.2f} µs")
else:
    print("there is no GPU here: the recorded run stands for it")
assert len(recorded["rows"]) == len(SHAPES) * len(paths)

# %% [markdown]
# ## What you learned
#
# 1. **Unpack where you compute.** Four bits pay only if the memory never holds the unpacked weight.
# 2. **Take out of the sum what is shared.** Scale and minimum are applied once a group, and the sum of x serves every
#    row.
# 3. **Fewer bytes move the limit.** Once few bytes are read, instructions and latency count: a conversion, a load of two
#    bytes, the start of a kernel.
#
# ## Review of Week 8 and of Phase 3
#
# The questions are about Days 32 and 33, the last two about all of Phase 3. Answer before you unfold.

# %%
today.review()

# %% [markdown]
# ## Tomorrow
#
# One request uses each weight once per token, however few bits it has. Many requests can share the read: Day 34 runs
# the tokens of many requests through the model in one step, from one pool.
#
# **In one paragraph.** A decode step is a series of matrix-vector products, and their time is the bytes of the weights. In
# groups of 32, four bits are five with scale and minimum: 3.2 times fewer than bfloat16. The kernel loads a group a thread,
# reads the bits of each number as a subnormal float, and applies scale and minimum once a group; no unpacked weight
# is ever in memory. Under tlsim it equals the dequantised product for 1 to 16 rows, and the trace counts each byte
# once. A recorded run shows each step's share of the bandwidth beside bfloat16's product.
