"""Right answers to the exercises of Day 35, in different styles."""

# schedule ----------------------------------------------------------------------------------------


def with_break(self):
    while True:
        if not self.waiting:
            break
        first = self.waiting[0]
        if not self._can_admit(first):
            break
        del self.waiting[0]
        first.cache.table.grow(first.most_tokens)
        self.running.append(first)
    step = {}
    for sequence in self.running:
        step[sequence] = len(sequence.ids) - sequence.cache.seq_len
    return step


def counting_first(self):
    """Takes out those that it admits afterwards."""
    admitted = 0
    for sequence in self.waiting:
        if not self._can_admit(sequence):
            break
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
        admitted += 1
    for _ in range(admitted):
        self.waiting.popleft()
    return dict(zip(self.running, [s.num_uncomputed for s in self.running], strict=True))


def by_hand(self):
    """Computes places and blocks itself."""
    size = self._allocator.block_size
    while len(self.running) < self.max_num_seqs and self.waiting:
        most = len(self.waiting[0].prompt_ids) + self.waiting[0].limit - 1
        if -(-most // size) > self._allocator.num_free:
            break
        self.running.append(self.waiting.popleft())
        self.running[-1].cache.table.grow(most)
    return {sequence: sequence.num_uncomputed for sequence in self.running}


# remove ------------------------------------------------------------------------------------------


def with_if(self, sequence):
    if sequence in self.running:
        self.running.remove(sequence)
    else:
        self.waiting.remove(sequence)
    sequence.cache.free()


def with_try(self, sequence):
    sequence.cache.free()
    try:
        self.running.remove(sequence)
    except ValueError:
        self.waiting.remove(sequence)


def in_place(self, sequence):
    for queue in (self.running, self.waiting):
        kept = [other for other in queue if other is not sequence]
        queue.clear()
        queue.extend(kept)
    sequence.cache.free()


RIGHT = {"schedule": (with_break, counting_first, by_hand), "remove": (with_if, with_try, in_place)}
