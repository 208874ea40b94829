"""Day 38: three requests with one system prompt: its blocks are in three tables."""

from shapes import (
    FAULT,
    FAULT_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    canvas,
    caption,
    rule,
    slot,
    text,
)

CELL, SIZE, LEFT = 26, 4, 28
TABLES = {
    "A": ([4, 1, 6], 3, "#CC79A7"),
    "B": ([4, 1, 2], 2, "#FBE7BF"),
    "C": ([4, 1, 7], 4, "#CFEBE1"),
}
SYSTEM = (4, 1)
STATES = {0: "cached", 3: "free", 5: "cached"}


def draw():
    fig, ax = canvas(
        452,
        "Shared prefixes",
        "A, B and C begin with the same 8 tokens: two full blocks, computed once.",
    )
    for row, (name, (blocks, tokens, fill)) in enumerate(TABLES.items()):
        _request(ax, 90 + 40 * row, name, blocks, tokens, fill)
    rule(ax, (28, 222), (812, 222))
    text(ax, LEFT, 244, "The pool: how many tables have each block", weight="bold", ha="left")
    for block in range(8):
        _pool_block(ax, LEFT + 200 * (block % 4), 264 + 76 * (block // 4), block)
    caption(
        ax,
        LEFT,
        432,
        "A cached block is in no table and keeps its content. 1 free + 2 cached + 5 referenced = 8.",
    )
    return fig


def _request(ax, y, name, blocks, tokens, fill):
    text(ax, LEFT + 8, y + 13, name, weight="bold")
    x = LEFT + 30
    for i in range(8):
        slot(ax, x + CELL * i, y, CELL, f"s{i}", fill=FOCUS_FILL, edge=FOCUS, size=SMALL, height=26)
    for i in range(tokens):
        slot(ax, x + CELL * (8 + i), y, CELL, f"{name.lower()}{i}", fill=fill, edge=INK, size=SMALL,
             height=26)  # fmt: skip
    arrow(ax, (x + CELL * 12 + 14, y + 13), (x + CELL * 12 + 74, y + 13))
    text(ax, x + CELL * 12 + 90, y + 13, "table", size=SMALL, colour=MUTED, ha="left")
    for i, block in enumerate(blocks):
        shared = block in SYSTEM
        slot(ax, x + CELL * 12 + 132 + 40 * i, y, 36, str(block), height=26,
             fill=FOCUS_FILL if shared else fill, edge=FOCUS if shared else INK)  # fmt: skip
    caption(ax, x + CELL * 12 + 262, y + 13, f"computes {tokens} tokens" if name != "A" else
            "came first: computes 11")  # fmt: skip


def _pool_block(ax, x, y, block):
    owners = [name for name, (blocks, *_) in TABLES.items() if block in blocks]
    state = STATES.get(block)
    if state == "free":
        slot(ax, x, y, SIZE * CELL, "NaN", height=28, fill=FAULT_FILL, edge=FAULT, colour=FAULT,
             size=SMALL)  # fmt: skip
    for offset in range(SIZE if state != "free" else 0):
        words, fill, edge = _cell(block, offset, owners)
        slot(ax, x + CELL * offset, y, CELL, words, height=28, fill=fill, edge=edge, size=SMALL)
    caption(ax, x, y + 42, f"block {block}")
    count = {"free": "free", "cached": "cached"}.get(state)
    count = count or f"{len(owners)} table{'s' if len(owners) > 1 else ''}"
    text(ax, x + SIZE * CELL, y + 42, count, size=SMALL, ha="right", weight="bold",
         colour=FOCUS if len(owners) > 1 else MUTED)  # fmt: skip


def _cell(block, offset, owners):
    if block in SYSTEM:
        return f"s{offset + (4 if block == 1 else 0)}", FOCUS_FILL, FOCUS
    if not owners:
        return f"x{offset + (4 if block == 5 else 0)}", PANEL, HAIR
    _, tokens, fill = TABLES[owners[0]]
    held = offset < tokens
    return (f"{owners[0].lower()}{offset}" if held else ""), (fill if held else WHITE), INK
