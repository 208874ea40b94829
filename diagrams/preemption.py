"""Day 37: the pool is full, the newest request gives its blocks back, and computes them again."""

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
    box,
    canvas,
    caption,
    pill,
    slot,
    text,
)

FILLS = {"A": (FOCUS, WHITE), "B": ("#CC79A7", INK), "C": (FOCUS_FILL, INK), "": (WHITE, MUTED)}
SCENES = (  # title, blocks of the pool, who runs, who waits, remark
    ("1  The pool is full, and A needs a block", "ABCABCBC", "A, B, C", "", "none is free"),
    ("2  C, the newest, is preempted", "ABAAB B ", "A, B", "C", "A takes one of C's blocks"),
    ("3  A has finished: C computes its tokens again", "CBCCB B ", "B, C", "",
     "prompt and output, in one prefill"),
)  # fmt: skip
CELL = 52


def draw():
    fig, ax = canvas(
        448,
        "Preemption",
        "A, B and C arrived in this order, and share a pool of eight blocks.",
    )
    for i, scene in enumerate(SCENES):
        _scene(ax, 92 + 122 * i, *scene)
    return fig


def _scene(ax, y, title, blocks, running, waiting, remark):
    text(ax, 28, y, title, weight="bold", ha="left")
    for i, owner in enumerate(blocks):
        owner = owner.strip()
        fill, ink = FILLS[owner]
        slot(
            ax, 28 + CELL * i, y + 22, CELL, owner or "free", height=40, fill=fill, colour=ink,
            size=13 if owner else SMALL,
        )  # fmt: skip
    caption(ax, 28, y + 80, remark)
    caption(ax, 480, y + 20, "runs")
    box(ax, 480, y + 32, 120, 32, running, edge=HAIR, fill=PANEL)
    caption(ax, 630, y + 20, "waits")
    box(ax, 630, y + 32, 182, 32, edge=HAIR, fill=PANEL)
    if waiting:
        pill(ax, 636, y + 36, 170, 24, "C: tokens, generator", edge=FAULT, fill=FAULT_FILL,
             size=SMALL)  # fmt: skip
        caption(ax, 630, y + 80, "kept outside the pool")
        arrow(ax, (604, y + 48), (626, y + 48), colour=FAULT)
    else:
        text(ax, 721, y + 48, "nobody", size=SMALL, colour=MUTED)
