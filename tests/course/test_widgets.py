"""Widgets: one output with the live widget and the picture."""

import base64
import inspect
import sys

import pytest
from matplotlib import pyplot

from nanoserve.course import day, drawings, show, store, widgets
from nanoserve.course.curriculum import ALL
from nanoserve.course.exercise import CourseError
from nanoserve.course.exercises import widgets_of
from nanoserve.course.widgets import choice, figure_widget, slider, text, toggle

drawn = []


@pytest.fixture(autouse=True)
def _plain_backend():
    pyplot.switch_backend("agg")
    drawn.clear()


def draw(**values):
    drawn.append(values)
    if values.get("n") == 5:
        raise ValueError("five is <too> many")
    figure, axes = pyplot.subplots(figsize=(2, 1))
    axes.plot(range(values.get("n", 2)))
    return figure


@pytest.fixture
def displayed(monkeypatch):
    """The arguments of display(), as in a kernel."""
    from IPython import display

    bundles = []
    monkeypatch.setattr(display, "display", lambda data, **_: bundles.append(data))
    for module in (show, widgets):
        monkeypatch.setattr(module, "in_notebook", lambda: True)
    return bundles


def test_a_widget_is_one_bundle_with_a_view_and_a_picture(displayed):
    figure_widget(draw, n=slider(1, 9, 3)).show("lines")
    (bundle,) = displayed
    assert bundle["text/plain"] == "[widget: lines]"
    assert "model_id" in bundle["application/vnd.jupyter.widget-view+json"]
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert drawn == [{"n": 3}]


def test_moving_a_control_redraws_the_image_and_closes_the_figure():
    made = figure_widget(
        draw, n=slider(1, 9, 3), kind=choice(["a", "b"]), on=toggle(), w=text("hi")
    )
    before = made.image.value
    made.controls["n"].value = 4
    assert drawn[-1] == {"n": 4, "kind": "a", "on": False, "w": "hi"}
    assert made.image.value != before
    assert pyplot.get_fignums() == []


def test_an_error_while_drawing_is_one_line_and_the_image_stays():
    made = figure_widget(draw, n=slider(1, 9, 3))
    before = made.image.value
    made.controls["n"].value = 5
    assert "ValueError: five is &lt;too&gt; many" in made.message.value
    assert made.image.value == before
    made.controls["n"].value = 6
    assert made.message.value == ""


def test_an_ipywidget_may_be_a_control():
    import ipywidgets

    made = figure_widget(draw, n=ipywidgets.IntSlider(value=2, min=1, max=4))
    made.controls["n"].value = 3
    assert drawn[-1] == {"n": 3}


def test_without_ipywidgets_there_is_still_the_picture(monkeypatch, displayed):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    figure_widget(draw, n=slider(1, 9, 3)).show()
    assert set(displayed[0]) == {"text/plain", "image/png"}


def test_in_a_terminal_a_widget_is_its_name(capsys):
    figure_widget(draw, n=slider(1, 9, 3)).show("lines")
    assert capsys.readouterr().out == "[widget: lines]\n"


def test_the_same_drawing_gives_the_same_bytes():
    assert figure_widget(draw, n=slider(1, 9, 3)).png == figure_widget(draw, n=slider(1, 9, 3)).png


def test_a_day_shows_its_widgets_by_name(toy, displayed):
    toy.day.WIDGETS = {"lines": lambda n=3: figure_widget(draw, n=slider(1, 9, n))}
    day(4).widget("lines", n=4)
    assert drawn == [{"n": 4}]
    assert displayed[0]["text/plain"] == "[widget: lines]"
    with pytest.raises(CourseError, match="no widget 'dots'; its widgets: lines"):
        day(4).widget("dots")


def test_the_map_shows_days_and_passed_exercises(toy, displayed):
    progress = store.Progress.load()
    progress.add_passed(4, "double")
    progress.save()
    day(0).progress()
    (bundle,) = displayed
    assert "1 of 3" in bundle["text/plain"]
    assert "1 of 3 exercises" in bundle["text/html"]
    assert bundle["text/html"].count("<b>") == len(ALL)
    assert "At the roof" in bundle["text/plain"]
    assert "\nA    Inside tlsim" in bundle["text/plain"]
    assert "After Day 22, for those" in bundle["text/html"]


def test_a_sliders_end_follows_the_other_controls():
    """A slider's bound follows the picture's range, and a larger value moves to the bound."""
    made = figure_widget(
        draw, n=slider(1, lambda values: 2 * values["k"], 3), k=choice([1, 2, 4], 2)
    )
    assert made.controls["n"].max == 4
    made.controls["k"].value = 4
    made.controls["n"].value = 8
    made.controls["k"].value = 1
    assert (made.controls["n"].max, made.controls["n"].value) == (2, 2)
    assert drawn[-1] == {"n": 2, "k": 1}


def test_a_live_image_has_its_own_width_on_the_page():
    made = figure_widget(draw, n=slider(1, 9, 3))
    width = show.png_metadata(made.png)["width"]
    assert made.image.layout.width == f"{width}px"
    assert made.image.layout.max_width == "100%"


def every_widget():
    for make in (drawings.ragged_batch, drawings.split_history):
        yield pytest.param(make, id=make.__name__)
    for info in ALL:
        for name, make in widgets_of(info.number).items():
            needs = inspect.signature(make).parameters.values()
            if all(parameter.default is not parameter.empty for parameter in needs):
                yield pytest.param(make, id=f"{info.name} {name}")


@pytest.mark.parametrize("make", [*every_widget()])
def test_every_slider_of_the_course_stays_within_its_picture(make):
    """Both ends of every slider are drawn, and each step gives another picture."""
    made = make()
    start = dict(made.values)
    for name, control in made.made.items():
        if not getattr(control, "kind", "").endswith("Slider"):
            continue
        own = made.controls[name]
        ends = [made.draw(**{**start, name: value}) for value in (own.max, own.max - own.step)]
        last, before = (widgets._png(figure)[0] for figure in ends)
        assert last != before, f"{name}: its last step, {own.max}, changes nothing"
