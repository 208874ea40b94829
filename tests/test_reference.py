"""The oracle of paged attention equals attention over contiguous K/V, whatever the slots."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.kernels.reference import ATOL, RTOL, paged_attention_reference, tolerance
from nanoserve.layers import QUERY_TILE, sdpa

HEADS = [(6, 2), (4, 1), (3, 3), (8, 4)]  # n_q, n_kv: GQA, MQA, MHA, GQA
STEPS = {"decode": (1, 37), "prefill": (37, 37), "continuation": (5, 37)}  # query_len, kv_len
LAYOUTS = ("ascending", "descending", "scattered")


def drawn(n_q, n_kv, query_len, kv_len, head_dim=8, seed=0, dtype=torch.float32):
    """q [1, n_q, query_len, head_dim]; k and v [1, n_kv, kv_len, head_dim], contiguous."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((n_q, query_len), (n_kv, kv_len), (n_kv, kv_len))
    return [torch.randn(1, *s, head_dim, generator=random).to(dtype) for s in shapes]


def laid_out(kv_len: int, layout: str, size: int = 4, seed: int = 0) -> tuple[torch.Tensor, int]:
    """(slot_mapping, num_slots): every second block of `size`, or random slots."""
    blocks = -(-kv_len // size)
    num_slots = 2 * blocks * size
    if layout == "scattered":
        random = torch.Generator().manual_seed(seed)
        return torch.randperm(num_slots, generator=random)[:kv_len], num_slots
    taken = range(1, 2 * blocks, 2) if layout == "ascending" else range(2 * blocks - 1, 0, -2)
    slots = [block * size + offset for block in taken for offset in range(size)]
    return torch.tensor(slots[:kv_len]), num_slots


def pooled(x: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """[1, n_kv, kv_len, head_dim] -> a pool [num_slots, n_kv, head_dim], NaN elsewhere."""
    pool = x.new_full((num_slots, x.shape[1], x.shape[3]), torch.nan)
    for position, slot in enumerate(slots.tolist()):
        pool[slot] = x[0, :, position]
    return pool


def paged(q, k, v, layout="scattered", scale=None, seed=0) -> torch.Tensor:
    slots, num_slots = laid_out(k.shape[2], layout, seed=seed)
    pools = (pooled(x, slots, num_slots) for x in (k, v))
    return paged_attention_reference(q, *pools, slots, q.shape[1] // k.shape[1], scale)


def float64_attention(q, k, v, scale=None) -> torch.Tensor:
    """torch's own attention in float64, with the causal mask written position by position."""
    query_len, kv_len, n_rep = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    mask = torch.tensor(
        [[key <= kv_len - query_len + i for key in range(kv_len)] for i in range(query_len)]
    )
    k, v = (x.double().repeat_interleave(n_rep, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("n_q", "n_kv"), HEADS)
def test_the_oracle_is_attention_over_contiguous_memory_to_the_bit(n_q, n_kv, step, layout):
    q, k, v = drawn(n_q, n_kv, *STEPS[step])
    assert torch.equal(paged(q, k, v, layout), sdpa(q, k, v))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_an_explicit_scale_takes_the_place_of_the_default(scale, step):
    q, k, v = drawn(6, 2, *STEPS[step])
    out = paged(q, k, v, scale=scale)
    assert torch.equal(out, sdpa(q, k, v, scale))
    assert (out - paged(q, k, v)).abs().max() > 0.01
    torch.testing.assert_close(
        out.double(), float64_attention(q, k, v, scale), atol=ATOL, rtol=RTOL
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("n_q", "n_kv"), HEADS)
def test_the_oracle_is_within_the_shared_tolerance_of_torch_in_float64(n_q, n_kv, step):
    q, k, v = drawn(n_q, n_kv, *STEPS[step], head_dim=64)
    out = paged(q, k, v)
    assert (out.shape, out.dtype) == (q.shape, torch.float32)
    torch.testing.assert_close(out.double(), float64_attention(q, k, v), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_within_its_rule_of_torch_in_float64(dtype, step):
    for seed in range(4):
        q, k, v = drawn(6, 2, *STEPS[step], head_dim=64, seed=seed, dtype=dtype)
        out = paged(q, k, v)
        assert out.dtype == dtype
        assert torch.equal(out, sdpa(q, k, v))
        atol, rtol = tolerance(dtype)
        torch.testing.assert_close(out.double(), float64_attention(q, k, v), atol=atol, rtol=rtol)


def test_the_tolerance_of_each_dtype():
    assert tolerance(torch.float32) == (ATOL, RTOL) == (1e-5, 1e-4)
    assert tolerance(torch.float16) == (2**-9, 2**-9)
    assert tolerance(torch.bfloat16) == (2**-6, 2**-6)


@pytest.mark.parametrize("query_len", [QUERY_TILE, QUERY_TILE + 1, 2 * QUERY_TILE + 3])
def test_more_queries_than_a_tile_and_cached_tokens_before_them(query_len):
    q, k, v = drawn(4, 2, query_len, query_len + 21)
    out = paged(q, k, v)
    assert torch.equal(out, sdpa(q, k, v))
    torch.testing.assert_close(out.double(), float64_attention(q, k, v), atol=ATOL, rtol=RTOL)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_shape_and_every_layout(data):
    n_kv, n_rep = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    query_len = data.draw(st.integers(1, 9))
    kv_len = query_len + data.draw(st.integers(0, 40))
    head_dim = data.draw(st.sampled_from([2, 8, 14, 64]))
    seed = data.draw(st.integers(0, 99))
    q, k, v = drawn(n_kv * n_rep, n_kv, query_len, kv_len, head_dim, seed)
    out = paged(q, k, v, data.draw(st.sampled_from(LAYOUTS)), seed=seed)
    assert torch.equal(out, sdpa(q, k, v))
    torch.testing.assert_close(out.double(), float64_attention(q, k, v), atol=ATOL, rtol=RTOL)


def test_a_query_sees_its_own_position_and_none_after_it():
    q, k, v = drawn(6, 2, 5, 37)
    slots, num_slots = laid_out(37, "descending")
    k_pool, v_pool = (pooled(x, slots, num_slots) for x in (k, v))
    before = paged_attention_reference(q, k_pool, v_pool, slots, 3)
    for i in range(5):
        v_changed = v_pool.clone()
        v_changed[slots[32 + i]] += 5
        after = paged_attention_reference(q, k_pool, v_changed, slots, 3)
        moved = (after != before).any(dim=3)[0].any(dim=0)  # [query_len]
        assert moved.tolist() == [query >= i for query in range(5)]


def test_query_heads_that_follow_one_another_share_a_kv_head():
    q, k, v = drawn(6, 2, 1, 11)
    v = torch.stack([torch.full_like(v[0, 0], h) for h in range(2)])[None]
    assert paged(q, k, v)[0, :, 0, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1])


def test_the_order_is_the_mappings_and_not_the_pools():
    q, k, v = drawn(6, 2, 5, 37)
    slots, num_slots = laid_out(37, "scattered")
    pools = [pooled(x, slots, num_slots) for x in (k, v)]
    ordered = paged_attention_reference(q, *pools, slots.sort().values, 3)
    assert (ordered - sdpa(q, k, v)).abs().max() > 0.01


def test_nothing_that_was_given_is_changed():
    q, k, v = drawn(6, 2, 5, 37)
    slots, num_slots = laid_out(37, "scattered")
    given = [q, *(pooled(x, slots, num_slots) for x in (k, v)), slots]
    copies = [x.clone() for x in given]
    paged_attention_reference(*given, 3)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(given, copies, strict=True)
    )


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_a_mapping_of_either_integer_will_do(integer):
    q, k, v = drawn(6, 2, 5, 37)
    slots, num_slots = laid_out(37, "scattered")
    pools = [pooled(x, slots, num_slots) for x in (k, v)]
    assert torch.equal(paged_attention_reference(q, *pools, slots.to(integer), 3), sdpa(q, k, v))


@pytest.mark.parametrize("n_rep", [0, 1, 2, 6])
def test_an_n_rep_that_does_not_fit_the_heads_is_refused(n_rep):
    q, k, v = drawn(6, 2, 1, 11)
    slots, num_slots = laid_out(11, "ascending")
    pools = [pooled(x, slots, num_slots) for x in (k, v)]
    with pytest.raises(ValueError, match=f"n_rep {n_rep} does not fit 6 query heads and 2 KV"):
        paged_attention_reference(q, *pools, slots, n_rep)
