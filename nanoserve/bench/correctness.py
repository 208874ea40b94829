"""The error of a failed correctness check: a variant whose result is wrong is never timed."""


class WrongAnswer(RuntimeError):
    """A benchmarked variant gave another result than its reference, so no time is measured."""
