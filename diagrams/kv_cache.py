"""Day 11: keys and values are stored, and the mask becomes a rectangle."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    HAIR,
    MUTED,
    SMALL,
    WHITE,
    block,
    canvas,
    caption,
    rule,
    slot,
    text,
)

CELL = 20


def draw():
    fig, ax = canvas(
        494,
        "Remember the keys",
        "A token’s key and value never change. Keep them, and each step computes only what is new.",
    )
    steps = [
        ("prefill", 0, 5),
        ("decode", 5, 1),
        ("decode", 6, 1),
        ("continuation", 7, 3),
        ("decode", 10, 1),
    ]
    for i, (name, held, new) in enumerate(steps):
        y = 100 + 36 * i
        text(ax, 28, y + 11, name, size=SMALL, ha="left")
        fills = [CONTIGUOUS_FILL] * held + [CONTIGUOUS] * new + [WHITE] * (14 - held - new)
        block(ax, 130, y, 26, [""] * 14, height=22, fills=fills, edge=CONTIGUOUS)
        words = f"{new} new, {held + new} held"
        caption(ax, 514, y + 11, words)
    caption(ax, 640, 111, "one layer’s cache,")
    caption(ax, 640, 128, "[1, n_kv, kv_len, d]:")
    caption(ax, 640, 145, "this step’s keys in,")
    caption(ax, 640, 162, "all keys so far out")
    rule(ax, (28, 292), (812, 292))
    text(
        ax,
        28,
        318,
        "The mask: query i sees keys 0 to kv_len − query_len + i",
        weight="bold",
        ha="left",
    )
    for x, name, query_len, kv_len in [
        (130, "prefill", 5, 5),
        (330, "continuation", 3, 10),
        (612, "decode", 1, 6),
    ]:
        mask(ax, x, 344, query_len, kv_len)
        text(
            ax,
            x,
            344 + query_len * CELL + 14,
            f"{name}: {query_len} × {kv_len}",
            size=SMALL,
            colour=MUTED,
            ha="left",
        )
    caption(ax, 28, 354, "rows: queries\ncolumns: keys")
    return fig


def mask(ax, x, y, query_len, kv_len):
    for i in range(query_len):
        for j in range(kv_len):
            seen = j <= kv_len - query_len + i
            slot(
                ax,
                x + j * CELL,
                y + i * CELL,
                CELL,
                fill=CONTIGUOUS_FILL if seen else WHITE,
                edge=HAIR,
            )
