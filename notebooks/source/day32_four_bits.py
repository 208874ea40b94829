# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 32 · Keep the four bits
#
# Week 8 · Phase 3, fewer bytes · you need: Day 2 (Weights are just names), Day 27 (Find the roof)
#
# **Today** you stop unpacking the model. Its file has four-bit numbers, and the engine has made 32-bit numbers of
# them since Day 2. From now on the numbers stay as they are, and a product unpacks them while it computes. A token
# then reads a sixth of the bytes.

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

today = day(32)
today.picture("four-bits")

# %% [markdown]
# ## Why it matters
#
# A decode step reads every weight once and does two operations with it. So its time is the bytes of the weights over
# the bandwidth of the memory, on a CPU as on a GPU. Week 7 made the K/V read fast. With a few hundred tokens in the
# cache the weights are nearly all of the bytes, and we read them in a format that is wider than their content.
#
# Four bits also cost something: most models are trained in 16 bits, and rounding them to 16 values per group changes
# every answer a little. Today you measure both sides, bytes and quality.

# %%
today.glossary(
    "quantisation",
    "Q4_1",
    "dequantise",
    "nibble",
    "block scale",
    "outlier",
    "round to nearest",
    "perplexity",
)

# %% [markdown]
# ## How many bytes does a token read?
#
# Here is the content of the model's file, by the kind of its tensors. A Q4_1 block has 32 weights in 20 bytes, and a
# Q8_0 block has 32 weights in 34 bytes.

# %%
from nanoserve.fetch import fetch, gguf_path
from nanoserve.gguf_file import open_gguf

fetch()
stored = {}
for tensor in open_gguf(gguf_path()).tensors:
    kind = stored.setdefault(tensor.tensor_type.name, [0, 0, 0])
    for i, value in enumerate((1, tensor.n_elements, tensor.n_bytes)):
        kind[i] += int(value)
for kind, (tensors, weights, size) in stored.items():
    print(f"{kind:5} {tensors:4} tensors {weights / 1e6:6.1f} million weights {size / 1e6:6.1f} MB")

# %% [markdown]
# In float32 every weight has four bytes. How many times as many bytes does a token read in float32 as the file has?

# %%
today.predict("ratio", "Bytes in float32 over bytes in the file?", guess=None, low=0)

# %%
weights = sum(weights for _, weights, _ in stored.values())
in_file = sum(size for _, _, size in stored.values())
for name, size in {"float32": 4 * weights, "bfloat16": 2 * weights, "the file": in_file}.items():
    print(f"{name:9} {size / 1e6:6.1f} MB a token, {size / weights:.2f} bytes a weight")
print(
    f"float32 over the file: {4 * weights / in_file:.1f}; you predicted:", today.guess_text("ratio")
)
assert 5 < 4 * weights / in_file < 6

# %% [markdown]
# Not 8: a scale and a minimum for each 32 weights are one more bit per weight, and the embedding, which is also the
# head, has 8 bits and a scale.
#
# ## Your turn: `pack_nibbles`
#
# Half a byte is a **nibble**. PyTorch has no type for it, so two numbers share a `uint8`:
#
# $$ \text{byte}_j = \text{number}_{2j} + 16 \cdot \text{number}_{2j+1} $$
#
# In bits: the first number of a pair is in the low four bits, the second in the high four. `numbers` is uint8
# `[..., n]`, each 0 to 15, and `n` is even. Return uint8 `[..., n / 2]`. Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
import torch


# %%
def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15, two to a byte, the first in the low bits: uint8 [..., n] -> [..., n / 2]."""
    raise NotImplementedError("your turn")


today.check(pack_nibbles)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. `unpack_nibbles` undoes it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/quant.py: GROUP, pack_nibbles, unpack_nibbles
GROUP = 32


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15, two to a byte, the first in the low bits: uint8 [..., n] -> [..., n / 2]."""
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo pack_nibbles: uint8 [..., n] -> [..., 2 * n], each 0 to 15."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


# %%
numbers = torch.tensor([[3, 10, 15, 0, 7, 8]], dtype=torch.uint8)
packed = pack_nibbles(numbers)
print([f"0x{byte:02X}" for byte in packed[0].tolist()], unpack_nibbles(packed).tolist())
assert torch.equal(unpack_nibbles(packed), numbers)

# %% [markdown]
# ## A weight that stays packed
#
# `Q4Weight` takes the place of a tensor `[out, in]`. It has three tensors:
#
# | field | shape | meaning |
# | --- | --- | --- |
# | `numbers` | uint8 `[out, in / 2]` | two numbers in each byte, in the order of the row |
# | `scales` | bfloat16 `[out, in / 32]` | the step of each group |
# | `minimums` | bfloat16 `[out, in / 32]` | the value of number 0 in each group |
#
# `dequantize` gives all values, and `rows` the values of some rows, which is what an embedding needs. A Q4_1 block has
# the same content in another order: its 16 bytes hold numbers 0 to 15 in the low bits and numbers 16 to 31 in the high
# bits. `from_q4_blocks` puts the numbers in our order and changes none. Only scale and minimum change: the file has
# them in float16, and PyTorch's product needs bfloat16.

# %%
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch.nn.functional as F


# %% jupyter={"source_hidden": true}
# lands in nanoserve/quant.py: Q4Weight, Weight, _values, concatenate, from_q4_blocks
class Q4Weight:
    """A weight [out, in] as 4-bit numbers: value = number * scale + minimum.

    numbers uint8 [out, in / 2]; scales and minimums bfloat16 [out, groups]. A weight of 8 bits has
    two parts, each [out, in] in four bits, side by side in each row; its value is their sum.
    """

    def __init__(
        self, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, parts: int = 1
    ) -> None:
        self.numbers, self.scales, self.minimums = numbers, scales, minimums
        self.parts = parts
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        """[out, in], as of the weight before it was quantised."""
        return torch.Size([len(self.numbers), 2 * self.numbers.shape[1] // self.parts])

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, scales and minimums: what a product of one row reads."""
        return sum(t.nbytes for t in (self.numbers, self.scales, self.minimums))

    def __len__(self) -> int:
        return len(self.numbers)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Q4Weight":
        """The same change of rows or of device for numbers, scales and minimums; not packed."""
        tensors = (change(t) for t in (self.numbers, self.scales, self.minimums))
        return Q4Weight(*tensors, self.parts)

    def to(self, device: str | torch.device) -> "Q4Weight":
        """The same weight on a device."""
        return self.map(lambda t: t.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, [out, in]."""
        return _values(self.numbers, self.scales, self.minimums, self.parts, dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of the rows with these ids: ids [...] -> [..., in]."""
        chosen = (t[ids.flatten()] for t in (self.numbers, self.scales, self.minimums))
        return _values(*chosen, self.parts, dtype).view(*ids.shape, -1)

    def equal(self, other: "Q4Weight") -> bool:
        """Whether all numbers, scales and minimums are equal."""
        return (
            self.numbers.equal(other.numbers)
            and self.scales.equal(other.scales)
            and self.minimums.equal(other.minimums)
        )

    def split(self, sizes: Sequence[int]) -> list["Q4Weight"]:
        """Consecutive rows, as views of this weight."""
        fields = (self.numbers, self.scales, self.minimums)
        pieces = zip(*(t.split(sizes) for t in fields), strict=True)
        return [Q4Weight(*tensors, self.parts) for tensors in pieces]

    def pack(self) -> None:
        """On a CPU, make the form that its product reads; its layout depends on the processor."""
        on_cpu = self.device.type == "cpu"
        if on_cpu and self.packed is None and why_not(self.shape, self.device) is None:
            self.packed = pack_for_cpu(self.numbers, self.scales, self.minimums)


Weight = torch.Tensor | Q4Weight


def _values(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    parts: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """number * scale + minimum, summed over the parts: [rows, in] in `dtype`."""
    wide = dtype if parts == 1 else torch.float32  # the sum of two parts is rounded once
    groups = unpack_nibbles(numbers).unflatten(1, (-1, GROUP))  # [rows, parts * groups, 32]
    values = groups * scales.to(wide)[..., None]
    values = values.add_(minimums.to(wide)[..., None]).view(len(numbers), parts, -1)
    return (values[:, 0] if parts == 1 else values.sum(1)).to(dtype)


def concatenate(weights: Sequence[Q4Weight]) -> Q4Weight:
    """The rows of several weights of the same `in` and parts, one after the other."""
    fields = ("numbers", "scales", "minimums")
    tensors = (torch.cat([getattr(w, field) for w in weights]) for field in fields)
    return Q4Weight(*tensors, weights[0].parts)


def from_q4_blocks(blocks: torch.Tensor, kind: str) -> Q4Weight:
    """GGUF's Q4_1 or Q4_0 blocks, uint8 [out, bytes of a row], as they are.

    Q4_1 (20 bytes): float16 scale d and minimum m, then 16 bytes; the low bits of the 16 bytes are
    numbers 0 to 15, the high bits numbers 16 to 31. Q4_0 (18 bytes) has no m; it is -8 * d.
    """
    header = {"Q4_1": 4, "Q4_0": 2}[kind]
    blocks = blocks.unflatten(1, (-1, header + GROUP // 2))  # [out, groups, bytes of a block]
    halves = blocks[..., header:].contiguous()
    pairs = [pack_nibbles(halves & 0xF), pack_nibbles(halves >> 4)]  # each [out, groups, 8]
    numbers = torch.cat(pairs, dim=-1).flatten(1)
    floats = blocks[..., :header].contiguous().view(torch.float16)  # [out, groups, 2 or 1]
    scales = floats[..., 0].bfloat16()
    minimums = floats[..., 1].bfloat16() if kind == "Q4_1" else -8 * scales
    return Q4Weight(numbers, scales, minimums)


# %% [markdown]
# `parts` and `packed` come later today. Now take a matrix of the file and compare it with Day 2's float32 values.

# %%
from nanoserve.weights import dequantize

tensor = next(t for t in open_gguf(gguf_path()).tensors if t.name == "blk.0.ffn_gate.weight")
blocks = torch.from_numpy(np.array(tensor.data))  # uint8 [out, bytes of a row]
kept, values = from_q4_blocks(blocks, "Q4_1"), dequantize(tensor)
header = blocks.view(len(blocks), -1, 20)[..., :4].contiguous().view(torch.float16)
print(list(kept.shape), "numbers", list(kept.numbers.shape), "scales", list(kept.scales.shape))
print(f"{values.nbytes / 1e6:.2f} MB in float32, {kept.nbytes / 1e6:.2f} MB kept")
assert torch.equal(kept.scales, header[..., 0].bfloat16())
assert torch.equal(kept.minimums, header[..., 1].bfloat16())

# %% [markdown]
# How far are the values from the file's? Rounding to bfloat16 changes a number by a 256th of it at most, so the error of
# a value is at most `(15 * scale + |minimum|) / 256`. And with the file's own scale and minimum, the kept numbers give
# the file's values exactly:

# %%
scale, minimum = header.float().unbind(-1)
bound = (15 * scale.abs() + minimum.abs()) / 256
error = (kept.dequantize() - values).abs().unflatten(1, (-1, GROUP)).amax(-1)
groups = unpack_nibbles(kept.numbers).unflatten(1, (-1, GROUP))
exact = torch.equal((scale[..., None] * groups + minimum[..., None]).flatten(1), values)
share = float((kept.dequantize() - values).norm() / values.norm())
print(
    f"within the bound: {bool((error <= 1.001 * bound).all())}; exact with float16 scales: {exact}"
)
print(
    f"error: {share:.2%} of the weights' size; one step of a group is {float((scale / values.std()).mean()):.0%}"
)
assert (error <= 1.001 * bound).all() and exact

# %% [markdown]
# ## Your turn: `round_to_nearest`
#
# A checkpoint in 16 bits has no four-bit numbers. Then we must make them: **round to nearest**. For each group of 32
# neighbours of a row:
#
# $$ \text{scale} = \frac{\max - \min}{15} \qquad \text{minimum} = \min \qquad
# \text{number} = \text{round}\left(\frac{w - \text{minimum}}{\text{scale}}\right) $$
#
# Round scale and minimum to bfloat16 **first**, and compute the numbers with the rounded ones: the product will use
# those. Two details follow. A rounded minimum can lie above a weight of the group, so limit the numbers to 0 to 15. And
# a group of equal numbers has scale 0: its numbers may be anything from 0 to 15, but no NaN may reach them.
#
# `weight` is float32 `[out, in]`. Return `(numbers, scales, minimums)`: uint8 `[out, in]`, not packed, and two
# bfloat16 `[out, in / 32]`. `weight.unflatten(1, (-1, 32))` has the shape `[out, groups, 32]`.


# %%
def round_to_nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest numbers 0 to 15, with scale (maximum - minimum) / 15 and minimum per group."""
    raise NotImplementedError("your turn")


today.check(round_to_nearest)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. `quantize` rounds a whole weight, some
# rows at a time.
#
# It can also keep **eight bits**, and needs no second format for them. An integer from -128 to 127, plus 128, is
# `16 * high + low` with two nibbles. So a weight of eight bits is the **sum of two weights of four bits**, one with 16
# times the scale. Both lie side by side in a row, and the product takes `x` twice: `[x, x] @ [high, low].T`.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/quant.py: SMALLEST, quantize, round_to_nearest, two_parts, from_q8_blocks
SMALLEST = torch.finfo(torch.float32).tiny  # a divisor in place of a scale of 0


def quantize(weight: torch.Tensor, bits: int = 4) -> Q4Weight:
    """Round a weight [out, in] to the nearest numbers in groups of 32 along `in`.

    With 4 bits, a group's minimum is number 0 and its maximum number 15. With 8 bits, number 128 is
    0 and the largest magnitude is 127 steps from it, as in GGUF's Q8_0. Raises ValueError for
    another number of bits, and for rows that are no multiple of 32.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"a weight must be [out, multiple of {GROUP}], got {list(weight.shape)}")
    rows = max(1, (1 << 20) // weight.shape[1])  # at a time: less memory, and it stays in the cache
    round_rows = _four_bits if bits == 4 else _eight_bits
    return concatenate([round_rows(part) for part in weight.split(rows)])


def round_to_nearest(
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest numbers 0 to 15, with scale (maximum - minimum) / 15 and minimum per group.

    weight float32 [out, in] -> numbers uint8 [out, in]; scales, minimums bfloat16 [out, groups].
    """
    groups = weight.unflatten(1, (-1, GROUP))
    lowest, highest = groups.aminmax(dim=-1)
    scales, minimums = ((highest - lowest) / 15).bfloat16(), lowest.bfloat16()
    steps = (groups - minimums[..., None]) / scales.clamp_min(SMALLEST)[..., None]
    numbers = steps.round_().clamp_(0, 15)
    return numbers.to(torch.uint8).flatten(1), scales, minimums


def _four_bits(weight: torch.Tensor) -> Q4Weight:
    numbers, scales, minimums = round_to_nearest(weight.float())
    return Q4Weight(pack_nibbles(numbers), scales, minimums)


def _eight_bits(weight: torch.Tensor) -> Q4Weight:
    """value = scale * integer, with scale = largest magnitude / 127 per group."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127).bfloat16()
    integers = (groups / scales.clamp_min(SMALLEST)[..., None]).round_().clamp_(-128, 127)
    return two_parts(integers.flatten(1), scales)


def two_parts(integers: torch.Tensor, scales: torch.Tensor) -> Q4Weight:
    """scale * integer in two parts of four bits: integers -128 to 127 [out, in].

    integer + 128 = 16 * high + low. So the value is the sum of 16 * scale * high - 128 * scale and
    scale * low.
    """
    numbers = (integers + 128).to(torch.uint8)
    halves = [pack_nibbles(numbers >> 4), pack_nibbles(numbers & 0xF)]
    return Q4Weight(
        torch.cat(halves, 1),
        torch.cat([16 * scales, scales], 1),  # times a power of two: exact in bfloat16
        torch.cat([-128 * scales, torch.zeros_like(scales)], 1),
        parts=2,
    )


def from_q8_blocks(blocks: torch.Tensor) -> Q4Weight:
    """GGUF's Q8_0 blocks, uint8 [out, bytes of a row], in two parts.

    A block is 34 bytes: a float16 scale and 32 integers, -128 to 127.
    """
    blocks = blocks.unflatten(1, (-1, 2 + GROUP))
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].bfloat16()
    integers = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return two_parts(integers.short(), scales)


# %%
generator = torch.Generator().manual_seed(32)
weight = torch.randn(256, 512, generator=generator)
for bits in (4, 8):
    rounded = quantize(weight, bits)
    error = float((rounded.dequantize() - weight).norm() / weight.norm())
    print(f"{bits} bits: {rounded.nbytes / weight.numel():.3f} bytes a weight, error {error:.2%}")

# %% [markdown]
# ## What one outlier does to its group
#
# 32 numbers share one step. If one of them is far larger than the others, an **outlier**, the step grows with it, and
# the other 31 are rounded to a coarser grid. Take 31 normal numbers of size 1 and one outlier of size 16. How large is
# the error of the 31, as a share of their size?

# %%
today.predict("outlier", "Error of the 31 others, in percent?", guess=None, low=0, high=100)


# %%
def error_of_others(outlier: float, size: int = 32) -> float:
    """The error of all numbers but the first of each group, as a share of their size."""
    groups = torch.randn(4096, size, generator=torch.Generator().manual_seed(1))
    groups[:, 0] = outlier
    numbers, scales, minimums = round_to_nearest(groups)
    back = (numbers * scales.float() + minimums.float())[:, 1:]
    return float((back - groups[:, 1:]).norm() / groups[:, 1:].norm())


outliers = (1, 2, 4, 8, 16, 32, 64)
others = [error_of_others(outlier) for outlier in outliers]
print({outlier: f"{error:.0%}" for outlier, error in zip(outliers, others)})
print("with an outlier of 16, you predicted:", today.guess_text("outlier"), "%")
assert others[0] < others[4] < others[6]

# %% [markdown]
# Now the layers of the model. Its weights were rounded before, in groups of 32, so rounding them again in the same
# groups changes almost nothing. Other groups show what rounding costs: groups of 64, and one group for a whole row.

# %%
from nanoserve.model import load_model

model = load_model("smollm2")


def error_of_layer(layer: int, size: int) -> float:
    """The error of gate_proj rounded in groups of `size`, as a share of its size."""
    weight = model.layers[layer]["mlp.gate_proj.weight"]
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    back = ((groups - low) / step).round() * step + low
    return float((back - groups).norm() / groups.norm())


errors = {size: [error_of_layer(layer, size) for layer in range(30)] for size in (32, 64, 576)}
for size, found in errors.items():
    print(
        f"groups of {size:3}: {sum(found) / 30:.1%} on average, {max(found):.1%} in the worst layer"
    )
assert sum(errors[32]) < sum(errors[64]) < sum(errors[576])

# %% jupyter={"source_hidden": true}
# Draws the plot: the error of rounding, by layer and by outlier
from nanoserve.course.plots import COLOURS, figure, label_line, log2_axis, prediction_marker

fig, (left, right) = figure(height=3.6, panels=2, ylabel="error / size of the weights (%)")
colours = (COLOURS["triton"], COLOURS["tlsim"], COLOURS["contiguous"])
for (size, found), colour in zip(errors.items(), colours):
    left.plot(range(30), [100 * error for error in found], color=colour)
    words = "a whole row" if size == 576 else f"groups of {size}"
    label_line(left, 8, 100 * found[8], words, colour, "above")
left.set(xlabel="layer (gate_proj)", ylim=(0, None))
right.plot(outliers, [100 * error for error in others], "o-", color=COLOURS["fault"])
label_line(right, 4, 100 * others[2], "the other 31", COLOURS["fault"], "above left")
prediction_marker(right, 16, today.guess("outlier"))
right.set(xlabel="outlier / size of the others")
log2_axis(right)
fig

# %% [markdown]
# The step is a fifteenth of the span, so the error grows with the outlier. A small group keeps the damage small: only 31
# weights share the outlier's step. With one group for a row, hundreds do.
#
# ## The product
#
# The product must not unpack a weight into memory first: then it would read more bytes than before. PyTorch has a product
# for CPUs that unpacks in registers: `torch._weight_int4pack_mm_for_cpu`. It has four conditions:
#
# 1. Rows of `x` are bfloat16. `q4_linear` rounds them, and returns the dtype of `x`.
# 2. It computes `scale * (number - 8) + zero`. So `zero = minimum + 8 * scale`.
# 3. The numbers are in an order of its own, which depends on the processor. `Q4Weight.pack` makes that form when a model
#    is loaded; it is never written to a file.
# 4. `in` is a multiple of 32 and `out` a multiple of 16. `why_not` says why a weight does not fit, and such a weight is
#    dequantised.
#
# With many rows, as in a prefill, the arithmetic takes longer than the reading. From 64 rows on, `q4_linear` dequantises
# the weight and multiplies as before. On a GPU, up to 16 rows go to the kernel of Day 33.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/quant.py: QUANTIZATIONS, PACK_ROWS, UNPACKED_ROWS, KERNEL_ROWS and 6 more
QUANTIZATIONS = ("q4",)
PACK_ROWS = 1024  # rows packed at a time: a multiple of every processor's block of rows
UNPACKED_ROWS = 64  # from this many rows on, the product of the dequantised weight is faster
KERNEL_ROWS = 16  # the most rows that the GPU's kernel multiplies


def check_quantization(name: str | None) -> None:
    """Raise ValueError for a quantisation that is not None or one of QUANTIZATIONS."""
    if name is not None and name not in QUANTIZATIONS:
        known = ", ".join(map(repr, QUANTIZATIONS))
        raise ValueError(f"quantization {name!r} is not supported; supported: {known}, None")


def why_not(shape: Sequence[int], device: torch.device) -> str | None:
    """The reason why a weight [out, in] cannot be multiplied in four bits here, or None."""
    out, width = shape
    if width % GROUP:
        return f"a row of {width} is no multiple of {GROUP}"
    if device.type != "cpu":
        return None
    if out % 16:
        return f"{out} rows are no multiple of 16"
    return None if has_cpu_product() else "this torch has no four-bit product for this processor"


@cache
def has_cpu_product() -> bool:
    """Whether torch has a four-bit product on this CPU."""
    try:
        numbers = torch.full((16, GROUP // 2), 0x99, dtype=torch.uint8)  # every number is 9
        ones = torch.ones(16, 1, dtype=torch.bfloat16)
        weight = pack_for_cpu(numbers, ones, -8 * ones)  # every value is 1
        x = torch.ones(1, GROUP, dtype=torch.bfloat16)
        product = torch._weight_int4pack_mm_for_cpu(x, weight[0], GROUP, weight[1])
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((product == GROUP).all())


def pack_for_cpu(
    numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers in the processor's order, and scales and zeros bfloat16 [groups, out, 2].

    PyTorch's product computes scale * (number - 8) + zero, so zero = minimum + 8 * scale.
    """
    pack = torch._convert_weight_to_int4pack_for_cpu
    packed = torch.empty_like(numbers)
    for start in range(0, len(numbers), PACK_ROWS):  # each number is an int32 while it is packed
        rows = slice(start, start + PACK_ROWS)
        packed[rows] = pack(unpack_nibbles(numbers[rows]).int(), 1)
    zeros = (minimums.float() + 8 * scales.float()).bfloat16()
    return packed, torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()


def q4_linear(x: torch.Tensor, weight: Q4Weight) -> torch.Tensor:
    """x [..., in] times a weight [out, in] in four bits -> [..., out], in x's dtype.

    On a CPU, fewer than 64 rows are rounded to bfloat16 and multiplied by PyTorch's four-bit
    product. On a GPU, 1 to 16 rows are multiplied by the kernel of nanoserve/kernels. In all other
    cases, the weight is dequantised first.
    """
    rows = x.reshape(-1, x.shape[-1])
    if weight.packed is not None and len(rows) < UNPACKED_ROWS:
        packed, scales_and_zeros = weight.packed
        rows = _for_parts(rows.bfloat16(), weight)
        product = torch._weight_int4pack_mm_for_cpu(rows, packed, GROUP, scales_and_zeros)
        product = product.to(x.dtype)
    elif weight.device.type == "cuda" and len(rows) <= KERNEL_ROWS:
        from nanoserve.kernels.dequant_matvec import dequant_matvec

        rows = _for_parts(rows, weight)
        product = dequant_matvec(rows, weight.numbers, weight.scales, weight.minimums)
    else:
        product = F.linear(rows, weight.dequantize(x.dtype))
    return product.view(*x.shape[:-1], -1)


def _for_parts(rows: torch.Tensor, weight: Q4Weight) -> torch.Tensor:
    """Each row once for each part of the weight: [rows, in] -> [rows, parts * in]."""
    return rows if weight.parts == 1 else rows.repeat(1, weight.parts)


class Q4Weight(Q4Weight):
    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] times this weight -> [..., out], by q4_linear."""
        return q4_linear(x, self)


# %%
kept.pack()
full = kept.dequantize().double()
for rows in (1, 3, 16, 200):
    x = torch.randn(rows, 576, generator=generator)
    expected = x.double() @ full.T
    error = float((q4_linear(x, kept).double() - expected).norm() / expected.norm())
    print(f"{rows:3} rows: error {error:.1e} of the product's size")
    assert error < 2**-7

# %% [markdown]
# An error of some thousandths is bfloat16's: `x` and the zeros are rounded to 8 significant bits. With 200 rows in
# float32, no bfloat16 is involved.
#
# ## Load it
#
# The loader gets the argument `quantization`, `None` or `"q4"`. A matrix of a GGUF keeps its own numbers (`keep_bits`),
# and a Llama's q and k get their rows in order as on Day 2: whole rows move, so the packed bytes can move. Any other
# checkpoint is rounded. The embedding and the head keep eight bits; you will see why.
#
# The cells below hold the package's version of weights.py, layers.py and model.py, with the package's `Q4Weight`.

# %%
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nanoserve.config import ModelConfig, UnsupportedModel, load_config
from nanoserve.fetch import resolve
from nanoserve.layers import Cache, _bfloat16_products, block, rms_norm
from nanoserve.model import Model, as_device, as_dtype
from nanoserve.q4_file import load_kept
from nanoserve.quant import (
    Q4Weight,
    Weight,
    concatenate,
    from_q4_blocks,
    from_q8_blocks,
    q4_linear,
    quantize,
)
from nanoserve.weights import (
    FLOATS,
    check_shapes,
    expected_shapes,
    hf_name,
    list_safetensors,
    unpermute,
)

# %% jupyter={"source_hidden": true}
# lands in nanoserve/weights.py: EIGHT_BITS, StoredTensor, load_weights, list_weights and 4 more
EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")  # in q4, these keep eight bits


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, and read() to load its values.

    A GGUF tensor has read_q4(bits), which loads a matrix in four or eight bits.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    read_q4: Callable[[int], Q4Weight] | None = None


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
) -> dict[str, Weight]:
    """Read a folder of safetensors, or a .gguf file, into {Hugging Face name: tensor}.

    The result always has "lm_head.weight"; a tied head is the embedding itself, in the same memory.
    With quantization "q4", matrices are Q4Weights: the embedding and the head in eight bits, the
    others in four. A matrix that cannot be multiplied in four bits is dequantised (`why_not`).
    Raises a ValueError that names the file or tensor: a file that cannot be read or is not whole; a
    tensor that is missing, surplus or of the wrong shape; a head that contradicts the config.
    """
    check_quantization(quantization)

    def load(name: str, tensor: StoredTensor) -> Weight:
        if quantization is None or len(tensor.shape) == 1 or tensor.shape[1] % GROUP:
            return tensor.read().to(device, dtype)
        weight = load_q4(name, tensor).to(device)
        return weight if why_not(weight.shape, weight.device) is None else weight.dequantize(dtype)

    weights = {name: load(name, tensor) for name, tensor in list_weights(path, config).items()}
    embedding = weights["model.embed_tokens.weight"]
    head = weights.setdefault("lm_head.weight", embedding)
    if config.tied_head and head is not embedding:
        if not head.equal(embedding):
            raise ValueError(
                "tensor lm_head.weight differs from the embedding, but tie_word_embeddings is true"
            )
        weights["lm_head.weight"] = embedding
    return weights


def list_weights(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensors of a checkpoint, after a check of their names and shapes.

    "lm_head.weight" is among them if the file has a head; without one, the head is tied.
    """
    stored = list_gguf(path, config) if path.suffix == ".gguf" else list_safetensors(path)
    expected = expected_shapes(config)
    if "lm_head.weight" in stored:
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    check_shapes(stored, expected)
    if "lm_head.weight" not in stored and not config.tied_head:
        raise ValueError("tensor lm_head.weight is missing, and tie_word_embeddings is not true")
    return stored


def load_q4(name: str, tensor: StoredTensor) -> Q4Weight:
    """A stored matrix in four bits; the embedding and the head in eight.

    These are the file's own numbers where it has them, else they are rounded to the nearest.
    """
    bits = 8 if name in EIGHT_BITS else 4
    return quantize(tensor.read(), bits) if tensor.read_q4 is None else tensor.read_q4(bits)


def list_gguf(path: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a GGUF file under their Hugging Face names, dequantised as they are read.

    Raises UnsupportedModel for a quantisation that the gguf package cannot undo.
    """
    from gguf import quants

    stored = {}
    for tensor in open_gguf(path).tensors:
        if tensor.name == "rope_freqs.weight":  # gguf_config reads it
            continue
        kind = tensor.tensor_type.name
        if kind not in FLOATS and not hasattr(quants, kind):
            raise UnsupportedModel(f"tensor {tensor.name}: quantisation {kind} is not supported")

        def read(tensor: "ReaderTensor" = tensor) -> torch.Tensor:
            heads = rotated_heads(tensor, config)
            return unpermute(dequantize(tensor), heads) if heads else dequantize(tensor)

        def read_q4(bits: int, tensor: "ReaderTensor" = tensor) -> Q4Weight:
            heads, weight = rotated_heads(tensor, config), keep_bits(tensor, bits)
            return weight.map(lambda t: unpermute(t, heads)) if heads else weight

        # GGUF lists dimensions from the innermost to the outermost.
        shape = tuple(map(int, tensor.shape[::-1]))
        stored[hf_name(tensor.name)] = StoredTensor(shape, read, read_q4)
    return stored


def rotated_heads(tensor: "ReaderTensor", config: ModelConfig) -> int | None:
    """The number of heads of a Llama's q or k, whose rows GGUF permutes; None for the others."""
    if config.family != "llama":
        return None
    return {"attn_q": config.n_q, "attn_k": config.n_kv}.get(tensor.name.split(".")[-2])


def keep_bits(tensor: "ReaderTensor", bits: int) -> Q4Weight:
    """A GGUF matrix in four or eight bits.

    Q4_0, Q4_1 and, for 8 bits, Q8_0 keep the file's own numbers. Other kinds are dequantised and
    rounded, some rows at a time.
    """
    from gguf.quants import dequantize as dequantize_any

    kind, rows = tensor.tensor_type.name, max(1, (1 << 20) // int(tensor.shape[0]))
    parts = []
    for start in range(0, len(tensor.data), rows):
        data = tensor.data[start : start + rows]
        if kind in ("Q4_0", "Q4_1"):
            parts.append(from_q4_blocks(torch.from_numpy(np.array(data)), kind))
        elif kind == "Q8_0" and bits == 8:
            parts.append(from_q8_blocks(torch.from_numpy(np.array(data))))
        else:
            values = dequantize_any(data, tensor.tensor_type)
            parts.append(quantize(torch.from_numpy(np.array(values)), bits))
    return concatenate(parts)


# %% [markdown]
# `load_kept`, in `q4_file.py`, is `load_weights` with a file in the cache folder. The first load writes the numbers, in
# the order of `Q4Weight` and not in the processor's, so that every processor can read the file. A later load maps the
# file into memory: nothing is parsed, and nothing is copied but the packed form.
#
# In the model little changes. `linear` and `embedding` leave the work to a weight that is no tensor, `join_qkv` joins packed rows, and
# `load_model` packs at the end. If a matrix does not fit, one line says so.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: PackedWeight, embedding, linear
class PackedWeight(Protocol):
    """A weight [out, in] that is no tensor, as layers use it: quant.Q4Weight is one."""

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows with these ids: ids [...] -> [..., in] in `dtype`."""
        ...

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] times the weight -> [..., out], in x's dtype."""
        ...


def embedding(
    ids: torch.Tensor, weight: torch.Tensor | PackedWeight, dtype: torch.dtype
) -> torch.Tensor:
    """The rows of weight [vocab, hidden] with these ids: ids [...] -> [..., hidden] in `dtype`."""
    if isinstance(weight, torch.Tensor):
        return F.embedding(ids, weight).to(dtype)
    return weight.rows(ids, dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., in] times weight [out, in], plus bias [out] -> [..., out].

    A packed weight multiplies by itself. With a tensor, a single row, as in a decode step, is
    multiplied by torch.mv, a matrix-vector routine. For bfloat16 on a CPU with bfloat16 products,
    F.linear is faster and is used instead.
    """
    if not isinstance(weight, torch.Tensor):
        out = weight.linear(x)
        return out if bias is None else out + bias
    if x.numel() > x.shape[-1] or (x.dtype == torch.bfloat16 and _bfloat16_products()):
        return F.linear(x, weight, bias)
    out = torch.mv(weight, x.flatten())
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


# %% jupyter={"source_hidden": true}
# until day 34: lands in nanoserve/model.py: Model.hidden
class Model(Model):
    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The final norm's output: ids [batch, seq] -> [batch, seq, hidden]; errors as __call__."""
        self._check(ids)
        start = 0 if cache is None else cache.seq_len
        cos, sin = self._rope(start, start + ids.shape[1])
        x = embedding(ids, self.weights["model.embed_tokens.weight"], self.dtype)
        for index, layer in enumerate(self.layers):
            x = block(x, layer, cos, sin, self.config, cache, index)
        return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: load_model, join_qkv, pack_weights, warn_dequantized
def load_model(
    source: str | Path = "smollm2",
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
) -> Model:
    """Load "smollm2" (fetched on first use), a folder, a .gguf file or a hub id.

    dtype: float32, bfloat16 or float16, or its name. With quantization "q4", matrices are kept in
    four bits, and dtype is that of the activations. Raises ValueError for a dtype, device or
    quantization that cannot be used, and for a checkpoint that is broken or not supported.
    """
    dtype, device = as_dtype(dtype), as_device(device)
    check_quantization(quantization)
    path = resolve(source)
    config = load_config(path)
    load = load_weights if quantization is None else load_kept
    model = Model(config, load(path, config, dtype, device))
    join_qkv(model)
    if quantization is not None:
        pack_weights(model)
        warn_dequantized(model)
    return model


def join_qkv(model: Model) -> None:
    """Give each layer "self_attn.qkv_proj.weight", the joined rows of q, k and v; likewise a bias.

    The weights of q, k and v become views of those rows, so no value is stored twice. In-place
    edits show in qkv_proj; rebinding a name does not.
    """
    for i, layer in enumerate(model.layers):
        for kind in ("weight", "bias") if model.config.qkv_bias else ("weight",):
            names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            rows = [layer[name] for name in names]
            if len({type(weight) for weight in rows}) > 1:
                continue  # a part of them is in four bits
            joined = concatenate(rows) if isinstance(rows[0], Q4Weight) else torch.cat(rows)
            views = joined.split([len(weight) for weight in rows])
            for name, view in zip(names, views, strict=True):
                layer[name] = model.weights[f"model.layers.{i}.{name}"] = view
            layer[f"self_attn.qkv_proj.{kind}"] = joined


def pack_weights(model: Model) -> None:
    """Pack the weights in four bits that the model multiplies by; no other weight is changed.

    The embedding is looked up by row, and q, k and v are parts of qkv_proj: these need no packed
    form.
    """
    for layer in model.layers:
        parts = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
        joined = "self_attn.qkv_proj.weight" in layer
        for name, weight in layer.items():
            if isinstance(weight, Q4Weight) and not (joined and name in parts):
                weight.pack()
    head = model.weights["lm_head.weight"]
    if isinstance(head, Q4Weight):
        head.pack()


def warn_dequantized(model: Model) -> None:
    """Warn, in one line, about matrices that are not in four bits; the line gives one reason."""
    matrices = {name: w for name, w in model.weights.items() if len(w.shape) == 2}
    others = {name: w for name, w in matrices.items() if not isinstance(w, Q4Weight)}
    if others:
        name, weight = next(iter(others.items()))
        warnings.warn(
            f"q4: {len(others)} of {len(matrices)} matrices are dequantised to {weight.dtype}; "
            f"{name}: {why_not(weight.shape, weight.device)}",
            stacklevel=3,
        )


# %% [markdown]
# `LLM` passes the argument on:

# %%
from nanoserve.generate import CACHES, LLM
from nanoserve.tokenizer import load_tokenizer


# %% jupyter={"source_hidden": true}
# until day 35: lands in nanoserve/generate.py: LLM.__init__
class LLM(LLM):
    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "paged",
        quantization: str | None = None,
    ) -> None:
        """source, dtype, device, quantization as for load_model; cache "paged", "naive", or None
        for no cache."""
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device, quantization)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache


# %% [markdown]
# ## Measure it: bytes and speed
#
# `decode_benchmark` of Day 13 times no code path whose tokens differ from float32's. q4 rounds, so it may choose another
# token where two are almost equally probable. Its check is therefore `near_greedy`: along the tokens that q4 generated,
# float32 must find each token at most one nat, a factor of e, less probable than the best.
#
# `step_bytes` counts what a step reads, from the weights themselves. The other yardstick is **llama.cpp**, an engine in C
# and C++ that runs the same file. It takes part where the package llama-cpp-python is installed.

# %%
import time

from nanoserve.bench.decode import DecodePath, TokenCheck, decode_benchmark, engine_path


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/decode.py: near_greedy, step_bytes, _kv_bytes, llama_path, gguf_bytes
def near_greedy(model: Model, nats: float = 1.0) -> TokenCheck:
    """A check for code paths that round: each token is at most `nats` less probable than the best.

    The log-probabilities are those of `model`, along the tokens that the code path generated.
    """

    @torch.no_grad()
    def check(prompt: Sequence[int], found: Sequence[int]) -> bool:
        ids = torch.tensor([[*prompt, *found]], device=model.device)
        hidden = model.hidden(ids[:, :-1])[0, len(prompt) - 1 :]
        logits = model.head(hidden).float()  # [tokens, vocab], of each generated token
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return bool((chosen >= logits.amax(-1) - nats).all())

    return check


def step_bytes(model: Model, context: int) -> int:
    """The bytes that one cached decode step of a model reads, in the formats that it keeps.

    As bytes_per_token, but for weights of any format: all but the embedding, unless it is the head.
    """
    embedding, head = (model.weights[f"{n}.weight"] for n in ("model.embed_tokens", "lm_head"))
    weights = sum(weight.nbytes for weight in model.weights.values() if weight is not embedding)
    weights += head.nbytes if head is embedding else 0
    return weights + _kv_bytes(model.config, context, model.dtype)


def _kv_bytes(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * context * config.n_kv * config.head_dim * dtype.itemsize


def llama_path(gguf: Path, context: int) -> DecodePath:
    """llama.cpp's greedy loop over the same file, with as many threads as PyTorch has here.

    `context` is the most tokens of a prompt and its answer. Raises ModuleNotFoundError without the
    package llama-cpp-python.
    """
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    llama = Llama(
        str(gguf), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        ids: list[int] = []
        llama.reset()  # else it keeps what it computed for the same prompt
        for token_id in llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            on_token(token_id)
            ids.append(token_id)
            if len(ids) == tokens:
                return ids
        return ids

    return run


def gguf_bytes(gguf: Path, config: ModelConfig, context: int) -> int:
    """The bytes that a decode step of llama.cpp reads: the file's tensors, and K and V in float16.

    An embedding beside a head of its own is not counted.
    """
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in open_gguf(gguf).tensors}
    unread = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    return sum(sizes.values()) - unread + _kv_bytes(config, context, torch.float16)


# %% [markdown]
# How many times as fast as float32 is q4 on your machine, after 128 tokens of context?

# %%
today.predict("speed", "Speed of q4 over speed of float32?", guess=None, low=0)

# %%
from importlib.util import find_spec

load_model("smollm2", "bfloat16", quantization="q4")  # the first load may write the file
start = time.perf_counter()
kept_model = load_model("smollm2", "bfloat16", quantization="q4")
took = time.perf_counter() - start
models = {"float32": model, "bfloat16": load_model("smollm2", "bfloat16"), "q4": kept_model}
paths = {name: engine_path(each, True) for name, each in models.items()}
sizes = {name: step_bytes(each, 128) for name, each in models.items()}
if find_spec("llama_cpp"):
    paths["llama.cpp"] = llama_path(gguf_path(), 256)
    sizes["llama.cpp"] = gguf_bytes(gguf_path(), model.config, 128)

# %% tags=["nbval-ignore-output"]
print(f"q4 was loaded in {took:.1f} s")
tokenizer = load_tokenizer("smollm2")
prompt = tokenizer.encode("The tide goes out and the boats lie down in the mud. " * 12)[:128]
checks = {name: near_greedy(model) for name in paths if name != "float32"}
speeds = {}
for row in decode_benchmark(paths, "float32", [prompt], tokens=16, rounds=2, checks=checks):
    speeds[row.path], megabytes = 1 / row.tpot, sizes[row.path] / 1e6
    print(
        f"{row.path:9} {megabytes:6.1f} MB a token, {speeds[row.path]:5.1f} tokens per second, "
        f"{megabytes / row.tpot / 1e3:4.1f} GB/s, first token {row.ttft * 1e3:.0f} ms"
    )
assert all(speed > 0 for speed in speeds.values())

# %% tags=["nbval-ignore-output"]
print(
    f"q4 over float32: {speeds['q4'] / speeds['float32']:.1f}; you predicted:",
    today.guess_text("speed"),
)

# %% [markdown]
# The bytes fall by more than five. If the speed on your machine grows by less, two things are left. A step has some 25
# small operations a layer besides the products, and these do not become faster. And the product itself must unpack, which
# takes arithmetic. The column with GB/s shows how far each format is from the bandwidth that Day 27 measured.
#
# The memory does not fall as far as the bytes of a token. The processor's order is a second copy of the numbers. The
# first one is mapped from the file: it needs memory only where it is read, for rows of the embedding and for prefill.
#
# ## Measure it: quality
#
# **Perplexity** is how many equally likely tokens the model hesitates between, on average, before each token of a text:
#
# $$ \text{perplexity} = \exp\left(-\frac{1}{n} \sum_i \log p(\text{token}_i \mid \text{tokens before})\right) $$
#
# Lower is better. `perplexity` cuts the text into pieces of at most 512 tokens, so that the logits fit into memory.

# %%
import math


# %% jupyter={"source_hidden": true}
# lands in nanoserve/bench/perplexity.py: passage, perplexity
def passage() -> str:
    """Chapter I of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865): 2,141 words.

    The text is in the public domain; one line is one paragraph.
    """
    return Path(__file__).with_name("alice.txt").read_text(encoding="utf-8")


@torch.no_grad()
def perplexity(model: Model, ids: Sequence[int], window: int = 512) -> float:
    """exp of the mean negative log-probability of each token, in nats (Jelinek et al. 1977).

    1 is a certain prediction; a uniform guess gives the size of the vocabulary. The ids are cut
    into pieces: the model reads at most `window` tokens and predicts the token after each of them.
    The first token of the text is not predicted; each other token is predicted once, from the
    tokens before it in its piece. Log-probabilities are computed in float32 and added in float64.
    Without a cache. Raises ValueError for fewer than two ids, and for a window below 1 or above the
    model's context.
    """
    if len(ids) < 2:
        raise ValueError(f"perplexity needs at least two tokens, got {len(ids)}")
    if not 1 <= window <= model.config.context:
        raise ValueError(
            f"window must be from 1 to the model's context of {model.config.context}, got {window}"
        )
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        piece = torch.tensor([ids[start : start + window + 1]], device=model.device)
        logits = model(piece[:, :-1])[0].float()  # [tokens, vocab]
        logprobs = logits.log_softmax(dim=-1).gather(1, piece[0, 1:, None])
        total -= logprobs.double().sum().item()
    return math.exp(total / (len(ids) - 1))


# %% [markdown]
# The text is the first chapter of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, in the public
# domain). Beside q4, try a head of four bits: by how many percent does the perplexity rise?

# %%
today.predict("head", "Rise of perplexity with a head of four bits, in percent?", guess=None, low=0)

# %%
from nanoserve.bench.perplexity import passage  # a notebook has no __file__

ids = tokenizer.encode(passage())[:1_025]
found = {name: perplexity(each, ids) for name, each in models.items()}
rounded_head = quantize(model.weights["lm_head.weight"])  # to four bits
rounded_head.pack()
coarse = Model(kept_model.config, kept_model.weights | {"lm_head.weight": rounded_head})
coarse.layers = kept_model.layers
found["q4, head in 4 bits"] = perplexity(coarse, ids)
for name, each in found.items():
    print(f"{name:19} {each:6.2f}, {each / found['float32'] - 1:+.1%}")
print("with a head of four bits, you predicted:", today.guess_text("head"), "%")
close, far = (found[name] / found["float32"] - 1 for name in ("q4", "q4, head in 4 bits"))
assert abs(close) < 0.01 < far

# %% [markdown]
# The numbers of the file give the perplexity of the file: q4 rounds scales, minimums and the rows of `x` to bfloat16, and
# nothing else. The head is another matter. It has eight bits in the file, and rounding it to four costs more than
# everything else together: its 49,152 rows are all compared with each other, for every token. So the embedding and the
# head keep eight bits, whatever checkpoint is loaded. That is 18 MB more for each token.
#
# What do four bits cost a model that was trained in 16? This page cannot show it: SmolLM2 comes to us already rounded,
# and float32 here means the rounded weights in float32. For another model, `perplexity` on both forms is the measurement to make.
#
# ## Three answers, side by side

# %%
from textwrap import fill

from nanoserve import LLM, SamplingParams

questions = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about rain.",
)
llms = {"float32": LLM("smollm2"), "q4": LLM("smollm2", "bfloat16", quantization="q4")}
for question in questions:
    print(question)
    for name, llm in llms.items():
        answer = llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=40))
        margin = {"initial_indent": f"  {name:8} ", "subsequent_indent": " " * 11}
        print(fill(" ".join(answer.text.split()), 88, **margin))

# %% [markdown]
# Where the two differ, one token was nearly as likely as another, and a small error changed the order. From there on the
# texts go separate ways; that alone makes neither worse. **Equality token for token is promised for float32 without
# quantisation**, and for nothing else.
#
# ## With your own code

# %%
with today.mine():
    mine = quantize(model.layers[0]["mlp.up_proj.weight"])
    llm = LLM("smollm2", "bfloat16", quantization="q4")
    (answer,) = llm.generate("The capital of France is", SamplingParams(max_tokens=6))
print(list(mine.shape), repr(answer.text))
assert answer.text.startswith(" Paris")

# %% [markdown]
# ## What you learned
#
# 1. **A decode step takes as long as its bytes.** Four bits, a scale and a minimum are 5 bits a weight, where float32 has
#    32.
# 2. **A group shares one step,** so one outlier makes the other 31 numbers coarse, and small groups limit the damage.
# 3. **Measure quality, not only speed.** The same four bits cost nearly nothing in one matrix and several percent in
#    another.
#
# ## Tomorrow
#
# On a GPU, PyTorch's product for CPUs does not exist. Day 33 writes the kernel: it unpacks nibbles in registers.
#
# **In one paragraph.** The model's file has four-bit numbers, and now the engine keeps them: two in a byte, with a scale
# and a minimum for each 32. From a GGUF they are the file's own; any other checkpoint is rounded to the nearest. The
# product unpacks while it computes, so a token reads a sixth of float32's bytes. The head keeps eight bits, as two parts of
# four, because perplexity said so.
