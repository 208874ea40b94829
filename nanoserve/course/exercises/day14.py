"""Day 14: the allocator, which hands out the blocks of a pool."""

import random

from nanoserve.cache import BlockAllocator, KVCacheExhausted
from nanoserve.course.exercise import Case, Exercise, wrong

# cases -------------------------------------------------------------------------------------------


def _tried(action, *args):
    """The result of a call, or the name of the error it raised.

    KVCacheExhausted is recognised by name, because a notebook defines its own class.
    """
    try:
        return action(*args)
    except ValueError:
        return "raises ValueError"
    except RuntimeError as error:
        if type(error).__name__ != KVCacheExhausted.__name__:
            raise
        return "raises KVCacheExhausted"


def _rest(pool) -> list:
    """The blocks that the pool still hands out, sorted; at most twice num_blocks of them."""
    blocks = []
    while len(blocks) < 2 * pool.num_blocks and isinstance(block := _tried(pool.allocate), int):
        blocks.append(block)
    return sorted(blocks)


def _one_by_one(answer: type, blocks: int, times: int, size: int = 16) -> dict:
    pool = answer(blocks, size)
    taken = [_tried(pool.allocate) for _ in range(times)]
    return {"taken": taken, "free": pool.num_free}


def _taken_for(answer: type, size: int, *lengths: int) -> dict:
    """How many blocks each number of tokens takes, from a new pool of 9 each time."""
    pools = [answer(9, size) for _ in lengths]
    given = [_tried(pool.allocate_for, tokens) for pool, tokens in zip(pools, lengths, strict=True)]
    counts = [len(blocks) if isinstance(blocks, list) else blocks for blocks in given]
    free = [pool.num_free for pool in pools]
    return {"blocks": dict(zip(lengths, counts, strict=True)), "free": free}


def _given(answer: type, tokens: int) -> dict:
    """Take blocks for `tokens` tokens, in a pool of 5 blocks of 16 slots, of which 2 are taken.

    The order of the blocks is not compared: the text does not fix it.
    """
    pool = answer(5, 16)
    pool.allocate_for(32)
    given = _tried(pool.allocate_for, tokens)
    given = sorted(given) if isinstance(given, list) else given
    return {"given": given, "free": pool.num_free, "still handed out": _rest(pool)}


def _from_empty(answer: type) -> list:
    pool = answer(2, 16)
    pool.allocate_for(32)
    return [_tried(pool.allocate_for, tokens) for tokens in (1, 0)]


def _give_back(answer: type) -> dict:
    pool = answer(5, 16)
    blocks = pool.allocate_for(48)
    pool.free(blocks[1])
    free = pool.num_free
    return {"back": blocks[1], "free": free, "then": pool.allocate(), "rest": _rest(pool)}


def _free_all(answer: type) -> dict:
    """Take blocks with both methods and give them back; do this twice."""
    pool, seen = answer(3, 16), []
    for _ in range(2):
        for block in (pool.allocate(), *pool.allocate_for(20)):
            pool.free(block)
        seen.append(pool.num_free)
    return {"free": seen, "rest": _rest(pool)}


def _free_these(answer: type, *ids: int) -> dict:
    """Give these ids back to a pool of 5 of which blocks 0, 1 and 2 are taken."""
    pool = answer(5, 16)
    pool.allocate_for(48)
    results = [_tried(pool.free, block) for block in ids]
    return {"results": results, "free": pool.num_free, "still handed out": _rest(pool)}


def _soak(answer: type) -> str:
    """Take 300 random steps; return the first broken invariant."""
    pool, owned, chance = answer(12, 16), [], random.Random(14)
    for step in range(300):
        if owned and chance.random() < 0.5:
            pool.free(owned.pop(chance.randrange(len(owned))))
        else:
            blocks = _tried(pool.allocate_for, chance.randrange(60))
            owned += blocks if isinstance(blocks, list) else []
        if len(set(owned)) != len(owned):
            return f"step {step}: a block has two owners"
        if pool.num_free + len(owned) != 12:
            return f"step {step}: {pool.num_free} free and {len(owned)} owned of 12"
    return "all hold"


def _cases() -> list[Case]:
    def case(what: str, kind: str, call, *args) -> Case:
        return Case(what, args, kind=kind, call=call, inputs="")  # the name of the case holds them

    return [
        case("allocate: 3 of 5 blocks, one by one", "allocate", _one_by_one, 5, 3),
        case("allocate: 3 from a pool of 2", "allocate", _one_by_one, 2, 3),
        case("allocate: 2 of 5 blocks of 1 slot", "allocate", _one_by_one, 5, 2, 1),
        case("blocks of 16: 1, 15, 16, 17, 33 tokens", "round", _taken_for, 16, 1, 15, 16, 17, 33),
        case("blocks of 5: 4, 5, 6, 16 tokens", "round", _taken_for, 5, 4, 5, 6, 16),
        case("0 tokens, and -1", "zero", _taken_for, 16, 0, -1),
        case("3 of 5 blocks free: 48 tokens", "all", _given, 48),
        case("3 of 5 blocks free: 49 tokens", "all", _given, 49),
        case("none of 2 blocks free: 1 token, then 0", "all", _from_empty),
        case("take 3, give the second back, take one", "free", _give_back),
        case("take 3 and give all back, twice", "free", _free_all),
        case("block 1 is owned: free(1), twice", "refuse", _free_these, 1, 1),
        case("block 4 is free: free(4)", "refuse", _free_these, 4),
        case("blocks are 0 to 4: free(5), free(-1)", "refuse", _free_these, 5, -1),
        case("300 random steps", "free", _soak),
    ]  # fmt: skip


# wrong answers -----------------------------------------------------------------------------------


class _Right(BlockAllocator):
    """The right answer in pieces, so that a wrong one changes one of them."""

    def needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def enough(self, needed: int) -> bool:
        return needed <= len(self._free)

    def take(self) -> int:
        block = self._free.pop()
        self._owned.add(block)
        return block

    def allocate(self):
        return self.allocate_for(1)[0]

    def allocate_for(self, num_tokens):
        if num_tokens < 0:
            raise ValueError(num_tokens)
        needed = self.needed(num_tokens)
        if not self.enough(needed):
            raise KVCacheExhausted(f"{needed} blocks are needed and {self.num_free} are free")
        return [self.take() for _ in range(needed)]


@wrong(
    "free accepts a block that is already free. The block is then in the pool twice, and two "
    "sequences will get it. Raise ValueError."
)
class _DoubleFree(_Right):
    def free(self, block_id):
        if not (isinstance(block_id, int) and 0 <= block_id < self.num_blocks):
            raise ValueError(block_id)
        self._owned.discard(block_id)
        self._free.append(block_id)


@wrong(
    "free only checks that the block is not free yet. So it accepts an id that was never in the "
    "pool, and allocate hands that id out. Check that the block is owned."
)
class _Foreign(_Right):
    def free(self, block_id):
        if block_id in self._free:
            raise ValueError(block_id)
        self._owned.discard(block_id)
        self._free.append(block_id)


@wrong(
    "free checks nothing: it accepts a block that is already free, and an id that was never in the "
    "pool. Only a block in self._owned can be given back."
)
class _ChecksNothing(_Right):
    def free(self, block_id):
        self._owned.discard(block_id)
        self._free.append(block_id)


@wrong(
    "free ignores a block that is already free. The caller has made a mistake and must be told: "
    "raise ValueError."
)
class _Silent(_Right):
    def free(self, block_id):
        if block_id in self._owned:
            super().free(block_id)


@wrong(
    "free lets Python's own KeyError out, for a block that is not in self._owned. The caller "
    "expects a ValueError: test block_id in self._owned first."
)
class _KeyError(_Right):
    def free(self, block_id):
        self._owned.remove(block_id)
        self._free.append(block_id)


@wrong(
    "free puts the block at the beginning of the list, where it is taken last. Free blocks are a "
    "stack: append the block at the end."
)
class _Queue(_Right):
    def free(self, block_id):
        super().free(block_id)
        self._free.insert(0, self._free.pop())


@wrong(
    "free puts the block on the stack and also leaves it in self._owned. So the block is free and "
    "owned at once, and it can be given back a second time.",
    hints="free",
)
class _StaysOwned(_Right):
    def free(self, block_id):
        if block_id not in self._owned:
            raise ValueError(block_id)
        self._free.append(block_id)


@wrong(
    "free removes the block from self._owned but does not put it back on the stack. The pool "
    "shrinks with each call."
)
class _Leaks(_Right):
    def free(self, block_id):
        super().free(block_id)
        self._free.pop()


@wrong(
    "When the blocks run out, some of them are already taken, and no caller owns them. "
    "Count first, then take: all or none."
)
class _Half(_Right):
    def allocate_for(self, num_tokens):
        if num_tokens < 0:
            raise ValueError(num_tokens)
        blocks = []
        for _ in range(self.needed(num_tokens)):
            if not self._free:
                raise KVCacheExhausted("none is free")
            blocks.append(self.take())
        return blocks


@wrong(
    "When there are too few blocks, allocate_for returns the few that are left. The caller needs "
    "slots for all its tokens: raise KVCacheExhausted and take nothing."
)
class _WhatThereIs(_Right):
    def enough(self, needed):
        return bool(self._free) or needed == 0

    def allocate_for(self, num_tokens):
        if self.needed(num_tokens) > len(self._free) > 0:
            num_tokens = len(self._free) * self.block_size
        return super().allocate_for(num_tokens)


@wrong("It rounds down, so the last tokens have no block. 17 tokens need two blocks of 16.")
class _RoundsDown(_Right):
    def needed(self, num_tokens):
        return num_tokens // self.block_size

    def allocate(self):
        return self.allocate_for(self.block_size)[0]


@wrong(
    "Off by one at the boundary: 16 tokens fill one block of 16 and need no second block. Round "
    "up instead of adding one.",
    hints="round",
)
class _OneMore(_Right):
    def needed(self, num_tokens):
        return num_tokens // self.block_size + 1


@wrong("0 tokens take a block. They need no block: return an empty list.")
class _AtLeastOne(_Right):
    def needed(self, num_tokens):
        return max(1, super().needed(num_tokens))


@wrong("It takes a block for each token. A block holds block_size tokens.")
class _BlockPerToken(_Right):
    def needed(self, num_tokens):
        return num_tokens


@wrong("It counts with blocks of 16, whatever the pool's are. Use self.block_size.")
class _Always16(_Right):
    def needed(self, num_tokens):
        return -(-num_tokens // 16)


@wrong(
    "A negative number of tokens is treated as 0. It is a mistake of the caller: raise ValueError."
)
class _Negative(_Right):
    def allocate_for(self, num_tokens):
        return super().allocate_for(max(0, num_tokens))


@wrong(
    "It reads the top of the stack and does not remove it, so every caller gets the same block. "
    "Use pop()."
)
class _Peeks(_Right):
    def take(self):
        self._owned.add(self._free[-1])
        return self._free[-1]


@wrong(
    "The blocks that it hands out are not added to self._owned, so their owner cannot give them "
    "back."
)
class _NotNoted(_Right):
    def take(self):
        return self._free.pop()


@wrong(
    "allocate_for adds its blocks to self._owned, and allocate does not. So a block from allocate "
    "cannot be given back."
)
class _AllocateNotNoted(_Right):
    def allocate(self):
        block = super().allocate()
        self._owned.remove(block)
        return block


@wrong(
    "The last free block is never handed out. If 3 are needed and 3 are free, hand them out.",
    hints="all",
)
class _KeepsOne(_Right):
    def enough(self, needed):
        return needed < len(self._free) or needed == 0


@wrong(
    "It takes from the beginning of the list. Free blocks are a stack: the block that was given "
    "back last is taken next, from the end of the list.",
    hints="free",
)
class _Bottom(_Right):
    def take(self):
        block = self._free.pop(0)
        self._owned.add(block)
        return block


@wrong(
    "allocate lets Python's own IndexError out when no block is free. The caller catches "
    "KVCacheExhausted: test before you pop."
)
class _AllocateIndexError(_Right):
    def allocate(self):
        return self.take()


@wrong(
    "An empty pool raises Python's own IndexError. The caller catches KVCacheExhausted: count "
    "before you pop."
)
class _IndexError(_Right):
    def enough(self, needed):
        return True


@wrong("allocate gives None when nothing is free, which looks like an id. Raise KVCacheExhausted.")
class _GivesNone(_Right):
    def allocate(self):
        return super().allocate() if self._free else None


@wrong("allocate gives a list. It takes one block and gives its id: an int.")
class _GivesList(_Right):
    def allocate(self):
        return self.allocate_for(1)


@wrong(
    "allocate_for returns the number of blocks. The owner needs to know which blocks: return a "
    "list of ids.",
    hints="round",
)
class _GivesCount(_Right):
    def allocate(self):
        return super().allocate_for(1)[0]

    def allocate_for(self, num_tokens):
        return len(super().allocate_for(num_tokens))


ALLOCATOR = Exercise(
    "BlockAllocator",
    _cases,
    hints={
        "allocate": (
            "Two collections change when a block is handed out: the stack of free blocks and the "
            "set of owned blocks. What happens if the stack is empty?",
            "self._free.pop() takes the block that was given back last; add it to self._owned. "
            "If no block is free, raise KVCacheExhausted before anything has changed.",
            "One block is what 1 token needs: return self.allocate_for(1)[0]",
        ),
        "round": (
            "How many blocks of 16 do 16 tokens fill? And 17?",
            "Divide and round up. In whole numbers, -(-a // b) rounds a / b up, and so does "
            "(a + b - 1) // b.",
            "needed = -(-num_tokens // self.block_size), and then that many pops from self._free "
            "into a list, which you return.",
        ),
        "zero": (
            "What do 0 tokens need? And what could -1 tokens mean?",
            "0 tokens need no block: return an empty list. A negative number is a mistake of the "
            "caller.",
            'if num_tokens < 0: raise ValueError(f"num_tokens must be at least 0, got '
            '{num_tokens}")',
        ),
        "all": (
            "allocate_for must change nothing when it raises. So when must it count the free "
            "blocks?",
            "Count before you take: compare the number of blocks needed with self.num_free, and "
            "raise while nothing has changed. If both numbers are equal, there are enough.",
            "if needed > self.num_free: raise KVCacheExhausted(...) must stand before the first "
            "pop.",
        ),
        "free": (
            "A block that is given back leaves one collection and enters the other.",
            "self._owned.remove(block_id), and self._free.append(block_id): on top of the stack, "
            "where the next allocate finds it.",
            "For each block taken: blocks = [self._free.pop() for _ in range(needed)] and "
            "self._owned.update(blocks). For each one given back: remove, then append.",
        ),
        "refuse": (
            "Which blocks may be given back? Which collection holds them?",
            "Only an owned block can be given back. One test covers both mistakes: the block that "
            "is already free, and the id that was never in the pool.",
            'if block_id not in self._owned: raise ValueError(f"block {block_id} is not owned")',
        ),
    },
    target="nanoserve.cache:BlockAllocator",
    wrong=(
        _DoubleFree, _Foreign, _ChecksNothing, _Silent, _KeyError, _StaysOwned, _Leaks, _Half,
        _WhatThereIs, _RoundsDown, _OneMore, _AtLeastOne, _BlockPerToken, _Always16, _Negative,
        _Peeks, _NotNoted, _AllocateNotNoted, _KeepsOne, _Bottom, _Queue, _IndexError,
        _AllocateIndexError, _GivesNone, _GivesList, _GivesCount,
    ),
)  # fmt: skip

EXERCISES = (ALLOCATOR,)
