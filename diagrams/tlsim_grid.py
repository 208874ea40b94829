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
    route,
    slot,
    text,
)

N, BLOCK, PROGRAMS = 10, 4, 3
LAUNCH, MEMORY, BOXES, OUT = 84, 144, 208, 374
LEFT, STEP, WIDTH = 74, 248, 230  # of the programs' boxes
LANE = 46  # of a lane, and of an element under it


def lane_x(offset):
    """The left edge of a lane; each element is directly below its lane."""
    program, lane = divmod(offset, BLOCK)
    return LEFT + program * STEP + (WIDTH - BLOCK * LANE) / 2 + lane * LANE


def draw():
    fig, ax = canvas(
        464,
        "A grid of programs",
        "One launch, three programs, one source. Only the number of a program differs.",
    )
    pill(ax, 262, LAUNCH, 316, 30, edge=HAIR)
    text(ax, 420, LAUNCH + 15, "double[(3,)](x, out, 10, BLOCK=4)", mono=True, size=BODY)
    for program in range(PROGRAMS):
        x = LEFT + program * STEP
        down = [(420, LAUNCH + 31), (420, LAUNCH + 44), (x + 11, LAUNCH + 44), (x + 11, BOXES - 2)]
        route(ax, *down, colour=MUTED)  # beside the row of x
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
                arrow(ax, (middle, MEMORY + 31), (middle, BOXES - 2), colour=TLSIM)
                arrow(ax, (middle, BOXES + 133), (middle, OUT - 2), colour=TLSIM)
    x = (lane_x(N) + lane_x(N + 1) + LANE) / 2
    for y, words in (((MEMORY + 30 + BOXES) / 2, "load"), ((BOXES + 132 + OUT) / 2, "store × 2")):
        text(ax, 22, y, words, size=SMALL, colour=MUTED, ha="left")
        text(ax, x, y, "outside", size=SMALL, colour=FAULT, weight="bold")
    caption(
        ax,
        28,
        434,
        "Ten numbers, twelve lanes. The mask keeps the last two from reading and from storing.",
    )
    return fig
