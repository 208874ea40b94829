"""Day 22: twelve scores folded tile by tile into m, l and acc, beside the softmax of all."""

from math import exp, inf

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    SMALL,
    arrow,
    box,
    canvas,
    caption,
    oracle,
    pill,
    slot,
    text,
)

TILES = ((1, 3, 0, 2), (2, 5, 1, 4), (3, 0, 2, 1))
LEFT, STEP, CELL = 150, 168, 34


def draw():
    fig, ax = canvas(
        424,
        "The streaming softmax",
        "Scores come one tile at a time and are dropped. m, l and acc stand for all tiles so far.",
    )
    text(ax, 28, 117, "scores", ha="left", weight="bold")
    caption(ax, 28, 136, "of one query")
    text(ax, 28, 262, "kept", ha="left", weight="bold")
    caption(ax, 28, 281, "in registers")
    m, l = -inf, 0.0
    for i, tile in enumerate(TILES):
        x = LEFT + i * STEP
        middle = x + 2 * CELL
        caption(ax, middle, 92, f"tile {i + 1}", ha="center")
        for j, score in enumerate(tile):
            highest = score == max(tile)
            slot(
                ax, x + j * CELL, 106, CELL, str(score),
                fill=FOCUS_FILL if highest else PANEL,
                colour=FOCUS if highest else INK,
                weight="bold" if highest else "normal",
            )  # fmt: skip
        m_new = max(m, *tile)
        alpha = exp(m - m_new)
        l = l * alpha + sum(exp(s - m_new) for s in tile)
        arrow(ax, (middle, 140), (middle, 218), colour=FOCUS)
        text(ax, middle + 10, 178, "fold", size=SMALL, colour=FOCUS, ha="left", weight="bold")
        box(ax, x + 2, 218, 4 * CELL - 4, 84, edge=FOCUS, fill=FOCUS_FILL)
        for row, words in enumerate((f"m    {m_new}", f"l    {l:.2f}", "acc  [head_dim]")):
            text(ax, x + 14, 236 + 24 * row, words, size=SMALL, ha="left", mono=True)
        if i:
            arrow(ax, (x - STEP + 4 * CELL - 2, 260), (x + 2, 260), colour=FOCUS)
            caption(ax, x - 15, 318, f"alpha = {alpha:.2f}".replace("1.00", "1"), ha="center")
        m = m_new
    caption(ax, LEFT + STEP - 15, 335, "the maximum grew", ha="center")
    caption(ax, LEFT + 2 * STEP - 15, 335, "it did not grow", ha="center")
    arrow(ax, (LEFT + 2 * STEP + 4 * CELL - 2, 260), (664, 260), colour=FOCUS)
    pill(ax, 664, 242, 72, 36, "acc / l", size=SMALL, mono=True)
    arrow(ax, (736, 260), (764, 260))
    text(ax, 788, 260, "out", weight="bold")
    oracle(ax, 672, 100, 140, 46, "softmax of all 12\nat once", size=SMALL, colour=MUTED)
    arrow(ax, (788, 146), (788, 246), colour=MUTED, dashed=True)
    caption(ax, 780, 196, "the same", ha="right")
    ax.plot([28, 812], [362, 362], color=HAIR, linewidth=0.8)
    words = "Before a tile is added, l and acc shrink by alpha = exp(m_old - m_new): then all"
    caption(ax, 28, 382, f"{words} terms use the same maximum.")
    caption(
        ax, 28, 400, "Division comes once, after the last tile. No score is ever written to memory."
    )
    return fig
