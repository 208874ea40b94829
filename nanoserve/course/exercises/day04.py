"""Day 4: the norm, the quarter turn, the frequencies. Week 1's review."""

import math
from dataclasses import replace

import torch

from nanoserve.config import Llama3Scaling
from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.exercises.day00 import IN_PLACE
from nanoserve.course.exercises.day01 import SMOLLM2
from nanoserve.course.plots import COLOURS, figure, label_line
from nanoserve.layers import plain_frequencies, rms_norm, rope_frequencies, rotate_half

# rms_norm


def _norm_cases() -> list[Case]:
    """Weight, axis, eps and dtype have cases of their own: no mistake hides another."""
    random = torch.Generator().manual_seed(4)
    x, weight = torch.randn(2, 5, 12, generator=random), torch.randn(12, generator=random)
    ones = torch.ones(8)

    def case(what, x, weight, eps, kind, compare=None) -> Case:
        return Case(what, (x, weight, eps), kind=kind, compare=compare or close())

    half = close(atol=1e-2, rtol=0)
    return [
        case("one vector, (3, 4), weight (1, 1), eps 0", torch.tensor([[3.0, 4.0]]), torch.ones(2),
             0.0, "formula"),
        case("a vector of ones, weight 1 to 6, eps 0", torch.ones(1, 6), torch.arange(1.0, 7.0),
             0.0, "weight"),
        case("2 texts of 5 tokens of 12 numbers, weight 1", x, torch.ones(12), 1e-5, "axis"),
        case("the same with another weight", x, weight, 1e-5, "axis"),
        case("(3, 4), eps 0.5", torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.5, "eps"),
        case("a vector of zeros, eps 1e-5", torch.zeros(1, 8), ones, 1e-5, "eps"),
        case("float16, every number 2", torch.full((5, 8), 2.0).half(), ones.half(), 1e-5, "dtype",
             half),
        case("float16, every number 300", torch.full((5, 8), 300.0).half(), ones.half(), 1e-5,
             "square", half),
    ]  # fmt: skip


_NORM_HINTS = {
    "formula": (
        "Three steps: square and average, take the root, divide. Then the weight.",
        "For (3, 4) the mean of the squares is 12.5, so each number is divided by 3.5355.",
        "`x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight`; rsqrt is one over "
        "the square root.",
    ),
    "weight": (
        "Here the norm changes nothing, so the result is the weight. What does yours do with it?",
        "After the division, number i of each vector is multiplied by weight[i].",
        "`h * weight`: the weight [n] fits the last axis of any x.",
    ),
    "axis": (
        "Each token is normed by itself. Over which axis do its numbers lie?",
        "The mean goes over the last axis alone. Keep that axis, so that it divides row by row.",
        "`mean(-1, keepdim=True)` turns [2, 5, 12] into [2, 5, 1].",
    ),
    "eps": (
        "Where does eps stand in the formula: under the root, or beside it?",
        "It is added to the mean of the squares, before the root.",
        "`torch.rsqrt(mean + eps)`",
    ),
    "dtype": (
        "Which dtype goes in, and which comes out of yours?",
        "The work is done in float32, and the result returns to the dtype of x.",
        "End with `h.to(x.dtype) * weight`.",
    ),
    "square": (
        "The square of 300 is 90,000, and float16 ends at 65,504.",
        "Square and average in float32, then return to the type that came in.",
        "Begin with `h = x.float()`, work on h, and end with `h.to(x.dtype) * weight`.",
    ),
}


def _scaled(x, weight, eps, mean):
    return x / (mean + eps).sqrt() * weight


@wrong("That is LayerNorm: it subtracts the mean first. RMSNorm only divides.")
def _layer_norm(x, weight, eps):
    return rms_norm(x - x.mean(-1, keepdim=True), weight, eps)


@wrong("The root is missing: this divides by the mean of the squares itself.")
def _no_root(x, weight, eps):
    h = x.float()
    return (h / (h.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@wrong("The standard deviation measures from the mean. The root mean square measures from 0.")
def _deviation(x, weight, eps):
    h = x.float()
    return (h / (h.var(-1, keepdim=True, correction=0) + eps).sqrt()).to(x.dtype) * weight


@wrong("The weight is added. As the last step, multiply number i by weight[i].")
def _weight_added(x, weight, eps):
    return rms_norm(x, torch.ones_like(weight), eps) + weight


@wrong("The vector is multiplied by its root mean square. Divide by it: rsqrt, not sqrt.")
def _multiplied_by(x, weight, eps):
    h = x.float()
    return (h * (h.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


@wrong("The squares are summed. RMS needs their mean: divide the sum by the number of squares.")
def _sum(x, weight, eps):
    return _scaled(x.float(), weight, eps, x.float().square().sum(-1, keepdim=True)).to(x.dtype)


@wrong("One mean is taken over everything. Each token has a mean of its own.")
def _over_all(x, weight, eps):
    return _scaled(x.float(), weight, eps, x.float().square().mean()).to(x.dtype)


@wrong(
    "The mean is taken over the tokens of the text. Take it over the numbers of a token: axis -1."
)
def _over_tokens(x, weight, eps):
    mean = x.float().square().mean(-2, keepdim=True)
    return _scaled(x.float(), weight, eps, mean).to(x.dtype)


@wrong("The weight is forgotten: after the division, multiply number i by weight[i].")
def _no_weight(x, weight, eps):
    return rms_norm(x, torch.ones_like(weight), eps)


@wrong("1 is added to the weight, as Gemma's norm does. A Llama's weight is used as it is.")
def _one_plus(x, weight, eps):
    return rms_norm(x, 1 + weight, eps)


@wrong("eps is added after the root. Add it under the root, to the mean of the squares.")
def _eps_outside(x, weight, eps):
    h = x.float()
    return (h / (h.square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight


@wrong("eps is left out, so a vector of zeros is divided by zero.")
def _no_eps(x, weight, eps):
    return rms_norm(x, weight, 0.0)


@wrong("The squares are taken in the dtype of x, and in float16 300 squared is infinite.")
def _in_half(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@wrong("The result stays in float32. Return it in the dtype of x.")
def _stays_wide(x, weight, eps):
    return rms_norm(x.float(), weight.float(), eps)


@wrong("The result is right, but x was changed on the way.", hints=IN_PLACE)
def _in_place_norm(x, weight, eps):
    x.copy_(rms_norm(x, torch.ones_like(weight), eps))
    return x * weight


@wrong(
    "The mean has lost its last axis, so it does not fit the vectors: keep the axis, with size 1.",
    hints="axis",
)
def _no_keepdim(x, weight, eps):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1) + eps)).to(x.dtype) * weight


RMS_NORM = Exercise(
    "rms_norm",
    _norm_cases,
    _NORM_HINTS,
    "nanoserve.layers:rms_norm",
    wrong=(
        _layer_norm, _no_root, _sum, _over_all, _over_tokens, _no_weight, _one_plus,
        _eps_outside, _no_eps, _in_half, _stays_wide, _deviation, _weight_added, _multiplied_by,
        _in_place_norm, _no_keepdim,
    ),
)  # fmt: skip

# rotate_half


def _turn_cases() -> list[Case]:
    random = torch.Generator().manual_seed(4)
    return [
        Case("the numbers 1 to 6", (torch.arange(1.0, 7.0),), kind="pair"),
        Case("6 heads, 5 tokens, dim 8", (torch.randn(6, 5, 8, generator=random),), kind="axis"),
        Case("batch 2, dim 14", (torch.randn(2, 6, 5, 14, generator=random),), kind="axis"),
        Case("dim 2: one pair", (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),), kind="pair"),
    ]


_TURN_HINTS = {
    "pair": (
        "Write down what becomes of the pair (1, 0): it points right, and after the turn up.",
        "Pair i is (x[i], x[i + d/2]), so the new first half is minus the old second one.",
        "`first, second = x.chunk(2, dim=-1)`, then `torch.cat([-second, first], dim=-1)`.",
    ),
    "axis": (
        "Only one axis is cut in two, however many there are. Which one?",
        "The last: it holds the numbers of one head. Axes before it are tokens, heads, texts.",
        "Both `chunk` and `cat` take `dim=-1`.",
    ),
}


@wrong("This pairs neighbours, (0, 1), (2, 3) and so on. Here pair i is (i, i + d/2).")
def _neighbours(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


@wrong("The turn goes the other way: (a, b) becomes (-b, a), and this is (b, -a).")
def _clockwise(x):
    return -rotate_half(x)


@wrong("The halves change places, but nothing changes sign: that is a mirror, not a turn.")
def _mirror(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)


@wrong("The sign is right and the halves have not moved: (a, b) has become (-a, b).")
def _not_moved(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


@wrong("Both halves are negated: that is a half turn, 180 degrees.")
def _half_turn(x):
    return -x


@wrong("Both are negated as they change places: (a, b) becomes (-b, a), with one minus sign.")
def _both_negated(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, -first], dim=-1)


@wrong("The numbers are put in reverse order, so i meets d - 1 - i. Its partner is i + d/2.")
def _reversed(x):
    half = x.shape[-1] // 2
    return torch.cat([-x.flip(-1)[..., :half], x.flip(-1)[..., half:]], dim=-1)


@wrong("The first axis is cut in two. The numbers of one head lie along the last, dim=-1.")
def _first_axis(x):
    first, second = x.chunk(2, dim=0)
    return torch.cat([-second, first], dim=0)


@wrong("The result is right, but it was written into x.", hints=IN_PLACE)
def _in_place_turn(x):
    x.copy_(rotate_half(x))
    return x


@wrong(
    "The first half was overwritten before it was read: a slice is a view, and no copy.",
    hints=IN_PLACE,
)
def _overwritten(x):
    half = x.shape[-1] // 2
    first = x[..., :half]
    x[..., :half] = -x[..., half:]
    x[..., half:] = first
    return x


ROTATE_HALF = Exercise(
    "rotate_half",
    _turn_cases,
    _TURN_HINTS,
    "nanoserve.layers:rotate_half",
    wrong=(
        _neighbours, _clockwise, _mirror, _not_moved, _half_turn, _both_negated, _reversed,
        _first_axis, _in_place_turn, _overwritten,
    ),
)  # fmt: skip

# plain_frequencies and rope_frequencies

PLAIN = replace(SMOLLM2, hidden_size=48, n_q=6, n_kv=2, head_dim=8, rope_theta=10_000.0)
LLAMA3 = replace(
    SMOLLM2,
    context=131_072,
    rope_theta=500_000.0,
    rope_scaling=Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8_192
    ),
)
SHORT = replace(
    LLAMA3, context=1_000, head_dim=20, rope_theta=10_000.0,
    rope_scaling=Llama3Scaling(5.0, 2.0, 6.0, 100),
)  # fmt: skip


def _frequency_cases(*cases) -> list[Case]:
    agree = close(atol=1e-12, rtol=1e-5)
    return [
        Case(what, (config,), kind=kind, compare=agree, inputs=_fields(config))
        for what, config, kind in cases
    ]


def _fields(config) -> str:
    """The fields of a config that the frequencies depend on, as a row shows them."""
    shown, scaling = f"head_dim {config.head_dim}, rope_theta {config.rope_theta:,.0f}", ""
    if config.rope_scaling is not None:
        s = config.rope_scaling
        scaling = (
            f"factor {s.factor:g}, low_freq_factor {s.low_freq_factor:g}, high_freq_factor "
            f"{s.high_freq_factor:g}, original_context {s.original_context:,}"
        )
    return f"{shown}, rope_scaling: {scaling or 'None'}"


def _plain_cases() -> list[Case]:
    return _frequency_cases(
        ("head_dim 8, theta 10,000", PLAIN, "plain"),
        ("6 heads of 14 in a hidden size of 48", replace(PLAIN, head_dim=14), "width"),
        ("SmolLM2: head_dim 64, theta 100,000", SMOLLM2, "plain"),
        ("a config with rope_scaling: it changes nothing yet", SHORT, "unscaled"),
    )


def _scaled_cases() -> list[Case]:
    return _frequency_cases(
        ("no scaling, head_dim 8", PLAIN, "plain"),
        ("Llama 3.2: factor 32 over 8,192 tokens", LLAMA3, "scaled"),
        ("factor 5 over 100 tokens, between 2 and 6 turns", SHORT, "scaled"),
    )


_PLAIN_HINTS = {
    "plain": (
        "With head_dim 8 and theta 10,000 the four pairs turn by 1, 0.1, 0.01 and 0.001 radians "
        "per token. Which exponents do that?",
        "Pair i has theta ** (-2i / head_dim), for i from 0 to head_dim / 2 - 1.",
        "`exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim`, "
        "then `1.0 / config.rope_theta**exponents`.",
    ),
    "width": (
        "How many pairs does a head have here? The config of this case has head_dim = 14.",
        "head_dim is a field of the config: it need not be hidden_size / n_q, which is 8 here.",
        "Use `config.head_dim` in both places: where the pairs are counted and in the exponent.",
    ),
    "unscaled": (
        "Two fields of the config are enough. Does your function use a third?",
        "rope_scaling is for the next function. This one uses head_dim and rope_theta alone.",
        "Leave `config.rope_scaling` out: theta ** (-2i / head_dim) is all.",
    ),
}

_SCALED_HINTS = {
    "plain": (
        "What does your function return where config.rope_scaling is None?",
        "Without scaling nothing changes: the plain frequencies.",
        "`frequencies = plain_frequencies(config)`, then "
        "`if config.rope_scaling is None: return frequencies`.",
    ),
    "scaled": (
        "Count how often each pair turns within original_context tokens. That number decides.",
        "turns = original_context * frequency / (2 pi). From `high` turns up the share kept is 1, "
        "down from `low` turns it is 0, and between the two it is a straight line.",
        "`keep = ((turns - low) / (high - low)).clamp(0, 1)`, then "
        "`keep * frequencies + (1 - keep) * frequencies / factor`.",
    ),
}


@wrong("The exponent lacks its 2: pair i needs theta ** (-2i / head_dim).")
def _no_two(config):
    return config.rope_theta ** (-torch.arange(config.head_dim // 2) / config.head_dim)


@wrong("The exponent lacks its minus sign: later pairs must turn more slowly, not faster.")
def _no_minus(config):
    return 1 / plain_frequencies(config)


@wrong(
    "The width of a head is taken as hidden_size / n_q. Use config.head_dim, which can be "
    "another number."
)
def _derived_head(config):
    return plain_frequencies(replace(config, head_dim=config.hidden_size // config.n_q))


@wrong("There is a frequency for every number. Each pair has one: head_dim / 2 frequencies.")
def _twice(config):
    return torch.cat([plain_frequencies(config)] * 2)


@wrong("These are the wavelengths, in tokens per full turn. Return radians per token.")
def _wavelengths(config):
    return 2 * math.pi / plain_frequencies(config)


@wrong("The pairs are counted from 1. Pair 0 has exponent 0: it turns by 1 radian per token.")
def _from_one(config):
    exponents = torch.arange(2, config.head_dim + 2, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**-exponents


@wrong("theta is always 10,000 here. Use config.rope_theta, which differs from model to model.")
def _fixed_theta(config):
    return plain_frequencies(replace(config, rope_theta=10_000.0))


@wrong("rope_scaling is applied already. These are the plain frequencies: leave scaling out.")
def _scaled_already(config):
    return rope_frequencies(config)


@wrong("The frequencies are float64. The tables are float32: make the exponents in float32.")
def _double(config):
    return plain_frequencies(config).double()


PLAIN_FREQUENCIES = Exercise(
    "plain_frequencies",
    _plain_cases,
    _PLAIN_HINTS,
    "nanoserve.layers:plain_frequencies",
    wrong=(
        _no_two, _no_minus, _derived_head, _twice, _wavelengths, _from_one, _fixed_theta,
        _scaled_already, _double,
    ),
    was=("rope_frequencies",),  # it made both until they were taken apart
)  # fmt: skip


def _keep(config, frequencies, circle=2 * math.pi):
    scaling = config.rope_scaling
    turns = scaling.original_context * frequencies / circle
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _blended(config, keep, frequencies):
    return keep * frequencies + (1 - keep) * frequencies / config.rope_scaling.factor


@wrong("rope_scaling is ignored: these are the frequencies without it.")
def _unscaled(config):
    return plain_frequencies(config)


@wrong("Without scaling, config.rope_scaling is None: return the plain frequencies then.")
def _needs_scaling(config):
    plain = plain_frequencies(config)
    return _blended(config, _keep(config, plain), plain)


@wrong("Every frequency is divided by the factor. Keep the fast frequencies as they are.")
def _all_slowed(config):
    scaling = config.rope_scaling
    return plain_frequencies(config) / (scaling.factor if scaling else 1.0)


@wrong("The two ends are swapped: here the fast pairs are slowed and the slow pairs kept.")
def _ends_swapped(config):
    plain = plain_frequencies(config)
    if config.rope_scaling is None:
        return plain
    return _blended(config, 1 - _keep(config, plain), plain)


@wrong("The middle is missing: pairs between `low` and `high` turns need a blend of both.")
def _no_blend(config):
    plain = plain_frequencies(config)
    if config.rope_scaling is None:
        return plain
    return _blended(config, (_keep(config, plain) > 0).float(), plain)


@wrong("The share is not held between 0 and 1: past the two ends it goes on as a straight line.")
def _no_clamp(config):
    plain, scaling = plain_frequencies(config), config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return _blended(config, (turns - low) / (high - low), plain)


@wrong("The slow frequencies are multiplied by the factor. Slower means divided.")
def _multiplied(config):
    plain = plain_frequencies(config)
    if config.rope_scaling is None:
        return plain
    keep = _keep(config, plain)
    return keep * plain + (1 - keep) * plain * config.rope_scaling.factor


@wrong("The number of turns lacks 2 pi: a full turn is 2 pi radians, not 1.")
def _no_circle(config):
    plain = plain_frequencies(config)
    if config.rope_scaling is None:
        return plain
    return _blended(config, _keep(config, plain, circle=1.0), plain)


@wrong(
    "Turns are counted within the new context. Count them within original_context, the context of "
    "the first training."
)
def _new_context(config):
    if config.rope_scaling is None:
        return plain_frequencies(config)
    scaling = replace(config.rope_scaling, original_context=config.context)
    return rope_frequencies(replace(config, rope_scaling=scaling))


@wrong("The wavelengths are blended. Blend the two frequencies.")
def _blended_waves(config):
    plain = plain_frequencies(config)
    if config.rope_scaling is None:
        return plain
    keep = _keep(config, plain)
    return 1 / (keep / plain + (1 - keep) * config.rope_scaling.factor / plain)


ROPE_FREQUENCIES = Exercise(
    "rope_frequencies",
    _scaled_cases,
    _SCALED_HINTS,
    "nanoserve.layers:rope_frequencies",
    wrong=(
        _unscaled, _needs_scaling, _all_slowed, _ends_swapped, _no_blend, _no_clamp, _multiplied,
        _no_circle, _new_context, _blended_waves,
    ),
    optional=True,
)  # fmt: skip

EXERCISES = (RMS_NORM, ROTATE_HALF, PLAIN_FREQUENCIES, ROPE_FREQUENCIES)


def _draw_turn(position: int, pair: int):
    """One pair of SmolLM2's heads: where it points, and the cosine that its table holds."""
    frequency = float(rope_frequencies(SMOLLM2)[pair])
    angle, ink = position * frequency, COLOURS["engine"]
    fig, (dial, wave) = figure(height=3.3, panels=2)
    around = [2 * math.pi * i / 200 for i in range(201)]
    dial.plot([math.cos(a) for a in around], [math.sin(a) for a in around], color=COLOURS["grid"])
    for earlier in range(max(0, position - 8), position):
        a = earlier * frequency
        fade = 0.1 + 0.4 * (earlier - position + 8) / 8
        dial.plot([0, math.cos(a)], [0, math.sin(a)], color=ink, linewidth=1, alpha=fade)
    tip = (math.cos(angle), math.sin(angle))
    dial.annotate("", tip, (0, 0), arrowprops={"arrowstyle": "-|>", "color": ink, "linewidth": 2.4})
    dial.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
    dial.set_title(f"pair {pair} at position {position}")
    dial.set_axis_off()
    positions = [i / 4 for i in range(4 * 128 + 1)]
    wave.plot(positions, [math.cos(p * frequency) for p in positions], color=ink, linewidth=1.2)
    wave.plot([position], [tip[0]], marker="o", markersize=9, color=ink)
    label_line(wave, position, tip[0], f"{tip[0]:.2f}", ink, "left" if position > 100 else "right")
    wave.set(xlabel="position", ylabel="cosine", ylim=(-1.25, 1.25))
    wave.set_title(f"a full turn in {2 * math.pi / frequency:,.0f} tokens")
    return fig


WIDGETS = {
    "turn": lambda: widgets.figure_widget(
        _draw_turn, position=widgets.slider(0, 128, 20), pair=widgets.slider(0, 31, 6)
    )
}

REVIEW = (
    (
        "You have no oracle, and your engine writes good English. What do you know?",
        "Nearly nothing. With a rotation the wrong way, q and k in another order, or another "
        "activation, a model still writes English. Only a comparison with something independent "
        "shows the mistake (Day 1).",
    ),
    (
        "Without a cache, why does a token after 512 tokens cost so much more than one after 32?",
        "The whole text goes through the model again for each new token: sixteen times the "
        "positions, and a little more for the pairs of attention (Day 1).",
    ),
    (
        "Suppose that a short text takes more time than the count of operations predicts. Where "
        "does the time go?",
        "Mostly into reading the weights: all 134.5 million are read from memory, however few "
        "positions there are (Day 1).",
    ),
    (
        "Two of a GGUF file's weights need their rows put back in order. Which, and why is there "
        "no error when this is forgotten?",
        "q and k: GGUF stores the rows of a RoPE pair side by side. Name and shape stay right, so "
        "every product still works; only a comparison of the values shows it (Days 2 and 4).",
    ),
    (
        "Why does a streaming detokeniser sometimes return no text for a token?",
        "A token is a run of bytes, and a character may need bytes of several tokens. Half a "
        "character is held back until the rest comes (Day 3).",
    ),
    (
        "A user types <|im_end|>. What does the tokenizer make of it, alone and in a chat?",
        "Alone, `encode` makes plain characters of it. In a chat the template puts the user's "
        "words into one string, and all of that is parsed: the message ends there. A public "
        "service has to strip such marks first (Day 3).",
    ),
    (
        "A query stands at position 9 and a key at 6; in another text they stand at 509 and 506. "
        "Does attention see a difference?",
        "No: both are three apart, and the product of a turned query and a turned key depends "
        "on the distance alone (Day 4).",
    ),
    (
        "The model runs in bfloat16. Which part of RoPE must not, and what happens if it does?",
        "Positions and angles. Above 8,192 a bfloat16 counts in steps of 64, so 64 neighbours "
        "would stand at one position (Day 4).",
    ),
)
