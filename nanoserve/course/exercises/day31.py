"""Day 31: the bytes that a launch keeps in flight, and the row of a GPU. Closes week 7, phase 2."""

from nanoserve.course.exercise import Case, Exercise, raises, wrong

KIB = 1024
L4, A100, H200 = 100 * KIB, 164 * KIB, 228 * KIB  # shared memory of a multiprocessor, bytes


def bytes_in_flight(
    tile: int, num_stages: int, head_dim: int, itemsize: int, programs: int, shared: int
) -> int:
    """Bytes of K and V that the programs of one multiprocessor have requested and not yet used.

    A program requests (num_stages - 1) // 2 tiles ahead, each of `tile` keys and `tile` values, and
    needs shared memory for them; num_stages is 1, or at least 3. `programs` were launched for this
    multiprocessor, which has `shared` bytes: as many of them run at once as fit. ValueError if the
    tiles of one program do not fit.
    """
    need = (num_stages - 1) // 2 * 2 * tile * head_dim * itemsize
    if need == 0:
        return 0
    if need > shared:
        raise ValueError(f"a program needs {need} bytes of shared memory, and there are {shared}")
    return min(programs, shared // need) * need


def _ahead(num_stages: int) -> int:
    return (num_stages - 1) // 2


def _in_flight(
    tile, num_stages, head_dim, itemsize, programs, shared, *,
    ahead=_ahead, values=2, limit=True, fits=None, refuse=True,
):  # fmt: skip
    """bytes_in_flight with one rule changed, for the wrong answers."""
    need = ahead(num_stages) * values * tile * head_dim * itemsize
    if need == 0:
        return 0
    if need > shared and refuse:
        raise ValueError(f"a program needs {need} bytes of shared memory, and there are {shared}")
    running = shared // need if fits is None else fits(shared, need)
    return (min(programs, running) if limit else running) * need


@wrong(
    "Only the keys are counted. A tile of keys comes with a tile of values, which is as large.",
    hints="tile",
)
def _keys_alone(*args):
    return _in_flight(*args, values=1)


@wrong(
    "These are numbers and not bytes: a tile has 2 * tile * head_dim numbers, of itemsize bytes "
    "each.",
    hints="tile",
)
def _numbers(tile, num_stages, head_dim, itemsize, programs, shared):
    return _in_flight(tile, num_stages, head_dim, 1, programs, shared)


@wrong(
    "Every stage is counted as a tile on its way. One stage computes on a tile that has arrived, "
    "and each other tile takes two stages: its slots, then its keys and values.",
    hints="ahead",
)
def _every_stage(*args):
    return _in_flight(*args, ahead=lambda stages: stages)


@wrong(
    "A stage for each tile is right where the address of a key is known. Here the slots must "
    "arrive first, so each tile ahead takes two stages: (num_stages - 1) // 2.",
    hints="ahead",
)
def _contiguous(*args):
    return _in_flight(*args, ahead=lambda stages: stages - 1)


@wrong(
    "One stage computes and loads nothing. It must be subtracted before the division: "
    "(num_stages - 1) // 2, not num_stages // 2.",
    hints="ahead",
)
def _half_of_all(*args):
    return _in_flight(*args, ahead=lambda stages: stages // 2)


@wrong(
    "With 1 stage no tile is requested ahead: a program waits for each tile. You count at least "
    "one.",
    hints="ahead",
)
def _at_least_one(*args):
    return _in_flight(*args, ahead=lambda stages: max(1, _ahead(stages)))


@wrong(
    "You divide by the shared memory of a program, which is 0 where no tile is requested ahead "
    "(1 stage). Then no byte is in flight: return 0 first.",
    hints="ahead",
)
def _divides_by_zero(tile, num_stages, head_dim, itemsize, programs, shared):
    need = _ahead(num_stages) * 2 * tile * head_dim * itemsize
    if shared // need == 0:
        raise ValueError(f"{need} bytes of shared memory do not fit in {shared}")
    return min(programs, shared // need) * need


@wrong(
    "This fills the shared memory whatever was launched. Where only a few programs were launched "
    "for the multiprocessor, only those have requests: take the smaller number.",
    hints="programs",
)
def _as_many_as_fit(*args):
    return _in_flight(*args, limit=False)


@wrong(
    "All programs that were launched are counted. Those that do not fit into the shared memory "
    "wait until another one ends: shared // need run at once.",
    hints="programs",
)
def _all_launched(*args):
    return _in_flight(*args, fits=lambda shared, need: 1 << 60)


@wrong(
    "A part of a program is counted. A program runs when all of its shared memory is free, so "
    "divide with //.",
    hints="programs",
)
def _parts_of_programs(*args):
    return _in_flight(*args, fits=lambda shared, need: shared / need)


@wrong(
    "The number of programs is rounded up, but the last one does not fit. Divide with //, which "
    "rounds down.",
    hints="programs",
)
def _rounded_up(*args):
    return _in_flight(*args, fits=lambda shared, need: -(-shared // need))


@wrong(
    "These are the bytes of one program. Multiply by the number of programs that run at once on "
    "the multiprocessor.",
    hints="programs",
)
def _one_program(*args):
    return _in_flight(*args, fits=lambda shared, need: 1)


@wrong(
    "This is the number of programs. Multiply it by the bytes that each program has in flight.",
    hints="programs",
)
def _counts_programs(tile, num_stages, head_dim, itemsize, programs, shared):
    need = _ahead(num_stages) * 2 * tile * head_dim * itemsize
    found = _in_flight(tile, num_stages, head_dim, itemsize, programs, shared)
    return found // need if need else 0


@wrong(
    "A program that does not fit gives 0 here. The launch would fail on the GPU: raise ValueError, "
    "with a message that names the shared memory.",
    hints="fit",
)
def _silent(*args):
    return _in_flight(*args, refuse=False)


@wrong(
    "A program that needs exactly the shared memory that there is does fit: refuse only where it "
    "needs more.",
    hints="fit",
)
def _exact_fit_refused(tile, num_stages, head_dim, itemsize, programs, shared):
    need = _ahead(num_stages) * 2 * tile * head_dim * itemsize
    if need >= shared:
        raise ValueError(f"{need} bytes of shared memory do not fit in {shared}")
    return _in_flight(tile, num_stages, head_dim, itemsize, programs, shared)


def _in_flight_cases() -> list[Case]:
    def case(what, kind, *args, **more):
        return Case(what, args, kind=kind, **more)

    refused = raises(ValueError, names="shared memory")
    return [
        case("an L4, float16: one program for it", "tile", 16, 3, 64, 2, 1, L4),
        case("an H200, float32: one program for it", "tile", 32, 3, 128, 4, 1, H200),
        case("4 stages, 1 program", "ahead", 32, 4, 64, 2, 1, A100),
        case("5 stages, 1 program", "ahead", 32, 5, 64, 2, 1, A100),
        case("8 stages, 1 program", "ahead", 16, 8, 64, 2, 1, A100),
        case("1 stage", "ahead", 64, 1, 128, 2, 3, H200),
        case("an H200: 2 programs launched for it", "programs", 64, 5, 128, 2, 2, H200),
        case("an H200: 9 programs launched for it", "programs", 64, 5, 128, 2, 9, H200),
        case("an A100: 7 programs, head_dim 80", "programs", 32, 7, 80, 2, 7, A100),
        case("64 KiB, filled to the last byte", "fit", 64, 5, 128, 2, 3, 64 * KIB),
        case("64 KiB, 7 stages", "fit", 64, 7, 128, 2, 3, 64 * KIB, expected=refused),
        case("1 byte less than 64 KiB", "fit", 64, 5, 128, 2, 3, 64 * KIB - 1, expected=refused),
        case("1 stage of a tile that is too large", "fit", 512, 1, 128, 4, 3, L4),
    ]


BYTES_IN_FLIGHT = Exercise(
    "bytes_in_flight",
    _in_flight_cases,
    hints={
        "tile": (
            "How many numbers have `tile` keys and `tile` values, and how many bytes has each?",
            "A key has head_dim numbers, and so has a value. A number has itemsize bytes.",
            "a_tile = 2 * tile * head_dim * itemsize",
        ),
        "ahead": (
            "Of num_stages stages, how many are left when one computes? How many does a tile take?",
            "A tile takes two stages, because its slots must arrive before its keys can be "
            "requested. With 1 stage no tile is ahead, and no byte is in flight.",
            "need = (num_stages - 1) // 2 * a_tile; if need is 0, return 0",
        ),
        "programs": (
            "How many programs run at once on the multiprocessor? Two numbers limit it.",
            "As many as fit into the shared memory, whole ones, but no more than were launched.",
            "return min(programs, shared // need) * need",
        ),
        "fit": (
            "When does not even one program run?",
            "When the tiles of one program need more shared memory than the multiprocessor has. "
            "Nothing is needed where no tile is ahead.",
            'if need > shared: raise ValueError(f"{need} bytes of shared memory, of {shared}")',
        ),
    },
    solution=bytes_in_flight,
    wrong=(
        _keys_alone, _numbers, _every_stage, _contiguous, _half_of_all, _at_least_one,
        _divides_by_zero, _as_many_as_fit, _all_launched, _parts_of_programs, _rounded_up,
        _one_program, _counts_programs, _silent, _exact_fit_refused,
    ),
)  # fmt: skip


def newest_row(rows, capability):
    """The launch of the newest row that is not newer than the GPU.

    `rows` holds (capability, launch) pairs in any order, capabilities as (major, minor). ValueError
    that names the capability if all rows are newer.
    """
    usable = [row for row in rows if row[0] <= capability]
    if not usable:
        raise ValueError(f"no row for compute capability {capability}")
    return max(usable, key=lambda row: row[0])[1]


def _refuse(capability):
    raise ValueError(f"no row for compute capability {capability}")


@wrong(
    "Only an equal capability gets its row. An L4 has 8.9 and no row of its own: it takes the row "
    "of 8.0, the newest that is not newer than the GPU.",
    hints="between",
)
def _equal_only(rows, capability):
    return dict(rows).get(capability) or _refuse(capability)


@wrong(
    "This takes the next newer row. Its launch may need more shared memory than this GPU has: take "
    "the newest row that is not newer.",
    hints="between",
)
def _next_newer(rows, capability):
    usable = [row for row in rows if row[0] >= capability]
    return min(usable)[1] if usable else _refuse(capability)


def _first_fitting(rows, capability):
    return next((row[1] for row in rows if row[0] <= capability), None) or _refuse(capability)


@wrong(
    "This takes the first row that fits, in the order of the table. The rows come in any order: "
    "compare their capabilities.",
    hints="order",
)
def _first_that_fits(rows, capability):
    return _first_fitting(rows, capability)


@wrong(
    "This takes the last row that fits, in the order of the table. The rows come in any order: "
    "compare their capabilities.",
    hints="order",
)
def _last_that_fits(rows, capability):
    return _first_fitting(rows[::-1], capability)


@wrong(
    "This takes the oldest row that fits. It was measured on an older GPU than another row that "
    "fits as well: take the maximum, not the minimum.",
    hints="order",
)
def _oldest(rows, capability):
    usable = [row for row in rows if row[0] <= capability]
    return min(usable)[1] if usable else _refuse(capability)


@wrong(
    "The largest launch wins here, not the newest row: max compares the pairs by their launches. "
    "Compare the capabilities.",
    hints="order",
)
def _largest_launch(rows, capability):
    usable = [row for row in rows if row[0] <= capability]
    return max(usable, key=lambda row: row[1])[1] if usable else _refuse(capability)


@wrong(
    'The capabilities are compared as text, where "10.0" comes before "9.0". Compare the pairs.',
    hints="between",
)
def _as_text(rows, capability):
    def text(pair):
        return "{}.{}".format(*pair)

    usable = [row for row in rows if text(row[0]) <= text(capability)]
    return max(usable, key=lambda row: text(row[0]))[1] if usable else _refuse(capability)


@wrong(
    "Only the first number is compared, so that a 7.0 takes the row of 7.5. Compare the pairs.",
    hints="between",
)
def _major_only(rows, capability):
    usable = [row for row in rows if row[0][0] <= capability[0]]
    return max(usable)[1] if usable else _refuse(capability)


@wrong(
    "Both numbers must be small enough here, each by itself, so that 9.0 cannot take the row of "
    "8.6. Python compares pairs from the left: (8, 6) <= (9, 0).",
    hints="between",
)
def _part_by_part(rows, capability):
    usable = [row for row in rows if all(a <= b for a, b in zip(row[0], capability, strict=True))]
    return max(usable)[1] if usable else _refuse(capability)


@wrong(
    "A GPU whose capability stands in the table takes its own row: use <=, not <.",
    hints="between",
)
def _strictly_older(rows, capability):
    usable = [row for row in rows if row[0] < capability]
    return max(usable)[1] if usable else _refuse(capability)


@wrong(
    "A GPU older than all rows gets the oldest row here. No row was measured for it: raise "
    "ValueError, with the capability in the message.",
    hints="refuse",
)
def _oldest_for_all(rows, capability):
    usable = [row for row in rows if row[0] <= capability] or [min(rows)]
    return max(usable)[1]


@wrong(
    "A GPU older than all rows gets the newest row of all here. It lacks instructions that this "
    "row may use: raise ValueError, with the capability in the message.",
    hints="refuse",
)
def _newest_for_all(rows, capability):
    usable = [row for row in rows if row[0] <= capability] or rows
    return max(usable)[1]


@wrong(
    "This is the whole row, a pair of a capability and a launch. Return the launch alone.",
    hints=(
        "A row is a pair. Which half of it was asked for?",
        "The launch, the second half: row[1].",
        "return max(usable, key=lambda row: row[0])[1]",
    ),
)
def _whole_row(rows, capability):
    usable = [row for row in rows if row[0] <= capability]
    return max(usable) if usable else _refuse(capability)


@wrong(
    "A GPU newer than all rows is refused here. It takes the newest row, until someone has "
    "measured a better one.",
    hints="between",
)
def _newer_refused(rows, capability):
    if capability > max(rows)[0]:
        return _refuse(capability)
    return newest_row(rows, capability)


def _launch_cases() -> list[Case]:
    # a launch is (tile, num_warps, num_stages); made up, and in no order
    rows = [
        ((8, 0), (64, 4, 3)),
        ((10, 0), (128, 8, 6)),
        ((7, 5), (32, 8, 1)),
        ((9, 0), (64, 2, 5)),
        ((8, 6), (32, 4, 4)),
    ]
    older = raises(ValueError, names="7")
    return [
        Case("an A100, 8.0", (rows, (8, 0)), kind="order"),
        Case("an H200, 9.0", (rows, (9, 0)), kind="order"),
        Case("a T4, 7.5", (rows, (7, 5)), kind="order"),
        Case("an L4, 8.9", (rows, (8, 9)), kind="between"),
        Case("an H200, and no row of 9.0", (rows[:3] + rows[4:], (9, 0)), kind="between"),
        Case("a B200, 10.0", (rows, (10, 0)), kind="between"),
        Case("an RTX 5090, 12.0", (rows, (12, 0)), kind="between"),
        Case("a Jetson Orin, 8.7, and two rows", (rows[1:3], (8, 7)), kind="between"),
        Case("a V100, 7.0", (rows, (7, 0)), kind="refuse", expected=older),
        Case("no row at all", ([], (7, 5)), kind="refuse", expected=older),
    ]


NEWEST_ROW = Exercise(
    "newest_row",
    _launch_cases,
    hints={
        "order": (
            "Which rows may this GPU use, and which of them is the newest?",
            "Keep the rows whose capability is at most the GPU's; then take the one with the "
            "largest capability. Python compares pairs from the left.",
            "usable = [row for row in rows if row[0] <= capability]; max(usable)[1]",
        ),
        "between": (
            "This GPU may have no row of its own. Which rows are not newer than the GPU?",
            "Pairs are compared from the left: (8, 6) <= (8, 9) <= (9, 0) <= (10, 0). A newer GPU "
            "than all rows takes the newest row.",
            "usable = [row for row in rows if row[0] <= capability]; max(usable)[1]",
        ),
        "refuse": (
            "What is left of the rows here?",
            "Nothing. max of an empty list raises an error that names no capability: raise your "
            "own before.",
            'if not usable: raise ValueError(f"no row for compute capability {capability}")',
        ),
    },
    solution=newest_row,
    wrong=(
        _equal_only, _next_newer, _first_that_fits, _last_that_fits, _oldest, _largest_launch,
        _as_text, _major_only, _part_by_part, _strictly_older, _oldest_for_all, _newest_for_all,
        _whole_row, _newer_refused,
    ),
)  # fmt: skip

EXERCISES = (BYTES_IN_FLIGHT, NEWEST_ROW)

REVIEW = (
    (
        "Day 27. Attention of a decode step reads 1 GB of keys and values in 0.5 ms, on a GPU that "
        "reads 4 TB/s. Which share of the peak bandwidth is that, and what is the shortest time?",
        "1 GB in 0.5 ms is 2 TB/s: 50%. No kernel can take less than 1 GB / 4 TB/s = 0.25 ms, "
        "because each key and value must be read once.",
    ),
    (
        "Day 28. The lengths of a batch lie on the GPU. Why does a launch get upper bounds from "
        "the host instead of reading them?",
        "Reading a tensor on the host waits for all queued work, and a captured launch could then "
        "not be replayed with other lengths. The grid follows from the bounds; a program that has "
        "no tokens does nothing.",
    ),
    (
        "Day 29. Four query heads share a KV head. What does packing them into one tile save, and "
        "where?",
        "Each key and value is loaded once instead of four times, and the tile is a matrix "
        "product. On a CPU it also saves a copy of the keys for each query head.",
    ),
    (
        "Day 30. Two parts of a sequence have log-sum-exps 3 and 5, to base 2. With which weights "
        "are their results merged?",
        "2 ** 3 to 2 ** 5, that is 8 to 32: 0.2 and 0.8. It is the fold of Day 22 again, with a "
        "part in place of a tile.",
    ),
    (
        "Day 30. Why does a launch not have as many workers as possible?",
        "A worker that reads a part of a sequence stores a partial result, and the merge reads all "
        "parts. Once every multiprocessor has as many workers as it runs at once, more workers "
        "only add parts.",
    ),
    (
        "Day 31. A program computes a tile, then requests the next one and waits. What do more "
        "stages change, and what limits them?",
        "The next tiles are requested before this one is computed, so that enough bytes are in "
        "flight: bandwidth times latency. Each of these tiles needs shared memory, and a program "
        "that needs more leaves room for fewer others.",
    ),
    (
        "Day 31. What may change between two replays of a captured launch, and what may not?",
        "The contents of the tensors: tokens, tables, lengths within the bounds. Shapes, addresses "
        "and the grid of a CUDA graph are fixed; tlsim records again when they change.",
    ),
    (
        "Phase 2. Blocks have 16 slots and a sequence has 1,000 tokens. How many blocks does it "
        "own, where is position 777, and how many slots are unused?",
        "63 blocks. Position 777 is in entry 48 of the block table, at offset 9. 8 slots of the "
        "last block are unused: never more than 15, whatever the model's context.",
    ),
    (
        "Phase 2. Name the steps from gqa_attention to the kernel on a GPU, and what each adds.",
        "gqa_attention calls the cache's paged_attention. The cache writes K and V and passes its "
        "pools and its slot mapping to the dispatcher. The dispatcher chooses the backend, and the "
        "launcher checks the arguments and computes grid, strides and launch parameters.",
    ),
    (
        "Phase 2. Which promises of paged attention are exact, and which hold within a tolerance?",
        "What is moved is exact: scatter, gather, a block's reuse. What is summed in another order "
        "is within attention's tolerance: kernel, splits, merge. Greedy tokens in float32 are "
        "equal on the reference prompts.",
    ),
    (
        "Phase 2. One kernel source runs under three runtimes. What has each of them found, or "
        "made possible, that the others could not?",
        "tlsim shows the line of a wrong address and runs the engine without a GPU. Triton's "
        "interpreter has Triton's own rules. The compiled kernel shows the speed.",
    ),
)
