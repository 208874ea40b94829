"""Day 7: norm, attention, MLP and two residuals make a block."""

from dataclasses import replace

import torch

from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day01 import SMOLLM2
from nanoserve.layers import gqa_attention, rms_norm, rope_tables, swiglu

CONFIG = replace(
    SMOLLM2, vocab_size=11, hidden_size=20, intermediate_size=28, num_layers=3,
    n_q=6, n_kv=2, head_dim=8, norm_eps=0.05,
)  # fmt: skip
SEQ = 5


def random_layer(seed: int = 0, **changes: float) -> dict[str, torch.Tensor]:
    """A small layer's weights; `changes` multiplies those whose name contains the key."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    q_size, kv_size = CONFIG.n_q * CONFIG.head_dim, CONFIG.n_kv * CONFIG.head_dim
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        layer[f"{name}.weight"] = 1 + 0.5 * noise if "norm" in name else 0.3 * noise
        for part, factor in changes.items():
            if part in name:
                layer[f"{name}.weight"] *= factor
    return layer


def _norm(x, layer, name, eps=None):
    return rms_norm(x, layer[f"{name}.weight"], CONFIG.norm_eps if eps is None else eps)


def _mlp(x, layer, names=("gate", "up", "down")):
    return swiglu(x, *(layer[f"mlp.{name}_proj.weight"] for name in names))


FIRST, SECOND = "input_layernorm", "post_attention_layernorm"


@wrong(
    "The sum is normed (post-norm, as in 2017). Norm only the copy that attention or the MLP "
    "reads.",
    hints="attention",
)
def _post_norm(x, layer, cos, sin, config, cache=None, index=0):
    x = _norm(x + gqa_attention(x, layer, cos, sin, config, cache, index), layer, FIRST)
    return _norm(x + _mlp(x, layer), layer, SECOND)


@wrong(
    "There is no residual: attention and the MLP replace the stream. Add their results to it.",
    hints="attention",
)
def _no_residual(x, layer, cos, sin, config, cache=None, index=0):
    x = gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return _mlp(_norm(x, layer, SECOND), layer)


@wrong("The first residual is missing: add the result of attention to x.", hints="attention")
def _first_residual_missing(x, layer, cos, sin, config, cache=None, index=0):
    x = gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, SECOND), layer)


@wrong("The second residual is missing: add the MLP's result to the stream.", hints="mlp")
def _second_residual_missing(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return _mlp(_norm(x, layer, SECOND), layer)


@wrong(
    "The results are added to the normed copy. The copy is only for reading; add to x itself.",
    hints="attention",
)
def _adds_to_the_copy(x, layer, cos, sin, config, cache=None, index=0):
    x = _norm(x, layer, FIRST)
    x = x + gqa_attention(x, layer, cos, sin, config, cache, index)
    x = _norm(x, layer, SECOND)
    return x + _mlp(x, layer)


@wrong(
    "The result of attention is added to the normed copy. The copy is only for reading; add to x "
    "itself.",
    hints="attention",
)
def _first_adds_to_the_copy(x, layer, cos, sin, config, cache=None, index=0):
    x = _norm(x, layer, FIRST)
    x = x + gqa_attention(x, layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, SECOND), layer)


@wrong(
    "The MLP's result is added to the normed copy. The copy is only for reading; add to x itself.",
    hints="mlp",
)
def _second_adds_to_the_copy(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    x = _norm(x, layer, SECOND)
    return x + _mlp(x, layer)


@wrong("input_layernorm is used twice. Use post_attention_layernorm before the MLP.", hints="mlp")
def _one_norm_twice(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, FIRST), layer)


@wrong(
    "The two norms are swapped. post_attention_layernorm stands after attention, so it is the norm "
    "before the MLP.",
    hints="mlp",
)
def _norms_swapped(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, SECOND), layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, FIRST), layer)


@wrong(
    "The MLP reads the stream without a norm: norm a copy for it, with post_attention_layernorm.",
    hints="mlp",
)
def _mlp_unnormed(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return x + _mlp(x, layer)


@wrong(
    "Attention reads the stream without a norm: norm a copy for it, with input_layernorm.",
    hints="attention",
)
def _attention_unnormed(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(x, layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, SECOND), layer)


@wrong(
    "The MLP reads the stream as it was before attention, so the two run side by side. Some models "
    "do that (GPT-J). Here the MLP comes after attention and reads the sum.",
    hints="both",
)
def _side_by_side(x, layer, cos, sin, config, cache=None, index=0):
    attention = gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return x + attention + _mlp(_norm(x, layer, SECOND), layer)


@wrong(
    "The result of attention is lost at the end: add the MLP's result to the sum, not to the x "
    "that came in.",
    hints="both",
)
def _attention_lost(x, layer, cos, sin, config, cache=None, index=0):
    h = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(h, layer, SECOND), layer)


@wrong("gate_proj and up_proj are swapped in the call: swiglu(x, gate, up, down).", hints="mlp")
def _gate_and_up_swapped(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, SECOND), layer, ("up", "gate", "down"))


@wrong("The norms use a fixed eps. Use the model's own: config.norm_eps.", hints="eps")
def _own_eps(x, layer, cos, sin, config, cache=None, index=0):
    normed = _norm(x, layer, FIRST, 1e-6)
    x = x + gqa_attention(normed, layer, cos, sin, config, cache, index)
    return x + _mlp(_norm(x, layer, SECOND, 1e-6), layer)


@wrong(
    "The cache is not passed on: gqa_attention takes it as its last two arguments, `cache, index`.",
    hints="cache",
)
def _cache_forgotten(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config)
    return x + _mlp(_norm(x, layer, SECOND), layer)


@wrong(
    "The cache is passed on without `index`, so every layer would write into layer 0's place.",
    hints="cache",
)
def _index_forgotten(x, layer, cos, sin, config, cache=None, index=0):
    x = x + gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache)
    return x + _mlp(_norm(x, layer, SECOND), layer)


@wrong("`+=` changes the caller's tensor. Write x = x + ..., which makes a new one.", hints="copy")
def _in_place(x, layer, cos, sin, config, cache=None, index=0):
    x += gqa_attention(_norm(x, layer, FIRST), layer, cos, sin, config, cache, index)
    x += _mlp(_norm(x, layer, SECOND), layer)
    return x


class _Recorder:
    """A cache that stores only the numbers of the layers that wrote."""

    def __init__(self) -> None:
        self.seq_len, self.layers = 0, []

    def append(self, layer, k, v):
        self.layers.append(layer)
        return k, v


def _with_a_cache(answer, *args):
    """The numbers of the layers that wrote: with index 2, and with index left out."""
    cache = _Recorder()
    answer(*args, cache, 2)
    answer(*args, cache)
    return cache.layers


def _cases() -> list[Case]:
    def case(what, kind, batch=1, seq=SEQ, call=None, size=1.0, **changes):
        generator = torch.Generator().manual_seed(len(what))
        x = size * torch.randn(batch, seq, CONFIG.hidden_size, generator=generator)
        args = (x, random_layer(1, **changes), *rope_tables(CONFIG, seq), CONFIG)
        return Case(what, args, kind=kind, call=call, compare=close(1e-4, 1e-4))

    return [
        case("attention adds nothing (o_proj is 0)", "mlp", o_proj=0.0),
        case("the MLP adds nothing (down_proj is 0)", "attention", down_proj=0.0),
        case("both add, a batch of 2, 5 tokens", "both", batch=2),
        case("a stream 30 times as large", "both", size=30.0),
        case("which layers write to a cache", "cache", call=_with_a_cache),
    ]


EXERCISES = (
    Exercise(
        "block",
        _cases,
        hints={
            "mlp": (
                "Take the case in which attention adds nothing. The MLP then reads the stream as "
                "it came in. Which norm stands before the MLP, and to what is its result added?",
                "x + swiglu(a normed copy of x), and the norm before the MLP is called "
                "post_attention_layernorm.",
                'normed = rms_norm(x, layer["post_attention_layernorm.weight"], config.norm_eps), '
                "then x + swiglu(normed, gate, up, down).",
            ),
            "attention": (
                "Take the case in which the MLP adds nothing. Follow the stream through the left "
                "half of the picture.",
                "x + attention(a normed copy of x); the stream itself is not normed.",
                'normed = rms_norm(x, layer["input_layernorm.weight"], config.norm_eps), then '
                "x = x + gqa_attention(normed, layer, cos, sin, config, cache, index).",
            ),
            "both": (
                "Each half by itself is right. Which x does the second half read, and to which x "
                "does it add?",
                "The MLP reads the sum that the first half made, and its result is added to that "
                "same sum.",
                "Call the first sum x again (x = x + ...), and let the last two lines use that x.",
            ),
            "cache": (
                "Which of the block's arguments does your code not use yet?",
                "gqa_attention takes `cache` and `index` as its last two arguments. Nothing else "
                "in a block needs them.",
                "gqa_attention(normed, layer, cos, sin, config, cache, index)",
            ),
            "eps": (
                "A norm has two settings: its weight, and a small number under the root. Where "
                "does the small number come from?",
                "Every model has its own, so it stands in the config.",
                'rms_norm(x, layer["input_layernorm.weight"], config.norm_eps)',
            ),
            "copy": (
                "The caller still needs its x. Is it the same after the call?",
                "x += y changes the tensor that x names, and the caller holds that tensor too.",
                "x = x + gqa_attention(...), and at the end return x + swiglu(...)",
            ),
        },
        target="nanoserve.layers:block",
        wrong=(
            _post_norm, _no_residual, _first_residual_missing, _second_residual_missing,
            _adds_to_the_copy, _first_adds_to_the_copy, _second_adds_to_the_copy, _one_norm_twice,
            _norms_swapped, _mlp_unnormed, _attention_unnormed,
            _side_by_side, _attention_lost, _gate_and_up_swapped, _own_eps, _cache_forgotten,
            _index_forgotten, _in_place,
        ),
    ),
)  # fmt: skip
