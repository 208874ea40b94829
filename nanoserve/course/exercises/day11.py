"""Day 11: the mask of a step that has a past, and the cache's append."""

from dataclasses import replace

import torch

from nanoserve.config import ModelConfig
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import TINY

CONFIG: ModelConfig = replace(TINY, n_q=6, n_kv=2, head_dim=8, num_layers=3)


# causal_mask -------------------------------------------------------------------------------------


def causal_mask(query_len: int, kv_len: int) -> torch.Tensor:
    """True where query i may not see key j: bool [query_len, kv_len]. The queries are the last
    query_len of kv_len positions."""
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(1 + kv_len - query_len)


@wrong(
    "The triangle begins at the top left, as if query 0 stood at position 0. Query 0 stands at "
    "position kv_len - query_len and sees all keys before it.",
    hints="past",
)
def _top_left(query_len, kv_len):
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(1)


@wrong(
    "A token may see itself. The first hidden key of query i is kv_len - query_len + i + 1.",
    hints="edge",
)
def _hides_itself(query_len, kv_len):
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(kv_len - query_len)


@wrong("Each query sees one key too many: the token that it should predict.", hints="edge")
def _one_ahead(query_len, kv_len):
    return torch.ones(query_len, kv_len, dtype=torch.bool).triu(2 + kv_len - query_len)


@wrong("Rows and columns are swapped: a row for each query, a column for each key.", hints="shape")
def _transposed(query_len, kv_len):
    return causal_mask(query_len, kv_len).T


@wrong(
    "It is True where a query may look. True must mean hidden, as for `masked_fill`.",
    hints="meaning",
)
def _inverted(query_len, kv_len):
    return ~causal_mask(query_len, kv_len)


@wrong(
    "It has a row for every position of the text. Only the last query_len positions are queries in "
    "this step.",
    hints="shape",
)
def _all_rows(query_len, kv_len):
    return causal_mask(kv_len, kv_len)


@wrong(
    "It has columns for the new tokens only. The queries also see the cached keys, so there are "
    "kv_len columns.",
    hints="shape",
)
def _new_columns(query_len, kv_len):
    return causal_mask(query_len, query_len)


@wrong(
    "Nothing is hidden. That is right for a single query, but in a chunk of several the first "
    "query would see the next token.",
    hints="square",
)
def _nothing(query_len, kv_len):
    return torch.zeros(query_len, kv_len, dtype=torch.bool)


@wrong(
    "It holds numbers to add to the scores. Return True and False: dtype torch.bool.",
    hints="meaning",
)
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
            "With an empty cache this is Day 6's mask: True strictly above the diagonal.",
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
        "edge": (
            "Look at the table above: what does query 0, at position 2, see of key 2 and of key 3?",
            "A query at position p sees keys 0 to p. Key p + 1 is the first hidden one.",
            "With p = kv_len - query_len + i: True from column p + 1 on, which is "
            ".triu(1 + kv_len - query_len)",
        ),
        "shape": (
            "How many queries are there in this step, and how many keys do they meet?",
            "query_len rows and kv_len columns, whatever the cache holds.",
            "torch.ones(query_len, kv_len, dtype=torch.bool), and then .triu(...)",
        ),
        "meaning": (
            "What does `scores.masked_fill(mask, -torch.inf)` do where mask is True?",
            "It hides the key. So True stands for hidden, False for visible, and the dtype is "
            "bool.",
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


def _cache(answer: type, capacity: int, layers: int = CONFIG.num_layers):
    """A cache whose unwritten memory holds 7.0, so that a read of it gives the same each time."""

    def grow(self, needed, like):
        answer._grow(self, needed, like)
        self._k[:, :, self.seq_len :] = 7.0
        self._v[:, :, self.seq_len :] = 7.0

    config = replace(CONFIG, num_layers=layers)
    return type("Marked", (answer,), {"_grow": grow})(config, capacity)


def _step(cache, seq: int, seed: int, layers: int = CONFIG.num_layers) -> list:
    """One step through the layers: what each append returned, and seq_len after it."""
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


def _is_view(answer: type) -> list[str]:
    """Whether what append returns shares its memory with the strips."""
    cache = _cache(answer, 32)
    returned = cache.append(0, *_keys_and_values(5, 0))
    told = []
    for name, part, strip in zip(("keys", "values"), returned, (cache._k, cache._v), strict=True):
        same = part.untyped_storage().data_ptr() == strip.untyped_storage().data_ptr()
        told.append(f"{name}: {'a view of the strip' if same else 'a copy'}")
    return told


def _refused(answer: type, batch: int) -> list[str]:
    """What a step with a batch other than 1 changes, after 5 tokens, in a model of one layer."""
    cache = _cache(answer, 32, layers=1)
    cache.append(0, *_keys_and_values(5, 0))
    try:
        cache.append(0, *_keys_and_values(2, 10, batch=batch))
        told = ["no error"]
    except ValueError:
        told = ["ValueError"]
    clean = all((strip[:, :, 5:] == 7.0).all() for strip in (cache._k, cache._v))
    told.append("nothing written" if clean else "something was written")
    return [*told, f"seq_len {cache.seq_len}"]


def _capacities(answer: type, steps: list[int], capacity: int) -> list[int]:
    """The capacity after each step."""
    cache, found = _cache(answer, capacity), []
    for number, seq in enumerate(steps):
        _step(cache, seq, 10 * number)
        found.append(cache._k.shape[2])
    return found


def _append_cases() -> list[Case]:
    def case(what: str, kind: str, call, *args) -> Case:
        return Case(what, args, kind=kind, call=call)

    return [
        case("5 tokens into an empty cache", "write", _last_step, [5], 32),
        case("5 tokens, then 1, then 1", "write", _last_step, [5, 1, 1], 32),
        case("5 tokens, then a chunk of 3", "write", _last_step, [5, 3], 32),
        case("seq_len after each layer, 5 tokens and then 2", "length", _lengths, [5, 2]),
        case("a step broken off, then repeated", "length", _broken_off),
        case("10 tokens, capacity 4", "grow", _last_step, [10], 4),
        case("3 tokens, then 1, 1 and 1, capacity 4", "grow", _last_step, [3, 1, 1, 1], 4),
        case("3 tokens, then a chunk of 9, capacity 4", "grow", _last_step, [3, 9], 4),
        case("capacity after 3, 1 and 1 tokens, 4 at first", "grow", _capacities, [3, 1, 1], 4),
        case("does it return views?", "view", _is_view),
        case("a batch of 2, after 5 tokens", "batch", _refused, 2),
        case("a batch of 0, after 5 tokens", "batch", _refused, 0),
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
    "The new keys are written from position 0, over the old ones. Write them from position "
    "self.seq_len on.",
    hints="write",
)
def _at_zero(self, layer, k, v):
    return _right(self, layer, k, v, start=0)


@wrong(
    "seq_len moves at every layer. It must move once per step, when the last layer has written.",
    hints="length",
)
def _every_layer(self, layer, k, v):
    return _right(self, layer, k, v, moves=k.shape[2])


@wrong(
    "seq_len moves at layer 0, so the later layers leave a gap before what they write. Move it at "
    "the last layer.",
    hints="length",
)
def _first_layer(self, layer, k, v):
    return _right(self, layer, k, v, moves=k.shape[2] if layer == 0 else 0)


@wrong("seq_len never moves, so each step overwrites the one before.", hints="length")
def _never_moves(self, layer, k, v):
    return _right(self, layer, k, v, moves=0)


@wrong(
    "seq_len moves by 1, whatever the step. A prompt is many tokens at once: add k.shape[2].",
    hints="length",
)
def _moves_by_one(self, layer, k, v):
    return _right(self, layer, k, v, moves=int(layer == self._config.num_layers - 1))


@wrong(
    "It returns this step's keys and values only. Attention needs those of all cached tokens too.",
    hints="returned",
)
def _only_the_new(self, layer, k, v):
    _right(self, layer, k, v)
    return k, v


@wrong(
    "It returns the cached tokens without this step's. A token sees itself: cut at the new end, "
    "not at the old one.",
    hints="returned",
)
def _only_the_old(self, layer, k, v):
    old = self.seq_len
    k, v = _right(self, layer, k, v)
    return k[:, :, :old], v[:, :, :old]


@wrong(
    "It returns tokens 0 to self.seq_len - 1. seq_len moves at the last layer only, so the other "
    "layers return the cached tokens without this step's. Cut at `end`.",
    hints="returned",
)
def _up_to_seq_len(self, layer, k, v):
    k, v = _right(self, layer, k, v)
    return k[:, :, : self.seq_len], v[:, :, : self.seq_len]


@wrong(
    "It returns the whole strip, unused capacity included, so attention would read keys that "
    "nobody wrote. Cut at `end`.",
    hints="returned",
)
def _whole_strip(self, layer, k, v):
    return _right(self, layer, k, v, whole=True)


@wrong("Keys and values are swapped in what it returns.", hints="returned")
def _swapped(self, layer, k, v):
    return _right(self, layer, k, v)[::-1]


@wrong(
    "All layers use one strip, so each overwrites the one before. Write to strip `layer`.",
    hints="write",
)
def _one_strip(self, layer, k, v):
    return _right(self, layer, k, v, where=0)


@wrong(
    "The strip never grows. Call self._grow(end, k) when `end` is past self._capacity.",
    hints="grow",
)
def _no_growth(self, layer, k, v):
    return _right(self, layer, k, v, grows=False)


@wrong(
    "The numbers are right, but all cached tokens are copied at every step, which is the work that "
    "a cache should save. Return slices of the strip: slices are views.",
    hints="view",
)
def _copied(self, layer, k, v):
    old = self.seq_len
    views = _right(self, layer, k, v)
    return tuple(torch.cat([h[:, :, :old], new], dim=2) for h, new in zip(views, (k, v)))  # noqa: B905


@wrong(
    "The axis of the one sequence is missing in what it returns: slice `layer : layer + 1`, which "
    "keeps that axis.",
    hints="returned",
)
def _three_axes(self, layer, k, v):
    k, v = _right(self, layer, k, v)
    return k[0], v[0]


@wrong(
    "A batch of two is accepted and its second sequence is lost. Refuse it: raise ValueError.",
    hints="batch",
)
def _batch_taken(self, layer, k, v):
    return _right(self, layer, k[:1], v[:1])


@wrong(
    "A batch of two raises ValueError, but only after the write or after seq_len has moved. The "
    "next step would start from a wrong past: check the batch in the first line.",
    hints="batch",
)
def _refused_too_late(self, layer, k, v):
    views = _right(self, layer, k[:1], v[:1]) if len(k) else (k, v)
    if k.shape[0] != 1:
        raise ValueError(f"a batch of {k.shape[0]}")
    return views


@wrong("An empty batch is accepted. Refuse every batch other than 1, with !=.", hints="batch")
def _empty_batch_taken(self, layer, k, v):
    if k.shape[0] > 1:
        raise ValueError(f"a batch of {k.shape[0]}")
    return _right(self, layer, k, v) if len(k) else (k, v)


@wrong(
    "There is no strip before the first token: self._k is None. Call self._grow there too.",
    hints="grow",
)
def _none_forgotten(self, layer, k, v):
    if k.shape[0] != 1:
        raise ValueError(f"a batch of {k.shape[0]}")
    if self._k is None and self.seq_len + k.shape[2] <= self._capacity:
        self._k[layer] = k[0]
    return _right(self, layer, k, v)


@wrong(
    "The strip grows in every step. Grow only if self._k is None or `end` is larger than "
    "self._capacity.",
    hints="grow",
)
def _grows_each_step(self, layer, k, v):
    if k.shape[0] != 1:
        raise ValueError(f"a batch of {k.shape[0]}")
    if layer == 0:
        self._grow(self.seq_len + k.shape[2], k)
    return _right(self, layer, k, v, grows=False)


@wrong(
    "The strip grows by this step's tokens only. _grow takes the number of tokens that must fit in "
    "all: `end`.",
    hints="grow",
)
def _grows_by_the_step(self, layer, k, v):
    if k.shape[0] != 1:
        raise ValueError(f"a batch of {k.shape[0]}")
    if self._k is None or self.seq_len + k.shape[2] > self._capacity:
        self._grow(k.shape[2], k)
    return _right(self, layer, k, v, grows=False)


@wrong(
    "The strip grows one token too early: it doubles when it is exactly full. Grow when `end` is "
    "larger than self._capacity.",
    hints="grow",
)
def _grows_too_early(self, layer, k, v):
    if k.shape[0] != 1:
        raise ValueError(f"a batch of {k.shape[0]}")
    if self._k is None or self.seq_len + k.shape[2] >= self._capacity:
        self._grow(self.seq_len + k.shape[2], k)
    return _right(self, layer, k, v)


APPEND = Exercise(
    "append",
    _append_cases,
    hints={
        "write": (
            "How many tokens are cached before this step, and how many after it? Both slices need "
            "these numbers: the one that you write and the one that you return.",
            "end = self.seq_len + k.shape[2]. Write to positions self.seq_len : end of this "
            "layer's strip; return positions 0 : end, keys and values.",
            "self._k[layer, :, self.seq_len : end] = k[0], the same for v, and "
            "return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]",
        ),
        "length": (
            "A step calls append once for each layer. From which seq_len must each layer start?",
            "Every layer of a step starts from the same seq_len, so it may move only when the last "
            "layer has written. A step that is broken off then changes nothing.",
            "if layer == self._config.num_layers - 1: self.seq_len = end",
        ),
        "grow": (
            "Before the first token self._k is None. Later `end` can be larger than "
            "self._capacity. What must happen in both cases?",
            "self._grow(needed, like) makes the strips longer and moves the cached tokens over. "
            "`needed` is the number of tokens that must fit. For `like` pass k: the strips get its "
            "dtype and device.",
            "Before you write: if self._k is None or end > self._capacity: self._grow(end, k)",
        ),
        "view": (
            "Are the tensors that you return a part of the strip, or new memory?",
            "torch.cat, clone and indexing with a list copy. A slice does not.",
            "return self._k[layer : layer + 1, :, :end] and the same of self._v",
        ),
        "batch": (
            "k is [1, n_kv, query_len, head_dim]. What if the first size is 2?",
            "One cache holds one sequence, so another batch is the caller's mistake. Raise the "
            "error before anything is written or moved.",
            'if k.shape[0] != 1: raise ValueError(f"a cache holds one sequence, got a batch of '
            '{k.shape[0]}"), as the first lines',
        ),
        "returned": (
            "Attention gets what you return. Which tokens must it see, and in which shape?",
            "Positions 0 to end - 1 of this layer, keys first, then values, each "
            "[1, n_kv, end, head_dim].",
            "return self._k[layer : layer + 1, :, :end], self._v[layer : layer + 1, :, :end]",
        ),
    },
    target="nanoserve.cache:NaiveKVCache.append",
    wrong=(
        _at_zero, _every_layer, _first_layer, _never_moves, _moves_by_one, _only_the_new,
        _only_the_old, _whole_strip, _swapped, _one_strip, _no_growth, _copied, _three_axes,
        _batch_taken, _refused_too_late, _empty_batch_taken, _grows_by_the_step, _grows_too_early,
        _up_to_seq_len, _none_forgotten, _grows_each_step,
    ),
)  # fmt: skip

EXERCISES = (CAUSAL_MASK, APPEND)
