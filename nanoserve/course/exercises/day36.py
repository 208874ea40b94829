"""Day 36: how many tokens of a request go into a step; a scheduler that runs without a model."""

from collections.abc import Iterable
from dataclasses import replace

from nanoserve.cache import KVPool, PagedKVCache
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import TINY
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling import Sample, SamplingParams

# a scheduler without a model ---------------------------------------------------------------------


def toy_pool(num_blocks: int, block_size: int = 16) -> KVPool:
    """A pool whose slots hold almost nothing: for a scheduler that runs without a model."""
    return KVPool(replace(TINY, num_layers=1, n_kv=1, head_dim=2), num_blocks, block_size)


def toy_requests(pool: KVPool, lengths: Iterable[tuple[int, int]]) -> list[Sequence]:
    """A request for each (tokens of the prompt, tokens of the answer), named A, B, C, ..."""
    return [
        Sequence(_name(i), [0] * prompt, SamplingParams(max_tokens=answer), PagedKVCache(pool))
        for i, (prompt, answer) in enumerate(lengths)
    ]


def advance(scheduler: Scheduler, step: dict[Sequence, int]) -> None:
    """Do what a step of the engine does, without a model: each cache gets the step's tokens, a
    request without uncomputed tokens gets a new token, and a finished request is removed."""
    for sequence, num_tokens in step.items():
        sequence.cache.seq_len += num_tokens
        if sequence.num_uncomputed == 0 and sequence.accept(Sample(0)).finish_reason:
            scheduler.remove(sequence)


def _name(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"R{i}"


# chunk -------------------------------------------------------------------------------------------


def _whole_prompt(answer, prompt: int, decodes: int, budget: int, others_wait: bool) -> list[int]:
    """The chunks of one prompt, in at most 20 steps that also have this many decodes."""
    chunks = []
    while sum(chunks) < prompt and len(chunks) < 20:
        chunks.append(answer(prompt - sum(chunks), budget - decodes, budget, others_wait))
    return chunks


def _chunk_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind)

    def whole(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind, call=_whole_prompt, inputs="")  # its name holds them

    return [
        case("a short prompt, alone", "budget", 5, 16, 16, False),
        case("a long prompt, alone", "budget", 40, 16, 16, False),
        case("three decodes are in the step already", "budget", 40, 13, 16, False),
        case("no token is left", "budget", 40, 0, 16, False),
        case("others wait", "half", 40, 16, 16, True),
        case("others wait, three decodes are in the step", "half", 40, 13, 16, True),
        case("others wait, few tokens are left", "half", 40, 5, 16, True),
        case("others wait, the rest of a prompt is short", "half", 3, 16, 16, True),
        case("others wait, no token is left", "half", 40, 0, 16, True),
        case("others wait, an odd budget", "half", 40, 7, 7, True),
        case("others wait, a budget of 3", "half", 40, 3, 3, True),
        case("others wait, a budget of 1", "one", 40, 1, 1, True),
        case("a decode", "budget", 1, 9, 16, True),
        case("a decode, no token is left", "budget", 1, 0, 16, False),
        whole("the chunks of 23 tokens, budget 8, 3 decodes", "budget", 23, 3, 8, False),
        whole("the chunks of 23 tokens, budget 8, others wait", "half", 23, 0, 8, True),
        whole("the chunks of 4 tokens, budget 1, others wait", "one", 4, 0, 1, True),
    ]


@wrong(
    "This is the whole prompt, however long it is: all requests that run wait for it. The step has "
    "only tokens_left tokens left."
)
def _whole(num_uncomputed, tokens_left, budget, others_wait):
    return num_uncomputed


@wrong(
    "A prompt that does not fit is left out. Then a prompt longer than the budget never runs: take "
    "as many of its tokens as fit.",
    hints="budget",
)
def _all_or_nothing(num_uncomputed, tokens_left, budget, others_wait):
    most = max(1, budget // 2) if others_wait else budget
    return num_uncomputed if num_uncomputed <= min(tokens_left, most) else 0


@wrong("The decodes of the step count too: only tokens_left of the budget is left.", hints="budget")
def _whole_budget(num_uncomputed, tokens_left, budget, others_wait):
    return min(num_uncomputed, max(1, budget // 2) if others_wait else budget)


@wrong("While others wait, one prompt gets at most half of the budget.", hints="half")
def _never_half(num_uncomputed, tokens_left, budget, others_wait):
    return min(num_uncomputed, tokens_left)


@wrong(
    "A prompt may take all tokens that are left if no other prompt waits. Only others_wait makes "
    "half of the budget the limit."
)
def _always_half(num_uncomputed, tokens_left, budget, others_wait):
    return min(num_uncomputed, tokens_left, max(1, budget // 2))


@wrong(
    "This halves if nobody waits, and takes everything if others wait. It is the other way round."
)
def _half_alone(num_uncomputed, tokens_left, budget, others_wait):
    return min(num_uncomputed, tokens_left, budget if others_wait else max(1, budget // 2))


@wrong(
    "This is half of what is left. The limit is half of the budget: with 13 of 16 tokens left, 8 "
    "tokens, not 6.",
    hints="half",
)
def _half_of_left(num_uncomputed, tokens_left, budget, others_wait):
    most = max(1, tokens_left // 2) if others_wait else tokens_left
    return min(num_uncomputed, tokens_left, most)


@wrong(
    "This is half of the prompt. The limit is half of the budget, whatever the prompt's length.",
    hints="half",
)
def _half_of_prompt(num_uncomputed, tokens_left, budget, others_wait):
    most = max(1, num_uncomputed // 2) if others_wait else num_uncomputed
    return min(tokens_left, most)


@wrong(
    "Half of an odd budget is rounded up. At most half of 7 is 3: use //.",
    hints="half",
)
def _rounds_up(num_uncomputed, tokens_left, budget, others_wait):
    return min(num_uncomputed, tokens_left, -(-budget // 2) if others_wait else budget)


@wrong(
    "With a budget of 1, half of the budget is 0 tokens: two prompts that wait for each other "
    "never run. The limit is at least one token.",
    hints="one",
)
def _stands_still(num_uncomputed, tokens_left, budget, others_wait):
    return min(num_uncomputed, tokens_left, budget // 2 if others_wait else budget)


@wrong(
    "This gives a token where none is left, and the step exceeds its budget. The limit of half the "
    "budget is at least one; the result may be 0.",
    hints="budget",
)
def _at_least_one(num_uncomputed, tokens_left, budget, others_wait):
    most = budget // 2 if others_wait else budget
    return max(1, min(num_uncomputed, tokens_left, most))


@wrong("This is what stays for later steps. Return the number of tokens that run in this step.")
def _what_stays(num_uncomputed, tokens_left, budget, others_wait):
    most = max(1, budget // 2) if others_wait else budget
    return num_uncomputed - min(num_uncomputed, tokens_left, most)


@wrong(
    "This is the room in the step, also where the request has fewer tokens. A request cannot run "
    "more than num_uncomputed.",
    hints="budget",
)
def _fills_the_step(num_uncomputed, tokens_left, budget, others_wait):
    return min(tokens_left, max(1, budget // 2) if others_wait else budget)


CHUNK = Exercise(
    "chunk",
    _chunk_cases,
    hints={
        "budget": (
            "Three numbers limit a chunk. The first is what the request has, the second is what "
            "the step has left. Which is the smaller?",
            "Take as many tokens as fit: the smaller of num_uncomputed and tokens_left. That may "
            "be 0. The third limit is for others_wait.",
            "return min(num_uncomputed, tokens_left, most), where most is half of the budget or "
            "all of it",
        ),
        "half": (
            "While others wait, what is the most that one prompt may take? Half of what?",
            "Half of the budget, rounded down. It is a third limit beside num_uncomputed and "
            "tokens_left: the smallest of the three counts.",
            "most = max(1, budget // 2) if others_wait else budget",
        ),
        "one": (
            "What is half of a budget of 1, rounded down? How long does a prompt then run?",
            "1 // 2 is 0, so nothing would ever run. The limit must be at least 1.",
            "most = max(1, budget // 2) if others_wait else budget",
        ),
    },
    target="nanoserve.engine.scheduler:chunk",
    wrong=(
        _whole, _all_or_nothing, _whole_budget, _never_half, _always_half, _half_alone,
        _half_of_left, _half_of_prompt, _rounds_up, _stands_still, _at_least_one, _what_stays,
        _fills_the_step,
    ),
)  # fmt: skip

EXERCISES = (CHUNK,)
