"""Day 16: a step's keys are scattered through the slot mapping and gathered back in order."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    block,
    canvas,
    caption,
    slot,
    text,
)

A, B = (4, 1, 3), (0, 5)  # the blocks of two sequences, in the order of their tables
HELD, NEW = 7, 2  # A's tokens before the step, and the step's
SIZE, CELL, GAP, LEFT = 4, 27, 8, 126
STEP, MAPPING, POOL, HISTORY = 92, 150, 246, 372


def position_x(position):
    return 200 + 52 * position


def slot_x(number):
    return LEFT + number * CELL + number // SIZE * GAP


def a_slot(position):
    return A[position // SIZE] * SIZE + position % SIZE


def draw():
    fig, ax = canvas(
        456,
        "Scatter through the slots, gather in order",
        "Sequence A holds 7 tokens and takes a step of 2. Its blocks lie anywhere in the pool.",
    )
    new = range(HELD, HELD + NEW)
    text(ax, 28, STEP + 12, "this step’s k", size=SMALL, ha="left")
    for p in new:
        slot(ax, position_x(p), STEP, 40, f"k{p}", edge=FOCUS, fill=FOCUS, height=24, colour=WHITE)
        arrow(ax, (position_x(p) + 20, STEP + 26), (position_x(p) + 20, MAPPING - 2), colour=FOCUS)

    text(ax, 28, MAPPING + 13, "A’s slot mapping", size=SMALL, ha="left")
    for p in range(HELD + NEW):
        edge, fill = (FOCUS, FOCUS_FILL) if p in new else (HAIR, PANEL)
        slot(ax, position_x(p), MAPPING, 40, str(a_slot(p)), edge=edge, fill=fill, height=26)
    caption(ax, position_x(9) + 4, MAPPING + 13, "one for each\nposition")
    for p in new:
        arrow(
            ax,
            (position_x(p) + 20, MAPPING + 28),
            (slot_x(a_slot(p)) + CELL / 2, POOL - 3),
            colour=FOCUS,
        )

    text(ax, 28, POOL + 13, "the pool’s slots", size=SMALL, ha="left")
    owner = dict.fromkeys(map(a_slot, range(HELD + NEW)), "A")
    owner |= {B[p // SIZE] * SIZE + p % SIZE: "B" for p in range(6)}
    written = {a_slot(p) for p in new}
    for b in range(6):
        cells = range(b * SIZE, (b + 1) * SIZE)
        fills = [
            FOCUS if s in written else {"A": FOCUS_FILL, "B": PANEL}.get(owner.get(s), WHITE)
            for s in cells
        ]
        edge = FOCUS if b in A else HAIR
        block(ax, slot_x(b * SIZE), POOL, CELL, [""] * SIZE, height=26, fills=fills, edge=edge)
        for s in cells:
            colour = WHITE if s in written else INK
            if s in owner:
                x = slot_x(s) + CELL / 2
                text(ax, x, POOL + 13, owner[s], size=SMALL, colour=colour)
        whose = "A’s" if b in A else "B’s" if b in B else "free"
        caption(ax, slot_x(b * SIZE) + 2 * CELL, POOL + 39, f"block {b}, {whose}", ha="center")

    for i, b in enumerate(A):
        positions = range(i * SIZE, min((i + 1) * SIZE, HELD + NEW))
        end = (position_x(positions[0]) + position_x(positions[-1]) + 40) / 2
        arrow(
            ax,
            (slot_x(b * SIZE) + 2 * CELL, POOL + 52),
            (end, HISTORY - 3),
            colour=CONTIGUOUS,
        )
    text(ax, 28, HISTORY + 13, "gathered for A", size=SMALL, ha="left")
    for p in range(HELD + NEW):
        slot(
            ax,
            position_x(p),
            HISTORY,
            40,
            f"k{p}",
            edge=CONTIGUOUS,
            fill=CONTIGUOUS_FILL,
            height=26,
        )
    caption(
        ax,
        28,
        HISTORY + 54,
        "Positions 7 and 8 are neighbours in the text. In the pool, 7 is the end of block 1 "
        "and 8 is the beginning of block 3.",
    )
    return fig
