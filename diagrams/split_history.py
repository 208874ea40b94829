"""Day 30: one long history, split over three programs, and the merge of their partial results."""

from math import log2

from shapes import (
    FOCUS,
    FOCUS_FILL,
    INK,
    MUTED,
    PANEL,
    SMALL,
    arrow,
    block,
    box,
    canvas,
    caption,
    oracle,
    rule,
    text,
)

SPLITS = ((1, 3, 0, 2), (2, 5, 1, 4), (3, 0, 2, 1))
LEFT, STEP, CELL = 140, 170, 36


def draw():
    fig, ax = canvas(
        470,
        "Split the history, merge the parts",
        "Three programs work at the same time, each on its part of one sequence's keys and values.",
    )
    text(ax, 28, 112, "scores", weight="bold", ha="left")
    caption(ax, 28, 131, "of one query")
    text(ax, 28, 226, "each part", weight="bold", ha="left")
    caption(ax, 28, 245, "a softmax of its own")
    text(ax, 28, 348, "merge", weight="bold", ha="left")
    caption(ax, 28, 367, "a second launch")
    sums = [sum(2**score for score in scores) for scores in SPLITS]
    for i, (scores, total) in enumerate(zip(SPLITS, sums, strict=True)):
        x = LEFT + 20 + STEP * i
        middle = x + 2 * CELL
        caption(ax, middle, 90, f"split {i}", ha="center")
        block(ax, x, 104, CELL, [str(score) for score in scores], height=34, fills=[PANEL] * 4)
        arrow(ax, (middle, 138), (middle, 172), colour=FOCUS)
        box(ax, x - 8, 172, 4 * CELL + 16, 100, edge=FOCUS, fill=FOCUS_FILL)
        text(ax, middle, 190, f"program {i}", size=SMALL, weight="bold", colour=FOCUS)
        rows = (f"m    {max(scores)}", f"lse  {log2(total):.2f}", "part [head_dim]")
        for row, words in enumerate(rows):
            text(ax, x + 4, 212 + 22 * row, words, size=SMALL, ha="left", mono=True)
        arrow(ax, (middle, 272), (middle, 326), colour=FOCUS)
        text(ax, middle + 9, 299, f"weight {total / max(sums):.2f}", size=SMALL, colour=FOCUS,
             ha="left")  # fmt: skip
    right = LEFT + 20 + 2 * STEP + 4 * CELL + 8
    box(ax, LEFT + 12, 326, right - LEFT - 12, 62, fill=PANEL)
    middle = (LEFT + 12 + right) / 2
    text(ax, middle, 346, "weight = exp2(lse - max(lse))", mono=True, size=12.5)
    text(ax, middle, 369, "out = sum(weight * part) / sum(weight)", mono=True, size=12.5)
    arrow(ax, (right, 357), (728, 357), colour=INK)
    text(ax, 752, 357, "out", weight="bold")
    oracle(ax, 690, 100, 122, 62, "softmax of\nall 12 at once", size=SMALL, colour=MUTED)
    arrow(ax, (752, 162), (752, 342), colour=MUTED, dashed=True)
    caption(ax, 744, 250, "the same", ha="right")
    rule(ax, (28, 408), (812, 408))
    caption(
        ax,
        28,
        429,
        "part = acc / l, and lse = m + log2(l): a program stores these two and nothing else.",
    )
    caption(
        ax,
        28,
        448,
        "Without splits one program reads all of it, one tile after another, and most of a GPU is idle.",
    )
    return fig
