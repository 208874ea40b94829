# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 29 · Share the keys
#
# Week 7 · Phase 2, paged memory · you need: Day 22 (The streaming softmax), Day 27 (Find the roof), Day 28 (Many sequences, one launch)
#
# **Today** you put all query heads that share a KV head into one tile. Each key is then loaded once instead of once
# for each head, and the scores of the tile are one matrix product.

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(29)
today.picture("heads-packed")

# %% [markdown]
# ## Why it matters
#
# Decode is limited by the bytes of K and V: that was Day 27. The kernel of Day 22 runs one program for each query
# and query head. In SmolLM2, three query heads share a KV head, so three programs load the same keys. In a Llama
# with 32 query heads and 8 KV heads, four do. A GPU's L2 cache catches some of these loads, but not all, and in a
# prefill every query loads its keys again.
#
# The keys do not depend on the query head. So one program can load a tile of keys **once** and multiply it with the
# queries of all heads of the group. The queries become the rows of a matrix, the keys the columns of another, and
# the scores are their product. GPUs have special hardware for such products: **tensor cores**, which Triton uses
# for `tl.dot`.

# %%
today.glossary("GQA", "KV head", "tile", "packed heads", "tensor core", "block table")

# %% [markdown]
# ## The rows of a tile
#
# The tile of queries has a fixed number of rows, `rows`, because a block of Triton has a fixed shape. A tensor core
# multiplies blocks of at least 16 rows, so `rows` is 16 or more. A query of a KV head takes `n_rep` rows, one for
# each head of the group. The kernel packs them in this order:
#
# - all heads of one query first, then all heads of the next query;
# - whole queries only: a tile holds `rows // n_rep` queries, and the rows after them stay unused;
# - the first tile begins with query 0 of the sequence, and the next tile with query `rows // n_rep`.
#
# Why heads first? The heads of a query see the same keys. So a tile of few queries needs few keys that only some of
# its rows see.
#
# ## Your turn: `rows_of_tile`
#
# | argument | meaning |
# | --- | --- |
# | `tile` | the number of the tile: 0, 1, 2, ... |
# | `rows` | rows of a tile |
# | `kv_head` | the KV head; its group is `n_rep` query heads from `kv_head * n_rep` on |
# | `n_rep` | query heads of a KV head |
# | `query_len` | queries of this sequence: 1 in a decode step |
#
# Return three tensors `[rows]`: `query`, the query of each row within the sequence; `head`, its query head; and
# `used`, a boolean that is False in a row without a query. An unused row may hold any query and head.
# `torch.arange(rows)` is a good first line; the rest is `//`, `%` and comparisons, and the kernel will use the
# same. Stuck? `today.hint()`.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
import math

import torch


# %%
def rows_of_tile(tile, rows, kv_head, n_rep, query_len):
    """The rows of a tile: query, head and used, each [rows]."""
    raise NotImplementedError("your turn")


today.check(rows_of_tile)

# %% [markdown]
# One way to write it, which this notebook uses from here on. The five queries of KV head 1 in SmolLM2, in tiles of
# 8 rows:


# %% jupyter={"source_hidden": true}
# rows_of_tile
def rows_of_tile(tile, rows, kv_head, n_rep, query_len):
    """The rows of a tile: query, head and used, each [rows]."""
    queries, row = rows // n_rep, torch.arange(rows)
    query = tile * queries + row // n_rep
    used = (row < queries * n_rep) & (query < query_len)
    return query, kv_head * n_rep + row % n_rep, used


# %%
for tile in range(3):
    query, head, used = rows_of_tile(tile, rows=8, kv_head=1, n_rep=3, query_len=5)
    cells = [f"q{int(q)}/h{int(h)}" if u else "  -  " for q, h, u in zip(query, head, used)]
    print(f"tile {tile}:", "  ".join(cells))

# %% [markdown]
# ## How many bytes?
#
# Before the kernel, count. A row of keys is one key of one KV head: `head_dim` numbers. A decode step of SmolLM2
# with 100 tokens in the cache, 9 query heads and 3 KV heads, keys in tiles of 16:
#
# - Day 22's kernel: 9 programs, each loads 100 rows. A mask switches the last tile's surplus lanes off.
# - The packed kernel: 3 programs. It has no masked loads. After the last key, the position is **clamped** to the
#   last key, which is loaded again. Its score is masked. On a GPU a load without a mask is faster, and the repeated
#   key comes from the cache.

# %%
today.predict(
    "rows", "How many rows of keys does the packed kernel load in this step?", guess=None, low=0
)

# %% [markdown]
# ## Powers of two
#
# A GPU has an instruction for $2^x$ and none for $e^x$. It computes $e^x$ as $2^{x \log_2 e}$: one multiplication
# more for each score. The scores are multiplied by the scale already. So one factor can do both, and the host
# computes it once:
#
# $$ e^{\,\mathrm{scale} \cdot q \cdot k} = 2^{\,c \cdot q \cdot k} \qquad c = \mathrm{scale} \cdot \log_2 e \approx 1.4427 \cdot \mathrm{scale} $$
#
# All of Day 22's fold then works to base 2: m is the largest score in these units, and alpha is $2^{m - m'}$.
#
# It is tempting to go further and multiply q by $c$, once for each query instead of once for each score. In float32
# that is fine. But `tl.dot` takes q in the dtype of the keys. In bfloat16, with 8 bits of precision, a scaled q is
# rounded a second time:

# %%
generator = torch.Generator().manual_seed(29)
q, keys = torch.randn(2, 500, 64, generator=generator).bfloat16()
c = 64**-0.5 * math.log2(math.e)
exact = (q.double() @ keys.double().T) * c
late = (q.float() @ keys.float().T) * c  # the scores are scaled, in float32
early = (q.float() * c).bfloat16().float() @ keys.float().T  # q is scaled, and rounded
worst = [float((score - exact).abs().max()) for score in (late, early)]
print("scaled late, a thousandth of the error or less:", worst[0] < worst[1] / 1_000)
assert worst[0] < worst[1] / 1_000

# %% [markdown]
# So the kernel scales the scores, in float32.
#
# One more change: m begins at $-10^{30}$ and not at $-\infty$. A row that has seen no key yet would otherwise
# compute $-\infty - (-\infty)$, which is NaN. Day 30 has such rows.
#
# ## Your turn: `fold_tile`
#
# Fold one tile of keys into the state of **all rows** of a tile of queries. `q` is `[rows, head_dim]`; `k` and `v`
# are `[keys, head_dim]`; `seen` `[rows, keys]` says which row sees which key. `m`, `l` `[rows]` and `acc` `[rows,
# head_dim]` hold what came before; before the first key they are $-10^{30}$, 0 and 0.
#
# 1. The scores of the tile `[rows, keys]`: one matrix product of `q` and `k`, times the factor $c$ from above.
# 2. A score that is not seen becomes `-inf`.
# 3. `m_new`, `alpha` and `p`, as on Day 22, with `torch.exp2`.
# 4. Return the new `m`, `l` and `acc`. The values are mixed by a second matrix product.


# %%
def fold_tile(m, l, acc, q, k, v, seen, scale):
    """m, l [rows] and acc [rows, head_dim] after these keys; scores and m are to base 2."""
    raise NotImplementedError("your turn")


today.check(fold_tile)

# %% [markdown]
# One way to write it. Below, it computes the attention of one tile, three heads of one query over 100 random keys,
# 16 keys at a time, and compares it with Day 6's `sdpa`.


# %% jupyter={"source_hidden": true}
# fold_tile
def fold_tile(m, l, acc, q, k, v, seen, scale):
    """m, l [rows] and acc [rows, head_dim] after these keys; scores and m are to base 2."""
    score = torch.where(seen, q @ k.T * (scale * math.log2(math.e)), -torch.inf)
    m_new = torch.maximum(m, score.amax(-1))
    alpha = torch.exp2(m - m_new)
    p = torch.exp2(score - m_new[:, None])
    return m_new, l * alpha + p.sum(-1), acc * alpha[:, None] + p @ v


# %%
from nanoserve.kernels.reference import ATOL, RTOL
from nanoserve.layers import sdpa

q, keys, values = (torch.randn(n, 64, generator=generator) for n in (3, 100, 100))
m, l, acc = torch.full((3,), -1e30), torch.zeros(3), torch.zeros(3, 64)
for first in range(0, 100, 16):
    k, v = keys[first : first + 16], values[first : first + 16]
    seen = torch.ones(3, len(k), dtype=torch.bool)  # a decode step sees all keys
    m, l, acc = fold_tile(m, l, acc, q, k, v, seen, 64**-0.5)
oracle = sdpa(q[None, :, None], keys[None, None], values[None, None])[0, :, 0]
print("as sdpa:", torch.allclose(acc / l[:, None], oracle, atol=ATOL, rtol=RTOL))
assert torch.allclose(acc / l[:, None], oracle, atol=ATOL, rtol=RTOL)

# %% [markdown]
# ## The kernel
#
# These two ideas, with the block table of Day 28, are the new kernel. It comes in pieces, as functions that the
# kernel calls. First the loads:
#
# - `load_queries` packs the rows. `row // N_REP` and `row % N_REP` are your `rows_of_tile`, with the tile's first
#   query in `first`. `sees` is the number of keys that a row sees. The first axis of the grid is the KV head.
# - `load_tile` finds the keys. Position p lies in block `table[p // BLOCK_SIZE]`, at offset `p % BLOCK_SIZE`: Day
#   28's address. `held` is the clamped position, and `channel` the clamped channel where `head_dim` is no power of
#   two. `LONG` says whether the pool has more than $2^{31}$ numbers, so that offsets need 64 bits: Day 22's trap.

# %%
try:
    import triton
    import triton.language as tl
except ImportError:
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: load_queries, load_tile
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


# %% [markdown]
# Then the fold. `fold_tile` is yours, and `fold_keys` calls it for all tiles from `low` to `high`. Read them for
# three things:
#
# - **The products.** `tl.dot(q, tl.trans(key))` gives the scores. `tl.dot(p, v, acc)` adds the second product to
#   `acc`. Both take their numbers in the dtype of K and V and add in float32. "ieee" keeps all bits of float32,
#   without tensor cores.
# - **The factor.** The maximum is taken of the unscaled scores, and then scaled: one multiplication for each row. A GPU
#   computes `score * scale - m_new` in one instruction, so the scaling of the scores costs no further one.
# - **The mask.** In a prefill with many rows, most tiles are seen whole by every row, and the first loop folds
#   these without a mask. The second loop does the rest. In decode there is only the second.
#
# `fold_once` is for a history that fits in one tile. Then there is no earlier sum, so nothing is rescaled.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: fold_tile, fold_keys, fold_once
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


# %% [markdown]
# Last the kernel. Which tile of which sequence does a program compute? With one tile for each sequence, as in
# decode, the tile's number is the sequence's. Otherwise the tiles of sequence i begin at tile `starts[i] // QUERIES +
# i`: the `starts[i]` queries before it fill at most `starts[i] // QUERIES` tiles whole, and each of the i sequences has
# at most one ragged tile more. So a program finds its sequence without any list from the host.
#
# An example: 40, 7 and 1 queries, 5 to a tile. The sequences begin at tiles 0, 40 // 5 + 1 = 9 and 47 // 5 + 2 = 11.
# The first one needs 8 tiles, 0 to 7. Tile 8 has no query, and its programs store nothing.
#
# A GPU starts programs in the order of their numbers, the first axis fastest. That axis is the KV head: programs
# that start together then read neighbouring memory, since the KV heads of a token lie side by side. The other axis
# counts the tiles backwards. The last tiles of a prefill see the most keys, and none of them should start late. The
# host passes the factor $c$ as `scale`. A launcher sets `ONCE` if it knows that every history fits in one tile. Day 31
# does so on a CPU, where each line of the kernel costs time.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: packed_kernel
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


# %% [markdown]
# A decode step of SmolLM2 uses 3 rows of 16. The other 13 rows cost arithmetic and no bytes, and in decode the GPU
# has arithmetic to spare.
#
# Day 31 lands the launcher that the engine uses. Here is a short one, so that you see every argument:

# %%
from nanoserve.kernels import tlsim
from nanoserve.kernels.reference import PagedTables, paged_attention_batch_reference
from nanoserve.kernels.sizes import next_power_of_2

kernel = tlsim.jit(packed_kernel)


def launch_packed(q, k_pool, v_pool, tables, n_rep, rows=16, tile=16):
    """Attention of a batch by today's kernel: q [num_tokens, n_q, head_dim] -> the same shape."""
    num_tokens, n_q, head_dim = q.shape
    num_seqs, decode = len(tables.kv_lens), tables.max_query_len == 1
    tiles = num_seqs if decode else num_tokens // (rows // n_rep) + num_seqs
    out = torch.empty(q.shape)
    sizes = {"N_REP": n_rep, "HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim)}
    sizes |= {"BLOCK_SIZE": tables.block_size, "ROWS": rows, "TILE": tile}
    sizes |= {"SEQS": 1 if decode else next_power_of_2(num_seqs + 1), "LONG": False}
    kernel[(n_q // n_rep, tiles)](
        *(q, k_pool, v_pool, tables.block_tables, tables.kv_lens, tables.query_starts, out),
        *(head_dim**-0.5 * math.log2(math.e), num_seqs, *q.stride()[:2]),
        *(*k_pool.stride()[:2], *v_pool.stride()[:2], tables.block_tables.stride(0)),
        **sizes,
    )
    return out


# %% [markdown]
# ## Prove it: Day 28's batch
#
# A prefill of 40 tokens, a chunk of 7 after 33, and a decode step after 99, in one launch. The blocks are
# scattered, and every slot that belongs to no sequence holds NaN. The sanitizer is on: a load outside a buffer
# stops the launch.


# %%
def batch(steps, n_q=9, n_kv=3, head_dim=64, block_size=16):
    """(q, k_pool, v_pool, tables, n_rep) for these (query_len, kv_len); NaN in all other slots."""
    q_lens, kv_lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*steps))
    counts = [-(-n // block_size) for n in kv_lens.tolist()]
    order = torch.randperm(2 * sum(counts), generator=generator).int()
    table = torch.zeros(len(steps), max(counts), dtype=torch.int32)
    pools = torch.full((2, len(order) * block_size, n_kv, head_dim), torch.nan)
    for i, blocks in enumerate(order[: sum(counts)].split(counts)):
        table[i, : counts[i]] = blocks
    starts = torch.cat([torch.zeros(1), q_lens.cumsum(0)]).int()
    longest = int(q_lens.max()), int(kv_lens.max())
    tables = PagedTables(table, kv_lens, starts, block_size, *longest)
    for i, kv_len in enumerate(kv_lens.tolist()):
        new = torch.randn(2, kv_len, n_kv, head_dim, generator=generator)
        pools[:, tables.slot_mapping(i)] = new
    q = torch.randn(int(starts[-1]), n_q, head_dim, generator=generator)
    return q, *pools, tables, n_q // n_kv


# %%
mixed = [(40, 40), (7, 40), (1, 100)]
reads = {
    "prefill, chunk and decode": batch(mixed),
    "three decode steps": batch([(1, 37), (1, 1), (1, 100)]),
    "a padded row beside a decode": batch([(1, 0), (1, 33)]),
    "no grouping: 9 KV heads": batch(mixed, n_kv=9),
    "one KV head for 9 heads": batch(mixed, n_kv=1),
    "96 channels in a block of 128": batch(mixed, head_dim=96),
}
for name, read in reads.items():
    oracle = paged_attention_batch_reference(*read)
    with tlsim.options(poison=True):
        outs = [
            launch_packed(*read, rows=rows, tile=tile) for rows in (16, 32) for tile in (16, 64)
        ]
    right = all(torch.allclose(out, oracle, atol=ATOL, rtol=RTOL) for out in outs)
    print(f"{name:30} within the tolerance with all {len(outs)} tiles: {right}")
    assert right

# %% [markdown]
# ## Count the bytes
#
# tlsim's trace counts every load. Both kernels, the decode step of above: how many rows of keys did you predict?

# %%
from nanoserve.kernels.dispatch import launch as launch_day22
from nanoserve.kernels.paged_attention import paged_attention_kernel

day22 = tlsim.jit(paged_attention_kernel)


def single(read, tile=16):
    """Day 22's kernel on the first sequence of a batch."""
    q, k_pool, v_pool, tables, n_rep = read
    q = q[: int(tables.query_starts[1])].transpose(0, 1)[None]
    return launch_day22(day22, q, k_pool, v_pool, tables.slot_mapping(0), n_rep, tile=tile)


def key_rows(run, read):
    """Rows of keys that a kernel loads, and rows that there are."""
    with tlsim.trace() as traced:
        run(read)
    keys = sum(access.bytes for access in traced.accesses if access.name == "k_ptr")
    row = 4 * read[0].shape[2]
    return keys // row, traced.distinct_bytes("load", "k_ptr") // row


# %%
decode = batch([(1, 100)])
before, there_are = key_rows(single, decode)
after, _ = key_rows(lambda read: launch_packed(*read), decode)
print(f"{there_are} rows of keys; Day 22's kernel loads {before}, the packed kernel {after}")
assert (there_are, before, after) == (3 * 100, 9 * 100, 3 * 112)

# %% tags=["nbval-ignore-output"]
print("you predicted:", today.guess_text("rows"))

# %% [markdown]
# 100 keys take 7 tiles of 16, so each of the 3 KV heads loads 112 rows, the last key 13 times. The other factor,
# `n_rep`, is gone. A prefill gains more: there a tile of 16 rows also holds 5 queries. For 37 queries over 37 keys,
# count on paper first: tile t holds queries 5t to 5t + 4, so it needs the first 5t + 5 keys, and at most 37.

# %%
prefill = batch([(37, 37)])
needed = [min(5 * t + 5, 37) for t in range(8)]
expected = 3 * sum(-(-n // 16) * 16 for n in needed)  # whole tiles of 16 keys, 3 KV heads
before, there_are = key_rows(single, prefill)
after, _ = key_rows(lambda read: launch_packed(*read), prefill)
print(f"{there_are} rows of keys; Day 22's kernel loads {before:,}, the packed kernel {after}")
assert after == expected and before > 11 * after

# %% [markdown]
# ## Measure it: the simulator
#
# On a CPU, tlsim runs each line as torch operations. What do packed heads change there? Day 22's kernel multiplies
# and adds blocks `[programs, keys, head_dim]`, element by element, with one program for each query head. Today's
# `tl.dot` is a batched matrix product over the KV heads, and each key is copied once instead of three times.
#
# For this measurement we leave out Python's own time for each line. With `replay=True`, tlsim records the torch
# operations of the first launch and then runs those alone. Day 31 is about that; both kernels get it here. `wave=512`
# limits the programs that run side by side (Day 21).

# %%
today.predict(
    "faster",
    "A decode step at 1,024 tokens, under tlsim: how many times as fast as Day 22's kernel?",
    guess=None,
    low=0,
    high=1_000,
)

# %%
from nanoserve.bench.timing import median_times

kv_lens = (64, 256, 1_024, 4_096)
took = {"day22": [], "packed": []}
for kv_len in kv_lens:
    read, tile = batch([(1, kv_len)]), min(kv_len, 512)
    runs = {
        "day22": lambda: single(read, tile),
        "packed": lambda: launch_packed(*read, tile=tile),
    }
    with tlsim.options(checks=False, wave=512, replay=True):
        assert torch.allclose(runs["packed"](), runs["day22"]()[0].transpose(0, 1), ATOL, RTOL)
        for name, seconds in median_times(runs, 9).items():
            took[name].append(seconds)
ratios = [old / new for old, new in zip(took["day22"], took["packed"])]

# %% tags=["nbval-ignore-output"]
print("Day 22's time over the packed kernel's:")
for kv_len, ratio in zip(kv_lens, ratios):
    print(f"  {kv_len:5,} tokens: {ratio:.2f}")
assert all(ratio > 0 for ratio in ratios)

# %% jupyter={"source_hidden": true}
# Draws the plot: a decode step under tlsim, by tokens in the cache
from nanoserve.course.plots import COLOURS, figure, label_line, line, log2_axis
from nanoserve.course.plots import prediction_marker

fig, ax = figure(
    height=3.8,
    xlabel="kv_len (tokens in the cache)",
    ylabel="Day 22's time / packed kernel's",
    title="A decode step under tlsim on this CPU",
)
line(ax, kv_lens, ratios, "packed heads", COLOURS["tlsim"])
ax.axhline(1.0, color=COLOURS["muted"], linewidth=1.5)
label_line(ax, 8_000, 1.0, "as fast", COLOURS["muted"], "below")
top = 1.25 * max(*ratios, 1.2)
if guess := today.guess("faster"):
    prediction_marker(ax, 1_024, guess, where="left")
    top = max(top, 1.2 * guess)
log2_axis(ax)
ax.set(xlim=(48, 16_000), ylim=(0, top), xticks=kv_lens)
fig

# %% [markdown]
# Read your own ratios. Where a ratio is above 1, the packed kernel is faster. At 64 tokens both kernels are mostly
# the cost of starting a few dozen torch operations. With more tokens the work inside the operations counts, and
# that is where the keys are read.
#
# This shows what the structure does to a simulator on a CPU. It does not show a GPU's gain: there the loads of
# three programs can meet in the L2 cache, and the limit is memory bandwidth.
#
# ## Measure it: the roofline
#
# The recorded run of an H200 has both kernels, each as a share of the bandwidth measured in the same run. Four
# decode shapes:

# %%
today.predict(
    "share",
    "256 sequences of 1,024 tokens on an H200: the packed kernel's share of the bandwidth, in %",
    guess=None,
    low=0,
    high=100,
)

# %%
recorded = today.data("roofline_h200")
shapes = ["256 x 1,024, 32/8 x 128", "64 x 8,192, 32/8 x 128", "64 x 2,048, 9/3 x 64"]
shapes += ["16 x 4,096, 32/32 x 128"]
shares = {
    (row["shape"], row["path"]): row["bytes"] / row["seconds"] / recorded["read"]
    for row in recorded["rows"]
    if row["seconds"]
}
print(f"{recorded['device']}, {recorded['dtype']}, reads {recorded['read'] / 1e12:.2f} TB/s")
for shape in shapes:
    old, new = (shares[shape, path] for path in ("day22", "packed"))
    print(f"{shape:26} Day 22 {old:6.1%}   packed heads {new:6.1%}")
    assert new > old
assert min(shapes, key=lambda shape: shares[shape, "packed"]) == shapes[2]

# %% jupyter={"source_hidden": true}
# Draws the plot: share of the read bandwidth, before and after
fig, ax = figure(
    height=4.4,
    xlabel="share of the read bandwidth measured in this run, %",
    title=f"Decode on an {recorded['device'].removeprefix('NVIDIA ')}, recorded",
)
for y, shape in enumerate(reversed(shapes)):
    old, new = (100 * shares[shape, path] for path in ("day22", "packed"))
    ax.barh(y - 0.2, old, height=0.36, color=COLOURS["muted"])
    ax.barh(y + 0.2, new, height=0.36, color=COLOURS["triton"])
    ax.text(old + 1, y - 0.2, f"{old:.0f}   Day 22's kernel", va="center")
    away, side = (-1, "right") if new > 60 else (1, "left")
    ax.text(new + away, y + 0.2, f"{new:.0f}   packed heads", va="center", ha=side)
if guess := today.guess("share"):
    ax.plot(guess, 3.62, "D", color=COLOURS["prediction"], clip_on=False)
    away, side = (2, "left") if guess < 70 else (-2, "right")
    ax.text(guess + away, 3.62, "your guess", color=COLOURS["prediction"], va="center", ha=side)
ax.axvline(100, color=COLOURS["limit"], linewidth=1.5)
ax.set(yticks=range(4), xlim=(0, 101), ylim=(-0.6, 3.85))
ax.set_yticklabels([shape.replace(", ", "\n") for shape in reversed(shapes)])
ax.grid(axis="y", visible=False)
fig

# %% [markdown]
# The last shape has no grouping: each query head has a KV head of its own, so there is nothing to share. Its gain
# comes from other changes in this kernel, among them the clamped loads, the products on tensor cores and the order
# of the grid.
#
# Of the four shapes, SmolLM2's is the farthest from the limit. It is the smallest one: 101 MB of keys and values, which
# take 22 µs at the peak bandwidth. To start the kernel and to fill the GPU takes a large part of so short a time. And
# one long sequence?

# %%
old, new = (shares["1 x 65,536, 32/8 x 128", path] for path in ("day22", "packed"))
print(f"one sequence of 65,536 tokens: Day 22 {old:.1%}, packed heads {new:.1%}")
assert new < old

# %% [markdown]
# It is slower than before. Day 22's kernel has 32 programs for this sequence, one for each query head. The packed
# kernel has 8, and each of them alone reads its keys from the first to the last. Day 30 changes that.
#
# On a GPU of your own, the next cell measures the shape of SmolLM2. `nanoserve bench roofline` measures all.

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    from nanoserve.bench.attention import DECODE, batch_paths
    from nanoserve.bench.roofline import read_bandwidth, time_shape

    paths = {name: path for name, path in batch_paths().items() if name in ("day22", "packed")}
    read = read_bandwidth("cuda")
    for row in time_shape(DECODE[5], paths, torch.float16, "cuda"):
        print(f"{row.shape}, {row.path}: {row.bytes / row.seconds / read:.1%} of the bandwidth")
else:
    print("there is no GPU here: the recorded run stands for it")
assert shapes[2] == "64 x 2,048, 9/3 x 64"

# %% [markdown]
# ## What you learned
#
# 1. **Group the work by what it reads.** Query heads that share a KV head belong into one program: each key is then
#    loaded once, and the number of loads falls by `n_rep`.
# 2. **Rows make a matrix product.** One query has a row of scores; packed heads have a tile, and `tl.dot` computes
#    it on hardware made for it. Unused rows cost arithmetic and no bytes.
# 3. **Two factors are one.** The host multiplies the scale by $\log_2 e$ once, and the kernel scales in float32,
#    where nothing is rounded a second time.
#
# ## Tomorrow
#
# One long sequence became slower, because 8 programs cannot fill 132 multiprocessors. Day 30 splits the history of
# a sequence over many programs and merges their partial softmaxes.
#
# **In one paragraph.** Query heads of one group read the same keys, and Day 22's kernel loaded them once for each
# head. We packed the heads of a group, and as many whole queries as fit, into the rows of one tile. The scores of
# the tile are one matrix product, and the fold of Day 22 works on all rows at once, to base 2, with one factor for
# the scale and the logarithm of e. Positions come through the block table and are clamped instead of masked. The
# kernel equals the oracle of the batch on every case. The trace counts exactly one load of each key for each KV
# head, up to the last tile.
