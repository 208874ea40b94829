"""The oracle of paged attention: gather keys and values by slot, then sum explicitly."""

from collections.abc import Callable
from dataclasses import dataclass

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
