"""Day 4: RoPE turns each pair of numbers by an angle that grows with the position."""

from math import cos, pi, sin

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    HEADLINE,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    block,
    canvas,
    caption,
    dot,
    rule,
    text,
)

D, BASE = 8, 100  # small, so that the slow pairs can be seen to turn
HALF = D // 2


def draw():
    fig, ax = canvas(
        470,
        "RoPE: a position is a rotation",
        "Numbers i and i + d/2 are a point; at position p it has turned by p × frequency i.",
    )
    _pairs(ax)
    _dials(ax)
    _relative(ax)
    return fig


def _pairs(ax):
    text(ax, 28, 96, "one head of q or k, d = 8", weight="bold", ha="left")
    cell, y = 30, 148
    fills = [FOCUS_FILL] * HALF + [WHITE] * HALF
    block(ax, 28, y, cell, [str(i) for i in range(D)], fills=fills)
    for i in range(HALF):
        start, end = 28 + (i + 0.5) * cell, 28 + (i + HALF + 0.5) * cell
        arch(ax, start, end, y, 30, colour=FOCUS)
    caption(ax, 28, 198, "pair i is (i, i + 4), not (2i, 2i + 1)")
    text(ax, 28, 252, "frequency of pair i", weight="bold", ha="left")
    text(ax, 28, 280, "theta ** (-2 * i / d)", mono=True, ha="left")
    caption(ax, 28, 306, "pair 0 turns a radian per token,")
    caption(ax, 28, 323, "the last one hardly at all: theta is")
    caption(ax, 28, 340, "100,000 in SmolLM2, 100 in the dials")


def _dials(ax):
    left, top, step = 396, 122, 76
    for p in range(6):
        text(ax, left + p * step, 96, str(p), size=SMALL, colour=MUTED)
    text(ax, left - 36, 96, "position", size=SMALL, colour=MUTED, ha="right")
    for i in range(HALF):
        y = top + 18 + i * 56
        text(ax, left - 36, y, f"pair {i}", size=SMALL, ha="right")
        for p in range(6):
            dial(ax, left + p * step, y, 22, [(p * BASE ** (-2 * i / D), FOCUS)])


def _relative(ax):
    rule(ax, (28, 366), (812, 366))
    text(ax, 28, 394, "Only the distance is left in q · k", weight="bold", ha="left")
    caption(ax, 28, 418, "Both turn, and the angle between them")
    caption(ax, 28, 435, "depends on how far apart they are.")
    theta = 0.45
    for x, (q, k) in [(400, (5, 2)), (620, (9, 6))]:
        dial(ax, x, 416, 32, [(k * theta, MUTED), (q * theta, FOCUS)])
        text(ax, x + 46, 402, f"q at {q}", size=SMALL, colour=FOCUS, ha="left", weight="bold")
        text(ax, x + 46, 420, f"k at {k}", size=SMALL, colour=MUTED, ha="left", weight="bold")
        text(ax, x + 46, 438, "3 apart", size=SMALL, ha="left")
    text(ax, 546, 416, "=", size=HEADLINE, weight="bold")


def dial(ax, x, y, radius, hands):
    """A circle with a hand for each (angle, colour), angles counted from the right, upwards."""
    dot(ax, x, y, radius, PANEL, edge=HAIR)
    for angle, colour in hands:
        tip = (x + 0.94 * radius * cos(angle), y - 0.94 * radius * sin(angle))
        arrow(ax, (x, y), tip, colour=colour)


def arch(ax, x0, x1, y, height, colour):
    """Half an ellipse over x0 .. x1, standing on y."""
    steps = [pi * i / 40 for i in range(41)]
    middle, radius = (x0 + x1) / 2, (x1 - x0) / 2
    points = [(middle - radius * cos(t), y - height * sin(t)) for t in steps]
    rule(ax, *points, colour=colour, line=1.2)
