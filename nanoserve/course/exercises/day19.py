"""Day 19: the branch in attention that lets a cache attend by itself."""

from dataclasses import replace

import torch

from nanoserve.cache import KVPool, NaiveKVCache, PagedKVCache
from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day07 import CONFIG, random_layer
from nanoserve.layers import _heads, _linear, apply_rope, rms_norm, rope_tables, sdpa

SEQ = 7


class Spy:
    """A cache that records how it is called, and returns a pattern."""

    def __init__(self) -> None:
        self.seq_len = 0
        self.calls: list = []

    def append(self, layer, k, v):
        self.calls.append({"append": layer})
        return k, v

    def paged_attention(self, layer, k, v, q, n_rep, scale=None):
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"the order is (layer, k, v, q, n_rep), and q is {q!r}")
        scale = q.shape[-1] ** -0.5 if scale is None else scale  # the default, by name or by value
        self.calls.append(
            {"paged_attention": layer, "k": k, "v": v, "q": q, "n_rep": n_rep, "scale": scale}
        )
        return torch.arange(q.numel(), dtype=q.dtype).view(q.shape) / 100


class AppendOnly:
    """A cache of a class that the engine does not have. It has append and no paged_attention."""

    seq_len = 0

    def append(self, layer, k, v):
        return k, v


def _input(seq: int = SEQ) -> tuple:
    random = torch.Generator().manual_seed(19)
    x = torch.randn(1, seq, CONFIG.hidden_size, generator=random)
    return x, random_layer(), *rope_tables(CONFIG, seq)


def _none(answer) -> torch.Tensor:
    return answer(*_input(), CONFIG)


def _qwen3(answer) -> torch.Tensor:
    """A layer with q_norm and k_norm, and no cache."""
    x, layer, cos, sin = _input()
    config = replace(CONFIG, qk_norm=True)
    for number, name in enumerate(("q_norm", "k_norm")):
        random = torch.Generator().manual_seed(190 + number)
        norm = 1 + torch.rand(config.head_dim, generator=random)
        layer[f"self_attn.{name}.weight"] = norm
    return answer(x, layer, cos, sin, config)


def _index_left_out(answer) -> list:
    spy = Spy()
    answer(*_input(), CONFIG, spy)
    return [call.get("paged_attention") for call in spy.calls]


def _in_steps(answer, cache, steps: list[int]) -> list:
    """A text that goes through layers 0 to 2 by steps: every layer's output of the last step."""
    x, layer, cos, sin = _input(sum(steps))
    for seq in steps:
        here = slice(cache.seq_len, cache.seq_len + seq)
        outs = [
            answer(x[:, here], layer, cos[here], sin[here], CONFIG, cache, index)
            for index in range(CONFIG.num_layers)
        ]
    return [*outs, cache.seq_len]


def _append_only(answer) -> torch.Tensor:
    return answer(*_input(), CONFIG, AppendOnly(), 1)


def _naive(answer, steps: list[int]) -> list:
    return _in_steps(answer, NaiveKVCache(CONFIG), steps)


class Counting(PagedKVCache):
    """The paged cache, with a count of the calls of paged_attention."""

    calls = 0

    def paged_attention(self, *args, **kwargs):
        self.calls += 1
        return super().paged_attention(*args, **kwargs)


def _paged(answer, steps: list[int]) -> list:
    pool = KVPool(CONFIG, num_blocks=6, block_size=4, poison=True)
    pool.allocator.allocate()  # the block of another sequence
    cache = Counting(pool)
    return [*_in_steps(answer, cache, steps), {"calls of paged_attention": cache.calls}]


def _calls(answer, index: int) -> list:
    spy = Spy()
    answer(*_input(), CONFIG, spy, index)
    return [[*sorted(call), call.get("paged_attention")] for call in spy.calls]


def _arguments(answer) -> list:
    spy = Spy()
    answer(*_input(), CONFIG, spy, 1)
    return spy.calls


def _result_used(answer) -> torch.Tensor:
    return answer(*_input(), CONFIG, Spy(), 1)


def _cases() -> list[Case]:
    def case(what: str, kind: str, call, *args) -> Case:
        return Case(what, args, kind=kind, call=call, compare=close(1e-6, 1e-5))

    return [
        case("no cache", "none", _none),
        case("no cache, in a model with q_norm and k_norm", "norms", _qwen3),
        case("a contiguous cache: 5 tokens, then 1, then 1", "naive", _naive, [5, 1, 1]),
        case("a cache of another class, with append alone", "ask", _append_only),
        case("a spy: the calls that layer 2 makes", "ask", _calls, 2),
        case("a spy: the layer, if index is left out", "hand", _index_left_out),
        case("a spy: the arguments of layer 1", "hand", _arguments),
        case("a spy: its result goes to o_proj unchanged", "back", _result_used),
        case("a paged cache: 6 tokens at once", "ask", _paged, [6]),
        case("a paged cache: 5 tokens, then 1, then 3", "ask", _paged, [5, 1, 3]),
    ]


def _right(x, layer, cos, sin, config, cache=None, index=0, *, attend) -> torch.Tensor:
    """The given code, with `attend` for the part to write."""
    q = _heads(_linear(x, layer, "self_attn.q_proj"), config.n_q)
    k = _heads(_linear(x, layer, "self_attn.k_proj"), config.n_kv)
    v = _heads(_linear(x, layer, "self_attn.v_proj"), config.n_kv)
    if config.qk_norm:
        q = rms_norm(q, layer["self_attn.q_norm.weight"], config.norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], config.norm_eps)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    out = attend(q, k, v, config, cache, index)
    return _linear(out.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")


def _wrong(why: str, hints: str | None = None):
    """`@_wrong(why)` over the part to write: makes the whole function from that part."""

    def build(attend):
        def answer(x, layer, cos, sin, config, cache=None, index=0):
            return _right(x, layer, cos, sin, config, cache, index, attend=attend)

        return wrong(why, hints)(answer)

    return build


def _other(q, k, v, cache, index):
    """The branches that stay as they were."""
    return sdpa(q, k, v) if cache is None else sdpa(q, *cache.append(index, k, v))


def _attends(cache) -> bool:
    return hasattr(cache, "paged_attention")


@_wrong(
    "paged_attention is never called: the keys and values are gathered by append, as on Day 11. "
    "Call cache.paged_attention if the cache has it."
)
def _never_calls(q, k, v, config, cache, index):
    return _other(q, k, v, cache, index)


@_wrong(
    "It tests the class, so only a PagedKVCache attends. Any cache with a paged_attention can "
    "attend: use hasattr."
)
def _by_class(q, k, v, config, cache, index):
    if isinstance(cache, PagedKVCache):
        return cache.paged_attention(index, k, v, q, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "It tests the class: every cache but NaiveKVCache is expected to have a paged_attention. A "
    "cache of any class can lack it, and then needs append: use hasattr."
)
def _by_naive_class(q, k, v, config, cache, index):
    if cache is None or isinstance(cache, NaiveKVCache):
        return _other(q, k, v, cache, index)
    return cache.paged_attention(index, k, v, q, config.n_rep)


@_wrong(
    "append is called after paged_attention, and its result replaces the output. Both write, so "
    "the step is written twice. Call one or the other: use elif and else.",
    hints="ask",
)
def _appends_after(q, k, v, config, cache, index):
    if _attends(cache):
        cache.paged_attention(index, k, v, q, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "append is called before paged_attention, which writes too: the step is written twice, and in "
    "the last layer the length moves twice. Call one or the other."
)
def _writes_twice(q, k, v, config, cache, index):
    if _attends(cache):
        cache.append(index, k, v)
        return cache.paged_attention(index, k, v, q, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "paged_attention is called on every cache. NaiveKVCache does not have it: use append there."
)
def _calls_always(q, k, v, config, cache, index):
    if cache is not None:
        return cache.paged_attention(index, k, v, q, config.n_rep)
    return sdpa(q, k, v)


@_wrong("The branch for no cache is missing: if cache is None, call sdpa(q, k, v).")
def _none_forgotten(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(index, k, v, q, config.n_rep)
    return sdpa(q, *cache.append(index, k, v))


@_wrong(
    "Every layer passes layer 0. Pass `index`: each layer has its own keys and values.",
    hints="hand",
)
def _layer_zero(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(0, k, v, q, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "n_q is passed as n_rep. n_rep is the number of query heads that share one KV head: "
    "config.n_rep, which is n_q // n_kv."
)
def _n_q(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(index, k, v, q, config.n_q)
    return _other(q, k, v, cache, index)


@_wrong("n_kv is passed as n_rep. n_rep is n_q // n_kv: config.n_rep.")
def _n_kv(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(index, k, v, q, config.n_kv)
    return _other(q, k, v, cache, index)


@_wrong("Keys and values have changed places: the order is layer, k, v, q, n_rep.")
def _swapped(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(index, v, k, q, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "q comes first here. The order is layer, k, v, q, n_rep: the new keys and values come first.",
    hints="hand",
)
def _q_first(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(index, q, k, v, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "The layer is the first argument, not the fourth. The order is layer, k, v, q, n_rep.",
    hints="hand",
)
def _layer_late(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(q, k, v, index, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "q is multiplied by the scale before the call, and paged_attention scales again. Leave the "
    "scale to its default."
)
def _scaled_before(q, k, v, config, cache, index):
    if _attends(cache):
        return cache.paged_attention(index, k, v, q * config.head_dim**-0.5, config.n_rep)
    return _other(q, k, v, cache, index)


@_wrong(
    "The result of paged_attention is thrown away, and sdpa runs over this step's keys alone. The "
    "result is the output of attention: use it."
)
def _thrown_away(q, k, v, config, cache, index):
    if _attends(cache):
        cache.paged_attention(index, k, v, q, config.n_rep)
        return sdpa(q, k, v)
    return _other(q, k, v, cache, index)


@_wrong("sdpa runs over the result again. The result is the output of attention, not a query.")
def _attends_again(q, k, v, config, cache, index):
    if _attends(cache):
        return sdpa(cache.paged_attention(index, k, v, q, config.n_rep), k, v)
    return _other(q, k, v, cache, index)


GQA_ATTENTION = Exercise(
    "gqa_attention",
    _cases,
    hints={
        "none": (
            "What happened on Day 6, when there was no cache at all?",
            "Without a cache, this step's keys and values are all that there are: sdpa over them.",
            "if cache is None: out = sdpa(q, k, v)",
        ),
        "norms": (
            "Qwen3 normalises each head of q and k. Is that part of the given code unchanged?",
            "q_norm and k_norm run before RoPE, each on its own heads, and v is not normalised.",
            "Leave the lines above your own as they are: your part begins after apply_rope.",
        ),
        "naive": (
            "NaiveKVCache has append and no paged_attention. What did Day 11 do with it?",
            "append takes this step's k and v, and returns those of all tokens so far: sdpa over "
            "them.",
            "else: out = sdpa(q, *cache.append(index, k, v))",
        ),
        "ask": (
            "How do you test for a method without naming the class?",
            'hasattr(cache, "paged_attention"). Call paged_attention once, and do not call append: '
            "paged_attention writes k and v too.",
            'elif hasattr(cache, "paged_attention"): '
            "out = cache.paged_attention(index, k, v, q, config.n_rep)",
        ),
        "hand": (
            "Compare your call with the signature: layer, k, v, q, n_rep.",
            "The layer is `index`; RoPE rotates k and q, not v; n_rep is config.n_rep. "
            "The scale is left to its default.",
            "cache.paged_attention(index, k, v, q, config.n_rep)",
        ),
        "back": (
            "What does paged_attention return, and what comes after attention?",
            "[1, n_q, query_len, head_dim], as sdpa does. The last line of the function takes it.",
            "out = cache.paged_attention(...), and leave the last line as it is.",
        ),
    },
    target="nanoserve.layers:gqa_attention",
    wrong=(
        _never_calls, _by_class, _by_naive_class, _writes_twice, _appends_after, _calls_always,
        _none_forgotten, _layer_zero, _n_q, _n_kv, _swapped, _q_first, _layer_late, _scaled_before,
        _thrown_away, _attends_again,
    ),
)  # fmt: skip

EXERCISES = (GQA_ATTENTION,)
