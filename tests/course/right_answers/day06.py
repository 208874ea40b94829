"""Day 6: right answers in other styles than the package's."""

import math

import torch
import torch.nn.functional as F


def by_view(q, n_kv):
    batch, n_q, seq, d = q.shape
    return q.view(batch, n_kv, n_q // n_kv, seq, d)


def by_reshape(q, n_kv):
    return q.reshape(q.shape[0], n_kv, -1, *q.shape[2:])


def by_unfold(q, n_kv):
    """Windows of n_rep heads that do not overlap."""
    n_rep = q.shape[1] // n_kv
    return q.unfold(1, n_rep, n_rep).permute(0, 1, 4, 2, 3)


def by_comparison(seq):
    positions = torch.arange(seq)
    return positions[None, :] > positions[:, None]


def by_loops(seq):
    mask = torch.zeros(seq, seq, dtype=torch.bool)
    for i in range(seq):
        for j in range(i + 1, seq):
            mask[i, j] = True
    return mask


def by_lower_triangle(seq):
    return ~torch.tril(torch.ones(seq, seq)).bool()


def head_by_head(q, k, v, scale=None):
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    batch, n_q, query_len, _ = q.shape
    n_kv, kv_len = k.shape[1], k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(n_q):
            g = h // (n_q // n_kv)
            for i in range(query_len):
                seen = kv_len - query_len + i + 1
                scores = (k[b, g, :seen].float() @ q[b, h, i].float()) * scale
                out[b, h, i] = (scores.softmax(0) @ v[b, g, :seen].float()).to(q.dtype)
    return out


def with_torch(q, k, v, scale=None):
    query_len, kv_len = q.shape[2], k.shape[2]
    visible = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)


def with_repeated_heads(q, k, v, scale=None):
    n_rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(n_rep, dim=1), v.repeat_interleave(n_rep, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).float()
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    position = torch.arange(k.shape[2])
    query = position[k.shape[2] - q.shape[2] :, None]
    scores = scores + torch.zeros_like(scores).masked_fill(position > query, float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1).to(v.dtype), v)


def with_groups(q, k, v, scale=None):
    """Grouped queries against keys that broadcast, with an explicit softmax."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k.unsqueeze(2).mT).float() * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    scores = scores.masked_fill(hidden, -torch.inf)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    shares = shares / shares.sum(-1, keepdim=True)
    return (shares.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)


RIGHT = {
    "group_queries": (by_view, by_reshape, by_unfold),
    "causal_mask": (by_comparison, by_loops, by_lower_triangle),
    "sdpa": (head_by_head, with_torch, with_repeated_heads, with_groups),
}
