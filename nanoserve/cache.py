"""The KV cache: keys and values of past tokens, contiguous or in the blocks of a pool."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from nanoserve.config import ModelConfig
from nanoserve.kernels.dispatch import paged_attention_batch_dispatch, paged_attention_dispatch
from nanoserve.kernels.reference import PagedTables

BLOCK_SIZE = 16  # slots in a block: small blocks waste few slots, large blocks keep tables short


class NaiveKVCache:
    """The contiguous KV cache of one sequence: `capacity` tokens at first, doubled when full."""

    def __init__(self, config: ModelConfig, capacity: int = 64) -> None:
        self.seq_len = 0
        self._config = config
        self._capacity = capacity
        self._k: torch.Tensor | None = None  # [num_layers, n_kv, capacity, head_dim]
        self._v: torch.Tensor | None = None

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [1, n_kv, query_len, head_dim] of one layer after the tokens held so far.

        Returns views of all K and V of the layer, [1, n_kv, kv_len, head_dim]. The last layer
        advances seq_len, so a step that fails in an earlier layer leaves seq_len unchanged. Raises
        ValueError for a batch of more than one sequence.
        """
        if k.shape[0] != 1:
            raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
        end = self.seq_len + k.shape[2]
        if self._k is None or end > self._capacity:
            self._grow(end, k)
        self._k[layer, :, self.seq_len : end] = k[0]
        self._v[layer, :, self.seq_len : end] = v[0]
        if layer == self._config.num_layers - 1:
            self.seq_len = end
        return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]

    def _grow(self, needed: int, like: torch.Tensor) -> None:
        """Move K and V into memory at least twice as long, so that growth costs O(1) per token."""
        if self._k is not None:
            needed = max(needed, 2 * self._capacity)
        self._capacity = max(needed, self._capacity)
        shape = (self._config.num_layers, self._config.n_kv, self._capacity, self._config.head_dim)
        with torch.inference_mode(False):  # else only that mode could write to this memory
            k, v = like.new_empty(shape), like.new_empty(shape)
        if self._k is not None:
            k[:, :, : self.seq_len] = self._k[:, :, : self.seq_len]
            v[:, :, : self.seq_len] = self._v[:, :, : self.seq_len]
        self._k, self._v = k, v


class KVCacheExhausted(RuntimeError):
    """The pool has too few free blocks. The call that raises this error changes nothing."""


class BlockAllocator:
    """Hands out the blocks of a pool. Each block is free, or has one owner.

    The free list is last in, first out. Invariant: free + owned = num_blocks, and no block is both.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks free blocks of block_size slots. Raises ValueError if either is below 1."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))[::-1]
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def allocate(self) -> int:
        """Take one block and return its id. Raises KVCacheExhausted if no block is free."""
        return self.allocate_for(1)[0]

    def allocate_for(self, num_tokens: int) -> list[int]:
        """Take the fewest blocks that hold num_tokens tokens; return their ids in the order taken.

        Raises KVCacheExhausted and takes no block if too few are free. Raises ValueError for a
        negative num_tokens.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        needed = -(-num_tokens // self.block_size)  # rounded up
        if needed > self.num_free:
            raise KVCacheExhausted(f"{needed} blocks are needed and {self.num_free} are free")
        blocks = [self._free.pop() for _ in range(needed)]
        self._owned.update(blocks)
        return blocks

    def free(self, block_id: int) -> None:
        """Give a block back. Raises ValueError for a block that is free or not in the pool."""
        if block_id not in self._owned:
            known = isinstance(block_id, int) and 0 <= block_id < self.num_blocks
            reason = "is free already" if known else f"is not one of the pool's {self.num_blocks}"
            raise ValueError(f"block {block_id} {reason}")
        self._owned.remove(block_id)
        self._free.append(block_id)


class BlockTable:
    """The blocks of one sequence, in order of position: maps each position to its slot."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.blocks: list[int] = []
        self._allocator = allocator

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks can hold."""
        return len(self.blocks) * self._allocator.block_size

    def grow(self, num_tokens: int) -> None:
        """Take blocks until the table can hold num_tokens tokens in all.

        Raises KVCacheExhausted, and leaves the table unchanged, if too few blocks are free.
        """
        self.blocks += self._allocator.allocate_for(max(0, num_tokens - self.capacity))

    def locate(self, position: int) -> tuple[int, int]:
        """Return (block id, offset in block) of a position. Raises ValueError past the capacity."""
        if not 0 <= position < self.capacity:
            raise ValueError(f"position {position} is outside the table's {self.capacity} slots")
        index, offset = divmod(position, self._allocator.block_size)
        return self.blocks[index], offset

    def slot(self, position: int) -> int:
        """The slot of a position, block id * block_size + offset. Errors as for locate."""
        block, offset = self.locate(position)
        return block * self._allocator.block_size + offset

    def free(self) -> None:
        """Give every block back to the allocator; a second call does nothing."""
        while self.blocks:
            self._allocator.free(self.blocks[-1])
            self.blocks.pop()


class KVPool:
    """The memory for keys and values of all layers, which many sequences share.

    k and v are [num_layers, num_slots, n_kv, head_dim]; slot s is offset s % block_size of block
    s // block_size. With `poison`, free slots hold NaN, so that reading a free slot gives NaN.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        poison: bool = False,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        shape = (config.num_layers, num_blocks * block_size, config.n_kv, config.head_dim)
        self.k, self.v = (_zeros(shape, dtype, device) for _ in "kv")
        self._poison = poison
        if poison:
            self.k.fill_(torch.nan)
            self.v.fill_(torch.nan)
            self.allocator.free = self._free_poisoned

    def _free_poisoned(self, block_id: int) -> None:
        """BlockAllocator.free in a pool with poison: refuse a block whose slots are not all NaN."""
        allocator = self.allocator
        if block_id in range(allocator.num_blocks):
            slots = slice(block_id * allocator.block_size, (block_id + 1) * allocator.block_size)
            if not (self.k[:, slots].isnan().all() and self.v[:, slots].isnan().all()):
                raise ValueError(f"block {block_id} is not poisoned: use KVPool.release")
        type(allocator).free(allocator, block_id)

    def release(self, table: BlockTable) -> None:
        """Give a table's blocks back to the allocator; with `poison`, first write NaN to them."""
        size = self.allocator.block_size
        for block in table.blocks if self._poison else ():
            self.k[:, block * size : (block + 1) * size] = torch.nan
            self.v[:, block * size : (block + 1) * size] = torch.nan
        table.free()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A tensor of zeros. On a CPU, a page of memory is taken when it is first written.

    numpy.zeros asks the operating system for pages of zeros; torch.zeros writes the zeros itself.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class PagedKVCache:
    """The paged KV cache of one sequence: its length, and its block table and slots in a pool."""

    def __init__(self, pool: KVPool) -> None:
        self.seq_len = 0
        self.pool = pool
        self.table = BlockTable(pool.allocator)
        self._slots = torch.empty(0, dtype=torch.int64, device=pool.k.device)
        self._mapped = 0  # the number of positions in _slots
        self._step_slots = self._slots  # the mapping that this step's layers use

    @property
    def slot_mapping(self) -> torch.Tensor:
        """The slot of each token held, oldest first: int64 [seq_len], on the pool's device."""
        self._map(self.seq_len)  # adds the slots of tokens that came without it
        return self._slots[: self.seq_len]

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k, v [1, n_kv, query_len, head_dim] of one layer to their slots; gather K and V.

        Returns contiguous copies of all K and V of the layer, [1, n_kv, kv_len, head_dim]. Raises
        KVCacheExhausted if too few blocks are free; then nothing is written and no block is taken.
        Raises ValueError for a batch of more than one sequence.
        """
        slots = self._write(layer, k, v)
        # [kv_len, n_kv, head_dim] -> [1, n_kv, kv_len, head_dim], as NaiveKVCache lays it out
        k, v = (
            pool[layer][slots].transpose(0, 1).contiguous() for pool in (self.pool.k, self.pool.v)
        )
        return k[None], v[None]

    def paged_attention(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        q: torch.Tensor,
        n_rep: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Write k and v as append does, then compute attention of q [1, n_q, query_len, head_dim].

        K and V stay in the pool: the backend reads them through the slot mapping. Returns
        [1, n_q, query_len, head_dim]. n_rep and scale as for paged_attention_reference. Raises the
        errors of append and of paged_attention_dispatch.
        """
        slots = self._write(layer, k, v)
        return paged_attention_dispatch(
            q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale
        )

    def free(self) -> None:
        """Give every block back and set the length to 0; a second call does nothing."""
        self.pool.release(self.table)
        self.seq_len = self._mapped = 0

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v to their slots; return the slots of all tokens so far: [kv_len].

        The last layer advances seq_len, so that all layers of a step use the same mapping.
        """
        if k.shape[0] != 1:
            raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
        end = self.seq_len + k.shape[2]
        self._map(end)
        new = self._slots[self.seq_len : end]
        self.pool.k[layer].index_copy_(0, new, k[0].transpose(0, 1))
        self.pool.v[layer].index_copy_(0, new, v[0].transpose(0, 1))
        if layer == len(self.pool.k) - 1:
            self.seq_len = end
        if len(self._step_slots) != end:  # one tensor for all layers of a step, so that what a
            self._step_slots = self._slots[:end]  # backend derives from it is derived once
        return self._step_slots

    def _map(self, end: int) -> None:
        """Extend the slot mapping to `end` positions; entries that exist are not recomputed."""
        if end <= self._mapped:
            return
        self.table.grow(end)
        if end > len(self._slots):  # the buffer doubles, so that a step costs O(1) on average
            with torch.inference_mode(False):  # else only that mode could write to this memory
                longer = self._slots.new_empty(max(end, 2 * len(self._slots)))
            longer[: self._mapped] = self._slots[: self._mapped]
            self._slots = self._step_slots = longer
        fresh = [self.table.slot(position) for position in range(self._mapped, end)]
        self._slots[self._mapped : end] = torch.tensor(fresh, device=self._slots.device)
        self._mapped = end


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


def chained_hash(before: int, tokens: Sequence[int]) -> int:
    """The hash of a block: of its tokens in order, and of `before`, the hash of the block before
    it (0 for the first block). So it stands for all tokens up to the block's end."""
    return hash((before, *tokens))


def shareable_blocks(num_tokens: int, block_size: int) -> int:
    """How many blocks of num_tokens tokens may come from the cache.

    Only full blocks, and never the last token: its hidden state gives the first logits.
    """
    return (num_tokens - 1) // block_size


class Prefix:
    """The tokens of a full block, and all tokens before them.

    Two prefixes are equal if all their tokens are equal. A dict finds a prefix by its hash and then
    compares the tokens, so a collision of hashes shares nothing.
    """

    def __init__(self, before: "Prefix | None", tokens: Sequence[int]) -> None:
        """before: the prefix that ends where the block begins, or None for the first block."""
        self.before, self.tokens = before, tuple(tokens)
        self._hash = chained_hash(0 if before is None else hash(before), self.tokens)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        a, b = self, other
        while a is not b:  # one object stands for equal tokens: the rest need not be compared
            if not (isinstance(a, Prefix) and isinstance(b, Prefix)) or a.tokens != b.tokens:
                return False
            a, b = a.before, b.before
        return True


class PrefixCache:
    """Shares the full blocks of a pool between sequences. Tables use it in place of the allocator.

    Each block is free, referenced (in one table or more) or cached (in no table, its content kept).
    Invariant: free + cached + referenced = num_blocks. A known block can be found by its tokens; a
    block that is not known has one owner. Only full blocks are known, and nothing writes to them.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._allocator = pool.allocator
        self._blocks: dict[Prefix, int] = {}  # the known blocks
        self._prefixes: dict[int, Prefix] = {}  # the same, by block
        self._references: dict[int, int] = {}  # the number of tables that have a known block
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
        return self._allocator.num_blocks

    @property
    def block_size(self) -> int:
        """The number of slots in a block."""
        return self._allocator.block_size

    @property
    def num_free(self) -> int:
        """The number of free blocks, without the cached ones."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks that are in no table and keep their content."""
        return len(self._cached)

    def references(self, block_id: int) -> int:
        """The number of tables that have a known block; 0 for a block that is not known."""
        return self._references.get(block_id, 0)

    def find(self, ids: Sequence[int]) -> list[int]:
        """The known blocks that hold the start of ids, in order: at most shareable_blocks."""
        size, blocks, prefix = self.block_size, [], None
        for i in range(shareable_blocks(len(ids), size)):
            block = self._blocks.get(Prefix(prefix, ids[i * size : (i + 1) * size]))
            if block is None:
                break
            blocks.append(block)
            prefix = self._prefixes[block]
        return blocks

    def take(self, ids: Sequence[int]) -> list[int]:
        """Find the blocks that hold the start of ids, for one more table."""
        blocks = self.find(ids)
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)
        return blocks

    def add(self, block_id: int, prefix: Prefix) -> None:
        """Make a full block known. Call this after the step that filled the block.

        If the same tokens are known in another block, this one stays with its one owner.
        """
        if prefix not in self._blocks:
            self._blocks[prefix], self._prefixes[block_id] = block_id, prefix
            self._references[block_id] = 1

    def allocate_for(self, num_tokens: int) -> list[int]:
        """As BlockAllocator.allocate_for. If too few blocks are free, evicts cached blocks.

        Raises KVCacheExhausted, and evicts nothing, if both together are too few.
        """
        missing = -(-num_tokens // self.block_size) - self.num_free
        if missing > self.num_cached:
            raise KVCacheExhausted(
                f"{missing + self.num_free} blocks are needed, {self.num_free} are free and "
                f"{self.num_cached} are cached"
            )
        for _ in range(missing):
            self._evict()
        return self._allocator.allocate_for(num_tokens)

    def free(self, block_id: int) -> None:
        """Give back a table's reference to a block. Raises ValueError if no table has the block.

        A known block that no table has any more becomes cached. Any other block becomes free.
        """
        if block_id not in self._prefixes:
            self._release(block_id)
            return
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is in no table")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            self._cached[block_id] = None

    def _evict(self) -> None:
        """Forget the least recently used cached block, and free it."""
        block_id = next(iter(self._cached))
        del self._cached[block_id], self._references[block_id]
        del self._blocks[self._prefixes.pop(block_id)]
        self._release(block_id)

    def _release(self, block_id: int) -> None:
        """Give a block back to the pool, which poisons the block if it has poison."""
        table = BlockTable(self._allocator)
        table.blocks.append(block_id)
        self.pool.release(table)


class SharedKVCache(PagedKVCache):
    """The paged KV cache of one sequence that shares full blocks through a PrefixCache."""

    def __init__(self, prefixes: PrefixCache) -> None:
        super().__init__(prefixes.pool)
        self.table = BlockTable(prefixes)
        self._prefixes = prefixes
        self._chain: list[Prefix] = []  # one for each block that was taken or shared

    def reuse(self, ids: Sequence[int]) -> None:
        """Begin an empty cache with the known blocks that hold the start of ids.

        Raises ValueError if the cache has tokens or blocks.
        """
        if self.seq_len or self.table.blocks:
            raise ValueError(f"the cache is not empty: it holds {self.seq_len} tokens")
        self.table.blocks += self._prefixes.take(ids)
        self.seq_len = self.table.capacity
        self._extend(ids)

    def share(self, ids: Sequence[int]) -> None:
        """Make the blocks known that are full. ids begins with the tokens that the cache holds."""
        for i in range(len(self._chain), self._extend(ids)):
            self._prefixes.add(self.table.blocks[i], self._chain[i])

    def free(self) -> None:
        """Give every block back and set the length to 0; a second call does nothing."""
        self.table.free()
        self._chain.clear()
        self.seq_len = self._mapped = 0

    def _extend(self, ids: Sequence[int]) -> int:
        """Chain the prefixes of all full blocks; return how many blocks are full."""
        size = self.pool.allocator.block_size
        for i in range(len(self._chain), self.seq_len // size):
            before = self._chain[-1] if self._chain else None
            self._chain.append(Prefix(before, ids[i * size : (i + 1) * size]))
        return len(self._chain)
