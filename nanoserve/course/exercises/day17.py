"""Day 17: a pool takes blocks back, and a sequence forgets. With the review of week 4."""

import torch

from nanoserve.cache import BlockAllocator, BlockTable, KVPool
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day16 import BLOCK, CONFIG, SCATTERED, scattered_pool, step

LAYERS = range(CONFIG.num_layers)


def _used(pool_class: type, poison: bool) -> KVPool:
    """A pool of the learner's class that hands out SCATTERED's blocks; every slot holds 7."""
    pool = pool_class(CONFIG, len(SCATTERED), BLOCK, poison=poison)
    pool.allocator = scattered_pool().allocator
    pool.k.fill_(7.0), pool.v.fill_(7.0)
    return pool


def _nan_slots(pool: KVPool) -> dict:
    """The unchanged slots, and the slots of NaN: keys and values, layer by layer."""
    return {
        "slots left as they were": [
            slot for slot, row in enumerate(pool.k[0]) if bool((row == 7.0).all())
        ]
    } | {
        f"slots of NaN, {name} of layer {layer}": [
            slot for slot, row in enumerate(tensor[layer]) if bool(row.isnan().all())
        ]
        for name, tensor in (("keys", pool.k), ("values", pool.v))
        for layer in LAYERS
    }


# release -----------------------------------------------------------------------------------------


def _released(answer: type, tokens: int, poison: bool = True, times: int = 1) -> dict:
    """Release a table of `tokens` tokens, beside a neighbour of 5 tokens."""
    pool = _used(answer, poison)
    table, neighbour = BlockTable(pool.allocator), BlockTable(pool.allocator)
    table.grow(tokens)
    neighbour.grow(5)
    for _ in range(times):
        pool.release(table)
    owned = len(neighbour.blocks)
    return {
        "the table's blocks": list(table.blocks), "the neighbour's blocks": owned,
        "free blocks": pool.allocator.num_free, **_nan_slots(pool),
    }  # fmt: skip


def _refused_unpoisoned(answer: type) -> dict:
    """Release in a pool with its own allocator, which refuses a block that is not poisoned."""
    pool = answer(CONFIG, 4, BLOCK, poison=True)
    table = BlockTable(pool.allocator)
    table.grow(9)
    pool.k.fill_(7.0), pool.v.fill_(7.0)
    pool.release(table)
    return {"the table's blocks": list(table.blocks), "free blocks": pool.allocator.num_free}


def _release_cases() -> list[Case]:
    return [
        Case("three blocks are released", (9,), call=_released, kind="blocks"),
        Case("five blocks, block 0 among them", (18,), call=_released, kind="poison"),
        Case("without poison", (9, False), call=_released, kind="plain"),
        Case("released twice", (9, True, 2), call=_released, kind="twice"),
        Case("an empty table", (0,), call=_released, kind="blocks"),
        Case("a pool that refuses numbers in a free block", call=_refused_unpoisoned, kind="order"),
    ]


def _release(self, table, blocks=None, fill=torch.nan, parts=("k", "v"), layers=slice(None)):
    """The right answer with one part changed."""
    size = self.allocator.block_size
    blocks = table.blocks if blocks is None else blocks
    for block in blocks if self._poison else ():
        for name in parts:
            getattr(self, name)[layers, block * size : (block + 1) * size] = fill
    table.free()


@wrong(
    "Nothing is poisoned. If self._poison is set, poison before table.free(): a freed table lists "
    "no blocks."
)
def _too_late(self, table):
    table.free()
    _release(self, table)


@wrong(
    "The blocks are given back before their slots are poisoned. A pool with poison refuses a block "
    "that still holds numbers: poison first, and call table.free() last.",
    hints="order",
)
def _freed_first(self, table):
    blocks = list(table.blocks)
    table.free()
    size = self.allocator.block_size
    for block in blocks if self._poison else ():
        self.k[:, block * size : (block + 1) * size] = torch.nan
        self.v[:, block * size : (block + 1) * size] = torch.nan


@wrong(
    "table.free() is called inside the loop. It empties table.blocks, so the loop ends after one "
    "block. Call it once, after the loop.",
    hints="order",
)
def _freed_in_the_loop(self, table):
    size = self.allocator.block_size
    for block in table.blocks:
        if self._poison:
            self.k[:, block * size : (block + 1) * size] = torch.nan
            self.v[:, block * size : (block + 1) * size] = torch.nan
        table.free()


@wrong(
    "Only the keys are poisoned. A stale value is as wrong as a stale key: fill self.v too.",
    hints="poison",
)
def _keys_only(self, table):
    _release(self, table, parts=("k",))


@wrong(
    "Only layer 0 is poisoned. The first axis is the layers; take all of them: self.k[:, ...].",
    hints="poison",
)
def _first_layer(self, table):
    _release(self, table, layers=slice(1))


@wrong(
    "Only the last block is poisoned. Poison all of table.blocks.",
    hints="poison",
)
def _last_block_poisoned(self, table):
    _release(self, table, blocks=table.blocks[-1:])


@wrong(
    "The block id is used as a slot. Block b is the slots b * block_size to (b + 1) * block_size.",
    hints="poison",
)
def _blocks_as_slots(self, table):
    if self._poison and table.blocks:
        self.k[:, table.blocks] = self.v[:, table.blocks] = torch.nan
    table.free()


@wrong(
    "Layers are poisoned instead of slots. The first axis of self.k counts layers, the second "
    "slots.",
    hints="poison",
)
def _wrong_axis(self, table):
    size = self.allocator.block_size
    for block in table.blocks if self._poison else ():
        self.k[block * size : (block + 1) * size] = torch.nan
        self.v[block * size : (block + 1) * size] = torch.nan
    table.free()


@wrong(
    "The whole pool is poisoned, with the neighbours' keys. Poison only table.blocks.",
    hints="poison",
)
def _everything(self, table):
    if self._poison:
        self.k.fill_(torch.nan), self.v.fill_(torch.nan)
    table.free()


@wrong("It poisons in every pool, and that costs time. Poison only if self._poison is set.")
def _always(self, table):
    size = self.allocator.block_size
    for block in table.blocks:
        self.k[:, block * size : (block + 1) * size] = torch.nan
        self.v[:, block * size : (block + 1) * size] = torch.nan
    table.free()


@wrong(
    "The slots are filled with zeros. A zero key still takes a share of the softmax, and no test "
    "finds it. Fill with NaN, which spreads through every sum.",
    hints="poison",
)
def _zeros(self, table):
    _release(self, table, fill=0.0)


@wrong("The slots are poisoned, but the blocks are never given back: table.free() is missing.")
def _leak(self, table):
    blocks, table.blocks = table.blocks, []
    _release(self, table, blocks=blocks)
    table.blocks = blocks


@wrong(
    "The blocks are free, but the table still lists them. The next release would free them again, "
    "when they may have a new owner. table.free() empties the list."
)
def _still_listed(self, table):
    blocks = list(table.blocks)
    for block in blocks:
        self.allocator.free(block)
    table.blocks = []
    _release(self, table, blocks=blocks)
    table.blocks = blocks


RELEASE = Exercise(
    "release",
    _release_cases,
    hints={
        "blocks": (
            "release poisons slots and gives blocks back. Which of the two must come first?",
            "table.free() gives back every block and empties the list, so it comes last.",
            "Last line: table.free()",
        ),
        "poison": (
            "Which slots belong to block b? Which axis of self.k counts slots?",
            "self.k is [num_layers, num_slots, n_kv, head_dim]. Block b is the slots b * size to "
            "(b + 1) * size, in every layer.",
            "self.k[:, block * size : (block + 1) * size] = torch.nan, and the same for self.v, "
            "for each block in table.blocks.",
        ),
        "order": (
            "A pool with poison refuses to take back a block that still holds numbers. Which comes "
            "first: poison, or table.free()?",
            "Poison first, while table.blocks still lists the blocks. table.free() comes last, "
            "once, after the loop.",
            "The loop over table.blocks fills self.k and self.v. The line after the loop, not "
            "indented: table.free()",
        ),
        "plain": (
            "What must happen to the numbers in a pool with poison=False?",
            "Nothing. The next owner overwrites them.",
            "for block in table.blocks if self._poison else ():",
        ),
        "twice": (
            "Which blocks does the table list after the first release?",
            "None, so the second release has nothing to do. table.free() removes each block from "
            "the list as it gives it back.",
            "Loop over table.blocks to poison, then table.free(), and no other bookkeeping.",
        ),
    },
    target="nanoserve.cache:KVPool.release",
    wrong=(
        _too_late, _freed_first, _freed_in_the_loop, _keys_only, _first_layer,
        _last_block_poisoned, _blocks_as_slots, _wrong_axis, _everything, _always, _zeros, _leak,
        _still_listed,
    ),
)  # fmt: skip


# free --------------------------------------------------------------------------------------------


def _state(cache) -> dict:
    return {
        "blocks": list(cache.table.blocks),
        "free blocks": cache.pool.allocator.num_free,
        "seq_len": cache.seq_len,
        "slot mapping": cache.slot_mapping.tolist(),
    }


def _freed(answer: type, tokens: int, times: int = 1) -> dict:
    cache = answer(scattered_pool())
    if tokens:
        step(cache, tokens, 0)
    for _ in range(times):
        cache.free()
    return _state(cache)


def _broken_off(answer: type) -> dict:
    """A first step that stops after layer 0: the cache owns blocks, and seq_len is still 0."""
    cache = answer(scattered_pool())
    step(cache, 9, 0, layers=1)
    cache.free()
    return _state(cache)


def _poisoned(answer: type) -> dict:
    cache = answer(_used(KVPool, poison=True))
    step(cache, 9, 0)
    cache.free()
    return _nan_slots(cache.pool)


def _neighbour(answer: type) -> list:
    """The K and V that a neighbour reads after the other sequence has ended."""
    pool = scattered_pool()
    cache, neighbour = answer(pool), answer(pool)
    step(cache, 5, 0), step(neighbour, 6, 20)
    cache.free()
    return [*step(neighbour, 3, 40), {"free blocks": pool.allocator.num_free}]


def _used_again(answer: type) -> list:
    """The same cache takes another text, while a new sequence owns its old blocks."""
    pool = scattered_pool()
    cache, newcomer = answer(pool), answer(pool)
    step(cache, 9, 0)
    cache.free()
    step(newcomer, 6, 20)
    return [*step(cache, 3, 40), *step(newcomer, 1, 60), *step(cache, 1, 80)]


def _free_cases() -> list[Case]:
    return [
        Case("after 9 tokens", (9,), call=_freed, kind="blocks"),
        Case("freed twice", (9, 2), call=_freed, kind="twice"),
        Case("a cache that never held anything", (0,), call=_freed, kind="twice"),
        Case("a first step that failed after layer 0", call=_broken_off, kind="owned"),
        Case("what lies in the freed slots", call=_poisoned, kind="poison"),
        Case("a neighbour stays and reads on", call=_neighbour, kind="blocks"),
        Case("the cache is used again, beside a newcomer", call=_used_again, kind="forget"),
    ]


@wrong(
    "The blocks are given back, but seq_len still counts their tokens. Set it to 0.",
    hints="forget",
)
def _keeps_the_length(self):
    self.pool.release(self.table)
    self._mapped = 0


@wrong(
    "self._mapped still counts the old positions, so _map takes no blocks for the next text, and "
    "the text is written into another sequence's blocks. Set self._mapped to 0."
)
def _keeps_the_mapping(self):
    self.pool.release(self.table)
    self.seq_len = 0


@wrong(
    "The blocks are freed directly, so their slots are not poisoned. Call "
    "self.pool.release(self.table), which does both."
)
def _past_the_pool(self):
    self.table.free()
    self.seq_len = self._mapped = 0


@wrong(
    "A new table replaces the old one, and the old one's blocks are never given back. No table "
    "lists them, so they can never be freed."
)
def _new_table(self):
    self.table = BlockTable(self.pool.allocator)
    self.seq_len = self._mapped = 0


@wrong(
    "A cache whose seq_len is 0 can own blocks: its first step took them and failed before the "
    "last layer. Release the table whatever the length is."
)
def _tests_the_length(self):
    if self.seq_len == 0:
        return
    self.pool.release(self.table)
    self.seq_len = self._mapped = 0


@wrong("Only the last block is given back. A sequence owns all of self.table.blocks.")
def _last_block(self):
    if self.table.blocks:
        self.pool.allocator.free(self.table.blocks.pop())
    self.seq_len = self._mapped = 0


@wrong("It forgets the tokens and keeps the blocks: self.pool.release(self.table) is missing.")
def _only_forgets(self):
    self.seq_len = self._mapped = 0


@wrong(
    "A second call raises an error. It must change nothing: code that cleans up after a failure "
    "cannot know whether the cache was freed before."
)
def _once_only(self):
    if not self.table.blocks:
        raise ValueError("freed already")
    self.pool.release(self.table)
    self.seq_len = self._mapped = 0


@wrong(
    "The blocks are freed, but the table still lists them. A second call would free them again, "
    "when they may have a new owner."
)
def _double_free(self):
    for block in self.table.blocks:
        self.pool.allocator.free(block)
    self.seq_len = self._mapped = 0


@wrong(
    "The pool gets a new allocator, in which every block is free, also the blocks that other "
    "sequences still use."
)
def _new_allocator(self):
    old = self.pool.allocator
    self.table.blocks = []
    self.pool.allocator = BlockAllocator(old.num_blocks, old.block_size)
    self.seq_len = self._mapped = 0


@wrong("The whole pool is cleared, with the keys of sequences that still run.")
def _wipes_all(self):
    self.pool.k.zero_(), self.pool.v.zero_()
    self.pool.release(self.table)
    self.seq_len = self._mapped = 0


FREE = Exercise(
    "free",
    _free_cases,
    hints={
        "blocks": (
            "Which blocks does this cache own, and which object gave them out?",
            "It owns the blocks of self.table, and they come from self.pool.",
            "self.pool.release(self.table)",
        ),
        "twice": (
            "What is left to do in the second call?",
            "Nothing. Releasing an empty table changes nothing.",
            "No `if` and no `raise` is needed: self.pool.release(self.table) can be repeated.",
        ),
        "owned": (
            "When does a cache take its blocks: before the first layer is written, or after the "
            "last?",
            "_map takes the blocks in layer 0, and seq_len changes in the last layer. A step that "
            "fails in between leaves blocks with seq_len 0.",
            "No test of seq_len: self.pool.release(self.table) in every case.",
        ),
        "poison": (
            "Which function poisons the slots of blocks that are given back?",
            "KVPool.release, which you have just written. self.table.free() alone does not.",
            "self.pool.release(self.table)",
        ),
        "forget": (
            "A cache stores its table, its length, and the number of positions that have a slot. "
            "What must each be after the blocks are given back?",
            "_map takes blocks for the positions beyond self._mapped. If that is still 9, the next "
            "text takes no blocks.",
            "self.seq_len = self._mapped = 0",
        ),
    },
    target="nanoserve.cache:PagedKVCache.free",
    wrong=(
        _keeps_the_length, _keeps_the_mapping, _past_the_pool, _new_table, _tests_the_length,
        _last_block, _only_forgets, _once_only, _double_free, _new_allocator, _wipes_all,
    ),
)  # fmt: skip

EXERCISES = (RELEASE, FREE)

REVIEW = (
    (
        "Day 14. A sequence of 33 tokens has blocks of 16. How many slots stay empty, and how many "
        "can it be at most?",
        "Three blocks are 48 slots, so 15 are empty. That is also the most: a sequence takes a new "
        "block only when the last one is full.",
    ),
    (
        "Day 14. A request needs three blocks, and two are free. Why must the allocator take "
        "neither?",
        "The caller gets an error and no list, so it could never give the two blocks back. "
        "Counting first makes half an allocation impossible.",
    ),
    (
        "Day 14. Freeing a block twice is refused. What would happen if it were not?",
        "It would be in the free list twice, two sequences would get it, and each would overwrite "
        "the other's keys. Nothing would crash.",
    ),
    (
        "Day 15. Blocks of 16, the table is [7, 2, 11]. In which slot lies position 37?",
        "37 is offset 5 of the third block, block 11: 11 * 16 + 5 = 181.",
    ),
    (
        "Day 16. Why must paged and contiguous logits be equal, and not only close?",
        "Scatter and gather move numbers and compute none, so attention gets the same numbers in "
        "the same order. Any difference means a wrong slot.",
    ),
    (
        "Day 16. What does `pool.k[layer][slots] = rows` do that "
        "`pool.k[layer][slots].copy_(rows)` does not?",
        "It writes into the pool. Indexing with a tensor makes a copy, and copy_ writes into that "
        "copy only.",
    ),
    (
        "Day 17. Why does poison use NaN and not zero?",
        "A zero key gets a score of 0, and so a share of the softmax: the result is wrong and "
        "finite. NaN spreads through every sum, so one stale read makes the logits NaN.",
    ),
    (
        "Day 17. Which mistake does poison not show?",
        "A stale write: a cache that keeps its old mapping overwrites the new owner's keys with "
        "plausible numbers. The check of ownership after every step finds it.",
    ),
)
