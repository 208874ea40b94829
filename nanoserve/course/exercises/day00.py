"""Day 0: how an exercise works, on the smallest one there is."""

from typing import Any

from nanoserve.course.exercise import Case, Exercise, exact, wrong

IN_PLACE = (
    "Which line of your function writes into an argument? The caller still needs it unchanged.",
    "`x += y`, `x[...] = y` and methods with an underscore, such as `x.mul_(y)`, write into x.",
    "Write `x = x * y` instead, which makes a new tensor, or begin with `x = x.clone()`.",
)


def whole(got: Any, expected: Any) -> str | None:
    """Exact, and an int: for what is counted."""
    if isinstance(got, float):
        return "it gives a float. The result is a count: return an int (use `//`, not `/`)"
    return exact(got, expected)


def bytes_for(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits each take when they are packed side by side."""
    return (count * bits + 7) // 8


@wrong("These are bits, not bytes: 8 bits make a byte.")
def _bits(count, bits):
    return count * bits


@wrong(
    "This rounds down, and the last bits get no byte. A byte that is used in part counts as one."
)
def _floor(count, bits):
    return count * bits // 8


@wrong("This rounds to the nearest byte. A byte that is used in part counts as one: round up.")
def _nearest(count, bits):
    return round(count * bits / 8)


@wrong("Each number gets bytes of its own. Packed side by side they share: round once, at the end.")
def _each_rounded(count, bits):
    return count * ((bits + 7) // 8)


@wrong("This is a float. A number of bytes is whole: use // instead of /.")
def _float(count, bits):
    return count * bits / 8


@wrong("One byte too many where the bits fill the last byte exactly.")
def _one_more(count, bits):
    return count * bits // 8 + 1


@wrong("The smallest result is 1 here, but no numbers take 0 bytes.")
def _at_least_one(count, bits):
    return max(1, (count * bits + 7) // 8)


@wrong(
    "Each byte is filled with whole numbers only. The numbers are packed side by side: a number "
    "may begin in one byte and end in the next.",
    hints="rounding",
)
def _no_number_split(count, bits):
    return -(-count // max(1, 8 // bits))


@wrong("`count // 8` comes first and rounds. Multiply first: count * bits is the number of bits.")
def _divided_first(count, bits):
    return count // 8 * bits


def _cases() -> list[Case]:
    cases = [
        ("32 numbers of 4 bits", (32, 4), "exact"),
        ("5 numbers of 16 bits", (5, 16), "exact"),
        ("3 numbers of 3 bits", (3, 3), "rounding"),
        ("5 numbers of 6 bits", (5, 6), "rounding"),
        ("no numbers at all", (0, 8), "exact"),
    ]
    return [Case(what, args, kind=kind, compare=whole) for what, args, kind in cases]


EXERCISES = (
    Exercise(
        "bytes_for",
        _cases,
        hints={
            "exact": (
                "How many bits are there in all, and how many of them fit into a byte?",
                "count * bits is the number of bits; a byte holds 8.",
                "Divide by 8 with //, which keeps the result whole.",
            ),
            "rounding": (
                "9 bits do not fit into one byte. How many bytes do they need?",
                "// rounds down. What can you add before dividing, so that it rounds up?",
                "return (count * bits + 7) // 8",
            ),
        },
        solution=bytes_for,
        wrong=(
            _bits, _floor, _nearest, _each_rounded, _float, _one_more, _at_least_one,
            _no_number_split, _divided_first,
        ),
    ),
)  # fmt: skip
