"""Day 31: record a launch once and replay it often: a CUDA graph on a GPU, tlsim on a CPU."""

from shapes import (
    HAIR,
    INK,
    PANEL,
    SMALL,
    TLSIM,
    TLSIM_FILL,
    TRITON,
    TRITON_FILL,
    arrow,
    block,
    box,
    canvas,
    caption,
    pill,
    rule,
    text,
)

SIDES = (
    {
        "x": 28,
        "title": "On a GPU: a CUDA graph",
        "colour": TRITON,
        "fill": TRITON_FILL,
        "work": ("checks, grid,", "strides, launch"),
        "cost": "Python, for every kernel",
        "calls": ("split_kv", "merge"),
        "list": "the launches, in order",
        "replay": "graph.replay()",
        "fixed": "shapes, grid, the addresses of the tensors",
    },
    {
        "x": 438,
        "title": "On a CPU: tlsim's replay",
        "colour": TLSIM,
        "fill": TLSIM_FILL,
        "work": ("the kernel's source,", "line by line"),
        "cost": "Python, for every line",
        "calls": ("index", "bmm", "exp2", "…"),
        "list": "torch calls, in order",
        "replay": "kernel[grid](…)",
        "fixed": "shapes, constexprs, trip counts of loops",
    },
)


def draw():
    fig, ax = canvas(
        486,
        "Record once, replay many times",
        "The same idea twice: keep the list of calls, and leave out the Python that made it.",
    )
    for side in SIDES:
        _side(ax, **side)
    rule(ax, (420, 88), (420, 418))
    rule(ax, (28, 436), (812, 436))
    caption(
        ax,
        28,
        459,
        "Between two replays the contents of the tensors may change: new tokens, K/V, kv_lens and block tables.",
        colour=INK,
    )
    return fig


def _side(ax, x, title, colour, fill, work, cost, calls, list, replay, fixed):
    text(ax, x, 98, title, weight="bold", ha="left")
    text(ax, x, 128, "once: record", ha="left", size=SMALL, weight="bold")
    pill(ax, x, 142, 152, 50, "\n".join(work), size=SMALL)
    caption(ax, x + 76, 206, cost, ha="center")
    arrow(ax, (x + 152, 167), (x + 190, 167), colour=colour)
    box(ax, x + 190, 142, 184, 50, edge=colour, fill=fill)
    wide = 168 / len(calls)
    block(ax, x + 198, 153, wide, calls, height=28, edge=colour, size=11.5)
    caption(ax, x + 282, 206, list, ha="center")
    text(ax, x, 246, "often: replay", ha="left", size=SMALL, weight="bold")
    for i in range(3):
        y = 262 + 40 * i
        box(ax, x, y, 152, 28, replay, edge=HAIR, fill=PANEL, mono=True, size=SMALL)
        arrow(ax, (x + 152, y + 14), (x + 190, y + 14), colour=colour)
        box(ax, x + 190, y, 184, 28, edge=colour, fill=fill)
        for j in range(len(calls)):
            box(ax, x + 198 + j * wide + 3, y + 7, wide - 6, 14, edge=colour, radius=2)
    caption(ax, x, 392, "kept from the record:")
    text(ax, x, 411, fixed, ha="left", size=SMALL)
