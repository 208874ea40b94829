"""Day 19: three code paths of attention, one for each kind of cache."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    SMALL,
    arrow,
    box,
    canvas,
    caption,
    pill,
    route,
    text,
)


def draw():
    fig, ax = canvas(
        420,
        "The fused read",
        "One branch in attention: a cache with paged_attention takes q and returns the output.",
    )
    box(ax, 28, 196, 120, 56, "q, k, v\nof this step", size=SMALL + 0.5)
    for y, title, words in (
        (124, "no cache", ""),
        (224, "append", "returns all K and V"),
        (324, "paged_attention", "returns the output"),
    ):
        colour = FOCUS if y == 324 else INK
        text(ax, 212, y - 10, title, size=SMALL, ha="left", weight="bold", colour=colour, mono=True)
        caption(ax, 212, y + 12, words)
        if y == 224:
            arrow(ax, (148, y), (204, y))
        else:
            route(ax, (176, 224), (176, y), (204, y), colour=colour)
    arrow(ax, (290, 124), (560, 124))
    caption(ax, 302, 112, "this step’s k, v", ha="left")
    pill(ax, 560, 104, 100, 40, "sdpa")
    box(ax, 386, 202, 112, 44, "cache", edge=CONTIGUOUS, fill=CONTIGUOUS_FILL)
    arrow(ax, (344, 224), (386, 224))
    arrow(ax, (344, 324), (386, 324), colour=FOCUS)
    arrow(ax, (498, 224), (560, 224), colour=CONTIGUOUS)
    text(ax, 529, 210, "k, v", size=SMALL, colour=MUTED)
    pill(ax, 560, 204, 100, 40, "sdpa")
    box(ax, 386, 288, 274, 76, edge=FOCUS, fill=FOCUS_FILL)
    text(ax, 402, 308, "paged cache", size=SMALL, ha="left", weight="bold", colour=FOCUS)
    for x, words in ((402, "write k, v"), (530, "read and attend")):
        pill(ax, x, 322, 112 if x == 402 else 118, 28, words, size=SMALL, edge=HAIR)
    arrow(ax, (514, 336), (530, 336), colour=FOCUS)
    for y, colour in ((326, FOCUS), (124, INK), (224, INK)):
        if y == 224:
            arrow(ax, (660, y), (724, y))
        else:
            route(ax, (660, y), (692, y), (692, 224), (724, 224), colour=colour)
    pill(ax, 724, 204, 88, 40, "o_proj")
    words = (
        "Attention sees neither blocks nor slots, nor which kernel runs. Day 25 changes one line"
    )
    caption(ax, 28, 394, f"{words} inside the cache.")
    return fig
