"""Day 29: the query heads of one KV head as rows of one tile, so that each key is read once."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    block,
    canvas,
    caption,
    rule,
    slot,
    text,
)

HEADS, KEYS = 4, 8


def draw():
    fig, ax = canvas(
        470,
        "Heads packed on their keys",
        "Four query heads share one KV head. The same keys serve all four.",
    )
    _apart(ax)
    rule(ax, (366, 88), (366, 446))
    _packed(ax)
    return fig


def _apart(ax):
    text(ax, 28, 98, "One program for each query head", weight="bold", ha="left")
    caption(ax, 28, 117, "Day 22")
    for head in range(HEADS):
        y = 142 + 64 * head
        slot(ax, 28, y, 46, f"q{head}", height=34, fill=FOCUS_FILL)
        arrow(ax, (122, y + 17), (76, y + 17), colour=MUTED)
        block(ax, 124, y, 26, [f"k{i}" for i in range(KEYS)], height=34, size=SMALL,
              fills=[PANEL] * KEYS, edge=HAIR)  # fmt: skip
        caption(ax, 124, y + 46, f"read by program {head}")
    text(ax, 28, 412, "4 programs read each key: 4 times", ha="left")
    caption(ax, 28, 434, "and multiply one row at a time")


def _packed(ax):
    left, wide, high = 392, 96, 24
    text(ax, left, 98, "One program for each KV head", weight="bold", ha="left")
    caption(ax, left, 117, "Day 29")
    caption(ax, 548, 136, "k0 … k7, read once, transposed")
    block(ax, 548, 150, 33, [f"k{i}" for i in range(KEYS)], height=52, size=SMALL,
          fills=[PANEL] * KEYS)  # fmt: skip
    top = 222
    for row in range(6):
        real = row < HEADS
        y = top + high * row
        words = f"q{row}" if real else "padding" if row == HEADS else "… 16 rows"
        slot(ax, left, y, wide, words, height=high,
             fill=FOCUS_FILL if real else WHITE, edge=INK if real else HAIR,
             colour=INK if real else MUTED, size=SMALL)  # fmt: skip
        fills = [FOCUS_FILL if real else WHITE] * KEYS
        block(ax, 548, y, 33, ["·" if real else ""] * KEYS, height=high, fills=fills,
              edge=FOCUS if real else HAIR)  # fmt: skip
    arrow(ax, (490, top + 2 * high), (546, top + 2 * high), colour=FOCUS)
    arrow(ax, (680, 202), (680, top - 1), colour=FOCUS)
    caption(ax, left, top + 6 * high + 14, "one tile of q")
    caption(ax, 548, top + 6 * high + 14, "scores: one tl.dot, all heads at once")
    text(ax, left, 412, "1 program reads each key: once", ha="left")
    caption(ax, left, 434, "The tile has 16 rows: a prefill fills them with more queries.")
