"""The oracle of paged attention: gather keys and values by slot, then sum explicitly."""

import torch

from nanoserve.layers import sdpa

ATOL, RTOL = 1e-5, 1e-4  # how far a float32 result may be from the oracle's


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """(atol, rtol) for a backend's output in `dtype`, compared with the oracle on the same inputs.

    In float16 and bfloat16, both are two units of the dtype's precision (eps). With several
    queries, the oracle rounds queries, scores and weights to the dtype; a kernel may keep float32.
    With a single query, the oracle computes in float32 too.
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
    """Causal attention over keys and values in the slots of a pool.

    q [1, n_q, query_len, head_dim]; k_pool, v_pool [num_slots, n_kv, head_dim]; slot_mapping
    [kv_len], the slot of each position, oldest first; the queries are the last query_len positions;
    n_rep = n_q // n_kv; scale defaults to head_dim ** -0.5 -> [1, n_q, query_len, head_dim].
    The result is torch.equal to sdpa over contiguous copies. Raises ValueError for a wrong n_rep.
    """
    n_q, n_kv = q.shape[1], k_pool.shape[1]
    if n_q != n_kv * n_rep:
        raise ValueError(f"n_rep {n_rep} does not fit {n_q} query heads and {n_kv} KV heads")
    # [kv_len, n_kv, head_dim] -> [1, n_kv, kv_len, head_dim]
    k, v = (pool[slot_mapping].transpose(0, 1).contiguous()[None] for pool in (k_pool, v_pool))
    return sdpa(q, k, v, scale)
