"""Day 34: one step of three requests: pack the new tokens, one forward pass, take the last rows."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    pill,
    slot,
    text,
)

REQUESTS = {  # name: what it does, tokens in its cache, new tokens, fill, ink, left edge of its card
    "A": ("a new prompt", 0, 4, FOCUS, WHITE, 28),
    "B": ("the rest of a prompt", 3, 2, "#CC79A7", INK, 294),
    "C": ("decodes", 5, 1, FOCUS_FILL, INK, 560),
}
LEFT, CELL = 225, 56
LAST = 3, 5, 6  # the last row of each


def draw():
    fig, ax = canvas(
        500,
        "One step of three requests",
        "Only tokens that no cache holds are computed. Each weight is read once for all rows.",
    )
    row = 0
    for name, (kind, held, new, fill, ink, x) in REQUESTS.items():
        box(ax, x, 82, 252, 84, edge=HAIR, fill=PANEL)
        text(ax, x + 14, 100, f"{name}: {kind}", weight="bold", ha="left")
        for position in range(held + new):
            fresh = position >= held
            slot(ax, x + 14 + 37 * position, 118, 37, f"{name}{position}", height=30,
                 fill=fill if fresh else WHITE, colour=ink if fresh else MUTED,
                 edge=INK if fresh else HAIR)  # fmt: skip
        start, end = x + 14 + 37 * (held + new / 2), LEFT + CELL * (row + new / 2)
        arrow(ax, (start, 149), (end, 199), colour=MUTED)
        row += new
    _rows(ax, 200, True)
    text(ax, 28, 217, "packed", weight="bold", ha="left")
    caption(ax, 28, 249, "position")
    box(ax, LEFT, 270, 7 * CELL, 44, "30 layers", edge=INK, fill=PANEL, weight="bold")
    caption(ax, 640, 284, "attention: each sequence")
    caption(ax, 640, 301, "reads its own blocks")
    _rows(ax, 334, False)
    text(ax, 28, 342, "hidden states", weight="bold", ha="left")
    caption(ax, 28, 360, "one row for each token")
    for name, last in zip(REQUESTS, LAST, strict=True):
        middle = LEFT + CELL * (last + 0.5)
        arrow(ax, (middle, 369), (middle, 397), colour=INK)
        arrow(ax, (middle, 428), (middle, 448), colour=INK)
        text(ax, middle, 464, f"{name}'s next", size=11.5)
    pill(ax, LEFT, 398, 7 * CELL, 30, "head")
    caption(ax, 640, 413, "for the last rows only")
    return fig


def _rows(ax, y, ids):
    row = 0
    for name, (_, held, new, fill, ink, _) in REQUESTS.items():
        for position in range(held, held + new):
            last = row in LAST and not ids
            slot(ax, LEFT + CELL * row, y, CELL, f"{name}{position}" if ids else str(row),
                 height=34, fill=fill if ids or last else WHITE,
                 colour=ink if ids or last else MUTED)  # fmt: skip
            if ids:
                text(ax, LEFT + CELL * (row + 0.5), 249, str(position), mono=True, weight="bold")
            row += 1
