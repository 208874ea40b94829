"""Weights in four bits: groups of 32 numbers that share a scale and a minimum.

Shapes: a weight is [out, in]; groups = in / 32. Numbers 2j and 2j + 1 of a row are the low and the
high four bits of byte j.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

GROUP = 32
QUANTIZATIONS = ("q4",)
PACK_ROWS = 1024  # rows packed at a time: a multiple of every processor's block of rows
SMALLEST = torch.finfo(torch.float32).tiny  # a divisor in place of a scale of 0
UNPACKED_ROWS = 64  # from this many rows on, the product of the dequantised weight is faster
KERNEL_ROWS = 16  # the most rows that the GPU's kernel multiplies


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

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] times this weight -> [..., out], by q4_linear."""
        return q4_linear(x, self)

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


def check_quantization(name: str | None) -> None:
    """Raise ValueError for a quantisation that is not None or one of QUANTIZATIONS."""
    if name is not None and name not in QUANTIZATIONS:
        known = ", ".join(map(repr, QUANTIZATIONS))
        raise ValueError(f"quantization {name!r} is not supported; supported: {known}, None")


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


def pack_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15, two to a byte, the first in the low bits: uint8 [..., n] -> [..., n / 2]."""
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Undo pack_nibbles: uint8 [..., n] -> [..., 2 * n], each 0 to 15."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


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


def from_q8_blocks(blocks: torch.Tensor) -> Q4Weight:
    """GGUF's Q8_0 blocks, uint8 [out, bytes of a row], in two parts.

    A block is 34 bytes: a float16 scale and 32 integers, -128 to 127.
    """
    blocks = blocks.unflatten(1, (-1, 2 + GROUP))
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].bfloat16()
    integers = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return two_parts(integers.short(), scales)


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
