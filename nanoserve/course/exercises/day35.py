"""Day 35: admit requests and retire them between steps."""

from collections.abc import Callable

from nanoserve.cache import KVPool, PagedKVCache
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import TINY
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling import SamplingParams

Request = tuple[str, int, int, int]  # name, tokens of the prompt, most new tokens, computed tokens


class WholeRequests(Scheduler):
    """The scheduler of Day 35: a request is admitted if there are blocks for all of it."""

    def _can_admit(self, sequence: Sequence) -> bool:
        slots = self._allocator.num_free * self._allocator.block_size
        return len(self.running) < self.max_num_seqs and sequence.most_tokens <= slots


def _scheduler(kind: type, running, waiting, blocks: int = 9, seqs: int = 3) -> Scheduler:
    """A scheduler in the middle of its work, over a pool of blocks of 4 slots."""
    pool = KVPool(TINY, blocks, 4)
    scheduler = kind(pool.allocator, seqs)
    for name, prompt, new, computed in (*running, *waiting):
        params, cache = SamplingParams(max_tokens=new), PagedKVCache(pool)
        sequence = Sequence(name, list(range(1, prompt + 1)), params, cache)
        if computed:
            cache.table.grow(sequence.most_tokens)
            cache.seq_len = computed
            sequence.ids += [5] * max(0, computed + 1 - prompt)
        (scheduler.running if len(scheduler.running) < len(running) else scheduler.waiting).append(
            sequence
        )
    return scheduler


def _state(scheduler: Scheduler) -> dict:
    return {
        "running": [s.request_id for s in scheduler.running],
        "waiting": [s.request_id for s in scheduler.waiting],
        "free blocks": scheduler._allocator.num_free,
    }


def _told(running, waiting, seqs: int, blocks: int) -> str:
    def names(requests) -> str:
        return ", ".join(r[0] for r in requests) or "nobody"

    return f"{names(running)} run, {names(waiting)} wait; {seqs} places, {blocks} blocks of 4"


# schedule ----------------------------------------------------------------------------------------


def _scheduled(answer: Callable, running, waiting, seqs: int, blocks: int) -> dict:
    scheduler = _scheduler(WholeRequests, running, waiting, blocks, seqs)
    step = answer(scheduler)
    return {"step": {s.request_id: n for s, n in step.items()}, **_state(scheduler)}


def _schedule_cases() -> list[Case]:
    def case(what: str, kind: str, running, waiting, seqs: int = 3, blocks: int = 9) -> Case:
        inputs = _told(running, waiting, seqs, blocks)
        args = (running, waiting, seqs, blocks)
        return Case(what, args, kind=kind, call=_scheduled, inputs=inputs)

    a, b, c = ("A", 5, 4, 6), ("B", 3, 6, 4), ("C", 7, 3, 8)
    return [
        case("nobody is there", "step", [], []),
        case("two requests decode", "step", [a, b], []),
        case("a first prompt of 6 tokens", "admit", [], [("D", 6, 3, 0)]),
        case("one decodes, two prompts wait", "admit", [a], [("D", 6, 3, 0), ("E", 2, 2, 0)]),
        case("a third place for four that wait", "places", [a, b],
             [("D", 2, 2, 0), ("E", 2, 2, 0), ("F", 1, 2, 0), ("G", 1, 1, 0)]),
        case("no place is left", "places", [a, b, c], [("D", 1, 1, 0)], 3, 12),
        case("exactly enough blocks", "blocks", [a], [("D", 9, 4, 0)], 3, 5),
        case("a short prompt with a long answer", "blocks", [a], [("D", 4, 9, 0)]),
        case("one block too few", "blocks", [a], [("D", 10, 4, 0)], 3, 5),
        case("the first does not fit, the second would", "blocks", [a],
             [("D", 11, 8, 0), ("E", 1, 1, 0)], 3, 5),
    ]  # fmt: skip


def schedule(self) -> dict[Sequence, int]:
    while self.waiting and self._can_admit(self.waiting[0]):
        sequence = self.waiting.popleft()
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
    return {sequence: sequence.num_uncomputed for sequence in self.running}


def _all_of(self) -> dict[Sequence, int]:
    return {sequence: sequence.num_uncomputed for sequence in self.running}


@wrong(
    "This admits requests only when nobody runs: static batching. A free place is filled in the "
    "next step, whoever runs.",
    hints="admit",
)
def _static(self):
    return schedule(self) if not self.running else _all_of(self)


@wrong(
    "This admits one request in each step. Several places may be free: repeat while the first that "
    "waits can be admitted.",
    hints="admit",
)
def _one_each_step(self):
    if self.waiting and self._can_admit(self.waiting[0]):
        sequence = self.waiting.popleft()
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
    return _all_of(self)


@wrong(
    "Too many requests run: nothing keeps len(self.running) below max_num_seqs. _can_admit checks "
    "places and blocks.",
    hints="places",
)
def _no_limit(self):
    slots = self._allocator.num_free * self._allocator.block_size
    while self.waiting and self.waiting[0].most_tokens <= slots:
        sequence = self.waiting.popleft()
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
        slots = self._allocator.num_free * self._allocator.block_size
    return _all_of(self)


@wrong(
    "This admits a request without enough free blocks, and grow raises KVCacheExhausted. Ask "
    "_can_admit first.",
    hints="blocks",
)
def _blocks_unchecked(self):
    while self.waiting and len(self.running) < self.max_num_seqs:
        sequence = self.waiting.popleft()
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
    return _all_of(self)


@wrong(
    "This admits the request that arrived last. First come, first served: take from the left.",
    hints="admit",
)
def _last_come(self):
    while self.waiting and self._can_admit(self.waiting[-1]):
        sequence = self.waiting.pop()
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
    return _all_of(self)


@wrong(
    "A later, smaller request passes the first one. If that happens again and again, a large "
    "request never runs: stop at the first that cannot be admitted.",
    hints="blocks",
)
def _passes_the_first(self):
    for sequence in list(self.waiting):
        if self._can_admit(sequence):
            self.waiting.remove(sequence)
            sequence.cache.table.grow(sequence.most_tokens)
            self.running.append(sequence)
    return _all_of(self)


@wrong(
    "These are the blocks of the prompt alone. The answer needs blocks too: sequence.most_tokens "
    "in all.",
    hints="blocks",
)
def _prompt_only(self):
    while self.waiting and self._can_admit(self.waiting[0]):
        sequence = self.waiting.popleft()
        sequence.cache.table.grow(len(sequence.prompt_ids))
        self.running.append(sequence)
    return _all_of(self)


@wrong(
    "No blocks are taken for an admitted request, so the next one that waits sees them as free. "
    "Call sequence.cache.table.grow(sequence.most_tokens).",
    hints="blocks",
)
def _takes_no_blocks(self):
    while self.waiting and self._can_admit(self.waiting[0]):
        self.running.append(self.waiting.popleft())
    return _all_of(self)


@wrong(
    "The step is chosen before the new requests are admitted, so they lose a step. Admit first.",
    hints="admit",
)
def _too_late(self):
    step = _all_of(self)
    schedule(self)
    return step


@wrong(
    "Every request gets one token. A new prompt has more: sequence.num_uncomputed says how many.",
    hints="step",
)
def _one_token(self):
    return dict.fromkeys(schedule(self), 1)


@wrong(
    "The admitted request still waits, and will be admitted again. Take it out of self.waiting: "
    "popleft().",
    hints="admit",
)
def _still_waits(self):
    for sequence in self.waiting:
        if not self._can_admit(sequence):
            break
        sequence.cache.table.grow(sequence.most_tokens)
        self.running.append(sequence)
    return _all_of(self)


SCHEDULE = Exercise(
    "schedule",
    _schedule_cases,
    hints={
        "step": (
            "Which tokens of a request does a step compute? Day 34's loop built the same "
            "dictionary.",
            "Every request that runs is in the step, with all tokens that it lacks: "
            "sequence.num_uncomputed.",
            "return {sequence: sequence.num_uncomputed for sequence in self.running}",
        ),
        "admit": (
            "When may a request that waits begin, and which one first?",
            "While self.waiting has a request and self._can_admit(self.waiting[0]): take it from "
            "the left, take its blocks, append it to self.running. Then choose the step.",
            "while self.waiting and self._can_admit(self.waiting[0]): sequence = "
            "self.waiting.popleft(); sequence.cache.table.grow(sequence.most_tokens); "
            "self.running.append(sequence)",
        ),
        "places": (
            "How many requests may run at the same time?",
            "At most self.max_num_seqs. self._can_admit checks it.",
            "while self.waiting and self._can_admit(self.waiting[0]): ...",
        ),
        "blocks": (
            "How many blocks will this request need until it ends, and who checks that they are "
            "free?",
            "self._can_admit(sequence) checks; sequence.cache.table.grow(sequence.most_tokens) "
            "takes them. If the first cannot be admitted, the others wait behind it.",
            "while self.waiting and self._can_admit(self.waiting[0]): sequence = "
            "self.waiting.popleft(); sequence.cache.table.grow(sequence.most_tokens); ...",
        ),
    },
    solution=schedule,
    wrong=(
        _static, _one_each_step, _no_limit, _blocks_unchecked, _last_come, _passes_the_first,
        _prompt_only, _takes_no_blocks, _too_late, _one_token, _still_waits,
    ),
)  # fmt: skip


# remove ------------------------------------------------------------------------------------------


def _removed(answer: type, running, waiting, name: str) -> dict:
    scheduler = _scheduler(answer, running, waiting, 12)
    (sequence,) = (s for s in (*scheduler.running, *scheduler.waiting) if s.request_id == name)
    before = scheduler.running, scheduler.waiting
    scheduler.remove(sequence)
    found = {**_state(scheduler), "its tokens in the cache": sequence.cache.seq_len}
    kept = scheduler.running is before[0] and scheduler.waiting is before[1]
    return found | {"blocks of it": len(sequence.cache.table.blocks), "the same lists": kept}


def _remove_cases() -> list[Case]:
    def case(what: str, kind: str, name: str, running, waiting) -> Case:
        inputs = _told(running, waiting, 3, 12) + f"; remove {name}"
        return Case(what, (running, waiting, name), kind=kind, call=_removed, inputs=inputs)

    a, b, c = ("A", 5, 4, 6), ("B", 3, 6, 4), ("C", 7, 3, 8)
    d, e = ("D", 4, 2, 0), ("E", 2, 2, 0)
    return [
        case("the only one that runs", "runs", "A", [a], []),
        case("the first of three", "runs", "A", [a, b, c], [d]),
        case("the second of three", "runs", "B", [a, b, c], [d, e]),
        case("the last of three", "runs", "C", [a, b, c], []),
        case("one that waits, while others run", "waits", "D", [a, b], [d, e]),
        case("the last that waits", "waits", "E", [a], [d, e]),
        case("the only one that waits", "waits", "D", [], [d]),
    ]


def _take_out(self, sequence) -> None:
    (self.running if sequence in self.running else self.waiting).remove(sequence)


@wrong("The request is gone, and its blocks are not: nobody can use them again. Free its cache.")
def _keeps_blocks(self, sequence):
    _take_out(self, sequence)


@wrong(
    "A request that waits can end too: somebody may abort it. Take it out of self.waiting.",
    hints="waits",
)
def _only_running(self, sequence):
    self.running.remove(sequence)
    sequence.cache.free()


@wrong("This takes out the first that runs, whoever ended. Use remove(sequence).", hints="runs")
def _the_first(self, sequence):
    if sequence in self.running:
        self.running.pop(0)
    else:
        self.waiting.remove(sequence)
    sequence.cache.free()


@wrong("This takes out the newest that runs. Use remove(sequence).", hints="runs")
def _the_newest(self, sequence):
    if sequence in self.running:
        self.running.pop()
    else:
        self.waiting.remove(sequence)
    sequence.cache.free()


@wrong(
    "The table's blocks are free, but cache.seq_len still counts its tokens. cache.free() does "
    "both.",
    hints="runs",
)
def _table_only(self, sequence):
    _take_out(self, sequence)
    sequence.cache.table.free()


@wrong("The cache is free, but the request is still in its list.", hints="runs")
def _still_listed(self, sequence):
    sequence.cache.free()


@wrong(
    "The request that ended waits again, and will run a second time. A finished request leaves "
    "both lists.",
    hints="runs",
)
def _waits_again(self, sequence):
    _take_out(self, sequence)
    sequence.cache.free()
    self.waiting.append(sequence)


@wrong(
    "The lists are replaced by new ones. The engine may hold the old ones: change them in place.",
    hints="runs",
)
def _new_lists(self, sequence):
    self.running = [s for s in self.running if s is not sequence]
    self.waiting = type(self.waiting)(s for s in self.waiting if s is not sequence)
    sequence.cache.free()


REMOVE = Exercise(
    "remove",
    _remove_cases,
    hints={
        "runs": (
            "What does a request hold while it runs? A place in a list, and something in the pool.",
            "Remove it from self.running; then sequence.cache.free() gives its blocks back and "
            "sets its length to 0.",
            "(self.running if sequence in self.running else self.waiting).remove(sequence); "
            "sequence.cache.free()",
        ),
        "waits": (
            "In which list is a request that has not begun?",
            "Remove it from self.waiting. sequence.cache.free() does nothing if it holds no block.",
            "(self.running if sequence in self.running else self.waiting).remove(sequence); "
            "sequence.cache.free()",
        ),
    },
    target="nanoserve.engine.scheduler:Scheduler.remove",
    wrong=(
        _keeps_blocks, _only_running, _the_first, _the_newest, _table_only, _still_listed,
        _waits_again, _new_lists,
    ),
)  # fmt: skip

EXERCISES = (SCHEDULE, REMOVE)
