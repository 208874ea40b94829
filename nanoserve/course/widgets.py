"""One mechanism for all widgets: a drawing function, and controls that redraw it.

A day names its widgets in exercises/dayNN.py: `WIDGETS = {"work": make}`, where `make(**options)`
returns `figure_widget(draw, tokens=slider(1, 64, 8))`, and a notebook shows `today.widget("work")`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from nanoserve.course.curriculum import PHASES
from nanoserve.course.guard import message_of
from nanoserve.course.show import (
    BAD,
    GOOD,
    QUIET,
    in_notebook,
    png_metadata,
    show,
    text_table,
)
from nanoserve.course.store import DayStatus

Bound = float | Callable[[dict[str, Any]], float]


class Control:
    """A control: its kind, first value and options. Only `build` needs ipywidgets.

    An option may be a function of all controls' values, such as the upper bound of a slider that
    depends on another control.
    """

    def __init__(self, kind: str, value: Any, **options: Any) -> None:
        self.kind, self.value, self.options = kind, value, options

    def moving(self, values: dict[str, Any]) -> dict[str, Any]:
        """The options that are functions, computed for these values."""
        return {name: option(values) for name, option in self.options.items() if callable(option)}

    def build(self, name: str, values: dict[str, Any]) -> Any:
        """The ipywidget, labelled with `name` unless a label was given."""
        import ipywidgets

        options = {**self.options, **self.moving(values)}
        options["description"] = options.pop("label", None) or name.replace("_", " ")
        options["style"] = {"description_width": "initial"}
        if self.kind in ("IntSlider", "FloatSlider", "Text"):
            options["continuous_update"] = False
        return getattr(ipywidgets, self.kind)(value=self.value, **options)


def slider(low: float, high: Bound, value: float, step: float = 1, label: str = "") -> Control:
    """A slider from `low` to `high`; `high` may be a function of the widget's values by name."""
    numbers = (low, value, step) if callable(high) else (low, high, value, step)
    whole = all(isinstance(number, int) for number in numbers)
    kind = "IntSlider" if whole else "FloatSlider"
    return Control(kind, value, min=low, max=high, step=step, label=label)


def choice(options: Sequence[Any], value: Any = None, label: str = "") -> Control:
    first = options[0] if value is None else value
    return Control("Dropdown", first, options=list(options), label=label)


def text(value: str, label: str = "") -> Control:
    return Control("Text", value, label=label)


def toggle(value: bool = False, label: str = "") -> Control:
    return Control("Checkbox", value, label=label)


def figure_widget(draw: Callable[..., Any], **controls: Any) -> FigureWidget:
    """A drawing that follows its controls: draw(**values) returns a matplotlib Figure.

    Controls are slider, choice, text and toggle of this module, or ipywidgets of your own.
    """
    return FigureWidget(draw, controls)


class FigureWidget:
    """Controls above an image. `png` is the drawing at the first values. `view` is the ipywidget,
    or None if ipywidgets is not installed."""

    def __init__(self, draw: Callable[..., Any], controls: dict[str, Any]) -> None:
        self.draw = draw
        self.made = controls
        self.values = {name: control.value for name, control in controls.items()}
        self.png, self.alt = _png(draw(**self.values))
        self.controls: dict[str, Any] = {}
        self.view: Any = None
        try:
            import ipywidgets
        except ImportError:
            return
        for name, control in controls.items():
            built = control.build(name, self.values) if isinstance(control, Control) else control
            self.controls[name] = built
            built.observe(self._redraw, names="value")
        self.image = ipywidgets.Image(format="png")
        self.image.layout.max_width = "100%"
        self._set_image(self.png)
        self.message = ipywidgets.HTML()
        panel = ipywidgets.HBox(list(self.controls.values()))
        panel.layout.flex_flow = "row wrap"
        self.view = ipywidgets.VBox([panel, self.message, self.image])

    def show(self, name: str = "figure") -> None:
        """Show one output: the live widget, and a picture for pages that cannot render it."""
        bundle = {}
        if self.view is not None and in_notebook():
            own = self.view._repr_mimebundle_()
            bundle = {key: own[key] for key in own if "widget-view" in key}
        show(f"[widget: {name}]", png=self.png, alt=self.alt, **bundle)

    def _set_image(self, png: bytes) -> None:
        """Show a picture at its own size: without a fixed width, the page stretches it."""
        self.image.value = png
        self.image.layout.width = f"{png_metadata(png)['width']}px"
        self.image.layout.flex = "0 0 auto"

    def _redraw(self, _change: Any) -> None:
        self.values = {name: control.value for name, control in self.controls.items()}
        for name, control in self.made.items():
            if isinstance(control, Control):
                for option, value in control.moving(self.values).items():
                    setattr(self.controls[name], option, value)  # ipywidgets clips the value
        self.values = {name: control.value for name, control in self.controls.items()}
        try:
            png, _ = _png(self.draw(**self.values))
            self._set_image(png)
            self.message.value = ""
        except Exception as error:
            told = html.escape(f"{type(error).__name__}: {message_of(error)}")
            self.message.value = f'<span style="color:{BAD}">{told}</span>'


def progress_map(rows: Sequence[DayStatus]) -> tuple[str, str]:
    """The days and the appendices with their state, as (plain text, HTML)."""
    cells = [(row.info.sign, row.info.title, row.count, row.words) for row in rows]
    plain = text_table(("day", "title", "exercises", "state"), cells)
    parts = []
    title = '<div style="margin:1em 0 0;font-weight:600">{}</div>'
    days = [row for row in rows if not row.info.is_appendix]
    for phase, name in enumerate(PHASES):
        parts.append(title.format(f"Phase {phase} · {html.escape(name)}"))
        mine = [row for row in days if row.info.phase == phase]
        for week, its_days in groupby(mine, key=lambda row: row.info.week):
            heading = f"Week {week}" if week else "First of all"
            parts.append(_row_of_pills(heading, its_days))
    appendices = [row for row in rows if row.info.is_appendix]
    for row in appendices:
        needs = " and ".join(f"Day {day}" for day in row.info.needs)
        parts += [title.format("Appendix")] if row is appendices[0] else []
        parts.append(_row_of_pills(f"After {needs}, for those who want to know more", [row]))
    return plain, "".join(parts)


def _row_of_pills(heading: str, rows: Iterable[DayStatus]) -> str:
    return (
        f'<div style="margin:0.5em 0 0.2em;{QUIET}">{heading}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:6px">{"".join(map(_pill, rows))}</div>'
    )


LINK = "color:var(--jp-content-link-color,#0072B2);text-decoration:underline"


def _pill(row: DayStatus) -> str:
    edge = {"done": GOOD, "started": "#56B4E9"}.get(row.words, "rgba(127,127,127,0.5)")
    quiet = ";opacity:0.65" if not row.out else ""
    title = f"<b>{row.info.sign}</b> {html.escape(row.info.title)}"
    if row.out:
        title = f'<a href="{row.info.notebook}" style="{LINK}">{title}</a>'
    exercises = "exercise" if row.total == 1 else "exercises"
    state = row.words + (f" · {row.count} {exercises}" if row.out and row.count else "")
    return (
        f'<div style="width:11.5em;padding:0.4em 0.6em;border:1px solid {edge};'
        f"border-left:5px solid {edge};border-radius:4px;color:inherit;"
        f'line-height:1.3{quiet}">{title}'
        f'<div style="font-size:0.85em;{QUIET}">{state}</div></div>'
    )


def _png(figure: Any) -> tuple[bytes, str]:
    """A figure as PNG, with its alt text. Closes the figure."""
    from matplotlib import pyplot

    from nanoserve.course.plots import Plot, compact_png

    try:
        if isinstance(figure, Plot):
            return figure.png(), figure.description()
        return compact_png(figure, bbox_inches="tight"), ""
    finally:
        pyplot.close(figure)
