"""Day 30: one long history, split over three workers, and the merge of their partial results."""

from math import log2

from shapes import (
    FOCUS,
    FOCUS_FILL,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    block,
    box,
    brace,
    canvas,
    caption,
    oracle,
    rule,
    text,
)

SPLITS = ((1, 3, 0, 2), (2, 5, 1, 4), (3, 0, 2, 1))
LEFT, STEP, CELL = 140, 170, 36
SEQUENCES = (  # name, key tiles, fill, ink
    ("A", 7, FOCUS, WHITE),
    ("B", 3, "#CC79A7", INK),
    ("C", 2, FOCUS_FILL, INK),
)


def draw():
    fig, ax = canvas(
        568,
        "Split the history, merge the parts",
        "Three workers run at the same time, each on its part of one sequence's keys and values.",
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
        caption(ax, middle, 90, f"part {i}", ha="center")
        block(ax, x, 104, CELL, [str(score) for score in scores], height=34, fills=[PANEL] * 4)
        arrow(ax, (middle, 138), (middle, 172), colour=FOCUS)
        box(ax, x - 8, 172, 4 * CELL + 16, 100, edge=FOCUS, fill=FOCUS_FILL)
        text(ax, middle, 190, f"worker {i}", size=SMALL, weight="bold", colour=FOCUS)
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
    caption(
        ax,
        28,
        412,
        "part = acc / l, and lse = m + log2(l): a worker stores these two and nothing else.",
    )
    rule(ax, (28, 432), (812, 432))
    text(ax, 28, 457, "Which part does a worker get?", weight="bold", ha="left")
    caption(ax, 270, 457, "An equal share of all key tiles, whichever sequence they belong to.")
    _shares(ax)
    return fig


def _shares(ax):
    """The key tiles of three sequences in one row, and the share of each worker below."""
    cell, x, y = 50, 140, 478
    text(ax, 28, y + 15, "key tiles", ha="left", size=SMALL)
    for name, tiles, fill, ink in SEQUENCES:
        words = [f"{name}{i}" for i in range(tiles)]
        block(ax, x, y, cell, words, height=30, fills=[fill] * tiles, size=SMALL, colour=ink)
        x += tiles * cell
    for worker in range(4):
        left = 140 + 3 * cell * worker
        brace(ax, left + 3, left + 3 * cell - 3, y + 35, f"worker {worker}")
