"""The oracle of the paged read: an explicit sum over keys and values gathered by slot."""

import torch

from nanoserve.layers import sdpa

ATOL, RTOL = 1e-5, 1e-4  # how far a float32 backend may be from the oracle


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """(atol, rtol) for a backend's output in dtype, against the oracle on the same inputs.

    In float16 and bfloat16 the oracle of several queries rounds them, its scores and its weights to
    the dtype (one query alone attends in float32), and a kernel need not round any: two units of
    the dtype's precision, of a value of order 1 and relative.
    """
    if dtype == torch.float32:
        return ATOL, RTOL
    return 2 * torch.finfo(dtype).eps, 2 * torch.finfo(dtype).eps


def paged_attention_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention over keys and values that lie scattered in a pool.

    q [1, n_q, query_len, head_dim]; k_pool, v_pool [num_slots, n_kv, head_dim]; slot_mapping
    [kv_len], the slot of each position, oldest first, the queries being the last query_len of them;
    n_rep = n_q // n_kv; scale defaults to head_dim ** -0.5 -> [1, n_q, query_len, head_dim].
    torch.equal to sdpa over the same keys and values laid out contiguously.
    """
    n_q, n_kv = q.shape[1], k_pool.shape[1]
    if n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    # [kv_len, n_kv, head_dim] -> [1, n_kv, kv_len, head_dim]
    k, v = (pool[slot_mapping].transpose(0, 1).contiguous()[None] for pool in (k_pool, v_pool))
    return sdpa(q, k, v, scale)
