"""Which tokens run in the next step: who is admitted, how much of a prompt, whom to preempt."""

from collections import deque

from nanoserve.cache import BlockAllocator, KVCacheExhausted, PrefixCache
from nanoserve.engine.sequence import Sequence


class Scheduler:
    """The requests of an engine: those that run and those that wait, each in order of arrival.

    All requests that run arrived before all that wait. A request that waits holds no block.
    """

    def __init__(
        self, allocator: BlockAllocator, max_num_seqs: int = 64, max_batch_tokens: int = 2048
    ) -> None:
        """At most max_num_seqs requests run; a step has at most max_batch_tokens tokens.

        Raises ValueError if either is below 1.
        """
        for name, value in (("max_num_seqs", max_num_seqs), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_num_seqs, self.max_batch_tokens = max_num_seqs, max_batch_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._allocator = allocator
        self._step: dict[Sequence, int] = {}  # the step that is being made

    def add(self, sequence: Sequence) -> None:
        """Put a new request behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a request, finished or not, and give its blocks back."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        sequence.cache.free()

    def schedule(self) -> dict[Sequence, int]:
        """Choose the next step: the requests that run, and how many tokens of each.

        Decodes come first, one token each; then the prompts that run; then new requests, while
        there are tokens, sequences and blocks for them. Each group is in order of arrival. All
        blocks of the step are taken. The step is empty only if there is no request.
        """
        self._step = {}
        decodes = [s for s in self.running if s.num_uncomputed == 1]
        prompts = [s for s in self.running if s.num_uncomputed > 1]
        for sequence in decodes + prompts:
            self._take(sequence)
        while self._tokens_left() and self.waiting and self._can_admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            self._take(self.running[-1])
        return self._step

    def _can_admit(self, sequence: Sequence) -> bool:
        """Whether one more request may run, and the free blocks hold its tokens so far."""
        slots = self._allocator.num_free * self._allocator.block_size
        return len(self.running) < self.max_num_seqs and len(sequence.ids) <= slots

    def _take(self, sequence: Sequence) -> None:
        """Put as many tokens of a request into the step as the budget and the blocks allow."""
        n = chunk(
            sequence.num_uncomputed,
            self._tokens_left(),
            self.max_batch_tokens,
            self._others_wait(sequence),
        )
        if n > 0 and sequence in self.running and self._reserve(sequence, n):
            self._step[sequence] = n

    def _tokens_left(self) -> int:
        return self.max_batch_tokens - sum(self._step.values())

    def _others_wait(self, sequence: Sequence) -> bool:
        """Whether another prompt has tokens to compute that are not in the step yet. False for a
        decode, which no other request limits."""
        if sequence.num_uncomputed == 1:
            return False
        prompts = (s for s in self.running if s.num_uncomputed > 1 and s is not sequence)
        return bool(self.waiting) or any(s.num_uncomputed > self._step.get(s, 0) for s in prompts)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take the blocks for num_tokens more tokens. While too few are free, preempt the newest
        request that runs. False if the newest is this request: then it skips the step."""
        while True:
            try:
                sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)
                return True
            except KVCacheExhausted:
                if self.running[-1] is sequence:
                    return False
                self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Give the blocks of the newest request back. It waits before all others, and computes
        its tokens again later, those that it has generated included."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._step.pop(sequence, None)
        sequence.cache.free()
        self.num_preemptions += 1


def chunk(num_uncomputed: int, tokens_left: int, budget: int, others_wait: bool) -> int:
    """How many tokens of one request run in a step that has tokens_left of its budget left.

    A prompt gets at most half of the budget while other prompts wait, but at least one token.
    """
    most = max(1, budget // 2) if others_wait else budget
    return min(num_uncomputed, tokens_left, most)


class PrefixScheduler(Scheduler):
    """A scheduler whose requests begin with the blocks that hold the start of their tokens.

    Every request's cache is a SharedKVCache. A block is shared after the step that filled it.
    """

    def __init__(
        self, prefixes: PrefixCache, max_num_seqs: int = 64, max_batch_tokens: int = 2048
    ) -> None:
        """As for Scheduler."""
        super().__init__(prefixes, max_num_seqs, max_batch_tokens)
        self._prefixes = prefixes

    def schedule(self) -> dict[Sequence, int]:
        """Share the blocks that the last step filled, then choose the next step."""
        for sequence in self.running:
            sequence.cache.share(sequence.ids)
        return super().schedule()

    def remove(self, sequence: Sequence) -> None:
        """Take out a request. Its full blocks stay in the prefix cache until they are evicted."""
        sequence.cache.share(sequence.ids)
        super().remove(sequence)

    def _can_admit(self, sequence: Sequence) -> bool:
        """Whether one more request may run: the blocks that are free, cached, or in the table of
        a request that runs, and hold its start, are enough for its tokens so far."""
        if len(self.running) >= self.max_num_seqs:
            return False
        needed = -(-len(sequence.ids) // self._prefixes.block_size)
        found = self._prefixes.find(sequence.ids)
        shared = sum(self._prefixes.references(block) > 0 for block in found)
        return needed - shared <= self._prefixes.num_free + self._prefixes.num_cached

    def _take(self, sequence: Sequence) -> None:
        """Take a request's prefix from the cache first, if it has computed nothing yet."""
        if sequence in self.running and not sequence.cache.table.blocks:
            sequence.cache.reuse(sequence.ids)
        super()._take(sequence)
