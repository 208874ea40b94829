"""Day 29: every query and head is in one row of one tile, and the kernel's rows are those rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.course.exercises.day29 import fold_tile, rows_of_tile, start
from nanoserve.kernels import tlsim
from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_batch_reference
from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.split_kv import packed_kernel
from tests.attention_cases import BATCHES, ragged

SMALL = st.integers(1, 6)


@settings(max_examples=50, deadline=None)
@given(
    n_rep=SMALL, kv_head=st.integers(0, 3), query_len=st.integers(1, 20), spare=st.integers(0, 9)
)
def test_every_query_and_head_is_in_one_used_row_of_one_tile(n_rep, kv_head, query_len, spare):
    rows, found = n_rep + spare, []
    for tile in range(-(-query_len // (rows // n_rep)) + 1):  # one tile more than is needed
        query, head, used = rows_of_tile(tile, rows, kv_head, n_rep, query_len)
        found += list(zip(query[used].tolist(), head[used].tolist(), strict=True))
    heads = range(kv_head * n_rep, (kv_head + 1) * n_rep)
    assert found == [(query, head) for query in range(query_len) for head in heads]


@settings(max_examples=50, deadline=None)
@given(
    keys=st.integers(1, 40),
    tile=st.integers(1, 45),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_the_fold_of_any_tiles_is_the_softmax_of_all_scores(keys, tile, size, seed):
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 8, generator=random) for n in (6, keys, keys))
    seen = torch.rand(6, keys, generator=random) < 0.7
    seen[:, 0] = True  # a row without keys has no softmax
    state = start(6)
    for part in torch.arange(keys).split(tile):
        state = fold_tile(*state, q, k[part], v[part], seen[:, part], size)
    score = (q.double() @ k.double().T * size).masked_fill(~seen, -torch.inf)
    truth = (score.softmax(-1) @ v.double()).float()
    torch.testing.assert_close(state[2] / state[1][:, None], truth, atol=ATOL, rtol=10 * RTOL)


def launch_packed(q, k_pool, v_pool, tables, n_rep, rows=16, tile=16):
    num_tokens, n_q, head_dim = q.shape
    num_seqs, decode = len(tables.kv_lens), tables.max_query_len == 1
    tiles = num_seqs if decode else num_tokens // (rows // n_rep) + num_seqs
    out = torch.full_like(q, torch.nan)
    tlsim.jit(packed_kernel)[(n_q // n_rep, tiles)](
        *(q, k_pool, v_pool, tables.block_tables, tables.kv_lens, tables.query_starts, out),
        *(head_dim**-0.5 * math.log2(math.e), num_seqs, *q.stride()[:2]),
        *(*k_pool.stride()[:2], *v_pool.stride()[:2], tables.block_tables.stride(0)),
        N_REP=n_rep,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_SIZE=tables.block_size,
        ROWS=rows,
        TILE=tile,
        SEQS=1 if decode else next_power_of_2(num_seqs + 1),
        LONG=False,
    )
    return out


@pytest.mark.parametrize("heads", [(6, 2), (5, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("steps", BATCHES.values(), ids=BATCHES)
def test_packed_heads_equal_the_oracle_on_every_batch(steps, heads):
    inputs, _ = ragged(steps, heads=heads)
    out = launch_packed(*inputs)
    expected = paged_attention_batch_reference(*inputs)
    torch.testing.assert_close(out, expected, atol=ATOL, rtol=RTOL)


def test_the_kernel_loads_the_rows_of_the_exercise():
    n_rep, head_dim, query_len = 3, 8, 13
    inputs, _ = ragged(((query_len, 40),), heads=(6, 2), head_dim=head_dim)
    with tlsim.trace() as traced:
        launch_packed(*inputs)
    (loads,) = (access for access in traced.accesses if access.name == "q_ptr")
    found = [offsets[live].tolist() for offsets, live in map(loads.of, range(2 * 3))]
    expected = []
    for kv_head in range(2):
        for tile in range(3):
            query, head, used = rows_of_tile(tile, 16, kv_head, n_rep, query_len)
            first = ((query * 6 + head) * head_dim)[used]
            channels = first[:, None] + torch.arange(head_dim)
            expected.append(channels.flatten().tolist())
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("kv_len", "loaded"), [(96, 96), (100, 112), (1, 16)])
def test_each_key_is_loaded_once_for_a_kv_head_up_to_the_last_tile(kv_len, loaded):
    inputs, _ = ragged(((1, kv_len),), heads=(6, 2), head_dim=16)
    with tlsim.trace() as traced:
        launch_packed(*inputs)
    keys = sum(access.bytes for access in traced.accesses if access.name == "k_ptr")
    assert keys == 2 * loaded * 16 * 4
    assert traced.distinct_bytes("load", "k_ptr") == 2 * kv_len * 16 * 4
