"""Right answers to the exercise of Day 14, in different styles."""

from nanoserve.cache import KVCacheExhausted


class _Given:
    """The part of the class that the notebook gives."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks))[::-1]
        self._owned = set()

    @property
    def num_free(self):
        return len(self._free)


class Sliced(_Given):
    """Cuts the end off the list: the ids come in another order than by pops."""

    def allocate(self):
        return self.allocate_for(1)[0]

    def allocate_for(self, num_tokens):
        if num_tokens < 0:
            raise ValueError("fewer than no tokens")
        needed = (num_tokens + self.block_size - 1) // self.block_size
        if needed > len(self._free):
            raise KVCacheExhausted("too few blocks")
        cut = len(self._free) - needed
        self._free, blocks = self._free[:cut], self._free[cut:]
        self._owned |= set(blocks)
        return blocks

    def free(self, block_id):
        if block_id not in self._owned:
            raise ValueError(f"{block_id} is not owned")
        self._owned -= {block_id}
        self._free += [block_id]


class BlockByBlock(_Given):
    """allocate is written first, and allocate_for calls it in a loop after counting."""

    def allocate(self):
        if not self._free:
            raise KVCacheExhausted("none is free")
        block = self._free.pop()
        self._owned.add(block)
        return block

    def allocate_for(self, num_tokens):
        if num_tokens < 0:
            raise ValueError(num_tokens)
        whole, rest = divmod(num_tokens, self.block_size)
        needed = whole + (rest > 0)
        if self.num_free < needed:
            raise KVCacheExhausted(f"{needed} needed")
        return [self.allocate() for _ in range(needed)]

    def free(self, block_id):
        try:
            self._owned.remove(block_id)
        except KeyError:
            raise ValueError(f"block {block_id} has no owner") from None
        self._free.append(block_id)


class TakeThenUndo(_Given):
    """Takes block by block, and gives back what it took when the pool runs out."""

    def allocate(self):
        (block,) = self.allocate_for(1)
        return block

    def allocate_for(self, num_tokens):
        if num_tokens < 0:
            raise ValueError("num_tokens is negative")
        blocks = []
        while len(blocks) * self.block_size < num_tokens:
            if not self._free:
                for block in reversed(blocks):
                    self.free(block)
                raise KVCacheExhausted("the pool is used up")
            blocks.append(self._free.pop())
            self._owned.add(blocks[-1])
        return blocks

    def free(self, block_id):
        if block_id in self._free or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} cannot be given back")
        self._owned.discard(block_id)
        self._free.append(block_id)


RIGHT = {"BlockAllocator": (Sliced, BlockByBlock, TakeThenUndo)}
