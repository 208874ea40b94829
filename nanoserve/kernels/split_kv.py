"""Paged attention of a ragged batch: heads packed in a tile, keys shared among programs, a merge."""

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton: tlsim replaces it
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl


@triton.jit
def load_queries(
    q_ptr,
    start_ptr,
    kv_len_ptr,
    seq,
    first,
    kv_head,
    scale,
    q_token,
    q_head,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The queries of a sequence from `first` on, of the heads that share a KV head, one per row.

    Returns q [ROWS, BLOCK_D] in float32, scaled; and for each row the result's index in a
    contiguous [num_tokens, n_q], whether the row is used, and the number of keys it sees.
    """
    begin = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - begin
    row = tl.arange(0, ROWS)
    query = first + row // N_REP
    used = (row < ROWS // N_REP * N_REP) & (query < query_len)
    sees = tl.load(kv_len_ptr + seq) - query_len + query + 1
    token = (begin + query).to(tl.int64)
    head = kv_head * N_REP + row % N_REP
    dim = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + (token * q_token + head * q_head)[:, None] + dim[None, :],
        mask=used[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    return q.to(tl.float32) * scale, token * (tl.num_programs(0) * N_REP) + head, used, sees


@triton.jit
def fold_keys(
    q,
    sees,
    low,
    high,
    k_ptr,
    v_ptr,
    table_ptr,
    k_slot,
    k_head,
    v_slot,
    v_head,
    kv_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Streaming softmax to base 2 of the queries q [ROWS, BLOCK_D] over the keys from low to high.

    Returns m, l [ROWS] and acc [ROWS, BLOCK_D]: the largest score, the sum of 2 ** (score - m), and
    the sum of 2 ** (score - m) * value (Milakov and Gimelshein 2018).
    """
    ROWS: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    q = q.to(k_ptr.dtype.element_ty)
    # Positions and channels past the end are clamped, so that no load of K and V needs a mask. The
    # scores of such positions are masked, and q is 0 in such channels.
    channel = tl.arange(0, BLOCK_D)
    if BLOCK_D > HEAD_DIM:  # else the compiler knows the addresses of a row to be consecutive
        channel = tl.minimum(channel, HEAD_DIM - 1)
    sees = tl.minimum(sees, high)
    m = tl.full((ROWS,), -1e30, tl.float32)  # finite, so that m - m is 0 before the first key
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        held = tl.minimum(position, high - 1)
        slot = tl.load(table_ptr + held // BLOCK_SIZE) * BLOCK_SIZE + held % BLOCK_SIZE
        slot = slot.to(tl.int64) if LONG else slot.to(tl.int32)
        k = tl.load(k_ptr + (slot * k_slot + kv_head * k_head)[:, None] + channel[None, :])
        v = tl.load(v_ptr + (slot * v_slot + kv_head * v_head)[:, None] + channel[None, :])

        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [ROWS, TILE]
        score = tl.where(position[None, :] < sees[:, None], score, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, axis=1))
        alpha = tl.exp2(m - m_new)  # rescales the sums made with the old maximum
        p = tl.exp2(score - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return m, l, acc


@triton.jit
def packed_kernel(
    q_ptr,  # [num_tokens, n_q, head_dim]
    k_ptr,  # [num_slots, n_kv, head_dim]
    v_ptr,
    table_ptr,  # [num_seqs, max_blocks]
    kv_len_ptr,  # [num_seqs]
    start_ptr,  # [num_seqs + 1], where each sequence's queries start
    out_ptr,  # [num_tokens, n_q, head_dim], contiguous
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
    ROWS: tl.constexpr,  # rows of a tile: N_REP heads of each of ROWS // N_REP queries
    TILE: tl.constexpr,  # keys in one iteration of the loop
    SEQS: tl.constexpr,  # num_seqs, padded to a power of two; 1: every sequence has one tile
    LONG: tl.constexpr,  # whether offsets into the pools need 64 bits
    PRECISION: tl.constexpr,  # of the products; "ieee" keeps float32 exact
):
    """Attention of one tile of queries for one KV head: each key is loaded once for all its heads.

    Programs: [n_kv, tiles]. KV heads come first, because those of one token lie side by side.
    """
    kv_head = tl.program_id(0)
    if SEQS == 1:
        seq = tl.program_id(1)
        first = 0
    else:  # the tiles of sequence i start at starts[i] // QUERIES + i: enough for those before
        i = tl.arange(0, SEQS)
        tile = tl.load(start_ptr + i, mask=i < num_seqs, other=0) // (ROWS // N_REP) + i
        mine = (i < num_seqs) & (tile <= tl.program_id(1))
        seq = tl.sum(mine.to(tl.int32), axis=0) - 1
        tile = tl.program_id(1) - tl.max(tl.where(mine, tile, 0), axis=0)
        first = tile * (ROWS // N_REP)
    q, row, used, sees = load_queries(
        q_ptr, start_ptr, kv_len_ptr, seq, first, kv_head, scale, q_token, q_head,
        N_REP, HEAD_DIM, BLOCK_D, ROWS,
    )  # fmt: skip
    m, l, acc = fold_keys(
        q, sees, 0, tl.minimum(tl.load(kv_len_ptr + seq), tl.max(sees, axis=0)),
        k_ptr, v_ptr, table_ptr + seq * table_seq, k_slot, k_head, v_slot, v_head,
        kv_head, HEAD_DIM, BLOCK_SIZE, TILE, LONG, PRECISION,
    )  # fmt: skip
    dim = tl.arange(0, BLOCK_D)
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # without a key, the result is 0
    mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dim[None, :], out, mask=mask)


@triton.jit
def split_kv_kernel(
    q_ptr,  # as for packed_kernel
    k_ptr,
    v_ptr,
    table_ptr,
    kv_len_ptr,
    start_ptr,
    out_ptr,
    part_ptr,  # [workers + num_seqs, n_kv, ROWS, head_dim]: results over a part of the keys
    lse_ptr,  # [workers + num_seqs, n_kv, ROWS]: the log-sum-exp of their scores, to base 2
    scale,
    num_seqs,
    q_token,
    q_head,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_seq,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,  # num_seqs, padded to a power of two
    LONG: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,  # start the merge early (CUDA's programmatic dependent launch)
):
    """Attention of sequences whose queries fit in one tile. Every worker reads as many keys.

    Programs: [n_kv, workers]. The key tiles of all sequences, one after another, are shared out
    equally. A worker's share may end inside a sequence (Dao et al. 2023, Flash-Decoding; its
    shares as in stream-K, Osama et al. 2023). Worker w's result for sequence s is part w + s.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    i, tiles, ends, share = share_keys(kv_len_ptr, num_seqs, tl.num_programs(1), TILE, SEQS)
    low_tile = worker * share
    high_tile = tl.minimum(low_tile + share, tl.max(ends, axis=0))
    first_seq = tl.sum((ends <= low_tile).to(tl.int32), axis=0)
    last_seq = tl.sum((ends < high_tile).to(tl.int32), axis=0)
    dim = tl.arange(0, BLOCK_D)
    for seq in range(first_seq, tl.where(low_tile < high_tile, last_seq + 1, first_seq)):
        before = tl.sum(tl.where(i == seq, ends - tiles, 0), axis=0)  # tiles of earlier sequences
        kv_len = tl.load(kv_len_ptr + seq)
        low = tl.maximum(low_tile - before, 0) * TILE
        high = tl.minimum((high_tile - before) * TILE, kv_len)
        q, row, used, sees = load_queries(
            q_ptr, start_ptr, kv_len_ptr, seq, 0, kv_head, scale, q_token, q_head,
            N_REP, HEAD_DIM, BLOCK_D, ROWS,
        )  # fmt: skip
        m, l, acc = fold_keys(
            q, sees, low, high,
            k_ptr, v_ptr, table_ptr + seq * table_seq, k_slot, k_head, v_slot, v_head,
            kv_head, HEAD_DIM, BLOCK_SIZE, TILE, LONG, PRECISION,
        )  # fmt: skip
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        mask = used[:, None] & (dim < HEAD_DIM)[None, :]
        whole = (low == 0) & (high == kv_len)  # no other worker has a part of this sequence
        tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dim[None, :], out, mask=mask & whole)
        part = ((worker + seq) * tl.num_programs(0) + kv_head) * ROWS + tl.arange(0, ROWS)
        tl.store(part_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], out, mask=mask & ~whole)
        tl.store(lse_ptr + part, m + tl.log2(l), mask=used & ~whole)


@triton.jit
def share_keys(kv_len_ptr, num_seqs, workers, TILE: tl.constexpr, SEQS: tl.constexpr):
    """Each sequence's index, number of key tiles, and the sum of tiles up to its end: [SEQS]; and
    the number of tiles in a worker's share."""
    i = tl.arange(0, SEQS)
    tiles = tl.cdiv(tl.load(kv_len_ptr + i, mask=i < num_seqs, other=0), TILE)
    ends = tl.cumsum(tiles, axis=0)
    return i, tiles, ends, tl.cdiv(tl.max(ends, axis=0), workers)


@triton.jit
def merge_kernel(
    part_ptr,  # [workers + num_seqs, n_kv, rows, head_dim]
    lse_ptr,  # [workers + num_seqs, n_kv, rows]
    kv_len_ptr,
    start_ptr,
    out_ptr,  # [num_tokens, n_q, head_dim]
    num_seqs,
    workers,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
    PARTS: tl.constexpr,  # parts in one iteration of the loop
    OVERLAP: tl.constexpr,
):
    """Merge the parts of one row of a sequence: their mean, weighted by 2 ** lse.

    Programs: [n_kv, num_seqs, rows in use]. A sequence that one worker read whole has its result
    already; a sequence without keys gets 0.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    kv_head, seq, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, tiles, ends, share = share_keys(kv_len_ptr, num_seqs, workers, TILE, SEQS)
    end = tl.sum(tl.where(i == seq, ends, 0), axis=0)
    begin = end - tl.sum(tl.where(i == seq, tiles, 0), axis=0)
    share = tl.maximum(share, 1)
    first = begin // share  # the workers that read a part of the sequence
    last = tl.where(begin < end, (end - 1) // share + 1, first)
    dim = tl.arange(0, BLOCK_D)
    m = tl.full((1,), -1e30, tl.float32)
    l = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first, last, PARTS):
        worker = start + tl.arange(0, PARTS)
        part = ((worker + seq) * tl.num_programs(0) + kv_head).to(tl.int64) * ROWS + row
        lse = tl.load(lse_ptr + part, mask=worker < last, other=float("-inf"))
        result = tl.load(
            part_ptr + (part * HEAD_DIM)[:, None] + dim[None, :],
            mask=(worker < last)[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        alpha, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        l = l * alpha + tl.sum(weight, axis=0)
        acc = acc * alpha + tl.sum(weight[:, None] * result, axis=0)
        m = m_new
    begin, end = tl.load(start_ptr + seq), tl.load(start_ptr + seq + 1)
    token = begin + row // N_REP
    head = kv_head * N_REP + row % N_REP
    out = out_ptr + (token.to(tl.int64) * (tl.num_programs(0) * N_REP) + head) * HEAD_DIM + dim
    mask = (dim < HEAD_DIM) & (token < end) & (last - first != 1)
    tl.store(out, acc / tl.where(l == 0.0, 1.0, l), mask=mask)
