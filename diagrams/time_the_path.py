"""Day 26: the timed code, from the call of the cache's method to its result."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FOCUS,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    ORACLE,
    SMALL,
    arrow,
    box,
    brace,
    canvas,
    caption,
    oracle,
    pill,
    rule,
    text,
)

STEPS = (  # x, width, words, below
    (28, 150, "write k and v", "into their slot"),
    (202, 130, "slot mapping", "every token"),
    (356, 120, "dispatch", "checks, backend"),
    (500, 110, "launch", "grid, strides"),
    (634, 178, "the kernel", "attends in place"),
)


def draw():
    fig, ax = canvas(
        470,
        "Time the path you run",
        "One decode step in one layer: from the call that the engine makes to the result it gets.",
    )
    brace(ax, 28, 812, 112, "timed: cache.paged_attention(layer, k, v, q, n_rep)", below=False,
          colour=FOCUS)  # fmt: skip
    for i, (x, width, words, below) in enumerate(STEPS):
        last = i == len(STEPS) - 1
        pill(ax, x, 124, width, 40, words, **({"fill": FOCUS_FILL, "edge": FOCUS} if last else {}))
        caption(ax, x + width / 2, 178, below, ha="center")
        if not last:
            arrow(ax, (x + width, 144), (STEPS[i + 1][0], 144))
    brace(ax, 634, 812, 192, "a kernel's own benchmark")
    text(ax, 28, 252, "The same K and V, two more code paths", weight="bold", ha="left")
    box(
        ax, 28, 268, 384, 44, "gather: cache.append, then sdpa", fill=CONTIGUOUS_FILL,
        edge=CONTIGUOUS,
    )  # fmt: skip
    oracle(ax, 428, 268, 384, 44, "reference: the oracle, over its own mapping")
    rule(ax, (28, 334), (812, 334), colour=HAIR)
    text(ax, 28, 358, "First the check", weight="bold", ha="left", colour=ORACLE)
    caption(ax, 160, 358, "Each code path, in two layers, against the reference, within the tolerance.",
            colour=INK)  # fmt: skip
    text(ax, 28, 386, "Then the clock", weight="bold", ha="left", colour=FOCUS)
    caption(ax, 160, 386, "They take turns, and each turn uses another layer. A GPU is synchronised.",
            colour=INK)  # fmt: skip
    text(ax, 28, 414, "Then the fit", weight="bold", ha="left", colour=MUTED)
    caption(
        ax, 160, 414, "Exponent, cost of a token, bytes per second, share of the peak.", colour=INK
    )
    text(
        ax,
        28,
        442,
        "A code path that fails the check gets no time.",
        ha="left",
        size=SMALL,
        colour=MUTED,
    )
    return fig
