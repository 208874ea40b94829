"""Day 25: a test that sees whether a cache is wired to the dispatcher."""

from contextlib import contextmanager, suppress

import torch

import nanoserve.cache
import nanoserve.kernels.dispatch
from nanoserve.cache import KVPool, PagedKVCache
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day07 import CONFIG

HISTORY, SEQ, LAYER = 6, 3, 1  # a layer that is not the last: seq_len does not move with it


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


class Exchanged(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.v[layer], self.pool.k[layer], slots, n_rep, scale)


class Retouched(PagedKVCache):
    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        slots = self._write(layer, k, v)
        return _read(q, self.pool.k[layer], self.pool.v[layer], slots, n_rep, scale) + 0


class Watching(Right):
    """Wired right, and it notes whether cache.py's name was another function's meanwhile."""

    real, replaced = None, False

    def paged_attention(self, *args, **kwargs):
        self.replaced = nanoserve.cache.paged_attention_dispatch is not self.real
        return super().paged_attention(*args, **kwargs)


class CacheFails(Exception):
    """What the cache that raises raises; no RuntimeError, as the unwritten answer's is one."""


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


def _verdict(answer, kind: type[PagedKVCache], poison: bool = True, layers: bool = False) -> bool:
    """What the answer says; with `layers` the pool holds a list, one tensor for each layer."""
    cache, *step = _inputs(kind, poison)
    if layers:
        cache.pool.k, cache.pool.v = list(cache.pool.k), list(cache.pool.v)
    with _dispatcher_kept():
        try:
            return bool(answer(cache, *step, CONFIG.n_rep))
        except AssertionError:
            return False  # a test may speak by assert


def _replaces(answer) -> bool:
    cache, *step = _inputs(Watching)
    with _dispatcher_kept() as cache.real, suppress(AssertionError):
        answer(cache, *step, CONFIG.n_rep)
    return cache.replaced


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
        Case(
            "the same, in a pool that is a list, one tensor per layer",
            (Right, True, True),
            kind="right",
            call=_verdict,
        ),
        Case("cache.py's name is another function's meanwhile", kind="calls", call=_replaces),
        case("never asks the dispatcher", "calls", Never),
        case("asks it twice", "calls", Twice),
        case("hands over layer 0's pools for layer 1", "pools", OtherLayer),
        case("hands over copies of the pools", "pools", Copied),
        case("hands over V's pool for K's, and K's for V's", "pools", Exchanged),
        case("leaves this step's own tokens out of the mapping", "mapping", OldHistory),
        case("computes with the answer before it hands it back", "answer", Retouched),
        Case("afterwards the dispatcher is in its place", (Right,), kind="back", call=_puts_back),
        Case("so it is after a cache that raises", (Failing,), kind="back", call=_puts_back),
    ]


def _test(calls=None, pools=None, mapping=None, answer=None, back="always", where=nanoserve.cache):
    """The right test, with one of its looks replaced by another."""

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


def _first_pool_only(given, own) -> bool:
    return given[0].shape == own[0].shape and given[1].shape == own[1].shape


WRONG = (
    wrong(
        "The calls are not counted, so a cache that asks twice, or never, passes. Exactly one call."
    )(_test(calls=lambda seen: True)),
    wrong("At least one call is asked for: a cache that asks twice does the work twice. Just one.")(
        _test(calls=lambda seen: len(seen) >= 1)
    ),
    wrong(
        "The pools are compared by their numbers, and a copy has the same ones. Copying the pool "
        "is what the whole method is there to avoid: compare data_ptr()."
    )(_test(pools=_same_numbers)),
    wrong(
        "The pools are compared by shape alone: those of another layer, or V's for K's, have the "
        "same one. Compare data_ptr() with this layer's own."
    )(_test(pools=_first_pool_only)),
    wrong(
        "The mapping is compared with cache.slot_mapping, whose length moves with the last layer: "
        "in layer 1 it lacks this step's tokens. Ask the table for every position, theirs included."
    )(_test(mapping=lambda cache, slots: torch.equal(slots, cache.slot_mapping))),
    wrong(
        "Only the mapping's first slots are looked at. The newest tokens are what a cache forgets "
        "most easily: the length is what it held before, plus this step's."
    )(_test(mapping=lambda cache, slots: torch.equal(slots[: cache.seq_len], cache.slot_mapping))),
    wrong(
        "The answer is compared by its numbers, so one that was copied or computed with passes. "
        "Compare with `is`: handed straight back means the same tensor."
    )(_test(answer=torch.equal)),
    wrong(
        "The spy is left in the dispatcher's place, and all that runs later asks it. Put the real "
        "one back, in a finally: also if the cache raises."
    )(_test(back="never")),
    wrong(
        "When the cache raises, the line that puts the dispatcher back is never reached, and all "
        "that runs later asks your spy. Put that line in a finally."
    )(_test(back="unless it raises")),
    wrong(
        "The pools are compared with `is`, and pool.k[layer] is not the same object twice: "
        "indexing makes a new view each time. Compare data_ptr()."
    )(_test(pools=lambda given, own: given[0] is own[0] and given[1] is own[1])),
    wrong(
        "The pools are compared with torch.equal, and slots that nobody wrote hold NaN, which is "
        "unequal to itself. Nor would equal numbers show a copy: compare data_ptr()."
    )(_test(pools=lambda given, own: all(map(torch.equal, given, own)))),
    wrong(
        "The spy was never asked: it stands in nanoserve.kernels.dispatch, and cache.py holds its "
        "own name for the dispatcher. Replace nanoserve.cache.paged_attention_dispatch."
    )(_test(where=nanoserve.kernels.dispatch)),
)

HINTS = {
    "right": (
        "The test says False of a cache that is wired right. Which of its looks is too strict?",
        "The length of a sequence moves with its last layer, and this is layer 1 of several: "
        "cache.slot_mapping does not hold this step's tokens yet. And a pool's layer is a new view "
        "each time, with NaN in it: compare data_ptr().",
        "Note cache.seq_len before the call; the mapping then has k.shape[2] slots more.",
    ),
    "calls": (
        "What does the spy know that the numbers do not? How often it was called.",
        "Let it append its arguments to a list.",
        "return False unless len(calls) == 1",
    ),
    "pools": (
        "Another layer's pool has the same shape, and a copy has the same numbers.",
        "A view knows where its memory begins: data_ptr().",
        "k_pool.data_ptr() == cache.pool.k[layer].data_ptr(), and the same for v.",
    ),
    "mapping": (
        "Which positions may the query see? Those held before, and its own step's.",
        "cache.table.slot(position) gives the slot of each.",
        "slots.tolist() == [cache.table.slot(p) for p in range(held + k.shape[2])]",
    ),
    "answer": (
        "Handed straight back: not equal, but the very tensor.",
        "Let the spy return a tensor that you made before the call.",
        "got is answer",
    ),
    "back": (
        "A module's name is shared by the whole program. What does the next test find there?",
        "Keep the real function in a variable before you replace it.",
        "try: ... finally: nanoserve.cache.paged_attention_dispatch = real",
    ),
}

EXERCISES = [
    Exercise(
        name="wiring_test",
        cases=_cases,
        hints=HINTS,
        solution=_test(),
        wrong=WRONG,
    ),
]
