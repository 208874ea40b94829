"""Right answers to the exercises of Day 37, in different styles."""

from nanoserve.cache import KVCacheExhausted

# _preempt ----------------------------------------------------------------------------------------


def by_popping(self, sequence):
    """The newest is the last that runs."""
    self.waiting.appendleft(self.running.pop())
    if sequence in self._step:
        del self._step[sequence]
    sequence.cache.free()
    self.num_preemptions += 1


def by_new_lists(self, sequence):
    """Makes new lists and a new step."""
    sequence.cache.free()
    self.running = [other for other in self.running if other is not sequence]
    self.waiting.insert(0, sequence)
    self._step = {other: n for other, n in self._step.items() if other is not sequence}
    self.num_preemptions = self.num_preemptions + 1


def by_pool(self, sequence):
    """Gives the blocks back through the pool, then empties the rest of the cache."""
    sequence.cache.pool.release(sequence.cache.table)
    sequence.cache.free()
    self._step.pop(sequence, 0)
    del self.running[self.running.index(sequence)]
    self.waiting.extendleft([sequence])
    self.num_preemptions += 1


# _reserve ----------------------------------------------------------------------------------------


def by_counting(self, sequence, num_tokens):
    """Counts the missing blocks before it takes them."""
    table, size = sequence.cache.table, self._allocator.block_size
    total = sequence.cache.seq_len + num_tokens
    missing = -(-total // size) - len(table.blocks)
    while missing > self._allocator.num_free:
        newest = self.running[-1]
        if newest is sequence:
            return False
        self._preempt(newest)
    table.grow(total)
    return True


def by_recursion(self, sequence, num_tokens):
    try:
        sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)
    except KVCacheExhausted:
        *_, newest = self.running
        if newest is sequence:
            return False
        self._preempt(newest)
        return self._reserve(sequence, num_tokens)
    return True


def by_going_back(self, sequence, num_tokens):
    """Goes through the requests from the newest to this one."""
    for newest in reversed(self.running.copy()):
        try:
            sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)
            return True
        except KVCacheExhausted:
            if newest is not sequence:
                self._preempt(newest)
            else:
                break
    return False


RIGHT = {
    "_preempt": (by_popping, by_new_lists, by_pool),
    "_reserve": (by_counting, by_recursion, by_going_back),
}
