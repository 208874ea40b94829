"""The plot style: colours with one meaning, labels that can be read, small files."""

from __future__ import annotations

import base64
import io

import matplotlib as mpl
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from nanoserve.course import labels
from nanoserve.course.plots import (
    COLOURS,
    figure,
    label_line,
    limit_line,
    line,
    log2_axis,
    prediction_marker,
    style,
)


def full_plot():
    fig, ax = figure(xlabel="tokens so far", ylabel="ms per token", title="Without a cache")
    lengths = [16, 32, 64, 128, 256]
    line(ax, lengths, [1.0, 2.1, 4.0, 8.3, 16.0], "transformers", COLOURS["oracle"], dashed=True)
    line(ax, lengths, [0.9, 1.0, 1.0, 1.1, 1.2], "with a cache", COLOURS["contiguous"])
    prediction_marker(ax, 128, 5.0)
    limit_line(ax, 0.5, "memory bandwidth")
    log2_axis(ax)
    return fig, ax


def test_colours_are_the_course_s():
    meanings = {
        "oracle": "#7F7F7F",
        "contiguous": "#E69F00",
        "tlsim": "#56B4E9",
        "triton": "#009E73",
        "limit": "#000000",
        "fault": "#D55E00",
        "prediction": "#0072B2",
    }
    assert {name: COLOURS[name] for name in meanings} == meanings


def test_a_plot_is_lab_s_width_small_and_white_at_its_edges():
    fig, _ = full_plot()
    data = fig.png()
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    assert 1600 <= image.width <= 1680
    assert len(data) < 60_000
    edge = {image.getpixel((x, 0)) for x in range(image.width)}
    assert edge == {(255, 255, 255, 255)}


def test_labels_stay_inside_the_picture():
    fig, ax = full_plot()
    fig.settle()
    for text in [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0, text.get_text()
        assert box.x1 <= fig.bbox.x1 and box.y1 <= fig.bbox.y1, text.get_text()


GUESSES = [None, 0.0, 0.5, 1.0, 8.3, 16.0, 300.0, 1e6, -5.0]


@pytest.mark.parametrize("log", ["", "x", "xy"])
@pytest.mark.parametrize("guess", GUESSES)
def test_no_label_covers_anything_whatever_the_guess(guess, log):
    if "y" in log and guess is not None:
        guess = max(guess, 1e-9)  # a logarithmic axis has no place for 0
    for at in (16, 128, 256):
        fig, ax = figure(xlabel="tokens so far", ylabel="ms per token", title="Without a cache")
        lengths = [16, 32, 64, 128, 256]
        rising = [1.0, 2.1, 4.0, 8.3, 16.0]
        line(ax, lengths, rising, "transformers", COLOURS["oracle"], dashed=True)
        line(ax, lengths, [0.9, 1.0, 1.0, 1.1, 1.2], "with a cache", COLOURS["contiguous"])
        line(ax, lengths, [0.8, 0.9, 1.1, 1.0, 1.1], "paged", COLOURS["engine"])
        label_line(ax, 64, 4.0, "the curve of Day 1", COLOURS["ink"], "above")
        limit_line(ax, 0.5, "memory bandwidth")
        prediction_marker(ax, at, guess)
        if log:
            log2_axis(ax)
        if "y" in log:
            ax.set_yscale("log")
        fig.settle()
        assert labels.collisions(fig) == []


def test_a_label_on_a_bar_or_on_another_label_is_moved_and_a_free_one_stays():
    fig, ax = figure(ylabel="GB", title="Bars")
    ax.bar([0, 1], [3, 8])
    label_line(ax, 0, 3, "three", COLOURS["ink"], "below")
    label_line(ax, 1, 8, "eight", COLOURS["ink"], "above")
    label_line(ax, 1, 8, "as many", COLOURS["ink"], "above right")
    fig.settle()
    assert labels.collisions(fig) == []
    fig, ax = figure()
    line(ax, [0, 1], [0, 1], "a", COLOURS["engine"])
    fig.settle()
    assert ax.texts[0].get_position() == (8, 0)


def test_a_collision_is_reported():
    fig, ax = figure()
    ax.plot([0, 1], [0, 1])
    label_line(ax, 0.5, 0.5, "on the line", COLOURS["ink"])
    fig.settle()
    labels._put(ax.texts[0], labels.Place((0.5, 0.5), "right", -30))
    assert labels.collisions(fig) == ["'on the line' covers 1 lines"]


def test_drawing_twice_gives_the_same_bytes():
    assert full_plot()[0].png() == full_plot()[0].png()


def test_a_reader_s_own_settings_change_nothing():
    plain = full_plot()[0].png()
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "black"}):
        assert full_plot()[0].png() == plain


def test_a_notebook_shows_a_plot_without_pyplot():
    fig, _ = full_plot()
    shown, metadata = fig._repr_mimebundle_()
    assert shown["text/plain"] == "plot: Without a cache"
    assert base64.b64decode(shown["image/png"]) == fig.png()
    assert metadata["image/png"]["width"] == 836
    assert metadata["image/png"]["alt"] == (
        "Plot. Without a cache. ms per token against tokens so far. "
        "Labels: transformers, with a cache, your guess, memory bandwidth."
    )
    fig.alt = "Times grow."
    assert fig._repr_mimebundle_()[1]["image/png"]["alt"] == "Times grow."


def test_style_leaves_the_reader_s_settings_as_they_were():
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["axes.grid"]
    assert dict(mpl.rcParams) == before


def test_the_oracle_s_line_is_dashed_and_labelled_in_its_place():
    _, ax = full_plot()
    oracle, cached = ax.lines[:2]
    assert oracle.is_dashed() and not cached.is_dashed()
    assert [text.get_text() for text in ax.texts[:2]] == ["transformers", "with a cache"]
    assert ax.get_legend() is None


def test_the_prediction_is_blue_and_absent_without_a_guess():
    _, ax = figure()
    prediction_marker(ax, 1, None)
    assert not ax.lines and not ax.texts
    prediction_marker(ax, 1, 2.0)
    assert ax.lines[0].get_color() == COLOURS["prediction"]


def test_several_panels_share_the_labels():
    _, axes = figure(xlabel="tokens", panels=3)
    assert [ax.get_xlabel() for ax in axes] == ["tokens"] * 3


def test_log2_axis_writes_numbers_not_powers():
    fig, ax = figure()
    line(ax, [16, 1024], [1, 2], "a", COLOURS["engine"])
    log2_axis(ax)
    fig.png()
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert "16" in labels and "1,024" in labels


@pytest.mark.parametrize("name", sorted(COLOURS))
def test_a_label_has_enough_contrast_to_be_read(name):
    _, ax = figure()
    label_line(ax, 0, 0, "words", COLOURS[name])
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in to_rgb(ax.texts[0].get_color())
    )
    assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.45


def test_bad_arguments_are_named():
    _, ax = figure()
    with pytest.raises(ValueError, match="where is 'beside'"):
        label_line(ax, 0, 0, "words", COLOURS["ink"], where="beside")
    with pytest.raises(ValueError, match="which is 'z'"):
        log2_axis(ax, "z")
