"""A learner's answers: saving them, loading them, and running the engine with them."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from nanoserve.course import check as checking
from nanoserve.course.curriculum import Number, find, key, position
from nanoserve.course.exercise import CourseError, Exercise, locate
from nanoserve.course.guard import Outcome, guarded, message_of
from nanoserve.course.source import CannotSave, bare, module_source
from nanoserve.course.store import Progress, work_dir, write_atomically, writing
from nanoserve.generate import single_sequence
from nanoserve.kernels.tlsim.launch import Kernel

ENGINE = 34  # the first day of the engine for many requests
MOVED = {"nanoserve.bench.read": "nanoserve.bench.attention"}  # renamed modules, for old answers


@dataclass
class Answer:
    """A saved answer: the loaded definition, or the reason why it could not be loaded.

    `calls` counts how often the engine called it: the function, the methods of the class, or the
    launches of the kernel.
    """

    day: Number
    exercise: Exercise
    definition: Callable | None
    trouble: str = ""
    calls: int = 0

    def count(self) -> None:
        self.calls += 1

    @property
    def name(self) -> str:
        """The name in a sentence: "unpermute (Day 2)"."""
        return f"{self.exercise.name} ({find(self.day).name})"

    @property
    def told(self) -> str:
        """A sentence that says how often the engine called the answer."""
        name = self.name
        if not self.calls:
            return f"Your {name} was not called."
        times = "once" if self.calls == 1 else f"{self.calls:,} times"
        path = (self.exercise.target or "").partition(":")[2]
        if isinstance(self.definition, type) and "." not in path:
            return f"Methods of your {name} were called {times}."
        launched = self.exercise.target and _is_kernel(locate(self.exercise.target)[2])
        return f"Your {name} was {'launched' if launched else 'called'} {times}."


def keep(day: Number, exercise: Exercise, answer: Callable) -> str:
    """Record that an answer passed, and save its source. Returns a sentence about the result.

    The saved copy is loaded and checked. It counts as saved only if it passes too.
    """
    progress = Progress.load()
    progress.add_passed(day, exercise.name)
    try:
        progress.save()
        trouble = _save(day, exercise, answer)
    except CourseError as error:
        trouble = str(error)
    except Exception as error:  # the answer has passed, even if it cannot be saved
        trouble = f"{type(error).__name__}: {message_of(error)}"
    if trouble:
        told = f"Passed, but not saved: {trouble}."
    elif exercise.target is None:
        told = "Saved."
    else:
        told = "Saved: `with today.mine():` runs the engine with it."
    return f"{progress.trouble} {told}" if progress.trouble else told


def saved_answers(day: Number, exercises: tuple[Exercise, ...]) -> list[Answer]:
    """Load the saved answers of a day that replace a part of the engine."""
    answers = []
    for exercise in exercises:
        path = saved_path(day, exercise)
        if exercise.target is None or path is None:
            continue
        loaded = guarded(lambda p=path, e=exercise: load_answer(p, *e.names), exercise.limit)
        if loaded.kind == "value":
            answers.append(Answer(day, exercise, loaded.value))
        else:
            answers.append(Answer(day, exercise, None, _trouble(loaded)))
    return answers


@contextlib.contextmanager
def installed(answers: list[Answer]) -> Iterator[None]:
    """Replace each target by its answer, in every module of the engine, until the block ends.

    In the block, each answer counts its calls. With answers of days before ENGINE, an LLM runs each
    prompt by itself, as on those days.
    """
    undo: list[tuple[Any, str, Any]] = []

    def put(place: Any, name: str, value: Any) -> None:
        undo.append((place, name, vars(place).get(name, _ABSENT)))
        setattr(place, name, value)

    contexts = contextlib.ExitStack()
    try:
        if any(position(answer.day) < ENGINE for answer in answers if answer.definition):
            contexts.enter_context(single_sequence())
        for answer in answers:
            if answer.definition is None or answer.exercise.target is None:
                continue
            contexts.enter_context(answer.exercise.runs_in())
            holder, attribute, original = locate(answer.exercise.target)
            if isinstance(holder, type):
                member = vars(answer.definition).get(attribute, answer.definition)
                put(holder, attribute, _counting(member, answer.count))
                continue
            kernel, replacement = _is_kernel(original), answer.definition
            if isinstance(replacement, type):
                for name, member in list(vars(replacement).items()):
                    counting = _counting(member, answer.count)
                    if counting is not member:
                        put(replacement, name, counting)
            elif kernel or _is_kernel(replacement):
                for maker in {Kernel, type(replacement), type(original)}:
                    if hasattr(maker, "__getitem__"):
                        put(maker, "__getitem__", _counting_launches(maker, answer))
            else:
                replacement = _counting(replacement, answer.count)
            for module, name in _holders(original):
                put(module, name, replacement)
        yield
    finally:
        contexts.close()
        for place, name, original in reversed(undo):
            if original is _ABSENT:
                delattr(place, name)
            else:
                setattr(place, name, original)


_ABSENT = object()


def _is_kernel(thing: Any) -> bool:
    return bare(thing) is not thing


def _counting(member: Any, count: Callable[[], None]) -> Any:
    """`member` with a call of `count` before each of its own calls.

    Works for functions, static methods, class methods and properties. Any other member is returned
    unchanged. A generator function counts when it is called.
    """
    if isinstance(member, staticmethod | classmethod):
        return type(member)(_counting(member.__func__, count))
    if isinstance(member, property):
        parts = (part and _counting(part, count) for part in (member.fget, member.fset))
        return property(*parts, member.fdel, member.__doc__)
    if not isinstance(member, FunctionType):
        return member

    @functools.wraps(member)
    def counting(*args: Any, **kwargs: Any) -> Any:
        count()
        return member(*args, **kwargs)

    return counting


def _counting_launches(maker: type, answer: Answer) -> Callable:
    """`__getitem__` of the kernel class `maker`, which also counts the launches of the answer.

    tlsim wraps the answer in another kernel object, so the functions inside are compared.
    """
    launch = maker.__getitem__

    @functools.wraps(launch)
    def counting(kernel: Any, grid: Any) -> Any:
        if bare(kernel) is bare(answer.definition):
            answer.count()
        return launch(kernel, grid)

    return counting


def answer_path(day: Number, name: str) -> Path:
    return work_dir() / "answers" / f"{key(day)}_{name}.py"


def saved_path(day: Number, exercise: Exercise) -> Path | None:
    """The file of the saved answer, under the present or a former name; None if there is none."""
    paths = (answer_path(day, name) for name in exercise.names)
    return next((path for path in paths if path.exists()), None)


def load_answer(path: Path, *names: str) -> Callable:
    """Run a saved answer's file and return its definition of the first of `names` that it defines.

    Raises the exceptions of the file, and CourseError if it defines none of the names.
    """
    module = ModuleType(f"nanoserve_answers_{path.name.strip('.').partition('.')[0]}")
    module.__file__ = str(path)
    source = path.read_text(encoding="utf-8")
    for old, new in MOVED.items():
        source = re.sub(rf"\b{re.escape(old)}\b", new, source)
    code = compile(source, str(path), "exec")
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)
    found = next((made for name in names if callable(made := vars(module).get(name))), None)
    if found is None:
        raise CourseError(f"{path.name} does not define {names[0]}")
    return found


def _save(day: Number, exercise: Exercise, answer: Callable) -> str | None:
    """Save the answer. Returns None, or the reason why it was not saved."""
    called = getattr(answer, "__name__", "<nothing>")
    if called not in exercise.names:
        return f"it is called `{called}`: write it with `def {exercise.name}`"
    try:
        body = module_source(answer)
    except CannotSave as error:
        return str(error)
    head = f"# {find(day).name}, {exercise.name}: your answer, saved when it passed its check.\n\n"

    def accept(path: Path) -> str | None:
        loaded = guarded(lambda: load_answer(path, *exercise.names), exercise.limit)
        if loaded.kind != "value":
            return f"the saved copy does not load ({_trouble(loaded)})"
        failed = checking.run(exercise, loaded.value).failed
        return failed and f"the saved copy fails {failed.what!r} ({failed.message})"

    return _write(answer_path(day, exercise.name), head + body, accept)


def _trouble(loaded: Outcome) -> str:
    if loaded.error is None:
        return "it runs too long"
    return message_of(loaded.error) or type(loaded.error).__name__


def _write(path: Path, source: str, accept: Callable[[Path], str | None]) -> str | None:
    """Write an answer if `accept(file)` returns None for the written file.

    Returns the result of `accept`. An older, different answer is kept as .bak.
    """
    candidate = path.with_name(f".{path.name}.new")
    write_atomically(candidate, source)
    try:
        trouble = accept(candidate)
        if trouble is None:
            with writing(path):
                if path.exists() and path.read_bytes() != source.encode():
                    path.replace(path.with_name(f"{path.name}.bak"))
                candidate.replace(path)
        return trouble
    finally:
        with contextlib.suppress(OSError):
            candidate.unlink()


def _holders(thing: object) -> list[tuple[object, str]]:
    """Every (module, name) of the engine and of the saved answers that refers to this object."""
    found = []
    for module_name, module in list(sys.modules.items()):
        inside = module_name == "nanoserve" or module_name.startswith(("nanoserve.", "nanoserve_a"))
        if inside and not module_name.startswith("nanoserve.course"):
            found += [
                (module, name) for name, value in list(vars(module).items()) if value is thing
            ]
    if not found:
        name = getattr(thing, "__name__", repr(thing))
        raise CourseError(f"no module of the engine refers to {name}")
    return found
