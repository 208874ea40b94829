"""Day 31: the launch table, and launches that are recorded once and replayed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.course.exercises.day31 import REVIEW, bytes_in_flight, newest_row
from nanoserve.kernels.dispatch import paged_attention_batch_tlsim
from nanoserve.kernels.reference import ATOL, RTOL, PagedTables, paged_attention_batch_reference
from nanoserve.kernels.split_kv import FLOAT32, LAUNCHES, Launch, choose_launch, launch_of
from nanoserve.kernels.tlsim import replay

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SHARED = {(7, 5): 64 << 10, (8, 0): 164 << 10, (9, 0): 228 << 10}  # of a multiprocessor, bytes
BLOCKS, MAX_KV_LEN = 12, 48  # of 8 slots


@pytest.mark.parametrize("kernel", ["split", "packed", "waves", "prefill"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_package_chooses_a_row_as_the_exercise_does(kernel, head_dim):
    widths = [w for name, _, w in LAUNCHES if name == kernel and w >= head_dim]
    for capability in CAPABILITIES:
        narrowest = {}
        for (name, since, width), launch in LAUNCHES.items():
            if name == kernel and width == min(w for w in widths if (name, since, w) in LAUNCHES):
                narrowest[since] = launch
        found = launch_of(kernel, capability, head_dim, torch.float16)
        assert found == newest_row(list(narrowest.items()), capability)


def test_float32_has_one_row_and_an_older_gpu_has_none():
    assert launch_of("split", (7, 5), 128, torch.float32) == FLOAT32
    assert launch_of("split", (7, 5), 256, torch.float32).tile == 16
    with pytest.raises(ValueError, match=r"7\.0"):
        launch_of("split", (7, 0), 128, torch.float16)


def chosen(kv_lens, n_kv, head_dim=128, query_len=1, total=True, n_rep=4):
    """What choose_launch gives for a batch on an H200."""
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32) * query_len
    blocks = torch.zeros(len(lens), 1, dtype=torch.int32)
    known = sum(kv_lens) if total else None
    tables = PagedTables(blocks, lens, starts, 16, query_len, max(kv_lens), known)
    return choose_launch(tables, n_rep, n_kv, head_dim, torch.bfloat16, (9, 0), 132)


def row(kernel, head_dim=128):
    return launch_of(kernel, (9, 0), head_dim, torch.bfloat16)


def test_the_split_of_a_batch_follows_from_what_the_host_knows():
    assert chosen([8_192] * 64, 8) == (row("packed"), 0)  # 512 programs, all at once
    assert chosen([8_192] * 64, 8, total=False) == (row("packed"), 0)
    assert chosen([8_192] * 64, 8, head_dim=64) == (row("packed", 64), 0)
    assert chosen([8_192, *range(1, 8_064, 128)], 8) == (row("split"), 32)  # ragged: shares
    assert chosen([8_192] * 49, 8) == (row("split"), 32)  # 392 programs: fewer than 3 x 132
    assert chosen([8_192] * 50, 8)[1] == chosen([8_192] * 66, 8)[1] == 0
    assert chosen([8_192] * 67, 8) == (row("split"), 32)  # more than 4 x 132: a second wave
    assert chosen([1_024] * 131, 8)[1] == 32
    assert chosen([1_024] * 132, 8) == (row("waves"), 0)
    assert chosen([1_024, *[1] * 255], 8) == (row("waves"), 0)
    assert chosen([65_536], 8) == (row("split"), 32)
    assert chosen([2_048] * 64, 3, head_dim=64, n_rep=3) == (row("split", 64), 128)


def test_no_worker_is_without_tiles():
    assert chosen([4_096], 8, head_dim=64) == (row("split", 64), 32)  # 64 tiles: not 48 workers
    assert chosen([1], 8) == (row("split"), 1)
    assert chosen([0], 8) == (row("split"), 1)


def test_many_queries_are_a_prefill():
    assert chosen([2_048], 8, query_len=2_048) == (row("prefill"), 0)
    assert chosen([2_048], 8, query_len=4)[1] > 0  # 4 queries of 4 heads fit in 16 rows
    assert chosen([2_048], 8, query_len=5) == (row("prefill"), 0)


@pytest.mark.parametrize("key", LAUNCHES, ids=str)
def test_the_tiles_in_flight_of_each_row_fit_its_gpu(key):
    (_, capability, head_dim), launch = key, LAUNCHES[key]
    stages = launch.num_stages + (launch.num_stages == 2)  # 2 stages have one tile ahead, as 3 do
    shared = SHARED[capability]
    assert bytes_in_flight(launch.tile, stages, min(head_dim, 128), 2, 1, shared) <= shared


@pytest.fixture
def recordings(monkeypatch):
    """The recordings that tlsim makes in a test."""
    made, recording = [], replay.Recording

    def keep(*args):
        made.append(recording(*args))
        return made[-1]

    monkeypatch.setattr(replay, "Recording", keep)
    return made


def batch(random: torch.Generator, kv_lens: list[int]):
    """A decode step of three sequences: q, pools, tables; 6 query heads, 2 KV heads of 16."""
    q = torch.randn(3, 6, 16, generator=random)
    pools = torch.randn(2, 40 * 8, 2, 16, generator=random)
    tables = PagedTables(
        block_tables=torch.randperm(40, generator=random)[: 3 * BLOCKS].view(3, BLOCKS).int(),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        query_starts=torch.arange(4, dtype=torch.int32),
        block_size=8,
        max_query_len=1,
        max_kv_len=MAX_KV_LEN,
    )
    return q, *pools, tables


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.integers(0, MAX_KV_LEN), min_size=3, max_size=3), min_size=2, max_size=4
    ),
    seed=st.integers(0, 999),
)
def test_a_replayed_launch_follows_the_numbers_in_its_tensors(steps, seed):
    random = torch.Generator().manual_seed(seed)
    q, k_pool, v_pool, tables = batch(random, steps[0])
    for kv_lens in steps:
        new, *_, other = batch(random, kv_lens)
        q.copy_(new)  # in place, as for a CUDA graph
        tables.kv_lens.copy_(other.kv_lens)
        tables.block_tables.copy_(other.block_tables)
        out = paged_attention_batch_tlsim(q, k_pool, v_pool, tables, 3)
        expected = paged_attention_batch_reference(q, k_pool, v_pool, tables, 3)
        torch.testing.assert_close(out, expected, atol=ATOL, rtol=RTOL)


def test_a_decode_step_is_recorded_once(recordings):
    random = torch.Generator().manual_seed(31)
    for kv_lens in ([17, 47, 1], [48, 2, 30], [16, 16, 16]):
        q, k_pool, v_pool, tables = batch(random, kv_lens)
        paged_attention_batch_tlsim(q, k_pool, v_pool, tables, 3)
    assert len(recordings) <= 1  # 0 if another test has recorded this kind of launch


def test_the_answers_of_the_review_are_right():
    answers = " ".join(answer for _, answer in REVIEW)
    blocks = -(-1_000 // 16)
    assert f"{blocks} blocks. Position 777 is in entry {777 // 16} of the block table" in answers
    assert f"at offset {777 % 16}. {blocks * 16 - 1_000} slots" in answers
    assert 2**3 / (2**3 + 2**5) == 0.2
    assert Launch(16, 64, 2, 5).programs == 1
