"""Day 10: temperature, top-k, top-p and min-p."""

from collections.abc import Callable

import torch

from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, close, wrong
from nanoserve.course.plots import COLOURS, figure, style
from nanoserve.sampling import (
    SamplingParams,
    distribution,
    mask_min_p,
    mask_top_k,
    mask_top_p,
)

INF = torch.inf
SIX = torch.tensor([1.5, -0.5, 3.0, 0.25, 2.25, -2.0])
ROWS = torch.tensor([[1.5, -0.5, 3.0, 0.25, -2.0], [-1.0, 4.0, 0.5, 3.5, 1.25]])  # [2, vocab 5]
HOLED = torch.tensor([0.5, -INF, 2.0, 1.0, -INF, -0.75, 0.0])


# Temperature -------------------------------------------------------------------------------------


def _probabilities(answer: Callable, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """What is compared: the probabilities. A shift of all logits makes no difference to them."""
    return answer(logits, temperature).softmax(dim=-1)


@wrong(
    "The logits are multiplied by the temperature. Divide: a low temperature spreads them apart."
)
def _multiplied(logits, temperature):
    return logits * temperature


@wrong(
    "The probabilities are divided, after softmax. What comes out is read as logits, and those are "
    "nearly flat: divide the logits."
)
def _after_softmax(logits, temperature):
    return logits.softmax(dim=-1) / temperature


@wrong("This returns probabilities. Return logits: masks and softmax come after it.")
def _softmaxed(logits, temperature):
    return (logits / temperature).softmax(dim=-1)


@wrong(
    "At a tiny temperature the quotient overflows to inf, and inf - inf is NaN. Subtract the "
    "largest logit first: the best becomes 0, all others negative, and nothing overflows."
)
def _overflows(logits, temperature):
    return logits / temperature


@wrong(
    "The largest logit of the whole batch is subtracted. At a tiny temperature that sends other "
    "rows to -inf altogether: each row has its own maximum."
)
def _one_maximum(logits, temperature):
    return (logits - logits.max()) / temperature


@wrong("Logits are not probabilities: they are divided, not raised to the power 1 / temperature.")
def _power(logits, temperature):
    return logits ** (1 / temperature)


@wrong(
    "The largest logit is clamped away: logits above 0 all count as 0 then. Subtract it instead."
)
def _clamped(logits, temperature):
    return logits.clamp(max=0) / temperature


def _temperature_cases() -> list[Case]:
    near = {"compare": close(1e-6, 1e-5), "call": _probabilities}
    far = torch.tensor([[999.0, 1000.0, 990.0, 1000.0], [1.0, 3.0, 2.0, 0.0]])
    return [
        Case("six logits at 0.5", (SIX, 0.5), kind="divide", **near),
        Case("six logits at 2", (SIX, 2.0), kind="divide", **near),
        Case("temperature 1 changes nothing", (SIX, 1.0), kind="divide", **near),
        Case("two rows, some logits -inf", (torch.stack([HOLED, HOLED.flip(0)]), 0.8),
             kind="divide", **near),
        Case("two rows at 1e-37, logits about 1,000 and 1", (far, 1e-37), kind="tiny", **near),
    ]  # fmt: skip


# Top-k -------------------------------------------------------------------------------------------


@wrong("Ties with the last one kept are cut. They are as good as it is: keep all of them.")
def _k_cuts_ties(logits, top_k):
    if top_k == 0:
        return logits
    best = logits.topk(min(top_k, logits.shape[-1])).indices
    return torch.full_like(logits, -INF).scatter(-1, best, logits.gather(-1, best))


@wrong("The k-th best goes too: remove what is smaller than it, not what equals it.")
def _k_strict(logits, top_k):
    if top_k == 0:
        return logits
    last = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits <= last, -INF)


@wrong("A k larger than the vocabulary fails in topk. It asks for nothing impossible: keep all.")
def _k_too_large(logits, top_k):
    if top_k == 0:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -INF)


@wrong("top_k=0 means that top-k is off, and all logits stay.")
def _k_zero(logits, top_k):
    return mask_top_k(logits, max(top_k, 1))


@wrong("What is removed is set to 0. That is a respectable logit: set it to -inf.")
def _k_to_zero(logits, top_k):
    masked = mask_top_k(logits, top_k)
    return torch.where((masked == -INF) & (logits > -INF), 0.0, masked)


@wrong("The k smallest are kept. topk gives the largest first; sort puts the smallest first.")
def _k_smallest(logits, top_k):
    return -mask_top_k(-logits, top_k) if top_k == 0 else logits.masked_fill(
        logits > logits.topk(min(top_k, logits.shape[-1]), largest=False).values[..., -1:], -INF
    )  # fmt: skip


@wrong("One threshold serves the whole batch. Each row has its own k-th best.")
def _k_one_threshold(logits, top_k):
    if top_k == 0:
        return logits
    last = logits.flatten().topk(min(top_k, logits.shape[-1])).values[-1]
    return logits.masked_fill(logits < last, -INF)


def _top_k_cases() -> list[Case]:
    tied = torch.tensor([1.0, 2.0, 3.0, 2.0, 0.5, 2.0, -1.0])
    return [
        Case("six logits, k = 2", (SIX, 2), kind="keep"),
        Case("two rows, k = 3", (ROWS, 3), kind="rows"),
        Case("three that tie for second place, k = 2", (tied, 2), kind="ties"),
        Case("some logits -inf, k = 4", (HOLED, 4), kind="keep"),
        Case("k = 0 is off", (SIX, 0), kind="edges"),
        Case("k = 1,000 of six", (SIX, 1_000), kind="edges"),
    ]


# Top-p -------------------------------------------------------------------------------------------


def _kept(answer: Callable, logits: torch.Tensor, top_p: float) -> list[int]:
    return answer(logits, top_p).isfinite().nonzero().flatten().tolist()


def _how_many(answer: Callable, logits: torch.Tensor, top_p: float) -> int:
    """Of equal tokens any may go; how many stay is fixed."""
    return int(answer(logits, top_p).isfinite().sum())


def _top_p_by(logits, before: Callable, removed: float = -INF) -> torch.Tensor:
    """Keep where before(p, running sum with it, running sum without it), sorted, best first."""
    descending, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = descending.softmax(dim=-1)
    sums = probs.cumsum(dim=-1)
    keep = before(probs, sums, sums - probs)
    return logits.masked_fill(~keep.scatter(-1, ids, keep), removed)


def _first(keep: torch.Tensor) -> torch.Tensor:
    keep = keep.clone()
    keep[..., 0] = True
    return keep


@wrong(
    "The token that crosses the line is dropped, so what is left holds less than top_p. It stays: "
    "look at the sum before a token, not at the sum with it."
)
def _p_drops_the_crossing(logits, top_p):
    return _top_p_by(logits, lambda p, with_it, without: _first(with_it <= top_p))


@wrong("One token too many: the line was crossed before it already.")
def _p_one_more(logits, top_p):
    def keep(p, with_it, without):
        inside = without < top_p - 1e-6
        return torch.cat([torch.ones_like(inside[..., :1]), inside[..., :-1]], dim=-1)

    return _top_p_by(logits, keep)


@wrong(
    "When the sum before a token is top_p exactly, the goal is reached and the token must go: "
    "keep while the sum before it is less than top_p."
)
def _p_at_the_line(logits, top_p):
    return _top_p_by(logits, lambda p, with_it, without: _first(without <= top_p))


@wrong(
    "The mask is in sorted order, the logits are not: it removes whatever stands at those places. "
    "Bring it back with the ids that sort returned."
)
def _p_not_sorted_back(logits, top_p):
    probs = logits.sort(dim=-1, descending=True).values.softmax(dim=-1)
    keep = _first(probs.cumsum(dim=-1) - probs < top_p)
    return logits.masked_fill(~keep, -INF)


@wrong("At top_p = 0 nothing is left to draw. The best token always stays.")
def _p_empty(logits, top_p):
    return _top_p_by(logits, lambda p, with_it, without: without < top_p)


@wrong("What is removed is set to 0. That is a respectable logit: set it to -inf.")
def _p_to_zero(logits, top_p):
    masked = mask_top_p(logits, top_p)
    return torch.where((masked == -INF) & (logits > -INF), 0.0, masked)


@wrong(
    "Here the improbable tokens are kept: the sum runs from the smallest up, and it keeps those."
)
def _p_keeps_the_tail(logits, top_p):
    ascending, ids = logits.sort(dim=-1)
    keep = ascending.softmax(dim=-1).cumsum(dim=-1) < top_p
    return logits.masked_fill(~keep.scatter(-1, ids, keep), -INF)


@wrong("Logits were added up. top_p is about probabilities: softmax first.")
def _p_without_softmax(logits, top_p):
    def keep(p, with_it, without):
        values = logits.sort(dim=-1, descending=True).values
        return _first(values.cumsum(dim=-1) - values < top_p)

    return _top_p_by(logits, keep)


@wrong(
    "All that tie with the last one stay, so equal tokens hold far more than top_p. Cut by place, "
    "not by value."
)
def _p_by_value(logits, top_p):
    masked = mask_top_p(logits, top_p)
    last = masked.masked_fill(masked == -INF, INF).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < last, -INF)


@wrong("This returns probabilities. A mask returns the logits, with -inf for what goes.")
def _p_probabilities(logits, top_p):
    return mask_top_p(logits, top_p).softmax(dim=-1)


def _top_p_cases() -> list[Case]:
    three = torch.tensor([0.41, 0.5, 0.09]).log()
    return [
        Case("0.41, 0.5 and 0.09 at 0.9: which stay", (three, 0.9), kind="line", call=_kept),
        Case("six logits at 0.8", (SIX, 0.8), kind="order"),
        Case("two rows at 0.7", (ROWS, 0.7), kind="order"),
        Case("some logits -inf, at 0.75", (HOLED, 0.75), kind="order"),
        Case("0.41, 0.5 and 0.09 at 0.49: which stay", (three, 0.49), kind="line", call=_kept),
        Case("eight equal tokens at 0.5: how many stay", (torch.zeros(8), 0.5), kind="line",
             call=_how_many),
        Case("top_p = 0 keeps the best", (SIX, 0.0), kind="edges"),
    ]  # fmt: skip


# Min-p -------------------------------------------------------------------------------------------


def _min_p_by(logits, go: Callable, removed: float = -INF) -> torch.Tensor:
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(go(probs, probs.amax(dim=-1, keepdim=True)), removed)


@wrong(
    "Each probability is compared with min_p itself. The bar is relative: min_p times the "
    "probability of the best token."
)
def _m_relative_to_one(logits, min_p):
    return _min_p_by(logits, lambda p, best: p < min_p)


@wrong(
    "What stands exactly at the bar is removed; at min_p = 1 that is the best token itself. "
    "Remove what is below."
)
def _m_strict(logits, min_p):
    return _min_p_by(logits, lambda p, best: p <= min_p * best)


@wrong("min_p is subtracted from the best probability. It is a factor: min_p times the best.")
def _m_subtracted(logits, min_p):
    return _min_p_by(logits, lambda p, best: p < best - min_p)


@wrong("Logits were compared. min_p is about probabilities: softmax first.")
def _m_logits(logits, min_p):
    return logits.masked_fill(logits < min_p * logits.amax(dim=-1, keepdim=True), -INF)


@wrong("One best token serves the whole batch. Each row has its own.")
def _m_one_best(logits, min_p):
    return _min_p_by(logits, lambda p, best: p < min_p * p.max())


@wrong("What is removed is set to 0. That is a respectable logit: set it to -inf.")
def _m_to_zero(logits, min_p):
    return _min_p_by(logits, lambda p, best: (p < min_p * best) & (p > 0), 0.0)


@wrong("This returns probabilities. A mask returns the logits, with -inf for what goes.")
def _m_probabilities(logits, min_p):
    return mask_min_p(logits, min_p).softmax(dim=-1)


def _min_p_cases() -> list[Case]:
    flat_and_sharp = torch.tensor([[1.0, 1.2, 0.8, 1.1, 0.0], [9.0, 1.0, 6.5, 2.0, 3.0]])
    return [
        Case("0.5, 0.3, 0.15 and 0.05 at 0.2", (torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 0.2),
             kind="bar"),
        Case("six logits at 0.4", (SIX, 0.4), kind="bar"),
        Case("a flat row and a sharp one at 0.25", (flat_and_sharp, 0.25), kind="rows"),
        Case("some logits -inf, at 0.1", (HOLED, 0.1), kind="bar"),
        Case("min_p = 1 keeps the best and its equal", (torch.tensor([2.0, 1.0, 2.0, 1.9]), 1.0),
             kind="edges"),
    ]  # fmt: skip


EXERCISES = (
    Exercise(
        "apply_temperature",
        _temperature_cases,
        hints={
            "divide": (
                "Which way does it go? At 0.5 the best token should be further ahead of the rest "
                "than before.",
                "Divide every logit by the temperature, and return logits: softmax comes later.",
                "logits / temperature is all of it, but for what happens at tiny temperatures.",
            ),
            "tiny": (
                "What is 1,000 / 1e-37 in float32, whose largest number is about 3e38? And what "
                "does softmax make of two such?",
                "Softmax depends on differences only. So you may subtract one number from a whole "
                "row first. Which number makes the largest quotient 0?",
                "(logits - logits.amax(dim=-1, keepdim=True)) / temperature",
            ),
        },
        target="nanoserve.sampling:apply_temperature",
        wrong=(
            _multiplied, _after_softmax, _softmaxed, _overflows, _one_maximum, _power, _clamped,
        ),
    ),
    Exercise(
        "mask_top_k",
        _top_k_cases,
        hints={
            "keep": (
                "Which logit is the last that may stay? Everything smaller goes.",
                "logits.topk(k).values has the k largest, best first; its last is the bar. "
                "masked_fill writes -inf where a condition holds.",
                "last = logits.topk(top_k).values[..., -1:]; "
                "return logits.masked_fill(logits < last, -torch.inf)",
            ),
            "rows": (
                "The logits may have several rows, and each is a distribution of its own.",
                "topk works along the last axis. Keep that axis when you take the last of k, so "
                "that each row is compared with its own bar.",
                "values[..., -1:] has shape [2, 1] here; values[..., -1] would not line up.",
            ),
            "ties": (
                "How many have the value 2? Is there a reason to prefer one of them?",
                "Remove what is smaller than the k-th best. What equals it stays.",
                "logits < last, compared by value; do not keep by the indices of topk.",
            ),
            "edges": (
                "Two values of k need a thought: 0, and one larger than the vocabulary.",
                "0 means off: return the logits. A k that is too large keeps all; topk would "
                "refuse it.",
                "if top_k == 0: return logits, and min(top_k, logits.shape[-1]) for topk.",
            ),
        },
        target="nanoserve.sampling:mask_top_k",
        wrong=(
            _k_cuts_ties, _k_strict, _k_too_large, _k_zero, _k_to_zero, _k_smallest,
            _k_one_threshold,
        ),
    ),
    Exercise(
        "mask_top_p",
        _top_p_cases,
        hints={
            "line": (
                "Add up the probabilities, the best first: 0.5, then 0.91. At which token is 0.9 "
                "reached, and does that one belong to what is kept?",
                "A token stays if the sum of all that are better, without itself, is still less "
                "than top_p. cumsum gives the sum with it; subtract its own share.",
                "keep = probs.cumsum(dim=-1) - probs < top_p, on probabilities sorted in "
                "descending order.",
            ),
            "order": (
                "Sorting is needed to add up, but the answer has to be in the order of the ids.",
                "sort returns two things: the values, and where each came from. scatter brings a "
                "mask back: mask.scatter(-1, ids, mask).",
                "descending, ids = logits.sort(dim=-1, descending=True); probs = "
                "descending.softmax(dim=-1); then the mask of what goes, `gone`, and "
                "logits.masked_fill(gone.scatter(-1, ids, gone), -torch.inf)",
            ),
            "edges": (
                "Which token may never go, whatever top_p is?",
                "At top_p = 0 no sum is less than top_p, so your rule removes everything. Make an "
                "exception for the best token.",
                "In descending order the best stands first: gone[..., 0] = False.",
            ),
        },
        target="nanoserve.sampling:mask_top_p",
        wrong=(
            _p_drops_the_crossing, _p_one_more, _p_at_the_line, _p_not_sorted_back, _p_empty,
            _p_to_zero, _p_keeps_the_tail, _p_without_softmax, _p_by_value, _p_probabilities,
        ),
    ),
    Exercise(
        "mask_min_p",
        _min_p_cases,
        hints={
            "bar": (
                "The bar hangs from the best token: at min_p = 0.2, a token may be a fifth as "
                "probable as the best, and no less.",
                "Softmax, then the largest probability, then compare each with min_p times that.",
                "probs = logits.softmax(dim=-1), and probs < min_p * probs.amax(dim=-1, "
                "keepdim=True) is what goes.",
            ),
            "rows": (
                "Two rows, two best tokens.",
                "Take the maximum along the last axis, and keep that axis for the comparison.",
                "probs.amax(dim=-1, keepdim=True) has shape [2, 1] here.",
            ),
            "edges": (
                "At min_p = 1 the bar is the best probability itself. Who reaches it?",
                "What is below the bar goes. What stands exactly on it stays.",
                "Use <, not <=.",
            ),
        },
        target="nanoserve.sampling:mask_min_p",
        wrong=(
            _m_relative_to_one, _m_strict, _m_subtracted, _m_logits, _m_one_best, _m_to_zero,
            _m_probabilities,
        ),
    ),
)  # fmt: skip


def _sampling(logits: torch.Tensor, tokens: list[str]) -> widgets.FigureWidget:
    """A real distribution and four sliders; tokens are the labels of its most probable ids."""
    before = logits.softmax(dim=-1)
    ids = before.argsort(descending=True, stable=True)[: len(tokens)]

    def draw(temperature: float, top_k: int, top_p: float, min_p: float):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        after = distribution(logits, params)
        left = int((after > 0).sum())
        fig, ax = figure(
            height=4.2,
            xlabel="probability",
            title=f"{left:,} of {len(logits):,} tokens can be drawn",
        )
        with style():
            places = range(len(tokens))
            ax.barh(places, after[ids], color=COLOURS["engine"])
            ax.barh(places, before[ids], fill=False, edgecolor=COLOURS["ink"], linewidth=1)
            ax.set_yticks(places, tokens)
            for place, token in zip(places, ids, strict=True):
                if after[token] == 0:
                    ax.text(before[token] + 0.01, place, "removed", va="center",
                            fontsize=9, color=COLOURS["muted"])  # fmt: skip
            rest = 1 - float(after[ids].sum())
            ax.text(0.99, 0.06, f"outlined: as the model says\nall other tokens: {rest:.0%}",
                    transform=ax.transAxes, ha="right", color=COLOURS["muted"])  # fmt: skip
        ax.set(xlim=(0, 1), ylim=(len(tokens) - 0.4, -0.6))
        ax.grid(axis="y", visible=False)
        return fig

    return widgets.figure_widget(
        draw,
        temperature=widgets.slider(0.1, 2.0, 0.7, 0.1),
        top_k=widgets.slider(0, 20, 0, label="top-k (0: off)"),
        top_p=widgets.slider(0.0, 1.0, 0.9, 0.05, label="top-p"),
        min_p=widgets.slider(0.0, 1.0, 0.0, 0.02, label="min-p"),
    )


WIDGETS = {"sampling": _sampling}
