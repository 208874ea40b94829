"""Checking an answer: every case runs, and its result becomes a row of one table."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from nanoserve.course.compare import a, close, contrast, exact, short
from nanoserve.course.exercise import AS_SOLUTION, Case, Exercise, Raises, Wrong
from nanoserve.course.guard import Outcome, guarded, message_of
from nanoserve.course.show import BAD, CELL, GOOD, QUIET, STYLE, escaped, text_table
from nanoserve.course.source import CannotSave, same_source, source_of

ALIKE = close(atol=1e-6, rtol=1e-5)  # two answers that make the same mistake
ALIKE_HALF = close(atol=1e-2, rtol=1e-2)  # the same, in 16 bits


@dataclass
class Row:
    """The result of one case. `message` is empty if the case passed. `mistake` is the known wrong
    answer with the same outcome in this case."""

    what: str
    kind: str
    expected: str
    got: str
    message: str = ""
    printed: str = ""
    verdict: str = "ok"  # or "no", "not run"
    inputs: str = ""
    mistake: Wrong | None = None

    @property
    def passed(self) -> bool:
        return self.verdict == "ok"


@dataclass
class Report:
    """All rows of one check. `status` is "passed", "failed", "not attempted" or "package"."""

    name: str
    rows: list[Row]
    status: str
    note: str = ""  # second line under the heading: whether a passed answer is saved
    source: str = ""  # of the answer; empty if it was not found

    @property
    def failed(self) -> Row | None:
        return next((row for row in self.rows if row.verdict == "no"), None)

    @property
    def diagnosed(self) -> Row | None:
        """The first row with a recognised mistake; without one, the first failed row."""
        return next((row for row in self.rows if row.mistake), self.failed)

    @property
    def identity(self) -> tuple[str, ...]:
        """A key that is equal for the same answer with the same outcomes."""
        return (self.name, self.source, *(f"{row.got} {row.message}" for row in self.rows))

    @property
    def heading(self) -> str:
        if self.status == "not attempted":
            return f"{self.name}: not attempted yet" + (f", {self.note}" if self.note else "")
        good, total = sum(row.passed for row in self.rows), len(self.rows)
        whose = " (word for word the package's own)" if self.status == "package" else ""
        if good == total:
            return f"{self.name}: all {total} cases pass{whose}"
        return f"{self.name}: {good} of {total} cases pass"

    @property
    def told(self) -> list[str]:
        """Each row's message, or "as above" if the failed row before it has the same message."""
        told, last = [], ""
        for row in self.rows:
            told.append("as above" if row.message and row.message == last else row.message)
            last = row.message or last
        return told

    def text(self) -> str:
        """The table for a terminal, with the messages on separate lines below the table."""
        if self.status == "not attempted":
            return self.heading
        cells = [(row.what, row.expected, row.got, row.verdict) for row in self.rows]
        lines = [self.heading, "", text_table(("case", "expected", "got", ""), cells)]
        for row, told in zip(self.rows, self.told, strict=True):
            if told or row.printed:
                lines += ["", f"{row.what}:"]
                lines += [f"  {told}"] if told else []
                lines += [f"  the inputs: {row.inputs}"] if row.inputs and told else []
                lines += [f"  it printed: {short_print(row.printed)}"] if row.printed else []
        return "\n".join([*lines, *(["", self.note] if self.note else [])])

    def html(self) -> str:
        """The table for a notebook, in the colours of the page (light or dark)."""
        colour = {"passed": GOOD, "package": GOOD, "failed": BAD}.get(self.status, "inherit")
        head = f'<div style="margin:0.4em 0"><b style="color:{colour}">{escaped(self.heading)}</b>'
        if self.status == "not attempted":
            return f"{head}</div>"
        head += f"<br>{escaped(self.note)}</div>" if self.note else "</div>"
        titles = ("", "case", "expected", "got")
        top = "".join(f'<th style="{CELL};border-top:0;{QUIET}">{title}</th>' for title in titles)
        body = "".join(map(_html_row, self.rows, self.told))
        table = f'<table style="{STYLE}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
        return head + table


def run(exercise: Exercise, answer: Callable) -> Report:
    """Run every case of the exercise on the answer. Raises only KeyboardInterrupt.

    After a case that exceeds the time limit, no other case runs. Each failed case is diagnosed
    separately: if a known wrong answer has the same outcome, the row explains that mistake.
    """
    method = _method(exercise)
    if method and isinstance(answer, type) and method not in vars(answer):
        note = f"the class does not define the method `{method}`"
        return Report(exercise.name, [], "not attempted", note)
    subject = exercise.as_subject(answer)
    solution = exercise.reference()
    cases = exercise.cases()
    expected = [expected_outcome(case, solution, exercise.limit) for case in cases]
    trials = _tried(exercise, subject, cases, expected, _files(answer))
    rows = [
        _row(case, wanted, trial, _inputs(case, solution))
        for case, wanted, trial in zip_longest(cases, expected, trials)
    ]
    report = Report(exercise.name, rows, "failed", source=_source(answer))
    if trials and all(_unwritten(trial.outcome) for trial in trials):
        report.status = "not attempted"
    elif all(row.passed for row in rows):
        own = exercise.target is not None and same_source(answer, solution, method)
        report.status = "package" if own else "passed"
    else:
        known = _known_trials(exercise, cases, expected)
        for i, (row, trial) in enumerate(zip(rows, trials, strict=False)):
            row.mistake = diagnose(i, exercise.wrong, known, trials, expected)
            if row.mistake:
                why, raised = row.mistake.why, trial.outcome.kind != "value"
                row.message = f"{row.message}. {why}" if raised else why
    return report


@dataclass
class Trial:
    """One run of an answer on a case; `message` is None where the case passed."""

    outcome: Outcome
    message: str | None
    unchanged: bool  # the inputs


def diagnose(
    i: int,
    mistakes: Sequence[Wrong],
    known: list[list[Trial]],
    trials: list[Trial],
    expected: list[Any],
) -> Wrong | None:
    """The known mistake that explains why case number i failed, or None.

    A candidate is a mistake that fails this case with the same outcome. A candidate that passes
    every case that the answer passes is preferred, then the one with most equal outcomes, then the
    earlier one. Some outcomes are common: an exception, a single number, or any value where an
    exception is expected. For a common outcome, only a candidate of the preferred kind counts.
    """
    if trials[i].message is None or _unwritten(trials[i].outcome):
        return None
    value = trials[i].outcome.value
    single = value is None or isinstance(value, str | bytes | bool | numbers.Number)
    weak = trials[i].outcome.kind != "value" or single or isinstance(expected[i], Raises)
    best, most = None, (False, 0)
    for mistake, theirs in zip(mistakes, known, strict=True):
        if i >= len(theirs) or theirs[i].message is None or not _alike(trials[i], theirs[i]):
            continue
        pairs = list(zip(trials, theirs, strict=False))
        fits = all(one.message is not None or other.message is None for one, other in pairs)
        found = (fits, sum(_alike(one, other) for one, other in pairs))
        if found > most and (fits or not weak):
            best, most = mistake, found
    return best


def perform(
    case: Case, subject: Callable, limit: float, files: tuple[str, ...] = ()
) -> tuple[Outcome, bool]:
    """Run one case on copies of its inputs. Returns (outcome, whether the inputs are unchanged)."""
    args, kwargs = copied(case.args), copied(dict(case.kwargs))
    call = case.call or (lambda answer, *args, **kwargs: answer(*args, **kwargs))
    outcome = guarded(lambda: call(subject, *args, **kwargs), limit, files)
    same = exact(args, case.args) is None and exact(kwargs, dict(case.kwargs)) is None
    return outcome, same


def expected_outcome(case: Case, solution: Callable, limit: float = 10.0) -> Any:
    """The value that the case expects, or a Raises."""
    if isinstance(case.expected, Raises):
        return case.expected
    if case.expected is not AS_SOLUTION:
        return case.expected(solution) if callable(case.expected) else case.expected
    outcome, _ = perform(case, solution, 6 * limit)
    if outcome.kind == "raised":
        return Raises(type(outcome.error))
    return outcome.value


def judge(case: Case, outcome: Outcome, expectation: Any, limit: float) -> str | None:
    """None if the outcome is as expected, else a sentence about the difference.

    The comparison has a time limit too, because it uses objects that the answer returned.
    """
    judged = guarded(lambda: _judge(case, outcome, expectation), limit)
    if judged.kind == "value":
        return judged.value
    return f"the result ({a(outcome.value)}) cannot be compared with the expected value"


def copied(value: Any) -> Any:
    """A copy of tensors and plain containers. Anything else (a model, a pool) is not copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple, set):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return value


def short_print(printed: str, width: int = 120) -> str:
    text = " / ".join(line for line in printed.splitlines() if line.strip())
    return text if len(text) <= width else text[: width - 3] + "..."


def _judge(case: Case, outcome: Outcome, expectation: Any) -> str | None:
    if outcome.kind == "timeout":
        return _too_long(outcome)
    if isinstance(expectation, Raises):
        return _judge_raised(outcome, expectation)
    if outcome.kind == "exit":
        return "it called sys.exit(): return a value instead"
    if outcome.kind == "raised":
        return _raised(outcome)
    verdict = case.compare(outcome.value, expectation)
    if verdict is False:
        return f"expected {short(expectation)}, got {short(outcome.value)}"
    return verdict if isinstance(verdict, str) else None


def _judge_raised(outcome: Outcome, expectation: Raises) -> str | None:
    wanted = expectation.error.__name__
    if outcome.kind != "raised":
        return f"it should raise {wanted} here, and did not"
    if isinstance(outcome.error, NotImplementedError) and wanted != "NotImplementedError":
        return "this part is not written yet"
    if not isinstance(outcome.error, expectation.error):
        return f"it should raise {wanted} here: {_raised(outcome)}"
    if expectation.names and expectation.names not in str(outcome.error):
        return f"the message of the {wanted} should name {expectation.names}"
    return None


def _raised(outcome: Outcome) -> str:
    error = outcome.error
    if isinstance(error, NotImplementedError):
        return "this part is not written yet"
    if isinstance(error, RecursionError):
        return "it calls itself without end (RecursionError)"
    text = message_of(error)
    told = f"it raised {type(error).__name__}" + (f": {text}" if text else "")
    return f"{told} (in {outcome.line})" if outcome.line else told


def _too_long(outcome: Outcome) -> str:
    told = "it ran over the time limit: is there a loop that never ends?"
    if outcome.stopped:
        return told
    return f"{told} It could not be stopped and still runs: restart the kernel when you can"


def _tried(
    exercise: Exercise,
    subject: Callable,
    cases: list[Case],
    expected: list[Any],
    files: tuple[str, ...],
) -> list[Trial]:
    """Run the cases in order, up to the first that exceeds the time limit."""
    trials: list[Trial] = []
    for case, wanted in zip(cases, expected, strict=True):
        outcome, unchanged = perform(case, subject, exercise.limit, files)
        message = judge(case, outcome, wanted, exercise.limit)
        if message is None and not unchanged and not case.mutates and outcome.kind == "value":
            message = "the result is right, but it changed its inputs: work on a copy"
        trials.append(Trial(outcome, message, unchanged))
        if outcome.kind == "timeout":
            break
    return trials


def _row(case: Case, expectation: Any, trial: Trial | None, inputs: str) -> Row:
    told = _told(expectation)
    if trial is None:
        return Row(case.what, case.kind, told, "", verdict="not run", inputs=inputs)
    outcome, message = trial.outcome, trial.message or ""
    got = {
        "raised": f"raises {type(outcome.error).__name__}",
        "exit": "calls sys.exit()",
        "timeout": "ran too long",
    }.get(outcome.kind)
    if got is None and (not message or isinstance(expectation, Raises)):
        got = _safely(lambda: short(outcome.value), a(outcome.value))
    elif got is None:
        plain = told, a(outcome.value)
        told, got = _safely(lambda: contrast(expectation, outcome.value), plain)
    verdict = "no" if message else "ok"
    return Row(case.what, case.kind, told, got, message, outcome.printed, verdict, inputs)


def _inputs(case: Case, solution: Callable) -> str:
    """The arguments of a case on one line: tensors by their shape, other values shortened.

    Objects without a short form, such as a model, are left out.
    """
    if case.inputs is not None:
        return case.inputs
    names = _parameters(case.call)[1:] if case.call else _parameters(solution)
    named = [*zip_longest(names[: len(case.args)], case.args), *case.kwargs.items()]
    parts = []
    for name, value in named:
        text = short(value)
        opaque = isinstance(value, type) or (value is not None and text == a(value))
        if not opaque and text != repr(case.what):
            parts.append(f"{name} = {text}" if name else text)
    return ", ".join(parts)


def _parameters(call: Callable) -> list[str]:
    """The names of the parameters that are passed by position."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _told(expectation: Any) -> str:
    if isinstance(expectation, Raises):
        return f"raises {expectation.error.__name__}"
    return short(expectation)


def _safely(make: Callable[[], Any], otherwise: Any) -> Any:
    """make(), or `otherwise` if that raises: an answer can return objects that cannot be shown."""
    try:
        return make()
    except Exception:
        return otherwise


def _html_row(row: Row, message: str) -> str:
    mark, colour = {"ok": ("✓", GOOD), "no": ("✗", BAD)}.get(row.verdict, ("", "inherit"))
    told = f'<br><span style="color:{BAD}">{escaped(message)}</span>' if message else ""
    if row.printed:
        told += f'<br><span style="{QUIET}">it printed: {escaped(short_print(row.printed))}</span>'
    cells = (
        f'<b style="color:{colour}">{mark}</b>',
        escaped(row.what)
        + (f'<br><span style="{QUIET}">{escaped(row.inputs)}</span>' if row.inputs else ""),
        escaped(row.expected),
        escaped(row.got or row.verdict) + told,
    )
    return "<tr>" + "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _unwritten(outcome: Outcome) -> bool:
    return outcome.kind == "raised" and isinstance(outcome.error, NotImplementedError)


def _alike(one: Trial, other: Trial) -> bool:
    """Whether two answers have the same outcome in a case: equal values, or exceptions of one type
    and cause."""
    mine, theirs = one.outcome, other.outcome
    if mine.kind != theirs.kind or one.unchanged != other.unchanged:
        return False
    if mine.kind == "value":
        half = getattr(mine.value, "dtype", None) in (torch.float16, torch.bfloat16)
        alike = ALIKE_HALF if half else ALIKE
        judged = guarded(lambda: alike(mine.value, theirs.value), 2.0)
        return judged.kind == "value" and judged.value is None
    return mine.kind != "raised" or _cause(mine) == _cause(theirs)


def _cause(outcome: Outcome) -> tuple[type, str]:
    """The type and message of an exception, to compare two of them.

    A message from the answer's own `raise` is left out. Names of variables are replaced.
    """
    if ": `raise " in outcome.line:
        return type(outcome.error), "raise"
    text = message_of(outcome.error)
    if isinstance(outcome.error, NameError):
        text = re.sub("'.*?'", "a name", text)
    return type(outcome.error), text


def _known_trials(exercise: Exercise, cases: list[Case], expected: list[Any]) -> list[list[Trial]]:
    """The outcome of each wrong answer on each case. Stored, since the cases are always equal."""
    kept = _known.get(id(exercise))
    if kept is not None:
        return kept[1]
    known = [
        _tried(exercise, exercise.as_subject(m.fn), cases, expected, _files(m.fn))
        for m in exercise.wrong
    ]
    if all(trial.outcome.kind != "timeout" for trials in known for trial in trials):
        _known[id(exercise)] = exercise, known  # the reference keeps the id from being reused
    return known


_known: dict[int, tuple[Exercise, list[list[Trial]]]] = {}


def _source(answer: Callable) -> str:
    try:
        return source_of(answer)
    except CannotSave:
        return ""


def _method(exercise: Exercise) -> str | None:
    path = (exercise.target or "").partition(":")[2]
    return path.partition(".")[2] or None


def _files(answer: Callable) -> tuple[str, ...]:
    members = vars(answer).values() if isinstance(answer, type) else (answer,)
    codes = (getattr(getattr(m, "__wrapped__", m), "__code__", None) for m in members)
    return tuple({code.co_filename for code in codes if code is not None})
