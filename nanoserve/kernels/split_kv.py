"""Paged attention of a ragged batch: heads packed in a tile, the history split, a merge."""

from dataclasses import dataclass, replace

import torch

from nanoserve.kernels.reference import PagedTables
from nanoserve.kernels.sizes import next_power_of_2

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton: tlsim replaces it
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl


@triton.jit
def load_queries(
    q_ptr,
    q_token,
    q_head,
    start_ptr,
    seq,
    first,
    kv_len,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A tile of queries: one row for each query from `first` on and each head of the KV head.

    Returns q [ROWS, BLOCK_D]; and [ROWS] the row's index in a contiguous [num_tokens, n_q], whether
    the row is in use, and the number of keys that its query sees.
    """
    begin = tl.load(start_ptr + seq)
    query_len = tl.load(start_ptr + seq + 1) - begin
    row = tl.arange(0, ROWS)
    query = first + row // N_REP
    used = (row < ROWS // N_REP * N_REP) & (query < query_len)
    sees = kv_len - query_len + query + 1
    token = (begin + query).to(tl.int64)
    head = tl.program_id(0) * N_REP + row % N_REP
    dim = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + dim[None, :], mask, 0.0)
    return q, token * (tl.num_programs(0) * N_REP) + head, used, sees


@triton.jit
def load_tile(
    start,
    high,
    k_ptr,
    k_slot,
    v_ptr,
    v_slot,
    table_ptr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
):
    """The keys and values of TILE positions from `start` on, [TILE, BLOCK_D] each.

    Positions from `high` on, and channels past head_dim, are clamped to the last one, so that no
    load needs a mask: the scores of such positions are masked, and q is 0 in such channels.
    """
    channel = tl.arange(0, BLOCK_D)
    if BLOCK_D > HEAD_DIM:  # otherwise the compiler knows that a row's addresses are consecutive
        channel = tl.minimum(channel, HEAD_DIM - 1)
    held = tl.minimum(start + tl.arange(0, TILE), high - 1)
    slot = tl.load(table_ptr + held // BLOCK_SIZE) * BLOCK_SIZE + held % BLOCK_SIZE
    slot = slot.to(tl.int64) if LONG else slot.to(tl.int32)
    k = tl.load(k_ptr + (slot * k_slot)[:, None] + channel[None, :])
    v = tl.load(v_ptr + (slot * v_slot)[:, None] + channel[None, :])
    return k, v


@triton.jit
def fold_tile(score, v, m, l, acc, scale):
    """Fold a tile of scores [ROWS, TILE] and values [TILE, BLOCK_D] into a streaming softmax.

    m [ROWS] is the largest score so far, l [ROWS] the sum of 2 ** (score - m), and acc [ROWS,
    BLOCK_D] the sum of 2 ** (score - m) * value (Milakov and Gimelshein 2018, to base 2). Scores
    are scaled here, in float32: a query that is scaled first is rounded to its dtype once more.
    """
    m_new = tl.maximum(m, tl.max(score, axis=1) * scale)
    alpha = tl.exp2(m - m_new)  # rescales the sums made with the old maximum
    p = tl.exp2(score * scale - m_new[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # no TF32
    return m_new, l * alpha + tl.sum(p, axis=1), acc


@triton.jit
def fold_keys(
    q,
    sees,
    low,
    high,
    k,
    k_slot,
    v,
    v_slot,
    table,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
):
    """The streaming softmax m, l, acc of queries q [ROWS, BLOCK_D] over positions low to high.

    Row r sees the first sees[r] positions. k, v and table point to the KV head's first element and
    to the sequence's first block. `scale` includes the factor log2(e).
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    sees = tl.minimum(sees, high)
    m = tl.full((q.shape[0],), -1e30, tl.float32)  # finite, so that m - m is 0 before the first key
    l = tl.zeros((q.shape[0],), tl.float32)
    acc = tl.zeros((q.shape[0], BLOCK_D), tl.float32)
    whole = low
    if q.shape[0] > 16:  # many queries: every row sees most of the tiles, which then need no mask
        whole = tl.maximum(low, tl.min(sees, axis=0) // TILE * TILE)
        for start in range(low, whole, TILE):
            key, value = load_tile(
                start, high, k, k_slot, v, v_slot, table, BLOCK_D, HEAD_DIM, BLOCK_SIZE, TILE, LONG
            )
            score = tl.dot(q, tl.trans(key), input_precision="ieee")  # [ROWS, TILE]
            m, l, acc = fold_tile(score, value, m, l, acc, scale)
    for start in range(whole, high, TILE):
        key, value = load_tile(
            start, high, k, k_slot, v, v_slot, table, BLOCK_D, HEAD_DIM, BLOCK_SIZE, TILE, LONG
        )
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        seen = start + tl.arange(0, TILE)[None, :] < sees[:, None]
        m, l, acc = fold_tile(tl.where(seen, score, float("-inf")), value, m, l, acc, scale)
    return m, l, acc


@triton.jit
def fold_once(
    q,
    sees,
    high,
    k,
    k_slot,
    v,
    v_slot,
    table,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
):
    """l and acc of fold_keys over positions 0 to high, 1 to TILE of them: nothing is rescaled."""
    key, value = load_tile(
        0, high, k, k_slot, v, v_slot, table, q.shape[1], HEAD_DIM, BLOCK_SIZE, TILE, LONG
    )
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale  # [ROWS, TILE]
    seen = tl.arange(0, TILE)[None, :] < tl.minimum(sees, high)[:, None]
    score = tl.where(seen, score, -1e30)
    p = tl.exp2(score - tl.max(score, axis=1)[:, None])
    return tl.sum(p, axis=1), tl.dot(p.to(value.dtype), value, input_precision="ieee")


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
    ONCE: tl.constexpr = False,  # whether every sequence has 1 to TILE keys
):
    """Attention of one tile of queries for one KV head: each key is loaded once for all its heads.

    Programs: [n_kv, tiles]. KV heads come first, because those of one token lie side by side. The
    last tiles come first: they see the most keys, and none of them should start late.
    """
    kv_head = tl.program_id(0)
    QUERIES: tl.constexpr = ROWS // N_REP
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if SEQS == 1:
        seq = tile
        first = 0
    else:  # the tiles of sequence i start at tile starts[i] // QUERIES + i
        i = tl.arange(0, SEQS)
        starts = tl.load(start_ptr + i, mask=i < num_seqs, other=0) // QUERIES + i
        reached = (i < num_seqs) & (starts <= tile)
        seq = tl.sum(reached.to(tl.int32), axis=0) - 1
        first = (tile - tl.max(tl.where(reached, starts, 0), axis=0)) * QUERIES
    kv_len = tl.load(kv_len_ptr + seq)
    q, row, used, sees = load_queries(
        q_ptr, q_token, q_head, start_ptr, seq, first, kv_len, N_REP, HEAD_DIM, BLOCK_D, ROWS
    )
    k, v, table = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, table_ptr + seq * table_seq
    high = tl.minimum(kv_len, tl.max(sees, axis=0))  # no query of the tile sees a later key
    if ONCE:
        l, acc = fold_once(
            q, sees, high, k, k_slot, v, v_slot, table, scale, HEAD_DIM, BLOCK_SIZE, TILE, LONG
        )
    else:
        _, l, acc = fold_keys(
            q, sees, 0, high, k, k_slot, v, v_slot, table, scale, HEAD_DIM, BLOCK_SIZE, TILE, LONG
        )
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # without a key, the result is 0
    dim = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dim[None, :], out, mask=mask)


@triton.jit
def share_keys(kv_len_ptr, num_seqs, workers, TILE: tl.constexpr, SEQS: tl.constexpr):
    """The key tiles of all sequences, one after another, in equal shares for the workers.

    Returns [SEQS] the number of each sequence's keys, its first tile, and the tile after its last;
    then the number of tiles in all, and in a share. A sequence without keys has one tile, so that a
    worker writes its result, 0.
    """
    i = tl.arange(0, SEQS)
    kv_lens = tl.load(kv_len_ptr + i, mask=i < num_seqs, other=0)
    tiles = tl.where(i < num_seqs, tl.maximum(tl.cdiv(kv_lens, TILE), 1), 0)
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    return kv_lens, ends - tiles, ends, total, tl.cdiv(total, workers)


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
    OVERLAP: tl.constexpr,  # start the merge early (CUDA's programmatic dependent launch)
):
    """Attention of sequences whose queries fit in one tile. Every worker reads as many keys.

    Programs: [n_kv, workers]. A worker folds its share of the key tiles (as in stream-K, Osama et
    al. 2023). A share may begin or end inside a sequence (as in Flash-Decoding, Dao et al. 2023):
    then the result of worker w for sequence s is part w + s, for the merge.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    workers = tl.num_programs(1)
    kv_lens, begins, ends, total, share = share_keys(kv_len_ptr, num_seqs, workers, TILE, SEQS)
    low_tile = worker * share
    high_tile = tl.minimum(low_tile + share, total)
    first_seq = tl.sum((ends <= low_tile).to(tl.int32), axis=0)
    last_seq = tl.sum((ends < high_tile).to(tl.int32), axis=0) + 1
    k, v = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head
    dim = tl.arange(0, BLOCK_D)
    for seq in range(first_seq, tl.where(low_tile < high_tile, last_seq, first_seq)):
        this = tl.arange(0, SEQS) == seq
        kv_len = tl.sum(tl.where(this, kv_lens, 0), axis=0)
        begin = tl.sum(tl.where(this, begins, 0), axis=0)
        low = tl.maximum(low_tile - begin, 0) * TILE
        high = tl.minimum((high_tile - begin) * TILE, kv_len)
        q, row, used, sees = load_queries(
            q_ptr, q_token, q_head, start_ptr, seq, 0, kv_len, N_REP, HEAD_DIM, BLOCK_D, ROWS
        )
        table = table_ptr + seq * table_seq
        m, l, acc = fold_keys(
            q, sees, low, high, k, k_slot, v, v_slot, table, scale, HEAD_DIM, BLOCK_SIZE, TILE, LONG
        )
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        mask = used[:, None] & (dim < HEAD_DIM)[None, :]
        shared = (low > 0) | (high < kv_len)  # another worker has a part of this sequence
        whole = (low == 0) & (high == kv_len)
        tl.store(out_ptr + (row * HEAD_DIM)[:, None] + dim[None, :], out, mask=mask & whole)
        part = ((worker + seq) * tl.num_programs(0) + kv_head) * ROWS + tl.arange(0, ROWS)
        tl.store(part_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], out, mask=mask & shared)
        tl.store(lse_ptr + part, m + tl.log2(l), mask=used & shared)


@triton.jit
def merge_kernel(
    part_ptr,  # [workers + num_seqs, n_kv, ROWS, head_dim]
    lse_ptr,  # [workers + num_seqs, n_kv, ROWS]
    kv_len_ptr,  # [num_seqs]
    start_ptr,  # [num_seqs + 1]
    out_ptr,  # [num_tokens, n_q, head_dim], contiguous
    num_seqs,
    N_REP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # TILE and SEQS as for split_kv_kernel
    SEQS: tl.constexpr,
    PARTS: tl.constexpr,  # parts in one iteration of the loop
    OVERLAP: tl.constexpr,
):
    """Merge the parts of one row: the mean of their results, weighted by 2 ** lse.

    Programs: [n_kv, workers, rows in use]. The programs of worker w merge the sequence that begins
    in w's share and ends in a later share, if there is one.
    """
    kv_head, worker, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    workers = tl.num_programs(1)
    _, begins, ends, _, share = share_keys(kv_len_ptr, num_seqs, workers, TILE, SEQS)
    crosses = (begins // share == worker) & (begins < ends) & ((ends - 1) // share > worker)
    seq = tl.max(tl.where(crosses, tl.arange(0, SEQS), -1), axis=0)
    last = tl.max(tl.where(crosses, (ends - 1) // share + 1, worker), axis=0)
    token = tl.load(start_ptr + tl.maximum(seq, 0)) + row // N_REP
    used = (token < tl.load(start_ptr + tl.maximum(seq, 0) + 1)) & (last > worker)
    dim = tl.arange(0, BLOCK_D)
    if OVERLAP:  # wait for the parts. Worker 0 always waits, so that the merge never ends first
        waits = (last > worker) | (worker == 0)
        if waits:
            tl.extra.cuda.gdc_wait()
    m = tl.full((1,), -1e30, tl.float32)
    l = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(worker, last, PARTS):
        other = start + tl.arange(0, PARTS)
        part = ((other + seq) * tl.num_programs(0) + kv_head).to(tl.int64) * ROWS + row
        lse = tl.load(lse_ptr + part, mask=other < last, other=float("-inf"))
        mask = (other < last)[:, None] & (dim < HEAD_DIM)[None, :]
        out = tl.load(part_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], mask, 0.0)
        m_new = tl.maximum(m, tl.max(lse, axis=0))
        alpha, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        l = l * alpha + tl.sum(weight, axis=0)
        acc = acc * alpha + tl.sum(weight[:, None] * out, axis=0)
        m = m_new
    index = token.to(tl.int64) * (tl.num_programs(0) * N_REP) + kv_head * N_REP + row % N_REP
    out = acc / tl.where(l == 0.0, 1.0, l)
    tl.store(out_ptr + index * HEAD_DIM + dim, out, mask=(dim < HEAD_DIM) & used)


@dataclass(frozen=True)
class Launch:
    """The launch parameters of a kernel.

    rows and tile are the queries' rows and the keys of a tile; num_warps of 32 threads compute it;
    num_stages iterations are in flight. `programs` is the number of a split's programs for each
    multiprocessor.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs: int = 1


# By kernel, compute capability and the largest head_dim. The comments give what was measured on an
# H200 (9.0) in bfloat16, as a share of the peak read bandwidth or of SDPA's speed. The other rows
# were compiled, not measured: fewer stages, since these GPUs have less shared memory.
LAUNCHES = {
    ("split", (7, 5), 256): Launch(16, 32, 2, 2, programs=4),
    ("split", (8, 0), 256): Launch(16, 32, 1, 4, programs=4),
    ("split", (9, 0), 64): Launch(16, 64, 1, 5, programs=3),  # 64 x 2,048: 72%; 2 warps: 66%
    ("split", (9, 0), 128): Launch(16, 64, 2, 5, programs=2),  # 4 x 32,768: 93%; 1 warp: 91%
    ("packed", (7, 5), 256): Launch(16, 32, 2, 2),
    ("packed", (8, 0), 256): Launch(16, 32, 1, 4),
    ("packed", (9, 0), 64): Launch(16, 64, 1, 5),  # 64 x 8,192: 97%; 2 warps: 96%
    ("packed", (9, 0), 128): Launch(16, 64, 2, 4),  # 64 x 8,192: 98%; 1 warp, tile 32: 95%
    ("waves", (7, 5), 256): Launch(16, 32, 2, 2),
    ("waves", (8, 0), 256): Launch(16, 32, 1, 4),
    ("waves", (9, 0), 128): Launch(16, 64, 2, 5),  # 256 x 1,024: 95%, ragged 89%; 4 stages: 83%
    ("prefill", (7, 5), 128): Launch(64, 32, 4, 2),
    ("prefill", (7, 5), 256): Launch(32, 16, 4, 2),
    ("prefill", (8, 0), 128): Launch(64, 64, 4, 2),
    ("prefill", (8, 0), 256): Launch(64, 32, 4, 2),
    ("prefill", (9, 0), 64): Launch(64, 128, 4, 2),  # 8,192 tokens: 0.73 of SDPA; tile 64: 0.71
    ("prefill", (9, 0), 128): Launch(128, 128, 8, 3),  # 8,192 tokens: 0.63; 64 rows: 0.55
}
FLOAT32 = Launch(16, 32, 4, 2, programs=2)  # every kernel's: tensor cores would round to TF32


def launch_of(
    kernel: str, capability: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> Launch:
    """The launch parameters of a kernel, by its name in LAUNCHES, on a GPU of a compute capability.

    The row is the newest that is not newer than the GPU. ValueError if there is none.
    """
    if dtype == torch.float32:
        return FLOAT32 if head_dim <= 128 else replace(FLOAT32, tile=16)
    rows = [
        (since, -widest, launch)
        for (name, since, widest), launch in LAUNCHES.items()
        if name == kernel and since <= capability and head_dim <= widest
    ]
    if not rows:
        raise ValueError(
            f"no launch parameters for the kernel {kernel!r} with head_dim {head_dim} on compute "
            f"capability {'.'.join(map(str, capability))}"
        )
    return max(rows, key=lambda row: row[:2])[2]


def num_workers(
    multiprocessors: int, n_kv: int, num_seqs: int, tiles: int, programs: int = 2
) -> int:
    """The number of workers for each KV head; 0 if the history should not be split.

    A split has `programs` programs for each multiprocessor, but no more workers than key tiles, of
    which all sequences together have at most `tiles`. Sequences that make eight programs for each
    multiprocessor fill the GPU without a split. More than eight workers are a multiple of eight.
    """
    if num_seqs * n_kv >= 8 * multiprocessors:
        return 0
    workers = programs * multiprocessors // n_kv
    workers = workers // 8 * 8 if workers > 8 else workers  # the merge reads 32 or 64 parts at once
    return max(1, min(workers, tiles))


def choose_launch(
    tables: PagedTables,
    n_rep: int,
    n_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    multiprocessors: int,
) -> tuple[Launch, int]:
    """The launch parameters of a batch, and the number of workers; 0 workers: no split.

    Queries that need more than one tile are a prefill. Otherwise num_workers decides, with two
    exceptions. Sequences of about equal length that make three or four programs for each
    multiprocessor are not split: these programs run all at once, and end together. And there is no
    worker without tiles: 48 workers of 64 tiles would have two each, so 32 workers are enough.
    """
    num_seqs = len(tables.kv_lens)
    split = launch_of("split", capability, head_dim, dtype)
    if tables.max_query_len > max(split.rows, next_power_of_2(n_rep)) // n_rep:
        return launch_of("prefill", capability, head_dim, dtype), 0
    longest = num_seqs * tables.max_kv_len
    even = tables.total_kv_len is None or tables.total_kv_len >= 0.9 * longest
    if even and 3 * multiprocessors <= num_seqs * n_kv <= 4 * multiprocessors:
        return launch_of("packed", capability, head_dim, dtype), 0
    tiles = num_seqs * max(1, -(-tables.max_kv_len // split.tile))
    workers = num_workers(multiprocessors, n_kv, num_seqs, tiles, split.programs)
    if not workers:
        return launch_of("waves", capability, head_dim, dtype), 0
    share = -(-tiles // workers)
    return split, -(-tiles // share)
