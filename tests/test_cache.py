"""The contiguous cache: what it gives back, how it grows, what a failed step leaves."""

import pytest
import torch

from nanoserve.cache import NaiveKVCache
from nanoserve.config import parse_config
from tests.checkpoints import SHAPES

CONFIG = parse_config(SHAPES | {"model_type": "llama"})  # 2 layers, 2 KV heads, head_dim 8


def keys_and_values(seq: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, CONFIG.n_kv, seq, CONFIG.head_dim, generator=generator)
    return k, v


@pytest.mark.parametrize("capacity", [1, 5, 64])
@pytest.mark.parametrize("steps", [(7, 1, 1, 3, 1), (1,) * 9, (64, 1), (2, 70)])
def test_the_history_is_all_steps_one_after_another(steps, capacity):
    cache, given = NaiveKVCache(CONFIG, capacity), {0: ([], []), 1: ([], [])}
    for step, seq in enumerate(steps):
        for layer in range(2):
            k, v = keys_and_values(seq, seed=10 * step + layer)
            given[layer][0].append(k)
            given[layer][1].append(v)
            assert cache.seq_len == sum(steps[:step])  # moves with the last layer alone
            history = cache.append(layer, k, v)
            for ours, theirs in zip(history, given[layer], strict=True):
                assert torch.equal(ours, torch.cat(theirs, dim=2))
    assert cache.seq_len == sum(steps)


def test_what_is_given_back_is_a_view_that_later_steps_leave_alone():
    cache = NaiveKVCache(CONFIG, capacity=16)
    k, v = keys_and_values(3, seed=1)
    first = cache.append(0, k, v)[0]
    cache.append(1, k, v)
    second = cache.append(0, *keys_and_values(1, seed=2))[0]
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, k)


def test_one_token_at_a_time_the_history_moves_only_when_capacity_doubles():
    cache, moves, held = NaiveKVCache(CONFIG, capacity=4), [], None
    for position in range(100):
        for layer in range(2):
            k, _ = cache.append(layer, *keys_and_values(1, seed=position))
        if held is not None and k.untyped_storage().data_ptr() != held.data_ptr():
            moves.append(position)
        held = k.untyped_storage()  # held, so that its address cannot be given out again
    assert moves == [4, 8, 16, 32, 64]


def test_a_long_prompt_gets_the_room_it_needs():
    cache = NaiveKVCache(CONFIG, capacity=4)
    k, _ = cache.append(0, *keys_and_values(50, seed=3))
    cache.append(1, *keys_and_values(50, seed=3))
    assert k.shape == (1, 2, 50, 8)
    after, _ = cache.append(0, *keys_and_values(1, seed=4))
    assert torch.equal(after[:, :, :50], k)
    assert after.untyped_storage().nbytes() == 4 * 2 * 2 * 100 * 8  # at least twice as long


def test_a_step_that_fails_half_way_leaves_the_length_and_may_be_repeated():
    cache = NaiveKVCache(CONFIG, capacity=4)
    old = keys_and_values(3, seed=5)
    for layer in range(2):
        cache.append(layer, *old)
    cache.append(0, *keys_and_values(4, seed=6))  # then something raises, before layer 1
    assert cache.seq_len == 3
    new = keys_and_values(2, seed=7)
    for layer in range(2):
        k, v = cache.append(layer, *new)
        assert torch.equal(k, torch.cat([old[0], new[0]], dim=2))
        assert torch.equal(v, torch.cat([old[1], new[1]], dim=2))
    assert cache.seq_len == 5


def test_a_batch_is_refused_and_changes_nothing():
    cache = NaiveKVCache(CONFIG)
    k, v = keys_and_values(3, seed=8)
    with pytest.raises(ValueError, match="a cache holds one sequence, got a batch of 2"):
        cache.append(0, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1))
    assert cache.seq_len == 0
    assert torch.equal(cache.append(0, k, v)[0], k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_history_has_the_dtype_of_what_came(dtype):
    k, v = keys_and_values(3, seed=9)
    history = NaiveKVCache(CONFIG).append(0, k.to(dtype), v.to(dtype))
    assert [h.dtype for h in history] == [dtype, dtype]
    assert torch.equal(history[1], v.to(dtype))


def test_keys_and_values_do_not_mix():
    cache = NaiveKVCache(CONFIG)
    k, v = keys_and_values(5, seed=11)
    ours = cache.append(0, k, v)
    assert torch.equal(ours[0], k)
    assert torch.equal(ours[1], v)
    assert not torch.equal(k, v)
