"""Day 7: a block adds twice to the residual stream, and normalises before each."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    INK,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    day,
    dot,
    pill,
    route,
    text,
)


def draw():
    fig, ax = canvas(
        368,
        "One block: two additions to a stream",
        "The stream passes through unchanged; attention and the MLP each read it and add to it.",
    )
    y = 236
    box(ax, 28, y - 20, 60, 40, "x", edge=INK, fill=PANEL, weight="bold")
    box(ax, 752, y - 20, 60, 40, "x", edge=INK, fill=PANEL, weight="bold")
    arrow(ax, (88, y), (752, y), line=2.4)
    for x, name, day_of, note in [
        (124, "attention", "day 6", "mixes positions"),
        (446, "SwiGLU", "day 5", "each position by itself"),
    ]:
        route(ax, (x, y), (x, 146), (x + 20, 146))
        pill(ax, x + 20, 128, 84, 36, "RMSNorm", edge=INK, fill=WHITE, size=SMALL)
        arrow(ax, (x + 104, 146), (x + 122, 146))
        box(ax, x + 122, 122, 108, 48, name, edge=FOCUS, fill=FOCUS_FILL, weight="bold")
        day(ax, x + 176, 106, day_of)
        day(ax, x + 62, 106, "day 4")
        route(ax, (x + 230, 146), (x + 258, 146), (x + 258, y - 14))
        dot(ax, x + 258, y, 14, WHITE, edge=INK)
        text(ax, x + 258, y, "+", size=17, weight="bold")
        caption(ax, x + 122, 188, note)
        dot(ax, x, y, 3.5)
    text(ax, 124, 286, "x = x + attention(rms_norm(x))", mono=True, size=12.5, ha="left")
    text(ax, 446, 286, "x = x + swiglu(rms_norm(x))", mono=True, size=12.5, ha="left")
    caption(
        ax,
        124,
        324,
        "[batch, seq, 576] all along the stream. Thirty such blocks stand in a row.",
    )
    return fig
