"""Day 28: three sequences in one launch: packed queries, one pool, a block table for each."""

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
    box,
    canvas,
    caption,
    rule,
    slot,
    text,
)

SIZE = 4  # tokens in a block
SEQUENCES = {  # name: kind of step, query_len, kv_len, blocks, fill, ink
    "A": ("prefill", 5, 5, (5, 2), FOCUS, WHITE),
    "B": ("chunk of a prefill", 3, 9, (0, 6, 3), "#CC79A7", INK),
    "C": ("decode", 1, 11, (8, 1, 7), FOCUS_FILL, INK),
}
HERE = ("B", 7)  # the token that the picture follows
LEFT, CELL = 150, 44
STRIDE, NARROW = 88.5, 19


def draw():
    fig, ax = canvas(
        512,
        "A ragged batch",
        "Three sequences, three lengths, one launch: their queries are packed, their K/V is paged.",
    )
    _queries(ax)
    for i, name in enumerate(SEQUENCES):
        _card(ax, 28 + 266 * i, name)
    _pool(ax)
    rule(ax, (28, 422), (812, 422))
    text(ax, 28, 446, "Where is the token at position 7 of B?", weight="bold", ha="left")
    steps = [
        (28, "query_starts[1] + 1 = 6", "row of q"),
        (244, "7 // 4 = 1, 7 % 4 = 3", "index and offset"),
        (444, "block_tables[1, 1] = 6", "block"),
        (650, "6 * 4 + 3 = 27", "slot"),
    ]
    for x, words, below in steps:
        text(ax, x, 470, words, mono=True, ha="left", size=12.5)
        caption(ax, x, 491, below)
    return fig


def _queries(ax):
    text(ax, 28, 107, "q", mono=True, weight="bold", ha="left")
    caption(ax, 44, 107, "[num_tokens, …]")
    text(ax, 28, 143, "query_starts", mono=True, ha="left", size=12.5)
    row = 0
    for i, (name, (_, query_len, kv_len, _, fill, ink)) in enumerate(SEQUENCES.items()):
        text(ax, LEFT + row * CELL, 143, str(row), mono=True, weight="bold")
        middle = LEFT + (row + query_len / 2) * CELL
        arrow(ax, (middle, 126), (28 + 266 * i + 126, 178), colour=MUTED)
        for position in range(kv_len - query_len, kv_len):
            here = (name, position) == HERE
            slot(ax, LEFT + row * CELL, 88, CELL, f"{name}{position}", height=38,
                 fill=INK if here else fill, colour=WHITE if here else ink)  # fmt: skip
            row += 1
    text(ax, LEFT + row * CELL, 143, str(row), mono=True, weight="bold")
    caption(ax, 572, 100, "9 tokens and no padding.")
    caption(ax, 572, 117, "A number is a position in its sequence.")


def _card(ax, x, name):
    kind, query_len, kv_len, blocks, fill, ink = SEQUENCES[name]
    box(ax, x, 178, 252, 106, edge=HAIR, fill=PANEL)
    box(ax, x + 14, 190, 24, 24, name, fill=fill, edge=fill, colour=ink, weight="bold")
    text(ax, x + 48, 202, kind, ha="left", weight="bold")
    text(ax, x + 14, 228, f"query_len {query_len}    kv_len {kv_len}", mono=True, size=SMALL,
         ha="left")  # fmt: skip
    caption(ax, x + 14, 260, "block table")
    for index, number in enumerate(blocks):
        here = name == HERE[0] and index == HERE[1] // SIZE
        slot(ax, x + 96 + 36 * index, 245, 36, str(number), height=30, mono=True,
             fill=INK if here else WHITE, colour=WHITE if here else INK)  # fmt: skip


def _pool(ax):
    owner = {
        number: (name, index)
        for name, (_, _, _, blocks, _, _) in SEQUENCES.items()
        for index, number in enumerate(blocks)
    }
    for number in range(9):
        x = 28 + STRIDE * number
        name, index = owner.get(number, (None, 0))
        for offset in range(SIZE):
            position = index * SIZE + offset
            held = name is not None and position < SEQUENCES[name][2]
            fill, ink = SEQUENCES[name][4:] if held else (WHITE, MUTED)
            if (name, position) == HERE:
                fill, ink = INK, WHITE
            slot(ax, x + NARROW * offset, 350, NARROW, str(position) if held else "", height=30,
                 fill=fill, colour=ink, edge=INK if name else HAIR, size=SMALL)  # fmt: skip
        caption(ax, x + 2 * NARROW, 395, f"block {number}", ha="center")
    text(ax, 28, 316, "the pool", weight="bold", ha="left")
    index = HERE[1] // SIZE
    number = SEQUENCES[HERE[0]][3][index]
    start = 28 + 266 + 96 + 36 * index + 18
    end = 28 + STRIDE * number + NARROW * (HERE[1] % SIZE) + NARROW / 2
    arrow(ax, (start, 275), (end, 349), colour=INK)
