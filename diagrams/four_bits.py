"""Day 32: two numbers in a byte, 32 numbers in a group, and the bytes of a weight by format."""

from shapes import (
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    block,
    box,
    brace,
    canvas,
    caption,
    dot,
    rule,
    slot,
    text,
)

FORMATS = [
    ("float32", 32, "32 bits"),
    ("bfloat16", 16, "16 bits"),
    ("q4", 5, "5 bits: 4 + 32 / 32"),
]


def draw():
    fig, ax = canvas(
        498,
        "Keep the four bits",
        "32 weights of a row share a scale and a minimum. Each weight is a number from 0 to 15.",
    )
    _group(ax)
    _byte(ax)
    _line(ax)
    _bits(ax)
    return fig


def _group(ax):
    text(ax, 28, 98, "One row of a weight, in groups of 32", weight="bold", ha="left")
    fills = [PANEL, PANEL, FOCUS_FILL, PANEL, PANEL, PANEL]
    block(ax, 28, 114, 130, [f"group {i}" for i in range(6)], height=28, fills=fills, size=SMALL)
    rule(ax, (288, 142), (28, 176), colour=FOCUS)
    rule(ax, (418, 142), (808, 176), colour=FOCUS)
    slot(ax, 28, 178, 90, "scale", height=32, fill=CONTIGUOUS_FILL, size=SMALL)
    slot(ax, 118, 178, 90, "minimum", height=32, fill=CONTIGUOUS_FILL, size=SMALL)
    cells = [f"{2 * j} {2 * j + 1}" for j in range(16)]
    block(ax, 208, 178, 37.5, cells, height=32, fills=[FOCUS_FILL] * 16, size=SMALL)
    brace(ax, 30, 206, 214, "bfloat16: 2 bytes each")
    brace(ax, 210, 806, 214, "16 bytes with two numbers each: byte j holds numbers 2j and 2j + 1")


def _byte(ax):
    text(ax, 28, 276, "One byte, two numbers", weight="bold", ha="left")
    bits = ["1", "0", "1", "0", "0", "0", "1", "1"]
    fills = [WHITE] * 4 + [FOCUS_FILL] * 4
    block(ax, 28, 294, 30, bits, height=30, fills=fills, mono=True)
    brace(ax, 30, 146, 328, "second number: 10")
    brace(ax, 150, 266, 328, "first number: 3")
    text(ax, 28, 374, "byte = first | second << 4", mono=True, size=SMALL, ha="left")
    caption(ax, 28, 396, "0xA3 = 3 + 16 × 10 = 163")


def _line(ax):
    left, step, y = 316, 30.5, 330
    text(ax, left, 276, "16 values for a group", weight="bold", ha="left")
    rule(ax, (left, y), (left + 15 * step, y), colour=INK, line=1.4)
    for i in range(16):
        x = left + i * step
        rule(ax, (x, y - 5), (x, y + 5), colour=INK, line=1.2)
        text(ax, x, y + 18, str(i), size=SMALL, colour=FOCUS if i in (3, 10) else MUTED)
    for i in (3, 10):
        dot(ax, left + i * step, y, 5, FOCUS)
    brace(ax, left + 6 * step, left + 7 * step, y - 10, "scale", below=False)
    text(ax, left, y + 42, "minimum", size=SMALL, ha="left")
    text(ax, left + 15 * step, y + 42, "maximum = minimum + 15 × scale", size=SMALL, ha="right")
    text(ax, left, 396, "weight = scale × number + minimum", mono=True, size=SMALL, ha="left")


def _bits(ax):
    text(ax, 28, 438, "Bits of a weight", weight="bold", ha="left")
    x = 186
    for name, bits, words in FORMATS:
        wide = 9 * bits
        box(ax, x, 426, wide, 24, edge=FOCUS if name == "q4" else HAIR,
            fill=FOCUS_FILL if name == "q4" else PANEL, radius=3)  # fmt: skip
        text(ax, x, 466, name, size=SMALL, ha="left", weight="bold")
        caption(ax, x + 7.4 * len(name) + 6, 466, words)
        x += wide + 14
