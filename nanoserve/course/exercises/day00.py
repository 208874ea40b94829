"""Day 0: how an exercise works, on the smallest one there is."""

from nanoserve.course.exercise import Case, Exercise, wrong


def bytes_for(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits each take when they are packed side by side."""
    return (count * bits + 7) // 8


@wrong("These are bits, not bytes: 8 bits make a byte.")
def _bits(count, bits):
    return count * bits


@wrong("This rounds down, so the last numbers have no room: a byte that is begun is a whole one.")
def _floor(count, bits):
    return count * bits // 8


@wrong("Each number gets bytes of its own. Packed side by side they share: round once, at the end.")
def _each_rounded(count, bits):
    return count * ((bits + 7) // 8)


@wrong("This is a float. A number of bytes is whole: use // instead of /.")
def _float(count, bits):
    return count * bits / 8


@wrong("One byte too many where the bits fill the last byte exactly.")
def _one_more(count, bits):
    return count * bits // 8 + 1


EXERCISES = (
    Exercise(
        "bytes_for",
        lambda: [
            Case("32 numbers of 4 bits", (32, 4), kind="exact"),
            Case("5 numbers of 16 bits", (5, 16), kind="exact"),
            Case("3 numbers of 3 bits", (3, 3), kind="rounding"),
            Case("no numbers at all", (0, 8), kind="exact"),
        ],
        hints={
            "exact": (
                "How many bits are there in all, and how many of them fit into a byte?",
                "count * bits is the number of bits; a byte holds 8.",
                "Divide by 8 with //, which keeps the result whole.",
            ),
            "rounding": (
                "9 bits do not fit into one byte. How many bytes have been begun?",
                "// rounds down. What can you add before dividing, so that it rounds up?",
                "return (count * bits + 7) // 8",
            ),
        },
        solution=bytes_for,
        wrong=(_bits, _floor, _each_rounded, _float, _one_more),
    ),
)
