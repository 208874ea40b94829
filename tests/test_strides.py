"""Each tensor of a kernel is passed with its strides, or refused by an error with its name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.cache import KVPool, NaiveKVCache, PagedKVCache
from nanoserve.kernels import tlsim
from nanoserve.kernels.dispatch import (
    launch,
    paged_attention_batch_dispatch,
    paged_attention_dispatch,
    paged_attention_tlsim,
    use_backend,
)
from nanoserve.kernels.paged_attention import paged_attention_kernel
from nanoserve.kernels.reference import (
    paged_attention_batch_reference,
    paged_attention_reference,
    tolerance,
)
from tests.attention_cases import (
    BACKENDS,
    assert_batch,
    batch_laid_out,
    call_laid_out,
    compact,
    compact_batch,
    laid_out,
    with_out_laid_out,
)
from tests.test_cache import CONFIG

KERNEL = tlsim.jit(paged_attention_kernel)
randoms = given(random=st.randoms(use_true_random=False))
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def assert_same(out: torch.Tensor, tensors: tuple) -> None:
    expected = paged_attention_reference(*compact(tensors))
    atol, rtol = tolerance(expected.dtype)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False), dtype=DTYPES)
def test_any_layout_gives_what_contiguous_copies_give(random, dtype):
    tensors = call_laid_out(random, dtype)
    assert_same(paged_attention_reference(*tensors), tensors)
    assert_same(paged_attention_tlsim(*tensors), tensors)
    for backend in ("reference", "tlsim"):
        with use_backend(backend):
            assert_same(paged_attention_dispatch(*tensors), tensors)


@settings(max_examples=20, deadline=None)
@randoms
def test_under_the_checks_of_tlsim_no_lane_leaves_its_view(random):
    tensors = call_laid_out(random)
    for order in ("lockstep", "serial"):
        with tlsim.options(order=order, poison=True):
            assert_same(launch(KERNEL, *tensors, tile=16), tensors)


@settings(max_examples=20, deadline=None)
@randoms
def test_the_kernel_writes_into_an_output_of_any_layout(random):
    tensors = call_laid_out(random)
    assert_same(with_out_laid_out(KERNEL, random, tensors), tensors)


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False), which=st.sampled_from(range(3)))
def test_a_head_dim_that_is_not_contiguous_is_refused_by_name(random, which):
    tensors = list(call_laid_out(random))
    x = tensors[which]
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    tensors[which] = random.choice([wide.copy_(x), x[..., :1].expand_as(x)])
    name = ("q", "k_pool", "v_pool")[which]
    for call in (paged_attention_tlsim, paged_attention_dispatch):
        with pytest.raises(ValueError, match=f"{name}'s head_dim must be contiguous"):
            call(*tensors)


def test_a_column_of_a_table_is_a_slot_mapping():
    """The fault that was found: the kernel took the table's memory for that of the column."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 3, 8, generator=generator)
    k_pool, v_pool = torch.randn(2, 40, 2, 8, generator=generator)
    column = torch.arange(40).view(20, 2)[:, 0]
    tensors = (q, k_pool, v_pool, column, 3)
    assert_same(paged_attention_dispatch(*tensors), tensors)


@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=False), dtype=DTYPES)
def test_any_layout_of_a_batch_gives_what_contiguous_copies_give(random, dtype):
    arguments = batch_laid_out(random, dtype)
    expected = paged_attention_batch_reference(*compact_batch(arguments))
    assert_batch(paged_attention_batch_reference(*arguments), expected)
    for backend in BACKENDS:
        with use_backend(backend):
            assert_batch(paged_attention_batch_dispatch(*arguments), expected)


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False), which=st.sampled_from(range(3)))
def test_a_head_dim_of_a_batch_that_is_not_contiguous_is_refused_by_name(random, which):
    arguments = list(batch_laid_out(random))
    x = arguments[which]
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    arguments[which] = random.choice([wide.copy_(x), x[..., :1].expand_as(x)])
    name = ("q", "k_pool", "v_pool")[which]
    for backend in BACKENDS:
        with use_backend(backend), pytest.raises(ValueError, match=f"{name}'s head_dim must be"):
            paged_attention_batch_dispatch(*arguments)


@settings(max_examples=20, deadline=None)
@randoms
def test_a_cache_takes_keys_values_and_queries_of_any_layout(random):
    pool = KVPool(CONFIG, 8, 4, poison=True)
    naive, paged, views = NaiveKVCache(CONFIG), PagedKVCache(pool), PagedKVCache(pool)
    numbers = torch.Generator().manual_seed(random.getrandbits(32))
    for tokens in (3, 1, 5):
        for layer in range(CONFIG.num_layers):
            k, v = torch.randn(2, 1, CONFIG.n_kv, tokens, CONFIG.head_dim, generator=numbers)
            k, v = (laid_out(random, x, torch.nan, unit_last=False) for x in (k, v))
            q = torch.randn(1, CONFIG.n_q, tokens, CONFIG.head_dim, generator=numbers)
            q = laid_out(random, q, torch.nan)
            expected = paged.append(layer, k.contiguous(), v.contiguous())
            for got, right in zip(naive.append(layer, k, v), expected, strict=True):
                assert torch.equal(got, right)
            with use_backend("tlsim"):
                out = views.paged_attention(layer, k, v, q, CONFIG.n_rep)
            pools = (views.pool.k[layer], views.pool.v[layer])
            mapping = torch.tensor([views.table.slot(p) for p in range(expected[0].shape[2])])
            assert_same(out, (q, *pools, mapping, CONFIG.n_rep))
            for tensor, right in zip(pools, expected, strict=True):
                assert torch.equal(tensor[mapping].transpose(0, 1)[None], right)
