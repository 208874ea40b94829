"""Day 9: the loop that generates text, and its three ends."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
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
    route,
    rule,
    slot,
    text,
)


def draw():
    fig, ax = canvas(
        400,
        "The greedy loop",
        "Take the best next token, append it, repeat, until there is a reason to stop.",
    )
    y = 158
    block(ax, 28, y - 19, 38, ["1780", "314", "9354", "47"], height=38, mono=True, size=SMALL)
    caption(ax, 28, y - 34, "ids")
    arrow(ax, (180, y), (212, y))
    box(ax, 212, y - 28, 100, 56, "model", edge=INK, weight="bold", radius=10)
    arrow(ax, (312, y), (344, y))
    heights = [10, 22, 14, 44, 18, 8, 26]
    for i, tall in enumerate(heights):
        fill = FOCUS if tall == 44 else FOCUS_FILL
        slot(ax, 344 + 15 * i, y + 24 - tall, 11, height=tall, fill=fill, edge=fill)
    caption(ax, 396, y + 42, "logits, last row", ha="center")
    arrow(ax, (452, y), (484, y))
    pill(ax, 484, y - 20, 92, 40, "argmax", edge=FOCUS, fill=FOCUS_FILL, mono=True, size=SMALL)
    arrow(ax, (576, y), (608, y))
    slot(ax, 608, y - 19, 46, "next", height=38, fill=FOCUS_FILL, edge=FOCUS, size=SMALL)
    arrow(ax, (654, y), (686, y))
    box(ax, 686, y - 28, 126, 56, "time to stop?", edge=INK, radius=10)
    route(ax, (749, y + 28), (749, 246), (104, 246), (104, y + 19))
    box(
        ax,
        316,
        234,
        220,
        24,
        "no: append it and go round again",
        edge=WHITE,
        size=SMALL,
        colour=MUTED,
    )
    route(ax, (788, y + 28), (788, 338), (588, 338))
    text(ax, 778, 318, "yes", size=SMALL, colour=MUTED, ha="right")
    rule(ax, (580, 306), (586, 306), (586, 370), (580, 370), colour=MUTED)
    exits = [
        ("an end-of-sequence id", "“stop”", "the model has finished; the id is not shown"),
        ("max_tokens reached", "“length”", "you asked for no more"),
        ("the context is full", "“length”", "there is no position left to write at"),
    ]
    text(ax, 28, 288, "Ways out", weight="bold", ha="left")
    for i, (why, reason, note) in enumerate(exits):
        row = 314 + 24 * i
        text(ax, 28, row, why, size=SMALL, ha="left")
        pill(ax, 196, row - 10, 76, 20, reason, size=SMALL, mono=True)
        caption(ax, 290, row, note)
    return fig
