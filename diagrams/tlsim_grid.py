"""Day 21: one launch is a grid of programs, each with its offsets, its lanes and its mask."""

from shapes import (
    BODY,
    FAULT,
    FAULT_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    SMALL,
    TLSIM,
    TLSIM_FILL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    pill,
    slot,
    text,
)

N, BLOCK, PROGRAMS = 10, 4, 3
LAUNCH, BOXES, MEMORY, OUT = 84, 142, 312, 392
LEFT, STEP, WIDTH = 74, 248, 230  # of the programs' boxes
LANE = 46  # of a lane, and of an element under it


def lane_x(offset):
    """Where a lane begins; the elements stand straight below their lanes."""
    program, lane = divmod(offset, BLOCK)
    return LEFT + program * STEP + (WIDTH - BLOCK * LANE) / 2 + lane * LANE


def draw():
    fig, ax = canvas(
        482,
        "A grid of programs",
        "One launch, three programs, one source. Its number is all that tells a program "
        "from the others.",
    )
    pill(ax, 262, LAUNCH, 316, 30, edge=HAIR)
    text(ax, 420, LAUNCH + 15, "double[(3,)](x, out, 10, BLOCK=4)", mono=True, size=BODY)
    for program in range(PROGRAMS):
        x = LEFT + program * STEP
        arrow(ax, (420, LAUNCH + 31), (x + WIDTH / 2, BOXES - 2), colour=MUTED)
        box(ax, x, BOXES, WIDTH, 132, edge=TLSIM, fill=WHITE, line=1.6)
        words = f"program_id(0) is {program}"
        text(ax, x + WIDTH / 2, BOXES + 20, words, weight="bold")
        for lane in range(BLOCK):
            offset = program * BLOCK + lane
            on = offset < N
            fill, edge, ink = (TLSIM_FILL, TLSIM, INK) if on else (PANEL, HAIR, MUTED)
            slot(ax, lane_x(offset), BOXES + 42, LANE, fill=fill, edge=edge, height=30)
            text(ax, lane_x(offset) + LANE / 2, BOXES + 57, str(offset), colour=ink)
            words = "on" if on else "off"
            text(ax, lane_x(offset) + LANE / 2, BOXES + 84, words, size=SMALL, colour=ink)
        words = f"{program} × 4 + [0, 1, 2, 3]"
        text(ax, x + WIDTH / 2, BOXES + 112, words, size=SMALL, colour=MUTED)
    for y, words in ((BOXES + 57, "offsets"), (BOXES + 84, "mask")):
        text(ax, 22, y, words, size=SMALL, colour=MUTED, ha="left")

    for y, name in ((MEMORY, "x"), (OUT, "out")):
        text(ax, 28, y + 15, name, mono=True, ha="left")
        for offset in range(PROGRAMS * BLOCK):
            inside = offset < N
            words = (str(offset) if y == MEMORY else str(2 * offset)) if inside else ""
            fill, edge = (WHITE, INK) if inside else (FAULT_FILL, FAULT)
            slot(ax, lane_x(offset), y, LANE, words, fill=fill, edge=edge, height=30)
            middle = lane_x(offset) + LANE / 2
            if inside and y == MEMORY:
                arrow(ax, (middle, MEMORY - 2), (middle, BOXES + 133), colour=TLSIM)
                arrow(ax, (middle, MEMORY + 31), (middle, OUT - 2), colour=TLSIM)
    text(ax, 28, (MEMORY + OUT + 30) / 2, "× 2", size=SMALL, colour=MUTED, ha="left")
    x = (lane_x(N) + lane_x(N + 1) + LANE) / 2
    text(ax, x, (MEMORY + OUT + 30) / 2, "not yours", size=SMALL, colour=FAULT, weight="bold")
    caption(
        ax,
        28,
        452,
        "Ten numbers, twelve lanes. The mask keeps the last two from reading and from storing.",
    )
    return fig
