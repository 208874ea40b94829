"""Day 21: the gather as a grid of programs, and the faults that must be noticed."""

import pytest
import torch

from nanoserve.course.exercises.day21 import (
    FAULTS,
    SLOTS,
    launch,
    look,
    memory,
    paged_gather,
    planted,
)
from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl

SEQ = len(SLOTS)


@pytest.mark.parametrize("order", ["lockstep", "serial"])
@pytest.mark.parametrize("tile", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("n_kv", "head_dim", "layers"), [(1, 8, 1), (3, 6, 1), (2, 8, 2)])
def test_paged_gather_is_pool_of_slot_mapping_for_every_tile(tile, order, n_kv, head_dim, layers):
    pool, mapping, out = memory(n_kv, head_dim, SLOTS, layers=layers)
    with tlsim.options(order=order):
        assert torch.equal(launch(paged_gather, pool, mapping, out, SEQ, tile), pool[mapping])


def test_it_reads_no_slot_that_nobody_owns():
    pool, mapping, out = memory(2, 8, SLOTS)
    nobody = torch.ones(len(pool), dtype=torch.bool)
    nobody[mapping] = False
    pool = pool.clone()
    pool[nobody] = torch.nan
    with tlsim.options(poison=True):
        assert torch.equal(launch(paged_gather, pool, mapping, out, SEQ, 4), pool[mapping])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("position < kv_len", "position >= 0", r"lane \[1\]: loads outside slot_ptr\[13\]"),
        ("position < kv_len", "position <= kv_len", r"loads outside slot_ptr\[13\] of 13"),
        ("tl.program_id(0) * TILE + ", "", "stores where another program has stored, out_ptr"),
        (" + head * out_head", "", "stores where another program has stored, out_ptr"),
        ("(dim < HEAD_DIM)", "(dim >= 0)", r"lane \[3, 6\]: loads outside pool_ptr\[384\]"),
        ("slot * pool_slot", "slot", None),
        (" + head * pool_head", "", None),
        ("slot * pool_slot", "slot * pool_head", None),
    ],
)
def test_a_planted_bug_is_caught_by_the_sanitizer_or_by_the_comparison(old, new, words):
    pool, mapping, out = memory(2, 6, SLOTS)
    kernel = planted(paged_gather, (old, new))
    if words:
        with pytest.raises(tlsim.KernelError, match=words):
            launch(kernel, pool, mapping, out, SEQ, 4)
    else:
        assert not torch.equal(launch(kernel, pool, mapping, out, SEQ, 4), pool[mapping])


def test_a_fault_that_is_not_in_the_kernel_cannot_be_planted():
    with pytest.raises(ValueError, match="the kernel has no 'elephant'"):
        planted(paged_gather, ("elephant", "mouse"))


@pytest.mark.parametrize("tile", [2, 4, 8])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_widget_draws_what_a_launch_did(fault, tile):
    accesses, told = look(fault, tile)
    assert set(accesses) == {"slot_ptr", "pool_ptr", "out_ptr"}
    assert bool(told) == (fault != "none")
    positions, live = accesses["slot_ptr"].of(1)  # the second tile's program, of head 0
    first = 0 if fault == "program_id forgotten" else tile
    assert positions.tolist() == list(range(first, first + tile))
    assert live.all() or tile == 8


def test_by_columns_every_number_is_a_separate_segment():
    @tlsim.jit
    def read(x_ptr, row_stride, lane_stride, LANES: tl.constexpr):
        lanes = tl.arange(0, LANES) * lane_stride
        tl.load(x_ptr + tl.program_id(0) * row_stride + lanes)

    with tlsim.trace() as seen:
        read[(64,)](torch.zeros(64, 64), 64, 1, LANES=64)
        read[(64,)](torch.zeros(64, 64), 1, 64, LANES=64)
    rows, columns = seen.accesses
    assert rows.bytes == columns.bytes == 64 * 64 * 4
    assert (rows.rows, columns.rows) == (64, 64 * 64)
