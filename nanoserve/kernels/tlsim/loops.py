"""Loops whose bounds differ by program: run the maximum trip count; mask finished programs."""

import ast
from collections.abc import Iterator
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.values import Operand, Value, as_value, paired, spread


class Range:
    """tl.range, and range in a kernel. A bound is a number, or a value that differs by program."""

    def __init__(self, start: Operand, stop: Operand | None = None, step: int = 1, **_) -> None:
        start, stop = (0, start) if stop is None else (start, stop)
        start, stop = paired(as_value(start), as_value(stop))
        self.start, self.step = paired(start, as_value(step))
        self.stop = stop
        if any(x.shape or x.dtype.is_floating_point for x in (start, stop, self.step)):
            raise fault("the bounds of a loop must be integers, not blocks or fractions")
        if not bool((self.step.data > 0).all()):
            raise fault("the step of a loop must be above 0")


class Loop:
    """A running loop: the programs still in it, and the values that iterations pass on.

    A finished program keeps its `carried` values. A carried value never changes its dtype or shape,
    because a compiled loop has one register for each.
    """

    def __init__(self, bounds: Any, names: tuple[str, ...], before: dict[str, Any]) -> None:
        if not isinstance(bounds, Range):
            raise fault("a kernel loops only over range, tl.range or tl.static_range")
        self.bounds, self.names = bounds, names
        self.carried = {name: as_value(before[name]) for name in names if name in before}
        self.active: torch.Tensor | None = None  # [x, y, z]; None: all programs

    def __iter__(self) -> Iterator[Value]:
        start, stop, step = self.bounds.start, self.bounds.stop, self.bounds.step
        wave, distance = current(), stop.data - start.data
        turns = torch.div(distance + step.data - 1, step.data, rounding_mode="floor").clamp(min=0)
        if (outer := wave.active) is not None:
            turns = torch.where(outer, turns, 0)
        shortest = int(turns.min())
        try:
            for turn in range(int(turns.max())):
                wave.active = self.active = None if turn < shortest else turns > turn
                yield start + step * turn
        finally:
            wave.active = outer

    def carry(self, now: dict[str, Any]) -> tuple[Any, ...]:
        """The names' values after an iteration; finished programs keep their values."""
        for name, old in self.carried.items():
            self.carried[name] = now[name] = self._carry(name, old, as_value(now[name]))
        return tuple(now.get(name) for name in self.names)

    def _carry(self, name: str, old: Value, new: Value) -> Value:
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            was, became = (f"{list(v.shape)} {v.dtype}" for v in (old, new))
            raise fault(
                f"{name} enters the loop as {was} and ends an iteration as {became}: a variable "
                "of a loop must keep its shape and dtype"
            )
        if self.active is None:
            return new
        ramp, rank = old.ramp and new.ramp, len(new.shape)
        a, b = (spread(v.data if ramp else v.lanes, rank) for v in (new, old))
        data = torch.where(spread(self.active, rank), a, b)
        return Value(data, new.shape, new.buffer, ramp)


def named(x: Any) -> Any:
    """The value that an assignment binds: a number becomes a tensor, unless it is tl.constexpr."""
    return as_value(x) if isinstance(x, int | float) else x


class Rewrite(ast.NodeTransformer):
    """Rewrite loops to carry the names bound before them. `for i in range(n): body` becomes

    loop = Loop(range(n), ("a", "b"), locals())
    for i in loop:
        body
        a, b = loop.carry(locals())
    i = c = None; del i, c  # names bound only in the body end with the loop
    """

    def __init__(self) -> None:
        self.bound: set[str] = set()

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self.bound.add(node.arg)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name("__named", ast.Load()), [node.value], [])
        return node

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        if ast.unparse(node.iter).partition("(")[0].endswith("static_range"):
            return [self.generic_visit(node)]  # unrolled: i is a plain number
        before, body = self.bound.copy(), ast.Module(node.body)
        stored = {
            n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        carried, ended = (
            sorted(stored & before),
            sorted(stored - before | {ast.unparse(node.target)}),
        )
        self.generic_visit(node)
        self.bound = before
        loop = f"__loop_{node.lineno}"
        enter = f"{loop} = __Loop({ast.unparse(node.iter)}, {tuple(carried)}, locals())"
        node.iter = ast.Name(loop, ast.Load())
        if carried:
            node.body += _at(node, f"{', '.join(carried)}, = {loop}.carry(locals())")
        leave = f"{' = '.join(ended)} = None; del {', '.join(ended)}"
        return [*_at(node, enter), node, *_at(node, leave)]


def _at(node: ast.stmt, source: str) -> list[ast.stmt]:
    """Statements with the line number of node."""
    return [ast.increment_lineno(new, node.lineno - 1) for new in ast.parse(source).body]
