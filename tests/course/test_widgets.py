"""Widgets: one output that holds the live form and the picture."""

import base64
import sys

import pytest
from matplotlib import pyplot

from nanoserve.course import day, show, store, widgets
from nanoserve.course.exercise import CourseError
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
    """What display() is given, as in a kernel."""
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
    assert bundle["text/html"].count("<b>") == 31
    assert "At the roof" in bundle["text/plain"]
