"""The plot style of the course: one set of colours, each with one meaning, and labels on the lines.

    fig, ax = figure(xlabel="tokens so far", ylabel="ms per token", title="Without a cache")
    line(ax, lengths, times, "transformers", COLOURS["oracle"], dashed=True)
    prediction_marker(ax, 512, today.guess("time"))
    fig  # the last line of a cell: the notebook shows it

The colours are Okabe and Ito's, which most colour-blind readers can tell apart. Background and
margins are white and part of the picture, so that a plot reads the same on a dark page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

COLOURS = {
    "oracle": "#7F7F7F",  # always dashed as well
    "contiguous": "#E69F00",  # the contiguous cache, and the gather
    "tlsim": "#56B4E9",
    "triton": "#009E73",
    "limit": "#000000",  # what the machine cannot exceed
    "fault": "#D55E00",  # bugs, freed memory, poison
    "prediction": "#0072B2",  # what the learner guessed
    "engine": "#CC79A7",  # nanoserve where nothing above applies
    "ink": "#1F2933",  # text
    "muted": "#5B6570",  # remarks, axes
    "grid": "#E4E8EC",
}

WIDTH, HEIGHT, DPI = 7.6, 3.8, 110  # inches, inches, pixels per inch: 836 pixels, Lab's width

_RC = {
    "figure.facecolor": "white",
    "figure.dpi": DPI,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.14,
    "figure.constrained_layout.w_pad": 0.14,
    "savefig.facecolor": "white",
    "savefig.dpi": DPI,
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": COLOURS["ink"],
    "axes.facecolor": "white",
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "svg.hashsalt": "nanoserve",
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's defaults replaced by the course's, and nothing of the reader's own settings."""
    ours = ("axes", "figure", "font", "grid", "lines", "patch", "path", "text", "xtick", "ytick")
    plain = {key: v for key, v in mpl.rcParamsDefault.items() if key.split(".")[0] in ours}
    with mpl.rc_context({**plain, **_RC}):
        yield


class Plot(Figure):
    """A figure that shows itself in a notebook, whatever backend is set, margins and all."""

    def png(self) -> bytes:
        """The picture as it would be drawn the first time: the same bytes on every call."""
        for ax in self.axes:
            if place := ax.get_subplotspec():
                ax.set_subplotspec(place)  # undo the last layout, which the next would start from
        with style():
            out = io.BytesIO()
            self.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        titles = [ax.get_title("left") for ax in self.axes]
        return {
            "text/plain": "plot: " + ", ".join(title for title in titles if title),
            "image/png": base64.b64encode(self.png()).decode(),
        }


@style()
def figure(
    width: float = WIDTH,
    height: float = HEIGHT,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    panels: int = 1,
) -> tuple[Plot, Axes | list[Axes]]:
    """A figure of `width` by `height` inches and its axes, or a list of axes if `panels` > 1.

    It is not registered with pyplot: a notebook shows it once, where it is a cell's last value.
    With several panels, xlabel and ylabel go to each and the title to the first.
    """
    fig = Plot(figsize=(width, height), dpi=DPI)
    axes = list(fig.subplots(1, panels, squeeze=False)[0])
    for ax in axes:
        ax.set(xlabel=xlabel, ylabel=ylabel)
    axes[0].set_title(title)
    return fig, axes[0] if panels == 1 else axes


@style()
def line(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    name: str,
    colour: str,
    dashed: bool = False,
) -> None:
    """A measured series: a dot for each measurement, joined, with `name` at the right end."""
    ax.plot(x, y, color=colour, marker="o", linestyle=(0, (5, 2.5)) if dashed else "solid")
    label_line(ax, x[-1], y[-1], name, colour)


@style()
def label_line(ax: Axes, x: float, y: float, text: str, colour: str, where: str = "right") -> None:
    """Write `text` beside the point (x, y), in the line's own colour, instead of a legend.

    `where` is "right", "left", "above" or "below"; anything else is a ValueError.
    """
    places = {
        "right": ((8, 0), "left", "center"),
        "left": ((-8, 0), "right", "center"),
        "above": ((0, 8), "center", "bottom"),
        "below": ((0, -8), "center", "top"),
    }
    if where not in places:
        raise ValueError(f"where is {where!r}; it must be one of {', '.join(places)}")
    offset, ha, va = places[where]
    ax.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        ha=ha,
        va=va,
        color=_readable(colour),
        fontweight="bold",
        annotation_clip=False,
    )


@style()
def prediction_marker(
    ax: Axes, x: float, guess: float | None, text: str = "your guess", where: str = "above"
) -> None:
    """The learner's prediction at x: a blue diamond with its label. Without a guess, nothing."""
    if guess is None:
        return
    blue = COLOURS["prediction"]
    ax.plot([x], [guess], marker="D", markersize=9, color=blue, linestyle="none", zorder=5)
    label_line(ax, x, guess, text, blue, where)


@style()
def limit_line(ax: Axes, y: float, text: str) -> None:
    """A physical limit: a black horizontal line with its name at the left, above it."""
    ax.axhline(y, color=COLOURS["limit"], linewidth=1.5)
    ax.annotate(
        text,
        (0, y),
        xycoords=("axes fraction", "data"),
        xytext=(6, 4),
        textcoords="offset points",
        color=COLOURS["limit"],
        fontweight="bold",
    )


def log2_axis(ax: Axes, which: str = "x") -> None:
    """Powers of two on the axis `which` ("x" or "y"), written as numbers: 16, 1,024."""
    if which not in ("x", "y"):
        raise ValueError(f"which is {which!r}; it must be 'x' or 'y'")
    getattr(ax, f"set_{which}scale")("log", base=2)
    axis = getattr(ax, f"{which}axis")
    axis.set_major_locator(LogLocator(base=2, numticks=16))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _readable(colour: str) -> str:
    """The colour, darkened where needed until it reads as text on white (contrast 4.5)."""
    rgb = mpl.colors.to_rgb(colour)
    while _contrast_to_white(rgb) < 4.5:
        rgb = tuple(0.95 * channel for channel in rgb)
    return mpl.colors.to_hex(rgb)


def _contrast_to_white(rgb: tuple[float, float, float]) -> float:
    """WCAG 2's contrast ratio between an sRGB colour and white, 1 to 21."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    red, green, blue = linear
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
