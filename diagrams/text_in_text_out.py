"""Day 3: a string becomes ids in four steps, and a character waits for all its bytes."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    block,
    box,
    canvas,
    caption,
    pill,
    rule,
    text,
)

CELL, LEFT = 39, 150
TEXT = ["Y", "e", "a", "r", "␣", "2", "0", "2", "4", "␣", "☕", "", ""]
BYTES = ["59", "65", "61", "72", "20", "32", "30", "32", "34", "20", "e2", "98", "95"]
ALPHABET = ["Y", "e", "a", "r", "Ġ", "2", "0", "2", "4", "Ġ", "â", "ĺ", "ķ"]
PIECES = [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (9, 4)]
TOKENS = [
    (0, 4, "Year", 19840),
    (4, 1, "Ġ", 216),
    (5, 1, "2", 34),
    (6, 1, "0", 32),
    (7, 1, "2", 34),
    (8, 1, "4", 36),
    (9, 2, "Ġâ", 4636),
    (11, 1, "ĺ", 242),
    (12, 1, "ķ", 239),
]


def draw():
    fig, ax = canvas(
        540,
        "Text in, text out",
        "A byte-level tokenizer reads any script: whatever you type is bytes in the end.",
    )
    _encode(ax)
    _decode(ax)
    return fig


def _spans(ax, y, spans, labels, *, fill=WHITE, edge=INK, height=30, gap=2, mono=True):
    for (start, n), words in zip(spans, labels, strict=True):
        box(
            ax,
            LEFT + start * CELL + gap,
            y,
            n * CELL - 2 * gap,
            height,
            words,
            fill=fill,
            edge=edge,
            radius=5,
            mono=mono,
            size=16 if "☕" in words else SMALL,
        )


def _encode(ax):
    rows = [104, 152, 200, 248, 296]
    names = ["text", "split", "bytes", "alphabet", "tokens"]
    notes = ["", "every digit\nalone", "UTF-8", "one letter\nper byte", "after the\nmerges"]
    for y, name, note in zip(rows, names, notes, strict=True):
        text(ax, 28, y + 15, name, weight="bold", ha="left")
        if note:
            caption(ax, 676, y + 15, note)
    chars = [(i, 1) for i in range(10)] + [(10, 3)]
    _spans(ax, rows[0], chars, TEXT[:11], fill=PANEL, edge=HAIR, gap=0, mono=False)
    _spans(ax, rows[1], PIECES, ["Year", "␣", "2", "0", "2", "4", "␣☕"], mono=False)
    block(ax, LEFT, rows[2], CELL, BYTES, height=30, mono=True, size=SMALL)
    block(ax, LEFT, rows[3], CELL, ALPHABET, height=30, mono=True, size=SMALL)
    spans = [(start, n) for start, n, _, _ in TOKENS]
    _spans(ax, rows[4], spans, [word for _, _, word, _ in TOKENS], fill=FOCUS_FILL, edge=FOCUS)
    for start, n, _, number in TOKENS:
        x = LEFT + (start + n / 2) * CELL
        text(ax, x, rows[4] + 45, str(number), size=SMALL, mono=True, colour=FOCUS, weight="bold")
    text(ax, 28, rows[4] + 45, "ids", weight="bold", ha="left")
    for y in rows[:-1]:
        arrow(ax, (44, y + 28), (44, y + 50), colour=MUTED)


def _decode(ax):
    rule(ax, (28, 368), (812, 368))
    text(ax, 28, 392, "And back, one id at a time", weight="bold", ha="left")
    steps = [
        ("36", "4", "“4”"),
        ("4636", "␣ e2", "“ ”"),
        ("242", "e2 98", ""),
        ("239", "e2 98 95", "“☕”"),
    ]
    for i, (number, held, shown) in enumerate(steps):
        x = 28 + i * 202
        pill(
            ax,
            x,
            412,
            58,
            28,
            number,
            mono=True,
            size=SMALL,
            fill=FOCUS_FILL,
            edge=FOCUS,
            colour=FOCUS,
        )
        arrow(ax, (x + 58, 426), (x + 80, 426), colour=MUTED)
        box(ax, x + 80, 412, 90, 28, held, mono=True, size=SMALL, edge=INK)
        arrow(ax, (x + 125, 440), (x + 125, 468), colour=MUTED if shown else HAIR)
        if shown:
            box(ax, x + 97, 468, 56, 28, shown, edge=HAIR, fill=PANEL, radius=10)
        else:
            text(ax, x + 125, 482, "held back", size=SMALL, colour=FOCUS)
    caption(ax, 28, 482, "shown")
    caption(
        ax,
        28,
        516,
        "The streaming detokeniser waits for the whole of a character and never shows half of one.",
    )
