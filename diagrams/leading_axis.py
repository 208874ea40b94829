"""Day 21: tlsim runs one line for all programs; the grid is a leading axis of every value."""

from shapes import (
    BODY,
    HAIR,
    HEADLINE,
    INK,
    MUTED,
    SMALL,
    TLSIM,
    TLSIM_FILL,
    WHITE,
    canvas,
    caption,
    pill,
    slot,
    text,
)

PROGRAMS, BLOCK = 3, 4
CELL, HEIGHT, TOP, STEP = 46, 30, 174, 44  # of a cell; the first row, and from row to row
IDS, LANES, SUM = 118, 262, 560  # left edges of the three tensors


def row(i):
    """The top of the row of program i."""
    return TOP + STEP * i


def draw():
    fig, ax = canvas(
        374,
        "One line, all programs",
        "What one program holds, tlsim holds for all programs in one tensor.",
    )
    pill(ax, 190, 84, 460, 30, edge=HAIR)
    words = "offsets = tl.program_id(0) * 4 + tl.arange(0, 4)"
    text(ax, 420, 99, words, mono=True, size=BODY)

    for x, words in (
        (IDS + CELL / 2, "program_id(0)"),
        (LANES + BLOCK * CELL / 2, "arange(0, 4)"),
        (SUM + BLOCK * CELL / 2, "offsets"),
    ):
        text(ax, x, TOP - 24, words, weight="bold")
    for i in range(PROGRAMS):
        text(ax, 28, row(i) + HEIGHT / 2, f"program {i}", size=SMALL, colour=MUTED, ha="left")
        slot(ax, IDS, row(i), CELL, str(i), fill=WHITE, edge=INK, height=HEIGHT)
        for lane in range(BLOCK):
            words, x = str(BLOCK * i + lane), SUM + lane * CELL
            slot(ax, x, row(i), CELL, words, fill=TLSIM_FILL, edge=TLSIM, height=HEIGHT)
    for lane in range(BLOCK):
        slot(ax, LANES + lane * CELL, row(1), CELL, str(lane), fill=WHITE, edge=INK, height=HEIGHT)
    middle = row(1) + HEIGHT / 2
    text(ax, (IDS + CELL + LANES) / 2, middle, "× 4  +", size=HEADLINE, colour=MUTED)
    text(ax, (LANES + BLOCK * CELL + SUM) / 2, middle, "=", size=HEADLINE, colour=MUTED)

    bottom = row(PROGRAMS) + 4
    for x, words in (
        (IDS + CELL / 2, "[3, 1, 1]"),
        (LANES + BLOCK * CELL / 2, "[1, 1, 1, 4]"),
        (SUM + BLOCK * CELL / 2, "[3, 1, 1, 4]"),
    ):
        text(ax, x, bottom, words, mono=True, size=SMALL)
    caption(
        ax,
        28,
        346,
        "The grid's three axes come first. A size of 1 means: the same for all programs, and torch "
        "broadcasts it.",
    )
    return fig
