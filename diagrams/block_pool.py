"""Day 14: one strip for each sequence, or one pool of blocks for all of them."""

from shapes import (
    CONTIGUOUS,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    SMALL,
    WHITE,
    block,
    box,
    canvas,
    caption,
    rule,
    slot,
    text,
)

LONGEST, SIZE = 24, 4
SEQUENCES = {  # name: tokens, blocks, fill, ink
    "A": (7, (0, 3), FOCUS, WHITE),
    "B": (17, (1, 2, 4, 5, 8), "#CC79A7", INK),
    "C": (4, (6,), FOCUS_FILL, INK),
}


def draw():
    fig, ax = canvas(
        476,
        "A pool of blocks",
        "A sequence takes a block when it needs one, and gives it back when it ends.",
    )
    _strips(ax)
    rule(ax, (28, 222), (812, 222))
    _pool(ax)
    return fig


def _strips(ax):
    text(ax, 28, 92, "Contiguous: a strip for the longest that each could become", weight="bold",
         ha="left")  # fmt: skip
    for row, (name, (tokens, *_)) in enumerate(SEQUENCES.items()):
        y = 114 + 30 * row
        text(ax, 34, y + 10, name, weight="bold")
        fills = [CONTIGUOUS] * tokens + [WHITE] * (LONGEST - tokens)
        block(ax, 56, y, 22, [""] * LONGEST, height=20, fills=fills, edge=CONTIGUOUS)
    caption(ax, 612, 134, "72 slots reserved, 28 used:")
    caption(ax, 612, 152, "61% empty, and no place for D")


def _pool(ax):
    text(ax, 28, 248, "Paged: 12 blocks of 4 slots, owned one by one", weight="bold", ha="left")
    text(ax, 28, 284, "tables", size=SMALL, colour=MUTED, ha="left")
    for row, (name, (_, blocks, fill, ink)) in enumerate(SEQUENCES.items()):
        y = 300 + 34 * row
        box(ax, 28, y, 24, 24, name, fill=fill, edge=fill, colour=ink, weight="bold")
        text(ax, 62, y + 12, ", ".join(map(str, blocks)), mono=True, ha="left")
    box(ax, 28, 402, 44, 24, "free", edge=HAIR, size=SMALL, colour=MUTED)
    text(ax, 82, 414, "7, 9, 10, 11", mono=True, ha="left", colour=MUTED)
    owner = {b: (name, i) for name, row in SEQUENCES.items() for i, b in enumerate(row[1])}
    for number in range(12):
        x, y = 230 + 98 * (number % 6), 288 + 74 * (number // 6)
        name, index = owner.get(number, ("", 0))
        for offset in range(SIZE):
            tokens, _, fill, ink = SEQUENCES.get(name, (0, (), WHITE, INK))
            held = index * SIZE + offset < tokens
            slot(ax, x + 22 * offset, y, 22, name if held else "", fill=fill if held else WHITE,
                 edge=INK if name else HAIR, size=SMALL, colour=ink, height=30)  # fmt: skip
        text(ax, x + 44, y + 44, f"block {number}", size=SMALL, colour=MUTED)
    caption(
        ax, 230, 446, "32 slots owned, 28 used: 12% empty. A, B and C can all grow, and D fits too."
    )
