"""Day 11: the mask of a step that has a past, and the cache's append."""

from dataclasses import replace

import torch

from nanoserve.config import ModelConfig
from nanoserve.course.exercise import Case, Exercise, raises, wrong
from nanoserve.course.exercises.day01 import TINY

CONFIG: ModelConfig = replace(TINY, n_q=6, n_kv=2, head_dim=8, num_layers=3)


# causal_mask -------------------------------------------------------------------------------------


def causal_mask(query_len: int, kv_len: int) -> torch.Tensor:
    """True where query i may not see key j: bool [query_len, kv_len]. The queries are the last
    query_len of kv_len positions."""
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(1 + kv_len - query_len)


@wrong(
    "The triangle begins at the top left, as if query 0 stood at position 0. It stands at "
    "position kv_len - query_len: the past before it is all visible."
)
def _top_left(query_len, kv_len):
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(1)


@wrong("A token may see itself. The first hidden key of query i is kv_len - query_len + i + 1.")
def _hides_itself(query_len, kv_len):
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(kv_len - query_len)


@wrong("Each query sees one token too many: the one that it is to predict.")
def _one_ahead(query_len, kv_len):
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(2 + kv_len - query_len)


@wrong("Rows and columns have changed places: a row for each query, a column for each key.")
def _transposed(query_len, kv_len):
    return causal_mask(query_len, kv_len).T


@wrong("It is True where a query may look. Here True means hidden, as `masked_fill` wants it.")
def _inverted(query_len, kv_len):
    return ~causal_mask(query_len, kv_len)


@wrong(
    "It has a row for every position of the text. Only the last query_len positions are queries in "
    "this step."
)
def _all_rows(query_len, kv_len):
    return causal_mask(kv_len, kv_len)


@wrong(
    "It has a column for the new tokens only. The remembered keys are looked at too: kv_len "
    "columns."
)
def _new_columns(query_len, kv_len):
    return causal_mask(query_len, query_len)


@wrong(
    "Nothing is hidden. That is right for a single query, but in a chunk of several the first "
    "would see the next."
)
def _nothing(query_len, kv_len):
    return torch.zeros(query_len, kv_len, dtype=torch.bool)


@wrong("It holds numbers to be added to the scores. Wanted is True or False: dtype torch.bool.")
def _numbers(query_len, kv_len):
    return torch.zeros(query_len, kv_len).masked_fill(causal_mask(query_len, kv_len), -torch.inf)


def _mask_cases() -> list[Case]:
    return [
        Case("prefill: 5 queries, nothing before them", (5, 5), kind="square"),
        Case("continuation: 3 queries, 10 keys", (3, 10), kind="past"),
        Case("4 queries, 5 keys", (4, 5), kind="past"),
        Case("decode: 1 query, 8 keys", (1, 8), kind="past"),
        Case("1 query, 1 key", (1, 1), kind="square"),
    ]


CAUSAL_MASK = Exercise(
    "causal_mask",
    _mask_cases,
    hints={
        "square": (
            "With nothing before it, this is Day 6's mask: True strictly above the diagonal.",
            "`torch.ones(rows, columns, dtype=torch.bool)` is all True; `.triu(n)` keeps what "
            "stands at least n places right of the diagonal.",
            "For query_len == kv_len it is "
            "torch.ones(query_len, query_len, dtype=torch.bool).triu(1).",
        ),
        "past": (
            "At which position of the text is query 0, when the queries are the last query_len "
            "positions?",
            "At kv_len - query_len. So query i sees keys 0 to kv_len - query_len + i, and the "
            "triangle moves right by as much.",
            "torch.ones(query_len, kv_len, dtype=torch.bool).triu(1 + kv_len - query_len)",
        ),
    },
    solution=causal_mask,
    wrong=(
        _top_left, _hides_itself, _one_ahead, _transposed, _inverted, _all_rows, _new_columns,
        _nothing, _numbers,
    ),
)  # fmt: skip


# append ------------------------------------------------------------------------------------------


def _keys_and_values(seq: int, seed: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, CONFIG.n_kv, seq, CONFIG.head_dim)
    k, v = torch.randn(shape, generator=generator)
    return k, v


def _cache(answer: type, capacity: int):
    """A cache whose unwritten memory holds 7.0, so that what is read there is always the same."""

    def grow(self, needed, like):
        answer._grow(self, needed, like)
        self._k[:, :, self.seq_len :] = 7.0
        self._v[:, :, self.seq_len :] = 7.0

    return type("Marked", (answer,), {"_grow": grow})(CONFIG, capacity)


def _step(cache, seq: int, seed: int, layers: int = CONFIG.num_layers) -> list:
    """One step through the layers: what each append gave back, and seq_len after it."""
    given = []
    for layer in range(layers):
        k, v = cache.append(layer, *_keys_and_values(seq, seed + layer))
        given.append({"k": k.clone(), "v": v.clone(), "seq_len": cache.seq_len})
    return given


def _last_step(answer: type, steps: list[int], capacity: int) -> list:
    cache = _cache(answer, capacity)
    for number, seq in enumerate(steps):
        given = _step(cache, seq, 10 * number)
    return given


def _lengths(answer: type, steps: list[int]) -> list[int]:
    """seq_len after each append of each step."""
    cache = _cache(answer, 32)
    return [row["seq_len"] for n, seq in enumerate(steps) for row in _step(cache, seq, 10 * n)]


def _broken_off(answer: type) -> list:
    """A step that stops after layer 0, and then the same step again."""
    cache = _cache(answer, 32)
    _step(cache, 5, 0)
    _step(cache, 2, 10, layers=1)
    return _step(cache, 2, 10)


def _is_view(answer: type) -> str:
    cache = _cache(answer, 32)
    k, v = _keys_and_values(5, 0)
    first = cache.append(0, k, v)[0]
    second = cache.append(0, k, v)[0]  # layer 0 again: the length has not moved
    return "a view of the strip" if first.data_ptr() == second.data_ptr() else "a copy"


def _batch(answer: type) -> None:
    _cache(answer, 32).append(0, *_keys_and_values(3, 0, batch=2))


def _append_cases() -> list[Case]:
    def case(what: str, kind: str, call, *args) -> Case:
        return Case(what, args, kind=kind, call=call)

    return [
        case("5 tokens into an empty cache", "write", _last_step, [5], 32),
        case("5 tokens, then 1, then 1", "write", _last_step, [5, 1, 1], 32),
        case("5 tokens, then a chunk of 3", "write", _last_step, [5, 3], 32),
        case("seq_len after each layer, 5 tokens and then 2", "length", _lengths, [5, 2]),
        case("a step broken off, then repeated", "length", _broken_off),
        case("10 tokens, room for 4", "grow", _last_step, [10], 4),
        case("3 tokens, then 1, 1 and 1, room for 4", "grow", _last_step, [3, 1, 1, 1], 4),
        case("is what comes back a view?", "view", _is_view),
        Case("a batch of 2", kind="batch", call=_batch, expected=raises(ValueError)),
    ]


def _right(self, layer, k, v, *, start=None, where=None, moves=None, grows=True, whole=False):
    """The right answer with one thing changed."""
    if k.shape[0] != 1:
        raise ValueError(f"a cache holds one sequence, got a batch of {k.shape[0]}")
    start = self.seq_len if start is None else start
    where = layer if where is None else where
    end = self.seq_len + k.shape[2]
    if self._k is None or (grows and end > self._capacity):
        self._grow(end, k)
    self._k[where, :, start : start + k.shape[2]] = k[0]
    self._v[where, :, start : start + k.shape[2]] = v[0]
    if moves is None and layer == self._config.num_layers - 1:
        self.seq_len = end
    elif moves is not None:
        self.seq_len += moves
    stop = self._capacity if whole else end
    return self._k[where : where + 1, :, :stop], self._v[where : where + 1, :, :stop]


@wrong(
    "The new keys are written from position 0, over the old ones. They go behind the history: "
    "from self.seq_len on."
)
def _at_zero(self, layer, k, v):
    return _right(self, layer, k, v, start=0)


@wrong(
    "seq_len moves at every layer. A step has one length: it moves once, when the last layer has "
    "written."
)
def _every_layer(self, layer, k, v):
    return _right(self, layer, k, v, moves=k.shape[2])


@wrong(
    "seq_len moves at layer 0, so the later layers write behind a gap. It moves with the last "
    "layer."
)
def _first_layer(self, layer, k, v):
    return _right(self, layer, k, v, moves=k.shape[2] if layer == 0 else 0)


@wrong("seq_len never moves, so each step writes over the one before.")
def _never_moves(self, layer, k, v):
    return _right(self, layer, k, v, moves=0)


@wrong("seq_len moves by 1, whatever came. A prompt is many tokens at once: add k.shape[2].")
def _moves_by_one(self, layer, k, v):
    return _right(self, layer, k, v, moves=int(layer == self._config.num_layers - 1))


@wrong("It gives back this step's keys and values only. Attention needs the whole history.")
def _only_the_new(self, layer, k, v):
    _right(self, layer, k, v)
    return k, v


@wrong(
    "It gives back the history without this step. A token sees itself: cut at the new end, not at "
    "the old one."
)
def _only_the_old(self, layer, k, v):
    old = self.seq_len
    k, v = _right(self, layer, k, v)
    return k[:, :, :old], v[:, :, :old]


@wrong(
    "It gives back the whole strip, with the room that is still empty: whatever lies there is "
    "taken for keys. Cut at the end of the history."
)
def _whole_strip(self, layer, k, v):
    return _right(self, layer, k, v, whole=True)


@wrong("Keys and values have changed places.")
def _swapped(self, layer, k, v):
    return _right(self, layer, k, v)[::-1]


@wrong("All layers share one strip, so the last one to write wins. Write to strip `layer`.")
def _one_strip(self, layer, k, v):
    return _right(self, layer, k, v, where=0)


@wrong("The strip never grows. Call self._grow(end, k) when `end` is past self._capacity.")
def _no_growth(self, layer, k, v):
    return _right(self, layer, k, v, grows=False)


@wrong(
    "The numbers are right, but the history is copied at every step, which is the work that a "
    "cache should save. Return slices of the strip: those are views."
)
def _copied(self, layer, k, v):
    old = self.seq_len
    history = _right(self, layer, k, v)
    return tuple(torch.cat([h[:, :, :old], new], dim=2) for h, new in zip(history, (k, v)))  # noqa: B905


@wrong(
    "The axis of the one sequence is missing in what it gives back: slice `layer : layer + 1`, "
    "which keeps it."
)
def _three_axes(self, layer, k, v):
    k, v = _right(self, layer, k, v)
    return k[0], v[0]


@wrong(
    "A batch of two is taken and its second sequence forgotten. Refuse it: raise ValueError and "
    "say how many came."
)
def _batch_taken(self, layer, k, v):
    return _right(self, layer, k[:1], v[:1])


APPEND = Exercise(
    "append",
    _append_cases,
    hints={
        "write": (
            "Where does the history end before this step, and where after it? Two slices need "
            "those two numbers: the one you write and the one you give back.",
            "end = self.seq_len + k.shape[2]. Write to positions self.seq_len : end of this "
            "layer's strip; give back positions 0 : end, keys and values.",
            "self._k[layer, :, self.seq_len : end] = k[0], the same for v, and "
            "return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]",
        ),
        "length": (
            "A step calls append once for each layer. After which of them has the text grown?",
            "seq_len is what every layer of this step starts from, so it may move only when the "
            "last layer has written. A step that is broken off then leaves no trace.",
            "if layer == self._config.num_layers - 1: self.seq_len = end",
        ),
        "grow": (
            "What happens when `end` is larger than self._capacity?",
            "self._grow(needed, like) makes the strips longer and takes the history along. `like` "
            "is any tensor with the right dtype and device: k.",
            "Before writing: if self._k is None or end > self._capacity: self._grow(end, k)",
        ),
        "view": (
            "Does what you give back lie in the strip, or somewhere else?",
            "torch.cat, clone and indexing with a list copy. A slice does not.",
            "return self._k[layer : layer + 1, :, :end] and the same of self._v",
        ),
        "batch": (
            "k is [1, n_kv, query_len, head_dim]. What if the first size is 2?",
            "One cache is one sequence, so that is a mistake of the caller. Say so before you "
            "write anything.",
            'if k.shape[0] != 1: raise ValueError(f"a cache holds one sequence, got a batch of '
            '{k.shape[0]}")',
        ),
    },
    target="nanoserve.cache:NaiveKVCache.append",
    wrong=(
        _at_zero, _every_layer, _first_layer, _never_moves, _moves_by_one, _only_the_new,
        _only_the_old, _whole_strip, _swapped, _one_strip, _no_growth, _copied, _three_axes,
        _batch_taken,
    ),
)  # fmt: skip

EXERCISES = (CAUSAL_MASK, APPEND)
