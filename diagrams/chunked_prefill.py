"""Day 36: a long prompt in one step, and in chunks under a token budget."""

from itertools import pairwise

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    dot,
    rule,
    slot,
    text,
)

PROMPT, BUDGET, RUNNING = 20, 8, "ABC"
CELL, GAP, LEFT = 16, 14, 44
CHUNKS = (5, 5, 5, 5)


def draw():
    fig, ax = canvas(
        426,
        "A long prompt arrives",
        "A, B and C write a token in each step. D's prompt has 20 tokens. More tokens, longer step.",
    )
    _timeline(ax, 88, "In one step", (0, PROMPT, 1), CONTIGUOUS, CONTIGUOUS_FILL)
    rule(ax, (28, 240), (812, 240))
    _timeline(ax, 266, "In chunks, with a budget of 8 tokens", (0, *CHUNKS, 1), FOCUS, FOCUS_FILL)
    return fig


def _timeline(ax, y, title, chunks, edge, fill):
    text(ax, 28, y, title, weight="bold", ha="left")
    x, ends, taken = LEFT, [], 0
    for n in chunks:
        width = CELL * (len(RUNNING) + n)
        box(ax, x - 4, y + 18, width + 8, 46, edge=HAIR, radius=4)
        for i, name in enumerate(RUNNING):
            slot(ax, x + CELL * i, y + 28, CELL, name, height=26, size=11.5)
        for i in range(n):
            slot(ax, x + CELL * (len(RUNNING) + i), y + 28, CELL, height=26, fill=fill, edge=edge)
        if n:
            first, last = taken, taken + n - 1
            name = "D" if n == 1 else f"D{first} to D{last}"
            middle = x + CELL * (len(RUNNING) + n / 2)
            if n == 1:
                text(ax, middle, y + 41, name, size=11.5)
            else:
                box(ax, middle - 36, y + 31, 72, 20, name, edge=fill, fill=fill, size=11.5)
        taken += n
        x += width + GAP
        ends.append(x - GAP)
    _tokens(ax, y + 94, ends)


def _tokens(ax, y, ends):
    """The tokens of A as dots, each at the end of its step."""
    rule(ax, (LEFT - 4, y), (ends[-1] + 26, y), colour=MUTED)
    for end in ends:
        dot(ax, end, y, 5, INK)
    caption(ax, ends[-1] + 38, y, "time")
    arrow(ax, (ends[-1] + 20, y), (ends[-1] + 34, y), colour=MUTED)
    caption(ax, 28, y + 20, "A's tokens")
    gaps = list(pairwise(ends))
    start, end = max(gaps, key=lambda gap: gap[1] - gap[0])
    arrow(ax, (start + 6, y + 20), (end - 6, y + 20), both=True)
    words = "A's reader waits" if end - start > 160 else ""
    if words:
        box(ax, (start + end) / 2 - 56, y + 11, 112, 18, words, edge=WHITE, fill=WHITE, size=11.5)
    else:
        caption(ax, end + 8, y + 20, "the longest wait: one step of 8 tokens")
