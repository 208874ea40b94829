"""Right answers to the exercise of Day 18, in different styles."""

import torch

from nanoserve.layers import sdpa


def _refuse(q, k_pool, n_rep):
    if q.shape[1] != k_pool.shape[1] * n_rep:
        raise ValueError(f"n_rep is {n_rep}")


def gathered(q, k_pool, v_pool, slot_mapping, n_rep, scale=None):
    """index_select, then the model's own attention."""
    _refuse(q, k_pool, n_rep)
    k = k_pool.index_select(0, slot_mapping).permute(1, 0, 2).unsqueeze(0)
    v = v_pool.index_select(0, slot_mapping).permute(1, 0, 2).unsqueeze(0)
    return sdpa(q, k, v, scale=scale)


def query_by_query(q, k_pool, v_pool, slot_mapping, n_rep, scale=None):
    """Loops over heads and queries; each query takes the keys that it may see."""
    _refuse(q, k_pool, n_rep)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    before = len(slot_mapping) - q.shape[2]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        for i in range(q.shape[2]):
            seen = slot_mapping[: before + i + 1]
            keys, values = k_pool[seen, head // n_rep], v_pool[seen, head // n_rep]
            weights = torch.softmax(keys @ q[0, head, i] * scale, dim=0)
            out[0, head, i] = weights @ values
    return out


def in_one_sum(q, k_pool, v_pool, slot_mapping, n_rep, scale=None):
    """einsum over grouped heads, with an additive mask."""
    _refuse(q, k_pool, n_rep)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = k_pool[slot_mapping], v_pool[slot_mapping]
    grouped = q[0].unflatten(0, (-1, n_rep))
    scores = torch.einsum("grqd,kgd->grqk", grouped, k) * scale
    query_len, kv_len = scores.shape[-2:]
    position = torch.arange(kv_len - query_len, kv_len)
    ahead = torch.arange(kv_len)[None, :] > position[:, None]
    scores = scores + torch.zeros(ahead.shape).masked_fill(ahead, -torch.inf)
    out = torch.einsum("grqk,kgd->grqd", scores.softmax(-1), v)
    return out.flatten(0, 1)[None]


RIGHT = {"paged_attention_reference": (gathered, query_by_query, in_one_sum)}
