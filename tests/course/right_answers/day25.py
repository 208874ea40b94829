"""Day 25: right answers to `wiring_test`, in several styles."""

from unittest.mock import patch

import torch

import nanoserve.cache


def with_a_mock(cache, layer, k, v, q, n_rep):
    """unittest's own spy, which puts the dispatcher back by itself."""
    total = cache.seq_len + k.shape[2]
    with patch("nanoserve.cache.paged_attention_dispatch", return_value=object()) as spy:
        got = cache.paged_attention(layer, k, v, q, n_rep)
        if spy.call_count != 1:
            return False
        given = spy.call_args.args
    expected = torch.tensor([cache.table.slot(p) for p in range(total)])
    return (
        given[1].data_ptr() == cache.pool.k[layer].data_ptr()
        and given[2].data_ptr() == cache.pool.v[layer].data_ptr()
        and torch.equal(given[3], expected)
        and got is spy.return_value
    )


def by_assertions(cache, layer, k, v, q, n_rep):
    """A spy that asserts as soon as it is called."""
    real, count = nanoserve.cache.paged_attention_dispatch, 0
    answer, positions = torch.empty(0), range(cache.seq_len + k.shape[2])

    def spy(query, k_pool, v_pool, slot_mapping, *rest):
        nonlocal count
        count += 1
        assert k_pool.data_ptr() == cache.pool.k[layer].data_ptr()
        assert v_pool.data_ptr() == cache.pool.v[layer].data_ptr()
        assert list(map(int, slot_mapping)) == list(map(cache.table.slot, positions))
        return answer

    try:
        nanoserve.cache.paged_attention_dispatch = spy
        assert cache.paged_attention(layer, k, v, q, n_rep) is answer
        assert count == 1
    finally:
        nanoserve.cache.paged_attention_dispatch = real
    return True


def by_addresses_in_the_pool(cache, layer, k, v, q, n_rep):
    """The pool's tensor has all layers: a layer begins `layer` strides behind it."""
    seen = []
    real = vars(nanoserve.cache)["paged_attention_dispatch"]
    vars(nanoserve.cache)["paged_attention_dispatch"] = lambda *given: seen.append(given) or seen
    try:
        back = cache.paged_attention(layer, k, v, q, n_rep)
    finally:
        vars(nanoserve.cache)["paged_attention_dispatch"] = real
    if len(seen) == 1 and back is seen:
        tokens = cache.seq_len + k.size(2)
        blocks, size = cache.table.blocks, cache.pool.allocator.block_size
        slots = [blocks[p // size] * size + p % size for p in range(tokens)]
        for given, whole in zip(seen[0][1:3], (cache.pool.k, cache.pool.v), strict=True):
            start = whole.data_ptr() + layer * whole.stride(0) * whole.element_size()
            if given.data_ptr() != start or given.shape != whole.shape[1:]:
                return False
        return slots == seen[0][3].tolist()
    return False


RIGHT = {"wiring_test": (with_a_mock, by_assertions, by_addresses_in_the_pool)}
