"""Day 24: three laws on plain axes and on log-log axes."""

import math

from shapes import (
    FOCUS,
    HAIR,
    INK,
    MUTED,
    SMALL,
    arrow,
    canvas,
    caption,
    dot,
    rule,
    text,
)

LENGTHS = [2**i for i in range(9)]  # 1 to 256 times the shortest
LAWS = (  # name, cost of twice the length, exponent, time of the shortest, colour
    ("flat", "twice the length: the same", 0.0, 40.0, MUTED),
    ("linear", "twice the length: 2 times", 1.0, 3.0, FOCUS),
    ("faster", "twice the length: 4 times", 2.0, 0.05, INK),
)
TOP, BOTTOM, WIDE = 120, 330, 300


def draw():
    fig, ax = canvas(
        452,
        "Flat or climbing?",
        "The same three sweeps twice. Every dot is a measurement, each at twice the length.",
    )
    for x, title in ((60, "plain axes"), (480, "log-log axes")):
        text(ax, x, 98, title, weight="bold", ha="left")
        rule(ax, (x, TOP), (x, BOTTOM), (x + WIDE, BOTTOM), colour=MUTED)
        caption(ax, x + WIDE, BOTTOM + 14, "length", ha="right")
        caption(ax, x - 8, TOP + 4, "time", ha="right")
    for _, _, exponent, first, colour in LAWS:
        seconds = [first * n**exponent for n in LENGTHS]
        plain = [(n / 256, s / 900) for n, s in zip(LENGTHS, seconds, strict=True)]
        logs = [
            (i / 8, (math.log2(s) + 5) / 17.5) for i, s in enumerate(seconds)
        ]  # from 1/32 to 2 ** 12.5
        for x, points in ((60, plain), (480, logs)):
            places = [(x + 6 + a * (WIDE - 12), BOTTOM - 6 - b * (BOTTOM - TOP)) for a, b in points]
            inside = [place for place in places if place[1] >= TOP]
            rule(ax, *inside, colour=colour, line=1.6)
            for place in inside:
                dot(ax, *place, 3.5, colour)
    caption(ax, 70, BOTTOM + 34, "Five of the nine dots sit in the corner:", colour=INK)
    caption(ax, 70, BOTTOM + 50, "only the longest lengths show.", colour=INK)
    caption(ax, 490, BOTTOM + 34, "Each law is a straight line, and its slope is", colour=INK)
    caption(ax, 490, BOTTOM + 50, "the exponent.", colour=INK)
    arrow(ax, (386, 225), (446, 225), colour=MUTED)
    for i, (name, cost, exponent, _, colour) in enumerate(LAWS):
        x = 60 + 260 * i
        dot(ax, x, 420, 5, colour)
        text(ax, x + 12, 414, f"{name}: exponent {exponent:.0f}", ha="left", weight="bold")
        text(ax, x + 12, 432, cost, ha="left", size=SMALL, colour=MUTED)
    rule(ax, (28, 396), (812, 396), colour=HAIR)
    return fig
