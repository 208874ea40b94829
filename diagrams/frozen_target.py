"""Day 18: the oracle of paged attention, and the implementations that are compared with it."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FAULT_FILL,
    FOCUS,
    MUTED,
    ORACLE,
    SMALL,
    WHITE,
    arrow,
    block,
    box,
    canvas,
    caption,
    day,
    oracle,
    pill,
    text,
)

CELL = 22
OWN = {7: (0, 1, 2, 3), 2: (4, 5, 6, 7), 5: (8, 9)}  # block: the positions that lie in it


def draw():
    fig, ax = canvas(
        512,
        "Freeze the target",
        "Gather by slot, then the attention sum of Day 6. Every kernel is compared with this.",
    )
    oracle(ax, 28, 84, 784, 262, radius=10)
    text(ax, 44, 105, "paged_attention_reference", weight="bold", ha="left", mono=True)
    caption(ax, 44, 139, "one layer’s pool")
    for i in range(8):
        x = 160 + i * 80
        own = OWN.get(i, ())
        fills = [CONTIGUOUS_FILL if n < len(own) else FAULT_FILL for n in range(4)]
        cells = [str(own[n]) if n < len(own) else "" for n in range(4)]
        block(
            ax, x, 130, 18, cells, height=CELL, fills=fills,
            edge=CONTIGUOUS if own else MUTED, size=SMALL,
        )  # fmt: skip
        caption(ax, x + 36, 163, f"block {i}", ha="center")
    caption(ax, 44, 203, "slot_mapping")
    slots = [b * 4 + offset for b, own in OWN.items() for offset in range(len(own))]
    block(ax, 160, 192, 32, [str(s) for s in slots], height=CELL, size=SMALL)
    caption(ax, 500, 203, "the slot of each position, oldest first")
    arrow(ax, (320, 214), (320, 242), colour=FOCUS)
    text(ax, 332, 228, "pool[slot_mapping]", size=SMALL, colour=FOCUS, ha="left", mono=True)
    caption(ax, 44, 253, "gathered")
    cells = [str(p) for p in range(10)]
    block(
        ax, 160, 242, 32, cells, height=CELL, fills=[CONTIGUOUS_FILL] * 10, edge=CONTIGUOUS,
        size=SMALL,
    )  # fmt: skip
    arrow(ax, (320, 264), (320, 292), colour=FOCUS)
    pill(ax, 160, 292, 320, 30, "sdpa: scale, mask, softmax in float32, mix", size=SMALL)
    caption(ax, 500, 307, "coral: not this sequence’s, or not written yet.")
    caption(ax, 500, 325, "NaN there must change nothing")
    targets = [
        (28, "contiguous attention", "the same sum, K/V in a row", "torch.equal", None),
        (230, "the fused read", "the cache attends", "torch.equal", "Day 19"),
        (432, "the kernel, simulated", "in tlsim: another order", "ATOL, RTOL", "Day 22"),
        (634, "the kernel in Triton", "on a GPU", "ATOL, RTOL", "Day 23"),
    ]
    for x, name, words, held, when in targets:
        arrow(ax, (x + 89, 402), (x + 89, 347), both=True, colour=ORACLE)
        text(ax, x + 98, 375, held, size=SMALL, colour=MUTED, ha="left", mono=True)
        box(ax, x, 402, 178, 76, fill=WHITE)
        text(ax, x + 89, 424, name, weight="bold", size=SMALL + 0.5)
        caption(ax, x + 89, 443, words, ha="center")
        if when:
            day(ax, x + 89, 463, when)
    return fig
