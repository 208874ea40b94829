# Day 6, sdpa: your answer, saved when it passed its check.

import torch


def causal_mask(seq_q: int, seq_total: int) -> torch.Tensor:
    return torch.ones(seq_q, seq_total, dtype=torch.bool).triu(1 + seq_total - seq_q)


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention: q [batch, n_q, seq_q, head_dim]; k, v [batch, n_kv, seq_total, head_dim]
    -> [batch, n_q, seq_q, head_dim]. The queries are the last seq_q positions."""
    seq_q, head_dim = q.shape[2:]
    seq_total = k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    q = q.unflatten(1, (k.shape[1], -1))
    scores = q @ k.unsqueeze(2).mT * scale
    scores = scores.masked_fill(causal_mask(seq_q=seq_q, seq_total=seq_total), -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)
