"""Day 26: three ways to one read, wired to the cache. Closes week 6."""

from dataclasses import replace

import torch

from nanoserve.bench.attention import scattered_cache
from nanoserve.bench.runner import attention_paths
from nanoserve.cache import PagedKVCache
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.exercises.day01 import TINY
from nanoserve.kernels.dispatch import paged_attention_dispatch
from nanoserve.kernels.reference import paged_attention_reference, tolerance
from nanoserve.layers import sdpa

CONFIG = replace(TINY, n_q=6, n_kv=2, head_dim=8, hidden_size=20, num_layers=4)
HISTORY = 33  # the 32 held fill two blocks: the new token needs a third
NAMES = ("dispatched", "gather", "reference")


class Watched(PagedKVCache):
    """A cache that notes what is asked of it."""

    def __init__(self, pool) -> None:
        super().__init__(pool)
        self.asked: list[str] = []

    def append(self, layer, k, v):
        self.asked.append("append")
        return super().append(layer, k, v)

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        self.asked.append("paged_attention")
        return super().paged_attention(layer, k, v, q, n_rep, scale)


def _outcome(answer, look: str):
    """What a set of paths does to a fresh cache, seen from one side."""
    cache, step = scattered_cache(CONFIG, HISTORY)
    cache.__class__, cache.asked = Watched, []
    paths = answer(cache, step, CONFIG.n_rep)
    if look == "names":
        return sorted(paths)
    if look == "asked":
        found = {}
        for name in NAMES:
            cache.asked.clear()
            paths[name](1)
            found[name] = list(cache.asked)
        return found
    if look == "written":
        found, slots = {}, [cache.table.slot(p) for p in range(HISTORY - 1)]
        for layer, name in enumerate(NAMES):  # each in a layer that nobody has touched
            empty = torch.ones(len(cache.pool.k[0]), dtype=torch.bool)
            empty[slots] = False
            paths[name](layer)
            found[name] = [bool(x[layer, empty].any()) for x in (cache.pool.k, cache.pool.v)]
        return found
    if look != "reference":  # the others find the step written, whatever the answer's own writes
        attention_paths(cache, step, CONFIG.n_rep)["reference"](2)
    return paths[look](2)


def _same(got, expected):
    """Equal, and a tensor within the read's own tolerance."""
    if isinstance(expected, dict) and isinstance(got, dict):
        off = next((name for name in expected if got.get(name) != expected[name]), None)
        return None if off is None else f"{off}: expected {expected[off]}, got {got.get(off)}"
    if not isinstance(expected, torch.Tensor):
        return got == expected or f"expected {expected}, got {got}"
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return f"expected a tensor {list(expected.shape)}, got {got if got is None else 'another'}"
    atol, rtol = tolerance(torch.float32)
    if torch.allclose(got, expected, atol=atol, rtol=rtol):
        return None
    return f"it is {float((got - expected).abs().max()):.2g} away from what the history gives"


def _put(paths, **others):
    return {**paths, **others}


@wrong(
    "This times the dispatcher, not the cache: the write, the mapping and the method itself are "
    "left out. The path is what the engine runs: cache.paged_attention."
)
def _past_the_cache(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)])

    def dispatched(layer):
        cache.pool.k[layer].index_copy_(0, slots[-1:], step["k"][0].transpose(0, 1))
        cache.pool.v[layer].index_copy_(0, slots[-1:], step["v"][0].transpose(0, 1))
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_dispatch(step["q"], *pools, slots, n_rep)

    return _put(paths, dispatched=dispatched)


@wrong("The layer is fixed when the path is made. Each call names the layer that it reads.")
def _one_layer(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    return {name: lambda layer, read=read: read(0) for name, read in paths.items()}


@wrong(
    "All three names give the last path: a function made in a loop finds the loop's variable as it "
    "stands at the end."
)
def _late_binding(cache, step, n_rep):
    last = attention_paths(cache, step, n_rep)["reference"]
    return dict.fromkeys(NAMES, last)


@wrong(
    "The reference reads without writing: it misses the new token, unless another path was there "
    "first. A path that leans on its neighbour is no check of it."
)
def _reference_does_not_write(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)])

    def reference(layer):
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The table owns no block for the new token: those held fill their blocks to the last slot. "
    "Call grow first; it takes the number of tokens in all, cache.seq_len + 1."
)
def _never_grown(cache, step, n_rep):
    cache.table.grow(1)
    torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)])
    return attention_paths(cache, step, n_rep)


@wrong(
    "The reference must write by itself, through its own mapping. cache.append writes through the "
    "cache's, and that is one of the things that the reference judges."
)
def _written_by_the_cache(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)])

    def reference(layer):
        cache.append(layer, step["k"], step["v"])
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The rows to write are [1, n_kv, head_dim], a token first. k[0] is [n_kv, 1, head_dim], heads "
    "first: transpose its first two axes."
)
def _rows_by_head(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)])

    def reference(layer):
        cache.pool.k[layer].index_copy_(0, slots[-1:], step["k"][0])
        return paths["reference"](layer)

    return _put(paths, reference=reference)


@wrong(
    "The mapping is 0, 1, 2, ...: the first slots of the pool, whoever owns them. This sequence's "
    "lie where its block table says."
)
def _first_slots(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = torch.arange(cache.seq_len + 1)

    def reference(layer):
        paths["reference"](layer)  # which writes
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The reference stops one token early: the history ends with this step's own token, which is "
    "not in cache.seq_len yet."
)
def _one_short(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len)])

    def reference(layer):
        paths["reference"](layer)
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The reference asks the cache to attend. Then it is the very path that it should judge: take "
    "paged_attention_reference."
)
def _judges_itself(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    return _put(paths, reference=paths["dispatched"])


@wrong("gather is the cache's fused read under another name: gather is cache.append, then sdpa.")
def _gather_is_fused(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    return _put(paths, gather=paths["dispatched"])


@wrong("Keys and values are the wrong way round in gather: append takes k, then v.")
def _keys_for_values(cache, step, n_rep):
    def gather(layer):
        return sdpa(step["q"], *cache.append(layer, step["k"], step["v"])[::-1])

    return _put(attention_paths(cache, step, n_rep), gather=gather)


@wrong(
    "gather gives back the history instead of the attention over it: the copy is half of that path."
)
def _only_gathers(cache, step, n_rep):
    def gather(layer):
        return cache.append(layer, step["k"], step["v"])[0]

    return _put(attention_paths(cache, step, n_rep), gather=gather)


def _cases() -> list[Case]:
    def case(what: str, look: str, kind: str) -> Case:
        return Case(
            what,
            (look,),
            kind=kind,
            call=_outcome,
            compare=_same,
            expected=lambda solution: _outcome(solution, look),
        )

    return [
        case("the three names", "names", "wire"),
        case("what each asks of the cache", "asked", "wire"),
        case("dispatched, layer 2", "dispatched", "wire"),
        case("gather, layer 2", "gather", "gather"),
        case("reference, layer 2", "reference", "reference"),
        case("each writes the step itself", "written", "write"),
    ]


READ_PATHS = Exercise(
    "attention_paths",
    _cases,
    hints={
        "wire": (
            "What does attention call, when the engine runs a decode step?",
            "dispatched(layer) asks the cache to attend: one call of one method, with this step's "
            "k, v and q, and its result handed back.",
            'return cache.paged_attention(layer, step["k"], step["v"], step["q"], n_rep)',
        ),
        "gather": (
            "Which method of the cache gives back the whole history, as Day 11's cache did?",
            "cache.append writes k and v and gives the keys and values of all tokens; then attend.",
            'return sdpa(step["q"], *cache.append(layer, step["k"], step["v"]))',
        ),
        "reference": (
            "Where do the tokens of this sequence lie? Who knows it, apart from the cache's own "
            "mapping, which might be wrong?",
            "The block table: cache.table.slot(position), for every position up to and with this "
            "step's. Grow the table first.",
            "mapping = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)]); then "
            "write k and v at mapping[-1:], and call paged_attention_reference.",
        ),
        "write": (
            "Look at each path alone: after it, does the layer hold this step's key and value?",
            "cache.append and cache.paged_attention write for you. The reference has to write by "
            "itself, before it reads.",
            "cache.pool.k[layer].index_copy_(0, mapping[-1:], k[0].transpose(0, 1)), and v alike.",
        ),
    },
    target="nanoserve.bench.runner:attention_paths",
    was=("read_paths",),
    wrong=(
        _past_the_cache, _one_layer, _late_binding, _reference_does_not_write, _never_grown,
        _written_by_the_cache, _rows_by_head, _first_slots, _one_short,
        _judges_itself, _gather_is_fused, _keys_for_values, _only_gathers,
    ),
)  # fmt: skip

EXERCISES = (READ_PATHS,)

REVIEW = (
    (
        "Day 21. A load of 16 lanes starts at position 32 of 37. What does the mask do, and what "
        "would happen without it?",
        "It switches off the 11 lanes past the end: they get `other`. Without it they read what "
        "lies behind: on a card a plausible number, under tlsim an error with its line.",
    ),
    (
        "Day 21. Why does tlsim run all programs in lockstep, and also one by one in a shuffled "
        "order?",
        "Lockstep is fast: the grid is an axis of every tensor. The shuffled order shows a kernel "
        "that needs an order, which a card does not promise.",
    ),
    (
        "Day 22. A tile brings a larger maximum. What happens to the l and acc so far?",
        "Both are multiplied by alpha = exp(old m - new m): they belong to the old maximum. "
        "Forget it for one of them, and the weights no longer add up to one.",
    ),
    (
        "Day 23. The same source runs under tlsim, under Triton's interpreter and compiled. What "
        "does each of them prove that the others do not?",
        "tlsim: that it stays within its buffers, on any machine. The interpreter: that Triton "
        "means by it what we mean. Compiled: that a card's compiler takes it, with its memory.",
    ),
    (
        "Day 23. Why does the dispatcher check shapes, strides and n_rep on the host?",
        "A kernel cannot: it gets pointers and numbers. A wrong stride there is no error, only "
        "another row, and the result looks like any other.",
    ),
    (
        "Day 24. A path has exponent 0.3 from 64 to 4,096 tokens. May you promise its time at "
        "100,000?",
        "No. The fixed cost of the short end flattens the whole fit. Fit the long end alone, where "
        "the bytes rule: it will be nearer to 1.",
    ),
    (
        "Day 25. One line moved, and three tests of equality became tests of closeness. What was "
        "lost, and where does the new bound come from?",
        "Byte-equality was a property of the oracle's sum, not of paging. The bound is the read's "
        "tolerance, from the file where it was drawn on Day 18; greedy tokens stay the same.",
    ),
    (
        "Day 26. The kernel alone is fast in a benchmark of its own. Why time the cache?",
        "The engine never runs the kernel alone. The write, the mapping, the checks and the launch "
        "belong to the path, and on a card they are most of it while the history is short.",
    ),
)
