"""The checks of Days 16 and 17 beyond test_cache.py: the real model through append, and reuse.

Tests of append's results, sharing, exhaustion and freeing are in test_cache.py.
"""

import random

import pytest
import torch

from nanoserve.cache import KVPool, NaiveKVCache, PagedKVCache
from nanoserve.config import parse_config
from nanoserve.model import load_model
from nanoserve.tokenizer import load_tokenizer
from tests.checkpoints import SHAPES

CONFIG = parse_config(SHAPES | {"model_type": "llama"})  # 2 layers, 2 KV heads, head_dim 8


class ThroughAppend:
    """A paged cache without `attend`, so that attention gathers through append."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache, self.append = cache, cache.append

    @property
    def seq_len(self) -> int:
        return self.cache.seq_len


def shuffled(
    config, num_blocks: int, block_size: int, seed: int = 0, poison: bool = True
) -> KVPool:
    """A pool that allocates its blocks in a random order."""
    pool = KVPool(config, num_blocks, block_size, poison=poison)
    blocks = pool.allocator.allocate_for(num_blocks * block_size)
    random.Random(seed).shuffle(blocks)
    for block in blocks:
        pool.allocator.free(block)
    return pool


def keys_and_values(seq: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, CONFIG.n_kv, seq, CONFIG.head_dim, generator=generator)
    return k, v


def step(cache, seq: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [cache.append(layer, *keys_and_values(seq, seed + layer)) for layer in range(2)]


def assert_same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


# Day 16


@pytest.mark.parametrize("steps", [(12,), (6, 1, 1, 3, 1)])
def test_the_real_model_s_logits_are_equal_through_append(steps):
    model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")
    text = tokenizer.encode("The tide goes out and the boats lie down in the mud.")
    cache = ThroughAppend(PagedKVCache(shuffled(model.config, 6, 4)))
    naive = NaiveKVCache(model.config)
    with torch.no_grad():
        for seq in steps:
            ids = torch.tensor([text[naive.seq_len : naive.seq_len + seq]])
            assert torch.equal(model(ids, cache), model(ids, naive))


# Day 17


def test_a_thousand_sequences_leave_a_small_pool_as_it_was():
    draw, pool = random.Random(17), shuffled(CONFIG, 12, 4)
    running: list[tuple[PagedKVCache, float]] = []
    for number in range(1000):
        cache = PagedKVCache(pool)
        for seq in (draw.randint(1, 9), 1, draw.randint(1, 2)):
            for layer in range(2):
                k = torch.full((1, CONFIG.n_kv, seq, CONFIG.head_dim), float(number))
                k_all, v_all = cache.append(layer, k, -k)
                assert bool((k_all == number).all() and (v_all == -number).all())
        running.append((cache, number))
        owned = [block for cache, _ in running for block in cache.table.blocks]
        assert len(set(owned)) == len(owned) == 12 - pool.allocator.num_free
        if len(running) == 4:
            running.pop(draw.randrange(4))[0].free()
    for cache, _ in running:
        cache.free()
    assert sorted(pool.allocator.allocate() for _ in range(12)) == list(range(12))
    assert bool(pool.k.isnan().all() and pool.v.isnan().all())


@pytest.mark.parametrize("poison", [False, True])
def test_second_hand_blocks_change_nothing(poison):
    pool, naive = shuffled(CONFIG, 4, 4, poison=poison), NaiveKVCache(CONFIG)
    first, second = PagedKVCache(pool), PagedKVCache(pool)
    step(first, 14, 0)
    first.free()
    assert bool(pool.k.isnan().all()) == poison
    for number, seq in enumerate((5, 1, 2)):
        assert_same(step(second, seq, 20 * number), step(naive, seq, 20 * number))


def test_a_freed_cache_takes_new_blocks_beside_a_newcomer_in_its_old_ones():
    pool, naive = shuffled(CONFIG, 6, 4), NaiveKVCache(CONFIG)
    cache, newcomer = PagedKVCache(pool), PagedKVCache(pool)
    step(cache, 9, 0)
    cache.free()
    held = step(newcomer, 6, 20)
    assert_same(step(cache, 3, 40), step(naive, 3, 40))
    assert not set(cache.table.blocks) & set(newcomer.table.blocks)
    for layer, (k, _) in enumerate(held):
        assert torch.equal(pool.k[layer][newcomer.slot_mapping].transpose(0, 1), k[0])


def test_a_planted_stale_read_is_noticed_at_once():
    class ReadsTheWholeBlock(PagedKVCache):
        def _write(self, layer, k, v):
            super()._write(layer, k, v)
            return torch.tensor([self.table.slot(p) for p in range(self.table.capacity)])

    for poison in (False, True):
        pool = shuffled(CONFIG, 4, 4, poison=poison)
        first = PagedKVCache(pool)
        step(first, 14, 0)
        first.free()
        q = torch.randn(1, CONFIG.n_q, 1, CONFIG.head_dim)
        k, v = keys_and_values(1, 20)
        out = ReadsTheWholeBlock(pool).paged_attention(0, k, v, q, CONFIG.n_q // CONFIG.n_kv)
        assert bool(out.isnan().all()) == poison
