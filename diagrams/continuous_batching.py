"""Day 35: six requests in three places: static batches, and places that are filled at once."""

from shapes import FAULT, FOCUS, FOCUS_FILL, HAIR, INK, MUTED, WHITE, canvas, caption, slot, text

LENGTHS = {"A": 3, "B": 8, "C": 2, "D": 5, "E": 3, "F": 4}
COLOURS = {
    "A": (FOCUS, WHITE),
    "B": ("#CC79A7", INK),
    "C": (FOCUS_FILL, INK),
    "D": ("#D9E9F4", INK),
    "E": ("#FBE7BF", INK),
    "F": ("#CFEBE1", INK),
}
PLACES, LEFT, CELL = 3, 150, 48


def draw():
    fig, ax = canvas(
        440,
        "Static and continuous batching",
        "Six requests, three places. Each cell is one step of one request.",
    )
    static = _static()
    continuous = _continuous()
    _grid(ax, 100, "static", "a batch ends with", "its longest request", static)
    _grid(ax, 270, "continuous", "an empty place is", "filled in the next step", continuous)
    return fig


def _static():
    """(place, first step, request) of each request, and the steps in all."""
    found, step, names = [], 0, list(LENGTHS)
    for i in range(0, len(names), PLACES):
        group = names[i : i + PLACES]
        found += [(place, step, name) for place, name in enumerate(group)]
        step += max(LENGTHS[name] for name in group)
    return found, step


def _continuous():
    free, found = [0] * PLACES, []
    for name, length in LENGTHS.items():
        place = free.index(min(free))
        found.append((place, free[place], name))
        free[place] += length
    return found, max(free)


def _grid(ax, y, title, first, second, plan):
    found, steps = plan
    text(ax, 28, y + 22, title, weight="bold", ha="left")
    caption(ax, 28, y + 44, first)
    caption(ax, 28, y + 60, second)
    taken = {}
    for place, start, name in found:
        taken |= {(place, start + i): name for i in range(LENGTHS[name])}
    idle = 0
    for place in range(PLACES):
        for step in range(steps):
            name = taken.get((place, step))
            fill, ink = COLOURS.get(name, (WHITE, FAULT))
            idle += name is None
            slot(ax, LEFT + 30 + CELL * step, y + 36 * place, CELL, name or "idle", height=30,
                 fill=fill, colour=ink, edge=INK if name else HAIR)  # fmt: skip
    caption(ax, LEFT + 30, y + 36 * PLACES + 14, f"{steps} steps, {idle} idle cells",
            colour=MUTED)  # fmt: skip
