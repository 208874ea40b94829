"""Day 1: without a cache, each new token computes all tokens before it again."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    INK,
    MUTED,
    ORACLE,
    SMALL,
    arrow,
    box,
    brace,
    canvas,
    caption,
    oracle,
    pill,
    rule,
    slot,
    text,
)

N, CELL, LEFT, TOP = 8, 30, 100, 92


def draw():
    fig, ax = canvas(
        418,
        "What one token costs without a cache",
        "Each new token runs the model over every position again. Only one of them is new.",
    )
    _staircase(ax)
    _oracle(ax)
    return fig


def _staircase(ax):
    for row in range(N):
        y = TOP + row * CELL
        text(ax, LEFT - 14, y + CELL / 2, f"token {row + 1}", size=SMALL, colour=MUTED, ha="right")
        for column in range(row + 1):
            new = column == row
            slot(
                ax, LEFT + column * CELL, y, CELL, fill=FOCUS if new else FOCUS_FILL, edge="#FFFFFF"
            )
        words = f"{row + 1}"
        text(ax, LEFT + N * CELL + 26, y + CELL / 2, words, size=SMALL, ha="right")
    text(
        ax,
        LEFT + 5.0 * CELL,
        TOP + 1.5 * CELL,
        "new",
        colour=FOCUS,
        weight="bold",
        ha="right",
        size=SMALL,
    )
    arrow(
        ax,
        (LEFT + 3.95 * CELL, TOP + 1.62 * CELL),
        (LEFT + 3.05 * CELL, TOP + 2.4 * CELL),
        colour=FOCUS,
    )
    text(ax, LEFT + 1.7 * CELL, TOP + 5.5 * CELL, "done before", size=SMALL, colour=FOCUS)
    bottom = TOP + N * CELL
    brace(ax, LEFT, LEFT + N * CELL, bottom + 4, "positions", depth=6)
    x = LEFT + N * CELL
    rule(ax, (x + 8, bottom + 6), (x + 30, bottom + 6), colour=INK)
    text(ax, x + 26, bottom + 22, "36", weight="bold", ha="right")
    text(ax, 422, TOP + 15, "8 tokens, 36 positions", weight="bold", ha="left")
    caption(ax, 422, TOP + 40, "n tokens cost n (n + 1) / 2:")
    caption(ax, 422, TOP + 58, "twice the answer, four times the work")


def _oracle(ax):
    oracle(ax, 422, 222, 160, 122)
    box(ax, 672, 222, 140, 122, edge=INK, radius=10)
    text(ax, 502, 245, "the oracle", weight="bold")
    text(ax, 742, 245, "your engine", weight="bold")
    caption(ax, 502, 266, "transformers", ha="center")
    text(ax, 627, 266, "equal?", size=SMALL, colour=MUTED, weight="bold")
    for i, words in enumerate(["tokens", "logits", "activations"]):
        y = 291 + 18 * i
        text(ax, 502, y, words, size=SMALL)
        text(ax, 742, y, words, size=SMALL)
        arrow(ax, (585, y), (669, y), both=True, colour=ORACLE)
    pill(ax, 532, 368, 190, 26, "the same weights", size=SMALL)
    for x in (556, 698):
        arrow(ax, (x, 368), (x, 344), colour=MUTED)
