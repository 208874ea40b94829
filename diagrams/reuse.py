"""Day 17: blocks are given back, poisoned, and taken again by another sequence."""

from shapes import (
    FAULT,
    FAULT_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    PANEL,
    SMALL,
    WHITE,
    block,
    canvas,
    caption,
    rule,
    slot,
    text,
)

SIZE, CELL, GAP, LEFT = 4, 28, 8, 28
ROWS = [
    # event, {block: (owner, tokens)}, highlighted owner, free stack
    ("1  A holds 9 tokens in three blocks, B holds 6 in two", {4: ("A", 4), 1: ("A", 4),
     3: ("A", 1), 0: ("B", 4), 2: ("B", 2)}, "A", []),
    ("2  A is done: its blocks go back, last first, and their slots are poisoned",
     {0: ("B", 4), 2: ("B", 2)}, "", [3, 1, 4]),
    ("3  C comes with 6 tokens: block 4 was given back last, so it is taken first",
     {0: ("B", 4), 2: ("B", 2), 4: ("C", 4), 1: ("C", 2)}, "C", [3]),
]  # fmt: skip


def draw():
    fig, ax = canvas(
        444,
        "Give it back",
        "The pool stays, a sequence ends. Its slots are filled with NaN, "
        "so a stale read cannot go unnoticed.",
    )
    for i, (words, owners, focus, free) in enumerate(ROWS):
        y = 88 + 104 * i
        text(ax, LEFT, y + 8, words, weight="bold", ha="left")
        pool(ax, y + 28, owners, focus)
        stack(ax, 660, y + 28, free)
    rule(ax, (28, 396), (812, 396), colour=HAIR)
    slot(ax, 28, 411, 16, edge=FAULT, fill=FAULT_FILL)
    caption(
        ax,
        54,
        419,
        "NaN: free, or not written yet. One read too many makes the output NaN too.",
    )
    return fig


def pool(ax, y, owners, focus):
    for b in range(5):
        x = LEFT + b * (SIZE * CELL + GAP)
        owner, tokens = owners.get(b, ("", 0))
        fill = FOCUS_FILL if owner and owner == focus else PANEL
        fills = [fill] * tokens + [FAULT_FILL] * (SIZE - tokens)
        edge = FOCUS if owner and owner == focus else HAIR
        if owner:
            cells = [owner] * tokens + [""] * (SIZE - tokens)
            block(ax, x, y, CELL, cells, height=28, fills=fills, edge=edge, size=SMALL)
        else:
            width, style = SIZE * CELL, {"edge": FAULT, "fill": FAULT_FILL, "colour": FAULT}
            slot(ax, x, y, width, "NaN", height=28, size=SMALL, **style)
        caption(ax, x + 2 * CELL, y + 40, f"block {b}", ha="center")


def stack(ax, x, y, free):
    """The free stack, its top at the right."""
    text(ax, x, y + 14, "free", size=SMALL, ha="left")
    if not free:
        caption(ax, x + 38, y + 14, "none")
    for i, b in enumerate(free):
        slot(ax, x + 38 + 32 * i, y, 28, str(b), edge=FAULT, fill=WHITE)
    if free:
        caption(ax, x + 38, y + 40, "top at the right" if len(free) > 1 else "")
