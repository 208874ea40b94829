"""Day 23: one kernel source, three runtimes, one oracle."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    SMALL,
    TLSIM,
    TLSIM_FILL,
    TRITON,
    TRITON_FILL,
    arrow,
    box,
    canvas,
    caption,
    oracle,
    pill,
    route,
    text,
)

ENGINES = (
    ("tlsim", "in this process: all programs at once, in torch", TLSIM, TLSIM_FILL),
    ("Triton’s interpreter", "a process of its own: one program at a time", TRITON, TRITON_FILL),
    ("Triton, compiled", "machine code of a GPU, from sm_75 to sm_100", TRITON, TRITON_FILL),
)


def draw():
    fig, ax = canvas(
        452,
        "One source, three runtimes",
        "The source is the same in all three. The output of each is compared with the oracle.",
    )
    box(ax, 28, 149, 178, 116, edge=FOCUS, fill=FOCUS_FILL)
    text(ax, 117, 176, "paged_attention.py", size=SMALL, weight="bold", colour=FOCUS, mono=True)
    text(ax, 117, 222, "pointers, strides, masks,\na loop over tiles", size=SMALL + 0.5)
    for i, (name, words, colour, fill) in enumerate(ENGINES):
        y = 92 + 82 * i
        box(ax, 266, y, 318, 66, edge=colour, fill=fill)
        text(ax, 282, y + 23, name, ha="left", weight="bold")
        text(ax, 282, y + 46, words, ha="left", size=SMALL)
        middle = y + 33
        if i == 1:
            arrow(ax, (206, 207), (266, middle))
            arrow(ax, (584, middle), (664, middle))
        else:
            route(ax, (206, 207), (236, 207), (236, middle), (266, middle))
            route(ax, (584, middle), (618, middle), (618, 207), (664, 207))
    oracle(ax, 664, 162, 148, 90)
    text(ax, 738, 186, "the oracle", weight="bold")
    text(ax, 738, 220, "closer than\ntolerance(dtype)", size=SMALL)
    pill(ax, 28, 364, 178, 40, "select_backend", mono=True, size=SMALL + 0.5, edge=HAIR)
    arrow(ax, (206, 384), (266, 384), colour=INK)
    text(
        ax,
        282,
        374,
        "a GPU of capability 7.5 or newer, and Triton: compiled",
        ha="left",
        size=SMALL + 0.5,
    )
    text(ax, 282, 396, "anything else: tlsim", ha="left", size=SMALL + 0.5)
    caption(
        ax, 28, 428, "select_backend looks at the tensors’ device, once per call.", colour=MUTED
    )
    return fig
