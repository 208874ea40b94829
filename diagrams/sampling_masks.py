"""Day 10: one distribution after temperature, top-k, top-p and min-p."""

from math import exp

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    SMALL,
    WHITE,
    canvas,
    caption,
    rule,
    slot,
    text,
)

LOGITS = [4.0, 3.5, 2.9, 2.2, 1.5, 0.9, 0.2, -0.6]
TOKENS = ["a", "the", "its", "one", "all", "my", "no", "ah"]


def draw():
    fig, ax = canvas(
        404,
        "Four ways to shape a distribution",
        "Each panel starts from the first. What is struck out goes; the rest is scaled to 100%.",
    )
    plain = softmax(LOGITS)
    panels = [
        ("as it is", "", plain, [True] * 8),
        ("temperature 0.6", "sharper", softmax([z / 0.6 for z in LOGITS]), [True] * 8),
        ("top-k 2", "the two best", plain, [i < 2 for i in range(8)]),
        ("top-p 0.8", "best until 80%", plain, nucleus(plain, 0.8)),
        ("min-p 0.05", "a twentieth of the best", plain, [p >= 0.05 * plain[0] for p in plain]),
    ]
    for i, (name, note, values, kept) in enumerate(panels):
        panel(ax, 28 + i * 160, name, note, values, kept)
    caption(
        ax,
        28,
        366,
        "Temperature changes all the odds and removes no token. The masks cut the tail off: by rank,",
    )
    caption(
        ax,
        28,
        383,
        "by mass, or by distance from the best. The token that crosses the top-p line stays in.",
    )
    return fig


def softmax(logits):
    weights = [exp(z) for z in logits]
    return [w / sum(weights) for w in weights]


def nucleus(values, mass):
    """Whether top-p keeps each value: the sum of the larger values is below `mass`."""
    return [sum(values[:i]) < mass for i in range(len(values))]


def panel(ax, x, name, note, values, kept):
    left = sum(p for p, keep in zip(values, kept, strict=True) if keep)
    text(ax, x, 98, name, weight="bold", ha="left")
    caption(ax, x, 118, note)
    for i, (p, keep) in enumerate(zip(values, kept, strict=True)):
        y = 146 + 25 * i
        text(ax, x + 26, y, TOKENS[i], size=SMALL, ha="right", colour=INK if keep else MUTED)
        if keep:
            slot(ax, x + 34, y - 8, 150 * p, height=16, fill=FOCUS_FILL, edge=FOCUS)
            text(ax, x + 38 + 150 * p, y, f"{100 * p / left:.0f}%", size=SMALL, ha="left")
        else:
            slot(ax, x + 34, y - 8, max(150 * p, 1), height=16, fill=WHITE, edge=HAIR)
            rule(ax, (x, y), (x + 38 + 150 * p, y), colour=MUTED)
