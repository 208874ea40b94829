"""The class Day: the object `today` of a notebook."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanoserve.course import answers, store
from nanoserve.course import check as checking
from nanoserve.course import glossary as terms
from nanoserve.course.above import point_above
from nanoserve.course.compare import short
from nanoserve.course.curriculum import ALL, Number, find
from nanoserve.course.exercise import CourseError, Exercise
from nanoserve.course.exercises import exercises_of, review_of, widgets_of
from nanoserve.course.show import escaped, html_table, show, text_table

RUNGS = 3


def day(number: Number) -> Day:
    """The workbench of a day, `today = day(2)`, or of an appendix, `today = day("appendix_a")`."""
    today = Day(number)
    point_above(today.info)
    return today


class Day:
    """A day's workbench. A learner's mistake is shown in one output and raises no exception."""

    def __init__(self, number: Number) -> None:
        self.info = find(number)
        self.number = self.info.number
        self.exercises: tuple[Exercise, ...] = exercises_of(self.number)
        self.last: checking.Report | None = None
        self._climbed: dict[tuple[str, ...], int] = {}
        self._guesses: dict[str, float | str] = {}

    def __repr__(self) -> str:
        return f"{self.info.name} · {self.info.title}"

    def check(self, answer: Callable, name: str | None = None) -> None:
        """Run an answer on every case of its exercise and show a table of the results.

        `name` chooses the exercise; the default is the answer's own name. An answer that passes is
        saved, and `mine()` can run the engine with it.
        """
        wanted = name or getattr(answer, "__name__", None)
        named = sorted(self.exercises, key=lambda e: e.name != wanted)  # a former name comes second
        exercise = next((e for e in named if wanted in e.names), None)
        if exercise is None:
            names = ", ".join(e.name for e in self.exercises) or "none"
            asked = wanted or short(answer)
            show(f"{self.info.name} has no exercise {asked!r}. Its exercises: {names}.")
        elif not callable(answer):
            show(f"Pass the function itself, without calling it: today.check({exercise.name})")
        else:
            self.last = checking.run(exercise, answer)
            if self.last.status == "passed":
                self.last.note = answers.keep(self.number, exercise, answer)
            show(self.last.text(), html=self.last.html())

    def hint(self) -> None:
        """Show a hint for the answer that was checked last. Each call shows the next of three.

        A recognised mistake chooses the hints; without one, the failed case does. After a change of
        the answer or of its results, the next hint is the first again.
        """
        report = self.last
        if report is None:
            show("Run the check first: a hint is about a case that failed.")
            return
        exercise = next(e for e in self.exercises if e.name == report.name)
        row = exercise.cases()[0] if report.status == "not attempted" else report.diagnosed
        if row is None:
            show(f"Every case of {report.name} passes: no hint is needed.")
            return
        mistake = getattr(row, "mistake", None)
        rung = min(self._climbed.get(report.identity, 0) + 1, RUNGS)
        self._climbed[report.identity] = rung
        about = f"the mistake found in the case {row.what!r}" if mistake else f"case {row.what!r}"
        last = "\nThat was the last hint: the solution is in the folded cell." if rung == 3 else ""
        told = exercise.ladder(row.kind, mistake)[rung - 1]
        text = f"Hint {rung} of {RUNGS} on {report.name}, for {about}: {told}{last}"
        show(text, html=f"<div>{escaped(text).replace(chr(10), '<br>')}</div>")

    @contextlib.contextmanager
    def mine(self, everything: bool = False) -> Iterator[dict[str, int]]:
        """Within `with today.mine():` the engine runs with your saved answers of this day.

        `everything=True` takes the saved answers of all days. Prints which answers run and, at the
        end, how often each was called. After the block the engine runs its own code again. At the
        end of `with today.mine() as calls:`, `calls` holds the number of calls by name.
        """
        days = ALL if everything else (self.info,)
        saved = [a for i in days for a in answers.saved_answers(i.number, exercises_of(i.number))]
        ready = [answer for answer in saved if answer.definition is not None]
        show(" ".join(self._before_mine(saved, everything)))
        calls: dict[str, int] = {}
        with answers.installed(ready):
            yield calls
        calls.update({answer.exercise.name: answer.calls for answer in ready})
        if ready:
            show(" ".join(answer.told for answer in ready))

    def _before_mine(self, saved: list[answers.Answer], everything: bool) -> Iterator[str]:
        """The sentences that say which answers run, which do not, and why."""
        if trouble := store.lost_folder():
            yield trouble
        broken = [answer for answer in saved if answer.definition is None]
        for answer in broken:
            yield f"Your {answer.name} cannot be loaded: {answer.trouble}. Run its check once more."
        parts = [e.name for e in self.exercises if e.target]
        beside = [e for e in self.exercises if not e.target]
        beside = [e.name for e in beside if answers.saved_path(self.number, e)]
        if beside and parts and not everything:
            yield f"Saved, but not a part of the engine: {', '.join(beside)}."
        names = ", ".join(answer.name for answer in saved if answer.definition is not None)
        if names:
            yield f"Running with your {names}."
        elif broken:
            yield "The engine runs with its own code."
        elif not parts and not everything:
            yield (
                f"No exercise of {self.info.name} is a part of the engine: "
                "the engine runs with its own code."
            )
        else:
            which = ", ".join(parts) if beside and not everything else "answer"
            when = "" if everything else f" of {self.info.name}"
            yield f"No saved {which}{when} yet: the engine runs with its own code."

    def predict(
        self,
        name: str,
        question: str,
        guess: float | str | None = None,
        choices: tuple[str, ...] | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        """Ask for a guess before a measurement: a number from `low` to `high`, or a choice.

        The guess is stored in work/, and `guess(name)` returns it. None keeps an earlier guess. A
        guess that does not fit is not stored; a sentence says which guesses fit.
        """
        ask = question if choices is None else f"{question} ({', '.join(choices)})"
        if guess is None:
            before = self.guess(name)
            told = "No guess yet: put yours in place of None."
            show(f"{ask}\n{told if before is None else f'Your guess from before: {_told(before)}'}")
            return
        value, trouble = _fitting(guess, choices, low, high)
        if trouble:
            show(f"{ask}\n{trouble}")
            return
        self._guesses[name] = value
        progress, note = store.Progress.load(), ""
        progress.set_guess(self.number, name, value)
        try:
            progress.save()
        except CourseError as error:
            note = f"\nKept for this session only: {error}"
        lines = [ask, f"Your guess: {_told(value)}"]
        lines += [progress.trouble] if progress.trouble else []
        show("\n".join(lines) + note)

    def guess(self, name: str, day: Number | None = None) -> float | str | None:
        """The prediction made under this name, on this day or another, or None."""
        if day is None and name in self._guesses:
            return self._guesses[name]
        return store.Progress.load().guess(self.number if day is None else find(day).number, name)

    def guess_text(self, name: str, day: Number | None = None) -> str:
        """The prediction as text for a sentence: "3", "linear", or "none yet"."""
        guess = self.guess(name, day)
        return "none yet" if guess is None else _told(guess)

    def picture(self, name: str) -> None:
        """Show a picture of diagrams/ as a stored output."""
        path = _travelling(("diagrams", "course/pictures"), f"{name}.png", "picture")
        show(f"[picture: {name}]", png=path.read_bytes())

    def widget(self, name: str, **options: Any) -> None:
        """Show a widget of the day, or its picture where widgets do not render."""
        factories = widgets_of(self.number)
        if name not in factories:
            known = ", ".join(factories) or "none"
            raise CourseError(f"{self.info.name} has no widget {name!r}; its widgets: {known}")
        factories[name](**options).show(name)

    def data(self, name: str) -> Any:
        """The contents of notebooks/data/name.json: recorded figures with their label."""
        path = _travelling(("notebooks/data", "course/data"), f"{name}.json", "data")
        return json.loads(path.read_text(encoding="utf-8"))

    def review(self) -> None:
        """Show the week's questions, each with its answer folded."""
        questions = review_of(self.number)
        if not questions:
            raise CourseError(f"{self.info.name} has no review questions")
        plain = [f"{i}. {q}\n   Answer: {a}" for i, (q, a) in enumerate(questions, 1)]
        rich = [
            f'<details style="margin:0.4em 0"><summary><b>{i}.</b> {escaped(q)}</summary>'
            f'<div style="margin:0.3em 1.2em">{escaped(a)}</div></details>'
            for i, (q, a) in enumerate(questions, 1)
        ]
        show("\n".join(plain), html="".join(rich))

    def glossary(self, *names: str) -> None:
        """Show a table of the terms `names`; without names, of all terms that this day defines."""
        rows = [(t.term, t.meaning) for t in terms.lookup(names, self.number)]
        rich = [(f"<b>{escaped(term)}</b>", escaped(meaning)) for term, meaning in rows]
        head = ("term", "meaning")
        show(text_table(head, rows), html=html_table(head, rich))

    def progress(self) -> None:
        """Show the map of the days, with the exercises that you have passed."""
        from nanoserve.course.widgets import progress_map

        plain, rich = progress_map(store.status())
        trouble = store.Progress.load().trouble
        show(plain + (f"\n{trouble}" if trouble else ""), html=rich)


def _told(guess: float | str) -> str:
    return guess if isinstance(guess, str) else short(guess)


def _fitting(
    guess: Any, choices: tuple[str, ...] | None, low: float | None, high: float | None
) -> tuple[Any, str]:
    """(value, "") for a guess that fits, else (None, a sentence that says which guesses fit)."""
    if choices is not None:
        match = next((c for c in choices if str(guess).strip().lower() == c.lower()), None)
        if match is None:
            return None, f"{short(guess)} is not one of the choices: {', '.join(choices)}."
        return match, ""
    if isinstance(guess, str):
        with contextlib.suppress(ValueError):
            guess = float(guess.strip().replace(",", ""))
    if isinstance(guess, bool) or not isinstance(guess, numbers.Real) or not math.isfinite(guess):
        return None, f"{short(guess)} is not a number. Guess a number, such as 3 or 0.5."
    if (low is not None and guess < low) or (high is not None and guess > high):
        lowest = [] if low is None else [f"at least {low:g}"]
        highest = [] if high is None else [f"at most {high:g}"]
        wanted = " and ".join(lowest + highest)
        return None, f"{short(guess)} does not fit: the guess must be {wanted}."
    return float(guess), ""


def _travelling(folders: tuple[str, str], file: str, kind: str) -> Path:
    """A file of the checkout, or its copy in the installed package."""
    for path in (store.PACKAGE.parent / folders[0] / file, store.PACKAGE / folders[1] / file):
        if path.exists():
            return path
    raise CourseError(f"there is no {kind} {Path(file).stem!r}")
