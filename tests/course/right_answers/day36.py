"""Right answers to the exercise of Day 36, in different styles."""


def by_cases(num_uncomputed, tokens_left, budget, others_wait):
    """One limit after another."""
    n = num_uncomputed
    if others_wait and n > budget // 2:
        n = budget // 2 or 1
    if n > tokens_left:
        n = tokens_left
    return n


def by_sorting(num_uncomputed, tokens_left, budget, others_wait):
    """The smallest of a list of limits."""
    limits = [num_uncomputed, tokens_left]
    if others_wait:
        limits.append(max(budget // 2, 1))
    return sorted(limits)[0]


def by_counting(num_uncomputed, tokens_left, budget, others_wait):
    """Adds token by token while all limits allow one more."""
    n = 0
    while n < num_uncomputed and n < tokens_left:
        if others_wait and n >= 1 and 2 * (n + 1) > budget:
            break
        n += 1
    return n


RIGHT = {"chunk": (by_cases, by_sorting, by_counting)}
