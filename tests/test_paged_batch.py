"""PagedBatch: one step of several sequences equals their steps one by one."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.cache import KVCacheExhausted, KVPool, PagedBatch, PagedKVCache
from nanoserve.kernels.dispatch import paged_attention_batch_dispatch, use_backend
from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_batch_reference
from nanoserve.layers import block, rms_norm
from nanoserve.model import Model, load_model
from tests.attention_cases import BACKENDS, laid_out
from tests.bounds import assert_near
from tests.checkpoints import random_model, save
from tests.test_cache import CONFIG, both_layers, bytes_of, small_pool, step

N_Q, N_REP = CONFIG.n_q, CONFIG.n_rep
backends = pytest.mark.parametrize("backend", BACKENDS)


def filled(pool: KVPool, *lengths: int) -> list[PagedKVCache]:
    """Caches with these lengths, of other keys and values each; they took their blocks in turn."""
    caches = [PagedKVCache(pool) for _ in lengths]
    for token in range(max(lengths)):
        for i, cache in enumerate(caches):
            if token < lengths[i]:
                step(cache, *both_layers(1, seed=100 * i + token))
    return caches


def told(query_lens: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, ...]:
    """k and v [2, 1, n_kv, num_tokens, head_dim] and q [1, n_q, num_tokens, head_dim] of a step."""
    n, numbers = sum(query_lens), torch.Generator().manual_seed(1000 + seed)
    q = torch.randn(1, N_Q, n, CONFIG.head_dim, generator=numbers)
    return *both_layers(n, seed=2000 + seed), q


def one_by_one(caches, query_lens, k, v, q, scale=None) -> list[torch.Tensor]:
    """Each sequence's own paged attention with the reference: per layer, [1, n_q, n, head_dim]."""
    outputs = []
    with use_backend("reference"):
        for layer in range(CONFIG.num_layers):
            parts = [x.split(query_lens, dim=2) for x in (k[layer], v[layer], q)]
            calls = zip(caches, *parts, strict=True)
            rows = [cache.paged_attention(layer, *kvq, N_REP, scale) for cache, *kvq in calls]
            outputs.append(torch.cat(rows, dim=2))
    return outputs


# ------------------------------------------------------------------------------ what it computes


@backends
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    data=st.data(),
    size=st.integers(1, 5),
)
def test_steps_of_a_batch_are_the_steps_of_its_sequences(lengths, data, size, backend):
    """Prefill, chunk and decode, mixed at random; the pools are full of NaN elsewhere."""
    blocks = len(lengths) * 60
    caches, others = (filled(small_pool(blocks, size), *lengths) for _ in range(2))
    for turn in range(3):
        query_lens = tuple(data.draw(st.sampled_from([1, 1, 2, 7])) for _ in lengths)
        k, v, q = told(query_lens, turn)
        batch = PagedBatch(caches, query_lens)
        starts = [cache.seq_len for cache in others]
        spans = zip(starts, query_lens, strict=True)
        assert batch.positions.tolist() == [p for s, n in spans for p in range(s, s + n)]
        expected = one_by_one(others, query_lens, k, v, q)
        for layer in range(2):
            with use_backend(backend):
                out = batch.paged_attention(layer, k[layer], v[layer], q, N_REP)
            assert out.shape == q.shape
            torch.testing.assert_close(out, expected[layer], atol=ATOL, rtol=RTOL)
            assert [cache.seq_len for cache in caches] == starts
        batch.commit()
        assert [c.seq_len for c in caches] == [c.seq_len for c in others]
    for cache, other in zip(caches, others, strict=True):
        ours, theirs = cache.slot_mapping, other.slot_mapping
        assert ours.tolist() == [cache.table.slot(p) for p in range(cache.seq_len)]
        assert torch.equal(cache.pool.k[:, ours], other.pool.k[:, theirs])
        assert torch.equal(cache.pool.v[:, ours], other.pool.v[:, theirs])


@backends
@pytest.mark.parametrize("scale", [None, 0.05])
def test_a_prefill_a_chunk_and_a_decode_in_one_launch(scale, backend):
    lengths, query_lens = (0, 33, 99), (40, 7, 1)
    caches, others = (filled(small_pool(20, 16), *lengths) for _ in range(2))
    k, v, q = told(query_lens)
    batch = PagedBatch(caches, query_lens)
    for layer, expected in enumerate(one_by_one(others, query_lens, k, v, q, scale)):
        with use_backend(backend):
            out = batch.paged_attention(layer, k[layer], v[layer], q, N_REP, scale)
        torch.testing.assert_close(out, expected, atol=ATOL, rtol=RTOL)


def layers_over(model: Model, ids: list[int], positions: torch.Tensor, cache: PagedBatch):
    """The model's layers over packed tokens; RoPE rows are taken at the batch's positions."""
    cos, sin = (table[positions] for table in model._rope(0, int(positions.max()) + 1))
    x = F.embedding(torch.tensor([ids]), model.weights["model.embed_tokens.weight"])
    for index, layer in enumerate(model.layers):
        x = block(x, layer, cos, sin, model.config, cache, index)
    return rms_norm(x, model.weights["model.norm.weight"], model.config.norm_eps)


@backends
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3", "llama-mqa"])
def test_a_models_layers_over_a_batch_are_its_sequences_one_by_one(kind, backend, tmp_path):
    """gqa_attention has no branch for a batch: it passes the heads of all tokens to the cache."""
    model = load_model(save(random_model(kind), tmp_path))
    steps = [
        ([5, 9, 33, 2, 71], [8], [60, 4, 4]),  # prefills
        ([11], [90, 3, 27, 6], [1]),  # decodes, and a chunk between them
        ([7], [2], [64]),
    ]
    pool = KVPool(model.config, 12, 4, poison=True)
    caches, alone = ([PagedKVCache(pool) for _ in range(3)] for _ in range(2))
    for prompts in steps:
        batch = PagedBatch(caches, [len(ids) for ids in prompts])
        with use_backend(backend):
            packed = layers_over(model, [*chain(*prompts)], batch.positions, batch)
        batch.commit()
        rows = packed.split([len(ids) for ids in prompts], dim=1)
        for ids, cache, ours in zip(prompts, alone, rows, strict=True):
            assert_near(ours, model.hidden(torch.tensor([ids]), cache))


def test_a_sequence_may_go_on_alone_and_join_a_batch_again():
    caches, others = (filled(small_pool(20, 4), 5, 0) for _ in range(2))
    for turn, how in enumerate(("batch", "append", "batch", "alone", "batch")):
        k, v, q = told((2, 3), turn)
        expected = one_by_one(others, (2, 3), k, v, q)
        batch = PagedBatch(caches, (2, 3)) if how == "batch" else None
        for layer in range(2):
            if batch:
                out = batch.paged_attention(layer, k[layer], v[layer], q, N_REP)
                torch.testing.assert_close(out, expected[layer], atol=ATOL, rtol=RTOL)
                continue
            parts = [x.split((2, 3), dim=2) for x in (k[layer], v[layer], q)]
            for cache, key, value, query in zip(caches, *parts, strict=True):
                if how == "append":
                    cache.append(layer, key, value)
                else:
                    cache.paged_attention(layer, key, value, query, N_REP)
        if batch:
            batch.commit()
    for ours, theirs in zip(caches, others, strict=True):
        a, b = ours.slot_mapping, theirs.slot_mapping
        assert torch.equal(ours.pool.k[:, a], theirs.pool.k[:, b])


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_a_batch_takes_keys_values_and_queries_of_any_layout(random):
    lengths, query_lens = (0, 9, 4), (3, 1, 2)
    caches, others = (filled(small_pool(20, 4), *lengths) for _ in range(2))
    k, v, q = told(query_lens)
    k, v = ([laid_out(random, x, torch.nan, unit_last=False) for x in kv] for kv in (k, v))
    q = laid_out(random, q, torch.nan)
    batch = PagedBatch(caches, query_lens)
    compact = ([x.contiguous() for x in kv] for kv in (k, v))
    expected = one_by_one(others, query_lens, *compact, q.contiguous())
    for layer in range(2):
        out = batch.paged_attention(layer, k[layer], v[layer], q, N_REP)
        torch.testing.assert_close(out, expected[layer], atol=ATOL, rtol=RTOL)


# ------------------------------------------------------------------------------ what it passes on


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_wiring_the_dispatcher_is_called_once_and_its_result_is_returned(layer, scale, monkeypatch):
    pool = small_pool(20, 4)
    caches, calls = filled(pool, 3, 0, 9), []
    batch, (k, v, q) = PagedBatch(caches, (2, 5, 1)), told((2, 5, 1))
    answer = torch.randn(8, N_Q, 8)
    monkeypatch.setattr(
        "nanoserve.cache.paged_attention_batch_dispatch",
        lambda *args: calls.append(args) or answer,
    )
    out = batch.paged_attention(layer, k[layer], v[layer], q, N_REP, scale)
    assert torch.equal(out, answer.transpose(0, 1)[None])
    assert out.data_ptr() == answer.data_ptr()
    [(queries, *pools, tables, n_rep, given_scale)] = calls
    assert torch.equal(queries, q[0].transpose(0, 1))
    assert queries.data_ptr() == q.data_ptr()
    for given_pool, mine in zip(pools, (pool.k[layer], pool.v[layer]), strict=True):
        assert (given_pool.data_ptr(), given_pool.stride()) == (mine.data_ptr(), mine.stride())
    assert tables is batch.tables
    assert (n_rep, given_scale) == (N_REP, scale)


def test_the_tables_are_the_block_tables_of_the_sequences():
    caches = filled(small_pool(20, 4), 3, 0, 9)
    tables = PagedBatch(caches, (2, 1, 6)).tables
    assert [t.dtype for t in (tables.block_tables, tables.kv_lens, tables.query_starts)] == (
        [torch.int32] * 3
    )
    assert tables.kv_lens.tolist() == [5, 1, 15]
    assert tables.query_starts.tolist() == [0, 2, 3, 9]
    assert (tables.block_size, tables.max_query_len, tables.max_kv_len) == (4, 6, 15)
    assert tables.block_tables.shape == (3, 4)
    for row, cache, n in zip(tables.block_tables.tolist(), caches, (2, 1, 4), strict=True):
        assert row[:n] == cache.table.blocks
    for i, cache in enumerate(caches):
        mapping = [cache.table.slot(p) for p in range(tables.kv_lens[i])]
        assert tables.slot_mapping(i).tolist() == mapping


def test_a_row_of_q_is_found_by_sequence_position_and_slot():
    caches = filled(small_pool(20, 4), 3, 0, 9)
    tables, rows = PagedBatch(caches, (2, 1, 6)).tables, torch.arange(9)
    sequences, positions = tables.sequences_of(rows), tables.positions_of(rows)
    assert sequences.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert positions.tolist() == [3, 4, 0, 9, 10, 11, 12, 13, 14]
    pairs = zip(sequences.tolist(), positions.tolist(), strict=True)
    expected = [caches[i].table.slot(p) for i, p in pairs]
    assert tables.slots_of(sequences, positions).tolist() == expected
    assert [x.dtype for x in (sequences, positions)] == [torch.int64] * 2
    some = torch.tensor([8, 0, 2, 2])
    assert tables.sequences_of(some).tolist() == [2, 0, 1, 1]
    assert tables.positions_of(some).tolist() == [14, 3, 0, 0]


def test_a_sequence_without_queries_owns_no_row():
    tables = PagedBatch(filled(small_pool(20, 4), 3, 2), (2, 1)).tables
    tables.query_starts.copy_(torch.tensor([0, 0, 3]))
    assert tables.sequences_of(torch.arange(3)).tolist() == [1, 1, 1]


def test_everything_lies_on_the_pools_device():
    pool = KVPool(CONFIG, 6, 4, device="meta")  # meta tensors stand for a GPU: none can be read
    caches = [PagedKVCache(pool), PagedKVCache(pool)]
    batch = PagedBatch(caches, (5, 2))
    tables = batch.tables
    tensors = (tables.block_tables, tables.kv_lens, tables.query_starts, batch.positions)
    assert {x.device.type for x in tensors} == {"meta"}
    assert batch.positions.shape == (7,)
    batch.commit()
    assert [cache.seq_len for cache in caches] == [5, 2]


def test_a_result_follows_the_content_of_the_tables():
    """A captured graph keeps the tensors and gets new content; nothing may be kept on the host."""
    caches = filled(small_pool(20, 4), 5, 11)
    batch, (k, v, q) = PagedBatch(caches, (1, 1)), told((1, 1))
    for layer in range(2):
        batch.paged_attention(layer, k[layer], v[layer], q, N_REP)
    queries, pools = q[0].transpose(0, 1), (caches[0].pool.k[0], caches[0].pool.v[0])
    tables = batch.tables
    before = paged_attention_batch_dispatch(queries, *pools, tables, N_REP)
    tables.block_tables.copy_(tables.block_tables.flip(0))
    tables.kv_lens.copy_(tables.kv_lens.flip(0))
    after = paged_attention_batch_dispatch(queries.flip(0), *pools, tables, N_REP).flip(0)
    torch.testing.assert_close(after, before, atol=ATOL, rtol=RTOL)


# ------------------------------------------------------------------------------ blocks and lengths


def state(caches: list[PagedKVCache]) -> tuple:
    pool = caches[0].pool
    tables = [(cache.seq_len, list(cache.table.blocks)) for cache in caches]
    return tables, pool.allocator.num_free, bytes_of(pool)


def test_all_blocks_of_a_step_or_none():
    caches = filled(small_pool(8, 4), 3, 0, 8)  # 1, 0 and 2 blocks: 5 are free
    before = state(caches)
    with pytest.raises(KVCacheExhausted, match="6 blocks are needed and 5 are free"):
        PagedBatch(caches, (2, 13, 1))
    assert state(caches) == before
    PagedBatch(caches, (2, 12, 1))
    assert [len(cache.table.blocks) for cache in caches] == [2, 3, 3]
    assert caches[0].pool.allocator.num_free == 0
    owned = [block for cache in caches for block in cache.table.blocks]
    assert sorted(owned) == list(range(8))


def test_a_step_takes_no_more_blocks_than_its_tokens_need():
    caches = filled(small_pool(8, 4), 3, 4)
    PagedBatch(caches, (1, 1))
    assert [len(cache.table.blocks) for cache in caches] == [1, 2]


def test_a_step_that_was_not_committed_may_be_repeated_with_another():
    caches, others = (filled(small_pool(12, 4), 3, 4) for _ in range(2))
    k, v, q = told((7, 3))
    PagedBatch(caches, (7, 3)).paged_attention(0, k[0], v[0], q, N_REP)  # fails before layer 1
    assert [cache.seq_len for cache in caches] == [3, 4]
    k, v, q = told((2, 5), seed=1)
    batch = PagedBatch(caches, (2, 5))
    for layer, expected in enumerate(one_by_one(others, (2, 5), k, v, q)):
        out = batch.paged_attention(layer, k[layer], v[layer], q, N_REP)
        torch.testing.assert_close(out, expected, atol=ATOL, rtol=RTOL)
    batch.commit()
    assert [cache.seq_len for cache in caches] == [5, 9]


@pytest.mark.parametrize("how", ["committed", "advanced", "freed", "freed while empty"])
def test_a_batch_stands_for_one_step(how):
    caches = filled(small_pool(12, 4), 3, 4)
    if how == "freed while empty":
        caches[1].free()
    batch = PagedBatch(caches, (2, 1))
    if how == "committed":
        batch.commit()
    elif how == "advanced":
        step(caches[1], *both_layers(1, seed=9))
    else:
        caches[1].free()
    before, i = state(caches), 0 if how == "committed" else 1
    with pytest.raises(ValueError, match=f"sequence {i} .* was advanced or freed since"):
        batch.commit()
    assert state(caches) == before


def test_a_poisoned_pool_takes_the_blocks_of_a_batch_back():
    pool = small_pool(12, 4)
    caches = filled(pool, 3, 4)
    batch, (k, v, q) = PagedBatch(caches, (6, 3)), told((6, 3))
    for layer in range(2):
        batch.paged_attention(layer, k[layer], v[layer], q, N_REP)
    batch.commit()
    for cache in caches:
        cache.free()
    assert pool.allocator.num_free == 12
    assert pool.k.isnan().all()
    assert [cache.slot_mapping.tolist() for cache in caches] == [[], []]


# ------------------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("which", "query_lens", "says"),
    [
        ((), (), "at least one cache and a query_len for each, got 0 caches and 0 query_lens"),
        ((0, 1), (1,), "got 2 caches and 1 query_lens"),
        ((0,), (1, 1), "got 1 caches and 2 query_lens"),
        ((0, 1), (1, 0), "sequence 1 has query_len 0, and must have at least 1"),
        ((0, 1), (-2, 1), "sequence 0 has query_len -2"),
        ((0, 1, 0), (1, 1, 1), "sequences 0 and 2 are the same cache"),
        ((0, 1, 2), (1, 1, 1), "sequences 0 and 2 lie in different pools"),
    ],
)
def test_what_is_no_step_of_distinct_sequences_is_refused_and_takes_nothing(
    which, query_lens, says
):
    caches = [*filled(small_pool(12, 4), 4, 4), *filled(small_pool(12, 4), 4)]
    before = state(caches[:2]), state(caches[2:])
    with pytest.raises(ValueError, match=says):
        PagedBatch([caches[i] for i in which], query_lens)
    assert (state(caches[:2]), state(caches[2:])) == before


@pytest.mark.parametrize("name", ["k", "v", "q"])
@pytest.mark.parametrize("shape", [(1, 2, 4, 8), (2, 2, 3, 8), (2, 3, 8)])
def test_another_number_of_tokens_is_refused_before_anything_is_written(name, shape):
    caches = filled(small_pool(12, 4), 4, 4)
    batch, (k, v, q) = PagedBatch(caches, (2, 1)), told((2, 1))
    before = state(caches)
    given_tensors = {"k": k[0], "v": v[0], "q": q} | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=rf"{name} must be \[1, heads, 3, head_dim\]"):
        batch.paged_attention(0, **given_tensors, n_rep=N_REP)
    assert state(caches) == before


def test_the_checks_of_the_dispatcher_hold_for_a_batch():
    batch, (k, v, q) = PagedBatch(filled(small_pool(12, 4), 4, 4), (2, 1)), told((2, 1))
    with pytest.raises(ValueError, match="n_rep 2 does not fit 6 query heads and 2 KV heads"):
        batch.paged_attention(0, k[0], v[0], q, 2)


def test_the_reference_is_what_the_reference_backend_runs():
    caches = filled(small_pool(12, 4), 4, 4)
    batch, (k, v, q) = PagedBatch(caches, (2, 1)), told((2, 1))
    with use_backend("reference"):
        out = batch.paged_attention(0, k[0], v[0], q, N_REP)
    pools = caches[0].pool.k[0], caches[0].pool.v[0]
    rows = paged_attention_batch_reference(q[0].transpose(0, 1), *pools, batch.tables, N_REP)
    assert torch.equal(out, rows.transpose(0, 1)[None])
