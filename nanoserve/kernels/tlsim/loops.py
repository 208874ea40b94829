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


class Region:
    """Code that some programs run, or that runs several times. A program that does not run it keeps
    its values. A name that was bound before keeps its type; another name ends with the region."""

    where = "enters the loop as {} and ends an iteration as {}"

    def __init__(self, head: Any, before: dict[str, Any]) -> None:
        self.head, self.values = head, dict(before)

    def carry(self, names: list[str], now: dict[str, Any]) -> list[Any]:
        """The names' values after one run of the region's code."""
        return [self.kept(name, self.values.get(name), now.get(name)) for name in names]

    def kept(self, name: str, old: Any, new: Any) -> Any:
        """The new value in the programs that run, and the old one in the others."""
        if not isinstance(old, Value) or not isinstance(new, Value):
            return new
        if (old.dtype, old.shape) != (new.dtype, new.shape):  # compiled code has one register
            types = self.where.format(*(f"{list(x.shape)} {x.dtype}" for x in (old, new)))
            raise fault(f"{name} {types}: it must keep its shape and dtype")
        if (active := current().active) is not None:
            rows = old.width == new.width  # rows stay rows
            data = aligned(active, *(x.data if rows else x.lanes for x in (new, old)))
            new = Value(torch.where(*data), new.buffer, new.width if rows else 1)
        self.values[name] = new
        return new

    def off(self, turn: Any) -> Iterator[Any]:
        """One turn with all programs off: it computes, and neither loads nor stores."""
        wave, outer = current(), current().active
        wave.active = torch.zeros(1, 1, 1, dtype=torch.bool, device=wave.ids[0].device)
        yield turn
        wave.active = outer

    def keeps(self, name: str) -> bool:
        """Whether a name is still bound after the region."""
        return name in self.values


class Loop(Region):
    """A loop over a Range. With checks, a loop without a turn runs once, with all programs off."""

    def __iter__(self) -> Iterator[Value]:
        if not isinstance(self.head, Range):
            raise fault("a kernel loops only over range, tl.range or tl.static_range")
        start, stop, step = self.head.start, self.head.stop, self.head.step
        wave, outer = current(), current().active
        turns = -torch.div(start.data - stop.data, step.data, rounding_mode="floor")  # rounded up
        turns = turns if outer is None else torch.where(outer, turns, 0)
        longest = int(turns.max())
        alike = turns.numel() == 1 or bool((turns == longest).all())
        for turn in range(max(longest, wave.options.checks)):
            wave.active = outer if alike and longest > 0 else turns > turn
            yield start + step * turn
        wave.active = outer
