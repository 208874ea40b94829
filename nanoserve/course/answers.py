"""A learner's answers: kept when they pass, and run in the places of the engine's own code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from nanoserve.course import check as checking
from nanoserve.course.exercise import CourseError, Exercise, locate
from nanoserve.course.guard import Outcome, guarded, message_of
from nanoserve.course.source import CannotSave, module_source
from nanoserve.course.store import Progress, work_dir, write_atomically, writing


@dataclass
class Answer:
    """A saved answer: the loaded definition, or the reason why it could not be loaded."""

    day: int
    exercise: Exercise
    definition: Callable | None
    trouble: str = ""


def keep(day: int, exercise: Exercise, answer: Callable) -> str:
    """Note that an answer passed and save its source; the sentence that says what was done.

    The saved copy is loaded again and must pass the check itself before it counts as saved.
    """
    progress = Progress.load()
    progress.add_passed(day, exercise.name)
    try:
        progress.save()
        trouble = _save(day, exercise, answer)
    except CourseError as error:
        trouble = str(error)
    if trouble:
        told = f"Passed, but not saved: {trouble}."
    elif exercise.target is None:
        told = "Saved."
    else:
        told = "Saved: `with today.mine():` runs the engine with it."
    return f"{progress.trouble} {told}" if progress.trouble else told


def saved_answers(day: int, exercises: tuple[Exercise, ...]) -> list[Answer]:
    """The saved answers of a day that have a place in the engine, loaded."""
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
    """Put each answer in the place of its target, wherever the engine holds it, until the end."""
    undo: list[tuple[object, str, object]] = []
    try:
        for answer in answers:
            if answer.definition is None or answer.exercise.target is None:
                continue
            holder, attribute, original = locate(answer.exercise.target)
            if isinstance(holder, type):
                replacement = vars(answer.definition).get(attribute, answer.definition)
                places = [(holder, attribute, vars(holder).get(attribute, original))]
            else:
                replacement = answer.definition
                places = [(module, name, original) for module, name in _holders(original)]
            for place in places:
                undo.append(place)
                setattr(place[0], place[1], replacement)
        yield
    finally:
        for place, name, original in reversed(undo):
            setattr(place, name, original)


def answer_path(day: int, name: str) -> Path:
    return work_dir() / "answers" / f"day{day:02d}_{name}.py"


def saved_path(day: int, exercise: Exercise) -> Path | None:
    """The file of the saved answer, under the exercise's name or a former one; None without it."""
    paths = (answer_path(day, name) for name in exercise.names)
    return next((path for path in paths if path.exists()), None)


def load_answer(path: Path, *names: str) -> Callable:
    """Run a saved answer's file and return the definition of the first of `names` that it has.

    Raises what the file raises.
    """
    module = ModuleType(f"nanoserve_answers_{path.name.strip('.').partition('.')[0]}")
    module.__file__ = str(path)
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)
    return getattr(module, next((name for name in names if hasattr(module, name)), names[0]))


def _save(day: int, exercise: Exercise, answer: Callable) -> str | None:
    """What keeps the answer from being saved, or None when it is."""
    called = getattr(answer, "__name__", "<nothing>")
    if called not in exercise.names:
        return f"it is called `{called}`: write it with `def {exercise.name}`"
    try:
        body = module_source(answer)
    except CannotSave as error:
        return str(error)
    head = f"# Day {day}, {exercise.name}: your answer, saved when it passed its check.\n\n"

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
    """Write an answer if `accept(file)` finds nothing wrong with the written file.

    Returns what is wrong, or None when it is saved. An older, different answer stays as .bak.
    """
    candidate = path.with_name(f".{path.name}.new")
    write_atomically(candidate, source)
    try:
        trouble = accept(candidate)
        if trouble is None:
            with writing(path):
                if path.exists() and path.read_text(encoding="utf-8") != source:
                    path.replace(path.with_name(f"{path.name}.bak"))
                candidate.replace(path)
        return trouble
    finally:
        candidate.unlink(missing_ok=True)


def _holders(thing: object) -> list[tuple[object, str]]:
    """Every (module, name) of the engine and of saved answers that holds this very object."""
    found = []
    for module_name, module in list(sys.modules.items()):
        inside = module_name == "nanoserve" or module_name.startswith(("nanoserve.", "nanoserve_a"))
        if inside and not module_name.startswith("nanoserve.course"):
            found += [
                (module, name) for name, value in list(vars(module).items()) if value is thing
            ]
    if not found:
        raise CourseError(f"no module of the engine holds {getattr(thing, '__name__', 'it')}")
    return found
