"""The shapes of the pictures: every diagram consists of these shapes only.

A picture is drawn in pixels on a canvas 840 wide, with (0, 0) in the top left corner and y growing
downwards, so that a script reads like a list of positions. Colours come from nanoserve.course.plots
and have the same meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from nanoserve.course.plots import COLOURS

WIDTH = 840
DPI = 100

INK = COLOURS["ink"]
MUTED = COLOURS["muted"]
HAIR = "#C9CFD6"  # outlines of things that are only containers
PANEL = "#F3F5F7"  # their fill
WHITE = "#FFFFFF"
FOCUS = "#8A3B72"  # reddish purple, dark enough for text: the topic of this picture
FOCUS_FILL = "#F3E1EC"
ORACLE = COLOURS["oracle"]
CONTIGUOUS = COLOURS["contiguous"]
CONTIGUOUS_FILL = "#FBE7BF"
TLSIM = COLOURS["tlsim"]
TLSIM_FILL = "#DCEFFA"
TRITON = COLOURS["triton"]
TRITON_FILL = "#CFEBE1"
PREDICTION = COLOURS["prediction"]
PREDICTION_FILL = "#D9E9F4"
FAULT = COLOURS["fault"]
FAULT_FILL = "#F8DFD0"

HEADLINE, BODY, SMALL = 17, 13, 11.5  # text sizes in pixels; nothing is smaller than SMALL
SHAPE, TEXT = 2, 3  # later shapes cover earlier ones; words are above all shapes

# What makes a drawing the same file on every run.
RC = {
    "font.family": "DejaVu Sans",
    "font.monospace": ["DejaVu Sans Mono"],
    "svg.hashsalt": "nanoserve",
    "svg.fonttype": "path",
    "path.simplify": False,
    "text.hinting": "no_hinting",
    "text.parse_math": False,
}


def canvas(height: float, headline: str = "", note: str = "") -> tuple[Figure, Axes]:
    """A light card, 840 by `height`, with a headline and one line of explanation under it."""
    fig = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
    fig.patch.set_alpha(0)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(height, 0))
    ax.axis("off")
    box(ax, 1, 1, WIDTH - 2, height - 2, edge=HAIR, fill=WHITE, radius=12)
    if headline:
        text(ax, 28, 33, headline, size=HEADLINE, weight="bold", ha="left")
    if note:
        text(ax, 28, 58, note, colour=MUTED, ha="left")
    return fig, ax


def window(height: float, title: str) -> tuple[Figure, Axes]:
    """A dark terminal window instead of a card, the first line of its text at y = 62."""
    fig, ax = canvas(height)
    box(ax, 1, 1, WIDTH - 2, height - 2, edge="#3A434D", fill="#1B2229", radius=12)
    for i in range(3):
        dot(ax, 28 + 20 * i, 24, 6, MUTED)
    text(ax, WIDTH / 2, 24, title, size=SMALL, colour="#9AA5B1")
    return fig, ax


def text(
    ax: Axes,
    x: float,
    y: float,
    words: str,
    *,
    size: float = BODY,
    colour: str = INK,
    weight: str = "normal",
    ha: str = "center",
    mono: bool = False,
) -> None:
    """Words at (x, y), `size` in pixels; y is the middle of their lines."""
    lines = words.split("\n")
    spacing = 1.45 * size
    first = y + 0.36 * size - spacing * (len(lines) - 1) / 2
    for i, line in enumerate(lines):
        ax.text(
            x,
            first + i * spacing,
            line,
            fontsize=size * 72 / DPI,
            color=colour,
            weight=weight,
            ha=ha,
            va="baseline",
            family="DejaVu Sans Mono" if mono else "DejaVu Sans",
            zorder=TEXT,
        )


def caption(ax: Axes, x: float, y: float, words: str, **more) -> None:
    """A small muted remark, left-aligned unless told otherwise."""
    text(ax, x, y, words, **{"size": SMALL, "colour": MUTED, "ha": "left", **more})


def box(
    ax: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    words: str = "",
    *,
    edge: str = INK,
    fill: str = WHITE,
    radius: float = 6,
    line: float = 1.2,
    dashed: bool = False,
    **label,
) -> None:
    """A rounded box with its top left corner at (x, y), and words in its middle."""
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            w,
            h,
            boxstyle=f"round,pad=0,rounding_size={min(radius, h / 2, w / 2)}",
            edgecolor=edge,
            facecolor=fill,
            linewidth=line * 72 / DPI,
            linestyle=(0, (5, 3)) if dashed else "solid",
            zorder=SHAPE,
        )
    )
    if words:
        text(ax, x + w / 2, y + h / 2, words, **label)


def pill(ax: Axes, x: float, y: float, w: float, h: float, words: str = "", **style) -> None:
    """An operation: a box with round ends."""
    box(ax, x, y, w, h, words, **{"radius": h / 2, "fill": PANEL, "edge": HAIR, **style})


def oracle(ax: Axes, x: float, y: float, w: float, h: float, words: str = "", **style) -> None:
    """The box of an oracle: grey and dashed."""
    box(ax, x, y, w, h, words, **{"edge": ORACLE, "dashed": True, "line": 1.6, **style})


def slot(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    words: str = "",
    *,
    edge: str = INK,
    fill: str = WHITE,
    height: float | None = None,
    **label,
) -> None:
    """One cell with square corners: a token, a byte, a number, a place in a cache."""
    height = height or width
    ax.add_patch(
        Rectangle(
            (x, y), width, height, edgecolor=edge, facecolor=fill, linewidth=0.72, zorder=SHAPE
        )
    )
    if words:
        text(ax, x + width / 2, y + height / 2, words, **label)


def block(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    cells: Sequence[str],
    *,
    height: float | None = None,
    fills: Sequence[str] | None = None,
    edge: str = INK,
    **label,
) -> None:
    """Slots side by side, one for each string of `cells`."""
    for i, words in enumerate(cells):
        fill = fills[i] if fills else WHITE
        slot(ax, x + i * width, y, width, words, fill=fill, edge=edge, height=height, **label)


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    colour: str = INK,
    bend: float = 0,
    dashed: bool = False,
    both: bool = False,
    line: float = 1.4,
) -> None:
    """From `start` to exactly `end`; `bend` curves it, `both` gives it two heads."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=9,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
            color=colour,
            linewidth=line * 72 / DPI,
            linestyle=(0, (4, 2.5)) if dashed else "solid",
            joinstyle="miter",
            capstyle="butt",
            zorder=SHAPE,
        )
    )


def route(ax: Axes, *points: tuple[float, float], colour: str = INK, dashed: bool = False) -> None:
    """A line with corners through `points`, with its arrow head at the last."""
    rule(ax, *points[:-1], colour=colour, line=1.4, dashed=dashed)
    arrow(ax, points[-2], points[-1], colour=colour, dashed=dashed)


def rule(
    ax: Axes,
    *points: tuple[float, float],
    colour: str = HAIR,
    line: float = 1,
    dashed: bool = False,
) -> None:
    """A line through `points`."""
    ax.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=colour,
        linewidth=line * 72 / DPI,
        linestyle=(0, (4, 2.5)) if dashed else "solid",
        solid_capstyle="butt",
        zorder=SHAPE,
    )


def brace(
    ax: Axes,
    x0: float,
    x1: float,
    y: float,
    words: str = "",
    *,
    depth: float = 7,
    colour: str = MUTED,
    below: bool = True,
) -> None:
    """A bracket over the span x0 .. x1, with its words on the other side."""
    far = y + depth if below else y - depth
    rule(ax, (x0, y), (x0, far), (x1, far), (x1, y), colour=colour)
    if words:
        at = far + 11 if below else far - 11
        text(ax, (x0 + x1) / 2, at, words, size=SMALL, colour=colour)


def dot(
    ax: Axes, x: float, y: float, radius: float = 4, fill: str = INK, *, edge: str = "none"
) -> None:
    """A circle centred on (x, y), filled."""
    ax.add_patch(
        Circle((x, y), radius, facecolor=fill, edgecolor=edge, linewidth=0.9, zorder=SHAPE)
    )


def day(ax: Axes, x: float, y: float, words: str, *, colour: str = FOCUS) -> None:
    """A tag with the day that builds something, centred on (x, y)."""
    w = 7.0 * len(words) + 12
    fill = FOCUS_FILL if colour == FOCUS else WHITE
    pill(ax, x - w / 2, y - 9, w, 18, words, edge=fill, fill=fill, size=SMALL, colour=colour)


def drawing() -> mpl.RcParams:
    """A context in which draw() and savefig() make the same picture on every machine."""
    return mpl.rc_context({**mpl.rcParamsDefault, **RC, "backend": "agg"})
