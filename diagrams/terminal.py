"""A terminal with a real session of `make demo`, whose text is in terminal.txt."""

from pathlib import Path

from shapes import text, window

TRANSCRIPT = Path(__file__).with_name("terminal.txt")
SIZE, LEADING = 13, 20


def draw():
    lines = TRANSCRIPT.read_text(encoding="utf-8").rstrip("\n").split("\n")
    fig, ax = window(68 + LEADING * len(lines), "make demo")
    for i, line in enumerate(lines):
        colour = "#7FD1B3" if line.startswith(("$", ">")) else "#E6EAEE"
        text(ax, 28, 62 + LEADING * i, line, mono=True, size=SIZE, ha="left", colour=colour)
    return fig
