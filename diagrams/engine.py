"""All parts from the prompt to the generated text, and the days that build them."""

from shapes import (
    CONTIGUOUS,
    CONTIGUOUS_FILL,
    FOCUS_FILL,
    HAIR,
    INK,
    MUTED,
    ORACLE,
    PANEL,
    SMALL,
    TRITON,
    TRITON_FILL,
    WHITE,
    arrow,
    block,
    box,
    canvas,
    caption,
    day,
    oracle,
    pill,
    route,
    rule,
    slot,
    text,
)


def draw():
    fig, ax = canvas(
        508,
        "The engine you are going to build",
        "A real chat model on your own machine, one notebook a day, one engine at the end.",
    )
    _pipeline(ax)
    _oracle(ax)
    _phases(ax)
    return fig


def _pipeline(ax):
    box(ax, 28, 168, 112, 50, "“What is\ngravity?”", edge=HAIR, fill=PANEL, radius=10)
    arrow(ax, (140, 193), (164, 193))
    pill(ax, 164, 174, 100, 38, "tokenizer", edge=INK, fill=WHITE)
    day(ax, 214, 230, "day 3")
    text(ax, 212, 159, "1780 314 9354 47", size=SMALL, mono=True, colour=MUTED)
    arrow(ax, (264, 193), (292, 193))

    box(ax, 292, 112, 288, 186, edge=INK, fill=WHITE, radius=10)
    text(ax, 306, 133, "model", weight="bold", ha="left")
    text(ax, 360, 133.5, "30 blocks", colour=MUTED, ha="left", size=SMALL)
    day(ax, 536, 133, "days 4–8")
    for i in range(30):
        slot(ax, 306 + i * 8.7, 152, 6.2, height=64, fill=FOCUS_FILL, edge="#B98AA9")
    arrow(ax, (400, 216), (400, 240), both=True)
    arrow(ax, (470, 216), (470, 240), both=True)
    fills = [CONTIGUOUS_FILL] * 11 + [WHITE] * 4
    block(ax, 306, 240, 17.2, [""] * 15, height=18, fills=fills, edge=CONTIGUOUS)
    text(ax, 306, 279, "KV cache", weight="bold", ha="left")
    day(ax, 412, 279, "day 11")
    caption(ax, 442, 279, "keys and values so far")

    arrow(ax, (580, 193), (608, 193))
    pill(ax, 608, 174, 96, 38, "sampling", edge=INK, fill=WHITE)
    day(ax, 656, 230, "days 9, 10")
    arrow(ax, (704, 193), (728, 193))
    box(ax, 728, 168, 84, 50, "“Gravity\nis …”", edge=HAIR, fill=PANEL, radius=10)
    route(ax, (656, 174), (656, 92), (278, 92), (278, 190))
    caption(ax, 668, 110, "one token per step,")
    caption(ax, 668, 127, "and it goes back in")


def _oracle(ax):
    oracle(ax, 28, 252, 222, 66)
    text(ax, 42, 272, "the oracle", weight="bold", ha="left")
    day(ax, 216, 272, "day 1")
    caption(ax, 42, 298, "transformers on the same weights")
    arrow(ax, (250, 280), (292, 280), colour=ORACLE, both=True)


def _phases(ax):
    rule(ax, (28, 352), (812, 352))
    columns = [
        (
            28,
            164,
            "Foundations",
            "days 0–7",
            "an oracle, weights, text,\nthe parts of one block",
            INK,
            WHITE,
        ),
        (
            208,
            186,
            "Correct generation",
            "days 8–13",
            "greedy, sampling, a cache:\nequal, token for token",
            CONTIGUOUS,
            CONTIGUOUS_FILL,
        ),
        (
            410,
            244,
            "Paged memory, one kernel",
            "days 14–31",
            "blocks from a shared pool; a kernel\non any CPU, then fast on a GPU",
            TRITON,
            TRITON_FILL,
        ),
        (670, 142, "Later", "", "fewer bytes, many\nrequests, a service", HAIR, PANEL),
    ]
    for x, w, name, days, words, edge, fill in columns:
        box(ax, x, 372, w, 108, edge=edge, fill=fill, radius=8)
        text(ax, x + 14, 395, name, weight="bold", ha="left")
        text(ax, x + 14, 416, days, ha="left", size=SMALL, colour=MUTED)
        text(ax, x + 14, 450, words, ha="left", size=SMALL)
        if name != "Later":
            arrow(ax, (x + w, 426), (x + w + 16, 426))
