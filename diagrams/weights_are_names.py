"""Day 2: from the names and blocks of a GGUF file to a dict of Hugging Face names."""

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
    brace,
    canvas,
    caption,
    pill,
    route,
    slot,
    text,
)

ROWS = [
    ("token_embd.weight", "", ("model.embed_tokens.weight",)),
    ("blk.0.attn_q.weight", "un-permute", ("model.layers.0.self_attn.q_proj.weight",)),
    ("blk.0.attn_k.weight", "un-permute", ("model.layers.0.self_attn.k_proj.weight",)),
    ("blk.0.ffn_gate.weight", "", ("model.layers.0.mlp.gate_proj.weight",)),
    ("output_norm.weight", "", ("model.norm.weight",)),
]


def draw():
    fig, ax = canvas(
        500,
        "Weights are just names",
        "A checkpoint is a dictionary: a name, a shape, some bytes. Loading it is a translation.",
    )
    _names(ax)
    _quantised(ax)
    _permuted(ax)
    return fig


def _names(ax):
    box(ax, 28, 84, 206, 190, edge=HAIR, fill=PANEL, radius=10)
    text(ax, 42, 104, "model.gguf", weight="bold", ha="left")
    box(ax, 498, 84, 314, 190, edge=INK, radius=10)
    text(ax, 512, 104, "dict[str, Tensor]", weight="bold", ha="left")
    for i, (theirs, extra, ours) in enumerate(ROWS):
        y = 130 + 24 * i
        text(ax, 42, y, theirs, mono=True, size=SMALL, ha="left")
        text(ax, 512, y, ours[0], mono=True, size=SMALL, ha="left")
        arrow(ax, (234, y), (498, y), colour=MUTED)
        if extra:
            pill(
                ax,
                384,
                y - 10,
                88,
                20,
                extra,
                fill=FOCUS_FILL,
                edge=FOCUS,
                size=SMALL,
                colour=FOCUS,
            )
    pill(ax, 262, 118, 92, 120, "dequantise", fill=WHITE, edge=INK, radius=10, size=SMALL)
    text(ax, 512, 256, "lm_head.weight", mono=True, size=SMALL, ha="left", colour=FOCUS)
    caption(ax, 624, 256, "the first tensor again: tied", colour=FOCUS)
    route(ax, (778, 256), (797, 256), (797, 130), (692, 130), colour=FOCUS)
    caption(ax, 42, 256, "… and 267 more")


def _quantised(ax):
    text(ax, 28, 306, "Q4_1: 32 weights in 20 bytes", weight="bold", ha="left")
    slot(ax, 28, 330, 44, "d", height=30, fill=FOCUS_FILL, mono=True)
    slot(ax, 72, 330, 44, "m", height=30, fill=FOCUS_FILL, mono=True)
    block(ax, 116, 330, 15, [""] * 16, height=30, fills=[WHITE] * 16)
    brace(ax, 30, 70, 362, "2")
    brace(ax, 74, 114, 362, "2")
    brace(ax, 118, 354, 362, "16 bytes: 32 numbers of 4 bits")
    text(ax, 28, 412, "weight = d × q + m", mono=True, ha="left")
    caption(ax, 180, 412, "q is 0 to 15, d the step, m the least")
    caption(ax, 28, 438, "That is 5 bits a weight, and 16 values for each run of 32.")
    caption(ax, 28, 456, "Norms are stored as float32, the embedding in 8 bits.")


def _permuted(ax):
    text(ax, 468, 306, "One head’s rows of q, put back", weight="bold", ha="left")
    stored = [0, 4, 1, 5, 2, 6, 3, 7]
    cell, left = 34, 540
    fill = {row: FOCUS_FILL if row < 4 else WHITE for row in range(8)}
    caption(ax, 468, 346, "GGUF")
    block(ax, left, 330, cell, [str(r) for r in stored], height=30, fills=[fill[r] for r in stored])
    for at, row in enumerate(stored):
        colour = FOCUS if row < 4 else MUTED
        arrow(
            ax,
            (left + (at + 0.5) * cell, 360),
            (left + (row + 0.5) * cell, 404),
            colour=colour,
            line=1.1,
        )
    caption(ax, 468, 420, "ours")
    block(
        ax,
        left,
        404,
        cell,
        [str(r) for r in range(8)],
        height=30,
        fills=[fill[r] for r in range(8)],
    )
    brace(ax, left + 2, left + 4 * cell - 2, 438, "first halves of the pairs")
    brace(ax, left + 4 * cell + 2, left + 8 * cell - 2, 438, "second halves")
