"""Day 8: from token ids to logits, with a shape at every arrow."""

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
    box,
    canvas,
    caption,
    pill,
    route,
    slot,
    text,
)


def draw():
    fig, ax = canvas(
        392,
        "The whole forward pass",
        "Five tokens in; out, at every position, a score for each of 49,152 possible next tokens.",
    )
    y = 186
    for i, number in enumerate(["19840", "216", "34", "32", "34"]):
        slot(ax, 28, y - 60 + 24 * i, 54, number, height=24, mono=True, size=SMALL)
    stages = [(116, 90, "embedding"), (240, 226, ""), (500, 92, "RMSNorm"), (626, 74, "head")]
    for x, w, name in stages:
        if name:
            pill(ax, x, y - 20, w, 40, name, edge=INK, fill=WHITE, size=SMALL)
    box(ax, 240, y - 62, 226, 124, edge=INK, radius=10)
    for i in range(30):
        slot(ax, 253 + i * 6.7, y - 44, 4.6, height=64, fill=FOCUS_FILL, edge="#B98AA9")
    text(ax, 353, y + 42, "30 blocks", weight="bold")
    for start, end in [(82, 116), (206, 240), (466, 500), (592, 626), (700, 734)]:
        arrow(ax, (start, y), (end, y))
    heights = [0.25, 0.5, 0.2, 1.0, 0.35]
    box(ax, 734, y - 62, 78, 124, edge=HAIR, fill=PANEL, radius=6)
    for row, height in enumerate(heights):
        for column in range(6):
            tall = 16 * (0.2 + 0.8 * abs(((row * 7 + column * 5) % 11) / 11 - 0.1 * height))
            base = y - 42 + 24 * row
            slot(ax, 743 + 10 * column, base - tall + 4, 7, height=tall, fill=FOCUS, edge=FOCUS)
    for x, shape in [
        (55, "[1, 5]"),
        (223, "[1, 5, 576]"),
        (483, "[1, 5, 576]"),
        (756, "[1, 5, 49152]"),
    ]:
        text(ax, x, y + 84, shape, mono=True, size=SMALL, colour=MUTED)
    text(ax, 773, y - 76, "logits", size=SMALL, weight="bold")
    text(ax, 55, y - 76, "ids", size=SMALL, weight="bold")
    route(ax, (161, y + 20), (161, 316), (663, 316), (663, y + 20), colour=FOCUS)
    box(
        ax, 318, 304, 190, 24, "tied: one and the same matrix", edge=WHITE, size=SMALL, colour=FOCUS
    )
    caption(
        ax,
        28,
        360,
        "Only the last row of logits names the next token; the others belong to earlier ones.",
    )
    return fig
