"""Day 15: the block table turns a position of the text into a slot of the pool."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    SMALL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    rule,
    slot,
    text,
)

SIZE, TOKENS = 4, 11
TABLE = (5, 2, 7)
POSITION = 9


def draw():
    fig, ax = canvas(
        480,
        "Logical to physical",
        "Positions run on without a gap. Their slots lie wherever a block was free.",
    )
    text(ax, 28, 117, "logical:", weight="bold", ha="left")
    caption(ax, 28, 136, "positions")
    text(ax, 28, 203, "block table", weight="bold", ha="left")
    text(ax, 28, 319, "physical:", weight="bold", ha="left")
    caption(ax, 28, 338, "slots")
    for index, number in enumerate(TABLE):
        left = 150 + 200 * index
        for offset in range(SIZE):
            _token(ax, left + 40 * offset, 108, 40, index * SIZE + offset, index * SIZE + offset)
        arrow(ax, (left + 80, 148), (left + 80, 182))
        box(ax, left + 44, 182, 72, 40, str(number), fill=WHITE, weight="bold", mono=True)
        text(ax, left + 36, 202, f"[{index}]", size=SMALL, colour=MUTED, ha="right")
        arrow(ax, (left + 80, 222), (_pool_x(number) + 40, 302), colour=FOCUS)
    owner = {number: index for index, number in enumerate(TABLE)}
    for number in range(8):
        x = _pool_x(number)
        for offset in range(SIZE):
            position = owner[number] * SIZE + offset if number in owner else None
            _token(ax, x + 20 * offset, 304, 20, position, number * SIZE + offset)
        text(ax, x + 40, 350, f"block {number}", size=SMALL, colour=MUTED)
    rule(ax, (28, 378), (812, 378))
    text(ax, 28, 404, "Where is position 9?", weight="bold", ha="left")
    text(ax, 28, 434, "9 // 4 = 2    9 % 4 = 1    blocks[2] = 7    slot = 7 * 4 + 1 = 29",
         mono=True, ha="left")  # fmt: skip
    for x, words in [(28, "index"), (138, "offset"), (239, "block id"), (372, "slot")]:
        caption(ax, x, 458, words)
    return fig


def _pool_x(number):
    return 112 + 88 * number


def _token(ax, x, y, width, position, words):
    """A place in one of the rows: white if it is empty, dark for the position that is looked up."""
    held = position is not None and position < TOKENS
    here = position == POSITION
    fill = FOCUS if here else FOCUS_FILL if held else WHITE
    ink = WHITE if here else INK if held else MUTED
    edge = INK if position is not None else HAIR
    slot(ax, x, y, width, str(words), fill=fill, edge=edge, size=SMALL, colour=ink,
         height=40 if width == 40 else 32)  # fmt: skip
