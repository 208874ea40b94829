"""Day 20: the bytes that gather and fused move."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    SMALL,
    WHITE,
    arrow,
    block,
    box,
    canvas,
    caption,
    pill,
    rule,
    text,
)

OWN = {1: 4, 4: 4, 6: 2}  # block: how many of its slots are this sequence's


def draw():
    fig, ax = canvas(
        490,
        "Gather against fused",
        "The same attention over the same scattered K and V. They differ in the bytes moved.",
    )
    for x, title in ((28, "gather, then attend"), (440, "fused: attend in place")):
        text(ax, x, 98, title, weight="bold", ha="left")
        caption(ax, x, 135, "pool")
        pool(ax, x + 58, 124)
    rule(ax, (420, 88), (420, 372))
    for own, to in zip(OWN, (134, 230, 302), strict=True):  # into the copy, in order
        arrow(ax, (102 + 37 * own, 147), (to, 185), colour=CONTIGUOUS)
    fills = [CONTIGUOUS_FILL] * 10
    for y, words in ((186, "by token"), (238, "by head")):
        caption(ax, 28, y + 12, words)
        block(ax, 86, y, 24, [""] * 10, height=24, fills=fills, edge=CONTIGUOUS)
        arrow(ax, (206, y + 25), (206, y + 51), colour=CONTIGUOUS)
    for y, words in ((166, "read"), (198, "write"), (224, "read"), (250, "write"), (276, "read")):
        text(ax, 336, y, words, size=SMALL, ha="left", weight="bold")
    pill(ax, 106, 290, 200, 34, "q attends")
    for own, to in zip(OWN, (588, 628, 668), strict=True):
        arrow(ax, (514 + 37 * own, 147), (to, 289), colour=FOCUS)
    text(ax, 748, 224, "read", size=SMALL, ha="left", weight="bold")
    pill(ax, 528, 290, 200, 34, "q attends", fill=FOCUS_FILL)
    for x, words, width, colour, fill in (
        (28, "5 times K and V", 5, CONTIGUOUS, CONTIGUOUS_FILL),
        (440, "once", 1, FOCUS, FOCUS_FILL),
    ):
        caption(ax, x, 351, "moved")
        block(ax, x + 58, 340, 36, [""] * width, height=22, fills=[fill] * width, edge=colour)
        text(ax, x + 66 + 36 * width, 351, words, size=SMALL, ha="left", colour=INK)
    box(ax, 28, 394, 784, 68, fill=WHITE, edge=HAIR)
    text(ax, 44, 416, "Today", weight="bold", ha="left", colour=FOCUS)
    now = "the fused path calls the reference, which gathers inside: both are the left side."
    text(ax, 108, 416, now, ha="left")
    text(ax, 44, 440, "Week 6", weight="bold", ha="left", colour=MUTED)
    later = "a kernel replaces the reference and reads slot by slot: the right side."
    text(ax, 108, 440, later, ha="left")
    return fig


def pool(ax, x, y):
    """Three blocks of this sequence among those of other sequences."""
    for i in range(8):
        mine = OWN.get(i, 0)
        fills = [CONTIGUOUS_FILL if n < mine else WHITE for n in range(4)]
        block(
            ax, x + i * 37, y, 8, [""] * 4, height=22, fills=fills,
            edge=CONTIGUOUS if mine else HAIR,
        )  # fmt: skip
