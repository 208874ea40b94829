# Day 22, paged_attention_kernel: your answer, saved when it passed its check.

import triton
import triton.language as tl


@triton.jit
def paged_attention_kernel(
    q_ptr,  # [n_q, seq_q, head_dim]
    k_ptr,  # [num_slots, n_kv, head_dim]
    v_ptr,
    slot_ptr,  # [seq_total]
    out_ptr,  # [n_q, seq_q, head_dim]
    scale,
    seq_q,
    seq_total,
    q_head,  # strides, in elements; head_dim's are 1
    q_seq,
    k_slot,
    k_head,
    v_slot,
    v_head,
    out_head,
    out_seq,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # head_dim, padded to a power of two
    TILE: tl.constexpr,  # keys per turn of the loop
):
    """One query of one head attends to the keys before it, TILE at a time (Milakov and Gimelshein
    2018): m is the largest score so far, l the sum of exp(score - m), acc that sum of values."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // N_REP
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM

    q = tl.load(q_ptr + head * q_head + query * q_seq + dim, mask=in_head, other=0.0)
    q = q.to(tl.float32) * scale  # [BLOCK_D]
    visible = seq_total - seq_q + query + 1  # the keys up to the query's own
    m = float("-inf")
    l = 0.0  # noqa: E741
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, visible, TILE):
        position = start + tl.arange(0, TILE)
        held = position < seq_total  # the last tile is ragged
        # int64: past slot 2,097,151 eight heads of 128 channels are beyond 32 bits
        slot = tl.load(slot_ptr + position, mask=held, other=0).to(tl.int64)
        mask = held[:, None] & in_head[None, :]
        k = tl.load(k_ptr + (slot * k_slot + kv_head * k_head)[:, None] + dim[None, :], mask, 0.0)
        v = tl.load(v_ptr + (slot * v_slot + kv_head * v_head)[:, None] + dim[None, :], mask, 0.0)

        score = tl.sum(q[None, :] * k.to(tl.float32), axis=1)  # [TILE]
        score = tl.where(position < visible, score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=0))
        alpha = tl.exp(m - m_new)  # shrinks what was summed under the old maximum
        p = tl.exp(score - m_new)
        l = l * alpha + tl.sum(p, axis=0)  # noqa: E741
        acc = acc * alpha + tl.sum(p[:, None] * v.to(tl.float32), axis=0)
        m = m_new

    out = out_ptr + head * out_head + query * out_seq + dim
    tl.store(out, acc / l, mask=in_head)  # cast to out's dtype
