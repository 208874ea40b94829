"""Day 30: any split of the keys gives the same attention, and the workers read what they should."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.course.exercises.day30 import LOG2E, keys_of_worker, merge, partials
from nanoserve.kernels import tlsim
from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_batch_reference
from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.split_kv import merge_kernel, num_workers, split_kv_kernel
from tests.attention_cases import ragged

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(
    ends=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    size=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_the_merge_of_any_parts_is_the_softmax_of_all_scores(ends, size, seed):
    random = torch.Generator().manual_seed(seed)
    keys = max(1, *ends, 0)
    scores, values = (torch.randn(n, keys, generator=random) for n in (3, 8))
    truth = ((size * scores).double().softmax(-1) @ values.T.double()).float()
    out = merge(*partials(size * scores, values.T, sorted([*ends, keys])))
    # lse is float32: its rounding is a relative error of a weight
    bound = ATOL + 4 * size * LOG2E * torch.finfo(torch.float32).eps * values.abs().max() * 4
    torch.testing.assert_close(out, truth, atol=float(bound), rtol=RTOL)


@settings(max_examples=100, deadline=None)
@given(kv_lens=LENGTHS, workers=st.integers(1, 12), tile=st.sampled_from([1, 4, 16]))
def test_the_workers_read_every_key_once_in_equal_shares(kv_lens, workers, tile):
    parts = [keys_of_worker(worker, workers, kv_lens, tile) for worker in range(workers)]
    read = [(i, p) for worker in parts for i, low, high in worker for p in range(low, high)]
    assert read == [(i, p) for i, kv_len in enumerate(kv_lens) for p in range(kv_len)]
    tiles = [sum(max(-(-(high - low) // tile), 1) for _, low, high in own) for own in parts]
    share = -(-sum(tiles) // workers)
    full = sum(tiles) // share if share else 0
    assert tiles[:full] == [share] * full and sum(tiles[full:]) < max(share, 1)
    numbers = [worker + i for worker, own in enumerate(parts) for i, _, _ in own]
    assert len(set(numbers)) == len(numbers), "two parts have one number"


@settings(max_examples=200, deadline=None)
@given(
    multiprocessors=st.integers(1, 200),
    n_kv=st.integers(1, 64),
    num_seqs=st.integers(1, 300),
    tiles=st.integers(1, 5_000),
    programs=st.integers(1, 4),
)
def test_a_launch_has_as_many_workers_as_the_gpu_runs_at_once(
    multiprocessors, n_kv, num_seqs, tiles, programs
):
    workers = num_workers(multiprocessors, n_kv, num_seqs, tiles, programs)
    if num_seqs * n_kv >= 8 * multiprocessors:
        assert workers == 0
        return
    room = programs * multiprocessors
    assert 1 <= workers <= tiles
    assert workers == 1 or workers * n_kv <= room
    assert workers == tiles or (workers + (8 if workers >= 8 else 1)) * n_kv > room
    assert workers in (tiles, *range(9)) or workers % 8 == 0


def launch_split(q, k_pool, v_pool, tables, n_rep, workers, rows=16, tile=16, **options):
    """Both kernels; the parts begin as NaN."""
    (num_seqs, _, head_dim), n_kv = q.shape, k_pool.shape[1]
    part = torch.full((workers + num_seqs, n_kv, rows, head_dim), torch.nan)
    out, lse = torch.full_like(q, torch.nan), part[..., 0].clone()
    lens, starts = tables.kv_lens, tables.query_starts
    sizes = {
        "N_REP": n_rep,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "ROWS": rows,
        "TILE": tile,
        "SEQS": next_power_of_2(num_seqs + 1),
        "OVERLAP": False,
    }
    with tlsim.options(**options):
        tlsim.jit(split_kv_kernel)[(n_kv, workers)](
            *(q, k_pool, v_pool, tables.block_tables, lens, starts, out, part, lse),
            *(head_dim**-0.5 * math.log2(math.e), num_seqs, *q.stride()[:2]),
            *(*k_pool.stride()[:2], *v_pool.stride()[:2], tables.block_tables.stride(0)),
            BLOCK_SIZE=tables.block_size,
            LONG=False,
            **sizes,
        )
        tlsim.jit(merge_kernel)[(n_kv, workers, n_rep)](
            *(part, lse, lens, starts, out, num_seqs), PARTS=next_power_of_2(workers), **sizes
        )
    return out


DECODES = {
    "one sequence": (75,),
    "three": (37, 1, 90),
    "padded rows": (0, 33, 0, 17, 0),
    "only padded rows": (0, 0),
}


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("kv_lens", DECODES.values(), ids=DECODES)
def test_any_number_of_workers_gives_the_oracle_s_attention(kv_lens, workers):
    inputs, expected = ragged(tuple((1, n) for n in kv_lens))
    out = launch_split(*inputs, workers)
    torch.testing.assert_close(out, expected, atol=ATOL, rtol=RTOL)
    torch.testing.assert_close(paged_attention_batch_reference(*inputs), expected)


def test_workers_that_run_one_after_another_give_the_same():
    inputs, _ = ragged(((1, 75), (1, 20)))
    alone = launch_split(*inputs, 4, order="serial", seed=30)
    torch.testing.assert_close(alone, launch_split(*inputs, 4), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_kernel_s_workers_read_the_keys_of_the_exercise(workers):
    kv_lens, n_kv, head_dim = (100, 20, 75), 2, 16
    inputs, _ = ragged(tuple((1, n) for n in kv_lens), heads=(6, n_kv), head_dim=head_dim)
    tables = inputs[3]
    with tlsim.trace() as traced:
        launch_split(*inputs, workers)
    for worker in range(workers):
        slots = set()
        for access in (a for a in traced.accesses if a.name == "k_ptr"):
            if n_kv * worker not in access.programs:
                continue  # the program has finished
            offsets, live = access.of(n_kv * worker)  # KV head 0
            slots |= set((offsets[live] // (n_kv * head_dim)).tolist())
        expected = set()
        for i, low, high in keys_of_worker(worker, workers, kv_lens, 16):
            expected |= set(tables.slot_mapping(i)[low:high].tolist())
        assert slots == expected


def test_the_traffic_of_the_parts_is_two_times_their_size():
    inputs, _ = ragged(((1, 256),), heads=(6, 2), head_dim=16)
    with tlsim.trace() as traced:
        launch_split(*inputs, 4)
    parts = [a.bytes for a in traced.accesses if a.name in ("part_ptr", "lse_ptr")]
    assert sum(parts) == 2 * 4 * 6 * (16 + 1) * 4


def test_the_widget_draws_every_step():
    from nanoserve.course.exercises.day30 import WIDGETS

    assert WIDGETS["split-history"](step=4, splits=4) is not None
