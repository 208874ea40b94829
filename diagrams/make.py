"""Draw the pictures: `python diagrams/make.py` for all, `python diagrams/make.py engine` for one.

Each script here with a draw() gives <name>.svg for a page and <name>.png, 840 wide, for a notebook.
Both are the same bytes on every run.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import shapes  # noqa: E402

NOT_PICTURES = {"make", "shapes"}


def names() -> list[str]:
    """The pictures there are: one for each script, `how_a_day_works.py` being how-a-day-works."""
    scripts = {path.stem for path in HERE.glob("*.py")} - NOT_PICTURES
    return sorted(name.replace("_", "-") for name in scripts)


def draw(name: str) -> Figure:
    """The picture as its script draws it now. An unknown name is a ValueError."""
    if name not in names():
        raise ValueError(f"no picture named {name!r}; there are {', '.join(names())}")
    with shapes.drawing():
        return importlib.import_module(name.replace("-", "_")).draw()


def png(fig: Figure) -> bytes:
    """The figure as a palette PNG with transparent corners, a quarter of a plain one's size."""
    with shapes.drawing():
        raw = io.BytesIO()
        fig.savefig(raw, format="png", dpi=shapes.DPI)
    image = Image.open(raw).convert("RGBA")
    outside = image.getchannel("A").point(lambda alpha: 255 if alpha < 128 else 0)
    on_white = Image.new("RGBA", image.size, shapes.WHITE)
    on_white.alpha_composite(image)
    small = on_white.convert("RGB").quantize(
        255, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
    )
    small.paste(255, mask=outside)
    out = io.BytesIO()
    small.save(out, format="png", transparency=255, optimize=True)
    return out.getvalue()


def svg(fig: Figure) -> bytes:
    """The figure as SVG, its text as outlines so that it needs no font of the reader's."""
    with shapes.drawing():
        out = io.BytesIO()
        fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue().decode()
    size = f'width="{fig.bbox.width:.0f}" height="{fig.bbox.height:.0f}"'  # points would be smaller
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', size, text, count=1)
    lines = text.splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()


def main(wanted: list[str]) -> None:
    for name in wanted or names():
        fig = draw(name)
        (HERE / f"{name}.png").write_bytes(png(fig))
        (HERE / f"{name}.svg").write_bytes(svg(fig))
        print(f"diagrams/{name}.png and .svg")


if __name__ == "__main__":
    main(sys.argv[1:])
