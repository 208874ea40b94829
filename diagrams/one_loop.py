"""Day 12: one loop for generate, chat and stream, and text held back for a stop string."""

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
    rule,
    text,
)


def draw():
    fig, ax = canvas(
        448,
        "One loop for all of them",
        "generate collects the pieces that stream yields, so both give the same text.",
    )
    y = 134
    parts = [
        (28, 104, "prefill"),
        (164, 104, "sample"),
        (300, 124, "detokenise"),
        (456, 140, "look for a stop"),
    ]
    for x, w, name in parts:
        pill(ax, x, y - 20, w, 40, name, edge=INK, fill=WHITE)
    for start, end in [(132, 164), (268, 300), (424, 456), (596, 632)]:
        arrow(ax, (start, y), (end, y))
    route(ax, (526, y + 20), (526, 194), (216, 194), (216, y + 20))
    box(ax, 306, 182, 130, 24, "decode one token", edge=WHITE, size=SMALL, colour=MUTED)
    rule(ax, (632, 104), (632, 166), colour=INK, line=1.4)
    for i, (name, what) in enumerate(
        [("stream", "pieces"), ("generate", "all of it"), ("chat", "one answer")]
    ):
        row = 108 + 26 * i
        text(ax, 646, row, name, mono=True, size=12.5, ha="left")
        caption(ax, 724, row, what)
    rule(ax, (28, 226), (812, 226))
    text(ax, 28, 252, "A stop string may arrive in pieces:  stop = “END”", weight="bold", ha="left")
    rows = [
        ("“All done”", "All done", "", ""),
        ("“. E”", "All done. ", "E", "could be the start of END"),
        ("“N”", "All done. ", "EN", "it still could be"),
        ("“D of”", "All done. ", "END of", "found: stop, and show none of it"),
    ]
    caption(ax, 28, 280, "token’s text")
    caption(ax, 164, 280, "shown")
    caption(ax, 300, 280, "held back")
    for i, (piece, shown, held, note) in enumerate(rows):
        row = 306 + 33 * i
        text(ax, 28, row, piece, mono=True, size=SMALL, ha="left")
        box(ax, 164, row - 12, 112, 24, shown, edge=HAIR, fill=PANEL, mono=True, size=SMALL)
        if held:
            fill, edge = (PANEL, MUTED) if held.startswith("END") else (FOCUS_FILL, FOCUS)
            box(ax, 300, row - 12, 80, 24, held, edge=edge, fill=fill, mono=True, size=SMALL)
        if held.startswith("END"):
            rule(ax, (312, row), (368, row), colour=INK)
        caption(ax, 398, row, note)
    return fig
