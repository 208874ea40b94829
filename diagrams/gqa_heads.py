"""Day 6: nine query heads use three KV heads, and no query uses later tokens."""

from shapes import (
    FOCUS,
    FOCUS_FILL,
    HAIR,
    MUTED,
    PANEL,
    SMALL,
    WHITE,
    arrow,
    box,
    canvas,
    caption,
    slot,
    text,
)


def draw():
    fig, ax = canvas(
        440,
        "Attention with fewer KV heads",
        "SmolLM2 has nine query heads and three KV heads: three neighbours share one, n_rep = 3.",
    )
    _heads(ax)
    _mask(ax)
    return fig


def _heads(ax):
    left, cell, gap = 118, 38, 12
    caption(ax, 28, 119, "query heads")
    caption(ax, 28, 259, "KV heads")
    for h in range(9):
        group = h // 3
        x = left + h * cell + group * gap
        fill = FOCUS_FILL if group % 2 == 0 else WHITE
        slot(ax, x, 100, cell, str(h), fill=fill)
        kv = left + group * (3 * cell + gap) + 1.5 * cell
        arrow(ax, (x + cell / 2, 138), (kv + (h % 3 - 1) * 12, 236), colour=FOCUS, line=1.1)
    for group in range(3):
        x = left + group * (3 * cell + gap)
        fill = FOCUS_FILL if group % 2 == 0 else WHITE
        box(ax, x + 28, 236, 3 * cell - 56, 46, f"{group}", fill=fill, weight="bold")
    text(ax, left, 322, "kv_head = h // n_rep", mono=True, ha="left")
    caption(ax, left, 348, "h % n_kv looks right in the shapes and is wrong in the heads:")
    caption(ax, left, 365, "head 1 would read KV head 1, which was trained for heads 3 to 5")
    caption(ax, left, 394, "the cache holds 3 heads, not 9: a third of the memory")


def _mask(ax):
    left, top, cell, n = 600, 118, 34, 5
    text(ax, left + n * cell / 2, 98, "keys", size=SMALL, colour=MUTED)
    text(ax, left - 10, top + n * cell / 2, "queries", size=SMALL, colour=MUTED, ha="right")
    for i in range(n):
        for j in range(n):
            seen = j <= i
            slot(
                ax,
                left + j * cell,
                top + i * cell,
                cell,
                "" if seen else "−∞",
                fill=FOCUS_FILL if seen else PANEL,
                edge=HAIR,
                colour=MUTED,
                size=SMALL,
            )
    text(ax, left, 322, "causal: j <= i", mono=True, ha="left")
    caption(ax, left, 348, "−∞ before the softmax")
    caption(ax, left, 365, "is 0 after it")
