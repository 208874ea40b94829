"""Paged attention of a ragged batch: shared keys, a split history, and a merge by log-sum-exp."""

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton: tlsim replaces it
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl


@triton.jit
def split_kv_kernel(
    q_ptr,  # [num_tokens, n_q, head_dim]
    k_ptr,  # [num_slots, n_kv, head_dim]
    v_ptr,
    table_ptr,  # [num_seqs, max_blocks]
    kv_len_ptr,  # [num_seqs]
    start_ptr,  # [num_seqs + 1], where each sequence's queries start
    out_ptr,  # [num_tokens, n_q, splits, head_dim], contiguous
    lse_ptr,  # [num_tokens, n_q, splits]: the log-sum-exp of each part's scores, to base 2
    scale,  # of the scores, times log2(e)
    num_seqs,
    q_token,  # strides, in elements; those that are missing are 1
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_seq,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # head_dim, padded to a power of two
    BLOCK_SIZE: tl.constexpr,  # tokens in a block of the pool
    ROWS: tl.constexpr,  # rows of a tile: N_REP query heads of ROWS // N_REP queries
    TILE: tl.constexpr,  # keys in one iteration of the loop
    SEQS: tl.constexpr,  # num_seqs, padded to a power of two; 0: each sequence has one query
    LONG: tl.constexpr,  # whether offsets into the pools need 64 bits
    PARTS: tl.constexpr,  # whether there are several splits, so that lse is needed
    PRECISION: tl.constexpr,  # of the products: "ieee" for float32
    OVERLAP: tl.constexpr,  # let the merge start early (CUDA's programmatic dependent launch)
):
    """Attention of one tile of queries over one part of a sequence's keys, for one KV head.

    The rows of the tile are the query heads that share the KV head, so each key and value is
    loaded once for all of them. Streaming softmax to base 2 (Milakov and Gimelshein 2018), over
    the part of the history that belongs to the split (Dao et al. 2023, Flash-Decoding).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)  # fastest: the KV heads of a token lie side by side in memory
    split, splits = tl.program_id(1), tl.num_programs(1)
    QUERIES: tl.constexpr = ROWS // N_REP
    if SEQS == 0:
        seq, first = tl.program_id(2), 0
    else:  # sequence i has tiles from starts[i] // QUERIES + i on
        i = tl.arange(0, SEQS)
        tiles = tl.load(start_ptr + i, mask=i < num_seqs, other=0) // QUERIES + i
        found = (i < num_seqs) & (tiles <= tl.program_id(2))
        seq = tl.sum(found.to(tl.int32), axis=0) - 1
        tile = tl.program_id(2) - tl.max(tl.where(found, tiles, 0), axis=0)
        first = tile * QUERIES
    begin = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - begin
    kv_len = tl.load(kv_len_ptr + seq)

    row = tl.arange(0, ROWS)
    query = first + row // N_REP  # [ROWS]
    valid = (row < QUERIES * N_REP) & (query < query_len)
    visible = kv_len - query_len + query + 1  # number of keys up to the query's position
    dim = tl.arange(0, BLOCK_D)
    token = (begin + query).to(tl.int64)
    head = kv_head * N_REP + row % N_REP
    q = tl.load(
        q_ptr + (token * q_token + head * q_head)[:, None] + dim[None, :],
        mask=valid[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    q = (q.to(tl.float32) * scale).to(k_ptr.dtype.element_ty)  # [ROWS, BLOCK_D]
    # Loads past head_dim or past the last key are clamped, not masked: q is 0 in the padded
    # channels, and the scores of the keys past the end are masked.
    channel = tl.minimum(dim, HEAD_DIM - 1) if BLOCK_D > HEAD_DIM else dim

    # the split's part of the keys: whole tiles, of equal number in each split but the last
    end = tl.minimum(kv_len, kv_len - query_len + first + QUERIES)
    part = tl.cdiv(tl.cdiv(kv_len, splits), TILE) * TILE
    low = split * part
    high = tl.minimum(end, low + part)
    m = tl.full((ROWS,), -1e30, tl.float32)  # the largest score so far; finite, so m - m is 0
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        held = tl.minimum(position, high - 1)
        block = tl.load(table_ptr + seq * table_seq + held // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + held % BLOCK_SIZE
        slot = slot.to(tl.int64) if LONG else slot.to(tl.int32)
        k = tl.load(k_ptr + (slot * k_slot + kv_head * k_head)[:, None] + channel[None, :])
        v = tl.load(v_ptr + (slot * v_slot + kv_head * v_head)[:, None] + channel[None, :])

        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [ROWS, TILE]
        seen = position[None, :] < tl.minimum(visible, high)[:, None]
        score = tl.where(seen, score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        alpha = tl.exp2(m - m_new)  # rescales the sums made with the old maximum
        p = tl.exp2(score - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new

    result = (token * tl.num_programs(0) * N_REP + head) * splits + split  # [ROWS]
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # without a key, the result is 0
    out = out_ptr + (result * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out, acc, mask=valid[:, None] & (dim < HEAD_DIM)[None, :])
    if PARTS:
        tl.store(lse_ptr + result, m + tl.log2(l), mask=valid)


@triton.jit
def merge_kernel(
    part_ptr,  # [num_tokens * n_q, splits, head_dim], contiguous
    lse_ptr,  # [num_tokens * n_q, splits]
    out_ptr,  # [num_tokens * n_q, head_dim]
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,  # splits, padded to a power of two
    OVERLAP: tl.constexpr,
):
    """The attention of one query and head from its parts: their mean, weighted by 2 ** lse."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    real, in_head = split < splits, dim < HEAD_DIM
    lse = tl.load(lse_ptr + row * splits + split, mask=real, other=float("-inf"))
    part = tl.load(
        part_ptr + ((row * splits + split) * HEAD_DIM)[:, None] + dim[None, :],
        mask=real[:, None] & in_head[None, :],
        other=0.0,
    )
    weight = tl.exp2(lse - tl.maximum(tl.max(lse, axis=0), -1e30))  # [SPLITS]; 0 without a key
    total = tl.sum(weight, axis=0)
    out = tl.sum(weight[:, None] * part, axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dim, out, mask=in_head)
