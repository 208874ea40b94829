"""Day 10: right answers to the four exercises, in several styles."""

import math

import torch


def divide_after_a_shift(logits, temperature):
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def divide_in_float64(logits, temperature):
    wide = logits.double() / temperature
    return (wide - wide.max(dim=-1, keepdim=True).values).float()


def divide_row_by_row(logits, temperature):
    if logits.dim() > 1:
        return torch.stack([divide_row_by_row(row, temperature) for row in logits])
    best = max(logits.tolist())
    return torch.tensor([(value - best) / temperature for value in logits.tolist()])


def divide_log_probabilities(logits, temperature):
    return logits.sub(logits.max(-1, True)[0]).div(temperature).log_softmax(-1)


def k_by_sorting(logits, top_k):
    size = logits.shape[-1]
    if not 0 < top_k < size:
        return logits
    bar = logits.sort().values[..., size - top_k].unsqueeze(-1)
    return torch.where(logits >= bar, logits, torch.tensor(-math.inf))


def k_by_counting(logits, top_k):
    """Keep whatever has fewer than k logits above it."""
    above = (logits.unsqueeze(-2) > logits.unsqueeze(-1)).sum(dim=-1)
    return logits.masked_fill(above >= (top_k or logits.shape[-1]), -torch.inf)


def k_by_rows(logits, top_k):
    rows = logits.reshape(-1, logits.shape[-1])
    out = []
    for row in rows:
        values = sorted(row.tolist(), reverse=True)
        bar = values[min(top_k, len(values)) - 1]  # top_k = 0: the last, so all stay
        out.append([v if v >= bar else -math.inf for v in row.tolist()])
    return torch.tensor(out).view(logits.shape)


def p_sum_before(logits, top_p):
    if top_p >= 1:
        return logits
    best_first, ids = logits.sort(descending=True)
    probs = best_first.softmax(dim=-1)
    gone = probs.cumsum(dim=-1) - probs >= top_p
    gone[..., 0] = False
    return logits.masked_fill(gone.scatter(-1, ids, gone), -torch.inf)


def p_shifted_mask(logits, top_p):
    """The mask of the sum with each token, moved one place on: the sum before it."""
    if top_p == 1:
        return logits
    ids = logits.argsort(descending=True)
    sums = logits.gather(-1, ids).softmax(dim=-1).cumsum(dim=-1)
    keep = torch.ones_like(sums, dtype=torch.bool)
    keep[..., 1:] = sums[..., :-1] < top_p
    back = torch.empty_like(keep).scatter(-1, ids, keep)
    return torch.where(back, logits, torch.full_like(logits, -torch.inf))


def p_token_by_token(logits, top_p):
    if logits.dim() > 1:
        return torch.stack([p_token_by_token(row, top_p) for row in logits])
    probs = logits.softmax(dim=-1).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    out, held = torch.full_like(logits, -torch.inf), 0.0
    for place, i in enumerate(order):
        if place and held >= top_p and top_p < 1:
            break
        out[i] = logits[i]
        held += probs[i]
    return out


def min_p_by_division(logits, min_p):
    probs = logits.softmax(-1)
    share = probs / probs.max(dim=-1, keepdim=True).values
    return torch.where(share >= min_p, logits, -torch.inf)


def min_p_by_logarithm(logits, min_p):
    bar = logits.amax(dim=-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < bar, -torch.inf)


def min_p_row_by_row(logits, min_p):
    rows = []
    for row in logits.reshape(-1, logits.shape[-1]):
        probs = torch.exp(row - row.max())  # the best is 1
        rows.append([row[i] if probs[i] >= min_p else -math.inf for i in range(len(row))])
    return torch.tensor(rows).reshape(logits.shape)


RIGHT = {
    "apply_temperature": (
        divide_after_a_shift,
        divide_in_float64,
        divide_row_by_row,
        divide_log_probabilities,
    ),
    "mask_top_k": (k_by_sorting, k_by_counting, k_by_rows),
    "mask_top_p": (p_sum_before, p_shifted_mask, p_token_by_token),
    "mask_min_p": (min_p_by_division, min_p_by_logarithm, min_p_row_by_row),
}
