"""Paged attention as one Triton kernel: one program per query position and query head."""

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton: tlsim replaces it
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl


@triton.jit
def paged_attention_kernel(
    q_ptr,  # [n_q, query_len, head_dim]
    k_ptr,  # [num_slots, n_kv, head_dim]
    v_ptr,
    slot_ptr,  # [kv_len]
    out_ptr,  # [n_q, query_len, head_dim]
    scale,
    query_len,
    kv_len,
    q_head,  # strides, in elements; head_dim's and slot_ptr's are 1
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
    TILE: tl.constexpr,  # keys in one iteration of the loop
):
    """Attention of one query of one head over the keys up to its position, TILE keys at a time.

    Streaming softmax (Milakov and Gimelshein 2018): m is the largest score so far, l the sum of
    exp(score - m), acc the sum of exp(score - m) * value.
    """
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // N_REP
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM

    q = tl.load(q_ptr + head * q_head + query * q_seq + dim, mask=in_head, other=0.0)
    q = q.to(tl.float32) * scale  # [BLOCK_D]
    visible = kv_len - query_len + query + 1  # number of keys up to the query's position
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, visible, TILE):
        position = start + tl.arange(0, TILE)
        held = position < kv_len  # false in the last tile, after the last key
        # int64: with eight heads of 128 channels, offsets pass 32 bits at slot 2,097,152
        slot = tl.load(slot_ptr + position, mask=held, other=0).to(tl.int64)
        mask = held[:, None] & in_head[None, :]
        k = tl.load(k_ptr + (slot * k_slot + kv_head * k_head)[:, None] + dim[None, :], mask, 0.0)
        v = tl.load(v_ptr + (slot * v_slot + kv_head * v_head)[:, None] + dim[None, :], mask, 0.0)

        score = tl.sum(q[None, :] * k.to(tl.float32), axis=1)  # [TILE]
        score = tl.where(position < visible, score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=0))
        alpha = tl.exp(m - m_new)  # rescales the sums made with the old maximum
        p = tl.exp(score - m_new)
        l = l * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v.to(tl.float32), axis=0)
        m = m_new

    out = out_ptr + head * out_head + query * out_seq + dim
    tl.store(out, acc / l, mask=in_head)  # stored in out's dtype
