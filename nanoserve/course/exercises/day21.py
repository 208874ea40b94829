"""Day 21: offsets and masks, the first kernel, and the grid of programs to look at."""

import inspect
import linecache
import textwrap
from collections.abc import Callable
from contextlib import suppress

import torch

from nanoserve.course import widgets
from nanoserve.course.exercise import Case, Exercise, Wrong, wrong
from nanoserve.course.plots import COLOURS, Plot, figure
from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl

# offsets_and_mask --------------------------------------------------------------------------------


def _offsets_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind)

    return [
        case("program 0 of tiles of 4, 10 elements", "first", 0, 4, 10),
        case("program 1 of tiles of 4, 10 elements", "later", 1, 4, 10),
        case("program 3 of tiles of 8, 37 elements", "later", 3, 8, 37),
        case("program 2 of tiles of 4, 10 elements: the tail", "tail", 2, 4, 10),
        case("program 2 of tiles of 4, 12 elements: just full", "tail", 2, 4, 12),
        case("program 0 of tiles of 16, 5 elements", "tail", 0, 16, 5),
        case("program 5 of tiles of 2, 10 elements: nothing left", "tail", 5, 2, 10),
    ]


def offsets_and_mask(program: int, tile: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets [tile] of a program's lanes, and which of them lie inside n elements."""
    offsets = program * tile + torch.arange(tile)
    return offsets, offsets < n


@wrong(
    "Every program gets the first tile: its number is not in the offsets. Program 1 begins where "
    "program 0 ends, at program * tile."
)
def _every_first(program, tile, n):
    offsets = torch.arange(tile)
    return offsets, offsets < n


@wrong(
    "The tiles overlap: program + lane moves on by one element per program. A program has a whole "
    "tile, so multiply first: program * tile."
)
def _overlapping(program, tile, n):
    offsets = program + torch.arange(tile)
    return offsets, offsets < n


@wrong(
    "The lanes lie `tile` apart. Neighbouring lanes take neighbouring elements: multiply the "
    "program by tile, not the lane."
)
def _strided(program, tile, n):
    offsets = program + tile * torch.arange(tile)
    return offsets, offsets < n


@wrong(
    "Off by one: n elements have the offsets 0 to n - 1, and offset n lies outside. Use <, not <=."
)
def _one_more(program, tile, n):
    offsets = program * tile + torch.arange(tile)
    return offsets, offsets <= n


@wrong(
    "The mask is true in every lane. In the last tile some lanes point past the end: compare the "
    "offsets with n."
)
def _all_true(program, tile, n):
    return program * tile + torch.arange(tile), torch.ones(tile, dtype=torch.bool)


@wrong(
    "The mask compares the lane with n. Compare the offset with n: lane 1 of program 2 is element "
    "9."
)
def _lane_mask(program, tile, n):
    lane = torch.arange(tile)
    return program * tile + lane, lane < n


@wrong("The mask is inverted: true means that the lane takes part.")
def _inverted(program, tile, n):
    offsets = program * tile + torch.arange(tile)
    return offsets, offsets >= n


@wrong(
    "The lanes past the end are cut off. A block has the same compiled size in every program: keep "
    "all lanes, and let the mask switch them off."
)
def _cut(program, tile, n):
    offsets = program * tile + torch.arange(tile)
    offsets = offsets[offsets < n]
    return offsets, torch.ones(len(offsets), dtype=torch.bool)


@wrong(
    "The offsets are clamped to n - 1, so that lanes of the tail take the last element again. "
    "Leave them unclamped: a lane that is switched off may point anywhere."
)
def _clamped(program, tile, n):
    offsets = program * tile + torch.arange(tile)
    return offsets.clamp(max=n - 1), offsets < n


@wrong("Programs are counted from 0: program 0 begins at element 0, not one tile before it.")
def _from_one(program, tile, n):
    offsets = (program - 1) * tile + torch.arange(tile)
    return offsets, offsets < n


@wrong("The two are exchanged: return the offsets first, then the mask.")
def _swapped(program, tile, n):
    offsets = program * tile + torch.arange(tile)
    return offsets < n, offsets


@wrong("The mask is numbers, 0 and 1. A mask is true or false: leave the comparison as it is.")
def _numbers(program, tile, n):
    offsets = program * tile + torch.arange(tile)
    return offsets, (offsets < n).int()


@wrong(
    "The program is multiplied by n, the number of elements. A program moves on by a tile: "
    "program * tile."
)
def _times_n(program, tile, n):
    offsets = program * n + torch.arange(tile)
    return offsets, offsets < n


OFFSETS = Exercise(
    "offsets_and_mask",
    _offsets_cases,
    hints={
        "first": (
            "Program 0 has the first tile. Which elements are those, and are they all there?",
            "torch.arange(tile) counts the lanes: 0, 1, 2, 3. For program 0 these are the offsets.",
            "offsets = program * tile + torch.arange(tile); return offsets, offsets < n",
        ),
        "later": (
            "At which element does this program begin, if each one before it took a whole tile?",
            "At program * tile. From there its lanes count on, one by one.",
            "offsets = program * tile + torch.arange(tile)",
        ),
        "tail": (
            "The last tile is rarely full. Which of its offsets are elements, and which lie past "
            "the end?",
            "The elements are 0 to n - 1, so an offset is inside if it is less than n. All lanes "
            "stay; the mask alone says which take part.",
            "return offsets, offsets < n",
        ),
    },
    solution=offsets_and_mask,
    wrong=(
        _every_first, _overlapping, _strided, _one_more, _all_true, _lane_mask, _inverted, _cut,
        _clamped, _from_one, _swapped, _numbers, _times_n,
    ),
)  # fmt: skip


# paged_gather ------------------------------------------------------------------------------------

UNWRITTEN = -1.0  # the numbers of the output before the launch


def memory(
    n_kv: int, head_dim: int, slots: list[int], room: int = 0, layers: int = 1, apart: int = 1
) -> tuple:
    """A pool [32, n_kv, head_dim] in which all numbers differ; the slot mapping, with `room` more
    entries behind its end; and an output as long, full of UNWRITTEN, whose rows lie `apart` times
    as far from each other as they need."""
    pool = torch.arange(32.0 * n_kv * layers * head_dim).view(32, n_kv, layers, head_dim)[:, :, 0]
    mapping = torch.tensor([*slots, *(31 - i for i in range(room))])
    out = torch.full((len(mapping), n_kv, apart, head_dim), UNWRITTEN)[:, :, 0]
    return pool, mapping, out


def launch(kernel, pool, mapping, out, kv_len: int, tile: int) -> torch.Tensor:
    """Run a gather: one program per tile of positions and KV head."""
    _, n_kv, head_dim = pool.shape
    tlsim.jit(kernel)[(tlsim.cdiv(kv_len, tile), n_kv)](
        pool,
        mapping,
        out,
        kv_len,
        pool.stride(0),
        pool.stride(1),
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        BLOCK_D=tlsim.next_power_of_2(head_dim),
        TILE=tile,
    )
    return out


ADVICE = {  # words of an error of tlsim, and what to do about it here
    "do not broadcast": "Stand the rows up: row[:, None] + dim[None, :]",
    "a mask of shape": "Stand the rows up: held[:, None] & (dim < HEAD_DIM)[None, :]",
    "a block of shape [] can be indexed": "A pointer is not indexed: tl.load(pool_ptr + offset)",
}

SLOTS = [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31, 4]  # blocks 5, 2, 7 and 1, of 4 slots


def _gathered(
    answer, tile: int, kv_len: int, n_kv: int, head_dim: int, slots=SLOTS, **more
) -> torch.Tensor:
    """The output of an answer's kernel, in lockstep unless `order` says otherwise."""
    code = getattr(getattr(answer, "fn", answer), "__code__", None)
    if "NotImplementedError" in getattr(code, "co_names", ()):
        raise NotImplementedError  # a stub: Triton has no raise, and so it could not be compiled
    order, poison = more.pop("order", "lockstep"), more.pop("poison", False)
    pool, mapping, out = memory(n_kv, head_dim, slots[:kv_len], **more)
    if poison:
        unowned = torch.ones(len(pool), dtype=torch.bool)
        unowned[mapping] = False
        pool = pool.clone()
        pool[unowned] = torch.nan
    with tlsim.options(order=order, poison=poison):
        try:
            return launch(answer, pool, mapping, out, kv_len, tile)
        except tlsim.KernelError as error:
            said, _, line = str(error).partition("\n")
            told = [advice for words, advice in ADVICE.items() if words in said]
            error.args = (". ".join([said, *told]) + f"\n{line}",)
            raise


def _gather_cases() -> list[Case]:
    def case(what: str, kind: str, *args, **more) -> Case:
        return Case(what, args, more, kind=kind, call=_gathered)

    return [
        case("one tile of 4, one KV head of 8", "one", 4, 4, 1, 8),
        case("slots 2, 0, 3 and 1: as many as positions", "one", 4, 4, 1, 8, [2, 0, 3, 1]),
        case("8 positions by tiles of 2", "tiles", 2, 8, 1, 8),
        case("4 positions by tiles of 1", "tiles", 1, 4, 1, 8),
        case("8 positions by tiles of 2, serially, in a shuffled order", "tiles", 2, 8, 1, 8,
             order="serial"),
        case("one tile of 4, 3 KV heads of 8", "heads", 4, 4, 3, 8),
        case("8 positions by tiles of 4, 3 KV heads of 16", "heads", 4, 8, 3, 16),
        case("13 positions by tiles of 4, 2 heads: the tail", "tail", 4, 13, 2, 8),
        case("10 positions by tiles of 4, the buffers longer: the rest untouched", "tail",
             4, 10, 1, 8, room=4),
        case("heads of 6 numbers, by blocks of 8", "padded", 4, 8, 2, 6,
             [20, 21, 22, 23, 28, 29, 30, 31]),  # the pool's last slot too
        case("a pool that holds two layers side by side", "strides", 4, 8, 2, 8, layers=2),
        case("an output with room between its rows: 2 positions, 2 heads", "into", 2, 2, 2, 8,
             apart=2),
        case("NaN in the slots of other sequences", "poison", 4, 13, 2, 8, poison=True),
    ]  # fmt: skip


def paged_gather(
    pool_ptr,  # [num_slots, n_kv, head_dim]
    slot_ptr,  # [kv_len]
    out_ptr,  # [kv_len, n_kv, head_dim]
    kv_len,
    pool_slot,  # strides, in elements; head_dim's are 1
    pool_head,
    out_row,
    out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program copies one KV head's rows of one tile of positions."""
    head = tl.program_id(1)
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = position < kv_len
    slot = tl.load(slot_ptr + position, mask=held, other=0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    mask = held[:, None] & (dim < HEAD_DIM)[None, :]
    row = slot * pool_slot + head * pool_head
    rows = tl.load(pool_ptr + row[:, None] + dim[None, :], mask=mask)
    row = position * out_row + head * out_head
    tl.store(out_ptr + row[:, None] + dim[None, :], rows, mask=mask)


def planted(kernel: Callable, *changes: tuple[str, str]) -> Callable:
    """A copy of a kernel with pieces of its source, (old, new), replaced: faults on purpose."""
    source = textwrap.dedent(inspect.getsource(getattr(kernel, "fn", kernel)))
    for old, new in changes:
        if old not in source:
            raise ValueError(f"the kernel has no {old!r}")
        source = source.replace(old, new)
    file = f"<planted: {changes}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope: dict = {"tl": tl, "tlsim": tlsim}
    exec(compile(source, file, "exec"), scope)
    return scope[kernel.__name__]


def _planted(why: str, *changes: tuple[str, str], hints: str | None = None) -> Wrong:
    return Wrong(tlsim.jit(planted(paged_gather, *changes)), why, hints)


_HELD = "held = position < kv_len"
_ROWS = "mask = held[:, None] & (dim < HEAD_DIM)[None, :]"
_STORED = "rows, mask=mask)"
_FROM = "row = slot * pool_slot + head * pool_head"
_TO = "row = position * out_row + head * out_head"

GATHER = Exercise(
    "paged_gather",
    _gather_cases,
    hints={
        "one": (
            "A tile of four positions is two loads and a store: which numbers come first, those "
            "of the slots or those of the pool?",
            "First the slots, tl.load(slot_ptr + position). A row begins at slot * pool_slot + "
            "head * pool_head in the pool, and at position * out_row + head * out_head in the "
            "output.",
            "rows = tl.load(pool_ptr + row[:, None] + dim[None, :], mask=mask), with row one "
            "number for each position of the tile and dim = tl.arange(0, BLOCK_D)",
        ),
        "tiles": (
            "Which positions are this program's? It is one of several along axis 0 of the grid.",
            "tl.program_id(0) says which. Its tile begins at that times TILE.",
            "position = tl.program_id(0) * TILE + tl.arange(0, TILE)",
        ),
        "heads": (
            "The grid has a second axis, as long as there are KV heads. What does a program of "
            "head 2 read, and where does it store?",
            "head = tl.program_id(1). Its rows begin head * pool_head further on in the pool, and "
            "head * out_head further on in the output.",
            "row = slot * pool_slot + head * pool_head to load from; row = position * out_row + "
            "head * out_head to store to",
        ),
        "tail": (
            "Some lanes of the last tile are no positions. Which lanes, and what must they not do?",
            "held = position < kv_len. All three need it: the load of the slots, the load of the "
            "rows, the store.",
            "mask = held[:, None] & (dim < HEAD_DIM)[None, :], and slot = tl.load(slot_ptr + "
            "position, mask=held, other=0)",
        ),
        "padded": (
            "A block has 8 lanes for a head of 6 numbers. Which numbers do the last two lanes "
            "load?",
            "The numbers of the next head, or of the next row. Only dim < HEAD_DIM may take part.",
            "mask = held[:, None] & (dim < HEAD_DIM)[None, :], for the load and for the store",
        ),
        "strides": (
            "Here one slot's rows are twice as far apart as a head's numbers would fill. How far "
            "is it from one slot to the next?",
            "pool_slot elements. A stride is an argument of the kernel; the shapes do not give it.",
            "row = slot * pool_slot + head * pool_head",
        ),
        "into": (
            "Here the output's rows lie apart: another row would fit between two of them. Where "
            "does the row of position 1 begin?",
            "At out_row, and each head out_head further on. Neither the pool's strides nor the "
            "shapes give it.",
            "row = position * out_row + head * out_head",
        ),
        "poison": (
            "A lane that does not take part loads a row all the same. Which one?",
            "Where the mask is false, tl.load gives `other`: slot 0, which is another sequence's. "
            "The load of the rows needs the mask too.",
            "rows = tl.load(pool_ptr + row[:, None] + dim[None, :], mask=mask)",
        ),
    },
    solution=paged_gather,
    wrong=(
        _planted(
            "The tail is not masked: the last tile has lanes for positions that are not there. "
            "They need mask=, made from position < kv_len.",
            (_HELD, "held = position >= 0"),
        ),
        _planted(
            "One position too many: kv_len positions are 0 to kv_len - 1. Use <, not <=.",
            (_HELD, "held = position <= kv_len"),
        ),
        _planted(
            "A slot is the number of a row, and a pointer counts elements. Multiply by the "
            "stride: slot * pool_slot.",
            (_FROM, "row = slot + head * pool_head"),
        ),
        _planted(
            "Every program works on the first tile, and all of them store to one place: "
            "tl.program_id(0) is not in the positions.",
            ("tl.program_id(0) * TILE + tl", "tl"),
        ),
        _planted(
            "The tiles overlap: a program has a whole tile, so multiply first: "
            "tl.program_id(0) * TILE.",
            ("tl.program_id(0) * TILE + tl", "tl.program_id(0) + tl"),
        ),
        _planted(
            "All programs read head 0: the pool's row lacks head * pool_head.",
            (_FROM, "row = slot * pool_slot"),
        ),
        _planted(
            "All heads store to one place: the output's row lacks head * out_head.",
            (_TO, "row = position * out_row"),
        ),
        _planted(
            "The axes have changed places: along axis 0 of the grid lie the tiles, along axis 1 "
            "the heads.",
            ("head = tl.program_id(1)", "head = tl.program_id(0)"),
            ("position = tl.program_id(0)", "position = tl.program_id(1)"),
        ),
        _planted(
            "The rows come out as if the text lay in one piece. A row is loaded from its slot, "
            "slot * pool_slot, and stored at its position, position * out_row.",
            (_FROM, "row = position * pool_slot + head * pool_head"),
        ),
        _planted(
            "pool_head is the step from head to head. From one slot to the next it is pool_slot "
            "elements: all heads of a slot lie between.",
            (_FROM, "row = slot * pool_head + head * pool_head"),
        ),
        _planted(
            "A slot holds n_kv heads of HEAD_DIM numbers, so slot * HEAD_DIM begins in another "
            "slot's row as soon as there are two heads. The stride is pool_slot.",
            (_FROM, "row = slot * HEAD_DIM + head * pool_head"),
        ),
        _planted(
            "A slot holds n_kv heads, so slot * BLOCK_D begins in another slot's row. The stride "
            "is pool_slot.",
            (_FROM, "row = slot * BLOCK_D + head * pool_head"),
        ),
        _planted(
            "The pool's strides have changed places: pool_slot goes with the slot, pool_head with "
            "the head.",
            (_FROM, "row = slot * pool_head + head * pool_slot"),
        ),
        _planted(
            "The output's strides have changed places: out_row goes with the position, out_head "
            "with the head.",
            (_TO, "row = position * out_head + head * out_row"),
        ),
        _planted(
            "The output's strides are computed from the shapes. An output may have room between "
            "its rows: use out_row and out_head as they are handed in.",
            (_TO, "row = (position * tl.num_programs(1) + head) * HEAD_DIM"),
        ),
        _planted(
            "The output's strides are computed from BLOCK_D. The padding is in the block and not "
            "in memory: use out_row and out_head as they are handed in.",
            (_TO, "row = (position * tl.num_programs(1) + head) * BLOCK_D"),
        ),
        _planted(
            "From head to head the output goes on by out_head, not by HEAD_DIM: there may be room "
            "between its rows.",
            (_TO, "row = position * out_row + head * HEAD_DIM"),
        ),
        _planted(
            "From head to head the pool goes on by pool_head, not by HEAD_DIM: something else may "
            "lie between.",
            (_FROM, "row = slot * pool_slot + head * HEAD_DIM"),
        ),
        _planted(
            "From head to head the output goes on by out_head, not by BLOCK_D: the padding is in "
            "the block and not in memory.",
            (_TO, "row = position * out_row + head * BLOCK_D"),
        ),
        _planted(
            "From head to head the pool goes on by pool_head, not by BLOCK_D: the padding is in "
            "the block and not in memory.",
            (_FROM, "row = slot * pool_slot + head * BLOCK_D"),
        ),
        _planted(
            "The stride is computed from the shapes. In this pool something else lies between two "
            "rows: use pool_slot as it is handed in.",
            (_FROM, "row = (slot * tl.num_programs(1) + head) * HEAD_DIM"),
        ),
        _planted(
            "The padded lanes take part: BLOCK_D lanes, and a head has HEAD_DIM numbers. The rest "
            "belongs to the next head, so mask it: dim < HEAD_DIM.",
            (_ROWS, "mask = held[:, None] & (dim >= 0)[None, :]"),
        ),
        _planted(
            "The block's mask leaves out the positions, so the lanes of the tail store. Two masks "
            "meet: held[:, None] & (dim < HEAD_DIM)[None, :].",
            (_ROWS, "mask = (dim < HEAD_DIM)[None, :]"),
        ),
        _planted(
            "The rows are stored at the slot and not at the position. The output is in the order "
            "of the text: use the position.",
            (_TO, "row = slot * out_row + head * out_head"),
        ),
        _planted(
            "The store has no mask: lanes that loaded nothing store all the same.",
            (_STORED, "rows)"),
        ),
        _planted(
            "The slots are loaded without a mask: the slot mapping ends where the text does, in "
            "the middle of the last tile.",
            ("mask=held, other=0", ""),
        ),
        _planted(
            "The rows are loaded without the tail's mask: lanes that are off have slot 0 and load "
            "its row, which belongs to another sequence.",
            ("rows = tl.load(pool_ptr + row[:, None] + dim[None, :], mask=mask)",
             "rows = tl.load(pool_ptr + row[:, None] + dim[None, :], "
             "mask=(dim < HEAD_DIM)[None, :])"),
        ),
    ),
)  # fmt: skip

EXERCISES = (OFFSETS, GATHER)


# the launch grid ---------------------------------------------------------------------------------

SEQ, HEADS, DIM, BLOCK = 11, 2, 8, 4  # what the widget gathers
FAULTS = {
    "none": (),
    "tail mask forgotten": ((_HELD, "held = position >= 0"),),
    "program_id forgotten": (("tl.program_id(0) * TILE + tl", "tl"),),
    "stride forgotten": ((_FROM, "row = slot + head * pool_head"),),
    "head forgotten": ((_FROM, "row = slot * pool_slot"),),
}


def look(fault: str, tile: int) -> tuple[dict[str, tlsim.Access], str]:
    """The accesses of a launch by their argument, and what came of it: the sanitizer's words, the
    first difference from pool[slot_mapping], or nothing."""
    kernel = tlsim.jit(planted(paged_gather, *FAULTS[fault]))
    pool, mapping, out = memory(HEADS, DIM, SLOTS[:SEQ])
    told = ""
    try:
        launch(kernel, pool, mapping, out, SEQ, tile)
        wrong = (out != pool[mapping]).any(-1).nonzero().tolist()
        if wrong:
            told = "not pool[slot_mapping], first at position {}, head {}".format(*wrong[0])
    except tlsim.KernelError as error:
        told = str(error).splitlines()[0].partition(", ")[2].partition(", ")[2]
    with tlsim.trace() as trace, tlsim.options(checks=False), suppress(tlsim.KernelError):
        launch(kernel, pool, mapping, torch.empty_like(out), SEQ, tile)
    return {access.name: access for access in trace.accesses}, told


def _draw_grid(tile: int, program: int, head: int, fault: str) -> Plot:
    tiles = -(-SEQ // tile)
    program = min(program, tiles - 1)
    accesses, told = look(fault, tile)
    slots, rows, stores = (
        access.of(program + tiles * head)
        for access in (accesses["slot_ptr"], accesses["pool_ptr"], accesses["out_ptr"])
    )
    grid = f"Program ({program}, {head}) of a grid of ({tiles}, {HEADS})"
    fig, ax = figure(height=5.2, title=grid)
    ax.set(xlim=(-5.4, 35.2), ylim=(13.6, -1.6))
    ax.axis("off")

    def write(x: float, y: float, words: str, **style) -> None:
        style = {"ha": "center", "va": "center", "size": 8.5, **style}
        ax.text(x, y, words, **style)

    def cell(x: float, y: float, w: float, h: float, words: str, look: str) -> None:
        fill, ink, edge = SHADES[look]
        ax.add_patch(
            _rectangle(x, y, w, h, fill, edge, dashed=look in ("outside", "plain outside"))
        )
        write(x + w / 2, y + h / 2, words, color=ink)

    # the slot mapping, one cell for each lane of the grid
    write(-5.2, 0.5, "slot_ptr", ha="left", family="DejaVu Sans Mono")
    offsets, live = slots
    lanes = dict(zip(offsets.tolist(), live.tolist(), strict=True))
    for i in range(tiles * tile):
        inside = i < SEQ
        mine = lanes.get(i)
        shade = "plain" if inside else "plain outside"
        if mine is not None:
            shade = ("on" if inside else "outside") if mine else "off"
        cell(2.1 * i, 0, 1.9, 1, str(SLOTS[i]) if inside else "", shade)
        write(2.1 * i + 0.95, -0.45, str(i), color=COLOURS["muted"], size=8)
    write(-5.2, -0.45, "offset", ha="left", color=COLOURS["muted"], size=8)
    write(-5.2, 1.5, "mask", ha="left", color=COLOURS["muted"], size=8)
    for i, on in lanes.items():
        colour = COLOURS["fault"] if on and i >= SEQ else COLOURS["ink"]
        write(2.1 * i + 0.95, 1.5, "on" if on else "off", color=colour, size=8)
    for p in range(tiles):
        left, right = 2.1 * p * tile, 2.1 * (p + 1) * tile - 0.2
        colour = COLOURS["tlsim"] if p == program else "#C9CFD6"
        ax.plot([left, left, right, right], [2.05, 2.25, 2.25, 2.05], color=colour, linewidth=1.5)
        words = f"({p}, {head})" if tile < 4 else f"program ({p}, {head})"
        write((left + right) / 2, 2.75, words, size=8.5, color=COLOURS["ink"])

    # the pool: a slot has a row for each head
    width, top = HEADS * DIM, 5.2
    write(-5.2, top - 0.5, "pool_ptr", ha="left", family="DejaVu Sans Mono")
    touched = rows[0][rows[1]]
    seen = {(o // width, o % width // DIM) for o in touched.tolist()}
    right = {(SLOTS[p], head) for p in range(program * tile, min((program + 1) * tile, SEQ))}
    for slot in range(32):
        x = slot + 0.35 * (slot // BLOCK)
        for h in range(HEADS):
            shade = "plain" if (slot, h) not in seen else "on" if (slot, h) in right else "fault"
            cell(x, top + h, 1, 1, str(slot) if h == 0 else "", shade)
        if slot % BLOCK == 0:
            words = f"block {slot // BLOCK}"
            write(x + 2, top - 0.5, words, color=COLOURS["muted"], size=8)

    # the output: a row for each position and head, in the order of the text
    top = 8.8
    for y in (5.2, top):
        for h in range(HEADS):
            write(-0.3, y + h + 0.5, f"head {h}", ha="right", color=COLOURS["muted"], size=8)
    write(-5.2, top - 0.5, "out_ptr", ha="left", family="DejaVu Sans Mono")
    into = {(o // width, o % width // DIM) for o in stores[0][stores[1]].tolist()}
    for p in range(max(SEQ, *(q + 1 for q, _ in into or {(0, 0)}))):
        for h in range(HEADS):
            shade = "plain" if p < SEQ else "plain outside"
            if (p, h) in into:
                shade = "outside" if p >= SEQ else "on"
                shade = "fault" if shade == "on" and p // tile != program else shade
            cell(2.1 * p, top + h, 1.9, 1, "", shade)
        write(2.1 * p + 0.95, top - 0.5, str(p), color=COLOURS["muted"], size=8)
    colour = COLOURS["fault"] if told else COLOURS["ink"]
    words = textwrap.fill(f"caught: {told}" if told else "the output is pool[slot_mapping]", 86)
    write(-5.2, 12.4, words, ha="left", size=9.5, color=colour, weight="bold")
    return fig


SHADES = {  # what a cell is: (fill, ink, edge)
    "plain": ("white", COLOURS["muted"], "#C9CFD6"),
    "plain outside": ("white", COLOURS["muted"], "#C9CFD6"),
    "on": (COLOURS["tlsim"], COLOURS["ink"], COLOURS["ink"]),
    "off": ("#E4E8EC", COLOURS["ink"], COLOURS["ink"]),
    "fault": (COLOURS["fault"], "white", COLOURS["ink"]),
    "outside": ("#F8DFD0", COLOURS["fault"], COLOURS["fault"]),
}


def _rectangle(x: float, y: float, w: float, h: float, fill: str, edge: str, dashed: bool):
    from matplotlib.patches import Rectangle

    style = "dashed" if dashed else "solid"
    cell = Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, linewidth=0.9, linestyle=style)
    cell.set_zorder(1 if fill == "white" else 2)  # a neighbour does not cut its edge
    return cell


def _launch_grid(fault: str = "none") -> widgets.FigureWidget:
    return widgets.figure_widget(
        _draw_grid,
        tile=widgets.choice([2, 4, 8], 4),
        program=widgets.slider(
            0, lambda values: -(-SEQ // values["tile"]) - 1, 2, label="program_id(0)"
        ),
        head=widgets.slider(0, HEADS - 1, int(fault == "none"), label="program_id(1)"),
        fault=widgets.choice(list(FAULTS), fault, label="planted"),
    )


WIDGETS = {"launch-grid": _launch_grid}
