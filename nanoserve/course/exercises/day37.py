"""Day 37: a pool that is too small for its requests: whom to preempt, and how."""

import torch

from nanoserve.cache import KVCacheExhausted
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day36 import toy_pool, toy_requests
from nanoserve.engine.scheduler import Scheduler
from nanoserve.sampling import Sample, SamplingParams, make_generator

SIZE = 4  # slots in a block

# Of each request that runs: tokens of the prompt, of the output, and in the cache.
Held = list[tuple[int, int, int]]


def _scene(answer: type, free: int, held: Held, waiting: int = 0) -> Scheduler:
    """Requests A, B, ... run and hold blocks, others wait, and `free` blocks are free."""
    taken = sum(-(-seq_len // SIZE) for _, _, seq_len in held)
    pool = toy_pool(free + taken, SIZE)
    scheduler = answer(pool.allocator)
    lengths = [(prompt, 99) for prompt, _, _ in held] + [(6, 99)] * waiting
    requests = toy_requests(pool, lengths)
    for number, sequence in enumerate(requests):
        sequence.params = SamplingParams(max_tokens=99, temperature=1.0, seed=number)
        sequence.generator = make_generator(number)
        scheduler.add(sequence)
    for _, output, seq_len in held:
        sequence = scheduler.waiting.popleft()
        scheduler.running.append(sequence)
        for token in range(output):
            torch.rand((), generator=sequence.generator)
            sequence.accept(Sample(token + 50))
        sequence.cache.table.grow(seq_len)
        sequence.cache.seq_len = seq_len
    scheduler.num_preemptions = 2
    return scheduler


def _state(scheduler: Scheduler) -> dict:
    """What a learner can see of a scheduler. Which block a request holds is not compared."""
    everyone = [*scheduler.running, *scheduler.waiting]
    return {
        "running": _names(scheduler.running),
        "waiting": _names(scheduler.waiting),
        "in the step": {s.request_id: n for s, n in scheduler._step.items()},
        "blocks": {s.request_id: len(s.cache.table.blocks) for s in everyone},
        "free": scheduler._allocator.num_free,
        "num_preemptions": scheduler.num_preemptions,
    }


def _names(sequences) -> str:
    return " ".join(s.request_id for s in sequences)


# _preempt ----------------------------------------------------------------------------------------


def _preempted(answer: type, held: Held, waiting: int = 0, step: tuple[int, ...] = ()) -> dict:
    """Preempt the newest request that runs; `step` has the tokens of the first requests."""
    scheduler = _scene(answer, 1, held, waiting)
    scheduler._step = dict(zip(scheduler.running, step, strict=False))
    scheduler._preempt(scheduler.running[-1])
    return _state(scheduler)


def _kept(answer: type, held: Held) -> dict:
    """The newest request after its preemption: its tokens, its cache and its random numbers."""
    scheduler = _scene(answer, 0, held)
    newest = scheduler.running[-1]
    scheduler._preempt(newest)
    return {
        "ids": newest.ids,
        "output_ids": newest.output_ids,
        "cache.seq_len": newest.cache.seq_len,
        "num_uncomputed": newest.num_uncomputed,
        "next random number": round(float(torch.rand((), generator=newest.generator)), 6),
    }


def _twice(answer: type) -> dict:
    """C is preempted, then B: the older one must wait before the newer one."""
    scheduler = _scene(answer, 0, [(9, 3, 11), (5, 2, 6), (6, 1, 6)], waiting=1)
    for _ in range(2):
        scheduler._preempt(scheduler.running[-1])
    return _state(scheduler)


PAIR = [(9, 3, 11), (5, 2, 6)]


def _preempt_cases() -> list[Case]:
    def case(what: str, kind: str, call, *args) -> Case:
        return Case(what, args, kind=kind, call=call, inputs="")

    return [
        case("A and B run, B is preempted", "lists", _preempted, PAIR),
        case("C waits when B is preempted", "lists", _preempted, PAIR, 1),
        case("C is preempted, then B; D waits", "lists", _twice),
        case("B is in the step that is being made", "step", _preempted, PAIR, 0, (1, 1)),
        case("A is in the step, B is not", "step", _preempted, PAIR, 0, (1,)),
        case("B in the middle of its prompt", "lists", _preempted, [(9, 3, 11), (14, 0, 8)], 0,
             (1, 3)),
        case("what B keeps, and what it loses", "keep", _kept, PAIR),
        case("what a prompt keeps", "keep", _kept, [(9, 3, 11), (14, 0, 8)]),
    ]  # fmt: skip


class _Preempt:
    """The right answer in pieces, so that a wrong one leaves one out."""

    def __call__(self, scheduler, sequence):
        for part in (self.stops, self.waits, self.leaves_the_step, self.frees, self.counts):
            part(scheduler, sequence)

    def stops(self, scheduler, sequence):
        scheduler.running.remove(sequence)

    def waits(self, scheduler, sequence):
        scheduler.waiting.appendleft(sequence)

    def leaves_the_step(self, scheduler, sequence):
        scheduler._step.pop(sequence, None)

    def frees(self, scheduler, sequence):
        sequence.cache.free()

    def counts(self, scheduler, sequence):
        scheduler.num_preemptions += 1


def _without(**parts):
    """The right answer with other parts, as a function for the class."""
    kind = type("_Changed", (_Preempt,), {name: staticmethod(fn) for name, fn in parts.items()})
    right = kind()

    def _preempt(self, sequence):
        right(self, sequence)

    return _preempt


def _nothing(scheduler, sequence):
    pass


def _by_hand(scheduler, sequence):
    sequence.cache.table.free()


def _starts_again(scheduler, sequence):
    sequence.cache.free()
    sequence.ids, sequence.output_ids = list(sequence.prompt_ids), []


def _seeds_again(scheduler, sequence):
    sequence.cache.free()
    sequence.generator = make_generator(sequence.params.seed)


PREEMPT = Exercise(
    "_preempt",
    _preempt_cases,
    hints={
        "lists": (
            "The request leaves one list and enters another. All requests that wait have arrived "
            "after it: so at which end does it enter?",
            "self.running.remove(sequence), then to the front of the deque self.waiting. Its cache "
            "gives the blocks back, and num_preemptions counts.",
            "self.running.remove(sequence); self.waiting.appendleft(sequence); "
            "sequence.cache.free(); self.num_preemptions += 1",
        ),
        "step": (
            "The request may be in the step that is being made. Would the step find its blocks?",
            "Take it out of self._step, a dict of sequence to number of tokens. It may also not be "
            "there: that is no error.",
            "self._step.pop(sequence, None)",
        ),
        "keep": (
            "Which part of a request lies in the pool, and which does not? What must a request "
            "keep, so that it continues with the same tokens?",
            "Only the cache is emptied: PagedKVCache.free gives the blocks back and sets seq_len "
            "to 0. The tokens and the generator stay as they are.",
            "sequence.cache.free(), and no other change of the sequence",
        ),
    },
    target="nanoserve.engine.scheduler:Scheduler._preempt",
    wrong=(
        wrong(
            "The request waits behind all others, and requests that arrived later pass it. It "
            "arrived before all that wait: put it at the front, with appendleft.",
            hints="lists",
        )(_without(waits=lambda scheduler, sequence: scheduler.waiting.append(sequence))),
        wrong(
            "The request is still in self.running. It would be in the next step, without blocks.",
            hints="lists",
        )(_without(stops=_nothing)),
        wrong(
            "The request no longer runs and does not wait either: nobody will ever run it again. "
            "Put it at the front of self.waiting.",
            hints="lists",
        )(_without(waits=_nothing)),
        wrong(
            "The request still holds its blocks, so the preemption freed nothing. Call "
            "sequence.cache.free().",
            hints="keep",
        )(_without(frees=_nothing)),
        wrong(
            "The blocks are free, but cache.seq_len still counts the tokens that were in them. So "
            "they are never computed again: call sequence.cache.free().",
            hints="keep",
        )(_without(frees=_by_hand)),
        wrong(
            "The request is still in the step that is being made, without blocks. Take it out of "
            "self._step.",
            hints="step",
        )(_without(leaves_the_step=_nothing)),
        wrong(
            "The request is not in every step: pop with a default, or test first.", hints="step"
        )(_without(leaves_the_step=lambda scheduler, sequence: scheduler._step.pop(sequence))),
        wrong(
            "The whole step is thrown away. Only this request leaves it.", hints="step"
        )(_without(leaves_the_step=lambda scheduler, sequence: scheduler._step.clear())),
        wrong(
            "The output so far is lost, and the user has seen it already. Keep the tokens: only "
            "their keys and values are computed again.",
            hints="keep",
        )(_without(frees=_starts_again)),
        wrong(
            "The random numbers begin again, so the request draws numbers twice that it has used. "
            "Leave the generator as it is.",
            hints="keep",
        )(_without(frees=_seeds_again)),
        wrong(
            "num_preemptions does not count the preemption: add 1.", hints="lists"
        )(_without(counts=_nothing)),
    ),
)  # fmt: skip


# _reserve ----------------------------------------------------------------------------------------


def _reserved(answer: type, free: int, held: Held, who: int, num_tokens: int) -> dict:
    """Reserve num_tokens for one of the requests that run."""
    scheduler = _scene(answer, free, held)
    scheduler._step = dict.fromkeys(scheduler.running[:who], 1)
    returned = scheduler._reserve(scheduler.running[who], num_tokens)
    return {"returned": returned, **_state(scheduler)}


FULL = [(9, 3, 8), (5, 3, 8), (6, 2, 8)]  # A, B and C: 2 full blocks each
UNEQUAL = [(3, 1, 4), (14, 2, 16), (3, 1, 4), (6, 2, 8)]  # A, B, C and D: 1, 4, 1 and 2 blocks


def _reserve_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind, call=_reserved, inputs="")

    return [
        case("A needs a block, and one is free", "grow", 1, FULL, 0, 1),
        case("A has a free slot: no block is needed", "grow", 0, [(9, 3, 7), (5, 3, 8)], 0, 1),
        case("A needs 2 blocks for 5 tokens, and 2 are free", "grow", 2, FULL, 0, 5),
        case("A needs a block, none is free", "newest", 0, FULL, 0, 1),
        case("B needs a block, none is free", "newest", 0, FULL, 1, 1),
        case("A needs 4 blocks, one is free", "again", 1, FULL, 0, 13),
        case("A needs 2 blocks; D has 2, B has 4, C has 1", "newest", 0, UNEQUAL, 0, 5),
        case("A needs 3 blocks; D has 2, C has 1", "again", 0, UNEQUAL, 0, 9),
        case("C is the newest and needs a block, none is free", "skip", 0, FULL, 2, 1),
        case("C is the newest and needs 2 blocks, one is free", "skip", 1, FULL, 2, 5),
        case("B needs 4 blocks: C's are too few", "skip", 1, FULL, 1, 13),
    ]


def _grow(self, sequence, num_tokens) -> bool:
    try:
        sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)
    except KVCacheExhausted:
        return False
    return True


def _choosing(choose):
    """The right answer with another choice of the request to preempt."""

    def _reserve(self, sequence, num_tokens):
        while not _grow(self, sequence, num_tokens):
            chosen = choose(self, sequence)
            if chosen is sequence:
                return False
            self._preempt(chosen)
        return True

    return _reserve


def _held(sequence) -> int:
    return len(sequence.cache.table.blocks)


@wrong(
    "An old request can then lose its blocks each time a new one arrives, and never finish. It has "
    "waited longest: preempt the newest, self.running[-1], not the oldest.",
    hints="newest",
)
def _oldest(self, sequence, num_tokens):
    while not _grow(self, sequence, num_tokens):
        chosen = next(s for s in self.running if s is not sequence)
        self._preempt(chosen)
        if len(self.running) == 1:
            return _grow(self, sequence, num_tokens)
    return True


@wrong(
    "The newest request preempts itself, and so its computed tokens are lost. Return False: it "
    "skips this step and keeps its blocks.",
    hints="skip",
)
def _itself(self, sequence, num_tokens):
    while not _grow(self, sequence, num_tokens):
        newest = self.running[-1]
        self._preempt(newest)
        if newest is sequence:
            return False
    return True


@wrong(
    "The newest request preempts an older one. So an old request can lose its blocks again and "
    "again. A request may only preempt those behind it: return False if it is the newest.",
    hints="skip",
)
def _newest_other(self, sequence, num_tokens):
    while not _grow(self, sequence, num_tokens):
        others = [s for s in self.running if s is not sequence]
        if not others:
            return False
        self._preempt(others[-1])
    return True


@wrong(
    "One preemption may free too few blocks. Try again, and preempt the next newest, until the "
    "table has grown.",
    hints="again",
)
def _once(self, sequence, num_tokens):
    if _grow(self, sequence, num_tokens):
        return True
    if self.running[-1] is sequence:
        return False
    self._preempt(self.running[-1])
    return _grow(self, sequence, num_tokens)


@wrong(
    "Every request behind this one is preempted, also where one was enough. Try again after each "
    "preemption.",
    hints="again",
)
def _everyone(self, sequence, num_tokens):
    if _grow(self, sequence, num_tokens):
        return True
    if self.running[-1] is sequence:
        return False
    while self.running[-1] is not sequence:
        self._preempt(self.running[-1])
    return _grow(self, sequence, num_tokens)


@wrong(
    "Nobody is preempted: the request skips the step. If all requests do so, no step computes "
    "anything. Preempt the newest while others run behind this request.",
    hints="newest",
)
def _waits(self, sequence, num_tokens):
    return _grow(self, sequence, num_tokens)


@wrong(
    "grow takes the number of tokens in all: those in the cache, sequence.cache.seq_len, and "
    "num_tokens more.",
    hints="grow",
)
def _only_new(self, sequence, num_tokens):
    while True:
        try:
            sequence.cache.table.grow(num_tokens)
            return True
        except KVCacheExhausted:
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])


@wrong(
    "This counts from the capacity: the slots that are still free in the last block are not used. "
    "The table must hold sequence.cache.seq_len + num_tokens tokens.",
    hints="grow",
)
def _from_capacity(self, sequence, num_tokens):
    while True:
        try:
            sequence.cache.table.grow(sequence.cache.table.capacity + num_tokens)
            return True
        except KVCacheExhausted:
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])


@wrong(
    "This preempts before it has tried. If the free blocks are enough, nobody is preempted.",
    hints="grow",
)
def _preempts_first(self, sequence, num_tokens):
    while self.running[-1] is not sequence:
        self._preempt(self.running[-1])
        if _grow(self, sequence, num_tokens):
            return True
    return _grow(self, sequence, num_tokens)


@wrong(
    "It returns nothing when the blocks are taken. Return True: the caller puts the request into "
    "the step only then.",
    hints="grow",
)
def _returns_none(self, sequence, num_tokens):
    return None if RESERVE_RIGHT(self, sequence, num_tokens) else False


@wrong(
    "It returns nothing when the request skips the step. Return False.",
    hints="skip",
)
def _skips_with_none(self, sequence, num_tokens):
    return RESERVE_RIGHT(self, sequence, num_tokens) or None


@wrong(
    "KVCacheExhausted reaches the caller. If the request is the newest, catch the error and return "
    "False.",
    hints="skip",
)
def _raises(self, sequence, num_tokens):
    while not RESERVE_RIGHT(self, sequence, num_tokens):
        sequence.cache.table.grow(sequence.cache.seq_len + num_tokens)


RESERVE_RIGHT = _choosing(lambda self, sequence: self.running[-1])

_CHOICES = (
    wrong(
        "This preempts the request that holds most blocks. It may be an old one, which has done "
        "most of its work: preempt the newest, self.running[-1].",
        hints="newest",
    )(_choosing(lambda self, sequence: max(self.running[::-1], key=_held))),
    wrong(
        "This preempts the request that holds fewest blocks. It may be an old one, near its end: "
        "preempt the newest, self.running[-1].",
        hints="newest",
    )(
        _choosing(
            lambda self, sequence: min(
                [s for s in self.running[::-1] if s is not sequence] or [sequence], key=_held
            )
        )
    ),
    wrong(
        "This preempts the next request in order of arrival. The requests behind it have arrived "
        "later still: preempt the newest, self.running[-1].",
        hints="newest",
    )(
        _choosing(
            lambda self, sequence: (
                self.running[self.running.index(sequence) :][1:2] or [sequence]
            )[0]
        )
    ),
)

RESERVE = Exercise(
    "_reserve",
    _reserve_cases,
    hints={
        "grow": (
            "How many tokens must the table hold in all, after this step? Which method of the "
            "table takes the missing blocks?",
            "table.grow(tokens in all) takes what is missing, and nothing if the slots are enough. "
            "Try it first; if it raises nothing, return True.",
            "sequence.cache.table.grow(sequence.cache.seq_len + num_tokens); return True",
        ),
        "newest": (
            "All requests that run are in self.running, in order of arrival. Which of them has "
            "done the least work, as a rule, and has waited the shortest time?",
            "The newest is self.running[-1]. When grow raises KVCacheExhausted, preempt it and try "
            "again.",
            "except KVCacheExhausted: self._preempt(self.running[-1])",
        ),
        "again": (
            "Does one preemption always free enough blocks? And does it ever free too many?",
            "Try to grow after each preemption, in a loop: it ends when grow raises nothing.",
            "while True: try: ...grow(...); return True; except KVCacheExhausted: ...preempt one",
        ),
        "skip": (
            "No request is behind this one. May it take blocks from an older request?",
            "No: an older request comes first. It keeps its blocks and returns False, and in a "
            "later step there may be a free block.",
            "if self.running[-1] is sequence: return False",
        ),
    },
    target="nanoserve.engine.scheduler:Scheduler._reserve",
    wrong=(
        _oldest, _itself, _newest_other, _once, _everyone, _waits, _only_new, _from_capacity,
        _preempts_first, _returns_none, _skips_with_none, _raises, *_CHOICES,
    ),
)  # fmt: skip

EXERCISES = (PREEMPT, RESERVE)

REVIEW = (
    (
        "Day 34. A step has a prompt of 4 tokens, 2 tokens of another prompt, and one decode. How "
        "many rows go through the layers, and how many through the head?",
        "7 rows go through the layers: all new tokens, packed. The head runs for the last rows "
        "only, and only for requests whose tokens are now all computed.",
    ),
    (
        "Day 34. Why does a packed step need positions of its own?",
        "RoPE rotates by the position of a token in its own sequence. In a packed step, a row's "
        "number says nothing about that position.",
    ),
    (
        "Day 35. A batch of 8 requests waits for its longest before the next 8 begin. What is "
        "lost, and what does continuous batching do instead?",
        "The places of the requests that have finished stay empty. With continuous batching, a "
        "finished request leaves after its step, and a waiting one takes its place in the next.",
    ),
    (
        "Day 36. Why do decodes come first in a step, and chunks of prompts after them?",
        "A decode is one token, and somebody reads it. So every request that decodes gets a token "
        "in each step, and the prompts share the rest of the budget.",
    ),
    (
        "Day 36. A small budget makes the steps short. What does it cost?",
        "A prompt needs more steps, and each step reads all weights. So the time to first token "
        "of the long prompt goes up, and the throughput goes down.",
    ),
    (
        "Day 37. Which state of a request is lost when it is preempted, and which is kept?",
        "The keys and values are lost, and computed again. The token ids, the generator and the "
        "text are kept: they are small, and they do not lie in the pool.",
    ),
    (
        "Day 37. Why is the newest request preempted, and never the oldest?",
        "The oldest request then never loses its blocks, so it goes on until it finishes, and "
        "another becomes the oldest. So every request finishes in the end.",
    ),
)
