"""Days 22 to 31: the attention kernel rises, step by step, to the limit of the memory."""

from itertools import pairwise

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    MUTED,
    PANEL,
    arrow,
    box,
    canvas,
    caption,
    dot,
    rule,
    text,
)

LIMIT = "#000000"
X0, X1, TOP, BOTTOM = 60, 470, 112, 396
KNEE = (372, 140)  # where the two limits meet
FIRST = (84, 332)  # the first point of the bandwidth's line
DECODE, PREFILL = 168, 430  # where a decode step and a prefill stand
STEPS = (  # y, day, title, remark
    (366, "Day 22", "one program for each query head", "keys are read again for every head"),
    (330, "Day 29", "heads packed on their keys", "each key is read once"),
    (300, "Day 30", "history split over programs", "one long sequence fills the GPU"),
    (277, "Day 31", "tile, warps and stages chosen", "enough loads under way at any time"),
)


def draw():
    fig, ax = canvas(
        476,
        "Four kernels on the way to the limit",
        "A schematic roofline, not to scale: Day 31 plots measured shares.",
    )
    caption(ax, X0 + 8, 98, "operations per second")
    rule(ax, (X0, TOP - 22), (X0, BOTTOM), (X1, BOTTOM), colour=MUTED)
    caption(ax, X1, BOTTOM + 34, "operations per byte that must be read", ha="right")
    rule(ax, (DECODE, BOTTOM), (DECODE, _limit(DECODE)), colour=HAIR, dashed=True)
    rule(ax, (PREFILL, BOTTOM), (PREFILL, _limit(PREFILL)), colour=HAIR, dashed=True)
    caption(ax, DECODE, BOTTOM + 14, "a decode step", ha="center")
    caption(ax, PREFILL, BOTTOM + 14, "a prefill", ha="center")
    rule(ax, FIRST, KNEE, (X1, KNEE[1]), colour=LIMIT, line=2.4)
    text(ax, 352, 122, "peak arithmetic", size=12, ha="left")
    text(ax, 236, 196, "peak bandwidth", size=12, ha="right")
    caption(ax, 236, 214, "measured on Day 27", ha="right")
    for i, (y, name, title, remark) in enumerate(STEPS):
        row = 132 + 76 * (len(STEPS) - 1 - i)
        last = i == len(STEPS) - 1
        dot(ax, DECODE, y, 6, FOCUS if last else FOCUS_FILL, edge=FOCUS)
        box(ax, 500, row - 28, 312, 62, edge=FOCUS if last else HAIR,
            fill=FOCUS_FILL if last else PANEL)  # fmt: skip
        text(ax, 514, row - 10, f"{name}: {title}", ha="left", weight="bold", size=12)
        caption(ax, 514, row + 13, remark)
        rule(ax, (DECODE + 9, y), (500, row + 3), colour=HAIR)
    for (low, *_), (high, *_) in pairwise(STEPS):
        arrow(ax, (DECODE, low - 7), (DECODE, high + 7), colour=FOCUS)
    caption(
        ax,
        28,
        456,
        "A decode step has few operations for each byte, so the bandwidth is its limit. A kernel moves up, not right.",
    )
    return fig


def _limit(x):
    """The height of the limit over x."""
    (x0, y0), (x1, y1) = FIRST, KNEE
    return y1 if x > x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
