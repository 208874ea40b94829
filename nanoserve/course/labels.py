"""Placing the labels of a plot: next to their points, and over nothing else.

A day prefers a place ("right", "above"). Whether that place is free depends on the measurements and
on the learner's guess. So each label gets its place when the plot is drawn: the nearest place where
it covers no line, marker, bar, text or axis, and does not leave the picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

# direction of the label from its point: (x, y) with y upwards, horizontal and vertical alignment
PLACES = {
    "right": ((1, 0), "left", "center"),
    "left": ((-1, 0), "right", "center"),
    "above": ((0, 1), "center", "bottom"),
    "below": ((0, -1), "center", "top"),
    "above right": ((0.8, 0.8), "left", "bottom"),
    "above left": ((-0.8, 0.8), "right", "bottom"),
    "below right": ((0.8, -0.8), "left", "top"),
    "below left": ((-0.8, -0.8), "right", "top"),
}
DISTANCES = (8, 13, 19, 27, 38, 54, 76, 108, 150, 200)  # points
FAR = 27  # points: from this distance on, a thin line joins label and point
PAD = 2.0  # pixels around a label that must be free
COSTS = {
    "words": 8.0,
    "lines": 5.0,
    "markers": 4.0,
    "bars": 2.0,
    "margin": 3.0,
    "leader": 0.6,
    "outside": 50.0,
}
STEP = 1e-4  # cost of each earlier candidate, so that the first of equal candidates is chosen


@dataclass(frozen=True)
class Place:
    """A possible place of a label: next to `point`, in a direction of PLACES, `distance` points
    away."""

    point: tuple[float, float]
    name: str
    distance: float


@dataclass
class Obstacles:
    """Things that labels must not cover, in pixels: segments and boxes [n, 4] as x0, y0, x1, y1."""

    segments: np.ndarray
    markers: np.ndarray
    bars: np.ndarray
    words: list[Bbox] = field(default_factory=list)

    def hits(self, box: Bbox) -> dict[str, int]:
        """The number of things of each kind that the box covers."""
        return {
            "lines": int(_crossed(self.segments, box).sum()),
            "markers": int(_overlapping(self.markers, box).sum()),
            "bars": int(_overlapping(self.bars, box).sum()),
            "words": sum(_shares(box, other) for other in self.words),
        }


def ask(
    ax: Axes,
    xy: tuple[float, float],
    text: str,
    where: str,
    also: Sequence[tuple[float, float]] = (),
    **style: Any,
) -> Annotation:
    """A label for the point `xy` of the axes' data. It gets its place when the plot is drawn: next
    to `xy` if there is space, else next to one of the points of `also`."""
    leader = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 3}
    note = ax.annotate(
        text,
        xy,
        xytext=(0, 0),
        textcoords="offset points",
        arrowprops={**leader, "color": style.get("color")},
        **style,
    )
    note.set_annotation_clip(False)
    note.wanted, note.points = where, [xy, *also]
    _put(note, Place(xy, where, DISTANCES[0]))
    return note


def place(fig: Figure) -> None:
    """Give every label made by `ask` its place. The figure's layout must be final."""
    labels = [note for note in _texts(fig) if hasattr(note, "wanted")]
    found = obstacles(fig, but=labels)
    for note in sorted(labels, key=lambda note: len(note.points)):  # the fewest points first
        size = _box(note, pad=0)
        best, least = None, np.inf
        for order, candidate in enumerate(_candidates(note)):
            point = _pixels(note, candidate.point)
            box = _box_at(point, candidate, size, fig.dpi).padded(PAD)
            cost = sum(COSTS[kind] * hits for kind, hits in found.hits(box).items())
            cost += COSTS["outside"] * _leaves(fig, box)
            cost += COSTS["margin"] * _in_margin(note.axes, box)
            if candidate.distance >= FAR:
                leader = np.array([[*point, *((box.p0 + box.p1) / 2)]])
                cost += COSTS["words"] * sum(_crossed(leader, words).any() for words in found.words)
                cost += COSTS["leader"] * _steps_on_lines(leader[0], found.segments)
            if cost + STEP * order < least:
                best, least = candidate, cost + STEP * order
            if not cost:
                break  # free, and no later candidate is nearer
        _put(note, best)
        found.words.append(_box(note))


def reset(fig: Figure) -> None:
    """Move every label back to its preferred place, as before the first drawing."""
    for note in _texts(fig):
        if hasattr(note, "wanted"):
            _put(note, Place(note.points[0], note.wanted, DISTANCES[0]))


def collisions(fig: Figure) -> list[str]:
    """One line for each label of a drawn figure that covers something or leaves the picture."""
    told = []
    notes = [text for text in _texts(fig) if hasattr(text, "wanted")]
    for note in notes:
        found = obstacles(fig, but=[note])
        box = _box(note, pad=0)
        if _leaves(fig, box):
            told.append(f"{note.get_text()!r} leaves the picture")
        hits = found.hits(box)
        told += [f"{note.get_text()!r} covers {n} {kind}" for kind, n in hits.items() if n]
    return told


def obstacles(fig: Figure, but: list[Text] = ()) -> Obstacles:
    """Lines, markers, bars and words of a figure whose layout is final, without the texts `but`."""
    renderer = fig.canvas.get_renderer()
    segments, markers, bars = [np.zeros((0, 4))], [np.zeros((0, 4))], [np.zeros((0, 4))]
    words = []
    for ax in fig.axes:
        area = ax.get_window_extent(renderer)
        for line in ax.lines:
            points = line.get_transform().transform(np.column_stack(line.get_data(orig=False)))
            if line.get_linestyle() not in ("None", "none", " ", ""):
                segments.append(_clipped(np.hstack([points[:-1], points[1:]]), area))
            if line.get_marker() not in ("None", "none", " ", "", None):
                half = 0.5 * line.get_markersize() * fig.dpi / 72
                inside = np.array([area.padded(2).contains(*point) for point in points], dtype=bool)
                centres = points[inside] if len(points) else points
                markers.append(np.hstack([centres - half, centres + half]))
        for patch in ax.patches:
            box = patch.get_window_extent(renderer)
            if isinstance(patch, Rectangle) and box.width > 0 and box.height > 0:
                bars.append(np.array([box.extents]))
        if ax.axison:
            for side in ("left", "bottom"):
                if ax.spines[side].get_visible():
                    x0, y0, x1, y1 = area.extents
                    end = (x0, y1) if side == "left" else (x1, y0)
                    segments.append(np.array([[x0, y0, *end]]))
            ticks = [*ax.get_xticklabels(), *ax.get_yticklabels()]
            words += [*ticks, ax.xaxis.label, ax.yaxis.label]
        words += [ax.title, ax._left_title, ax._right_title]
    words += [text for text in _texts(fig) if text not in but]
    boxes = [_box(text) for text in words if text.get_visible() and text.get_text().strip()]
    return Obstacles(np.vstack(segments), np.vstack(markers), np.vstack(bars), boxes)


def _texts(fig: Figure) -> list[Text]:
    return [*fig.texts, *(text for ax in fig.axes for text in ax.texts)]


def _candidates(note: Annotation) -> Iterator[Place]:
    """The possible places, best first: near before far, the preferred direction before others."""
    names = [note.wanted, *(name for name in PLACES if name != note.wanted)]
    for distance in DISTANCES:
        for point in note.points:
            for name in names:
                yield Place(point, name, distance)


def _put(note: Annotation, at: Place) -> None:
    (x, y), ha, va = PLACES[at.name]
    note.xy = at.point
    note.set_position((at.distance * x, at.distance * y))
    note.set(ha=ha, va=va)
    note.arrow_patch.set_visible(at.distance >= FAR)


def _box_at(point: np.ndarray, at: Place, size: Bbox, dpi: float) -> Bbox:
    """The rectangle of a label of this size at a place next to `point`, in pixels."""
    (x, y), ha, va = PLACES[at.name]
    x, y = point + at.distance * dpi / 72 * np.array([x, y])
    left = x - {"left": 0, "center": 0.5, "right": 1}[ha] * size.width
    bottom = y - {"bottom": 0, "center": 0.5, "top": 1}[va] * size.height
    return Bbox.from_bounds(left, bottom, size.width, size.height)


def _pixels(note: Annotation, point: tuple[float, float]) -> np.ndarray:
    """The pixel of a point in the label's own coordinates (data, or a fraction of the axes)."""
    kinds = note.xycoords if isinstance(note.xycoords, tuple) else (note.xycoords,) * 2
    known = {"data": note.axes.transData, "axes fraction": note.axes.transAxes}
    both = [known[kind].transform(point) for kind in kinds]
    return np.array([both[0][0], both[1][1]])


def _in_margin(ax: Axes, box: Bbox) -> bool:
    """Whether the box is partly below or left of the axes, where tick labels and titles are."""
    area = ax.get_window_extent()
    return bool(ax.axison and (box.y0 < area.y0 or box.x0 < area.x0))


def _box(text: Text, pad: float = PAD) -> Bbox:
    """The rectangle of a text, without the line that joins an annotation to its point."""
    renderer = text.get_figure().canvas.get_renderer()
    if isinstance(text, Annotation):
        text.update_positions(renderer)
    return Text.get_window_extent(text, renderer).padded(pad)


def _leaves(fig: Figure, box: Bbox) -> bool:
    page = fig.bbox
    return bool(box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1)


def _shares(a: Bbox, b: Bbox) -> bool:
    return bool(a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1)


def _overlapping(boxes: np.ndarray, box: Bbox) -> np.ndarray:
    return (
        (boxes[:, 0] < box.x1)
        & (box.x0 < boxes[:, 2])
        & (boxes[:, 1] < box.y1)
        & (box.y0 < boxes[:, 3])
    )


def _span(segments: np.ndarray, box: Bbox) -> tuple[np.ndarray, np.ndarray]:
    """The part of each segment inside the box, as fractions `enter` and `leave` of its length.

    If enter >= leave, the segment is outside the box (Liang and Barsky, 1984).
    """
    start, delta = segments[:, :2], segments[:, 2:] - segments[:, :2]
    enter, leave = np.zeros(len(segments)), np.ones(len(segments))
    for axis, (low, high) in enumerate(((box.x0, box.x1), (box.y0, box.y1))):
        d, p = delta[:, axis], start[:, axis]
        flat = np.abs(d) < 1e-9
        safe = np.where(flat, 1.0, d)
        a, b = (low - p) / safe, (high - p) / safe
        enter = np.where(flat, enter, np.maximum(enter, np.minimum(a, b)))
        leave = np.where(flat, leave, np.minimum(leave, np.maximum(a, b)))
        leave = np.where(flat & ((p <= low) | (p >= high)), -1.0, leave)
    return enter, leave


def _crossed(segments: np.ndarray, box: Bbox) -> np.ndarray:
    enter, leave = _span(segments, box)
    return enter < leave


def _steps_on_lines(leader: np.ndarray, segments: np.ndarray) -> int:
    """How many of ten points along a leader line, its start excluded, lie on a line of the plot."""
    start, end = leader[:2], leader[2:]
    places = [start + t * (end - start) for t in np.linspace(0.2, 1, 10)]
    return sum(bool(_crossed(segments, Bbox([at - 3, at + 3])).any()) for at in places)


def _clipped(segments: np.ndarray, area: Bbox) -> np.ndarray:
    """The visible parts of the segments. Segments with a NaN or infinite point are left out."""
    segments = segments[np.isfinite(segments).all(axis=1)]
    enter, leave = _span(segments, area.padded(1))
    start, delta = segments[:, :2], segments[:, 2:] - segments[:, :2]
    ends = [start + np.clip(t, 0, 1)[:, None] * delta for t in (enter, leave)]
    return np.hstack(ends)[enter < leave]
