"""Day 32: two numbers in a byte, and the scale and minimum of a group."""

import torch

from nanoserve.course.compare import exact
from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.quant import GROUP, pack_nibbles, round_to_nearest

# pack_nibbles


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)


def _pack_cases() -> list[Case]:
    def case(what, kind, numbers):
        return Case(what, (numbers,), kind=kind)

    return [
        case("one byte: 3 and 10", "byte", torch.tensor([3, 10], dtype=torch.uint8)),
        case("one byte: 15 and 15", "byte", torch.tensor([15, 15], dtype=torch.uint8)),
        case("one byte: 9 and 0", "byte", torch.tensor([9, 0], dtype=torch.uint8)),
        case("a row of 6", "pairs", torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.uint8)),
        case("3 rows of 10", "pairs", _numbers(3, 10)),
        case("2 rows of 3 groups of 32", "axes", _numbers(2, 3, 32, seed=1)),
        case("no row", "axes", _numbers(0, 8)),
    ]


@wrong(
    "The first number of each pair is in the high bits. It belongs in the low bits: "
    "low | high << 4, with the first number as low.",
    hints="byte",
)
def _first_high(numbers):
    return numbers[..., 0::2] << 4 | numbers[..., 1::2]


@wrong(
    "Numbers j and j + n / 2 share a byte, as the 16 bytes of a GGUF block have them. Here "
    "neighbours share a byte: numbers 2j and 2j + 1.",
    hints="pairs",
)
def _halves(numbers):
    low, high = numbers.chunk(2, dim=-1)
    return low | high << 4


@wrong(
    "The second number is not moved: both numbers are in the low four bits, on top of each other.",
    hints="byte",
)
def _no_shift(numbers):
    return numbers[..., 0::2] | numbers[..., 1::2]


@wrong("The second number moves by 8 bits, out of the byte. Four bits are left for it: move by 4.")
def _shift_by_eight(numbers):
    return numbers[..., 0::2] | numbers[..., 1::2] * 0


@wrong(
    "The second number is multiplied by 10, not by 16. Moving by four bits is a product with "
    "2 ** 4.",
    hints="byte",
)
def _times_ten(numbers):
    return numbers[..., 0::2] + numbers[..., 1::2] * 10


@wrong(
    "The second number is multiplied by 15, the largest number, not by 16, the count of numbers.",
    hints="byte",
)
def _times_fifteen(numbers):
    return numbers[..., 0::2] + numbers[..., 1::2] * 15


@wrong("The bytes are int64, which is eight bytes for each: keep uint8.", hints="byte")
def _int64(numbers):
    return pack_nibbles(numbers).long()


@wrong(
    "The pairs are taken along the first axis, so that two rows share a byte. Take them along the "
    "last axis: numbers[..., 0::2].",
    hints="axes",
)
def _first_axis(numbers):
    return numbers[0::2] | numbers[1::2] << 4


@wrong("All axes are flattened into one. Only the last axis becomes half as long.", hints="axes")
def _flattened(numbers):
    return pack_nibbles(numbers.flatten())


@wrong(
    "The result has as many bytes as numbers: each pair is stored twice. Take every second place.",
    hints="pairs",
)
def _not_shorter(numbers):
    return pack_nibbles(numbers).repeat_interleave(2, dim=-1)


PACK_NIBBLES = Exercise(
    "pack_nibbles",
    _pack_cases,
    hints={
        "byte": (
            "A byte has eight bits. Which four has the first number, and which the second?",
            "The first number is in the low four bits, the second in the high four: multiply it by "
            "16, or move it by four bits (`<< 4`).",
            "first | second << 4",
        ),
        "pairs": (
            "Which numbers share byte j?",
            "Neighbours: numbers 2j and 2j + 1. A slice with step 2 takes every second number.",
            "numbers[..., 0::2] | numbers[..., 1::2] << 4",
        ),
        "axes": (
            "Which axis becomes half as long?",
            "The last one, whatever axes come before: an index that begins with `...` keeps them.",
            "numbers[..., 0::2] | numbers[..., 1::2] << 4",
        ),
    },
    target="nanoserve.quant:pack_nibbles",
    wrong=(
        _first_high, _halves, _no_shift, _shift_by_eight, _times_ten, _times_fifteen, _int64,
        _first_axis, _flattened, _not_shorter,
    ),
)  # fmt: skip


# round_to_nearest


def _weight(rows: int, groups: int, low: float, high: float, seed: int) -> torch.Tensor:
    """A weight whose groups span low to high (times 1 to 2), with no number halfway between two."""
    generator = torch.Generator().manual_seed(seed)
    size = 1 + torch.rand(rows, groups, 1, generator=generator)
    minimum, step = size * low, size * (high - low) / 15
    numbers = torch.randint(0, 16, (rows, groups, GROUP), generator=generator).float()
    numbers[..., 3], numbers[..., 21] = 0, 15  # each group has both ends
    offsets = 0.6 * torch.rand(rows, groups, GROUP, generator=generator) - 0.3
    offsets[..., 3] = offsets[..., 21] = 0
    return (minimum + step * (numbers + offsets)).flatten(1)


def _round_cases() -> list[Case]:
    def case(what, kind, weight):
        return Case(what, (weight,), kind=kind, compare=_same)

    ramp = torch.arange(32.0).div(2)[None] - 0.125 * (torch.arange(32) % 2)
    constant = _weight(2, 2, -1.0, 1.0, 9)
    constant[1, 32:] = 0.375
    zero = _weight(3, 1, -0.5, 1.5, 10)
    zero[2] = 0
    return [
        case("one group, from 0 to 15.5", "number", ramp),
        case("one group, from -1 to 2", "minimum", _weight(1, 1, -1.0, 2.0, 1)),
        case("one group of positive numbers", "minimum", _weight(1, 1, 4.0, 5.0, 2)),
        case("one group of negative numbers", "minimum", _weight(1, 1, -5.0, -3.0, 3)),
        case("2 rows of 3 groups", "groups", _weight(2, 3, -0.25, 0.5, 4)),
        case("5 rows of 2 groups", "groups", _weight(5, 2, -0.01, 0.02, 5)),
        case("2 narrow groups, minimums rounded up", "ends", _weight(1, 2, 97.0, 97.5, 2)),
        case("2 narrow groups, minimums rounded down", "ends", _weight(1, 2, 97.0, 97.5, 1)),
        case("a group of equal numbers", "equal", constant),
        case("a group of zeros", "equal", zero),
    ]


def _same(got, expected):
    """Scales and minimums alike; numbers alike where the scale is not 0, else any of 0 to 15."""
    if not isinstance(got, tuple | list) or len(got) != 3:
        return "expected three tensors: numbers, scales, minimums"
    if trouble := exact(list(got[1:]), list(expected[1:])):
        return f"scales and minimums: {trouble}"
    numbers, (theirs, scales, _) = got[0], expected
    if not isinstance(numbers, torch.Tensor):
        return exact(numbers, theirs)
    if (numbers.shape, numbers.dtype) != (theirs.shape, theirs.dtype) or int(numbers.max()) > 15:
        return exact(numbers, theirs)
    used = (scales != 0).repeat_interleave(GROUP, dim=1)
    if torch.equal(numbers[used], theirs[used]):
        return None
    return f"numbers: {exact(torch.where(used, numbers, theirs), theirs)}"


def _groups(weight):
    return weight.unflatten(1, (-1, GROUP))


def _rounded(weight, scales, minimums, to_number=torch.round):
    """The numbers for these scales and minimums [out, groups]."""
    step = scales.float().clamp_min(1e-38)[..., None]
    numbers = to_number((_groups(weight) - minimums.float()[..., None]) / step)
    return numbers.clamp(0, 15).to(torch.uint8).flatten(1), scales, minimums


def _ends(weight):
    return _groups(weight).aminmax(dim=-1)


@wrong(
    "The span is divided by 16. There are 16 numbers but 15 steps between them: number 15 must be "
    "the maximum.",
    hints="number",
)
def _sixteen_steps(weight):
    low, high = _ends(weight)
    return _rounded(weight, ((high - low) / 16).bfloat16(), low.bfloat16())


@wrong(
    "The numbers are cut off, not rounded: 2.9 becomes 2. The nearest number is 3.",
    hints="number",
)
def _truncated(weight):
    low, high = _ends(weight)
    return _rounded(weight, ((high - low) / 15).bfloat16(), low.bfloat16(), torch.floor)


@wrong(
    "The group has no minimum here: the largest magnitude is number 15, and 0 is number 0, so "
    "that all negative numbers become 0. Subtract the minimum first.",
    hints="minimum",
)
def _no_minimum(weight):
    top = _groups(weight).abs().amax(-1)
    return _rounded(weight, (top / 15).bfloat16(), torch.zeros_like(top).bfloat16())


@wrong(
    "The scale is the maximum / 15. It is the span / 15: the maximum minus the minimum.",
    hints="minimum",
)
def _maximum_alone(weight):
    low, high = _ends(weight)
    return _rounded(weight, (high / 15).bfloat16(), low.bfloat16())


@wrong(
    "One scale and one minimum serve the whole row, so that a single large number makes all its "
    "steps coarse. Each group of 32 has its own.",
    hints="groups",
)
def _one_for_a_row(weight):
    low, high = weight.aminmax(dim=1, keepdim=True)
    groups = weight.shape[1] // GROUP
    scales = ((high - low) / 15).expand(-1, groups).bfloat16()
    return _rounded(weight, scales, low.expand(-1, groups).bfloat16())


@wrong(
    "The groups run down the columns. A group is 32 neighbours of a row: weight.unflatten(1, "
    "(-1, 32)).",
    hints="groups",
)
def _strided_groups(weight):
    groups = weight.unflatten(1, (GROUP, -1)).transpose(1, 2)
    low, high = groups.aminmax(dim=-1)
    return _rounded(weight, ((high - low) / 15).bfloat16(), low.bfloat16())


@wrong("Scale and minimum are float32, which doubles their bytes: round both to bfloat16.")
def _float32_scales(weight):
    numbers, scales, minimums = round_to_nearest(weight)
    return numbers, scales.float(), minimums.float()


@wrong("Scales and minimums have one axis too many: their shape is [out, groups].", hints="groups")
def _kept_axis(weight):
    numbers, scales, minimums = round_to_nearest(weight)
    return numbers, scales[..., None], minimums[..., None]


@wrong("The numbers are still in groups: flatten them to [out, in].", hints="groups")
def _numbers_in_groups(weight):
    numbers, scales, minimums = round_to_nearest(weight)
    return _groups(numbers), scales, minimums


@wrong(
    "A group of equal numbers has scale 0, and 0 / 0 is NaN, which becomes any number. Divide by "
    "a tiny number instead, so that the quotient can be limited to 0 to 15.",
    hints="equal",
)
def _raises_on_zero(weight):
    numbers, scales, minimums = round_to_nearest(weight)
    if (scales == 0).any():
        raise ZeroDivisionError("a scale is 0")
    return numbers, scales, minimums


@wrong(
    "A group of equal numbers gets scale 1. Then its number may be above 0, and a value comes back "
    "larger than it was: the scale of such a group is 0.",
    hints="equal",
)
def _scale_one(weight):
    numbers, scales, minimums = round_to_nearest(weight)
    return numbers, torch.where(scales == 0, torch.ones_like(scales), scales), minimums


@wrong(
    "The numbers are not limited to 0 to 15. A minimum is rounded to bfloat16, so a weight can lie "
    "below it, or more than 15 steps above.",
    hints="ends",
)
def _no_limit(weight):
    low, high = _ends(weight)
    scales, minimums = ((high - low) / 15).bfloat16(), low.bfloat16()
    steps = (_groups(weight) - minimums[..., None]) / scales.clamp_min(1e-30)[..., None]
    return steps.round().int().to(torch.uint8).flatten(1), scales, minimums


@wrong("Number 0 is the maximum here, and the steps go down. Count up from the minimum.")
def _from_the_top(weight):
    numbers, scales, minimums = round_to_nearest(-weight)
    return numbers, scales, (-minimums.float()).bfloat16()


@wrong("The numbers are float32: convert them to uint8.", hints="number")
def _float_numbers(weight):
    numbers, scales, minimums = round_to_nearest(weight)
    return numbers.float(), scales, minimums


ROUND_TO_NEAREST = Exercise(
    "round_to_nearest",
    _round_cases,
    hints={
        "number": (
            "Which number has the minimum of a group, and which the maximum?",
            "0 and 15. So a step is a fifteenth of the span. The nearest number of w is "
            "(w - minimum) / scale, rounded.",
            "((groups - minimum) / scale).round().clamp(0, 15).to(torch.uint8)",
        ),
        "minimum": (
            "Where do the numbers of a group begin?",
            "At its minimum, which is number 0. Subtract it before you divide by the scale, and "
            "divide the whole span, maximum - minimum, by 15.",
            "scale = (groups.amax(-1) - groups.amin(-1)) / 15",
        ),
        "groups": (
            "Which numbers share a scale?",
            "32 neighbours of a row. Give the row two axes, groups and 32; reduce the last one.",
            "groups = weight.unflatten(1, (-1, 32)); lowest = groups.amin(-1)",
        ),
        "ends": (
            "Which numbers does a group get whose minimum was rounded to bfloat16?",
            "bfloat16 has 8 significant bits. A minimum that is rounded up puts the smallest "
            "numbers below 0; one that is rounded down puts the largest above 15.",
            "Limit the numbers to 0 to 15 before you convert them: `.clamp(0, 15)`.",
        ),
        "equal": (
            "What is the scale of a group in which all numbers are equal?",
            "0. A division by 0 gives NaN or infinity, and NaN has no uint8: divide by a tiny "
            "number instead. Each value is then 0 * number + minimum.",
            "divisor = scales.float().clamp_min(1e-38)",
        ),
    },
    target="nanoserve.quant:round_to_nearest",
    wrong=(
        _sixteen_steps, _truncated, _no_minimum, _maximum_alone, _one_for_a_row, _strided_groups,
        _float32_scales, _kept_axis, _numbers_in_groups, _raises_on_zero, _scale_one, _no_limit,
        _from_the_top, _float_numbers,
    ),
)  # fmt: skip

EXERCISES = (PACK_NIBBLES, ROUND_TO_NEAREST)
