"""Loops whose bounds differ by program: all run to the longest, and the finished stand still."""

import ast
import builtins
from collections.abc import Iterator
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.values import Operand, Value, as_value, spread


class Range:
    """tl.range, and range in a kernel: bounds are numbers, or values that differ by program."""

    def __init__(self, start: Operand, stop: Operand | None = None, step: int = 1, **_) -> None:
        start, stop = (0, start) if stop is None else (start, stop)
        self.start, self.stop, self.step = as_value(start), as_value(stop), as_value(step)
        if self.start.shape or self.stop.shape or self.step.shape:
            raise fault("the bounds of a loop are numbers, not blocks")
        if not bool((self.step.data > 0).all()):
            raise fault("the step of a loop must be above 0")


class Loop:
    """One loop as it runs: which programs are still in it, and what they carry round.

    `names` are assigned in the body; those that are bound `before` the loop are carried: a program
    that has finished keeps what it had, and what is carried never changes its type, since a
    compiled loop has one register for it.
    """

    def __init__(self, bounds: Any, names: tuple[str, ...], before: dict[str, Any]) -> None:
        if not isinstance(bounds, Range | builtins.range):
            raise fault("a kernel loops over range, tl.range or tl.static_range alone")
        self.bounds, self.names = bounds, names
        self.carried = {name: before[name] for name in names if name in before}
        self.active: torch.Tensor | None = None  # [x, y, z]; None is all

    def __iter__(self) -> Iterator[Value | int]:
        if isinstance(self.bounds, builtins.range):  # tl.static_range: unrolled, so plain numbers
            yield from self.bounds
            return
        start, stop, step = self.bounds.start, self.bounds.stop, self.bounds.step
        wave, distance = current(), stop.data - start.data
        turns = torch.div(distance + step.data - 1, step.data, rounding_mode="floor").clamp(min=0)
        outer, shortest = wave.active, int(turns.min())
        try:
            for turn in builtins.range(int(turns.max())):
                self.active = None if turn < shortest else turns > turn
                both = [x for x in (outer, self.active) if x is not None]
                wave.active = both[0] & both[-1] if both else None
                yield start + step * turn
        finally:
            wave.active = outer

    def carry(self, now: dict[str, Any]) -> tuple[Any, ...]:
        """The names' values at the end of a turn; finished programs get their old ones back."""
        if isinstance(self.bounds, Range):
            for name, old in self.carried.items():
                self.carried[name] = now[name] = self._carry(name, as_value(old), now[name])
        return tuple(now.get(name) for name in self.names)

    def _carry(self, name: str, old: Value, new: Operand) -> Value:
        new = as_value(new)
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            was, became = (f"{list(v.shape)} {v.dtype}" for v in (old, new))
            raise fault(
                f"{name} goes into the loop as {was} and comes round as {became}: what a loop "
                "carries keeps its shape and type"
            )
        if self.active is None:
            return new
        ramp, rank = old.ramp and new.ramp, len(new.shape)
        a, b = (spread(v.data if ramp else v.lanes, rank) for v in (new, old))
        data = torch.where(spread(self.active, rank), a, b)
        return Value(data, new.shape, new.buffer, ramp)


class Rewrite(ast.NodeTransformer):
    """Make a kernel's loops carry: `for i in range(n): body` becomes

    loop = Loop(range(n), ("names", "of", "body"), locals())
    for i in loop:
        body
        names, of, body = loop.carry(locals())
    """

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        inside = [n for statement in node.body for n in ast.walk(statement)]
        stored = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names = tuple(sorted(stored - {ast.unparse(node.target)}))
        self.generic_visit(node)
        loop = f"__loop_{node.lineno}"
        [enter] = ast.parse(f"{loop} = __Loop(None, {names!r}, locals())").body
        enter.value.args[0] = node.iter
        node.iter = ast.Name(loop, ast.Load())
        carry = ast.parse(f"({', '.join(names)},) = {loop}.carry(locals())").body if names else []
        node.body += carry
        for new in (enter, node.iter, *carry):
            for child in ast.walk(new):
                ast.copy_location(child, node)
        return [enter, node]
