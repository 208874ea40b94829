"""Day 16: this step's keys and values go through their slots into the pool."""

from contextlib import suppress
from dataclasses import replace

import torch

from nanoserve.cache import KVCacheExhausted, KVPool
from nanoserve.config import ModelConfig
from nanoserve.course.exercise import Case, Exercise, raises, wrong
from nanoserve.course.exercises.day01 import TINY

CONFIG: ModelConfig = replace(TINY, n_q=6, n_kv=2, head_dim=8, num_layers=3)
BLOCK = 4
SCATTERED = (4, 1, 3, 6, 0, 5, 2)  # the order in which the pool hands its blocks out


def keys_and_values(seq: int, seed: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, CONFIG.n_kv, seq, CONFIG.head_dim)
    k, v = torch.randn(shape, generator=generator)
    return k, v


def scattered_pool(num_blocks: int = 7, poison: bool = False) -> KVPool:
    """A pool that hands out blocks in SCATTERED's order; its slots hold old numbers."""
    pool = KVPool(CONFIG, num_blocks, BLOCK, poison=poison)
    for block in pool.allocator.allocate_for(num_blocks * BLOCK):
        assert block < num_blocks
    for block in reversed([b for b in SCATTERED if b < num_blocks]):
        pool.allocator.free(block)
    if not poison:
        pool.k.fill_(7.0), pool.v.fill_(7.0)
    return pool


def step(cache, seq: int, seed: int, layers: int = CONFIG.num_layers) -> list[dict]:
    """Append one step in each layer; return the K and V that append returned, and seq_len."""
    given = []
    for layer in range(layers):
        k, v = cache.append(layer, *keys_and_values(seq, seed + layer))
        given.append({"k": k, "v": v, "seq_len": cache.seq_len})
    return given


def _pool_after(answer: type, steps: list[int]) -> dict:
    pool = scattered_pool()
    cache = answer(pool)
    for number, seq in enumerate(steps):
        step(cache, seq, 10 * number)
    return {"the pool's k": pool.k, "the pool's v": pool.v}


def _returned(answer: type, steps: list[int]) -> list[dict]:
    cache = answer(scattered_pool())
    for number, seq in enumerate(steps):
        given = step(cache, seq, 10 * number)
    return given


def _lengths(answer: type, steps: list[int]) -> list[int]:
    cache = answer(scattered_pool())
    return [row["seq_len"] for n, seq in enumerate(steps) for row in step(cache, seq, 10 * n)]


def _broken_off(answer: type) -> list[dict]:
    """Stop a step after layer 0, then run the same step again."""
    cache = answer(scattered_pool())
    step(cache, 5, 0)
    step(cache, 2, 10, layers=1)
    return step(cache, 2, 10)


def _two_take_turns(answer: type) -> list[dict]:
    pool = scattered_pool()
    first, second = answer(pool), answer(pool)
    step(first, 3, 0), step(second, 5, 20)
    step(first, 3, 40), step(second, 1, 60)
    return [*step(first, 1, 80), *step(second, 1, 100)]


def _no_room(answer: type) -> dict:
    """Write nine tokens into two blocks of four; return the state after the refusal."""
    pool = scattered_pool(num_blocks=2)
    cache = answer(pool)
    step(cache, 5, 0)
    before, refused = pool.k.clone(), False
    try:
        step(cache, 4, 10)
    except KVCacheExhausted:
        refused = True
    return {
        "KVCacheExhausted": refused, "seq_len": cache.seq_len,
        "the pool is as it was": torch.equal(before, pool.k),
    }  # fmt: skip


def _batch(answer: type, batch: int) -> None:
    answer(scattered_pool()).append(0, *keys_and_values(3, 0, batch=batch))


def _batch_refused(answer: type) -> dict:
    """The state after a batch of two was refused."""
    cache = answer(scattered_pool())
    with suppress(ValueError):
        cache.append(0, *keys_and_values(3, 0, batch=2))
    return {
        "blocks taken": len(cache.table.blocks), "free blocks": cache.pool.allocator.num_free,
        "seq_len": cache.seq_len,
    }  # fmt: skip


def _cases() -> list[Case]:
    return [
        Case("the pool after a prompt of 3", ([3],), call=_pool_after, kind="write"),
        Case("the pool after 6, 1 and 3 tokens", ([6, 1, 3],), call=_pool_after, kind="write"),
        Case("append returns K and V of 6 tokens", ([6],), call=_returned, kind="read"),
        Case(
            "append returns K and V of 6, 1 and 3 tokens", ([6, 1, 3],), call=_returned, kind="read"
        ),
        Case("seq_len after each layer", ([5, 1],), call=_lengths, kind="length"),
        Case("a step fails after layer 0 and runs again", call=_broken_off, kind="length"),
        Case("two sequences take turns", call=_two_take_turns, kind="read"),
        Case("the pool has too few blocks", call=_no_room, kind="room"),
        Case("a batch of two", (2,), call=_batch, kind="batch", expected=raises(ValueError, "2")),
        Case("a batch of none", (0,), call=_batch, kind="batch", expected=raises(ValueError, "0")),
        Case("the state after a batch of two", call=_batch_refused, kind="batch"),
    ]


def _right(
    self, layer, k, v, new=None, put=None, returns=None, where=None, moves=None, maps=True
):  # fmt: skip
    """The right answer with one part changed."""
    if k.shape[0] != 1:
        raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
    end = self.seq_len + k.shape[2]
    if maps:
        self._map(end)
    slots = self._slots[self.seq_len : end] if new is None else new(self, end)
    put = put or (lambda pool, slots, k: pool.index_copy_(0, slots, k[0].transpose(0, 1)))
    where = layer if where is None else where
    put(self.pool.k[where], slots, k)
    put(self.pool.v[where], slots, v)
    if moves is not None:
        self.seq_len += moves
    elif layer == len(self.pool.k) - 1:
        self.seq_len = end
    return self._slots[:end] if returns is None else returns(self, end)


@wrong(
    "The new tokens are written at their positions in the text, as if slot and position were the "
    "same. Use the mapping: position p lies in slot self._slots[p]."
)
def _logical(self, layer, k, v):
    return _right(self, layer, k, v, new=lambda self, end: torch.arange(self.seq_len, end))


@wrong(
    "It counts on from the sequence's first slot, as if all blocks lay side by side. Look each "
    "slot up: self._slots[self.seq_len : end]."
)
def _neighbours(self, layer, k, v):
    def new(self, end):
        return (self._slots[0] + torch.arange(self.seq_len, end)).remainder(self.pool.k.shape[1])

    return _right(self, layer, k, v, new=new)


@wrong(
    "The new tokens overwrite the sequence's oldest slots. Their slots are the last ones of the "
    "mapping: self._slots[self.seq_len : end]."
)
def _oldest(self, layer, k, v):
    return _right(self, layer, k, v, new=lambda self, end: self._slots[: end - self.seq_len])


@wrong(
    "It writes into the slots of all tokens, but k holds only this step's. Take the slots from "
    "self.seq_len on."
)
def _all_tokens(self, layer, k, v):
    return _right(self, layer, k, v, new=lambda self, end: self._slots[:end])


@wrong(
    "Heads and tokens are mixed up: reshape keeps the order of the numbers. k[0] is "
    "[n_kv, query_len, head_dim] and a slot holds [n_kv, head_dim]: transpose the first two axes."
)
def _reshaped(self, layer, k, v):
    def put(pool, slots, k):
        pool.index_copy_(0, slots, k[0].reshape(len(slots), *pool.shape[1:]))

    return _right(self, layer, k, v, put=put)


@wrong(
    "All tokens of the step go into one slot, so only the last one stays. Each token has its own "
    "slot."
)
def _one_slot(self, layer, k, v):
    def put(pool, slots, k):
        pool[slots[-1]] = k[0, :, -1]

    return _right(self, layer, k, v, put=put)


@wrong(
    "The values are written where the keys belong, and the pool's v is never touched. There are "
    "two writes: k into pool.k and v into pool.v."
)
def _values_over_keys(self, layer, k, v):
    slots = _right(self, layer, k, v, put=lambda pool, slots, k: None)
    new = slots[len(slots) - k.shape[2] :]
    for tensor in (k, v):
        self.pool.k[layer].index_copy_(0, new, tensor[0].transpose(0, 1))
    return slots


@wrong(
    "The pool does not change: pool[slots] with a tensor of slots is a copy, and you wrote into "
    "the copy. Use index_copy_, or assign: pool[slots] = ..."
)
def _into_a_copy(self, layer, k, v):
    def put(pool, slots, k):
        pool[slots].copy_(k[0].transpose(0, 1))

    return _right(self, layer, k, v, put=put)


@wrong(
    "The keys are added to the old content of the slot, which may be another sequence's. Overwrite "
    "it: index_copy_."
)
def _added(self, layer, k, v):
    def put(pool, slots, k):
        pool.index_add_(0, slots, k[0].transpose(0, 1))

    return _right(self, layer, k, v, put=put)


@wrong("Every layer writes into layer 0 of the pool. Write into pool.k[layer].")
def _one_layer(self, layer, k, v):
    return _right(self, layer, k, v, where=0)


@wrong(
    "It returns the slots of this step only, so attention sees no older token. Return the slots of "
    "all tokens: self._slots[:end]."
)
def _only_the_new(self, layer, k, v):
    return _right(self, layer, k, v, returns=lambda self, end: self._slots[end - k.shape[2] : end])


@wrong(
    "The slots come newest first. Attention needs them oldest first, in the order of the mapping."
)
def _newest_first(self, layer, k, v):
    return _right(self, layer, k, v, returns=lambda self, end: self._slots[:end].flip(0))


@wrong(
    "It returns self.slot_mapping, which ends at seq_len. seq_len changes only in the last layer, "
    "so the other layers do not see the tokens of this step."
)
def _slot_mapping(self, layer, k, v):
    return _right(self, layer, k, v, returns=lambda self, end: self.slot_mapping)


@wrong(
    "seq_len grows in every layer, so the next layer writes behind a gap. It must grow once a "
    "step, in the last layer.",
    hints="length",
)
def _every_layer(self, layer, k, v):
    return _right(self, layer, k, v, moves=k.shape[2])


@wrong("seq_len never grows, so each step overwrites the step before.", hints="length")
def _never_moves(self, layer, k, v):
    return _right(self, layer, k, v, moves=0)


@wrong(
    "seq_len grows in the first layer, so the other layers write behind a gap. It must grow in the "
    "last layer.",
    hints="length",
)
def _first_layer_moves(self, layer, k, v):
    return _right(self, layer, k, v, moves=k.shape[2] if layer == 0 else 0)


@wrong(
    "seq_len grows before _map. If the pool has too few blocks, the cache then counts tokens that "
    "were never written: call _map first."
)
def _moves_too_early(self, layer, k, v):
    start, end = self.seq_len, self.seq_len + k.shape[2]
    if k.shape[0] != 1:
        raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
    if layer == len(self.pool.k) - 1 or end > self._mapped:
        self.seq_len = end
    self._map(end)
    self.seq_len = start
    return _right(self, layer, k, v)


@wrong("The mapping is never extended, so there are no slots to write to: self._map(end) first.")
def _not_mapped(self, layer, k, v):
    return _right(self, layer, k, v, maps=False)


@wrong(
    "Only a batch larger than one is refused. A batch of none is no sequence either: refuse every "
    "size but 1."
)
def _batch_of_none(self, layer, k, v):
    if not len(k):
        return self._slots[: self.seq_len]
    return _right(self, layer, k, v)


@wrong(
    "A batch of two is accepted, and its second sequence is lost. Raise ValueError and name the "
    "size of the batch."
)
def _batch_taken(self, layer, k, v):
    return _right(self, layer, k[:1], v[:1])


@wrong(
    "The batch is refused only after _map has taken blocks for it. Refuse it before anything "
    "changes."
)
def _batch_refused_late(self, layer, k, v):
    self._map(self.seq_len + k.shape[2])
    return _right(self, layer, k, v)


WRITE = Exercise(
    "_write",
    _cases,
    hints={
        "write": (
            "You need three values: the number of tokens after this step, the slots of the new "
            "positions, and the new keys with one row for each of those slots.",
            "After self._map(end), position p lies in slot self._slots[p]. A row of the pool is "
            "[n_kv, head_dim], and k[0] is [n_kv, query_len, head_dim]: transpose(0, 1).",
            "new = self._slots[self.seq_len : end], then "
            "self.pool.k[layer].index_copy_(0, new, k[0].transpose(0, 1)), and the same for v.",
        ),
        "read": (
            "append reads the slots that you return, in their order.",
            "Return the slots of all tokens, this step's included, oldest first, in every layer, "
            "also before seq_len has changed.",
            "return self._slots[:end]",
        ),
        "length": (
            "A step calls _write once for each layer. After which layer is the step complete?",
            "Every layer of this step starts from seq_len, so seq_len may change only after the "
            "last layer has written. The pool's k has one row for each layer.",
            "if layer == len(self.pool.k) - 1: self.seq_len = end",
        ),
        "room": (
            "Which line raises KVCacheExhausted, and what has changed before that line?",
            "self._map(end) raises it, before it takes a block. Change nothing before that call.",
            "Order: refuse a batch, end = ..., self._map(end), write, change seq_len, return.",
        ),
        "batch": (
            "k is [1, n_kv, query_len, head_dim]. What if the first size is 2?",
            "One cache holds one sequence, so this is a mistake of the caller. Raise before you "
            "write.",
            'if k.shape[0] != 1: raise ValueError(f"a cache holds one sequence, got a batch of '
            '{k.shape[0]}")',
        ),
    },
    target="nanoserve.cache:PagedKVCache._write",
    wrong=(
        _logical, _neighbours, _oldest, _all_tokens, _reshaped, _one_slot, _values_over_keys,
        _into_a_copy, _added, _one_layer, _only_the_new, _newest_first, _slot_mapping,
        _every_layer, _never_moves, _first_layer_moves, _moves_too_early, _not_mapped,
        _batch_taken, _batch_of_none, _batch_refused_late,
    ),
)  # fmt: skip

EXERCISES = (WRITE,)
