"""Drawings behind the widgets of Days 28 and 30: a ragged batch, and a split history.

A day's file under exercises/ names them: `WIDGETS = {"ragged-batch": drawings.ragged_batch}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2, log2
from typing import Any

from nanoserve.course import widgets
from nanoserve.course.plots import COLOURS, Plot, figure, style

# The ragged batch --------------------------------------------------------------------------------

POOL = 40  # slots
GAPS = {1: 0.0, 2: 0.18, 4: 0.35}  # between two blocks of this size
BATCHES = {  # (query_len, kv_len) of the sequences A, B and C
    "prefill, chunk, decode": ((5, 5), (3, 9), (1, 11)),
    "three decodes": ((1, 5), (1, 9), (1, 11)),
    "two prefills, a decode": ((4, 4), (6, 6), (1, 12)),
}
SHADES = {  # sequences, told apart by lightness and letter: (fill, ink)
    "A": ("#8A3B72", "#FFFFFF"),
    "B": (COLOURS["engine"], COLOURS["ink"]),
    "C": ("#F3E1EC", COLOURS["ink"]),
}
MONO = {"family": "DejaVu Sans Mono", "size": 9}


@dataclass(frozen=True)
class Place:
    """Where one token of a ragged batch is found: from its row of q to its slot."""

    sequence: int
    query: int  # its number among the queries of its sequence
    position: int
    index: int  # of its block in the sequence's table
    block: int
    slot: int


def tables_of(lengths: tuple[tuple[int, int], ...], size: int) -> tuple[list[int], list[list[int]]]:
    """(query_starts, block tables) of sequences with these (query_len, kv_len), in blocks of
    `size` tokens scattered over the pool."""
    starts = [0]
    for query_len, _ in lengths:
        starts.append(starts[-1] + query_len)
    count = POOL // size
    free = [(7 * i + 5) % count for i in range(count)] if count != 10 else [5, 2, 0, 6, 3, 8, 1, 7]
    tables = []
    for _, kv_len in lengths:
        needed = -(-kv_len // size)
        tables.append(free[:needed])
        free = free[needed:]
    return starts, tables


def follow(lengths: tuple[tuple[int, int], ...], size: int, token: int) -> Place:
    """The place of row `token` of q."""
    starts, tables = tables_of(lengths, size)
    sequence = max(i for i, start in enumerate(starts[:-1]) if start <= token)
    query_len, kv_len = lengths[sequence]
    query = token - starts[sequence]
    position = kv_len - query_len + query
    index = position // size
    block = tables[sequence][index]
    return Place(sequence, query, position, index, block, block * size + position % size)


@style()
def _draw_batch(token: int, batch: str, block_size: int) -> Plot:
    lengths = BATCHES[batch]
    starts, tables = tables_of(lengths, block_size)
    token = min(token, starts[-1] - 1)
    here = follow(lengths, block_size, token)
    letters = list(SHADES)
    name = letters[here.sequence]
    fig, ax = figure(
        height=5.1, title=f"Row {token} of q: sequence {name}, position {here.position}"
    )
    ax.set(xlim=(-0.3, 23.9), ylim=(16.2, -0.5))
    ax.axis("off")

    def cell(x: float, y: float, w: float, words: str, look: tuple[str, str], **more: Any) -> None:
        ax.add_patch(_rectangle(x, y, w, look[0], **more))
        size = 8 if w < 1.2 and len(words) > 2 else 9
        style = {"ha": "center", "va": "center", "color": look[1], "size": size, "zorder": 4}
        ax.text(x + w / 2, y + 0.5, words, **style)

    def remark(x: float, y: float, words: str, **more: Any) -> None:
        ax.text(x, y, words, va="center", **{"color": COLOURS["muted"], "size": 9, **more})

    marked = (COLOURS["ink"], "#FFFFFF")
    plain = ("#FFFFFF", COLOURS["ink"])
    remark(0, 0.5, "q", **MONO)
    remark(0, 1.55, "query_starts", **MONO)
    for row in range(starts[-1]):
        at = follow(lengths, block_size, row)
        letter = letters[at.sequence]
        look = marked if row == token else SHADES[letter]
        cell(4.6 + 1.5 * row, 0, 1.5, f"{letter}{at.position}", look)
    for start in sorted(set(starts)):
        remark(4.6 + 1.5 * start, 1.55, str(start), ha="center", **MONO)
    for i, letter in enumerate(letters):
        y = 2.5 + 1.35 * i
        query_len, kv_len = lengths[i]
        cell(0, y, 1, letter, SHADES[letter])
        remark(1.4, y + 0.5, f"query_len {query_len:<2} kv_len {kv_len:<2}", **MONO)
        remark(9.3, y + 0.5, "blocks", ha="right")
        wide = 1.4 if block_size > 1 else 1.05
        for index, block in enumerate(tables[i]):
            found = i == here.sequence and index == here.index
            cell(9.6 + wide * index, y, wide, str(block), marked if found else plain)
    remark(0, 7.2, "the pool, block by block: a thick edge marks the keys that the token may see")
    owner = {b: (i, k) for i, table in enumerate(tables) for k, b in enumerate(table)}
    for slot in range(POOL):
        block, offset = divmod(slot, block_size)
        x = slot % 20 * 1.1 + GAPS[block_size] * (slot % 20 // block_size)
        y = 8.3 + 2.0 * (slot // 20)
        i, index = owner.get(block, (None, 0))
        position = index * block_size + offset
        held = i is not None and position < lengths[i][1]
        look = SHADES[letters[i]] if held else ("#FFFFFF", COLOURS["muted"])
        look = marked if slot == here.slot else look
        seen = held and i == here.sequence and position <= here.position
        words = f"{letters[i]}{position}" if held else ""
        edge = COLOURS["ink"] if i is not None else "#C9CFD6"
        cell(x, y, 1.1, words, look, edge=edge, line=2.2 if seen else 0.8)
        if offset == 0:
            middle = x + 0.55 * block_size
            remark(middle, y - 0.35, str(block), ha="center", size=7.5)
    lines = (
        f"sequence  {name}: {starts[here.sequence]} <= {token} < {starts[here.sequence + 1]}"
        f"   query {token} - {starts[here.sequence]} = {here.query}",
        f"position  kv_len - query_len + query = {lengths[here.sequence][1]} - "
        f"{lengths[here.sequence][0]} + {here.query} = {here.position}",
        f"block     block_tables[{here.sequence}, {here.position} // {block_size}] = "
        f"block_tables[{here.sequence}, {here.index}] = {here.block}",
        f"slot      {here.block} * {block_size} + {here.position} % {block_size} = {here.slot}",
    )
    for i, words in enumerate(lines):
        ax.text(0, 12.7 + 0.95 * i, words, va="center", color=COLOURS["ink"], **MONO)
    fig.alt = (
        f"A batch of three sequences, {starts[-1]} rows of q, a pool of {POOL} slots in blocks of "
        f"{block_size}. Row {token} is sequence {name}, query {here.query}, position "
        f"{here.position}, block {here.block}, slot {here.slot}."
    )
    return fig


def _rectangle(
    x: float, y: float, w: float, fill: str, edge: str = COLOURS["ink"], line: float = 0.8
) -> Any:
    from matplotlib.patches import Rectangle

    order = 3 if line > 1 else 1 + (edge == COLOURS["ink"])  # a dark edge is above a light one
    return Rectangle((x, y), w, 1, facecolor=fill, edgecolor=edge, linewidth=line, zorder=order)


def ragged_batch(token: int = 6, batch: str = "prefill, chunk, decode", block_size: int = 4):
    """A slider picks a token of the batch; the drawing follows it to its slot in the pool."""
    return widgets.figure_widget(
        _draw_batch,
        token=widgets.slider(
            0,
            lambda v: sum(query_len for query_len, _ in BATCHES[v["batch"]]) - 1,
            token,
            label="row of q",
        ),
        batch=widgets.choice(list(BATCHES), batch),
        block_size=widgets.choice(list(GAPS), block_size),
    )


# The split history -------------------------------------------------------------------------------

SCORES = {
    "as they come": (1.0, 3.0, 0.0, 2.0, 2.0, 5.0, 1.0, 4.0, 3.0, 0.0, 2.0, 1.0),
    "rising": (0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    "all equal": (2.0,) * 12,
}
VALUES = (0.2, 0.9, 0.5, 0.1, 0.8, 0.6, 0.3, 0.7, 0.4, 1.0, 0.2, 0.5)  # one channel of the values


@dataclass(frozen=True)
class Part:
    """The result of one split: its maximum, its denominator, its log-sum-exp, its output."""

    keys: range
    m: float
    l: float  # noqa: E741
    lse: float
    part: float


def parts_of(scores: tuple[float, ...], splits: int) -> list[Part]:
    """Each split's own softmax to base 2, over equal shares of the keys."""
    share = -(-len(scores) // splits)
    found = []
    for first in range(0, len(scores), share):
        keys = range(first, min(first + share, len(scores)))
        m = max(scores[i] for i in keys)
        weights = [exp2(scores[i] - m) for i in keys]
        total = sum(weights)
        part = sum(w * VALUES[i] for w, i in zip(weights, keys, strict=True)) / total
        found.append(Part(keys, m, total, m + log2(total), part))
    return found


def merged(parts: list[Part]) -> tuple[list[float], float]:
    """The weight of each part, relative to the largest, and the merged output."""
    top = max(part.lse for part in parts)
    weights = [exp2(part.lse - top) for part in parts]
    out = sum(w * part.part for w, part in zip(weights, parts, strict=True)) / sum(weights)
    return weights, out


@style()
def _draw_split(step: int, splits: int, scores: str) -> Plot:
    """Left, the scores and each split's numbers. Right, the weight of each key in the result."""
    s = SCORES[scores]
    parts = parts_of(s, splits)
    step = min(step, len(parts) + 1)
    done, is_merged = parts[:step], step > len(parts)
    weights, out = merged(done) if done else ([], 0.0)
    whole = sum(exp2(score) for score in s)
    truth = [exp2(score) / whole for score in s]
    answer = sum(t * v for t, v in zip(truth, VALUES, strict=True))
    own = [0.0] * len(s)  # the weight of each key, within its split or in the merged result
    for part, weight in zip(done, weights, strict=True):
        share = weight / sum(weights) if is_merged else 1.0
        for i in part.keys:
            own[i] = share * exp2(s[i] - part.m) / part.l
    fig, (left, right) = figure(height=4.3, xlabel="key", panels=2)
    held = {i for part in done for i in part.keys}
    colours = [COLOURS["tlsim"] if i in held else COLOURS["grid"] for i in range(len(s))]
    left.bar(range(len(s)), s, color=colours)
    right.bar(range(len(s)), own, color=COLOURS["tlsim"])
    outline = {"edgecolor": COLOURS["oracle"], "linestyle": "--", "linewidth": 1.3}
    right.bar(range(len(s)), truth, fill=False, **outline)
    for part in parts[1:]:
        for ax in (left, right):
            ax.axvline(part.keys[0] - 0.5, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    for part, weight in zip(done, weights, strict=True):
        words = f"m {part.m:.1f}\nl {part.l:.2f}\nlse {part.lse:.2f}\npart {part.part:.2f}"
        words += f"\nw {weight:.2f}" if is_merged else ""
        left.text(part.keys[0] - 0.3, 8.8, words, va="top", color=COLOURS["ink"],
                  size=8.5, linespacing=1.5)  # fmt: skip
    left.set(
        ylabel="score, to base 2",
        ylim=(0, 9),
        yticks=range(6),
        xlabel="key   (one channel of V shown)",
    )
    right.set(ylabel="weight of the key", ylim=(0, 1.12 * max(*own, *truth)))
    titles = {
        0: "no split has run",
        len(parts): "every part by itself: not merged",
        len(parts) + 1: f"merged: {out:.3f}",
    }
    count = "1 split" if splits == 1 else f"{splits} splits"
    left.set_title(f"{count}, {min(step, len(parts))} done", fontsize=10)
    right.set_title(titles.get(step, f"{step} of {len(parts)} parts"), fontsize=10)
    right.set_xlabel(f"key   (dashed: softmax of all keys, {answer:.3f})")
    for ax in (left, right):
        ax.set_xticks(range(0, len(s), 2))
        ax.grid(axis="x", visible=False)
    fig.alt = (
        f"Twelve scores in {count}; {min(step, len(parts))} of them have a softmax of their own. "
        + (f"Merged, the result is {out:.3f}" if is_merged else "They are not merged yet")
        + f"; the softmax of all keys gives {answer:.3f}."
    )
    return fig


def split_history(step: int = 3, splits: int = 3, scores: str = "as they come"):
    """Splits of one history, then their merge; dashed, the softmax of all scores at once."""
    return widgets.figure_widget(
        _draw_split,
        step=widgets.slider(0, lambda v: v["splits"] + 1, step, label="steps (the last: merge)"),
        splits=widgets.choice([1, 2, 3, 4], splits),
        scores=widgets.choice(list(SCORES), scores),
    )
