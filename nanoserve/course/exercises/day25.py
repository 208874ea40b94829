"""Day 25: a test that sees whether a cache is wired to the dispatcher."""

from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

import nanoserve.cache
import nanoserve.kernels.dispatch
from nanoserve.cache import KVPool, PagedKVCache
from nanoserve.course.exercise import Case, Exercise, exact, wrong
from nanoserve.course.exercises.day07 import CONFIG as THREE_LAYERS

CONFIG = replace(THREE_LAYERS, num_layers=4)
HISTORY, SEQ, LAYER = 6, 3, 2  # not the last layer: cache.seq_len grows with that one


def _read(*args, **kwargs):
    """The dispatcher, by the name that a spy takes the place of."""
    return nanoserve.cache.paged_attention_dispatch(*args, **kwargs)


class Right(PagedKVCache):
    """Wired as it should be."""

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale)


class OtherLayer(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.k[0], self.pool.v[0], slots, n_rep, scale)


class OldHistory(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        self._write(layer, k, v)
        return _read(q, self.pool.k[layer], self.pool.v[layer], self.slot_mapping, n_rep, scale)


class AnotherOrder(PagedKVCache):
    """The right slots, newest first."""

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v).flip(0)
        return _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale)


class FirstSlots(PagedKVCache):
    """As many slots as there are tokens, and they are the pool's first."""

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = torch.arange(len(self._write(layer, k, v)))
        return _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale)


class Twice(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale)
        return _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale)


class Never(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        self._write(layer, k, v)
        return torch.zeros_like(q)


class Copied(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        k_pool, v_pool = self.pool.k[layer].clone(), self.pool.v[layer].clone()
        return _read(q, k_pool, v_pool, slots, n_rep, scale)


class CopiedKeys(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.k[layer].clone(), self.pool.v[layer], slots, n_rep, scale)


class CopiedValues(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.k[layer], self.pool.v[layer].clone(), slots, n_rep, scale)


class Exchanged(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.v[layer], self.pool.k[layer], slots, n_rep, scale)


class Retouched(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        found = _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale)
        return (
            found + 0 if isinstance(found, torch.Tensor) else [found]
        )  # a spy may return anything


class Watching(Right):
    """Wired right. It stores whether cache.py's name was replaced, and what it was called with."""

    real, replaced, given = None, False, ()

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        self.replaced = nanoserve.cache.paged_attention_dispatch is not self.real
        self.given = layer, k, v, q, n_rep
        return super().paged_attention(layer, k, v, q, n_rep, scale)


class CacheFails(Exception):
    """The error of the cache that fails. An unwritten answer raises a RuntimeError."""


class Failing(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        raise CacheFails("this cache always fails")


def _inputs(kind: type[PagedKVCache], poison: bool = True) -> tuple:
    """A cache of this kind with HISTORY tokens in scattered blocks, and the next step's tensors."""
    random = torch.Generator().manual_seed(25)

    def draw(heads: int, seq: int) -> torch.Tensor:
        return torch.randn(1, heads, seq, CONFIG.head_dim, generator=random)

    pool = KVPool(CONFIG, num_blocks=8, block_size=4, poison=poison)
    other, cache = PagedKVCache(pool), kind(pool)
    for owner, seq in ((other, 2), (cache, 4), (other, 3), (cache, HISTORY - 4)):
        for layer in range(CONFIG.num_layers):
            owner.append(layer, draw(CONFIG.n_kv, seq), draw(CONFIG.n_kv, seq))
    return cache, LAYER, draw(CONFIG.n_kv, SEQ), draw(CONFIG.n_kv, SEQ), draw(CONFIG.n_q, SEQ)


@contextmanager
def _dispatcher_kept():
    """The dispatcher, put back afterwards under both its names, whatever the answer left there."""
    holders = nanoserve.cache, nanoserve.kernels.dispatch
    dispatch = nanoserve.cache.paged_attention_dispatch
    try:
        yield dispatch
    finally:
        for holder in holders:
            holder.paged_attention_dispatch = dispatch


def _verdict(answer, kind: type[PagedKVCache], poison: bool = True) -> bool:
    """What the answer returns for a cache of this kind."""
    cache, *step = _inputs(kind, poison)
    with _dispatcher_kept():
        try:
            return bool(answer(cache, *step, CONFIG.n_rep))
        except AssertionError:
            return False  # a test may use assert


def _watched(answer) -> tuple[Watching, list]:
    """The cache after the answer ran, and the arguments that the answer was given."""
    cache, *step = _inputs(Watching)
    with _dispatcher_kept() as cache.real, suppress(AssertionError):
        answer(cache, *step, CONFIG.n_rep)
    return cache, [*step, CONFIG.n_rep]


def _replaces(answer) -> bool:
    return _watched(answer)[0].replaced


def _passes_on(answer) -> bool:
    """Whether the cache was called with the layer, k, v, q and n_rep that the answer was given."""
    cache, given = _watched(answer)
    return exact(list(cache.given), given) is None


def _puts_back(answer, kind: type[PagedKVCache]) -> bool:
    with _dispatcher_kept() as dispatch:
        with suppress(AssertionError, CacheFails):
            answer(*_inputs(kind), CONFIG.n_rep)
        return nanoserve.cache.paged_attention_dispatch is dispatch


def _cases() -> list[Case]:
    def case(what: str, kind: str, cache: type[PagedKVCache]) -> Case:
        return Case(what, (cache,), kind=kind, call=_verdict)

    return [
        case("a cache that is wired right", "right", Right),
        Case("the same, in a pool without poison", (Right, False), kind="right", call=_verdict),
        Case("the spy stands in cache.py while the cache attends", kind="calls", call=_replaces),
        Case("the cache gets this step's layer, k, v, q and n_rep", kind="calls", call=_passes_on),
        case("a cache that never calls the dispatcher", "calls", Never),
        case("calls it twice", "calls", Twice),
        case("passes layer 0's pools for layer 2", "pools", OtherLayer),
        case("passes copies of the pools", "pools", Copied),
        case("passes a copy of K's pool alone", "pools", CopiedKeys),
        case("passes a copy of V's pool alone", "pools", CopiedValues),
        case("passes V's pool for K's, and K's for V's", "pools", Exchanged),
        case("leaves this step's own tokens out of the mapping", "mapping", OldHistory),
        case("passes the right slots in another order", "mapping", AnotherOrder),
        case("passes as many slots, the first of the pool", "mapping", FirstSlots),
        case("computes with the answer before it returns it", "answer", Retouched),
        Case("afterwards the dispatcher is in its place", (Right,), kind="back", call=_puts_back),
        Case("so it is after a cache that raises", (Failing,), kind="back", call=_puts_back),
    ]


def right_test(cache, layer, k, v, q, n_rep) -> bool:
    """Whether `cache` is wired to the dispatcher; k, v [1, n_kv, seq, d], q [1, n_q, seq, d]."""
    calls, answer, held = [], torch.zeros_like(q), cache.seq_len

    def spy(*args):
        calls.append(args)
        return answer

    real = nanoserve.cache.paged_attention_dispatch
    nanoserve.cache.paged_attention_dispatch = spy
    try:
        got = cache.paged_attention(layer, k, v, q, n_rep)
    finally:
        nanoserve.cache.paged_attention_dispatch = real
    if len(calls) != 1:
        return False
    _, k_pool, v_pool, slots, *_ = calls[0]
    own = cache.pool.k[layer], cache.pool.v[layer]
    pools = zip((k_pool, v_pool), own, strict=True)
    same = [given.data_ptr() == mine.data_ptr() for given, mine in pools]
    whole = slots.tolist() == [cache.table.slot(p) for p in range(held + k.shape[2])]
    return all(same) and whole and got is answer


def _test(calls=None, pools=None, mapping=None, answer=None, back="always", where=nanoserve.cache):
    """A test as right_test, with one of its comparisons replaced by another."""

    def wiring_test(cache, layer, k, v, q, n_rep):
        seen, told = [], torch.zeros_like(q)
        expected = cache.seq_len + k.shape[2]

        def spy(*args):
            seen.append(args)
            return told

        dispatch, raised = where.paged_attention_dispatch, True
        where.paged_attention_dispatch = spy
        try:
            got = cache.paged_attention(layer, k, v, q, n_rep)
            raised = False
        finally:
            if back == "always" or (back == "unless it raises" and not raised):
                where.paged_attention_dispatch = dispatch
        if not (calls(seen) if calls else len(seen) == 1):
            return False
        if not seen:
            return True
        _, k_pool, v_pool, slots, *_ = seen[0]
        own = cache.pool.k[layer], cache.pool.v[layer]
        if not (pools or _the_very_pools)((k_pool, v_pool), own):
            return False
        if mapping:
            if not mapping(cache, slots):
                return False
        elif slots.tolist() != [cache.table.slot(p) for p in range(expected)]:
            return False
        return answer(got, told) if answer else got is told

    return wiring_test


def _the_very_pools(given, own) -> bool:
    return all(g.data_ptr() == o.data_ptr() for g, o in zip(given, own, strict=True))


def _same_numbers(given, own) -> bool:
    return all(torch.equal(g.nan_to_num(), o.nan_to_num()) for g, o in zip(given, own, strict=True))


def _same_shapes(given, own) -> bool:
    return given[0].shape == own[0].shape and given[1].shape == own[1].shape


WRONG = (
    wrong(
        "The calls are not counted, so a cache that calls the dispatcher twice, or never, passes. "
        "The table asks for exactly one call.",
        hints="calls",
    )(_test(calls=lambda seen: True)),
    wrong(
        "At least one call is enough for this test, so a cache that calls the dispatcher twice "
        "passes. The table asks for exactly one call.",
        hints="calls",
    )(_test(calls=lambda seen: len(seen) >= 1)),
    wrong(
        "The test compares the pools by their numbers, and a copy has the same numbers. The method "
        "exists to avoid that copy: compare data_ptr().",
        hints="pools",
    )(_test(pools=_same_numbers)),
    wrong(
        "The test compares only the shapes of the pools. Another layer's pools have the same "
        "shapes, and so have V's and K's: compare data_ptr() with this layer's own.",
        hints="pools",
    )(_test(pools=_same_shapes)),
    wrong(
        "The test compares K's pool and not V's. A cache may copy one of them: compare data_ptr() "
        "of both.",
        hints="pools",
    )(_test(pools=lambda given, own: given[0].data_ptr() == own[0].data_ptr())),
    wrong(
        "The test compares V's pool and not K's. A cache may copy one of them: compare data_ptr() "
        "of both.",
        hints="pools",
    )(_test(pools=lambda given, own: given[1].data_ptr() == own[1].data_ptr())),
    wrong(
        "The test compares the mapping with cache.slot_mapping, which grows with the last layer: "
        "in layer 2 it lacks this step's tokens. Call cache.table.slot for every position, this "
        "step's included.",
        hints="mapping",
    )(_test(mapping=lambda cache, slots: torch.equal(slots, cache.slot_mapping))),
    wrong(
        "The test looks only at the mapping's first slots, so a mapping without the newest tokens "
        "passes. Its length is the tokens held before, plus this step's.",
        hints="mapping",
    )(_test(mapping=lambda cache, slots: torch.equal(slots[: cache.seq_len], cache.slot_mapping))),
    wrong(
        "The test compares only the length of the mapping. As many slots in another order, or "
        "another sequence's slots, pass: compare every slot with cache.table.slot(position).",
        hints="mapping",
    )(_test(mapping=lambda cache, slots: len(slots) == cache.seq_len + SEQ)),
    wrong(
        "The test ignores the order of the slots. Slot i of the mapping is position i's, oldest "
        "first: compare the lists, not sets or sorted copies.",
        hints="mapping",
    )(
        _test(
            mapping=lambda cache, slots: (
                sorted(slots.tolist())
                == sorted(cache.table.slot(p) for p in range(cache.seq_len + SEQ))
            )
        )
    ),
    wrong(
        "The test compares the answer by its numbers, so an answer that was copied or changed by 0 "
        "passes. Compare with `is`: untouched means the same tensor.",
        hints="answer",
    )(_test(answer=torch.equal)),
    wrong(
        "The spy stays in the dispatcher's place, so all later code calls the spy. Put the real "
        "dispatcher back, in a finally: also if the cache raises.",
        hints="back",
    )(_test(back="never")),
    wrong(
        "When the cache raises, the line that puts the dispatcher back is never reached, and all "
        "later code calls your spy. Put that line in a finally.",
        hints="back",
    )(_test(back="unless it raises")),
    wrong(
        "The test compares the pools with `is`, and indexing pool.k[layer] makes a new view each "
        "time. Compare data_ptr().",
        hints="pools",
    )(_test(pools=lambda given, own: given[0] is own[0] and given[1] is own[1])),
    wrong(
        "The test compares the pools with torch.equal. Unwritten slots hold NaN, which differs "
        "from itself; and equal numbers would not show a copy. Compare data_ptr().",
        hints="pools",
    )(_test(pools=lambda given, own: all(map(torch.equal, given, own)))),
    wrong(
        "The cache never calls this spy: it stands in nanoserve.kernels.dispatch, and cache.py has "
        "its own name for the dispatcher. Replace nanoserve.cache.paged_attention_dispatch.",
        hints="calls",
    )(_test(where=nanoserve.kernels.dispatch)),
)

HINTS = {
    "right": (
        "The test returns False for a cache that is wired right. Which comparison is too strict?",
        "cache.seq_len grows with the last layer, and this is layer 2 of four: "
        "cache.slot_mapping does not hold this step's tokens yet. A pool's layer is a new view "
        "each time, with NaN in it: compare data_ptr().",
        "Store cache.seq_len before the call; the mapping then has k.shape[2] slots more.",
    ),
    "calls": (
        "Where does cache.py look the dispatcher up, and how often does the cache call it?",
        "Replace nanoserve.cache.paged_attention_dispatch. The spy appends its arguments to a "
        "list; then call cache.paged_attention(layer, k, v, q, n_rep).",
        "return False unless len(calls) == 1",
    ),
    "pools": (
        "Another layer's pool has the same shape, and a copy has the same numbers.",
        "data_ptr() of a view is the address at which its memory begins.",
        "k_pool.data_ptr() == cache.pool.k[layer].data_ptr(), and the same for v.",
    ),
    "mapping": (
        "Which positions may the query see? The positions held before, and this step's own.",
        "cache.table.slot(position) gives the slot of each, in the order of the positions.",
        "slots.tolist() == [cache.table.slot(p) for p in range(held + k.shape[2])]",
    ),
    "answer": (
        "Untouched means more than equal: it is the very tensor.",
        "Let the spy return a tensor that you made before the call.",
        "got is answer",
    ),
    "back": (
        "The whole program shares a module's name. What does the next test find there?",
        "Keep the real function in a variable before you replace it.",
        "try: ... finally: nanoserve.cache.paged_attention_dispatch = real",
    ),
}

EXERCISES = [
    Exercise(
        name="wiring_test",
        cases=_cases,
        hints=HINTS,
        solution=right_test,
        wrong=WRONG,
    ),
]
