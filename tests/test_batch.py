"""The batch form of paged attention: its tables, its reference, and the checks of its arguments."""

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.kernels.dispatch import check_batch, paged_attention_batch_dispatch, use_backend
from nanoserve.kernels.reference import (
    PagedTables,
    paged_attention_batch_reference,
    paged_attention_reference,
)
from tests import attention_cases
from tests.attention_cases import BATCHES, MIXED, AttentionCase, assert_batch, ragged, tensors


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch):
    monkeypatch.delenv("NANOSERVE_BACKEND", raising=False)
    monkeypatch.delenv("NANOSERVE_CHECK_SLOTS", raising=False)


BACKENDS = {"reference itself": paged_attention_batch_reference} | {
    name: use_backend(name)(paged_attention_batch_dispatch) for name in attention_cases.BACKENDS
}
backends = pytest.mark.parametrize("backend", BACKENDS)

# ------------------------------------------------------------------------------ what is computed


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_one_launch_is_the_sequences_one_by_one_in_a_pool_of_nan(name, block_size, dtype, backend):
    arguments, expected = ragged(BATCHES[name], block_size, dtype=dtype)
    assert_batch(BACKENDS[backend](*arguments), expected)


@backends
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ragged_batch_is_the_sequences_one_by_one(data, backend):
    queries = st.integers(1, 9)
    before = st.one_of(st.just(0), st.integers(0, 40))
    steps = data.draw(st.lists(st.tuples(queries, before), min_size=1, max_size=5))
    steps = tuple((query_len, query_len + cached) for query_len, cached in steps)
    n_kv, n_rep = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    arguments, expected = ragged(
        steps,
        block_size=data.draw(st.sampled_from([1, 2, 5, 16, 64])),
        heads=(n_kv * n_rep, n_kv),
        head_dim=data.draw(st.sampled_from([8, 14, 64])),
        seed=data.draw(st.integers(0, 99)),
        extra_blocks=data.draw(st.integers(0, 2)),
    )
    assert_batch(BACKENDS[backend](*arguments), expected)


@backends
@pytest.mark.parametrize("query_len", [1, 5, 37])
def test_a_slot_mapping_is_a_block_table_whose_blocks_hold_one_token(query_len, backend):
    q, k_pool, v_pool, slots, n_rep, _ = tensors(AttentionCase(query_len=query_len))
    expected = paged_attention_reference(q, k_pool, v_pool, slots, n_rep)[0].transpose(0, 1)
    tables = PagedTables.from_slots(slots, query_len)
    assert torch.equal(tables.slot_mapping(0), slots)
    out = BACKENDS[backend](q[0].transpose(0, 1), k_pool, v_pool, tables, n_rep)
    assert_batch(out, expected)


@backends
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_may_be_zero_or_negative(scale, backend):
    arguments, _ = ragged(MIXED)
    out = BACKENDS[backend](*arguments, scale)
    assert_batch(out, paged_attention_batch_reference(*arguments, scale))


@backends
def test_an_explicit_scale_reaches_every_sequence(backend):
    (q, k_pool, v_pool, tables, n_rep), default = ragged(MIXED)
    out = BACKENDS[backend](q, k_pool, v_pool, tables, n_rep, 0.05)
    same = paged_attention_batch_reference(q * (0.05 * 8**0.5), k_pool, v_pool, tables, n_rep)
    assert_batch(out, same)
    for begin, end in pairwise(tables.query_starts.tolist()):
        assert (out[begin:end] - default[begin:end]).abs().max() > 0.01


@backends
def test_a_padded_row_gives_zeros_whatever_its_table_names(backend):
    (q, k_pool, v_pool, tables, n_rep), expected = ragged(BATCHES["padded rows"])
    tables.block_tables[1] = tables.block_tables[3] = 10**6  # never used, and so never checked
    out = BACKENDS[backend](q, k_pool, v_pool, tables, n_rep)
    assert_batch(out, expected)
    assert not out[[1, 3]].any()


@backends
def test_launches_one_after_another_do_not_disturb_each_other(backend):
    """Tables of one block have a stride of 1, which Triton and tlsim make a constant."""
    for query_len in (1, 3):
        for longest in (12, 5, 12, 8, 16, 3):  # all fit in one tile; some need two blocks
            steps = ((1, 2), (query_len, longest))
            arguments, expected = ragged(steps, block_size=8, seed=longest)
            assert_batch(BACKENDS[backend](*arguments), expected)


@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
def test_equal_calls_see_every_change_in_place(scale):
    """The layers of a step: from the third call on, nothing of a launch is computed again."""
    torch.manual_seed(7)
    q, pools = torch.randn(3, 6, 64), torch.randn(2, 160, 2, 64)
    tables = PagedTables(
        block_tables=torch.randperm(10)[:9].view(3, 3).int(),
        kv_lens=torch.tensor([41, 20, 1], dtype=torch.int32),
        query_starts=torch.arange(4, dtype=torch.int32),
        block_size=16,
        max_query_len=1,
        max_kv_len=48,
    )

    def changed(step):
        if step == 1:
            tables.kv_lens.copy_(torch.tensor([3, 48, 17]))
        elif step == 2:
            tables.block_tables.copy_(torch.randperm(10)[:9].view(3, 3))
        elif step == 3:
            tables.kv_lens[1] = 0  # a padded row
            tables.block_tables[1] = -1

    for step in range(4):
        changed(step)
        for _ in range(4):
            q.normal_(), pools.normal_()
            with use_backend("tlsim"):
                out = paged_attention_batch_dispatch(q, *pools, tables, 3, scale)
            expected = paged_attention_batch_reference(q, *pools, tables, 3, scale)
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    tables.block_tables[0] = 10
    with pytest.raises(ValueError, match="block_tables has block 10"), use_backend("tlsim"):
        paged_attention_batch_dispatch(q, *pools, tables, 3, scale)


@backends
def test_launches_whose_strides_vary_together_or_alone_do_not_disturb_each_other(backend):
    """A recording takes the strides that have varied as inputs, in an order that stays."""
    for round_ in range(3):
        for q_wide, pool_wide, extra in product((0, 8), (0, 1), (0, 1, 3)):
            arguments, expected = ragged(((1, 5), (1, 30)), seed=round_, extra_blocks=extra)
            q, k_pool, v_pool, tables, n_rep = arguments
            q = F.pad(q, (0, q_wide))[..., :8]
            k_pool = F.pad(k_pool, (0, 0, 0, pool_wide))[:, :2]
            assert_batch(BACKENDS[backend](q, k_pool, v_pool, tables, n_rep), expected)


@backends
def test_loose_bounds_and_wide_tables_change_nothing(backend):
    """A captured launch has tables for the whole context, and bounds that hold for any content."""
    for steps in BATCHES.values():
        (q, k_pool, v_pool, tables, n_rep), expected = ragged(steps, extra_blocks=7)
        room = tables.block_tables.shape[1] * tables.block_size
        loose = replace(tables, max_query_len=tables.max_query_len + 9, max_kv_len=room)
        assert_batch(BACKENDS[backend](q, k_pool, v_pool, loose, n_rep), expected)


@backends
def test_two_sequences_may_share_blocks(backend):
    (q, k_pool, v_pool, tables, n_rep), _ = ragged(((1, 37), (1, 37)))
    tables.block_tables[1] = tables.block_tables[0]
    out = BACKENDS[backend](q[[0, 0]], k_pool, v_pool, tables, n_rep)
    assert torch.equal(out[0], out[1])


# ------------------------------------------------------------------------------ the tables


def test_the_slot_of_a_token_is_its_block_times_the_block_size_plus_its_offset():
    blocks = torch.tensor([[7, 2, 5], [3, 0, 9]], dtype=torch.int32)
    lens, starts = torch.tensor([37, 5]).int(), torch.tensor([0, 1, 6]).int()
    tables = PagedTables(blocks, lens, starts, 16, 5, 37)
    slots = tables.slot_mapping(0)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [*range(112, 128), *range(32, 48), *range(80, 85)]
    assert tables.slot_mapping(1).tolist() == [48, 49, 50, 51, 52]


def test_a_slot_past_the_range_of_int32_is_exact():
    blocks = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    tables = PagedTables(blocks, torch.tensor([2]).int(), torch.tensor([0, 1]).int(), 16, 1, 2)
    assert tables.slot_mapping(0).tolist() == [16 * (2**31 - 1), 16 * (2**31 - 1) + 1]


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_from_slots_copies_no_mapping(integer):
    slots = torch.arange(20).to(integer)[::2]
    tables = PagedTables.from_slots(slots, 3)
    assert tables.block_tables.data_ptr() == slots.data_ptr()
    assert (tables.block_tables.dtype, tables.block_tables.shape) == (integer, (1, 10))
    for got, expected in ((tables.kv_lens, [10]), (tables.query_starts, [0, 3])):
        assert (got.dtype, got.tolist()) == (torch.int32, expected)
    assert (tables.block_size, tables.max_query_len, tables.max_kv_len) == (1, 3, 10)


@pytest.mark.parametrize(
    ("slots", "query_len", "says"),
    [
        (torch.arange(6).view(1, 6), 1, r"slot_mapping must be \[kv_len\], got \[1, 6\]"),
        (torch.arange(6), 0, "query_len is 0, and must be 1 to kv_len, 6"),
        (torch.arange(6), 7, "query_len is 7, and must be 1 to kv_len, 6"),
        (torch.arange(0), 1, "query_len is 1, and must be 1 to kv_len, 0"),
    ],
)
def test_from_slots_refuses_what_is_no_step_of_one_sequence(slots, query_len, says):
    with pytest.raises(ValueError, match=says):
        PagedTables.from_slots(slots, query_len)


def test_tables_are_frozen_and_compared_by_identity():
    tables = PagedTables.from_slots(torch.arange(6), 1)
    with pytest.raises(FrozenInstanceError):
        tables.block_size = 2
    assert tables == tables != PagedTables.from_slots(torch.arange(6), 1)


# ------------------------------------------------------------------------------ what is refused


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Batch "chunks": queries of 5, 16 and 2 tokens, kv_len 37, 48 and 3, tables [3, 3] of 17 blocks
STEPS = BATCHES["chunks"]
LENS = "kv_lens must be int32 [3] as block_tables has 3 sequences"
STARTS = "query_starts must be int32 [4] as block_tables has 3 sequences"
REFUSED = {  # the change of the arguments, and the texts that the error must contain
    "q of four axes": ({"q": zeros(1, 6, 23, 8)}, ("q must be [num_tokens,", "[1, 6, 23, 8]")),
    "no token": ({"q": zeros(0, 6, 8)}, ("q must be [num_tokens,", "at least one", "[0, 6, 8]")),
    "k's head_dim": ({"k_pool": zeros(272, 2, 9)}, ("k_pool must be", "8", "[272, 2, 9]")),
    "v's head_dim": ({"v_pool": zeros(272, 2, 7)}, ("v_pool must be", "8", "[272, 2, 7]")),
    "a shorter v": ({"v_pool": zeros(271, 2, 8)}, ("one shape", "[272, 2, 8], [271, 2, 8]")),
    "n_rep 2": ({"n_rep": 2}, ("n_rep 2", "6 query heads", "2 KV heads")),
    "more query heads": ({"q": zeros(23, 9, 8)}, ("n_rep 3", "9 query heads", "2 KV heads")),
    "float64": (
        {"q": zeros(23, 6, 8, dtype=torch.float64)},
        ("q must be float32, float16 or bfloat16, got torch.float64",),
    ),
    "k in another dtype": (
        {"k_pool": zeros(272, 2, 8, dtype=torch.float16)},
        ("k_pool and q must have one dtype", "torch.float16 and torch.float32"),
    ),
    "q with channels apart": ({"q": zeros(23, 6, 16)[..., ::2]}, ("q's head_dim", "2")),
    "v with channels first": ({"v_pool": zeros(272, 8, 2).mT}, ("v_pool's head_dim", "2")),
    "k elsewhere": ({"k_pool": zeros(272, 2, 8, device="meta")}, ("k_pool", "meta", "cpu")),
    "tables elsewhere": (
        {"block_tables": zeros(3, 3, device="meta").int()},
        ("block_tables is on meta", "q is on cpu"),
    ),
    "lengths elsewhere": ({"kv_lens": zeros(3, device="meta").int()}, ("kv_lens is on meta",)),
    "starts elsewhere": (
        {"query_starts": zeros(4, device="meta").int()},
        ("query_starts is on meta",),
    ),
    "a table without rows": ({"block_tables": zeros(0, 3).int()}, ("block_tables", "[0, 3]")),
    "a table without blocks": ({"block_tables": zeros(3, 0).int()}, ("block_tables", "[3, 0]")),
    "a flat table": ({"block_tables": zeros(9).int()}, ("block_tables", "[9]")),
    "a float table": ({"block_tables": zeros(3, 3)}, ("block_tables must be integers", "float32")),
    "int64 lengths": ({"kv_lens": ints(37, 48, 3).long()}, (LENS, "torch.int64 [3]")),
    "lengths of two": ({"kv_lens": ints(37, 48)}, (LENS, "torch.int32 [2]")),
    "int64 starts": ({"query_starts": ints(0, 5, 21, 23).long()}, (STARTS, "torch.int64 [4]")),
    "no last start": ({"query_starts": ints(0, 5, 21)}, (STARTS, "torch.int32 [3]")),
    "block_size 0": ({"block_size": 0}, ("block_size must be an integer of at least 1, got 0",)),
    "a block_size as a tensor": ({"block_size": ints(16)[0]}, ("block_size must be an integer",)),
    "max_query_len 0": ({"max_query_len": 0}, ("max_query_len must be an integer", "got 0")),
    "max_kv_len as a float": ({"max_kv_len": 48.0}, ("max_kv_len must be an integer", "48.0")),
    "more than the table holds": (
        {"max_kv_len": 49},
        ("max_kv_len is 49", "3 blocks of 16 tokens"),
    ),
    "a late first query": (
        {"query_starts": ints(1, 5, 21, 23)},
        ("query_starts goes from 1 to 23", "0 to q's 23"),
    ),
    "queries left over": (
        {"query_starts": ints(0, 5, 21, 22)},
        ("query_starts goes from 0 to 22", "0 to q's 23"),
    ),
    "starts that fall": (
        {"query_starts": ints(0, 22, 21, 23), "max_query_len": 99},
        ("sequence 1 has query_len -1", "0 to max_query_len, 99"),
    ),
    "a low max_query_len": (
        {"max_query_len": 15},
        ("sequence 1 has query_len 16", "0 to max_query_len, 15"),
    ),
    "a low max_kv_len": ({"max_kv_len": 47}, ("sequence 1 has kv_len 48", "max_kv_len, 47")),
    "a negative length": ({"kv_lens": ints(37, 48, -1)}, ("sequence 2 has kv_len -1",)),
    "more queries than keys": (
        {"kv_lens": ints(37, 48, 1)},
        ("sequence 2 has query_len 2", "kv_len 1"),
    ),
    "a block below": (
        {"block_tables": ints(1, 2, 3, 4, -1, 6, 7, 8, 9).view(3, 3)},
        ("block -1 for sequence 1", "17 blocks of 16 slots"),
    ),
    "a block beyond": (
        {"block_tables": ints(1, 2, 17, 4, 5, 6, 7, 8, 9).view(3, 3)},
        ("block 17 for sequence 0", "17 blocks of 16 slots"),
    ),
    "a block in part": (
        {name: zeros(271, 2, 8) for name in ("k_pool", "v_pool")}
        | {"block_tables": ints(1, 2, 16, 4, 5, 6, 7, 8, 9).view(3, 3)},
        ("block 16 for sequence 0", "16 blocks of 16 slots"),
    ),
}  # fmt: skip


def with_changes(**changes) -> tuple:
    """The arguments of the batch "chunks", some of them or of the tables' fields replaced."""
    (q, k_pool, v_pool, tables, n_rep), _ = ragged(STEPS)
    given = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "tables": tables, "n_rep": n_rep}
    fields = {name: value for name, value in changes.items() if name not in given}
    given["tables"] = replace(tables, **fields)
    return tuple((given | {k: v for k, v in changes.items() if k in given}).values())


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference itself"])
@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_a_kernel_would_misread_are_refused_by_name(what, backend):
    changes, says = REFUSED[what]
    with pytest.raises(ValueError) as refusal:
        BACKENDS[backend](*with_changes(**changes))
    assert all(part in str(refusal.value) for part in says), str(refusal.value)


def test_what_may_be_given_passes():
    for steps in BATCHES.values():
        check_batch(*ragged(steps)[0])
    check_batch(*with_changes(block_tables=torch.arange(8, 17).view(3, 3)))  # to the last block
    check_batch(*with_changes(max_query_len=999))
    unused = ints(1, 2, 3, 4, 5, 6, 7, -1, 10**6).view(3, 3)  # past the 3 tokens of sequence 2
    check_batch(*with_changes(block_tables=unused))
    check_batch(*with_changes(query_starts=ints(0, 5, 21, 21), q=zeros(21, 6, 8)))  # no query


def test_tables_are_read_on_the_cpu_alone_unless_asked_for(monkeypatch):
    q, k_pool, v_pool, tables, n_rep = with_changes()
    moved = {n: getattr(tables, n).to("meta") for n in ("block_tables", "kv_lens", "query_starts")}
    elsewhere = (*(x.to("meta") for x in (q, k_pool, v_pool)), replace(tables, **moved), n_rep)
    check_batch(*elsewhere)  # "meta" stands for a GPU: nothing on it can be read
    beyond = with_changes(block_tables=torch.arange(9, 18).view(3, 3).flip(0))
    check_batch(*beyond, check_tables=False)
    with pytest.raises(ValueError, match="block 17"):
        check_batch(*beyond)
    with pytest.raises((RuntimeError, NotImplementedError)):  # meta tensors hold no data
        check_batch(*elsewhere, check_tables=True)
    monkeypatch.setenv("NANOSERVE_CHECK_SLOTS", "1")
    with pytest.raises((RuntimeError, NotImplementedError)):
        check_batch(*elsewhere)
