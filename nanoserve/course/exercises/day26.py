"""Day 26: three code paths to one attention, wired to the cache. Closes week 6."""

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
KV_LEN = 33  # the 32 tokens held fill two blocks: the new token needs a third
NAMES = ("dispatched", "gather", "reference")


class Watched(PagedKVCache):
    """A cache that stores which of its methods were called."""

    def __init__(self, pool) -> None:
        super().__init__(pool)
        self.called: list[str] = []

    def append(self, layer, k, v):
        self.called.append("append")
        return super().append(layer, k, v)

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        self.called.append("paged_attention")
        return super().paged_attention(layer, k, v, q, n_rep, scale)


class Stale(PagedKVCache):
    """A cache whose slot mapping holds two wrong slots: position 7's and the newest one's."""

    def _map(self, end):
        super()._map(end)
        self._slots[7] = self._slots[end - 1] = self._slots[3]


def _outcome(answer, look: str):
    """What a set of paths does with a fresh cache, as far as one case looks at it."""
    cache, step = scattered_cache(CONFIG, KV_LEN)
    if look == "stale":  # the table is right, and the slot mapping made from it is not
        cache.__class__, cache._slots[7] = Stale, int(cache._slots[3])
        return answer(cache, step, CONFIG.n_rep)["reference"](2)
    cache.__class__, cache.called = Watched, []
    paths = answer(cache, step, CONFIG.n_rep)
    if look == "names":
        return sorted(paths)
    if look == "called":
        found = {}
        for name in NAMES:
            cache.called.clear()
            paths[name](1)
            found[name] = list(cache.called)
        return found
    if look == "written":
        found, slots = {}, [cache.table.slot(p) for p in range(KV_LEN - 1)]
        for layer, name in enumerate(NAMES):  # each in a layer of its own
            empty = torch.ones(len(cache.pool.k[0]), dtype=torch.bool)
            empty[slots] = False
            paths[name](layer)
            found[name] = [bool(x[layer, empty].any()) for x in (cache.pool.k, cache.pool.v)]
        return found
    if look != "reference":  # write the step first, so that this case sees the attention alone
        attention_paths(cache, step, CONFIG.n_rep)["reference"](2)
    return paths[look](2)


def _same(got, expected):
    """Equal; a tensor within attention's tolerance."""
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
    return f"it differs from attention over these tokens by up to {_largest(got, expected):.2g}"


def _largest(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max())


def _own_mapping(cache, tokens: int) -> torch.Tensor:
    return torch.tensor([cache.table.slot(p) for p in range(tokens)])


def _put(paths, **others):
    return {**paths, **others}


@wrong(
    "This path calls the dispatcher, not the cache, and so leaves out the cache's method, its "
    "write and its mapping. The engine calls cache.paged_attention.",
    hints="wire",
)
def _past_the_cache(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = _own_mapping(cache, cache.seq_len + 1)

    def dispatched(layer):
        cache.pool.k[layer].index_copy_(0, slots[-1:], step["k"][0].transpose(0, 1))
        cache.pool.v[layer].index_copy_(0, slots[-1:], step["v"][0].transpose(0, 1))
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_dispatch(step["q"], *pools, slots, n_rep)

    return _put(paths, dispatched=dispatched)


@wrong("The layer is fixed when the path is made. Use the layer that each call passes.")
def _one_layer(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    return {name: lambda layer, read=read: read(0) for name, read in paths.items()}


@wrong(
    "All three names hold the last path: a function made in a loop uses the value that the loop's "
    "variable has at the end."
)
def _late_binding(cache, step, n_rep):
    last = attention_paths(cache, step, n_rep)["reference"]
    return dict.fromkeys(NAMES, last)


@wrong(
    "The reference does not write this step's k and v: it misses the new token, unless another "
    "path has run before. Then it cannot check whether that path writes.",
    hints="write",
)
def _reference_does_not_write(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = _own_mapping(cache, cache.seq_len + 1)

    def reference(layer):
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The table owns no block for the new token: the tokens held fill their blocks to the last "
    "slot. Call grow first; its argument is the number of tokens in all, cache.seq_len + 1.",
    hints="reference",
)
def _never_grown(cache, step, n_rep):
    cache.table.grow(1)
    _own_mapping(cache, cache.seq_len + 1)
    return attention_paths(cache, step, n_rep)


@wrong(
    "The reference writes by cache.append, through the cache's own mapping. A wrong slot there "
    "would then be wrong in both: write through your own mapping, with index_copy_.",
    hints="write",
)
def _written_by_the_cache(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = _own_mapping(cache, cache.seq_len + 1)

    def reference(layer):
        cache.append(layer, step["k"], step["v"])
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The rows to write are [1, n_kv, head_dim], tokens first. k[0] is [n_kv, 1, head_dim], heads "
    "first: transpose its first two axes.",
    hints="write",
)
def _rows_by_head(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = _own_mapping(cache, cache.seq_len + 1)

    def reference(layer):
        cache.pool.k[layer].index_copy_(0, slots[-1:], step["k"][0])
        return paths["reference"](layer)

    return _put(paths, reference=reference)


@wrong(
    "The mapping is 0, 1, 2, ...: the first slots of the pool, whichever sequence owns them. The "
    "block table gives this sequence's slots: cache.table.slot(position).",
    hints="reference",
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
    "The reference stops one token early. kv_len includes this step's own token, which "
    "cache.seq_len does not count yet.",
    hints="reference",
)
def _one_short(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    slots = _own_mapping(cache, cache.seq_len)

    def reference(layer):
        paths["reference"](layer)
        pools = cache.pool.k[layer], cache.pool.v[layer]
        return paged_attention_reference(step["q"], *pools, slots, n_rep)

    return _put(paths, reference=reference)


@wrong(
    "The reference calls cache.paged_attention, which is the path that it should check. Call "
    "paged_attention_reference.",
    hints="reference",
)
def _judges_itself(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    return _put(paths, reference=paths["dispatched"])


@wrong(
    "gather calls cache.paged_attention, as dispatched does. gather is cache.append, then sdpa.",
    hints="gather",
)
def _gather_is_fused(cache, step, n_rep):
    paths = attention_paths(cache, step, n_rep)
    return _put(paths, gather=paths["dispatched"])


@wrong(
    "Keys and values are exchanged in gather: cache.append returns keys, then values.",
    hints="gather",
)
def _keys_for_values(cache, step, n_rep):
    def gather(layer):
        return sdpa(step["q"], *cache.append(layer, step["k"], step["v"])[::-1])

    return _put(attention_paths(cache, step, n_rep), gather=gather)


@wrong(
    "gather returns the keys instead of the attention: call sdpa with q and both of append's "
    "results.",
    hints="gather",
)
def _only_gathers(cache, step, n_rep):
    def gather(layer):
        return cache.append(layer, step["k"], step["v"])[0]

    return _put(attention_paths(cache, step, n_rep), gather=gather)


def _reference_over(mapping_of, write=None):
    """attention_paths with another mapping in its reference, and another write."""

    def answer(cache, step, n_rep):
        paths = attention_paths(cache, step, n_rep)
        slots = _own_mapping(cache, cache.seq_len + 1)

        def reference(layer):
            pools = cache.pool.k[layer], cache.pool.v[layer]
            if write:
                write(cache, layer, step)
            else:
                for pool, name in zip(pools, "kv", strict=True):
                    pool.index_copy_(0, slots[-1:], step[name][0].transpose(0, 1))
            return paged_attention_reference(
                step["q"], *pools, mapping_of(cache, layer, step), n_rep
            )

        return _put(paths, reference=reference)

    return answer


def _mapped(cache, layer, step):
    cache._map(cache.seq_len + 1)
    return cache._slots[: cache.seq_len + 1]


_SAME_MAPPING = (
    wrong(
        "The reference uses the mapping that cache._write returns. That is the cache's own: a "
        "wrong slot in it is then wrong in both. Make yours from cache.table.slot.",
        hints="reference",
    )(
        _reference_over(
            lambda cache, layer, step: cache._write(layer, step["k"], step["v"]),
            write=lambda cache, layer, step: None,
        )
    ),
    wrong(
        "The reference uses cache._slots, the cache's own mapping. A wrong slot in it is then "
        "wrong in both, and the check passes. Make yours from cache.table.slot.",
        hints="reference",
    )(_reference_over(_mapped)),
    wrong(
        "The reference writes by cache._write, through the cache's own mapping. If its newest slot "
        "is wrong, the reference misses the new token: write at your own mapping's last slot.",
        hints="write",
    )(
        _reference_over(
            lambda cache, layer, step: _own_mapping(cache, cache.seq_len + 1),
            write=lambda cache, layer, step: cache._write(layer, step["k"], step["v"]),
        )
    ),
    wrong(
        "The reference takes the slots of the tokens held from cache.slot_mapping, the cache's "
        "own. A wrong slot there is then wrong in both: call cache.table.slot for each position.",
        hints="reference",
    )(
        _reference_over(
            lambda cache, layer, step: torch.cat(
                [cache.slot_mapping, torch.tensor([cache.table.slot(cache.seq_len)])]
            )
        )
    ),
)


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
        case("which methods of the cache each path calls", "called", "wire"),
        case("dispatched, layer 2", "dispatched", "wire"),
        case("gather, layer 2", "gather", "gather"),
        case("reference, layer 2", "reference", "reference"),
        case("each path writes k and v itself", "written", "write"),
        case("reference, where two slots of the cache's own mapping are wrong", "stale",
             "reference"),
    ]  # fmt: skip


ATTENTION_PATHS = Exercise(
    "attention_paths",
    _cases,
    hints={
        "wire": (
            "Which method of the cache does attention call, when the engine runs a decode step?",
            "dispatched(layer) is one call of one method, with this step's k, v and q. It returns "
            "that method's result.",
            'return cache.paged_attention(layer, step["k"], step["v"], step["q"], n_rep)',
        ),
        "gather": (
            "Which method of the cache returns the keys and values of all tokens, as Day 11's "
            "cache did?",
            "cache.append writes k and v and returns the keys and values of all tokens; then "
            "attend.",
            'return sdpa(step["q"], *cache.append(layer, step["k"], step["v"]))',
        ),
        "reference": (
            "Where do the tokens of this sequence lie? The cache's own slot mapping is what the "
            "reference checks, so it cannot come from there.",
            "From the block table: cache.table.slot(position), for every position up to this "
            "step's own. Grow the table first.",
            "mapping = torch.tensor([cache.table.slot(p) for p in range(cache.seq_len + 1)]); then "
            "write k and v at mapping[-1:], and call paged_attention_reference.",
        ),
        "write": (
            "Run each path alone: does the layer hold this step's key and value afterwards?",
            "cache.append and cache.paged_attention write for you. The reference writes by itself, "
            "at its own mapping's last slot, before it attends.",
            "cache.pool.k[layer].index_copy_(0, mapping[-1:], k[0].transpose(0, 1)), and v alike.",
        ),
    },
    target="nanoserve.bench.runner:attention_paths",
    was=("read_paths",),
    wrong=(
        _past_the_cache, _one_layer, _late_binding, _reference_does_not_write, _never_grown,
        _written_by_the_cache, _rows_by_head, _first_slots, _one_short,
        _judges_itself, _gather_is_fused, _keys_for_values, _only_gathers, *_SAME_MAPPING,
    ),
)  # fmt: skip

EXERCISES = (ATTENTION_PATHS,)

REVIEW = (
    (
        "Day 21. A load of 16 lanes starts at position 32 of 37. What does the mask do, and what "
        "would happen without it?",
        "It switches off the 11 lanes past the end: they get `other`. Without it they load what "
        "lies behind: on a GPU a plausible number, under tlsim an error with its line.",
    ),
    (
        "Day 21. Why does tlsim run all programs in lockstep, and also one by one in a shuffled "
        "order?",
        "Lockstep is fast: the grid is an axis of every tensor. The shuffled order shows a kernel "
        "that needs an order, which a GPU does not promise.",
    ),
    (
        "Day 22. A tile brings a larger maximum. What happens to the l and acc so far?",
        "Both are multiplied by alpha = exp(old m - new m): they belong to the old maximum. "
        "Forget it for one of them, and the weights no longer add up to one.",
    ),
    (
        "Day 23. The same source runs under tlsim, under Triton's interpreter and compiled. What "
        "does each of them prove that the others do not?",
        "tlsim: that the kernel stays within its buffers, on any machine. The interpreter: that "
        "Triton gives the source the same meaning. Compiled: that a GPU's compiler accepts it.",
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
        "the bytes decide the time, and measure at 100,000 before you promise.",
    ),
    (
        "Day 25. One line moved, and three tests of equality became tests of closeness. What was "
        "lost, and where does the new bound come from?",
        "Byte-equality was a property of the oracle's sum, not of paging. The bound is attention's "
        "tolerance, from the file that defined it on Day 18; greedy tokens stay the same.",
    ),
    (
        "Day 26. The kernel alone is fast in a benchmark of its own. Why time the cache?",
        "The engine never runs the kernel alone. The write, the mapping, the checks and the launch "
        "belong to the code path, and on a GPU they can be most of it while kv_len is short.",
    ),
)
