"""Right answers to the exercises of Day 15, in different styles."""

from itertools import chain

# slot --------------------------------------------------------------------------------------------


def by_division(self, position):
    """Quotient and remainder."""
    size = self._allocator.block_size
    if position < 0 or position >= self.capacity:
        raise ValueError(f"no slot for position {position}")
    return self.blocks[position // size] * size + position % size


def by_counting(self, position):
    """Goes through the blocks until the position lies in one of them."""
    left = position
    for block in self.blocks if position >= 0 else ():
        if left < self._allocator.block_size:
            return block * self._allocator.block_size + left
        left -= self._allocator.block_size
    raise ValueError(f"position {position} lies in none of {len(self.blocks)} blocks")


def by_listing(self, position):
    """Lists the slots of all positions and picks one."""
    size = self._allocator.block_size
    slots = list(chain.from_iterable(range(b * size, b * size + size) for b in self.blocks))
    if position not in range(len(slots)):
        raise ValueError(f"position {position} is not one of {len(slots)}")
    return slots[position]


# grow --------------------------------------------------------------------------------------------


def by_tokens(self, num_tokens):
    """Asks for the tokens that have no slot yet."""
    missing = num_tokens - self.capacity
    if missing > 0:
        self.blocks.extend(self._allocator.allocate_for(missing))


def by_blocks(self, num_tokens):
    """Counts blocks, and asks for that many blocks' tokens."""
    size = self._allocator.block_size
    needed = (num_tokens + size - 1) // size - len(self.blocks)
    fresh = self._allocator.allocate_for(max(needed, 0) * size)
    self.blocks = self.blocks + fresh


def with_undo(self, num_tokens):
    """Takes block by block, and gives them back where the pool runs out."""
    fresh = []
    try:
        while (len(self.blocks) + len(fresh)) * self._allocator.block_size < num_tokens:
            fresh.append(self._allocator.allocate())
    except RuntimeError:
        for block in reversed(fresh):
            self._allocator.free(block)
        raise
    for block in fresh:
        self.blocks.append(block)


RIGHT = {
    "slot": (by_division, by_counting, by_listing),
    "grow": (by_tokens, by_blocks, with_undo),
}
