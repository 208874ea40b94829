"""Draw the pictures: `python diagrams/make.py` for all, `python diagrams/make.py engine` for one.

Each script here with a draw() makes <name>.svg for a page and <name>.png for a notebook. A notebook
shows the PNG 840 pixels wide; the file has twice as many pixels, for dense screens. Both files
contain the alt text from alt.toml, and are the same bytes on every run.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
import tomllib
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import shapes
from nanoserve.course.show import DENSITY

NOT_PICTURES = {"make", "shapes"}


def names() -> list[str]:
    """The names of all pictures, one for each script: how-a-day-works for `how_a_day_works.py`."""
    scripts = {path.stem for path in HERE.glob("*.py")} - NOT_PICTURES
    return sorted(name.replace("_", "-") for name in scripts)


def draw(name: str) -> Figure:
    """Draw a picture from its script. Raises ValueError for an unknown name."""
    if name not in names():
        raise ValueError(f"no picture named {name!r}; there are {', '.join(names())}")
    with shapes.drawing():
        return importlib.import_module(name.replace("-", "_")).draw()


def alt(name: str) -> str:
    """The alt text of a picture. Raises KeyError if there is none."""
    return tomllib.loads((HERE / "alt.toml").read_text(encoding="utf-8"))[name]


OPAQUE, EDGE = 248, 8  # entries of the palette: colours, and levels of alpha from 0 to almost 255


def png(fig: Figure, words: str) -> bytes:
    """The figure as a palette PNG at twice its size, with transparent corners and `words` as its
    description: about a quarter of the bytes of a plain PNG.

    Only the outline's rounded corners are partly transparent, so all of them get one colour.
    """
    with shapes.drawing():
        raw = io.BytesIO()
        fig.savefig(raw, format="png", dpi=DENSITY * shapes.DPI)
    image = Image.open(raw).convert("RGBA")
    alpha = image.getchannel("A")
    on_white = Image.new("RGBA", image.size, shapes.WHITE)
    on_white.alpha_composite(image)
    small = on_white.convert("RGB").quantize(
        OPAQUE, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
    )
    levels = [255 * level // EDGE for level in range(EDGE)]
    rim = image.getpixel((image.width // 2, round(1.0 * DENSITY)))[:3]  # the top of the outline
    colours = small.getpalette()[: 3 * OPAQUE]
    colours += [255] * (3 * OPAQUE - len(colours))
    small.putpalette(colours + list(rim) * EDGE)
    for index, level in enumerate(levels):
        low, high = level - 255 // EDGE // 2 - 1, level + 255 // EDGE // 2
        here = alpha.point(lambda a, low=low, high=high: 255 if low < a <= high and a < 255 else 0)
        small.paste(OPAQUE + index, mask=here)
    out = io.BytesIO()
    described = PngImagePlugin.PngInfo()
    described.add_itxt("Description", words)
    small.save(
        out,
        format="png",
        transparency=bytes([255] * OPAQUE + levels),
        optimize=False,
        compress_level=9,
        pnginfo=described,
    )
    return out.getvalue()


def svg(fig: Figure, words: str) -> bytes:
    """The figure as SVG, described by `words`, its text as outlines: it needs no font of the
    reader's."""
    with shapes.drawing():
        out = io.BytesIO()
        fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue().decode()
    size = f'width="{fig.bbox.width:.0f}" height="{fig.bbox.height:.0f}"'  # points would be smaller
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', size, text, count=1)
    text = re.sub(
        r"(<svg [^>]*>)", lambda m: f"{m[0]}\n <desc>{escape(words)}</desc>", text, count=1
    )
    lines = text.splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()


def main(wanted: list[str]) -> None:
    for name in wanted or names():
        fig = draw(name)
        (HERE / f"{name}.png").write_bytes(png(fig, alt(name)))
        (HERE / f"{name}.svg").write_bytes(svg(fig, alt(name)))
        print(f"diagrams/{name}.png and .svg")


if __name__ == "__main__":
    main(sys.argv[1:])
