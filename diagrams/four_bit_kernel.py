"""Day 33: a group of 16 bytes in a thread, a number's bits read as a float32, one scale a group."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    INK,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    block,
    box,
    brace,
    canvas,
    caption,
    rule,
    text,
)

LEFT, BIT = 156, 20  # a bit of the word is 20 wide
NUMBERS = (9, 4, 13, 2, 7, 0, 3, 12)  # numbers 7 to 0: the high bits are on the left
K = 1


def draw():
    fig, ax = canvas(
        494,
        "Four bits, unpacked in a register",
        "A thread loads a group of 32 numbers in one piece. No unpacked weight is ever in memory.",
    )
    right = LEFT + 32 * BIT
    text(ax, 28, 104, "16 bytes", weight="bold", ha="left")
    caption(ax, 28, 123, "a group, a thread")
    words = [f"word {i}" for i in range(4)]
    fills = [FOCUS_FILL, PANEL, PANEL, PANEL]
    block(ax, LEFT, 92, 8 * BIT, words, height=34, fills=fills)
    for x0, x1 in ((LEFT, LEFT), (LEFT + 8 * BIT, right)):
        rule(ax, (x0, 126), (x1, 160), colour=FOCUS, dashed=True)
    text(ax, 28, 172, "a word", weight="bold", ha="left")
    caption(ax, 28, 191, "8 numbers")
    fills = [FOCUS_FILL if 7 - i == K else WHITE for i in range(8)]
    cells = [f"q = {q}" for q in NUMBERS]
    block(ax, LEFT, 160, 4 * BIT, cells, height=34, fills=fills)
    for i in range(8):
        caption(ax, LEFT + (4 * i + 2) * BIT, 205, f"k = {7 - i}", ha="center")
    middle = LEFT + (4 * (7 - K) + 2) * BIT
    arrow(ax, (middle, 216), (middle, 248), colour=FOCUS)
    text(ax, middle - 10, 232, "word & (15 << 4 * k)", size=SMALL, mono=True, ha="right")
    text(ax, 28, 260, "a float32", weight="bold", ha="left")
    caption(ax, 28, 279, "the same bits")
    bits = ["0"] * 32
    for i in range(4):
        bits[4 * (7 - K) + i] = f"{NUMBERS[7 - K]:04b}"[i]
    fills = [FOCUS_FILL if 4 * (7 - K) <= i < 4 * (8 - K) else WHITE for i in range(32)]
    block(ax, LEFT, 248, BIT, bits, height=34, fills=fills, size=SMALL)
    brace(ax, LEFT + 1, LEFT + BIT - 1, 288, "sign")
    brace(ax, LEFT + BIT + 3, LEFT + 9 * BIT - 3, 288, "exponent 0: subnormal")
    brace(ax, LEFT + 9 * BIT + 3, right - 3, 288, "23 bits of digits, in units of 2 ** -149")
    q = NUMBERS[7 - K]
    words = f"value = {q} · 2 ** (4k - 149).   x has the factor 2 ** (88 - 4k)."
    text(ax, LEFT, 334, words, ha="left")
    caption(ax, LEFT + 420, 334, "One & for each number, no conversion.")
    rule(ax, (28, 358), (812, 358))
    text(ax, 28, 398, "a group", weight="bold", ha="left")
    caption(ax, 28, 417, "32 numbers")
    box(ax, LEFT, 378, 170, 50, "sum of q · x\n32 times", fill=FOCUS_FILL, edge=FOCUS, size=SMALL)
    arrow(ax, (LEFT + 170, 403), (LEFT + 224, 403), colour=INK)
    words = "scale · sum(q · x)\n+ minimum · sum(x)"
    box(ax, LEFT + 224, 378, 190, 50, words, fill=PANEL, size=SMALL)
    arrow(ax, (LEFT + 414, 403), (LEFT + 468, 403), colour=INK)
    box(ax, LEFT + 468, 378, 172, 50, "sum over the groups\n= one number of y", size=SMALL)
    caption(ax, LEFT + 319, 446, "once a group", ha="center", colour=MUTED)
    caption(ax, LEFT + 554, 446, "once a row", ha="center", colour=MUTED)
    caption(
        ax,
        28,
        474,
        "sum(x) of each group is the same for all rows of the weight: a program sums it once.",
    )
    return fig
