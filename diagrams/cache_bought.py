"""Day 13: the work for the same eight tokens, with and without a cache."""

from shapes import (
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    MUTED,
    SMALL,
    WHITE,
    arrow,
    canvas,
    caption,
    slot,
    text,
)

N, CELL = 8, 26


def draw():
    fig, ax = canvas(
        424,
        "What the cache bought",
        "Without a cache the work is a triangle, with a cache a line. The rest is only read.",
    )
    top = 124
    for left, title, cached in [
        (96, "without: 36 positions", False),
        (470, "with: 8 positions", True),
    ]:
        text(ax, left, 100, title, weight="bold", ha="left")
        for row in range(N):
            y = top + row * CELL
            text(ax, left - 12, y + CELL / 2, str(row + 1), size=SMALL, colour=MUTED, ha="right")
            for column in range(row + 1):
                earlier = CONTIGUOUS_FILL if cached else FOCUS_FILL
                fill = FOCUS if column == row else earlier
                slot(ax, left + column * CELL, y, CELL, fill=fill, edge=WHITE)
    arrow(ax, (336, 228), (414, 228), line=2.4)
    caption(ax, 28, top + N * CELL + 22, "token")
    caption(ax, 96, top + N * CELL + 22, "every square is 30 blocks of matrix products")
    caption(ax, 470, top + N * CELL + 22, "a pale square is one key and value, read from memory")
    keys = [
        (28, FOCUS, "computed, new"),
        (180, FOCUS_FILL, "computed again"),
        (336, CONTIGUOUS_FILL, "read from the cache"),
    ]
    for x, fill, words in keys:
        slot(ax, x, 384, 14, fill=fill, edge=fill)
        caption(ax, x + 22, 391, words)
    return fig
