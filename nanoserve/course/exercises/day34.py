"""Day 34: the tokens of a step, their positions, and the last row of each sequence."""

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import torch

from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day01 import TINY
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling import SamplingParams

# pack --------------------------------------------------------------------------------------------

Request = tuple[list[int], list[int], int, int]  # prompt, output, tokens in the cache, new tokens


def _step(requests: list[Request]) -> dict[Sequence, int]:
    step = {}
    for number, (prompt, output, held, new) in enumerate(requests):
        cache = SimpleNamespace(seq_len=held)
        sequence = Sequence(f"request-{number}", prompt, SamplingParams(), cache)
        sequence.output_ids += output
        sequence.ids += output
        step[sequence] = new
    return step


def _packed(answer, requests: list[Request]) -> list[int]:
    found = answer(_step(requests))
    return found.tolist() if isinstance(found, torch.Tensor) else found


A = ([11, 12, 13, 14], [], 0, 4)
B = ([21, 22, 23, 24, 25], [], 3, 2)
C = ([31, 32, 33], [34, 35, 36], 5, 1)


def _pack_cases() -> list[Case]:
    def case(what: str, kind: str, *requests: Request) -> Case:
        told = [
            f"{prompt + output}, {held} in the cache, {new} new"
            for prompt, output, held, new in requests
        ]
        return Case(what, (list(requests),), kind=kind, call=_packed, inputs="; ".join(told))

    return [
        case("one new prompt", "new", A),
        case("one decode: the token that was chosen last", "new", C),
        case("the picture: A, B and C", "new", A, B, C),
        case("three decodes", "new", C, ([41], [42], 1, 1), ([51, 52], [53, 54], 3, 1)),
        case("the first part of a prompt", "part", ([61, 62, 63, 64, 65, 66], [], 0, 4)),
        case("a part from the middle, then a decode", "part", ([61, 62, 63, 64, 65, 66], [], 2, 3),
             C),
        case("a request that lost its cache: 4 of its 5 tokens", "part", ([71, 72], [73, 74, 75], 0,
             4)),
    ]  # fmt: skip


@wrong(
    "These are all tokens of each sequence. The cache holds the keys and values of the first "
    "cache.seq_len: start there."
)
def _all_tokens(step):
    return [i for sequence in step for i in sequence.ids]


@wrong(
    "These are the last tokens of each sequence. A step may take a part from the middle of a "
    "prompt: the new tokens begin where the cache ends, at cache.seq_len.",
    hints="part",
)
def _from_the_end(step):
    return [i for sequence, n in step.items() for i in sequence.ids[-n:]]


@wrong(
    "These are all tokens that the cache lacks. The step takes only step[sequence] of them.",
    hints="part",
)
def _to_the_end(step):
    return [i for sequence in step for i in sequence.ids[sequence.cache.seq_len :]]


@wrong(
    "These tokens come from the prompt alone. A decode computes a token that was generated: take "
    "sequence.ids, the prompt and the output."
)
def _prompt_only(step):
    found = []
    for sequence, n in step.items():
        found += sequence.prompt_ids[sequence.cache.seq_len :][:n]
    return found


@wrong("The first new token is at index cache.seq_len; this begins one token early.")
def _one_early(step):
    found = []
    for sequence, n in step.items():
        start = max(0, sequence.cache.seq_len - 1)
        found += sequence.ids[start : start + n]
    return found


@wrong("The first new token is at index cache.seq_len; this begins one token late.")
def _one_late(step):
    found = []
    for sequence, n in step.items():
        start = sequence.cache.seq_len + 1
        found += sequence.ids[start : start + n]
    return found


@wrong(
    "The slice ends at step[sequence]. It must end at cache.seq_len + step[sequence]: the number "
    "counts the new tokens."
)
def _ends_at_count(step):
    found = []
    for sequence, n in step.items():
        found += sequence.ids[sequence.cache.seq_len : n]
    return found


@wrong("This is a list of lists. The tokens of all sequences lie in one flat list: use +=.")
def _nested(step):
    return [s.ids[s.cache.seq_len : s.cache.seq_len + n] for s, n in step.items()]


@wrong("This pads every sequence to the longest. A packed step has no padding.")
def _with_padding(step):
    found = []
    for sequence, n in step.items():
        start = sequence.cache.seq_len
        found += sequence.ids[start : start + n] + [0] * (max(step.values()) - n)
    return found


@wrong(
    "The sequences take turns, token by token. All tokens of one sequence come before those of the "
    "next."
)
def _in_turns(step):
    parts = [s.ids[s.cache.seq_len : s.cache.seq_len + n] for s, n in step.items()]
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


PACK = Exercise(
    "pack",
    _pack_cases,
    hints={
        "new": (
            "Which tokens of a sequence does the cache not hold yet? At which index of ids do they "
            "begin?",
            "They begin at start = sequence.cache.seq_len. The step wants step[sequence] of them.",
            "for sequence, n in step.items(): start = sequence.cache.seq_len; ids += "
            "sequence.ids[start : start + n]",
        ),
        "part": (
            "The step takes a part of a prompt. Where does the part begin, and where does it end?",
            "It begins where the cache ends, and has step[sequence] tokens. More tokens may follow "
            "it.",
            "ids += sequence.ids[start : start + n], with start = sequence.cache.seq_len",
        ),
    },
    target="nanoserve.engine.engine:pack",
    wrong=(
        _all_tokens, _from_the_end, _to_the_end, _prompt_only, _one_early, _one_late,
        _ends_at_count, _nested, _with_padding, _in_turns,
    ),
)  # fmt: skip


# _angles -----------------------------------------------------------------------------------------

CONFIG = replace(TINY, context=40)


def _angles_of(answer: type, seq: int, held: int | None, positions: list[int]) -> torch.Tensor:
    names = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    model = answer(replace(CONFIG, num_layers=0), dict.fromkeys(names, torch.zeros(1)))
    cache = None if held is None else SimpleNamespace(seq_len=held)
    if positions:
        tables = SimpleNamespace(max_kv_len=max(positions) + 1)
        cache = SimpleNamespace(positions=torch.tensor(positions), tables=tables)
    cos, sin = model._angles(seq, cache)
    return torch.stack((cos, sin))


def _angles_cases() -> list[Case]:
    def case(what: str, held: int | None, *positions: int, seq: int = 0) -> Case:
        told = "no cache" if held is None else f"cache.seq_len {held}"
        told = f"cache.positions {list(positions)}" if positions else told
        args = (seq or len(positions), held, list(positions))
        kind = "batch" if positions else "one"
        return Case(what, args, kind=kind, call=_angles_of, compare=close(), inputs=told)

    return [
        case("no cache, 5 tokens", None, seq=5),
        case("one sequence, 3 tokens after 7", 7, seq=3),
        case("the picture: A, B and C", None, 0, 1, 2, 3, 3, 4, 5),
        case("three decodes", None, 11, 4, 30),
        case("two equal positions", None, 6, 6),
        case("the last position of the context", None, 2, 39),
    ]


def _after(self, seq: int, cache) -> tuple[torch.Tensor, torch.Tensor]:
    start = 0 if cache is None else cache.seq_len
    return self._rope(start, start + seq)


def _tables(self, cache) -> tuple[torch.Tensor, torch.Tensor]:
    return self._rope(0, cache.tables.max_kv_len)


@wrong(
    "This is Day 8's line. A batch of many sequences has no seq_len: it has `positions`, one for "
    "each token."
)
def _as_before(self, seq, cache):
    return _after(self, seq, cache)


@wrong(
    "This numbers the rows of the packed step 0, 1, 2, ... A row's angle belongs to the token's "
    "position in its own sequence: cache.positions.",
    hints="batch",
)
def _by_row(self, seq, cache):
    return self._rope(0, seq) if hasattr(cache, "positions") else _after(self, seq, cache)


@wrong(
    "This counts on from the first token's position. Each sequence has positions of its own: index "
    "the table with cache.positions.",
    hints="batch",
)
def _counts_on(self, seq, cache):
    if not hasattr(cache, "positions"):
        return _after(self, seq, cache)
    start = int(cache.positions[0])
    return self._rope(start, start + seq)


@wrong(
    "This counts back from the longest sequence. Each sequence has positions of its own: index the "
    "table with cache.positions.",
    hints="batch",
)
def _counts_back(self, seq, cache):
    if not hasattr(cache, "positions"):
        return _after(self, seq, cache)
    stop = cache.tables.max_kv_len
    return self._rope(max(0, stop - seq), max(0, stop - seq) + seq)


@wrong(
    "Not every cache has `positions`, and there may be no cache at all: then the tokens follow "
    "those in the cache, as before.",
    hints="one",
)
def _only_batches(self, seq, cache):
    cos, sin = _tables(self, cache)
    return cos[cache.positions], sin[cache.positions]


@wrong(
    "Without `positions` this begins at position 0 each time. The tokens follow the cache.seq_len "
    "tokens that the cache holds.",
    hints="one",
)
def _forgets_the_cache(self, seq, cache):
    if not hasattr(cache, "positions"):
        return self._rope(0, seq)
    cos, sin = _tables(self, cache)
    return cos[cache.positions], sin[cache.positions]


@wrong("The second result is cos again. Return the rows of cos, then the rows of sin.")
def _cos_twice(self, seq, cache):
    if not hasattr(cache, "positions"):
        return _after(self, seq, cache)
    cos, _ = _tables(self, cache)
    return cos[cache.positions], cos[cache.positions]


@wrong(
    "The positions are sorted, and so the rows no longer belong to the tokens. Keep the order of "
    "cache.positions.",
    hints="batch",
)
def _sorted(self, seq, cache):
    if not hasattr(cache, "positions"):
        return _after(self, seq, cache)
    cos, sin = _tables(self, cache)
    rows = cache.positions.sort().values
    return cos[rows], sin[rows]


ANGLES = Exercise(
    "_angles",
    _angles_cases,
    hints={
        "one": (
            "Without `positions`, which positions do the tokens have? What does Day 8 do when "
            "there is no cache?",
            "They begin after the tokens that the cache holds: at cache.seq_len, or at 0 without a "
            "cache. self._rope(start, stop) gives these rows.",
            "start = 0 if cache is None else cache.seq_len; return self._rope(start, start + seq)",
        ),
        "batch": (
            "What decides the angle of a row: its place in the packed step, or its token's "
            "position in its sequence?",
            "Take a table that is long enough, self._rope(0, cache.tables.max_kv_len), and index "
            "cos and sin with cache.positions.",
            "cos, sin = self._rope(0, cache.tables.max_kv_len); return cos[cache.positions], "
            "sin[cache.positions]",
        ),
    },
    target="nanoserve.model:Model._angles",
    wrong=(
        _as_before, _by_row, _counts_on, _counts_back, _only_batches, _forgets_the_cache,
        _cos_twice, _sorted,
    ),
)  # fmt: skip


# last_rows ---------------------------------------------------------------------------------------


def _rows(answer, query_lens: list[int]) -> list[int]:
    found = answer(dict(enumerate(query_lens)).values())  # as the engine passes them
    return found.tolist() if isinstance(found, torch.Tensor) else found


def _rows_cases() -> list[Case]:
    def case(what: str, kind: str, query_lens: list[int]) -> Case:
        inputs = f"the values {query_lens} of a dictionary"
        return Case(what, (query_lens,), kind=kind, call=_rows, inputs=inputs)

    return [
        case("the picture: A, B and C", "many", [4, 2, 1]),
        case("one prompt of 6 tokens", "one", [6]),
        case("one decode", "one", [1]),
        case("four decodes", "many", [1, 1, 1, 1]),
        case("a decode before a long prompt", "many", [1, 9, 1, 3]),
        case("two equal prompts", "many", [5, 5]),
    ]


@wrong("These are the rows where the sequences begin. The next token comes from the last row.")
def _first_rows(query_lens):
    ends = list(accumulate(query_lens))
    return [end - n for end, n in zip(ends, query_lens, strict=True)]


@wrong("Row numbers begin at 0, so the last row is one before the end of the sequence's rows.")
def _ends(query_lens):
    return list(accumulate(query_lens))


@wrong(
    "This is the last row of each sequence when it is alone. The rows of the sequences before it "
    "come first: add their number.",
    hints="many",
)
def _alone(query_lens):
    return [n - 1 for n in query_lens]


@wrong("This is right if each sequence has one row, as in a step of decodes only.", hints="many")
def _decodes_only(query_lens):
    return list(range(len(query_lens)))


@wrong("This is one row, the last of all. Each sequence needs one.", hints="many")
def _last_of_all(query_lens):
    return [sum(query_lens) - 1]


@wrong(
    "The sum leaves out the sequence's own rows, and so this is the last row of the sequence "
    "before it.",
    hints="one",
)
def _one_sequence_back(query_lens):
    lens = list(query_lens)
    return [sum(lens[:i]) - 1 for i in range(len(lens))]


@wrong(
    "This is right if all sequences have as many rows as the longest. A packed step is not padded."
)
def _as_if_padded(query_lens):
    longest = max(query_lens)
    return [i * longest + n - 1 for i, n in enumerate(query_lens)]


LAST_ROWS = Exercise(
    "last_rows",
    _rows_cases,
    hints={
        "one": (
            "A sequence of n tokens is alone in the step. Which row is the last?",
            "Rows 0 to n - 1: the last is n - 1.",
            "return [end - 1 for end in accumulate(query_lens)]",
        ),
        "many": (
            "After how many rows in all does each sequence end?",
            "The running sums of query_lens say where each sequence ends: itertools.accumulate.",
            "return [end - 1 for end in accumulate(query_lens)]",
        ),
    },
    target="nanoserve.engine.engine:last_rows",
    wrong=(
        _first_rows, _ends, _alone, _decodes_only, _last_of_all, _one_sequence_back, _as_if_padded,
    ),
)  # fmt: skip

EXERCISES = (PACK, ANGLES, LAST_ROWS)
