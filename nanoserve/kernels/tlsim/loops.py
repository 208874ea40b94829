"""Loops whose bounds differ by program: run the largest number of turns; mask finished programs."""

from collections.abc import Iterator
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.rules import same_type
from nanoserve.kernels.tlsim.values import Operand, Value, aligned, as_value, paired

CHANGES = (
    "{name} enters the loop as {was} and ends an iteration as {became}: a variable of a loop must "
    "keep its shape and dtype"
)


class Range:
    """tl.range, and range in a kernel. A bound is a number, or a value that differs by program."""

    def __init__(self, start: Operand, stop: Operand | None = None, step: int = 1, **_) -> None:
        start, stop = (0, start) if stop is None else (start, stop)
        backwards = isinstance(step, int) and step < 0  # Triton accepts this for a constant
        start, stop = paired(as_value(start), as_value(stop))
        self.start, self.step = paired(start, as_value(step))
        self.stop = stop
        if any(x.shape or x.dtype.is_floating_point for x in (start, stop, self.step)):
            raise fault("the bounds of a loop must be integers, not blocks or fractions")
        if not backwards and not bool((self.step.data > 0).all()):
            raise fault("the step of a loop must be above 0, or a negative constant")


class Loop:
    """A running loop: the programs still in it, and the values that iterations pass on.

    A finished program keeps the values that it had. Names that are bound only in the loop end with
    it. With checks on, a loop without a turn runs once with all programs off.
    """

    def __init__(self, bounds: Any, before: dict[str, Any]) -> None:
        if not isinstance(bounds, Range):
            raise fault("a kernel loops only over range, tl.range or tl.static_range")
        self.bounds, self.values = bounds, dict(before)

    def __iter__(self) -> Iterator[Value]:
        start, stop, step = (getattr(self.bounds, name).data for name in ("start", "stop", "step"))
        wave, outer = current(), current().active
        turns = -torch.div(start - stop, step, rounding_mode="floor")  # the distance, rounded up
        if outer is not None:
            turns = torch.where(outer, turns, 0)
        longest = int(turns.max())
        alike = turns.numel() == 1 or bool((turns == longest).all())
        try:
            for turn in range(max(longest, int(wave.options.checks))):
                wave.active = outer if alike and longest > 0 else turns > turn
                yield self.bounds.start + self.bounds.step * turn
        finally:
            wave.active = outer

    def carry(self, names: tuple[str, ...], now: dict[str, Any]) -> list[Any]:
        """The names' values after an iteration; finished programs keep their values."""
        for name in names:
            if self.keeps(name) and isinstance(self.values[name], Value | int | float):
                old, new = as_value(self.values[name]), as_value(now[name])
                same_type(name, old, new, CHANGES)
                self.values[name] = now[name] = kept(old, new)
        return [now.get(name) for name in names]

    def keeps(self, name: str) -> bool:
        """Whether a name is still bound after the loop."""
        return name in self.values


def kept(old: Value, new: Value) -> Value:
    """The new value in the programs that run, the old one in the others."""
    if current().active is None:
        return new
    row = old.width == new.width  # rows stay rows
    new_data, old_data = (x.data if row else x.lanes for x in (new, old))
    active, new_data, old_data = aligned(current().active, new_data, old_data)
    return Value(torch.where(active, new_data, old_data), new.buffer, new.width if row else 1)
