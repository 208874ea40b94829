# Day 18, paged_attention_reference: your answer, saved when it passed its check.

import torch

from nanoserve.layers import sdpa


def paged_attention_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """q [1, n_q, seq_q, head_dim]; k_pool, v_pool [num_slots, n_kv, head_dim]; slot_mapping
    [seq_total] -> [1, n_q, seq_q, head_dim]."""
    n_q, n_kv = q.shape[1], k_pool.shape[1]
    if n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    k, v = (pool[slot_mapping].transpose(0, 1).contiguous()[None] for pool in (k_pool, v_pool))
    return sdpa(q, k, v, scale)
