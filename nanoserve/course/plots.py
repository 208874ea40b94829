"""The plot style of the course: colours with one meaning each, and labels next to the lines.

    fig, ax = figure(xlabel="tokens so far", ylabel="ms per token", title="Without a cache")
    line(ax, lengths, times, "transformers", COLOURS["oracle"], dashed=True)
    prediction_marker(ax, 512, today.guess("time"))
    fig  # the last line of a cell: the notebook shows it

The colours are Okabe and Ito's, which most colour-blind readers can tell apart. Background and
margins are white and part of the picture, so that a plot looks the same on a dark page. A label
gets the nearest free place next to its point (nanoserve.course.labels).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from nanoserve.course import labels
from nanoserve.course.show import DENSITY, png_metadata

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

WIDTH, HEIGHT, DPI = 7.6, 3.8, 110  # inches, inches, pixels of the page per inch: 836 wide

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
    """The course's settings over Matplotlib's defaults; the reader's own settings are ignored."""
    ours = ("axes", "figure", "font", "grid", "lines", "patch", "path", "text", "xtick", "ytick")
    plain = {key: v for key, v in mpl.rcParamsDefault.items() if key.split(".")[0] in ours}
    with mpl.rc_context({**plain, **_RC}):
        yield


class Plot(Figure):
    """A figure that a notebook shows with its margins, whatever Matplotlib backend is set.

    `alt` says what the plot shows; by default it names titles, axes and labels.
    """

    alt: str = ""

    def png(self) -> bytes:
        """The figure as a PNG: the same bytes on every call."""
        with style():
            self.settle()
            return compact_png(self)

    def settle(self) -> None:
        """Compute the layout and place the labels, as if the figure had never been drawn."""
        FigureCanvasAgg(self)  # measures text, whatever Matplotlib backend is set
        labels.reset(self)
        for ax in self.axes:
            if place := ax.get_subplotspec():
                ax.set_subplotspec(place)  # undo the last layout: the next would start from it
        self.set_layout_engine("constrained")
        self.draw_without_rendering()
        self.set_layout_engine("none")  # else a moved label would change the layout again
        labels.place(self)

    def description(self) -> str:
        """The alt text."""
        if self.alt:
            return self.alt
        parts = []
        for ax in self.axes:
            title, x, y = ax.get_title("left"), ax.get_xlabel(), ax.get_ylabel()
            against = " against ".join(words for words in (y, x) if words)
            parts += [words for words in (title, against) if words and words not in parts]
        named = [t.get_text() for ax in self.axes for t in ax.texts if t.get_text().strip()]
        named = list(dict.fromkeys(" ".join(words.split()) for words in named))[:12]
        parts += [f"Labels: {', '.join(named)}"] if named else []
        return "Plot. " + ". ".join(parts) + "."

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        titles = [ax.get_title("left") for ax in self.axes]
        png = self.png()
        data = {
            "text/plain": "plot: " + ", ".join(title for title in titles if title),
            "image/png": base64.b64encode(png).decode(),
        }
        return data, {"image/png": png_metadata(png, self.description())}


def compact_png(fig: Figure, **options: Any) -> bytes:
    """A figure as a PNG with DENSITY pixels for each pixel of the page. A palette of 256 colours
    needs a third of the bytes of a full PNG. `options` are passed to savefig."""
    raw = io.BytesIO()
    fig.savefig(raw, format="png", dpi=DENSITY * DPI, **options)
    image = Image.open(raw).convert("RGB")
    colours = image.getcolors(256)
    small = image.quantize(
        256 if colours is None else max(2, len(colours)),
        Image.Quantize.MEDIANCUT,
        dither=Image.Dither.NONE,
    )
    out = io.BytesIO()
    small.save(out, format="png", optimize=False, compress_level=9)
    return out.getvalue()


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

    It is not registered with pyplot: a notebook shows it once, as the last value of a cell. With
    several panels, each gets xlabel and ylabel, and the first gets the title.
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
    """Draw a measured series: joined dots, with the label `name` at the right end."""
    ax.plot(x, y, color=colour, marker="o", linestyle=(0, (5, 2.5)) if dashed else "solid")
    others = list(zip(x, y, strict=True))[-2::-1][:6]
    label_line(ax, x[-1], y[-1], name, colour, also=others)


@style()
def label_line(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    colour: str,
    where: str = "right",
    also: Sequence[tuple[float, float]] = (),
) -> None:
    """Write `text` next to the point (x, y), in the line's own colour, instead of a legend.

    `where` is "right", "left", "above" or "below", or two of them ("above right"); another value
    raises ValueError. If that place is not free, the label gets the nearest free place next to this
    point or to a point of `also`.
    """
    if where not in labels.PLACES:
        raise ValueError(f"where is {where!r}; it must be one of {', '.join(labels.PLACES)}")
    labels.ask(ax, (x, y), text, where, also, color=_readable(colour), fontweight="bold")


@style()
def prediction_marker(
    ax: Axes, x: float, guess: float | None, text: str = "your guess", where: str = "above"
) -> None:
    """Draw the learner's prediction at x: a blue diamond with a label; nothing for guess=None."""
    if guess is None:
        return
    blue = COLOURS["prediction"]
    ax.plot([x], [guess], marker="D", markersize=9, color=blue, linestyle="none", zorder=5)
    label_line(ax, x, guess, text, blue, where)


@style()
def limit_line(ax: Axes, y: float, text: str) -> None:
    """Draw a physical limit: a black horizontal line with its name above the left end."""
    colour = COLOURS["limit"]
    ax.axhline(y, color=colour, linewidth=1.5)
    beside = ("axes fraction", "data")
    others = [(at, y) for at in (0.2, 0.4, 0.6, 0.8)]
    look = {"xycoords": beside, "color": colour, "fontweight": "bold"}
    labels.ask(ax, (0.01, y), text, "above right", others, **look)


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
    """The colour, darkened until it is readable as text on white (contrast 4.5)."""
    rgb = mpl.colors.to_rgb(colour)
    while _contrast_to_white(rgb) < 4.5:
        rgb = tuple(0.95 * channel for channel in rgb)
    return mpl.colors.to_hex(rgb)


def _contrast_to_white(rgb: tuple[float, float, float]) -> float:
    """WCAG 2's contrast ratio between an sRGB colour and white, 1 to 21."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    red, green, blue = linear
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
