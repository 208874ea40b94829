"""Day 15: the block table, and the explorer that steps tokens into it."""

import re

from nanoserve.cache import BlockAllocator, BlockTable, KVCacheExhausted
from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, raises, wrong
from nanoserve.course.plots import COLOURS, Plot, figure

# slot --------------------------------------------------------------------------------------------


def _table(answer: type, size: int, blocks: list[int]):
    table = answer(BlockAllocator(16, size))
    table.blocks = list(blocks)
    return table


def _slots(answer: type, size: int, blocks: list[int], positions: list[int]) -> list:
    table = _table(answer, size, blocks)
    return [table.slot(position) for position in positions]


def _slot(answer: type, position: int) -> int:
    return _table(answer, 4, [9, 2, 7, 3, 12]).slot(position)


def _slot_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind, call=_slots)

    def refused(what: str, position: int) -> Case:
        expected = raises(ValueError, str(position))
        return Case(what, (position,), kind="refuse", call=_slot, expected=expected)

    blocks = [9, 2, 7, 3, 12]
    return [
        case("blocks of 4, [9, 2, 7, 3, 12]: positions 0 to 3", "first", 4, blocks, [0, 1, 2, 3]),
        case("positions 4 to 7, in block 2", "later", 4, blocks, [4, 5, 6, 7]),
        case("positions 9, 15, 16 and 19", "later", 4, blocks, [9, 15, 16, 19]),
        case("blocks of 5, [6, 1, 4]: positions 4, 5 and 14", "later", 5, [6, 1, 4], [4, 5, 14]),
        case("blocks of 16, [3, 1]: positions 15, 16 and 31", "later", 16, [3, 1], [15, 16, 31]),
        refused("20 slots: position 20", 20),
        refused("20 slots: position 50", 50),
        refused("20 slots: position -1", -1),
    ]


def _checked(self, position: int) -> tuple[int, int, int]:
    """(index, offset, block size) of a position inside the table."""
    size = self._allocator.block_size
    if not 0 <= position < len(self.blocks) * size:
        raise ValueError(f"position {position} is outside the table's {self.capacity} slots")
    return position // size, position % size, size


@wrong(
    "This is the offset alone, as if every block were block 0. Add the block's first slot: its id "
    "times the block size."
)
def _offset_only(self, position):
    return _checked(self, position)[1]


@wrong(
    "This is the first slot of the right block, for every position in it. Add the offset, "
    "position % block_size."
)
def _block_only(self, position):
    index, _, size = _checked(self, position)
    return self.blocks[index] * size


@wrong(
    "position % block_size is the place within a block. The index of the block in the table is "
    "position // block_size.",
    hints="later",
)
def _index_from_offset(self, position):
    _, offset, size = _checked(self, position)
    return self.blocks[offset % len(self.blocks)] * size + offset


@wrong(
    "position // block_size is the number of an entry in the table, not the id of a block. Without "
    "the table this is the position itself: look the id up in self.blocks."
)
def _without_table(self, position):
    index, offset, size = _checked(self, position)
    return index * size + offset


@wrong(
    "Off by one at the boundary: position 4 is the fifth token and the first in the second block "
    "of 4. Positions count from 0, so divide the position itself."
)
def _late_boundary(self, position):
    _, offset, size = _checked(self, position)
    return self.blocks[max(0, position - 1) // size] * size + offset


@wrong(
    "It goes to the next block one token too early. The last position of a block is still inside "
    "it.",
    hints="later",
)
def _early_boundary(self, position):
    _, offset, size = _checked(self, position)
    return self.blocks[min((position + 1) // size, len(self.blocks) - 1)] * size + offset


@wrong(
    "The id is not multiplied. A block of 4 slots begins at slot 4 times its id: multiply first."
)
def _not_multiplied(self, position):
    index, offset, _ = _checked(self, position)
    return self.blocks[index] + offset


@wrong("Block and offset are swapped: multiply the id by the block size, and add the offset.")
def _swapped(self, position):
    index, offset, size = _checked(self, position)
    return offset * size + self.blocks[index]


@wrong("The code assumes blocks of 16 slots. Use the allocator's block_size.", hints="later")
def _always_16(self, position):
    _checked(self, position)
    index, offset = divmod(position, 16)
    return self.blocks[index] * 16 + offset


@wrong("It multiplies by the number of blocks in the table. Multiply by the block size.")
def _times_table(self, position):
    index, offset, _ = _checked(self, position)
    return self.blocks[index] * len(self.blocks) + offset


@wrong(
    "It counts on from the first block, as if all blocks lay side by side. They lie anywhere: look "
    "up each position's own block."
)
def _runs_on(self, position):
    _, _, size = _checked(self, position)
    return self.blocks[0] * size + position


@wrong(
    "The blocks are sorted by id. Do not sort: their order in the table is the order of the text.",
    hints="later",
)
def _sorted(self, position):
    index, offset, size = _checked(self, position)
    return sorted(self.blocks)[index] * size + offset


@wrong("It returns block and offset. A slot is one number: id times block size plus offset.")
def _pair(self, position):
    index, offset, _ = _checked(self, position)
    return self.blocks[index], offset


@wrong(
    "A position outside the table returns a slot: Python's index -1 is the last block. Raise "
    "ValueError unless 0 <= position < self.capacity."
)
def _from_the_end(self, position):
    index, offset = divmod(position, self._allocator.block_size)
    if index >= len(self.blocks):
        raise ValueError(position)
    return self.blocks[index] * self._allocator.block_size + offset


@wrong(
    "Your test accepts the first position past the end. With 20 slots, 19 is the last position: "
    "test position < self.capacity."
)
def _one_past(self, position):
    if not 0 <= position <= self.capacity:
        raise ValueError(f"position {position} is outside the table's {self.capacity} slots")
    index, offset = divmod(position, self._allocator.block_size)
    return self.blocks[index] * self._allocator.block_size + offset


@wrong(
    "A position that has no block raises Python's IndexError or returns a slot. Check the position "
    "first, and raise a ValueError that names it."
)
def _unchecked(self, position):
    index, offset = divmod(position, self._allocator.block_size)
    return self.blocks[index] * self._allocator.block_size + offset


SLOT = Exercise(
    "slot",
    _slot_cases,
    hints={
        "first": (
            "The first 4 positions lie in self.blocks[0], which is block 9. At which slot does "
            "block 9 begin, if block 0 begins at slot 0 and all have 4 slots?",
            "Block b begins at b * block_size. Within it, count on by the offset.",
            "return self.blocks[0] * size + position, for the first block: 9 * 4 + 0 = 36.",
        ),
        "later": (
            "Answer two questions: which entry of the table, and which place within the block?",
            "index, offset = divmod(position, block_size): the quotient is the entry, the "
            "remainder is the place. The id of the block is self.blocks[index].",
            "return self.blocks[index] * self._allocator.block_size + offset",
        ),
        "refuse": (
            "How many slots has the table? Which positions do they hold?",
            "It has self.capacity slots, so the positions are 0 to capacity - 1. Check before you "
            "look up: Python accepts a negative index.",
            'if not 0 <= position < self.capacity: raise ValueError(f"position {position} is '
            "outside the table's {self.capacity} slots\")",
        ),
    },
    target="nanoserve.cache:BlockTable.slot",
    wrong=(
        _offset_only, _block_only, _index_from_offset, _without_table, _late_boundary,
        _early_boundary, _not_multiplied, _swapped, _always_16, _times_table, _runs_on, _sorted,
        _pair, _from_the_end, _one_past, _unchecked,
    ),
)  # fmt: skip


# grow --------------------------------------------------------------------------------------------


def _grown(answer: type, lengths: list[int], others: int = 0, size: int = 4) -> dict:
    """Grow a table to these lengths, in a pool of 6 blocks of which `others` are taken."""
    pool = BlockAllocator(6, size)
    for _ in range(others):
        pool.allocate()
    table, results = answer(pool), []
    for tokens in lengths:
        try:
            table.grow(tokens)
            results.append("grown")
        except KVCacheExhausted:
            results.append("refused")
    return {"blocks": list(table.blocks), "free": pool.num_free, "results": results}


def _in_turns(answer: type) -> dict:
    """Two tables of one pool: 5 tokens, 3 tokens, then 9 and 8."""
    pool = BlockAllocator(8, 4)
    one, two = answer(pool), answer(pool)
    for table, tokens in ((one, 5), (two, 3), (one, 9), (two, 8)):
        table.grow(tokens)
    return {"one": one.blocks, "two": two.blocks, "free": pool.num_free}


def _grow_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind, call=_grown, inputs="")  # its name holds them

    return [
        case("an empty table, blocks of 4: grow to 9", "first", [9]),
        case("blocks of 4: grow to 3, then to 4, 5 and 6", "again", [3, 4, 5, 6]),
        case("blocks of 4: grow to 5, then to 18", "again", [5, 18]),
        case("blocks of 4: grow to 10, then to 4 and 0", "fewer", [10, 4, 0]),
        case("blocks of 5: grow to 5, then to 10 and 11", "again", [5, 10, 11], 0, 5),
        Case("two tables of one pool, in turns", (), kind="again", call=_in_turns),
        case("blocks of 4, 2 free: grow to 5, then to 8", "again", [5, 8], 4),
        case("blocks of 4, 3 free: to 4, then to 17", "atomic", [4, 17], 3),
        case("blocks of 4, 3 free: to 4, to 17, to 12", "atomic", [4, 17, 12], 3),
    ]


def _missing(self, num_tokens: int) -> int:
    return max(0, num_tokens - self.capacity)


@wrong(
    "Growth is not atomic: when the pool runs out half-way, the table keeps the blocks taken so "
    "far. Take all missing blocks in one call of allocate_for."
)
def _one_by_one(self, num_tokens):
    while self.capacity < num_tokens:
        self.blocks.append(self._allocator.allocate())


@wrong(
    "When the pool runs out half-way, the blocks taken so far are lost: they are neither in the "
    "table nor free. Take all missing blocks in one call of allocate_for."
)
def _lost(self, num_tokens):
    fresh = []
    while self.capacity + len(fresh) * self._allocator.block_size < num_tokens:
        fresh.append(self._allocator.allocate())
    self.blocks += fresh


@wrong(
    "num_tokens is the number of all tokens, not of additional ones. Take blocks only for those "
    "beyond self.capacity."
)
def _on_top(self, num_tokens):
    self.blocks += self._allocator.allocate_for(num_tokens)


@wrong(
    "The new blocks replace the old ones, and the old ones are lost with their keys. Add to "
    "self.blocks."
)
def _replaced(self, num_tokens):
    if _missing(self, num_tokens):
        self.blocks = self._allocator.allocate_for(num_tokens)


@wrong("The blocks are taken from the pool but not added to the table: self.blocks += ...")
def _not_kept(self, num_tokens):
    self._allocator.allocate_for(_missing(self, num_tokens))


@wrong("The new blocks are put in front. Put them behind: the table has the order of the text.")
def _in_front(self, num_tokens):
    self.blocks = self._allocator.allocate_for(_missing(self, num_tokens)) + self.blocks


@wrong(
    "append puts the whole list of new blocks into the table as one entry. Use += or extend, which "
    "add the ids one by one."
)
def _appended(self, num_tokens):
    if _missing(self, num_tokens):
        self.blocks.append(self._allocator.allocate_for(_missing(self, num_tokens)))


@wrong("It takes only one block. A prompt can need many: take blocks for all missing tokens.")
def _only_one(self, num_tokens):
    if _missing(self, num_tokens):
        self.blocks.append(self._allocator.allocate())


@wrong(
    "A table that is exactly full takes one more block, which stays empty. 4 tokens fit in 4 slots."
)
def _too_early(self, num_tokens):
    if num_tokens >= self.capacity:
        self.blocks += self._allocator.allocate_for(num_tokens - self.capacity + 1)


@wrong("It subtracts the number of blocks. Subtract the number of slots: self.capacity.")
def _counts_blocks(self, num_tokens):
    self.blocks += self._allocator.allocate_for(max(0, num_tokens - len(self.blocks)))


@wrong(
    "With fewer tokens than slots, num_tokens - self.capacity is negative, and allocate_for raises "
    "ValueError. Nothing is missing then: use max(0, ...)."
)
def _below_zero(self, num_tokens):
    self.blocks += self._allocator.allocate_for(num_tokens - self.capacity)


@wrong(
    "For fewer tokens it shortens the table, and the cut blocks are lost. grow never removes a "
    "block."
)
def _shrinks(self, num_tokens):
    self.blocks += self._allocator.allocate_for(_missing(self, num_tokens))
    del self.blocks[-(-num_tokens // self._allocator.block_size) :]


@wrong(
    "KVCacheExhausted is caught and ignored. The caller would write to positions without a slot: "
    "let the error reach the caller."
)
def _silent(self, num_tokens):
    try:
        self.blocks += self._allocator.allocate_for(_missing(self, num_tokens))
    except KVCacheExhausted:
        return


@wrong(
    "When the pool is exhausted, the table frees all its blocks. A failure must change nothing: "
    "the sequence goes on when another one has ended."
)
def _gives_up(self, num_tokens):
    try:
        self.blocks += self._allocator.allocate_for(_missing(self, num_tokens))
    except KVCacheExhausted:
        while self.blocks:
            self._allocator.free(self.blocks.pop())
        raise


GROW = Exercise(
    "grow",
    _grow_cases,
    hints={
        "first": (
            "The table is empty. Which method hands out blocks, and for how many tokens?",
            "self._allocator.allocate_for(n) returns a list of just enough block ids for n tokens.",
            "For an empty table: self.blocks += self._allocator.allocate_for(num_tokens)",
        ),
        "again": (
            "num_tokens counts all tokens. How many of them have slots already?",
            "self.capacity of them. Take blocks for the rest, and put the new ones behind the old.",
            "self.blocks += self._allocator.allocate_for(max(0, num_tokens - self.capacity))",
        ),
        "fewer": (
            "What is num_tokens - self.capacity, if the table has enough slots?",
            "It is 0 or negative, and then nothing must change: grow never removes a block.",
            "max(0, num_tokens - self.capacity)",
        ),
        "atomic": (
            "The pool has 3 blocks free, and the table needs more. Which blocks does the table own "
            "after the error?",
            "The same as before. allocate_for is all or none: call it once, and let its "
            "KVCacheExhausted reach the caller.",
            "One line does it: self.blocks += self._allocator.allocate_for(max(0, num_tokens - "
            "self.capacity)). If it raises, += does not run.",
        ),
    },
    target="nanoserve.cache:BlockTable.grow",
    wrong=(
        _one_by_one, _lost, _on_top, _replaced, _not_kept, _in_front, _appended, _only_one,
        _too_early, _counts_blocks, _below_zero, _shrinks, _silent, _gives_up,
    ),
)  # fmt: skip

EXERCISES = (SLOT, GROW)


# the explorer ------------------------------------------------------------------------------------

POOL = 12  # blocks
# Three sequences, told apart by lightness and letter: each (fill, ink of what stands in it).
SHADES = {
    "A": ("#8A3B72", "#FFFFFF"),
    "B": (COLOURS["engine"], COLOURS["ink"]),
    "C": ("#F3E1EC", COLOURS["ink"]),
}
SCRIPT = "A6 B5 A4 C3 B2 -A C9 B4"


def events(script: str) -> list[str]:
    """ "A2 -B" as single steps: "A", "A", "-B". Raises ValueError for a word that is neither."""
    steps = []
    for word in script.split():
        if re.fullmatch(r"-[ABC]", word):
            steps.append(word)
        elif match := re.fullmatch(r"([ABC])(\d{1,2})", word):
            steps += [match[1]] * int(match[2])
        else:
            raise ValueError(f"{word!r}: write A5 for five tokens of A, -A where A ends")
    return steps


def play(script: str, step: int, size: int) -> tuple[BlockAllocator, dict, dict, str]:
    """The pool, the tables, the lengths, and a sentence about step number `step`."""
    pool = BlockAllocator(POOL, size)
    tables = {name: BlockTable(pool) for name in SHADES if name in script}
    lengths, told = dict.fromkeys(SHADES, 0), "nothing yet"
    for event in events(script)[:step]:
        name = event[-1]
        table = tables[name]
        if event[0] == "-":
            told = f"{name} ends and gives back " + (", ".join(map(str, table.blocks)) or "nothing")
            while table.blocks:
                pool.free(table.blocks.pop())
            lengths[name] = 0
            continue
        before = len(table.blocks)
        try:
            table.grow(lengths[name] + 1)
        except KVCacheExhausted:
            told = f"{name} needs a block and none is free: refused, nothing has changed"
            continue
        taken = (
            f"takes block {table.blocks[-1]}" if len(table.blocks) > before else "has a free slot"
        )
        told = f"{name} {taken}, and writes slot {table.slot(lengths[name])}"
        lengths[name] += 1
    return pool, tables, lengths, told


def _draw_explorer(script: str, step: int, block_size: int) -> Plot:
    steps = events(script)
    shown = min(step, len(steps))
    pool, tables, lengths, told = play(script, shown, block_size)
    fig, ax = figure(height=3.9, title=f"Step {shown} of {len(steps)}: {told}")
    ax.set(xlim=(-0.2, 12.2), ylim=(5.7, -0.5))
    ax.axis("off")
    owner = {b: (name, i) for name, table in tables.items() for i, b in enumerate(table.blocks)}
    newest = steps[shown - 1] if shown else ""
    for number in range(POOL):
        x, y = 2.05 * (number % 6), 1.35 * (number // 6)
        name, index = owner.get(number, ("", 0))
        ax.text(x + 0.9, y - 0.12, f"block {number}", ha="center", color=COLOURS["muted"], size=9)
        for offset in range(block_size):
            position = index * block_size + offset
            held = bool(name) and position < lengths[name]
            fill, ink = SHADES[name] if held else ("white", COLOURS["ink"])
            left, width = x + 1.8 * offset / block_size, 1.8 / block_size
            edge = COLOURS["ink"] if name else "#C9CFD6"
            ax.add_patch(_cell(left, y, width, fill, edge))
            if held:
                last = name == newest and position == lengths[name] - 1
                label, size = (f"{name}{position}", 8.5) if block_size < 8 else (str(position), 7)
                ax.text(
                    left + width / 2, y + 0.32, label, ha="center", va="center", color=ink,
                    size=size, weight="bold" if last else "normal",
                )  # fmt: skip
    for row, (name, table) in enumerate(tables.items()):
        y = 3.2 + 0.75 * row
        fill, ink = SHADES[name]
        ax.add_patch(_cell(0, y - 0.27, 0.5, fill, COLOURS["ink"], 0.54))
        ax.text(0.25, y, name, ha="center", va="center", color=ink, weight="bold")
        blocks = ", ".join(map(str, table.blocks))
        held = f"{lengths[name]} tokens, {table.capacity} slots"
        ax.text(0.75, y, f"blocks [{blocks}]", va="center", family="DejaVu Sans Mono", size=10)
        ax.text(6.4, y, held, va="center", color=COLOURS["muted"])
    free = ", ".join(map(str, reversed(pool._free))) or "none"
    words = f"{pool.num_free} of {POOL} blocks free, in the order they will be taken: {free}"
    ax.text(0, 3.2 + 0.75 * len(tables), words, color=COLOURS["muted"])
    return fig


def _cell(x: float, y: float, width: float, fill: str, edge: str, height: float = 0.64):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=0.9)


def _explorer(script: str = SCRIPT, step: int = 28):
    """Tokens stepped into a pool of 12 blocks; -A gives A's blocks back."""
    return widgets.figure_widget(
        _draw_explorer,
        script=widgets.text(script, label="what happens"),
        step=widgets.slider(0, lambda values: len(events(values["script"])), step),
        block_size=widgets.choice([2, 4, 8], 4),
    )


WIDGETS = {"block-table": _explorer}
