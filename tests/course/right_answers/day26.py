"""Day 26: right answers to `attention_paths`, in several styles."""

from functools import partial

import torch
import torch.nn.functional as F

from nanoserve.kernels.reference import paged_attention_reference
from nanoserve.layers import sdpa


def with_lambdas(cache, step, n_rep):
    """One expression a path; the step is written by indexing."""
    q, k, v = (step[name] for name in "qkv")
    cache.table.grow(cache.seq_len + 1)
    slots = torch.as_tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)])

    def reference(layer):
        cache.pool.k[layer, slots[-1]] = k[0, :, 0]
        cache.pool.v[layer, slots[-1]] = v[0, :, 0]
        return paged_attention_reference(q, cache.pool.k[layer], cache.pool.v[layer], slots, n_rep)

    return {
        "reference": reference,
        "dispatched": lambda layer: cache.paged_attention(layer, k, v, q, n_rep),
        "gather": lambda layer: sdpa(q, *cache.append(layer, k, v)),
    }


def with_blocks(cache, step, n_rep):
    """The mapping by arithmetic on whole blocks, and torch's own attention after the gather."""
    total = cache.seq_len + step["k"].shape[2]
    cache.table.grow(total)
    size = cache.pool.allocator.block_size
    starts = torch.tensor(cache.table.blocks) * size
    slots = (starts[:, None] + torch.arange(size)).flatten()[:total]

    def reference(layer):
        pools = []
        for pool, new in ((cache.pool.k, step["k"]), (cache.pool.v, step["v"])):
            pool[layer][slots[cache.seq_len :]] = new[0].transpose(0, 1)
            pools.append(pool[layer])
        return paged_attention_reference(step["q"], *pools, slots, n_rep, None)

    def gather(layer):
        keys, values = cache.append(layer, step["k"], step["v"])
        keys, values = (x.repeat_interleave(n_rep, dim=1) for x in (keys, values))
        return F.scaled_dot_product_attention(step["q"], keys, values)

    return {"dispatched": _dispatched(cache, step, n_rep), "gather": gather, "reference": reference}


def _dispatched(cache, step, n_rep):
    return lambda layer: cache.paged_attention(layer, step["k"], step["v"], step["q"], n_rep)


def from_parts(cache, step, n_rep):
    """Three functions that take everything, bound by partial; each call makes the mapping."""
    parts = {"cache": cache, "n_rep": n_rep, **step}
    paths = {"gather": _gather, "dispatched": _attend, "reference": _reference}
    return {name: partial(path, **parts) for name, path in paths.items()}


def _gather(layer, cache, q, k, v, n_rep):
    return sdpa(q, *cache.append(layer, k, v))


def _attend(layer, cache, q, k, v, n_rep):
    return cache.paged_attention(layer, k, v, q, n_rep)


def _reference(layer, cache, q, k, v, n_rep):
    cache.table.grow(cache.seq_len + 1)
    slots = [cache.table.slot(p) for p in range(cache.seq_len + 1)]
    for pool, new in zip((cache.pool.k, cache.pool.v), (k, v), strict=True):
        pool[layer][slots[-1]].copy_(new[0, :, 0])
    pools = cache.pool.k[layer], cache.pool.v[layer]
    return paged_attention_reference(q, *pools, torch.tensor(slots), n_rep)


RIGHT = {"attention_paths": (with_lambdas, with_blocks, from_parts)}
