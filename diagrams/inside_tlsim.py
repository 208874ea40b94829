"""Appendix A: the core of tlsim, and the parts that the appendix adds to each of its steps."""

from shapes import (
    HAIR,
    MUTED,
    PANEL,
    SMALL,
    TLSIM,
    TLSIM_FILL,
    arrow,
    box,
    canvas,
    caption,
    text,
)

CORE, ADDED, LEFT, STEP, WIDTH = 112, 226, 28, 201, 181
STEPS = (  # the core's step, what it does; the part of the appendix, what it adds
    ("read the source", "statement by statement", "Rules of the source",
     "refuses what\nTriton refuses"),
    ("run each line", "for all programs at once", "Typing rules",
     "the dtype that Triton\ncomputes in"),
    ("load and store", "a buffer and offsets, a mask", "Sanitizer, trace",
     "checks each address,\nrecords each access"),
    ("launch", "the grid, in waves", "Capture and replay",
     "records the torch calls,\nruns them again"),
)  # fmt: skip


def draw():
    fig, ax = canvas(
        366,
        "Inside tlsim",
        "Four steps of the core, and the part of this appendix that belongs to each.",
    )
    for i, (step, does, part, adds) in enumerate(STEPS):
        x = LEFT + i * STEP
        middle = x + WIDTH / 2
        box(ax, x, CORE, WIDTH, 62, edge=TLSIM, fill=TLSIM_FILL, line=1.6)
        text(ax, middle, CORE + 22, step, weight="bold")
        text(ax, middle, CORE + 43, does, size=SMALL, colour=MUTED)
        box(ax, x, ADDED, WIDTH, 84, edge=HAIR, fill=PANEL)
        text(ax, middle, ADDED + 22, part, weight="bold")
        text(ax, middle, ADDED + 54, adds, size=SMALL, colour=MUTED)
        arrow(ax, (middle, ADDED - 1), (middle, CORE + 64), colour=MUTED)
    caption(ax, LEFT, 96, "the core: Days 21 and 22")
    caption(
        ax,
        LEFT,
        338,
        "Sanitizer, trace and replay change no number: a right kernel gives the same without them.",
    )
    caption(ax, LEFT, ADDED - 14, "this appendix")
    return fig
