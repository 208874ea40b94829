"""Day 25: the changed line, the backends that it chooses from, and the oracle of both."""

from nanoserve.course.plots import COLOURS
from shapes import (
    FOCUS,
    FOCUS_FILL,
    MUTED,
    ORACLE,
    PANEL,
    SMALL,
    TRITON,
    TRITON_FILL,
    arrow,
    box,
    canvas,
    caption,
    oracle,
    pill,
    route,
    text,
)

TLSIM, TLSIM_FILL = COLOURS["tlsim"], "#DDF0FB"


def draw():
    fig, ax = canvas(
        536,
        "One line moves",
        "The cache calls a dispatcher, and the dispatcher chooses the backend.",
    )
    box(ax, 220, 82, 400, 56, edge=FOCUS, fill=FOCUS_FILL)
    text(ax, 420, 101, "PagedKVCache.paged_attention", weight="bold", mono=True)
    caption(ax, 420, 122, "writes k and v, then: return paged_attention_dispatch(…)", ha="center")
    arrow(ax, (420, 138), (420, 168), colour=FOCUS)
    pill(ax, 300, 168, 240, 38, "select_backend(q.device)", edge=FOCUS, fill=FOCUS_FILL)
    for x, side, colour, fill, name, what, where in (
        (28, 300, TRITON, TRITON_FILL, "paged_attention_triton", "compiled", "a CUDA GPU"),
        (572, 540, TLSIM, TLSIM_FILL, "paged_attention_tlsim", "as torch", "any other machine"),
    ):
        middle = x + 120
        route(ax, (side, 187), (middle, 187), (middle, 248), colour=colour)
        caption(
            ax, middle + (12 if x < 300 else -12), 216, where, ha="left" if x < 300 else "right"
        )
        box(ax, x, 248, 240, 64, edge=colour, fill=fill, line=1.8)
        text(ax, middle, 270, name, weight="bold", size=SMALL + 0.5, mono=True)
        caption(ax, middle, 292, f"the kernel’s source, {what}", ha="center", colour="#3A434D")
    oracle(ax, 318, 248, 204, 64)
    text(ax, 420, 270, "the oracle", weight="bold", colour=MUTED)
    caption(ax, 420, 292, "paged_attention_reference", ha="center", mono=True, size=SMALL)
    for begin, end in (((318, 280), (268, 280)), ((522, 280), (572, 280))):
        arrow(ax, begin, end, both=True, colour=ORACLE, dashed=True)
    caption(ax, 420, 332, "tests compare both with it, atol 1e-5", ha="center")
    route(ax, (148, 312), (148, 376), (336, 376), colour=TRITON)
    route(ax, (692, 312), (692, 376), (504, 376), colour=TLSIM)
    pill(ax, 336, 357, 168, 38, "one output")
    arrow(ax, (420, 395), (420, 424))
    pill(ax, 336, 424, 168, 34, "gqa_attention")
    box(ax, 28, 478, 784, 38, fill=PANEL, edge=PANEL)
    words = "The trade: close to the oracle, no longer equal in every bit. A kernel may attend now."
    text(ax, 420, 497, words, weight="bold")
    return fig
