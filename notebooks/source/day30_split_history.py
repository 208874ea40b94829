# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 30 · Split the history
#
# Week 7 · Phase 2, paged memory · you need: Day 22 (The streaming softmax), Day 28 (Many sequences, one launch), Day 29 (Share the keys)
#
# **Today** you share the keys of a batch out equally among as many programs as the GPU can run. A program's share
# may be a part of a sequence, so its softmax is a partial one. You merge the partial results, exactly.

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

today = day(30)
today.picture("split-history")

# %% [markdown]
# ## Why it matters
#
# Yesterday's kernel runs one program for each KV head and sequence in a decode step. For one long sequence of a
# Llama, that is 8 programs. An H200 has 132 multiprocessors, so 124 of them have nothing to do, and 8
# multiprocessors cannot ask for enough bytes to fill the memory's bandwidth. On this one shape the packed kernel is
# even slower than Day 22's, which has 32 programs.
#
# A batch of uneven sequences has the same problem in a milder form. The programs of short sequences end early, and
# the launch lasts as long as the longest.
#
# Both have one answer: the history of a sequence must not belong to one program. This was Flash-Decoding (Dao et
# al. 2023). To share all keys out equally, whatever sequence they belong to, comes from matrix products and is
# called stream-K (Osama et al. 2023).

# %%
today.glossary("softmax", "partial softmax", "log-sum-exp", "multiprocessor", "worker")

# %%
today.predict(
    "speed-up",
    "One sequence of 65,536 tokens on an H200: how many times as fast as yesterday's kernel, once split?",
    guess=None,
    low=0,
    high=10_000,
)

# %% [markdown]
# ## A softmax in parts
#
# A program that reads part $i$ of the keys has everything for a softmax over its own keys. To base 2, as the kernel
# computes:
#
# $$ \mathrm{out}_i = \sum_{j \in i} 2^{\,s_j - \mathrm{lse}_i}\, v_j \qquad \mathrm{lse}_i = \log_2 \sum_{j \in i} 2^{\,s_j} $$
#
# $2^{\mathrm{lse}_i}$ is what part $i$ divided by. The whole softmax divides by the sum of these. So each part
# counts with its share of that sum:
#
# $$ \mathrm{out} = \frac{\sum_i 2^{\,\mathrm{lse}_i}\, \mathrm{out}_i}{\sum_i 2^{\,\mathrm{lse}_i}} $$
#
# A part needs to leave two things behind: its result, and **one number**, its log-sum-exp. From Day 29's state they
# are `acc / l` and `m + log2(l)`. Step through it: three parts, then their merge.

# %%
today.widget("split-history")

# %% [markdown]
# ## Your turn: `merge`
#
# `parts` `[rows, splits, head_dim]` holds the results of the parts, `lse` `[rows, splits]` their log-sum-exp, **to
# base 2**. A row is one query of one head. Return the merged rows `[rows, head_dim]`.
#
# - Scores can be large, and $2^{128}$ is infinite in float32. Subtract each row's largest lse from its exponents,
#   as a softmax does.
# - A part without keys has the result 0 and the lse $-\infty$. Its weight must be 0.
# - A row in which no part has keys (a padded row of Day 28) gives zeros, not NaN.
#
# Stuck? `today.hint()`. After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).

# %%
import torch


# %%
def merge(parts, lse):
    """parts [rows, splits, head_dim], lse [rows, splits] to base 2 -> [rows, head_dim]."""
    raise NotImplementedError("your turn")


today.check(merge)

# %% [markdown]
# One way to write it. Below, it merges the softmax of 1,000 keys, cut into 1 to 100 parts, and compares it with the
# softmax of all keys in float64.


# %% jupyter={"source_hidden": true}
# merge
def merge(parts, lse):
    """parts [rows, splits, head_dim], lse [rows, splits] to base 2 -> [rows, head_dim]."""
    largest = lse.amax(-1, keepdim=True).clamp(min=-1e30)  # finite, also where all are -inf
    weight = torch.exp2(lse - largest)
    total = weight.sum(-1, keepdim=True)
    mixed = (weight[..., None] * parts).sum(1)
    return mixed / torch.where(total == 0, 1.0, total)


# %%
from nanoserve.kernels.reference import ATOL, RTOL

generator = torch.Generator().manual_seed(30)
scores = 3 * torch.randn(9, 1_000, generator=generator)  # to base 2
values = torch.randn(1_000, 64, generator=generator)
exact = (scores.double().mul(0.6931471805599453).softmax(-1) @ values.double()).float()
for splits in (1, 2, 7, 100):
    parts, lses = [], []
    for s, v in zip(scores.tensor_split(splits, 1), values.tensor_split(splits)):
        weight = torch.exp2(s - s.amax(-1, keepdim=True))
        parts.append(weight @ v / weight.sum(-1, keepdim=True))
        lses.append(s.amax(-1) + weight.sum(-1).log2())
    merged = merge(torch.stack(parts, 1), torch.stack(lses, 1))
    right = torch.allclose(merged, exact, atol=ATOL, rtol=RTOL)
    print(f"{splits:3} parts: the softmax of all keys, within the tolerance: {right}")
    assert right

# %% [markdown]
# The merge is exact: nothing is approximated, and only the order of the sums differs. The number of parts is free.
#
# ## Equal shares
#
# Who reads which keys? The first idea is to cut every sequence into the same number of parts. For sequences of
# different lengths that keeps the problem: the parts of a long sequence are long. So take the tiles of **all**
# sequences, one after another, and give each **worker** an equal share of them. A launch has a program for each worker
# and KV head, so a worker is as many programs as there are KV heads. All of them read the same positions, each for
# its own KV head.
#
# - A sequence of `kv_len` keys has `ceil(kv_len / tile)` tiles; the last may be ragged. A padded row, without keys,
#   counts as one tile: some worker has to write its zeros.
# - A share is `ceil(all tiles / workers)` tiles. Worker w begins at tile `w * share`. The last workers may have
#   less, or nothing.
# - A share may begin and end inside a sequence, and it may cover several sequences.
#
# ## Your turn: `keys_of_worker`
#
# Return the parts of one worker: a list of `(sequence, low, high)` in order. `low` and `high` are positions in that
# sequence, and `high` is not included. The part of a padded row is `(sequence, 0, 0)`; leave out every sequence
# that the share does not reach into.


# %%
def keys_of_worker(worker, workers, kv_lens, tile):
    """The keys that a worker reads: a list of (sequence, low, high)."""
    raise NotImplementedError("your turn")


today.check(keys_of_worker)

# %% [markdown]
# One way to write it, on three sequences and four workers:


# %% jupyter={"source_hidden": true}
# keys_of_worker
def keys_of_worker(worker, workers, kv_lens, tile):
    """The keys that a worker reads: a list of (sequence, low, high)."""
    tiles = [max(-(-kv_len // tile), 1) for kv_len in kv_lens]
    share = -(-sum(tiles) // workers)
    parts, before = [], 0
    for i, kv_len in enumerate(kv_lens):
        low = max(worker * share - before, 0)
        high = min((worker + 1) * share - before, tiles[i])
        if low < high:
            parts.append((i, low * tile, min(high * tile, kv_len)))
        before += tiles[i]
    return parts


# %%
for worker in range(4):
    print(f"worker {worker}:", keys_of_worker(worker, 4, [100, 20, 150], tile=16))

# %% [markdown]
# How much does it gain? A launch lasts as long as its longest program, if all programs run at once and at the same
# speed. So compare the mean number of keys of a program with the largest. 64 sequences of 1 to 8,192 tokens, and 64
# programs for each KV head:

# %%
today.predict(
    "even",
    "One program for each of the 64 sequences: mean keys / most keys, in %",
    guess=None,
    low=0,
    high=100,
)

# %%
kv_lens = torch.randint(1, 8_193, (64,), generator=generator).tolist()
shares = [
    sum(high - low for _, low, high in keys_of_worker(worker, 64, kv_lens, tile=64))
    for worker in range(64)
]
even = {"one program for each sequence": sorted(kv_lens), "equal shares": sorted(shares)}
for name, keys in even.items():
    print(f"{name:30} mean / most: {sum(keys) / len(keys) / max(keys):.0%}")
assert sum(shares) == sum(kv_lens) and sum(shares) / 64 > 0.95 * max(shares)

# %% tags=["nbval-ignore-output"]
print("you predicted:", today.guess_text("even"))

# %% jupyter={"source_hidden": true}
# Draws the plot: keys of each program, 64 sequences of 1 to 8,192 tokens
from nanoserve.course.plots import COLOURS, figure, label_line, prediction_marker

fig, ax = figure(
    height=3.8,
    xlabel="program, sorted by its keys",
    ylabel="keys that it reads",
    title="64 sequences of 1 to 8,192 tokens, 64 programs",
)
for keys, colour, name, at in zip(even.values(), ("muted", "tlsim"), even, (44, 10)):
    ax.step(range(64), keys, where="mid", color=COLOURS[colour], linewidth=2)
    label_line(ax, at, keys[at], name, COLOURS[colour], "above")
ax.set(xlim=(-1, 64), ylim=(0, 9_000))
fig

# %% [markdown]
# The grey line ends at the longest sequence, and the launch lasts until that program is done. With equal shares,
# all but the last programs read the same number of tiles.
#
# ## The kernels
#
# Three definitions land. `share_keys` is the arithmetic of `keys_of_worker` for all sequences at once: tiles of
# each sequence, and their running sum. It reads `kv_lens` on the device. The host reads no length, so one launch
# stays right for any lengths; Day 31 needs that.

# %%
try:
    import triton
    import triton.language as tl
except ImportError:
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl

from nanoserve.kernels.split_kv import fold_keys, load_queries


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: share_keys
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


# %% [markdown]
# `split_kv_kernel` is one worker. It visits the sequences that its share reaches into. For each of them it uses
# yesterday's `load_queries` and `fold_keys`, from `low` to `high`.
#
# - If it has read all keys of the sequence, its result is final and goes to `out`. A batch of short sequences then
#   needs no merge.
# - Otherwise it stores a part: `acc / l` and `m + log2(l)`. Worker w's part of sequence s has the number w + s.
#   From one part to the next, the worker or the sequence grows, so no two parts have the same number.
# - A row that sees no key of the part keeps m at -1e30 and l at 0. Its result is 0, and its lse is $m + \log_2 l =
#   -\infty$.
#
# `OVERLAP` lets a GPU start the merge while the last workers finish: Day 31.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: split_kv_kernel
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


# %% [markdown]
# `merge_kernel` is your `merge`, for one row of one sequence. Which program merges which sequence? Only the last
# sequence of a share can go on into the next share. So at most one sequence begins in a worker's share and ends in a
# later one. The grid has as many programs for each KV head and row as there are workers, and program w merges that
# sequence, if there is one. It folds the parts with the streaming softmax, `PARTS` at a time: the lse takes the
# place of the score.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: merge_kernel
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


# %% [markdown]
# A short launcher of both, as yesterday. The parts begin as NaN, so a part that is read and was not written would
# show.

# %%
import math

from nanoserve.kernels import tlsim
from nanoserve.kernels.reference import PagedTables, paged_attention_batch_reference
from nanoserve.kernels.sizes import next_power_of_2

split, merge_parts = tlsim.jit(split_kv_kernel), tlsim.jit(merge_kernel)


def launch_split(q, k_pool, v_pool, tables, n_rep, workers, rows=16, tile=16):
    """Decode attention of a batch, its keys shared out to workers: -> [num_seqs, n_q, head_dim]."""
    (num_seqs, _, head_dim), n_kv, out = q.shape, k_pool.shape[1], torch.full_like(q, torch.nan)
    part = torch.full((workers + num_seqs, n_kv, rows, head_dim), torch.nan)
    lse = part[..., 0].clone()
    lens, starts = tables.kv_lens, tables.query_starts
    sizes = {"N_REP": n_rep, "HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim)}
    sizes |= {"ROWS": rows, "TILE": tile, "SEQS": next_power_of_2(num_seqs), "OVERLAP": False}
    strides = (*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2])
    split[(n_kv, workers)](
        *(q, k_pool, v_pool, tables.block_tables, lens, starts, out, part, lse),
        *(head_dim**-0.5 * math.log2(math.e), num_seqs, *strides, tables.block_tables.stride(0)),
        **sizes | {"BLOCK_SIZE": tables.block_size, "LONG": False},
    )
    merge_parts[(n_kv, workers, n_rep)](
        *(part, lse, lens, starts, out, num_seqs), PARTS=next_power_of_2(workers), **sizes
    )
    return out


# %%
def decodes(*kv_lens, n_q=9, n_kv=3, head_dim=64, block_size=16):
    """(q, k_pool, v_pool, tables, n_rep): one query each; NaN in slots that no sequence owns."""
    counts = [-(-n // block_size) for n in kv_lens]
    order = torch.randperm(2 * sum(counts), generator=generator).int()
    table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32)
    for i, blocks in enumerate(order[: sum(counts)].split(counts)):
        table[i, : counts[i]] = blocks
    lens, starts = torch.tensor(kv_lens).int(), torch.arange(len(kv_lens) + 1).int()
    tables = PagedTables(table, lens, starts, block_size, 1, max(kv_lens))
    pools = torch.full((2, len(order) * block_size, n_kv, head_dim), torch.nan)
    for i, n in enumerate(kv_lens):
        new = torch.randn(2, n, n_kv, head_dim, generator=generator)
        pools[:, tables.slot_mapping(i)] = new
    q = torch.randn(len(kv_lens), n_q, head_dim, generator=generator)
    return q, *pools, tables, n_q // n_kv


# %% [markdown]
# ## Prove it: any number of workers
#
# From 1 worker to more than there are tiles. A share then covers several sequences, one, a part of one, or nothing.

# %%
reads = {
    "one sequence of 300 tokens": decodes(300),
    "100, 20 and 150 tokens": decodes(100, 20, 150),
    "a padded row between two sequences": decodes(50, 0, 70),
    "twelve sequences of one token": decodes(*[1] * 12),
    "no grouping, 32 channels": decodes(90, 33, n_kv=9, head_dim=32),
}
counts = (1, 2, 3, 7, 40)
for name, read in reads.items():
    oracle = paged_attention_batch_reference(*read)
    outs = [launch_split(*read, workers) for workers in counts]
    right = all(torch.allclose(out, oracle, atol=ATOL, rtol=RTOL) for out in outs)
    print(f"{name:36} within the tolerance with all {len(counts)} numbers: {right}")
    assert right

# %% [markdown]
# The results of different numbers of workers are not equal in every bit: the sums run in another order. How far
# apart are they? Sharper scores first, as on Day 22:

# %%
q, *others = decodes(1_000)
sharp = (3 * q, *others)
outs = torch.stack([launch_split(*sharp, workers) for workers in counts])
apart = float((outs.amax(0) - outs.amin(0)).max())
print("apart, with 1 to 40 workers: below ATOL:", apart < ATOL)
assert apart < ATOL

# %% [markdown]
# ## Count what it costs
#
# Parts are written and read again. For one sequence of 1,024 tokens and 16 workers, in float32: each of 9 query
# heads has 16 parts of 64 numbers and one lse. Count first, then trace.

# %%
today.predict(
    "cost",
    "Bytes of parts and lse, written and read, in % of the bytes of K and V",
    guess=None,
    low=0,
    high=1_000,
)

# %%
with tlsim.trace() as traced:
    launch_split(*decodes(1_024), workers=16)
moved = {"K and V": ("k_ptr", "v_ptr"), "parts": ("part_ptr", "lse_ptr")}
for name, arguments in moved.items():
    found = [a.bytes for a in traced.accesses if a.name in arguments]
    moved[name] = sum(found)
    print(f"{name:8} {moved[name]:9,} bytes")
assert moved["K and V"] == 2 * 1_024 * 3 * 64 * 4
assert moved["parts"] == 2 * 16 * 9 * (64 + 1) * 4

# %% tags=["nbval-ignore-output"]
print(f"that is {moved['parts'] / moved['K and V']:.1%}; you predicted:", today.guess_text("cost"))

# %% [markdown]
# The cost grows with the number of workers and not with the tokens. At 65,536 tokens the same 16 workers would cost
# a 64th of this share.
#
# ## Your turn: `num_workers`
#
# How many workers? Each worker leaves parts, and parts cost bytes. So a GPU gets no more workers than it runs at once.
# Four rules:
#
# - A multiprocessor runs `programs` programs at once, and a worker is one program for each KV head. So there is
#   room for `programs * multiprocessors / n_kv` workers, rounded down.
# - If there is room for more than eight, take a multiple of eight, rounded down: the merge reads parts in groups.
# - After that: at most as many workers as tiles, and at least 1.
# - Without a split there are `num_seqs * n_kv` programs. If these are eight or more for each multiprocessor, they
#   fill the GPU by themselves: return 0. Then the packed kernel runs, and nothing is merged.
#
# The host decides, so the rule uses only what the host knows: no length of a sequence. `tiles` is an upper bound,
# from the longest sequence that is possible.


# %%
def num_workers(multiprocessors, n_kv, num_seqs, tiles, programs=2):
    """The number of workers for each KV head; 0 if the history should not be split."""
    raise NotImplementedError("your turn")


today.check(num_workers)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/split_kv.py: num_workers
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


# %%
for gpu, multiprocessors in (("H200", 132), ("T4", 40)):
    for num_seqs in (1, 16, 256):
        workers = num_workers(multiprocessors, n_kv=8, num_seqs=num_seqs, tiles=1_024)
        told = f"{workers} workers, {workers * 8} programs" if workers else "no split"
        print(f"{gpu:4}, {num_seqs:3} sequences with 8 KV heads: {told}")

# %% [markdown]
# ## Measure it: the simulator
#
# tlsim runs all programs in lockstep: a launch takes as many turns of the loop as its longest program. So it shows
# the effect of a split in the same way as a GPU: 4,096 tokens in tiles of 64 take 64 turns with one worker, and 4
# with 16. As yesterday, a launch is recorded once and replayed.

# %%
today.predict(
    "workers",
    "One sequence of 4,096 tokens under tlsim: which number of workers is fastest?",
    guess=None,
    low=1,
    high=32,
)

# %%
from functools import partial

from nanoserve.bench.timing import median_times

read = decodes(4_096)
workers = (1, 2, 4, 8, 16, 32)
with tlsim.options(checks=False, wave=512, replay=True):
    runs = {count: partial(launch_split, *read, count, tile=64) for count in workers}
    times = median_times(runs, 5)

# %% tags=["nbval-ignore-output"]
for count in workers:
    print(f"{count:3} workers: {times[1] / times[count]:5.2f} times as fast as 1 worker")
assert min(times.values()) < times[1]

# %% jupyter={"source_hidden": true}
# Draws the plot: one sequence of 4,096 tokens under tlsim, by workers
from nanoserve.course.plots import line, log2_axis

fig, ax = figure(
    height=3.8,
    xlabel="workers",
    ylabel="time with 1 worker / time",
    title="One sequence of 4,096 tokens, under tlsim on this CPU",
)
gains = [times[1] / times[count] for count in workers]
line(ax, workers, gains, "split", COLOURS["tlsim"])
if guess := today.guess("workers"):
    prediction_marker(ax, guess, max(gains))
log2_axis(ax)
ax.set(xlim=(0.8, 70), ylim=(0, 1.2 * max(gains)), xticks=workers)
fig

# %% [markdown]
# With few workers, a turn of the loop costs nearly the same for one program and for two, so half the turns take
# less time. With many workers, a turn computes more numbers and the merge has more parts: there your curve bends. On
# a GPU the bend comes where all multiprocessors are busy.
#
# ## Measure it: the roofline
#
# The recorded H200: the shapes that Day 29's grid could not fill, and three ragged batches. SDPA reads contiguous
# keys and no block table.

# %%
recorded = today.data("roofline_h200")
rows = {(row["shape"], row["path"]): row for row in recorded["rows"] if row["seconds"]}
shapes = ["1 x 65,536, 32/8 x 128", "4 x 32,768, 32/8 x 128", "1 x 4,096, 32/8 x 64"]
shapes += [shape for shape, path in rows if path == "split_kv" and shape.endswith("ragged")]
names = {"packed": "Day 29's kernel", "split_kv": "split", "sdpa": "SDPA, contiguous"}
print(f"{recorded['device']}, {recorded['dtype']}, reads {recorded['read'] / 1e12:.2f} TB/s")
shares = {}
for shape in shapes:
    for path in names:
        if row := rows.get((shape, path)):
            shares[shape, path] = row["bytes"] / row["seconds"] / recorded["read"]
    told = [f"{names[p]} {share:.1%}" for (s, p), share in shares.items() if s == shape]
    print(f"{shape:30} {',  '.join(told)}")
    if not shape.startswith("256"):
        assert shares[shape, "split_kv"] > shares[shape, "packed"]
assert rows[shapes[2], "split_kv"]["bytes"] / recorded["read"] < 2.5e-6
gain = shares[shapes[0], "split_kv"] / shares[shapes[0], "packed"]
assert gain > 132 / 8

# %% tags=["nbval-ignore-output"]
print(f"{shapes[0]}: {gain:.0f} times as fast; you predicted:", today.guess_text("speed-up"))

# %% jupyter={"source_hidden": true}
# Draws the plot: share of the read bandwidth, where a history has to be split
fig, ax = figure(
    height=5.2,
    xlabel="share of the read bandwidth measured in this run, %",
    title=f"Decode on an {recorded['device'].removeprefix('NVIDIA ')}, recorded",
)
bars = {"packed": (-0.28, "muted"), "split_kv": (0.0, "triton"), "sdpa": (0.28, "contiguous")}
for y, shape in enumerate(reversed(shapes)):
    for path, (shift, colour) in bars.items():
        if (share := shares.get((shape, path))) is None:
            continue
        ax.barh(y - shift, 100 * share, height=0.26, color=COLOURS[colour])
        label = (
            f"{100 * share:.0f}   {names[path]}" if y == len(shapes) - 1 else f"{100 * share:.0f}"
        )
        ax.text(
            100 * share + (1 if share < 0.6 else -1),
            y - shift,
            label,
            va="center",
            fontsize=9,
            ha="left" if share < 0.6 else "right",
            color="white" if share >= 0.6 and colour == "muted" else COLOURS["ink"],
        )
ax.axvline(100, color=COLOURS["limit"], linewidth=1.5)
ax.set(yticks=range(len(shapes)), xlim=(0, 101), ylim=(-0.6, len(shapes) - 0.4))
ax.set_yticklabels([shape.replace(", ", "\n", 1) for shape in reversed(shapes)])
ax.grid(axis="y", visible=False)
fig

# %% [markdown]
# On a GPU of your own, the next cell measures the long sequence. `nanoserve bench roofline` measures all shapes.

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    from nanoserve.bench.attention import DECODE, batch_paths
    from nanoserve.bench.roofline import read_bandwidth, time_shape

    paths = {name: path for name, path in batch_paths().items() if name in names}
    read = read_bandwidth("cuda")
    for row in time_shape(DECODE[2], paths, torch.float16, "cuda"):
        print(f"{row.shape}, {row.path}: {row.bytes / row.seconds / read:.1%} of the bandwidth")
else:
    print("there is no GPU here: the recorded run stands for it")
assert shapes[0] == "1 x 65,536, 32/8 x 128"

# %% [markdown]
# In the recorded run, the split brings these shapes closer to the bandwidth: the cell above asserts it for all but
# the batch of 256. `num_workers` returns 0 for that batch, so a difference there is due to the launch parameters of
# Day 31. On the long sequence the split gains more than 132 / 8, the ratio of multiprocessors to programs. Each
# multiprocessor runs several programs at once: with one program it waits for memory most of the time.
#
# The K and V of the shortest sequence are 8 MiB. At the full bandwidth they take about two microseconds, and to
# start two kernels takes time of the same order: such a shape stays far from the limit. SDPA has no ragged form
# here. It reads the keys of the longest sequence for all of them, and a mask hides the rest.
#
# ## What you learned
#
# 1. **A softmax can be computed in parts.** A part leaves its result and its log-sum-exp, and the merge is a
#    weighted mean. It is exact.
# 2. **Share out the work, not the objects.** Equal shares of all key tiles keep every worker busy, whatever the
#    lengths of the sequences.
# 3. **Parallel work costs a merge.** The bytes of the parts grow with the number of workers, so a GPU gets as many
#    as it can run at once.
#
# ## Tomorrow
#
# Tiles, warps and pipeline stages are still guesses, and every layer's launch costs time on the host. Day 31
# chooses the launch parameters by measurement, lands the launcher, and records launches to replay them.
#
# **In one paragraph.** One long sequence gave yesterday's grid 8 programs for 132 multiprocessors, and a batch of
# uneven sequences took as long as its longest. We cut the keys of all sequences into tiles and gave every worker an
# equal share, which may begin and end inside a sequence. A worker that reads a part of a sequence leaves a partial
# softmax and its log-sum-exp, and a second kernel merges the parts by their weights 2 ** lse. The result equals the
# oracle within the tolerance with any number of workers, with padded rows and with more workers than tiles. The
# trace counts what the parts cost.
