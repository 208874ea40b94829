"""Day 0: right answers in other styles than the package's."""

import math


def floor_of_negative(count, bits):
    return -(-count * bits // 8)


def ceiling(count, bits):
    return math.ceil(count * bits / 8)


def quotient_and_rest(count: int, bits: int) -> int:
    whole, rest = divmod(count * bits, 8)
    if rest:
        whole += 1
    return whole


def byte_by_byte(count, bits):
    left, taken = count * bits, 0
    while left > 0:
        left -= 8
        taken += 1
    return taken


RIGHT = {"bytes_for": (floor_of_negative, ceiling, quotient_and_rest, byte_by_byte)}
