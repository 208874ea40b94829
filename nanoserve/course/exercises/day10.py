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
FLAT_AND_SHARP = torch.tensor([[1.0, 1.2, 0.8, 1.1, 0.0], [9.0, 1.0, 6.5, 2.0, 3.0]])
HOLED = torch.tensor([0.5, -INF, 2.0, 1.0, -INF, -0.75, 0.0])


REMOVED = (
    "Look at what your function returns for a removed token and for a kept one.",
    "A kept token keeps its logit, unchanged. A removed one gets a logit whose probability is 0.",
    "logits.masked_fill(gone, -torch.inf), where gone is True for the tokens to remove",
)


# Temperature -------------------------------------------------------------------------------------


def _probabilities(answer: Callable, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The probabilities are compared: adding one number to all logits does not change them."""
    return answer(logits, temperature).softmax(dim=-1)


@wrong(
    "The logits are multiplied by the temperature. Divide: a low temperature spreads them apart.",
    hints="divide",
)
def _multiplied(logits, temperature):
    return logits * temperature


@wrong(
    "The probabilities are divided, after softmax. The result is used as logits, and they are "
    "nearly equal then: divide the logits.",
    hints="divide",
)
def _after_softmax(logits, temperature):
    return logits.softmax(dim=-1) / temperature


@wrong("This returns probabilities. Return logits: masks and softmax come later.", hints="divide")
def _softmaxed(logits, temperature):
    return (logits / temperature).softmax(dim=-1)


@wrong(
    "At a tiny temperature the quotient overflows to inf, and softmax makes NaN of inf - inf. "
    "Subtract the largest logit first: it becomes 0 and all others negative, so none becomes +inf.",
    hints="tiny",
)
def _overflows(logits, temperature):
    return logits / temperature


@wrong(
    "The largest logit of the whole batch is subtracted. At a tiny temperature every logit of the "
    "other rows becomes -inf then: subtract each row's own maximum.",
    hints="tiny",
)
def _one_maximum(logits, temperature):
    return (logits - logits.max()) / temperature


@wrong(
    "The logits are raised to the power 1 / temperature. That is done to probabilities. Divide "
    "logits by the temperature.",
    hints="divide",
)
def _power(logits, temperature):
    return logits ** (1 / temperature)


@wrong(
    "The logits are clamped at 0, so all that were above 0 are equal. Subtract the largest "
    "instead.",
    hints="tiny",
)
def _clamped(logits, temperature):
    return logits.clamp(max=0) / temperature


@wrong(
    "Logits that are very close get wrong probabilities. Either the temperature is replaced by a "
    "larger one, as by max(temperature, 1e-4), or another step before the division rounds the "
    "small differences away, as log_softmax does. Keep the temperature, and subtract only the "
    "largest logit.",
    hints="floor",
)
def _floor(logits, temperature):
    return logits / max(temperature, 1e-4)


@wrong(
    "The quotient is cut off at a largest number (clamp, nan_to_num), so logits that differ become "
    "equal. Subtract the largest logit before the division: then nothing overflows.",
    hints="tiny",
)
def _cut_off(logits, temperature):
    return (logits / temperature).clamp(min=-1e38, max=1e38)


@wrong(
    "A row's mean is subtracted. Where a logit is -inf, the mean is -inf too, and -inf - (-inf) is "
    "NaN. Subtract the row's largest logit.",
    hints="tiny",
)
def _mean_subtracted(logits, temperature):
    return (logits - logits.mean(dim=-1, keepdim=True)) / temperature


@wrong(
    "At a tiny temperature the largest logit is taken, as greedy does. At 1e-37, logits that are "
    "1e-37 apart still share the probability: divide there too.",
    hints="floor",
)
def _greedy_when_tiny(logits, temperature):
    if temperature < 1e-6:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, -INF).scatter(-1, best, 0.0)
    return logits / temperature


def _temperature_cases() -> list[Case]:
    near = {"compare": close(1e-6, 1e-5), "call": _probabilities}
    far = torch.tensor([[999.0, 1000.0, 990.0, 1000.0], [1.0, 3.0, 2.0, 0.0]])
    close_by = torch.tensor([-1e-37, 0.0, -3e-37])
    return [
        Case("six logits at 0.5", (SIX, 0.5), kind="divide", **near),
        Case("six logits at 2", (SIX, 2.0), kind="divide", **near),
        Case("temperature 1 changes nothing", (SIX, 1.0), kind="divide", **near),
        Case("two rows, some logits -inf", (torch.stack([HOLED, HOLED.flip(0)]), 0.8),
             kind="divide", **near),
        Case("two rows at 1e-37, logits about 1,000 and 1", (far, 1e-37), kind="tiny", **near),
        Case("logits -1e-37, 0 and -3e-37, at 1e-37", (close_by, 1e-37), kind="floor", **near),
    ]  # fmt: skip


# Top-k -------------------------------------------------------------------------------------------


@wrong("Logits equal to the k-th best are removed. Keep all that tie with it.", hints="ties")
def _k_cuts_ties(logits, top_k):
    if top_k == 0:
        return logits
    best = logits.topk(min(top_k, logits.shape[-1])).indices
    return torch.full_like(logits, -INF).scatter(-1, best, logits.gather(-1, best))


@wrong("The k-th best is removed too. Remove only what is smaller.", hints="keep")
def _k_strict(logits, top_k):
    if top_k == 0:
        return logits
    last = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits <= last, -INF)


@wrong("topk fails for a k larger than the vocabulary. Keep all logits there.", hints="edges")
def _k_too_large(logits, top_k):
    if top_k == 0:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -INF)


@wrong("top_k=0 means that top-k is off: keep all logits.", hints="edges")
def _k_zero(logits, top_k):
    return mask_top_k(logits, max(top_k, 1))


@wrong(
    "Removed logits are set to 0, which is an ordinary logit. Set them to -inf.", hints="removed"
)
def _k_to_zero(logits, top_k):
    masked = mask_top_k(logits, top_k)
    return torch.where((masked == -INF) & (logits > -INF), 0.0, masked)


@wrong(
    "The k smallest are kept. topk gives the largest first; sort puts the smallest first.",
    hints="keep",
)
def _k_smallest(logits, top_k):
    return -mask_top_k(-logits, top_k) if top_k == 0 else logits.masked_fill(
        logits > logits.topk(min(top_k, logits.shape[-1]), largest=False).values[..., -1:], -INF
    )  # fmt: skip


@wrong("All rows use one threshold. Each row has its own k-th best.", hints="rows")
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
        Case("k = 0 is off, two rows", (ROWS, 0), kind="edges"),
        Case("six logits, k = 1", (SIX, 1), kind="keep"),
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
    "The token that reaches top_p is removed, so the rest holds less than top_p. That token stays: "
    "compare the sum before a token, not the sum with it.",
    hints="line",
)
def _p_drops_the_crossing(logits, top_p):
    return _top_p_by(logits, lambda p, with_it, without: _first(with_it <= top_p))


@wrong(
    "`cumsum > top_p` is the sum with the token: it also removes the token that reaches top_p, and "
    "where the best token alone reaches it, nothing is left. Compare the sum before each token.",
    hints="line",
)
def _p_sum_with_it(logits, top_p):
    return _top_p_by(logits, lambda p, with_it, without: with_it <= top_p)


@wrong(
    "At top_p = 1 tokens are removed: in float32 the sum reaches 1 long before the last token. "
    "Return the logits unchanged at top_p = 1.",
    hints="one",
)
def _p_rounded_at_one(logits, top_p):
    return _top_p_by(logits, lambda p, with_it, without: _first(without < top_p))


@wrong("One token too many is kept: the sum had reached top_p before it.", hints="line")
def _p_one_more(logits, top_p):
    def keep(p, with_it, without):
        inside = without < top_p - 1e-6
        return torch.cat([torch.ones_like(inside[..., :1]), inside[..., :-1]], dim=-1)

    return _top_p_by(logits, keep)


@wrong(
    "Where the sum before a token equals top_p, the token must go: keep a token while the sum "
    "before it is less than top_p.",
    hints="line",
)
def _p_at_the_line(logits, top_p):
    if top_p == 1:
        return logits
    return _top_p_by(logits, lambda p, with_it, without: _first(without <= top_p))


@wrong(
    "The mask is in sorted order and the logits are in the order of the ids. Bring the mask back "
    "with the ids that sort returned.",
    hints="order",
)
def _p_not_sorted_back(logits, top_p):
    if top_p == 1:
        return logits
    probs = logits.sort(dim=-1, descending=True).values.softmax(dim=-1)
    keep = _first(probs.cumsum(dim=-1) - probs < top_p)
    return logits.masked_fill(~keep, -INF)


@wrong(
    "The masked logits are brought back with `gather`, which does not undo a sort. Scatter the "
    "mask: mask.scatter(-1, ids, mask), with the ids that sort returned.",
    hints="order",
)
def _p_gathered(logits, top_p):
    if top_p == 1:
        return logits
    descending, ids = logits.sort(dim=-1, descending=True)
    probs = descending.softmax(dim=-1)
    keep = _first(probs.cumsum(dim=-1) - probs < top_p)
    return descending.masked_fill(~keep, -INF).gather(-1, ids)


@wrong(
    "The sum runs in the order of the ids. Sort by probability first, the best token first.",
    hints="order",
)
def _p_unsorted(logits, top_p):
    if top_p == 1:
        return logits
    probs = logits.softmax(dim=-1)
    keep = probs.cumsum(dim=-1) - probs < top_p
    return logits.masked_fill(~keep, -INF)


@wrong("At top_p = 0 nothing is left to draw. The best token always stays.", hints="edges")
def _p_empty(logits, top_p):
    if top_p == 1:
        return logits
    return _top_p_by(logits, lambda p, with_it, without: without < top_p)


@wrong(
    "Removed logits are set to 0, which is an ordinary logit. Set them to -inf.", hints="removed"
)
def _p_to_zero(logits, top_p):
    masked = mask_top_p(logits, top_p)
    return torch.where((masked == -INF) & (logits > -INF), 0.0, masked)


@wrong(
    "The improbable tokens are kept: the sum runs from the smallest up and keeps the small ones.",
    hints="order",
)
def _p_keeps_the_tail(logits, top_p):
    ascending, ids = logits.sort(dim=-1)
    keep = ascending.softmax(dim=-1).cumsum(dim=-1) < top_p
    return logits.masked_fill(~keep.scatter(-1, ids, keep), -INF)


@wrong("Logits are added up. top_p is about probabilities: apply softmax first.", hints="line")
def _p_without_softmax(logits, top_p):
    def keep(p, with_it, without):
        values = logits.sort(dim=-1, descending=True).values
        return _first(values.cumsum(dim=-1) - values < top_p)

    return _top_p_by(logits, keep)


@wrong(
    "All tokens that tie with the last one stay, so they hold far more than top_p. Cut by place in "
    "the sorted order, not by value.",
    hints="ties",
)
def _p_by_value(logits, top_p):
    masked = mask_top_p(logits, top_p)
    last = masked.masked_fill(masked == -INF, INF).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < last, -INF)


@wrong(
    "This returns probabilities. A mask returns the logits, with -inf for removed tokens.",
    hints="removed",
)
def _p_probabilities(logits, top_p):
    return mask_top_p(logits, top_p).softmax(dim=-1)


def _removed(answer: Callable, logits: torch.Tensor, top_p: float) -> str:
    return f"{int((answer(logits, top_p) == -INF).sum())} removed"


def _top_p_cases() -> list[Case]:
    three = torch.tensor([0.41, 0.5, 0.09]).log()
    # In float32 the sum reaches 1 before the end of most rows; how early depends on the machine.
    long_tail = torch.linspace(0.0, -1.0, 3_000) * torch.arange(13.0, 21.0)[:, None]
    return [
        Case("0.41, 0.5 and 0.09 at 0.9: which stay", (three, 0.9), kind="line", call=_kept),
        Case("six logits at 0.8", (SIX, 0.8), kind="order"),
        Case("two rows at 0.7", (ROWS, 0.7), kind="order"),
        Case("a flat row and a sharp one at 0.5", (FLAT_AND_SHARP, 0.5), kind="order"),
        Case("some logits -inf, at 0.75", (HOLED, 0.75), kind="order"),
        Case("0.41, 0.5 and 0.09 at 0.49: which stay", (three, 0.49), kind="line", call=_kept),
        Case("eight equal tokens at 0.5: how many stay", (torch.zeros(8), 0.5), kind="line",
             call=_how_many),
        Case("top_p = 0 keeps the best", (SIX, 0.0), kind="edges"),
        Case("top_p = 1 keeps all, 8 rows of 3,000 tokens", (long_tail, 1.0), kind="one",
             call=_removed),
    ]  # fmt: skip


# Min-p -------------------------------------------------------------------------------------------


def _min_p_by(logits, go: Callable, removed: float = -INF) -> torch.Tensor:
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(go(probs, probs.amax(dim=-1, keepdim=True)), removed)


@wrong(
    "Each probability is compared with min_p itself. The bar is min_p times the probability of the "
    "best token.",
    hints="bar",
)
def _m_relative_to_one(logits, min_p):
    return _min_p_by(logits, lambda p, best: p < min_p)


@wrong(
    "A token exactly at the bar is removed; at min_p = 1 that is the best token itself. Remove "
    "only what is below the bar.",
    hints="edges",
)
def _m_strict(logits, min_p):
    return _min_p_by(logits, lambda p, best: p <= min_p * best)


@wrong(
    "min_p is subtracted from the best probability. It is a factor: min_p times the best.",
    hints="bar",
)
def _m_subtracted(logits, min_p):
    return _min_p_by(logits, lambda p, best: p < best - min_p)


@wrong("Logits are compared. min_p is about probabilities: apply softmax first.", hints="bar")
def _m_logits(logits, min_p):
    return logits.masked_fill(logits < min_p * logits.amax(dim=-1, keepdim=True), -INF)


@wrong("All rows use one best token. Each row has its own.", hints="rows")
def _m_one_best(logits, min_p):
    return _min_p_by(logits, lambda p, best: p < min_p * p.max())


@wrong(
    "Removed logits are set to 0, which is an ordinary logit. Set them to -inf.", hints="removed"
)
def _m_to_zero(logits, min_p):
    return _min_p_by(logits, lambda p, best: (p < min_p * best) & (p > 0), 0.0)


@wrong(
    "This returns probabilities. A mask returns the logits, with -inf for removed tokens.",
    hints="removed",
)
def _m_probabilities(logits, min_p):
    return mask_min_p(logits, min_p).softmax(dim=-1)


@wrong(
    "This returns probabilities, with 0 for removed tokens. Use the probabilities to decide, and "
    "return the logits, with -inf for removed tokens.",
    hints="removed",
)
def _m_masked_probabilities(logits, min_p):
    probs = logits.softmax(dim=-1)
    return probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)


def _min_p_cases() -> list[Case]:
    return [
        Case("0.5, 0.3, 0.15 and 0.05 at 0.2", (torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), 0.2),
             kind="bar"),
        Case("six logits at 0.4", (SIX, 0.4), kind="bar"),
        Case("a flat row and a sharp one at 0.25", (FLAT_AND_SHARP, 0.25), kind="rows"),
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
                "At a temperature of 0.5 the best token should be further ahead of the others than "
                "before. Is it?",
                "Divide every logit by the temperature, and return logits: softmax comes later.",
                "logits / temperature is enough until the temperature is tiny.",
            ),
            "tiny": (
                "float32 ends at about 3e38. Compute 1,000 / 1e-37. What is softmax of two such "
                "logits?",
                "Softmax depends on differences only. So you may subtract one number from a whole "
                "row first. Which number makes the largest quotient 0?",
                "(logits - logits.amax(dim=-1, keepdim=True)) / temperature",
            ),
            "floor": (
                "Print the temperature that your function really divides by. Is it the caller's?",
                "Two logits that are one temperature apart differ by a factor of e in probability, "
                "however small the temperature is. Keep the temperature and prevent the overflow "
                "in another way.",
                "(logits - logits.amax(dim=-1, keepdim=True)) / temperature, with no max, clamp or "
                "epsilon",
            ),
        },
        target="nanoserve.sampling:apply_temperature",
        wrong=(
            _multiplied, _after_softmax, _softmaxed, _overflows, _one_maximum, _power, _clamped,
            _floor, _greedy_when_tiny, _cut_off, _mean_subtracted,
        ),
    ),
    Exercise(
        "mask_top_k",
        _top_k_cases,
        hints={
            "keep": (
                "Which is the smallest logit that may stay? Everything below it goes.",
                "logits.topk(k).values has the k largest, best first; its last is the bar. "
                "masked_fill writes -inf where a condition holds.",
                "last = logits.topk(top_k).values[..., -1:]; "
                "return logits.masked_fill(logits < last, -torch.inf)",
            ),
            "rows": (
                "The logits may have several rows, and each row is a distribution of its own.",
                "topk works along the last axis. Keep that axis when you take the last of k, so "
                "that each row is compared with its own bar.",
                "values[..., -1:] has shape [2, 1] here; values[..., -1] would not line up.",
            ),
            "ties": (
                "How many logits have the value 2? Is there a reason to prefer one of them?",
                "Remove what is smaller than the k-th best. What equals it stays.",
                "logits < last, compared by value; do not keep by the indices of topk.",
            ),
            "edges": (
                "Two values of k need care: 0, and one larger than the vocabulary.",
                "0 means off: return the logits. A k that is too large keeps all; topk "
                "raises an error for it.",
                "if top_k == 0: return logits, and min(top_k, logits.shape[-1]) for topk.",
            ),
            "removed": REMOVED,
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
                "reached, and is that token kept?",
                "A token stays if the sum of all better ones, without itself, is less than top_p. "
                "cumsum gives the sum with the token; subtract the token's own probability.",
                "keep = probs.cumsum(dim=-1) - probs < top_p, on probabilities sorted in "
                "descending order.",
            ),
            "ties": (
                "Eight tokens hold an eighth each. How many of them are needed for a half?",
                "Equal tokens have different places in the sorted order. Decide by the place.",
                "Scatter the mask of the sorted order back; do not compare logits with the last "
                "one that was kept.",
            ),
            "one": (
                "Take torch.linspace(0, -18, 3_000) as logits and print the running sum of their "
                "softmax. Where does it reach 1?",
                "float32 has about 7 digits, so small probabilities no longer change a sum near 1. "
                "The sum reaches 1 before the end.",
                "if top_p == 1: return logits",
            ),
            "order": (
                "You sort to add up, but the answer must be in the order of the ids.",
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
            "removed": REMOVED,
        },
        target="nanoserve.sampling:mask_top_p",
        wrong=(
            _p_drops_the_crossing, _p_one_more, _p_at_the_line, _p_not_sorted_back, _p_empty,
            _p_to_zero, _p_keeps_the_tail, _p_without_softmax, _p_by_value, _p_probabilities,
            _p_sum_with_it, _p_rounded_at_one, _p_gathered, _p_unsorted,
        ),
    ),
    Exercise(
        "mask_min_p",
        _min_p_cases,
        hints={
            "bar": (
                "The bar depends on the best token: at min_p = 0.2, a token stays if it is at "
                "least a fifth as probable as the best.",
                "Softmax, then the largest probability, then compare each with min_p times that.",
                "With probs = logits.softmax(dim=-1), remove where probs < min_p * "
                "probs.amax(dim=-1, keepdim=True).",
            ),
            "rows": (
                "Two rows, two best tokens.",
                "Take the maximum along the last axis, and keep that axis for the comparison.",
                "probs.amax(dim=-1, keepdim=True) has shape [2, 1] here.",
            ),
            "edges": (
                "At min_p = 1 the bar is the best probability itself. Which tokens reach it?",
                "A token below the bar goes. A token exactly at the bar stays.",
                "Use <, not <=.",
            ),
            "removed": REMOVED,
        },
        target="nanoserve.sampling:mask_min_p",
        wrong=(
            _m_relative_to_one, _m_strict, _m_subtracted, _m_logits, _m_one_best, _m_to_zero,
            _m_probabilities, _m_masked_probabilities,
        ),
    ),
)  # fmt: skip


def _sampling(logits: torch.Tensor, tokens: list[str]) -> widgets.FigureWidget:
    """A distribution of the model and four sliders; `tokens` label its most probable ids."""
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
            legend = f"outlined: the model's probabilities\ntokens not shown: {rest:.0%}"
            ax.text(0.99, 0.06, legend,
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
