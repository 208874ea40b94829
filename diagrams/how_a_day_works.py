"""The five steps of a notebook, from a guess to the engine with the learner's own code."""

from shapes import (
    FAULT,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    ORACLE,
    PANEL,
    PREDICTION,
    PREDICTION_FILL,
    SMALL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    dot,
    route,
    rule,
    text,
)

W, GAP, TOP, H = 144, 16, 88, 226


def draw():
    fig, ax = canvas(
        372,
        "How a day works",
        "Guess, write it yourself, compare with what lands, measure, and run on your own code.",
    )
    steps = [
        ("1  Predict", "a number, before\nyou have seen it", _predict),
        ("2  Your turn", "a stub, a check,\na hint if you want it", _your_turn),
        ("3  It lands", "word for word what\nthe package holds", _lands),
        ("4  Measure", "live, beside what\nyou had guessed", _measure),
        ("5  It is yours", "your own function\nanswers a prompt", _engine),
    ]
    for i, (name, words, icon) in enumerate(steps):
        x = 28 + i * (W + GAP)
        box(ax, x, TOP, W, H, edge=INK, radius=10)
        text(ax, x + 14, TOP + 22, name, weight="bold", ha="left")
        icon(ax, x + 14, TOP + 44)
        text(ax, x + 14, TOP + H - 33, words, size=SMALL, ha="left")
        if i:
            arrow(ax, (x - GAP, TOP + H / 2), (x, TOP + H / 2))
    first, last = 28 + W / 2, 28 + 4 * (W + GAP) + W / 2
    route(ax, (last, TOP + H), (last, 342), (first, 342), (first, TOP + H))
    box(ax, 346, 330, 148, 24, "tomorrow, the next part", edge=WHITE, size=SMALL, colour=MUTED)
    return fig


def _axes(ax, x, y):
    rule(ax, (x, y), (x, y + 104), (x + 116, y + 104), colour=MUTED)


def _predict(ax, x, y):
    _axes(ax, x, y)
    dot(ax, x + 84, y + 46, 5, PREDICTION)
    text(ax, x + 84, y + 28, "your guess", size=SMALL, colour=PREDICTION, weight="bold")
    text(ax, x + 40, y + 74, "?", size=22, colour=HAIR, weight="bold")


def _your_turn(ax, x, y):
    box(ax, x, y, 116, 50, edge=HAIR, fill=PANEL)
    text(ax, x + 8, y + 16, "def rotate(x):", size=SMALL, mono=True, ha="left")
    text(ax, x + 8, y + 35, "    ...", size=SMALL, mono=True, ha="left", colour=PREDICTION)
    for row, (mark, words, colour) in enumerate(
        [("✓", "one head", INK), ("✗", "three heads", FAULT), ("?", "hint", FOCUS)]
    ):
        text(ax, x + 10, y + 66 + 19 * row, mark, size=SMALL, colour=colour, weight="bold")
        text(ax, x + 24, y + 66 + 19 * row, words, size=SMALL, colour=colour, ha="left")


def _lands(ax, x, y):
    box(ax, x, y, 116, 40, edge=HAIR, fill=PANEL)
    text(ax, x + 8, y + 20, "def rotate(x):", size=SMALL, mono=True, ha="left")
    text(ax, x + 58, y + 52, "=", size=16, weight="bold", colour=FOCUS)
    box(ax, x, y + 64, 116, 40, edge=FOCUS, fill=FOCUS_FILL)
    text(ax, x + 58, y + 84, "layers.py", size=SMALL, mono=True)


def _measure(ax, x, y):
    _axes(ax, x, y)
    curve = [(x + 4 + 108 * t, y + 96 - 84 * t * t) for t in [i / 24 for i in range(25)]]
    rule(ax, *curve, colour=ORACLE, line=2, dashed=True)
    rule(ax, (x + 4, y + 98), (x + 112, y + 84), colour=FOCUS, line=2.4)
    dot(ax, x + 84, y + 46, 5, PREDICTION)
    caption(ax, x + 10, y + 14, "before", colour=MUTED)
    caption(ax, x + 74, y + 74, "after", colour=FOCUS)


def _engine(ax, x, y):
    box(ax, x, y, 116, 44, edge=PREDICTION, fill=PREDICTION_FILL)
    text(ax, x + 8, y + 14, "with today", size=SMALL, mono=True, ha="left")
    text(ax, x + 8, y + 30, "  .mine():", size=SMALL, mono=True, ha="left")
    arrow(ax, (x + 58, y + 44), (x + 58, y + 66))
    box(ax, x, y + 66, 116, 38, "“Gravity is …”", edge=HAIR, fill=PANEL, radius=10, size=SMALL)
