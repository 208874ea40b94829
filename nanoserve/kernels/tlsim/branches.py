"""`if`, `while` and `a if c else b`, by Triton's rules for a condition that is known only when the
kernel runs: both branches are compiled, and agree about types."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current
from nanoserve.kernels.tlsim.loops import CHANGES, kept
from nanoserve.kernels.tlsim.rules import same_type
from nanoserve.kernels.tlsim.values import Value, as_value

DIFFERS = "{name} is {was} before the if, and {became} after a branch: both branches must keep it"
UNEQUAL = "{name} is {was} in one branch of the if, and {became} in the other"
TERNARY = "{name} is {was} if the condition is true, else {became}: they must be of one type"


class Off:
    """Run code with all programs off: it computes, and neither loads nor stores."""

    def __enter__(self) -> None:
        self.wave, self.outer = current(), current().active
        self.wave.active = torch.zeros_like(self.wave.programs[:1, :1, :1], dtype=torch.bool)

    def __exit__(self, *_: object) -> None:
        self.wave.active = self.outer


class If:
    """A running `if`. With checks on, the branch that is not taken runs first, with all programs
    off; then the names get their values back, and the other branch runs."""

    def __init__(self, condition: Any, before: dict[str, Any], may_run_both: bool) -> None:
        self.runtime = isinstance(condition, Value) and current().options.checks
        self.taken, self.both = bool(condition), self.runtime and may_run_both
        self.before, self.bound, self.last = dict(before), [], not self.both

    def __iter__(self) -> Iterator[bool]:
        if self.both:
            with Off():
                yield not self.taken
        self.last = True
        yield self.taken

    def carry(self, names: tuple[str, ...], now: dict[str, Any]) -> list[Any]:
        """The names' values after a branch; those from before the `if` after one that is off."""
        self.bound.append({name: now[name] for name in names if name in now})
        for name in names if self.runtime else ():
            old, new = self.before.get(name), now.get(name)
            if isinstance(old, Value) and isinstance(new, Value):
                same_type(name, old, new, DIFFERS)
        if not self.last:
            return [self.before.get(name) for name in names]
        for name in names if self.both else ():
            old, new = (branch.get(name) for branch in self.bound)
            if isinstance(old, Value) and isinstance(new, Value):
                same_type(name, old, new, UNEQUAL)
        return [now.get(name) for name in names]

    def keeps(self, name: str) -> bool:
        """Whether a name is bound after the `if`: before it, or in each branch."""
        return name in self.before or all(name in branch for branch in self.bound)


class While:
    """A running `while`: all programs take the same number of turns."""

    def __init__(self, before: dict[str, Any]) -> None:
        self.values, self.outer, self.turns = dict(before), current().active, 0

    def test(self, condition: Any) -> bool:
        """Whether another turn follows; with checks on, one without effect if there is none."""
        wave, go_on = current(), bool(condition)
        self.turns += 1
        if not go_on and self.turns == 1 and wave.options.checks:
            Off.__enter__(self)
            return True
        wave.active = self.outer
        return go_on and self.turns > 0

    def carry(self, names: tuple[str, ...], now: dict[str, Any]) -> list[Any]:
        """The names' values after an iteration."""
        for name in names:
            if name in self.values and isinstance(self.values[name], Value):
                old, new = self.values[name], as_value(now[name])
                same_type(name, old, new, CHANGES)
                self.values[name] = now[name] = kept(old, new)
        return [now.get(name) for name in names]

    keeps = lambda self, name: name in self.values  # noqa: E731


def select(condition: Any, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """`then() if condition else other()`."""
    taken, skipped = (then, other) if condition else (other, then)
    if isinstance(condition, Value) and current().options.checks:
        with Off():
            off = as_value(skipped())
        same_type("the result", off, as_value(now := taken()), TERNARY)
        return now
    return taken()
