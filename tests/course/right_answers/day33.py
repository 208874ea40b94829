"""Three right answers to each exercise of Day 33, in different styles."""

import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl

# q4_bytes ----------------------------------------------------------------------------------------


def by_groups(num_out, width):
    """20 bytes for each group."""
    return num_out * (width // 32) * 20


def by_bits(num_out, width):
    """Five bits for a number, all told."""
    return num_out * width * 5 // 8


def by_tensors(num_out, width):
    """The bytes of real tensors."""
    meta = {"device": "meta"}
    numbers = torch.empty(num_out, width // 2, dtype=torch.uint8, **meta)
    scales = torch.empty(2, num_out, width // 32, dtype=torch.bfloat16, **meta)
    return numbers.nbytes + scales.nbytes


# unpack ------------------------------------------------------------------------------------------


@tlsim.jit
def by_lanes(byte_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """A lane for each number: it loads its byte and shifts by 0 or 4."""
    lane = tl.program_id(0) * BLOCK * 2 + tl.arange(0, 2 * BLOCK)
    inside = lane // 2 < n
    two = tl.load(byte_ptr + lane // 2, mask=inside, other=0)
    number = (two.to(tl.int32) >> (lane % 2 * 4)) & 15
    tl.store(out_ptr + lane, number, mask=inside)


@tlsim.jit
def by_division(byte_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The remainder and the quotient by 16."""
    byte = tl.arange(0, BLOCK) + BLOCK * tl.program_id(0)
    two = tl.load(byte_ptr + byte, mask=byte < n, other=0).to(tl.int32)
    low = two % 16
    tl.store(out_ptr + byte * 2, low, mask=byte < n)
    tl.store(out_ptr + byte * 2 + 1, (two - low) // 16, mask=byte < n)


@tlsim.jit
def by_table(byte_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """A table of two columns, stored at once."""
    byte = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    half = tl.arange(0, 2)[None, :]
    two = tl.load(byte_ptr + byte, mask=byte < n, other=0).to(tl.int32)
    tl.store(out_ptr + 2 * byte + half, (two >> (4 * half)) & 15, mask=byte < n)


# finish ------------------------------------------------------------------------------------------


def by_einsum(dots, sums, scales, minimums):
    """Two contractions."""
    return torch.einsum("og,og->o", scales, dots) + torch.einsum("og,g->o", minimums, sums)


def row_by_row(dots, sums, scales, minimums):
    """A loop over the results."""
    return torch.stack([s @ d + m @ sums for d, s, m in zip(dots, scales, minimums, strict=True)])


def group_by_group(dots, sums, scales, minimums):
    """A running sum over the groups."""
    y = torch.zeros(len(dots))
    for g in range(len(sums)):
        y = y + scales[:, g] * dots[:, g] + minimums[:, g] * sums[g]
    return y


RIGHT = {
    "q4_bytes": (by_groups, by_bits, by_tensors),
    "unpack": (by_lanes, by_division, by_table),
    "finish": (by_einsum, row_by_row, group_by_group),
}
