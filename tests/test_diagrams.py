"""The committed pictures equal the drawings of their scripts, and are legible."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nanoserve.course.show import png_description, png_metadata

DIAGRAMS = Path(__file__).resolve().parents[1] / "diagrams"
PATCH = 40  # pixels: the side of the squares whose mean colours are compared
CHANGED = 12  # of 255: another FreeType's hinting stays below 9; a line moved by a pixel exceeds 9


def load_make():
    spec = importlib.util.spec_from_file_location("diagrams_make", DIAGRAMS / "make.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make = load_make()
NAMES = make.names()


@pytest.fixture(scope="module")
def drawn():
    """Each picture, drawn once from its script: name -> Figure."""
    figures = {}

    def draw(name):
        if name not in figures:
            figures[name] = make.draw(name)
        return figures[name]

    return draw


def pixels_of(data: bytes) -> np.ndarray:
    """A PNG's pixels, [height, width, 4], 0 to 255: red, green and blue over white, and alpha."""
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    white.putalpha(image.getchannel("A"))
    return np.asarray(white, dtype=float)


def patches(pixels: np.ndarray) -> np.ndarray:
    """Mean colours of the squares of PATCH pixels that fit into the picture."""
    rows, columns = (n // PATCH for n in pixels.shape[:2])
    whole = pixels[: rows * PATCH, : columns * PATCH]
    return whole.reshape(rows, PATCH, columns, PATCH, 4).mean(axis=(1, 3))


def words_and_colours(svg: str) -> list[str]:
    """The texts of an SVG (matplotlib leaves each in a comment) and its colours, in order."""
    return [unescape(found) for found in re.findall(r"<!-- .*? -->|#[0-9a-f]{6}\b", svg, re.S)]


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_png_is_what_the_script_draws(name, drawn):
    committed = pixels_of((DIAGRAMS / f"{name}.png").read_bytes())
    redrawn = pixels_of(make.png(drawn(name), make.alt(name)))
    rows = min(len(committed), len(redrawn))  # matplotlib before 3.11 rounds heights down
    assert max(len(committed), len(redrawn)) <= rows + 1
    committed, redrawn = committed[:rows], redrawn[:rows]
    assert committed.shape == redrawn.shape
    assert np.abs(committed - redrawn).mean() < 4, f"run: python diagrams/make.py {name}"
    worst = np.abs(patches(committed) - patches(redrawn)).max()
    assert worst < CHANGED, f"run: python diagrams/make.py {name}"


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_svg_has_the_words_and_colours_of_the_script(name, drawn):
    committed = words_and_colours((DIAGRAMS / f"{name}.svg").read_text(encoding="utf-8"))
    assert committed
    assert committed == words_and_colours(make.svg(drawn(name), make.alt(name)).decode()), (
        f"run: python diagrams/make.py {name}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_1680_pixels_for_840_of_the_page_and_is_small(name):
    data = (DIAGRAMS / f"{name}.png").read_bytes()
    assert Image.open(io.BytesIO(data)).width == 1680
    assert png_metadata(data)["width"] == 840
    assert len(data) < 100_000


@pytest.mark.parametrize("name", NAMES)
def test_outside_the_round_corners_a_picture_is_transparent_and_inside_it_is_not(name):
    alpha = np.asarray(Image.open(DIAGRAMS / f"{name}.png").convert("RGBA"))[:, :, 3]
    assert [alpha[y, x] for y in (0, -1) for x in (0, -1)] == [0, 0, 0, 0]
    assert (alpha[30:-30, 4:-4] == 255).all()
    assert len(np.unique(alpha)) > 2  # the edge of a corner is smooth


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_carries_its_alt_text_in_both_files(name):
    words = make.alt(name)
    assert 60 <= len(words) <= 400
    assert png_description((DIAGRAMS / f"{name}.png").read_bytes()) == words
    svg = (DIAGRAMS / f"{name}.svg").read_text(encoding="utf-8")
    assert unescape(re.search(r"<desc>(.*?)</desc>", svg)[1]) == words


@pytest.mark.parametrize("name", NAMES)
def test_no_words_are_small_clipped_overlap_or_run_through_the_edge_of_a_box(name, drawn):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import FancyBboxPatch

    with make.shapes.drawing():
        canvas = FigureCanvasAgg(drawn(name))
        (ax,) = canvas.figure.axes
        renderer = canvas.get_renderer()
        texts = [(t, t.get_window_extent(renderer)) for t in ax.texts if t.get_text().strip()]
        boxes = [
            patch.get_window_extent(renderer)
            for patch in ax.patches
            if isinstance(patch, FancyBboxPatch)
        ]
    width, height = canvas.figure.bbox.size
    for i, (label, at) in enumerate(texts):
        said = label.get_text()
        assert label.get_fontsize() * make.shapes.DPI / 72 >= 11, said
        assert at.x0 > 10 and at.x1 < width - 10 and at.y0 > 8 and at.y1 < height - 8, said
        for other, there in texts[i + 1 :]:
            assert not overlap(at, there), (said, other.get_text())
        for box in boxes:
            inside = box.x0 <= at.x0 and at.x1 <= box.x1 and box.y0 <= at.y0 and at.y1 <= box.y1
            assert inside or not overlap(at, box), said


def overlap(a, b, slack: float = 2) -> bool:
    """Whether two rectangles overlap by more than `slack` pixels in both directions."""
    across = min(a.x1, b.x1) - max(a.x0, b.x0)
    along = min(a.y1, b.y1) - max(a.y0, b.y0)
    return across > slack and along > slack


def test_drawing_twice_gives_the_same_bytes(drawn):
    assert make.svg(make.draw("engine"), "x") == make.svg(drawn("engine"), "x")
    assert make.png(make.draw("engine"), "x") == make.png(drawn("engine"), "x")


def test_every_committed_picture_has_its_script():
    assert {path.stem for path in DIAGRAMS.glob("*.png")} == set(NAMES)
    assert {path.stem for path in DIAGRAMS.glob("*.svg")} == set(NAMES)


def test_an_unknown_picture_is_refused_by_name():
    with pytest.raises(ValueError, match="no picture named 'nonesuch'"):
        make.draw("nonesuch")
