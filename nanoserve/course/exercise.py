"""Exercises: their cases, their hints and common wrong answers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from nanoserve.course.compare import Compare, close, exact

__all__ = [
    "Case",
    "CourseError",
    "Exercise",
    "Raises",
    "Wrong",
    "close",
    "exact",
    "raises",
    "wrong",
]


class CourseError(ValueError):
    """An invalid request to the workbench. The message is one sentence."""


class _AsSolution:
    """The default of Case.expected: the solution's outcome on the same arguments."""


AS_SOLUTION = _AsSolution()


@dataclass(frozen=True)
class Raises:
    """Expected: an exception of this type, with `names` somewhere in its message."""

    error: type[BaseException]
    names: str = ""


def raises(error: type[BaseException], names: str = "") -> Raises:
    return Raises(error, names)


@dataclass(frozen=True)
class Case:
    """One row of a check: the answer is called with args and kwargs, and the result is compared.

    `what` names the case for the learner; `kind` chooses the hints. `expected` is a value, a
    `raises(...)`, or a function of the solution; the default is the solution's outcome here.
    `call(answer, *args, **kwargs)` replaces the plain call: for classes, or to collect a generator.
    `compare(got, expected)` returns None or True if they agree, else a sentence (or False).
    Each run gets copies of the inputs. An answer that changes its inputs fails the case unless
    `mutates` is set. The row shows the inputs, or the text `inputs` instead ("" shows nothing).
    """

    what: str
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "value"
    expected: Any = AS_SOLUTION
    compare: Compare = exact
    call: Callable[..., Any] | None = None
    mutates: bool = False
    inputs: str | None = None


@dataclass(frozen=True)
class Wrong:
    """A plausible wrong answer, and a sentence that explains the mistake to its author.

    `hints` is a kind of `Exercise.hints`, or three hints for this mistake. None means the kind of
    the case in which the mistake is recognised.
    """

    fn: Callable
    why: str
    hints: str | tuple[str, str, str] | None = None


def wrong(why: str, hints: str | tuple[str, str, str] | None = None) -> Callable[[Callable], Wrong]:
    """Decorator: `@wrong("This is the table for interleaved pairs: ...")` over the wrong answer."""
    return lambda fn: Wrong(fn, why, hints)


@dataclass(frozen=True)
class Exercise:
    """One function or class that the learner writes on a day, called `name`.

    `cases()` makes new but equal cases on each call (random values need a seed). `hints` maps each
    kind of case to three hints. `target` is the part of the engine that the answer replaces: a
    function ("nanoserve.weights:unpermute"), a class, or a method; for the method
    "nanoserve.cache:NaiveKVCache.append" the cases get the class. Without `solution`, the target is
    the solution. `limit` is the time limit of a case in seconds. `was` holds former names of the
    exercise: answers and progress saved under them still count. A day is done without its
    `optional` exercises. `runs_in` makes the context in which the engine calls the target, where a
    later day has replaced it.
    """

    name: str
    cases: Callable[[], list[Case]]
    hints: Mapping[str, tuple[str, str, str]]
    target: str | None = None
    solution: Callable | None = None
    wrong: tuple[Wrong, ...] = ()
    limit: float = 10.0
    was: tuple[str, ...] = ()
    optional: bool = False
    runs_in: Callable[[], AbstractContextManager] = nullcontext

    def __post_init__(self) -> None:
        short = [kind for kind, rungs in self.hints.items() if len(rungs) != 3]
        if short or not self.hints:
            raise CourseError(f"the exercise {self.name!r} needs three hints for each kind {short}")
        for hints in {mistake.hints for mistake in self.wrong} - {None}:
            if hints not in self.hints if isinstance(hints, str) else len(hints) != 3:
                raise CourseError(f"the exercise {self.name!r} has no hints {hints!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The exercise's name, then its former names."""
        return (self.name, *self.was)

    def ladder(self, kind: str, mistake: Wrong | None = None) -> tuple[str, str, str]:
        """The three hints for a case of this kind; a recognised mistake may choose others."""
        chosen = mistake.hints if mistake and mistake.hints else kind
        return self.hints[chosen] if isinstance(chosen, str) else chosen

    def reference(self) -> Callable:
        """The right answer: `solution`, else the package's own. For a method, its class."""
        if self.solution is not None:
            return self.as_subject(self.solution)
        if self.target is None:
            raise CourseError(f"the exercise {self.name!r} has neither a target nor a solution")
        holder, _, found = locate(self.target)
        return holder if isinstance(holder, type) else found

    def as_subject(self, answer: Callable) -> Callable:
        """The object for the cases: the answer, or for a method a subclass that has it."""
        if self.target is None or isinstance(answer, type):
            return answer
        holder, attribute, _ = locate(self.target)
        if not isinstance(holder, type):
            return answer
        return type(holder.__name__, (holder,), {attribute: answer, "__module__": "__main__"})


def locate(target: str) -> tuple[Any, str, Any]:
    """(holder, attribute, object) of "module:name" or "module:Class.method"."""
    module_name, _, path = target.partition(":")
    try:
        holder: Any = importlib.import_module(module_name)
        *outer, attribute = path.split(".")
        for name in outer:
            holder = getattr(holder, name)
        return holder, attribute, getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise CourseError(f"{target} does not exist: {error}") from error
