"""Day 20: what the two reads move through memory."""

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
        468,
        "Gather against fused",
        "The same attention over the same scattered history. What differs is what has to move.",
    )
    for x, title in ((28, "gather, then attend"), (440, "fused: attend in place")):
        text(ax, x, 98, title, weight="bold", ha="left")
        caption(ax, x, 135, "pool")
        pool(ax, x + 58, 124)
    rule(ax, (420, 88), (420, 350))
    for own, to in zip(OWN, (134, 230, 302), strict=True):  # into the copy, in order
        arrow(ax, (102 + 37 * own, 147), (to, 193), colour=CONTIGUOUS)
    text(ax, 336, 170, "read", size=SMALL, ha="left", weight="bold")
    caption(ax, 28, 206, "copy")
    fills = [CONTIGUOUS_FILL] * 10
    block(ax, 86, 194, 24, [""] * 10, height=24, fills=fills, edge=CONTIGUOUS)
    text(ax, 336, 206, "write", size=SMALL, ha="left", weight="bold")
    arrow(ax, (206, 219), (206, 262), colour=CONTIGUOUS)
    text(ax, 336, 241, "read", size=SMALL, ha="left", weight="bold")
    pill(ax, 106, 262, 200, 34, "q attends")
    for own, to in zip(OWN, (588, 628, 668), strict=True):
        arrow(ax, (514 + 37 * own, 147), (to, 261), colour=FOCUS)
    text(ax, 748, 206, "read", size=SMALL, ha="left", weight="bold")
    pill(ax, 528, 262, 200, 34, "q attends", fill=FOCUS_FILL)
    for x, words, width, colour, fill in (
        (28, "3 times the history", 3, CONTIGUOUS, CONTIGUOUS_FILL),
        (440, "once", 1, FOCUS, FOCUS_FILL),
    ):
        caption(ax, x, 329, "moved")
        block(ax, x + 58, 318, 60, [""] * width, height=22, fills=[fill] * width, edge=colour)
        text(ax, x + 66 + 60 * width, 329, words, size=SMALL, ha="left", colour=INK)
    box(ax, 28, 372, 784, 68, fill=WHITE, edge=HAIR)
    text(ax, 44, 394, "Today", weight="bold", ha="left", colour=FOCUS)
    now = "the fused read calls the reference, which gathers inside: both are the left side."
    text(ax, 108, 394, now, ha="left")
    text(ax, 44, 418, "Week 6", weight="bold", ha="left", colour=MUTED)
    later = "a kernel takes its place and reads slot by slot: the right side comes true."
    text(ax, 108, 418, later, ha="left")
    return fig


def pool(ax, x, y):
    """Three blocks of this sequence among other people's."""
    for i in range(8):
        mine = OWN.get(i, 0)
        fills = [CONTIGUOUS_FILL if n < mine else WHITE for n in range(4)]
        block(
            ax, x + i * 37, y, 8, [""] * 4, height=22, fills=fills,
            edge=CONTIGUOUS if mine else HAIR,
        )  # fmt: skip
