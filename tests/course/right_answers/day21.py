"""Three right answers to each exercise of Day 21, in different styles."""

import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl

# offsets_and_mask --------------------------------------------------------------------------------


def counted(program, tile, n):
    """A loop over the lanes."""
    offsets, mask = [], []
    for lane in range(tile):
        offsets.append(program * tile + lane)
        mask.append(offsets[-1] < n)
    return torch.tensor(offsets), torch.tensor(mask)


def as_range(program, tile, n):
    """A range with its own start, and the comparison as a method."""
    start = tile * program
    offsets = torch.arange(start, start + tile)
    return offsets, offsets.lt(n)


def rows_of_a_grid(program, tile, n):
    """All programs at once, and the row of this one."""
    grid = torch.arange((program + 1) * tile).view(program + 1, tile)
    offsets = grid[program]
    return offsets, torch.logical_not(offsets >= n)


# paged_gather ------------------------------------------------------------------------------------


@tlsim.jit
def pointers_first(
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
    """Pointers and masks first, then the three transfers."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = (tile * TILE + tl.arange(0, TILE))[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < kv_len) & (columns < HEAD_DIM)
    slots = tl.load(slot_ptr + rows, mask=rows < kv_len, other=0)
    source = pool_ptr + slots * pool_slot + head * pool_head + columns
    target = out_ptr + rows * out_row + head * out_head + columns
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)


@tlsim.jit
def row_by_row(
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
    """A loop over the positions of the tile, one row at a time."""
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    start = tl.program_id(0) * TILE
    for position in range(start, tl.minimum(start + TILE, kv_len)):
        slot = tl.load(slot_ptr + position)
        here = slot * pool_slot + head * pool_head + dim
        there = position * out_row + head * out_head + dim
        row = tl.load(pool_ptr + here, mask=dim < HEAD_DIM)
        tl.store(out_ptr + there, row, mask=dim < HEAD_DIM)


@tlsim.jit
def moved_pointers(
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
    """The pointers move to this head and tile; what is left are lanes."""
    first = tl.program_id(0) * TILE
    pool_ptr += tl.program_id(1) * pool_head
    out_ptr += tl.program_id(1) * out_head + first * out_row
    lane, dim = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    left = kv_len - first
    slot = tl.load(slot_ptr + first + lane, lane < left, 0)
    mask = (lane[:, None] < left) & (dim[None, :] < HEAD_DIM)
    block = tl.load(pool_ptr + slot[:, None] * pool_slot + dim[None, :], mask, 0.0)
    tl.store(out_ptr + lane[:, None] * out_row + dim[None, :], block, mask)


RIGHT = {
    "offsets_and_mask": (counted, as_range, rows_of_a_grid),
    "paged_gather": (pointers_first, row_by_row, moved_pointers),
}
