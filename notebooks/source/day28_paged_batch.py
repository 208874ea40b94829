# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 28 · Many sequences, one launch
#
# Week 7 · Phase 2, paged memory · you need: Day 15 (Logical to physical), Day 18 (Freeze the target), Day 27 (Find the roof)
#
# **Today** one call of attention serves many sequences at once, each with a length of its own. You write the two
# lines that find a token in such a batch: which sequence a row belongs to, and which slot holds a position.

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

today = day(28)
today.picture("ragged-batch")

# %% [markdown]
# ## Why it matters
#
# A server has many requests at the same time. So far each request is a forward pass of its own: with 64 requests
# and 30 layers, one step launches attention 1,920 times. Each launch is small, so most of the GPU idles, and the
# model's weights are read 64 times. If all requests share one forward pass, the weights are read once, and
# attention is launched 30 times.
#
# The requests do not have the same length. In one step, one request may begin (a **prefill**: all its tokens are
# new), one may be in the middle of a long prompt (a **chunk**: some of its tokens are new), and the others write
# (**decode**: one token is new). Today all of them fit into one launch.

# %%
today.glossary("ragged", "padding", "packed", "chunk", "query_starts", "block tables")

# %% [markdown]
# ## Padding, and what it costs
#
# A tensor has rows of one length. So the first idea is to fill every row up to the longest one. Take a step in
# which a prompt of 512 tokens arrives while 63 requests write one token each:

# %%
query_lens = [512] + 63 * [1]
padded, packed = len(query_lens) * max(query_lens), sum(query_lens)
print(f"{padded:,} rows with padding, {packed} without: {padded / packed:.0f} times the work")

# %% [markdown]
# Every product of the layer, of q, k, v and the MLP, would compute all these rows. So no padding: put the tokens
# of all sequences one after another. This is the first line of the picture, and its name is **packed**. Norms,
# products and the MLP compute each row alone, so a packed step needs no change there. Only two things depend on
# the sequence: RoPE needs each token's position, and attention needs the tokens before it.
#
# ## The tables of a batch
#
# Attention gets three small tensors and four numbers:
#
# | field | shape | meaning |
# | --- | --- | --- |
# | `block_tables` | `[num_seqs, max_blocks]` | row i is the block table of sequence i |
# | `kv_lens` | `[num_seqs]` | tokens in the cache, this step's included |
# | `query_starts` | `[num_seqs + 1]` | sequence i has the rows `query_starts[i]` to `query_starts[i + 1]` of q |
# | `block_size` | a number | slots in a block |
# | `max_query_len`, `max_kv_len` | numbers | upper bounds of every query_len and kv_len |
# | `total_kv_len` | a number, or None | the sum of the kv_lens, if the host knows it |
#
# Why the bounds? A launch needs to know how many programs to start. On a GPU, reading a number from a tensor
# waits until the GPU has finished all its work, so the host passes bounds that it has already. (Day 31 uses the sum:
# it shows whether the lengths are about equal.)

# %%
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from nanoserve.kernels.reference import paged_attention_reference


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/reference.py: PagedTables
@dataclass(frozen=True, eq=False)
class PagedTables:
    """Where the queries and the tokens of many sequences lie, for one launch of paged attention.

    block_tables int32 [num_seqs, max_blocks]: the blocks of each sequence, in order of position;
    entries past ceil(kv_len / block_size) are never used. kv_lens int32 [num_seqs]: tokens in the
    cache, this step's included; 0 for a padded row, whose output is zeros. query_starts int32
    [num_seqs + 1]: the queries of sequence i are the rows query_starts[i] to query_starts[i + 1] of
    q, and its last positions. block_size: slots in a block. max_query_len and max_kv_len: integers
    on the host, upper bounds of every query_len and kv_len, so that a launch reads no tensor.
    total_kv_len: the sum of the kv_lens as the host knows it, from which a launch tells whether the
    lengths are about equal; None: as if all were max_kv_len.
    """

    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    query_starts: torch.Tensor
    block_size: int
    max_query_len: int
    max_kv_len: int
    total_kv_len: int | None = None


# %% [markdown]
# Here is the batch of the picture. The table of A has an entry that is never used: A needs two blocks only.

# %%
picture = PagedTables(
    block_tables=torch.tensor([[5, 2, 0], [0, 6, 3], [8, 1, 7]], dtype=torch.int32),
    kv_lens=torch.tensor([5, 9, 11], dtype=torch.int32),
    query_starts=torch.tensor([0, 5, 8, 9], dtype=torch.int32),
    block_size=4,
    max_query_len=5,
    max_kv_len=11,
)
print("query_len of A, B and C:", picture.query_starts.diff().tolist())

# %% [markdown]
# ## Your turn: `sequences_of`
#
# Which sequence does a row of q belong to? In the picture, rows 0 to 4 belong to A (0), rows 5 to 7 to B (1) and
# row 8 to C (2). `rows` may hold any rows in any order. A sequence may also have no query in a step: with
# `query_starts` 0, 4, 4, 7, row 4 belongs to sequence 2.
#
# The starts are sorted, and `torch.searchsorted` finds places in a sorted tensor. No loop is needed, and nothing
# is read on the host. `sequences_of` is a method: write it as a function, and the check puts it into the class.
#
# After a kernel restart, run the cells above first (Run → Run All Above Selected Cell).


# %%
def sequences_of(self, rows: torch.Tensor) -> torch.Tensor:
    """The sequence that each row of q belongs to: int64 [n] -> int64 [n]. self.query_starts is
    int32 [num_seqs + 1]."""
    raise NotImplementedError("your turn")


today.check(sequences_of)

# %% [markdown]
# The cell below holds the package's version; from here on this notebook uses it. Then `positions_of` is one line.
# The queries are the **last** positions of their sequence: row `query_starts[i + 1] - 1` has position `kv_len - 1`.
# So within sequence i, the position is the row plus `kv_len - query_starts[i + 1]`.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/reference.py: PagedTables.sequences_of, PagedTables.positions_of
class PagedTables(PagedTables):
    def sequences_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The sequence that each row of q belongs to: int64 [n] -> int64 [n].

        It is the last sequence whose queries start at the row or before it.
        """
        return torch.searchsorted(self.query_starts.long(), rows, right=True) - 1

    def positions_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The position of each row of q within its sequence: int64 [n] -> int64 [n].

        A sequence's queries are its last positions, so its last row has position kv_len - 1.
        """
        return rows + (self.kv_lens - self.query_starts[1:])[self.sequences_of(rows)]


# %%
picture = PagedTables(**vars(picture))
rows = torch.arange(9)
print("sequence", picture.sequences_of(rows).tolist())
print("position", picture.positions_of(rows).tolist())

# %% [markdown]
# Compare with the first line of the picture: A0 to A4, B6 to B8, C10.
#
# ## Your turn: `slots_of`
#
# This is Day 15's division for many tokens at once. Token i is position `positions[i]` of sequence
# `sequences[i]`. Its block is an entry of `self.block_tables`, at `positions // block_size` in the row of its
# sequence, and its slot is block id × block size + offset.
#
# Two remarks. In one pair of brackets, two index tensors go together: `table[[0, 1], [4, 2]]` is two entries. And
# the ids are int32, but a slot may be larger than the largest int32: use `.long()` before you multiply.


# %%
def slots_of(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The slot of each token, given by its sequence and its position: int64 [n], [n] -> int64 [n].
    self.block_tables is int32 [num_seqs, max_blocks]."""
    raise NotImplementedError("your turn")


today.check(slots_of)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/reference.py: PagedTables.slots_of, PagedTables.slot_mapping and 1 more
class PagedTables(PagedTables):
    def slots_of(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The slot of each token, given by sequence and position: int64 [n], [n] -> int64 [n].

        Position p is in block block_tables[sequence, p // block_size], at offset p % block_size;
        its slot is block id * block_size + offset.
        """
        blocks = self.block_tables[sequences, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def slot_mapping(self, sequence: int) -> torch.Tensor:
        """The slot of each token of one sequence, oldest first: int64 [kv_len].

        This reads kv_lens on the host, so on a GPU it waits: it is for the reference and for tests.
        """
        positions = torch.arange(int(self.kv_lens[sequence]), device=self.kv_lens.device)
        return self.slots_of(torch.full_like(positions, sequence), positions)

    @classmethod
    def from_slots(cls, slot_mapping: torch.Tensor, query_len: int) -> "PagedTables":
        """The tables of one sequence: a slot mapping [kv_len] is a table of blocks of one token.

        The mapping is not copied; int64 is accepted. Its last query_len positions are the queries.
        Raises ValueError unless 1 <= query_len <= kv_len.
        """
        if slot_mapping.dim() != 1:
            raise ValueError(f"slot_mapping must be [kv_len], got {list(slot_mapping.shape)}")
        kv_len, like = len(slot_mapping), {"dtype": torch.int32, "device": slot_mapping.device}
        if not 1 <= query_len <= kv_len:
            raise ValueError(f"query_len is {query_len}, and must be 1 to kv_len, {kv_len}")
        return cls(
            block_tables=slot_mapping[None],
            kv_lens=torch.full((1,), kv_len, **like),  # on a GPU: no copy from the host, no wait
            query_starts=torch.arange(0, 2 * query_len, query_len, **like),
            block_size=1,
            max_query_len=query_len,
            max_kv_len=kv_len,
        )


# %%
picture = PagedTables(**vars(picture))
print("position 7 of B: slot", picture.slots_of(torch.tensor([1]), torch.tensor([7])).tolist())
print("all of C: slots", picture.slot_mapping(2).tolist())
assert picture.slots_of(torch.tensor([1]), torch.tensor([7])).tolist() == [27]

# %% [markdown]
# Pick a token, and follow it to its slot. Choose other lengths, and see how `query_starts` and the tables move.

# %% tags=["nbval-ignore-output"]
today.widget("ragged-batch")

# %% [markdown]
# ## A slot mapping is a block table
#
# Since Day 16, one sequence had a slot mapping: one slot for each position. Compare it with a block table whose
# blocks hold **one** token. Position p is then in entry p, at offset 0, and the slot is the block id. So a slot
# mapping *is* a block table, and the form for one sequence needs no kernel of its own. `from_slots` makes such
# tables, and copies nothing.

# %%
mapping = picture.slot_mapping(2)  # C's eleven slots
one = PagedTables.from_slots(mapping, query_len=1)
print("tables", list(one.block_tables.shape), "with blocks of", one.block_size)
print("the same slots:", torch.equal(one.slot_mapping(0), mapping))
assert one.block_tables.data_ptr() == mapping.data_ptr()  # no copy

# %% [markdown]
# ## The oracle of a batch
#
# You froze the oracle on Day 18. The batch gets no new one: `by_sequence` goes through the sequences and calls the
# old one for each. It is slow, and it contains nothing new that you would have to trust. A sequence with `kv_len` 0 gives
# zeros: a CUDA graph (Day 31) has a fixed number of sequences, and such rows fill it up.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/reference.py: by_sequence, paged_attention_batch_reference
def by_sequence(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """The batch form of `attend`, a single-sequence form: one call for each sequence.

    Arguments and result as for paged_attention_batch_reference. The tables are read on the host.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = tables.query_starts.tolist()
    for sequence, kv_len in enumerate(tables.kv_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if kv_len == 0 or rows.start == rows.stop:
            continue
        queries = q[rows].transpose(0, 1)[None]  # [1, n_q, query_len, head_dim]
        slots = tables.slot_mapping(sequence)
        result = attend(queries, k_pool, v_pool, slots, n_rep, scale)
        out[rows] = result[0].transpose(0, 1)
    return out


def paged_attention_batch_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of many sequences over one pool: the oracle, called for each sequence.

    q [num_tokens, n_q, head_dim]: the queries of all sequences, one after another, without
    padding; k_pool, v_pool [num_slots, n_kv, head_dim]; n_rep and scale as for
    paged_attention_reference -> [num_tokens, n_q, head_dim]. Query i of a sequence sees its first
    kv_len - query_len + i + 1 tokens. A sequence with kv_len 0 (a padded row) gives zeros.
    """
    return by_sequence(paged_attention_reference, q, k_pool, v_pool, tables, n_rep, scale)


# %% [markdown]
# ## Prove it
#
# A prefill of 40 tokens, a chunk of 7 after 33, and a decode after 99, in one pool. Their blocks are scattered,
# and every slot that belongs to none of them holds NaN.

# %%
n_q, n_kv, head_dim, block_size = 9, 3, 64, 16  # SmolLM2's heads
steps = [(40, 40), (7, 40), (1, 100)]  # query_len, kv_len
generator = torch.Generator().manual_seed(28)
blocks = torch.tensor([17, 26, 15, 18, 22, 9, 5, 0, 28, 3, 13, 21, 14])  # 3 + 3 + 7
block_tables = torch.full((3, 7), -1, dtype=torch.int32)  # -1: no token needs this entry
for i, own in enumerate(blocks.split([3, 3, 7])):
    block_tables[i, : len(own)] = own
starts, lens = torch.tensor([0, 40, 47, 48]).int(), torch.tensor([n for _, n in steps]).int()
tables = PagedTables(block_tables, lens, starts, block_size, max_query_len=40, max_kv_len=100)
print(block_tables)

# %%
q = torch.randn(48, n_q, head_dim, generator=generator)
k_pool, v_pool = torch.full((2, 30 * block_size, n_kv, head_dim), torch.nan)
for i in range(3):
    slots = tables.slot_mapping(i)
    k_pool[slots], v_pool[slots] = torch.randn(2, len(slots), n_kv, head_dim, generator=generator)
print(f"{float(k_pool.isnan().float().mean()):.0%} of the pool is NaN")
together = paged_attention_batch_reference(q, k_pool, v_pool, tables, n_rep=3)
print(list(together.shape), "NaN in the output:", int(together.isnan().sum()))

# %% [markdown]
# Now each sequence alone, through its own slot mapping: once by the oracle, and once by the kernel that you wrote
# on Day 22. The oracle must be equal to the last bit. The kernel adds in another order, so it must be within Day
# 18's tolerance.

# %%
from nanoserve.kernels.dispatch import paged_attention_dispatch, use_kernel
from nanoserve.kernels.reference import tolerance

atol, rtol = tolerance(torch.float32)
for i, rows in enumerate(together.split([query_len for query_len, _ in steps])):
    queries = q[starts[i] : starts[i + 1]].transpose(0, 1)[None]  # [1, n_q, query_len, head_dim]
    arguments = queries, k_pool, v_pool, tables.slot_mapping(i), 3
    oracle = paged_attention_reference(*arguments)[0].transpose(0, 1)
    with use_kernel("day22"):
        kernel = paged_attention_dispatch(*arguments)[0].transpose(0, 1)
    close = torch.allclose(rows, kernel, atol=atol, rtol=rtol)
    print(f"query_len, kv_len {steps[i]}: equal {torch.equal(rows, oracle)}, kernel close {close}")
    assert torch.equal(rows, oracle) and close

# %% [markdown]
# ## What a kernel cannot check
#
# As on Day 23, the host checks before it launches. There is more to get wrong now: a start that is too late, a
# bound that is too low, a block that is not in the pool. Shapes and dtypes are checked always. The **values** of
# the tables are checked on the CPU alone, since reading them on a GPU waits. The dispatcher then calls the
# backend. The two functions that launch the batch's own kernel land on Day 31, because Days 29 and 30 write this kernel
# first. With `use_kernel("day22")`, a batch runs sequence by sequence.


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/dispatch.py: check_batch, _check_tables
from nanoserve.kernels.dispatch import (
    INTEGERS,
    _check_devices,
    _check_pools,
    _kernel,
    _reads_values,
    paged_attention_batch_tlsim,
    paged_attention_batch_triton,
    paged_attention_dispatch,
    select_backend,
)


def check_batch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    check_tables: bool | None = None,
) -> None:
    """Raise a ValueError that names the argument if a kernel would compute a wrong result.

    Arguments as for paged_attention_batch_reference. Checks shapes, dtypes, devices, the host
    integers of the tables and head_dim's stride. Checks the values in the tables on a CPU only,
    because reading them on a GPU waits for the GPU. `check_tables=True`, or
    NANOSERVE_CHECK_SLOTS=1, checks them on a GPU too.
    """
    if q.dim() != 3 or len(q) == 0:
        raise ValueError(
            f"q must be [num_tokens, n_q, head_dim], of at least one token, got {list(q.shape)}"
        )
    _check_pools(q, k_pool, v_pool, n_rep)
    blocks, kv_lens, starts = tables.block_tables, tables.kv_lens, tables.query_starts
    if blocks.dim() != 2 or 0 in blocks.shape or blocks.dtype not in INTEGERS:
        raise ValueError(
            "block_tables must be integers [num_seqs, max_blocks], both at least 1, got "
            f"{blocks.dtype} {list(blocks.shape)}"
        )
    num_seqs, max_blocks = blocks.shape
    for name, x, length in (("kv_lens", kv_lens, num_seqs), ("query_starts", starts, num_seqs + 1)):
        if x.shape != (length,) or x.dtype != torch.int32:
            raise ValueError(
                f"{name} must be int32 [{length}] as block_tables has {num_seqs} sequences, got "
                f"{x.dtype} {list(x.shape)}"
            )
    for name in ("block_size", "max_query_len", "max_kv_len"):
        value = getattr(tables, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if tables.max_kv_len > max_blocks * tables.block_size:
        raise ValueError(
            f"max_kv_len is {tables.max_kv_len}, but block_tables has room for {max_blocks} blocks "
            f"of {tables.block_size} tokens"
        )
    tensors = {"block_tables": blocks, "kv_lens": kv_lens, "query_starts": starts}
    _check_devices(q, k_pool=k_pool, v_pool=v_pool, **tensors)
    if _reads_values(q, check_tables):
        _check_tables(tables, len(q), len(k_pool))


def _check_tables(tables: PagedTables, num_tokens: int, num_slots: int) -> None:
    """Check the values in tables: for num_tokens queries, and pools of num_slots slots."""
    starts, kv_lens = tables.query_starts.tolist(), tables.kv_lens.tolist()
    if starts[0] != 0 or starts[-1] != num_tokens:
        raise ValueError(
            f"query_starts goes from {starts[0]} to {starts[-1]}, and must go from 0 to q's "
            f"{num_tokens} tokens"
        )
    for i, kv_len in enumerate(kv_lens):
        query_len = starts[i + 1] - starts[i]
        if not 0 <= query_len <= tables.max_query_len:
            raise ValueError(
                f"sequence {i} has query_len {query_len}, and must have 0 to max_query_len, "
                f"{tables.max_query_len}"
            )
        if not 0 <= kv_len <= tables.max_kv_len:
            raise ValueError(
                f"sequence {i} has kv_len {kv_len}, and must have 0 to max_kv_len, "
                f"{tables.max_kv_len}"
            )
        if query_len > kv_len > 0:  # kv_len 0 is a padded row
            raise ValueError(f"sequence {i} has query_len {query_len}, more than kv_len {kv_len}")
    num_blocks, blocks = num_slots // tables.block_size, tables.block_tables
    low, high = (int(block) for block in blocks.aminmax())
    if low >= 0 and high < num_blocks:
        return
    firsts = torch.arange(blocks.shape[1], device=blocks.device) * tables.block_size
    used = firsts < tables.kv_lens[:, None]  # the entries past a sequence's tokens may be anything
    wrong = (((blocks < 0) | (blocks >= num_blocks)) & used).nonzero().tolist()
    if wrong:
        sequence, index = wrong[0]
        raise ValueError(
            f"block_tables has block {int(blocks[sequence, index])} for sequence {sequence}, but "
            f"the pools have {num_blocks} blocks of {tables.block_size} slots"
        )


# %% jupyter={"source_hidden": true}
# until day 31: lands in nanoserve/kernels/dispatch.py: paged_attention_batch_dispatch
def paged_attention_batch_dispatch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: PagedTables,
    n_rep: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Paged attention of many sequences, by the backend that select_backend chooses.

    Arguments and result as for paged_attention_batch_reference; every backend's result is within
    `tolerance` of the reference's. Raises ValueError as check_batch and select_backend do.
    """
    backend = select_backend(q.device)
    if _kernel.get() == "day22":
        check_batch(q, k_pool, v_pool, tables, n_rep)
        return by_sequence(paged_attention_dispatch, q, k_pool, v_pool, tables, n_rep, scale)
    if backend == "triton":
        return paged_attention_batch_triton(q, k_pool, v_pool, tables, n_rep, scale)
    if backend == "tlsim":
        return paged_attention_batch_tlsim(q, k_pool, v_pool, tables, n_rep, scale)
    check_batch(q, k_pool, v_pool, tables, n_rep)
    return paged_attention_batch_reference(q, k_pool, v_pool, tables, n_rep, scale)


# %%
late = torch.tensor([1, 40, 47, 48]).int()
beyond = block_tables.clone()
beyond[1, 2] = 30
for name, value in (("query_starts", late), ("block_tables", beyond), ("max_kv_len", 99)):
    try:
        check_batch(q, k_pool, v_pool, replace(tables, **{name: value}), 3)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## A batch that the model takes for a cache
#
# The model calls `cache.paged_attention(layer, k, v, q, n_rep)` since Day 19, and passes `[1, heads, num_tokens,
# head_dim]`. If packed tokens look like one long sequence, `gqa_attention` need not change at all. So the batch
# gets that method. A `PagedBatch` is **one step** of several caches over one pool:
#
# - It reserves the blocks of all its tokens first, in one call of `allocate_for`: all or none. If the pool is too
#   small, no table has changed, and the caller may try with fewer sequences.
# - `positions` holds the position of each token, for RoPE. `tables` holds the tables above.
# - `paged_attention` writes k and v of the layer with one `index_copy_` per pool, and attends in one call.
# - `commit()` advances the lengths after the forward pass. Why not in the last layer, as `PagedKVCache` does? Day
#   31 records launches once and replays them. A replay runs no Python, so the line that advances a length would not
#   run.

# %%
from nanoserve.cache import KVCacheExhausted, KVPool, PagedKVCache


# %% jupyter={"source_hidden": true}
# lands in nanoserve/cache.py: PagedBatch, _check_step
class PagedBatch:
    """One step of several sequences over one pool. The model uses it as a cache.

    The step's tokens lie one after another, without padding: query_lens[0] tokens of caches[0],
    then query_lens[1] tokens of caches[1], and so on. `positions` int64 [num_tokens] is each
    token's position in its sequence, on the pool's device; `tables` is for paged attention.
    """

    def __init__(self, caches: Sequence[PagedKVCache], query_lens: Sequence[int]) -> None:
        """Reserve the blocks for query_lens[i] more tokens in caches[i], for all i or for none.

        Raises KVCacheExhausted, and leaves every table as it was, if too few blocks are free.
        Raises ValueError for no caches, a number of query_lens that differs, a query_len below 1,
        a cache that is given twice, and caches of different pools.
        """
        _check_step(caches, query_lens)
        self._caches, self._pool = tuple(caches), caches[0].pool
        self._starts = [cache.seq_len for cache in caches]
        self._ends = [start + n for start, n in zip(self._starts, query_lens, strict=True)]
        self._reserve()
        self.tables = self._tables(query_lens)
        rows = torch.arange(sum(query_lens), device=self._pool.k.device)
        self.positions = self.tables.positions_of(rows)
        self._slots = self.tables.slots_of(self.tables.sequences_of(rows), self.positions)

    def paged_attention(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        n_rep: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Write this step's k and v of one layer, then compute attention of q, all in one launch.

        k, v [1, n_kv, num_tokens, head_dim]; q [1, n_q, num_tokens, head_dim] -> q's shape. n_rep
        and scale as for paged_attention_reference. Raises ValueError for another number of tokens,
        and the errors of paged_attention_batch_dispatch.
        """
        num_tokens = len(self.positions)
        for name, x in (("k", k), ("v", v), ("q", q)):
            if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != num_tokens:
                raise ValueError(
                    f"{name} must be [1, heads, {num_tokens}, head_dim] as this step has "
                    f"{num_tokens} tokens, got {list(x.shape)}"
                )
        k_pool, v_pool = self._pool.k[layer], self._pool.v[layer]
        k_pool.index_copy_(0, self._slots, k[0].transpose(0, 1))
        v_pool.index_copy_(0, self._slots, v[0].transpose(0, 1))
        queries = q[0].transpose(0, 1)  # [num_tokens, n_q, head_dim]
        out = paged_attention_batch_dispatch(queries, k_pool, v_pool, self.tables, n_rep, scale)
        return out.transpose(0, 1)[None]

    def commit(self) -> None:
        """Advance the length of every cache, after all layers of the step have run.

        The forward pass itself changes no length, because a replayed CUDA graph runs no Python.
        Raises ValueError, and advances no length, if a cache was advanced or freed since the batch
        was made: the batch stands for one step.
        """
        for i, (cache, start, end) in enumerate(
            zip(self._caches, self._starts, self._ends, strict=True)
        ):
            if cache.seq_len != start or cache.table.capacity < end:
                raise ValueError(
                    f"sequence {i} had {start} tokens when this batch was made, and was advanced "
                    f"or freed since: its length is {cache.seq_len}"
                )
        for cache, end in zip(self._caches, self._ends, strict=True):
            cache.seq_len = end

    def _reserve(self) -> None:
        """Take the blocks of all sequences in one call of the allocator, then share them out."""
        size = self._pool.allocator.block_size
        missing = [
            max(0, -(-end // size) - len(cache.table.blocks))
            for cache, end in zip(self._caches, self._ends, strict=True)
        ]
        blocks = self._pool.allocator.allocate_for(sum(missing) * size)
        for cache, stop, n in zip(self._caches, accumulate(missing), missing, strict=True):
            cache.table.blocks += blocks[stop - n : stop]

    def _tables(self, query_lens: Sequence[int]) -> PagedTables:
        size = self._pool.allocator.block_size
        width = -(-max(self._ends) // size)
        rows = [cache.table.blocks[:width] for cache in self._caches]
        as_int32 = {"dtype": torch.int32, "device": self._pool.k.device}
        return PagedTables(
            # block 0 stands in the entries that no token needs
            block_tables=torch.tensor([row + [0] * (width - len(row)) for row in rows], **as_int32),
            kv_lens=torch.tensor(self._ends, **as_int32),
            query_starts=torch.tensor([0, *accumulate(query_lens)], **as_int32),
            block_size=size,
            max_query_len=max(query_lens),
            max_kv_len=max(self._ends),
            total_kv_len=sum(self._ends),
        )


def _check_step(caches: Sequence[PagedKVCache], query_lens: Sequence[int]) -> None:
    """Raise a ValueError for caches and query_lens that are no step of distinct sequences."""
    if len(caches) != len(query_lens) or not caches:
        raise ValueError(
            "a batch needs at least one cache and a query_len for each, got "
            f"{len(caches)} caches and {len(query_lens)} query_lens"
        )
    seen: dict[int, int] = {}
    for i, (cache, query_len) in enumerate(zip(caches, query_lens, strict=True)):
        if query_len < 1:
            raise ValueError(f"sequence {i} has query_len {query_len}, and must have at least 1")
        if cache.pool is not caches[0].pool:
            raise ValueError(f"sequences 0 and {i} lie in different pools")
        first = seen.setdefault(id(cache), i)
        if first != i:
            raise ValueError(f"sequences {first} and {i} are the same cache")


# %%
from nanoserve.config import load_config
from nanoserve.fetch import resolve

config = load_config(resolve("smollm2"))
pool = KVPool(config, num_blocks=8, block_size=4, poison=True)  # 32 slots
caches = [PagedKVCache(pool) for _ in range(3)]
try:
    PagedBatch(caches, [20, 5, 9])
except KVCacheExhausted as error:
    print(error, "| free:", pool.allocator.num_free, [cache.table.blocks for cache in caches])
batch = PagedBatch(caches, [20, 5, 3])
print([cache.table.blocks for cache in caches], batch.positions.tolist())

# %% [markdown]
# Is the model right over a batch? The function below is `Model.hidden` and `Model.head` with three changes: the
# cache is a batch, the RoPE rows are those of `batch.positions`, and each sequence's last row gets logits. (In the
# weeks after this one, the engine gets such a function.) Three prompts go through all 30 layers in one pass, and
# then each prompt alone. The batch runs with the reference backend, until its kernel is built.

# %%
from nanoserve import load_model, load_tokenizer
from nanoserve.kernels.dispatch import use_backend
from nanoserve.layers import block, rms_norm, rope_tables

model, tokenizer = load_model("smollm2"), load_tokenizer("smollm2")


def next_logits(ids, batch):
    """The logits after each sequence's last token: ids, packed -> [num_seqs, vocab]."""
    cos, sin = (table[batch.positions] for table in rope_tables(model.config, 64))
    x = model.weights["model.embed_tokens.weight"][torch.tensor([ids])]
    for index, layer in enumerate(model.layers):
        x = block(x, layer, cos, sin, model.config, batch, index)
    last = batch.tables.query_starts[1:].long() - 1  # the last row of each sequence
    x = rms_norm(x[0, last], model.weights["model.norm.weight"], model.config.norm_eps)
    return model.head(x)


# %%
texts = ["The capital of France is", "The sun rises in the", "The days of the week are Monday,"]
prompts = [tokenizer.encode(text) for text in texts]
pool = KVPool(model.config, num_blocks=12, poison=True)
caches = [PagedKVCache(pool) for _ in prompts]
with use_backend("reference"):
    batch = PagedBatch(caches, [len(ids) for ids in prompts])
    logits = next_logits([token for ids in prompts for token in ids], batch)
batch.commit()
alone = torch.stack([model(torch.tensor([ids]))[0, -1] for ids in prompts])
off = float((logits - alone).abs().max() / alone.abs().max())
print([cache.seq_len for cache in caches], "tokens held; logits agree:", off < 1e-5)
assert off < 1e-5

# %% [markdown]
# The logits are within $10^{-5}$ of the largest logit: products of another shape add in another order, as always.
# And no line of `gqa_attention` has changed.
#
# ## Your answer is the engine
#
# Every `PagedBatch` of the package finds its positions and slots with `sequences_of` and `slots_of`. Inside
# `today.mine()` these are your methods, if they have passed their checks. The three sequences write five tokens
# each, one launch per layer and step:

# %%
import nanoserve.cache as engine

tokens = [[int(token)] for token in logits.argmax(dim=-1)]
with today.mine(), use_backend("reference"):
    for _ in range(4):
        step = engine.PagedBatch(caches, [1, 1, 1])
        found = next_logits([written[-1] for written in tokens], step).argmax(dim=-1)
        step.commit()
        for written, token in zip(tokens, found.tolist()):
            written.append(token)
for text, written in zip(texts, tokens):
    print(repr(text + tokenizer.decode(written)))
assert tokenizer.decode(tokens[0]).startswith(" Paris")

# %% [markdown]
# ## Measure it: what padding would read
#
# In a decode step, attention reads the keys and values of all tokens in the cache. Day 27 counted these bytes: no
# kernel takes less time than they need. A padded cache has a strip for each sequence, and each strip is as long as
# the longest. Take the 200 requests of Day 14, each somewhere in its answer, and draw batches from them.

# %%
question = "64 sequences: a padded batch reads how many times the bytes of a packed one?"
today.predict("times", question, guess=None, low=1, high=64)

# %%
import random
from statistics import median

draw = random.Random(28)
kv_lens = [
    prompt + draw.randint(1, answer) for prompt, answer in today.data("request_lengths")["requests"]
]
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def read_bytes(tokens):
    """Keys and values of one layer of SmolLM2 in bfloat16: 3 KV heads of 64 numbers."""
    return 2 * tokens * 3 * 64 * 2


def batch_bytes(size):
    """(padded, packed) bytes of a layer's read: the median of 99 batches."""
    batches = [draw.sample(kv_lens, size) for _ in range(99)]
    padded = median(read_bytes(size * max(lens)) for lens in batches)
    return padded, median(read_bytes(sum(lens)) for lens in batches)


counted = {size: batch_bytes(size) for size in SIZES}
for size, (padded, packed) in counted.items():
    print(f"{size:3} sequences: {padded / 1e6:6.1f} MB padded, {packed / 1e6:5.1f} MB packed")
times = counted[64][0] / counted[64][1]
print(f"64 sequences: {times:.1f} times the bytes; your guess: {today.guess_text('times')}")
assert counted[1][0] == counted[1][1] and 3 < times < 8

# %% jupyter={"source_hidden": true}
# Draws the plot: Bytes of a padded batch
from nanoserve.course.plots import COLOURS, figure, line, log2_axis, prediction_marker

fig, ax = figure(
    xlabel="sequences in the batch",
    ylabel="bytes, padded / packed",
    title="The longest sequence decides what a padded batch reads",
)
line(ax, SIZES, [a / b for a, b in counted.values()], "padded", COLOURS["contiguous"])
line(ax, SIZES, [1] * len(SIZES), "packed", COLOURS["engine"])
prediction_marker(ax, 64, today.guess("times"))
log2_axis(ax)
ax.set(xlim=(0.85, 260), xticks=SIZES, ylim=(0, None))
fig

# %% [markdown]
# One sequence needs no padding. The more sequences a batch has, the longer its longest one is, and all strips
# have that length. The packed batch reads each token once, at every size.
#
# This counts the bytes that attention would read, not time. A kernel can stop at each row's own length, and then it
# reads no padding. But the strips still take up the memory, and in a step with a prompt the products still compute
# the padded rows. Paging and packing avoid both.
#
# ## What you learned
#
# 1. **Pack, do not pad.** Put the tokens of all sequences one after another, and say with `query_starts` where
#    each one starts.
# 2. **A slot mapping is a block table whose blocks hold one token.** So one kernel serves one sequence and many.
# 3. **Lengths are data, bounds are arguments.** The tensors stay on the device, and the host passes two upper
#    bounds, so that no launch has to wait for a number.
#
# ## Tomorrow
#
# The batch has its tables, its oracle and its cache, but no kernel. Day 29 writes one. It begins with the loads
# that Day 27 counted: Day 22's kernel loads each key once for every query head, and the query heads of a KV head
# could share it.
#
# **In one paragraph.** A server's sequences have different lengths, and a tensor's rows have one. Instead of
# filling the rows up, we put all tokens one after another, with a table that says where each sequence starts, how
# long it is and which blocks hold it. Two lines find any token: which sequence, which slot. One call then gives
# the results of the calls one by one, in a pool that is NaN elsewhere. The model's attention needs no change: a
# `PagedBatch` has the method that `gqa_attention` calls, and `commit()` advances the lengths after the step.
