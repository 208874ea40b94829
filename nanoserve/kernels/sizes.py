"""Block sizes. Triton requires powers of two."""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, as triton.next_power_of_2 returns it."""
    return 1 << max(0, n - 1).bit_length()
