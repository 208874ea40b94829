"""Day 33: two numbers from a byte in a kernel, scale and minimum once a group, the bytes of a
product. Closes week 8 and phase 3."""

import torch

from nanoserve.course.exercise import Case, Exercise, Wrong, close, wrong
from nanoserve.course.exercises.day21 import planted
from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl

# unpack ------------------------------------------------------------------------------------------

UNWRITTEN = -1.0  # the numbers of the output before the launch


def unpack(
    byte_ptr,  # uint8 [n]
    out_ptr,  # float32 [2 * n]
    n,
    BLOCK: tl.constexpr,
):
    """out[2j] and out[2j + 1]: the low and the high four bits of byte j. BLOCK bytes a program."""
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < n
    two = tl.load(byte_ptr + byte, mask=inside, other=0)
    tl.store(out_ptr + 2 * byte, two & 15, mask=inside)
    tl.store(out_ptr + 2 * byte + 1, two >> 4, mask=inside)


def _unpacked(answer, packed: list[int], block: int, room: int = 0, order: str = "lockstep"):
    """The output of an answer's kernel; `room` more numbers behind its end."""
    code = getattr(getattr(answer, "fn", answer), "__code__", None)
    if "NotImplementedError" in getattr(code, "co_names", ()):
        raise NotImplementedError  # a stub: Triton has no raise, and so it could not be compiled
    memory = torch.tensor([*packed, *[0xFF] * room], dtype=torch.uint8)
    out = torch.full((2 * len(memory),), UNWRITTEN)
    with tlsim.options(order=order):
        tlsim.jit(answer)[(tlsim.cdiv(len(packed), block),)](memory, out, len(packed), BLOCK=block)
    return out


def _unpack_cases() -> list[Case]:
    def case(what: str, kind: str, packed: list[int], block: int, **more) -> Case:
        return Case(what, (packed, block), more, kind=kind, call=_unpacked)

    random = torch.Generator().manual_seed(33)
    many = torch.randint(0, 256, (13,), generator=random).tolist()
    return [
        case("one byte, 0x21: the numbers 1 and 2", "one", [0x21], 1),
        case("one byte, 0xF0: the numbers 0 and 15", "one", [0xF0], 1),
        case("four bytes, one program", "order", [0x10, 0x32, 0x54, 0x76], 4),
        case("large numbers: 0x98, 0xBA, 0xDC and 0xFE", "order", [0x98, 0xBA, 0xDC, 0xFE], 4),
        case("eight bytes by programs of 2", "programs", many[:8], 2),
        case("the same, serially, in a shuffled order", "programs", many[:8], 2, order="serial"),
        case("13 bytes by programs of 4: the tail", "tail", many, 4, room=3),
        case("5 bytes by a program of 8, the memory ends there", "tail", many[:5], 8),
    ]


def _planted(why: str, *changes: tuple[str, str], hints: str | None = None) -> Wrong:
    return Wrong(tlsim.jit(planted(unpack, *changes)), why, hints)


_LOW, _HIGH = "out_ptr + 2 * byte, two & 15", "out_ptr + 2 * byte + 1, two >> 4"

UNPACK = Exercise(
    "unpack",
    _unpack_cases,
    hints={
        "one": (
            "A byte is eight bits. Which operation keeps the lower four, and which one moves the "
            "upper four down?",
            "two & 15 keeps the lower four bits. two >> 4 moves the upper four to their place, and "
            "zeros follow them.",
            "tl.store(out_ptr + 2 * byte, two & 15, mask=inside) and tl.store(out_ptr + 2 * byte "
            "+ 1, two >> 4, mask=inside)",
        ),
        "order": (
            "Byte j holds two neighbours. Where do they stand in the output?",
            "At 2 * j and 2 * j + 1: the low four bits first.",
            "one store to out_ptr + 2 * byte, and one to out_ptr + 2 * byte + 1",
        ),
        "programs": (
            "Which bytes are this program's?",
            "BLOCK of them, from tl.program_id(0) * BLOCK on.",
            "byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        ),
        "tail": (
            "The last program has lanes for bytes that are not there. What must they not do?",
            "inside = byte < n is the mask of the load and of both stores.",
            "tl.load(byte_ptr + byte, mask=inside, other=0), and mask=inside in both stores",
        ),
    },
    solution=unpack,
    wrong=(
        _planted(
            "The two numbers of a byte have changed places. The low four bits are the first of "
            "the two.",
            (_LOW, "out_ptr + 2 * byte + 1, two & 15"),
            (_HIGH, "out_ptr + 2 * byte, two >> 4"),
        ),
        _planted(
            "The first number is the whole byte: keep its lower four bits, two & 15.",
            ("two & 15", "two"),
        ),
        _planted(
            "The second number is 16 times too large: its bits stand in the upper half of the "
            "byte. Move them down, two >> 4.",
            ("two >> 4", "two & 240"),
        ),
        _planted(
            "The mask has a bit too few: 15 is 0b1111, four bits. 7 keeps three.",
            ("two & 15", "two & 7"),
        ),
        _planted(
            "A shift by 8 moves all bits of a byte out. The upper four bits go down by 4.",
            ("two >> 4", "two >> 8"),
        ),
        _planted(
            "All low numbers come first, then all high numbers. The two numbers of a byte are "
            "neighbours: 2 * byte and 2 * byte + 1.",
            ("out_ptr + 2 * byte, ", "out_ptr + byte, "),
            ("out_ptr + 2 * byte + 1", "out_ptr + n + byte"),
        ),
        _planted(
            "The pairs overlap: two numbers leave each byte, so byte j begins at 2 * j.",
            ("out_ptr + 2 * byte, ", "out_ptr + byte, "),
            ("out_ptr + 2 * byte + 1", "out_ptr + byte + 1"),
        ),
        _planted(
            "Every program unpacks the first bytes: tl.program_id(0) * BLOCK is not in them.",
            ("tl.program_id(0) * BLOCK + ", ""),
        ),
        _planted(
            "The programs overlap: a program has BLOCK bytes, so multiply first: "
            "tl.program_id(0) * BLOCK.",
            ("tl.program_id(0) * BLOCK", "tl.program_id(0)"),
        ),
        _planted(
            "The tail is not masked: the last program has lanes for bytes that are not there.",
            ("byte < n", "byte >= 0"),
        ),
        _planted(
            "One byte too many: n bytes are 0 to n - 1. Use <, not <=.", ("byte < n", "byte <= n")
        ),
    ),
)


# finish ------------------------------------------------------------------------------------------

OUT, GROUPS = 5, 3


def finish(
    dots: torch.Tensor, sums: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """dots [out, groups]: each group's sum of q * x; sums [groups]: its sum of x -> y [out]."""
    return (scales * dots + minimums * sums).sum(1)


def group(
    numbers: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The arguments of finish. numbers [out, groups, 32] float, x [groups, 32]."""
    return (numbers * x).sum(-1), x.sum(-1), scales, minimums


def _finish_cases() -> list[Case]:
    random = torch.Generator().manual_seed(33)

    def case(what: str, kind: str, out: int, groups: int, *, scale=1.0, least=1.0, even=False):
        numbers = torch.randint(0, 16, (out, groups, 32), generator=random).float()
        x = torch.randn(groups, 32, generator=random)
        x = x - x.mean(-1, keepdim=True) if even else x + 0.25
        scales = scale * (0.5 + torch.rand(out, groups, generator=random))
        minimums = least * (torch.rand(out, groups, generator=random) - 2)
        values = numbers * scales[..., None] + minimums[..., None]
        truth = (values * x).sum((1, 2))
        args = group(numbers, x, scales, minimums)
        return Case(what, args, {}, kind, truth, close(1e-3, 1e-4))

    return [
        case("one result, one group", "one", 1, 1),
        case("one result, one group, all minimums 0", "scale", 1, 1, least=0.0),
        case("one result, one group, all scales 0", "minimum", 1, 1, scale=0.0),
        case("one result, four groups", "groups", 1, 4),
        case("five results, three groups", "groups", OUT, GROUPS),
        case("three results, three groups", "groups", 3, 3),
        case("five results, x sums to 0 in each group", "scale", OUT, GROUPS, even=True),
        case("five results, large minimums", "minimum", OUT, GROUPS, least=50.0),
    ]


@wrong(
    "The minimum is added once a group. It belongs to each of the 32 values, and each is "
    "multiplied by its x: minimum times the sum of x."
)
def _added_once(dots, sums, scales, minimums):
    return (scales * dots + minimums).sum(1)


@wrong(
    "The minimum is counted 32 times, without x. Each of the 32 is multiplied by its own x: "
    "together minimum times the sum of x."
)
def _times_32(dots, sums, scales, minimums):
    return (scales * dots + 32 * minimums).sum(1)


@wrong("The minimums are left out. They add minimum times the sum of x for each group.")
def _no_minimum(dots, sums, scales, minimums):
    return (scales * dots).sum(1)


@wrong("The minimum is multiplied by the dot product. It meets x alone: minimum times sums.")
def _minimum_times_dots(dots, sums, scales, minimums):
    return (scales * dots + minimums * dots).sum(1)


@wrong("The scale also multiplies the minimum. value = q * scale + minimum: scale meets q alone.")
def _scaled_minimum(dots, sums, scales, minimums):
    return (scales * (dots + minimums * sums)).sum(1)


@wrong("The minimum is subtracted. value = q * scale + minimum; a minimum is often negative.")
def _subtracted(dots, sums, scales, minimums):
    return (scales * dots - minimums * sums).sum(1)


@wrong(
    "The sum runs over the results: axis 0. A result is the sum over its own groups: axis 1.",
    hints="groups",
)
def _over_results(dots, sums, scales, minimums):
    return (scales * dots + minimums * sums).sum(0)


@wrong(
    "The groups are added up first, and one mean scale is applied. Each group has a scale of its "
    "own: multiply, then add.",
    hints="groups",
)
def _mean_scale(dots, sums, scales, minimums):
    return scales.mean(1) * dots.sum(1) + (minimums * sums).sum(1)


@wrong("The groups are not added up: a result is one number. Sum over the groups.")
def _not_summed(dots, sums, scales, minimums):
    return scales * dots + minimums * sums


@wrong("The scales are left out. A group's dot product is of the numbers 0 to 15.")
def _no_scale(dots, sums, scales, minimums):
    return (dots + minimums * sums).sum(1)


FINISH = Exercise(
    "finish",
    _finish_cases,
    hints={
        "one": (
            "Write the product of one group with q * scale + minimum in place of the weight. What "
            "can be taken out of the sum?",
            "sum((q * scale + minimum) * x) = scale * sum(q * x) + minimum * sum(x).",
            "return (scales * dots + minimums * sums).sum(1)",
        ),
        "scale": (
            "Here the minimums count for nothing. What is left of the formula?",
            "scale * sum(q * x), for each group, added up.",
            "scales * dots, summed over axis 1",
        ),
        "minimum": (
            "How often does a group's minimum occur in its product, and by what is it multiplied "
            "each time?",
            "32 times, each time by another x. Together: minimum * sum(x).",
            "minimums * sums: [out, groups] times [groups]",
        ),
        "groups": (
            "Each result has several groups. Over which axis are they added up, and when?",
            "Over axis 1, after each group has been multiplied by its own scale.",
            "return (scales * dots + minimums * sums).sum(1)",
        ),
    },
    solution=finish,
    wrong=(
        _added_once, _times_32, _no_minimum, _minimum_times_dots, _scaled_minimum, _subtracted,
        _over_results, _mean_scale, _not_summed, _no_scale,
    ),
)  # fmt: skip


# q4_bytes ----------------------------------------------------------------------------------------


def _bytes_cases() -> list[Case]:
    def case(what: str, kind: str, *args: int) -> Case:
        return Case(what, args, kind=kind)

    return [
        case("one row of 32 numbers", "one", 1, 32),
        case("one row of 96 numbers", "one", 1, 96),
        case("five rows of 32 numbers", "rows", 5, 32),
        case("Llama-3.2-1B, o: 2,048 x 2,048", "rows", 2_048, 2_048),
        case("Llama-3.2-1B, down: 2,048 x 8,192", "rows", 2_048, 8_192),
        case("Llama-3.2-1B, the head: 128,256 x 2,048", "rows", 128_256, 2_048),
    ]


def _but(num_out: int, width: int, *, bits=4, size=2, parts=2, group=32) -> int:
    return num_out * width * bits // 8 + parts * size * num_out * (width // group)


@wrong("The minimums are left out: a group has a scale and a minimum.")
def _scales_alone(num_out, width):
    return _but(num_out, width, parts=1)


@wrong("Scales and minimums are left out. A group of 32 numbers has one of each, in bfloat16.")
def _numbers_alone(num_out, width):
    return _but(num_out, width, parts=0)


@wrong("Scales and minimums are counted as float32. They are bfloat16: two bytes each.")
def _float32(num_out, width):
    return _but(num_out, width, size=4)


@wrong("A number is counted as a byte. Two numbers share a byte.")
def _bytes(num_out, width):
    return _but(num_out, width, bits=8)


@wrong("This is the number of bits. A byte has eight.")
def _bits(num_out, width):
    return 8 * _but(num_out, width)


@wrong("One scale and one minimum are counted for a whole row. Each group of 32 has its own.")
def _per_row(num_out, width):
    return num_out * width // 2 + 4 * num_out


@wrong("Only one row is counted.", hints="rows")
def _one_row(num_out, width):
    return _but(1, width)


BYTES = Exercise(
    "q4_bytes",
    _bytes_cases,
    hints={
        "one": (
            "How many bytes has a group of 32 numbers, with all that belongs to it?",
            "16 for the numbers, 2 for the scale, 2 for the minimum: 20.",
            "num_out * (width // 32) * 20",
        ),
        "rows": (
            "One row is right. How many rows are there?",
            "num_out rows, each of width // 32 groups.",
            "num_out * (width // 32) * 20",
        ),
    },
    target="nanoserve.bench.matvec:q4_bytes",
    wrong=(
        _scales_alone, _numbers_alone, _float32, _bytes, _bits, _per_row, _one_row,
    ),
)  # fmt: skip

EXERCISES = (BYTES, UNPACK, FINISH)

REVIEW = (
    (
        "Day 32. A group of 32 weights lies between -0.3 and 0.45. Which scale and which minimum "
        "does it get, and which number stands for -0.3?",
        "scale = (0.45 + 0.3) / 15 = 0.05 and minimum = -0.3. Number 0 stands for -0.3, number 15 "
        "for 0.45.",
    ),
    (
        "Day 32. One weight of a group is 20 times as large as the others. What happens to the "
        "others, and why does a smaller group help?",
        "The scale is a 15th of the group's range, so the others share one or two numbers. In "
        "smaller groups the outlier has fewer neighbours; but each group costs a scale and a "
        "minimum.",
    ),
    (
        "Day 32. How many bits has a weight in groups of 32 with two bfloat16 numbers, all told?",
        "4 bits, and 2 * 16 bits for 32 weights: 5 bits. That is 3.2 times fewer than bfloat16.",
    ),
    (
        "Day 33. Why are scale and minimum applied after the sum of a group and not to each "
        "number?",
        "They are the same for all 32, so they can be taken out of the sum: scale * sum(q * x) + "
        "minimum * sum(x). sum(x) is the same for every row of the weight.",
    ),
    (
        "Day 33. Bits 4 to 7 of an int32, all others 0, are read as a float32. Which number is it "
        "for q = 3?",
        "The exponent bits are 0, so it is subnormal: 3 * 2 ** 4 * 2 ** -149 = 3 * 2 ** -145. "
        "Nothing is converted; a factor on x brings it to the right size.",
    ),
    (
        "Day 33. A kernel reads a third of the bytes. When is it not three times as fast?",
        "When something else limits it: the instructions that unpack, the latency of the first "
        "loads, or the start of the kernel where a weight is small.",
    ),
    (
        "Phase 3. Which kinds of step gain from four bits, and which do not?",
        "A decode step of one or a few rows reads each weight for few operations: bytes limit it. "
        "A prefill uses each weight for many rows: arithmetic limits it, and unpacking is extra.",
    ),
    (
        "Phase 3. Equal tokens were the test up to here. What do you compare once weights are "
        "rounded?",
        "The same numbers must give the same tokens: the kernel is compared with the dequantised "
        "product. What the rounding costs is measured on a text: perplexity beside float32.",
    ),
)
