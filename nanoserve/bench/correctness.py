"""The error of a failed correctness check: a variant whose result is wrong is never timed."""


class WrongAnswer(RuntimeError):
    """A variant's result differs from its reference, so the benchmark measures no time."""
