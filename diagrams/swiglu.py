"""Day 5: the MLP of a block: the SiLU of one half multiplies the other half."""

from math import exp

from shapes import (
    FOCUS,
    FOCUS_FILL,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    dot,
    pill,
    route,
    rule,
    text,
)


def draw():
    fig, ax = canvas(
        420,
        "SwiGLU: one half opens the gates for the other",
        "Two projections widen x from 576 to 1536; the product of the two is projected back.",
    )
    _flow(ax)
    _silu(ax)
    return fig


def _flow(ax):
    box(ax, 28, 178, 44, 58, "x", edge=INK, fill=PANEL, weight="bold")
    caption(ax, 50, 252, "576", ha="center")
    rule(ax, (72, 207), (96, 207), colour=INK, line=1.4)
    route(ax, (96, 207), (96, 142), (122, 142))
    route(ax, (96, 207), (96, 272), (122, 272))
    for y, name in [(142, "gate_proj"), (272, "up_proj")]:
        pill(ax, 122, y - 18, 106, 36, name, edge=INK, fill=WHITE, mono=True, size=SMALL)
        arrow(ax, (228, y), (254, y))
    column(ax, 254, 142, 100, FOCUS_FILL)
    column(ax, 254, 272, 100, WHITE)
    caption(ax, 266, 336, "1536", ha="center")
    arrow(ax, (278, 142), (306, 142))
    pill(ax, 306, 124, 64, 36, "silu", edge=FOCUS, fill=FOCUS_FILL, mono=True, size=SMALL)
    times = (412, 207)
    route(ax, (370, 142), (412, 142), (412, 193))
    route(ax, (278, 272), (412, 272), (412, 221))
    dot(ax, *times, 14, WHITE, edge=INK)
    text(ax, *times, "×", size=16, weight="bold")
    arrow(ax, (426, 207), (446, 207))
    pill(ax, 446, 189, 106, 36, "down_proj", edge=INK, fill=WHITE, mono=True, size=SMALL)
    arrow(ax, (552, 207), (576, 207))
    box(ax, 576, 178, 24, 58, edge=INK, fill=PANEL)
    caption(ax, 588, 252, "576", ha="center")
    text(ax, 28, 384, "down(silu(gate(x)) * up(x))", mono=True, ha="left")
    caption(ax, 262, 384, "three matrices without bias: three quarters of a block’s weights")


def column(ax, x, y, height, fill):
    """A tall vector, centred on y."""
    box(ax, x, y - height / 2, 24, height, edge=INK, fill=fill, radius=4)


def _silu(ax):
    text(ax, 640, 112, "silu(z) = z × sigmoid(z)", size=SMALL, ha="left", weight="bold")
    x0, y0, w, h = 640, 132, 172, 190
    scale = w / 10
    zero = y0 + h * 0.84
    rule(ax, (x0, zero), (x0 + w, zero), colour=MUTED)
    rule(ax, (x0 + w / 2, y0), (x0 + w / 2, y0 + h), colour=MUTED)
    line = [-5 + i / 10 for i in range(101)]
    points = [(x0 + w / 2 + z * scale, zero - scale * 1.7 * z / (1 + exp(-z))) for z in line]
    rule(ax, *points, colour=FOCUS, line=2.2)
    caption(ax, x0, zero + 22, "closed")
    caption(ax, x0 + w, zero + 22, "open", ha="right")
