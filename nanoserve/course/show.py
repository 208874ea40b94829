"""Showing results: one output of several formats in a notebook, plain text in a terminal."""

from __future__ import annotations

import base64
import html
import re
import struct
import sys
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

STYLE = (
    "border-collapse:collapse;margin:0.4em 0;font-size:0.95em;color:inherit;background:transparent"
)
CELL = (
    "text-align:left;vertical-align:top;padding:0.3em 0.8em 0.3em 0;border:0;"
    "border-top:1px solid rgba(127,127,127,0.35);color:inherit;background:transparent;"
    "white-space:normal;max-width:32em;overflow-wrap:break-word"
)
GOOD, BAD, QUIET = "#009E73", "#D55E00", "opacity:0.7"


DENSITY = 2  # pixels of a picture's file for one pixel of the page
WIDTH = 840  # pixels of the page: the widest picture


def show(
    plain: str,
    html: str | None = None,
    png: bytes | None = None,
    alt: str | None = None,
    **more: Any,
) -> None:
    """Show all formats as one output of a notebook. Outside a notebook, print the plain text.

    `png` has DENSITY pixels for each pixel of the page. `alt` describes the picture; the default is
    the description in the PNG.
    """
    if not in_notebook():
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(plain.encode(encoding, "replace").decode(encoding))
        return
    from IPython.display import display

    if html is None and png is None:
        plain = wrapped(plain)
    data, metadata = {"text/plain": plain, **more}, {}
    if html is not None:
        data["text/html"] = html
    if png is not None:
        data["image/png"] = base64.b64encode(png).decode()
        metadata = {"image/png": png_metadata(png, alt)}
    display(data, metadata=metadata, raw=True)


def png_metadata(png: bytes, alt: str | None = None) -> dict[str, Any]:
    """An output's metadata for a PNG: its width on the page, and its alt text if there is one.

    nbconvert's classic template and our export template write `alt` into the page. JupyterLab 4.6
    stores `alt` and does not use it.
    """
    width = min(WIDTH, struct.unpack(">I", png[16:20])[0] // DENSITY)
    alt = png_description(png) if alt is None else alt
    return {"width": width, **({"alt": alt} if alt else {})}


def png_description(png: bytes) -> str:
    """The text of a PNG's "Description" chunk (iTXt); "" if it has none."""
    at = 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + size]
        if kind == b"iTXt" and chunk.startswith(b"Description\0"):
            packed, _, rest = chunk[12], chunk[13], chunk[14:]
            text = rest.split(b"\0", 2)[2]  # behind the language and the translated keyword
            return (zlib.decompress(text) if packed else text).decode()
        at += 12 + size
    return ""


def wrapped(text: str, width: int = 96) -> str:
    """The text with long lines broken at spaces. A notebook breaks longer lines within words."""
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def in_notebook() -> bool:
    """Whether this runs in an IPython kernel, which can show more than plain text."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns separated by two spaces; the last one is not padded."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in [*widths[:-1], min(widths[-1], 40)]])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that takes its colours from the page; cells are HTML already."""
    titles = "".join(f'<th style="{CELL};border-top:0;{QUIET}">{cell}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f'<table style="{STYLE}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'


def escaped(text: str) -> str:
    """HTML of plain text, with `code` in backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
