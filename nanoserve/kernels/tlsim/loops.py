"""Loops whose bounds differ by program: run the largest number of turns; mask finished programs."""

from collections.abc import Iterator
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.values import Value, aligned, as_value, paired


class Range:
    """tl.range, and range in a kernel. A bound is a number, or a value that differs by program."""

    def __init__(self, start: Any, stop: Any = None, step: Any = 1, **_) -> None:
        start, stop = (0, start) if stop is None else (start, stop)
        start, self.stop = paired(start, as_value(stop))
        self.start, self.step = paired(start, as_value(step))
        if any(x.shape or x.dtype.is_floating_point for x in (start, self.stop, self.step)):
            raise fault("the bounds of a loop must be integers, not blocks or fractions")
        backwards = isinstance(step, int) and step < 0  # Triton accepts a constant
        if not backwards and not bool((self.step.data > 0).all()):
            raise fault("the step of a loop must be above 0, or a negative constant")

    def __iter__(self) -> Iterator[Value]:
        """The index in each turn. In a turn, the programs that have finished are not active. With
        checks, a loop without a turn has one, with all programs off."""
        wave, outer = current(), current().active
        distance, step = self.stop.data - self.start.data, self.step.data
        turns = -torch.div(-distance, step, rounding_mode="floor")  # distance / step, rounded up
        turns = turns if outer is None else torch.where(outer, turns, 0)
        longest = int(turns.max())
        alike = turns.numel() == 1 or bool((turns == longest).all())
        for turn in range(max(longest, wave.options.checks)):
            wave.active = outer if alike and longest > 0 else turns > turn
            yield self.start + self.step * turn
        wave.active = outer


def kept(name: str, old: Value, new: Value) -> Value:
    """What a variable holds after code that only some programs run: the new value in the active
    programs, and the old one in the others."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        was, now = (f"{list(x.shape)} {x.dtype}" for x in (old, new))
        rule = "in a loop and in the branches of an if, a variable must keep its shape and dtype"
        raise fault(f"{name} is {was} before and {now} after: {rule}")
    if (active := current().active) is None:
        return new
    width = new.width if old.width == new.width else 1  # rows stay rows
    data = aligned(active, *(x.data if width > 1 else x.lanes for x in (new, old)))
    return Value(torch.where(*data), new.buffer, width)
