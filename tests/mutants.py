"""Mutation testing of the exercises: `python -m tests.mutants [dayNN | appendix_a ...]`.

The mutants of an exercise come from the package's own definition (`target`), from the reference
answer (`solution`) and from the right answers in tests/course/right_answers/. The exercise's check
runs on each. A mutant that the check refuses is killed; so is one that runs over the time limit,
exhausts the memory or ends the process. Any other is a survivor: add a case that refuses it, or
list it as equivalent, in tests/course/equivalent_mutants/dayNN.toml:

    [[equivalent]]
    exercise = "offsets_and_mask"
    answer = "package"       # or "solution", or a right answer's name; left out: any of them
    old = "return (offsets, offsets < n)"
    new = "return (offsets, n > offsets)"
    reason = "The same comparison."

Instead of whole lines, `old_part` and `new_part` may give what one is replaced by in the other, so
that one entry covers the same fault in several lines and answers. `--toml` prints the survivors as
entries. An entry that fits no survivor is stale. The exit status
is 1 where a survivor is not listed, an entry is stale or an entry has no reason.
"""

from __future__ import annotations
import __future__

import argparse
import importlib
import inspect
import itertools
import json
import linecache
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanoserve.course import check
from nanoserve.course.curriculum import ALL, Number, find, key
from nanoserve.course.exercise import Exercise, locate
from nanoserve.course.exercises import exercises_of
from tests.mutation import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENTS = ROOT / "tests/course/equivalent_mutants"
SILENCE = 60.0  # seconds without a result after which a process is ended
MEMORY = 4 << 30  # bytes that a process may take beyond what its imports took
PASSED = ("passed", "package")
_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """A right answer to mutate: its source, and the names that the source uses."""

    label: str  # "package", "solution" or a right answer's own name
    name: str  # of the function or class that the source defines
    source: str
    namespace: dict[str, Any]
    holder: str = ""  # the class that a method is put into

    def built(self, source: str) -> Callable:
        """The object that this source defines. A method gets a class named like its holder."""
        name = self.name
        if self.holder:
            name, source = self.holder, _in_class(self.holder, source)
        file = f"<mutant {next(_numbers)}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        postponed = isinstance(self.namespace.get("annotations"), __future__._Feature)
        flags = __future__.annotations.compiler_flag if postponed else 0
        scope = dict(self.namespace)
        exec(compile(source, file, "exec", flags, dont_inherit=True), scope)
        return scope[name]


@dataclass(frozen=True)
class Result:
    """One mutant and its result: "killed", "too long", "crashed" or "survived"."""

    answer: str
    mutant: Mutant
    fate: str


# answers -----------------------------------------------------------------------------------------


def right_answers(day: Number) -> dict[str, tuple[Callable, ...]]:
    """RIGHT of tests/course/right_answers/dayNN.py: the exercise's name and its right answers."""
    name = f"tests.course.right_answers.{key(day)}"
    try:
        return dict(importlib.import_module(name).RIGHT)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return {}


def answers_of(exercise: Exercise, right: tuple[Callable, ...] = ()) -> list[Answer]:
    """The answers of an exercise to mutate. Raises OSError if a source cannot be found."""
    answers = []
    if exercise.target is not None:
        holder, attribute, found = locate(exercise.target)
        if isinstance(holder, type):
            answers.append(_answer("package", vars(holder)[attribute], holder))
        else:
            answers.append(_answer("package", found))
    if exercise.solution is not None:
        answers.append(_answer("solution", exercise.solution))
    answers += [_answer(_bare(answer).__name__, answer) for answer in right]
    return list({answer.source: answer for answer in reversed(answers)}.values())[::-1]


def _answer(label: str, thing: Any, holder: type | None = None) -> Answer:
    plain = _bare(thing)
    source = textwrap.dedent(inspect.getsource(plain))
    namespace = dict(vars(sys.modules[plain.__module__]))
    if not isinstance(plain, type):
        namespace |= inspect.getclosurevars(plain).nonlocals
    if holder is None:
        return Answer(label, plain.__name__, source, namespace)
    namespace[holder.__name__] = holder
    return Answer(label, plain.__name__, source, namespace, holder.__name__)


def _bare(thing: Any) -> Any:
    """The function inside a kernel, a property, a static method or a decorated function."""
    for name in ("fn", "__func__", "fget", "__wrapped__"):
        inner = None if isinstance(thing, type) else getattr(thing, name, None)
        if inner is not None and callable(inner):
            return _bare(inner)
    return thing


def _in_class(holder: str, method: str) -> str:
    return f"class {holder}({holder}):\n" + textwrap.indent(method, "    ")


# one exercise ------------------------------------------------------------------------------------


def work_of(exercise: Exercise, answers: list[Answer]) -> list[tuple[Answer, Mutant]]:
    return [(answer, mutant) for answer in answers for mutant in mutants_of(answer.source)]


def fates(exercise: Exercise, work: list[tuple[Answer, Mutant]]) -> Iterator[str]:
    """The check's result for each mutant. Cases that refused other mutants are tried first."""
    quick = replace(exercise, wrong=(), limit=_limit(exercise))
    kills: Counter[int] = Counter()
    for answer, mutant in work:
        yield _fate(quick, answer, mutant, kills)


def examine(exercise: Exercise, answers: list[Answer]) -> list[Result]:
    """All mutants of an exercise, in this process."""
    work = work_of(exercise, answers)
    told = zip(work, fates(exercise, work), strict=True)
    return [Result(answer.label, mutant, fate) for (answer, mutant), fate in told]


def _fate(exercise: Exercise, answer: Answer, mutant: Mutant, kills: Counter[int]) -> str:
    try:
        subject = answer.built(mutant.source)
    except Exception:
        return "killed"  # it cannot even be defined
    cases = exercise.cases()
    for number in sorted(range(len(cases)), key=lambda i: -kills[i]):
        report = check.run(replace(exercise, cases=lambda i=number: [cases[i]]), subject)
        if report.status not in PASSED:
            kills[number] += 1
            slow = any(row.got == "ran too long" for row in report.rows)
            return "too long" if slow else "killed"
    whole = check.run(exercise, subject)  # afresh and in their own order
    return "survived" if whole.status in PASSED else "killed"


def _limit(exercise: Exercise) -> float:
    """The time limit of a case in seconds: much longer than the reference needs, even if busy."""
    started = time.perf_counter()
    check.run(replace(exercise, wrong=()), exercise.reference())
    return min(exercise.limit, max(1.5, 20 * (time.perf_counter() - started)))


# a process for each exercise ---------------------------------------------------------------------


def worker(day: Number, name: str, start: int) -> None:
    """Print the number of mutants, then the number and result of each mutant, from `start` on."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    _bound_memory()
    exercise = _named(day, name)
    work = work_of(exercise, answers_of(exercise, right_answers(day).get(name, ())))
    print(json.dumps(len(work)), file=results)
    for number, fate in enumerate(fates(exercise, work[start:]), start):
        print(json.dumps([number, fate]), file=results)


def run_exercise(day: Number, name: str) -> list[Result]:
    """All mutants of an exercise. A silent process is ended, and a new one continues after it."""
    exercise = _named(day, name)
    work = work_of(exercise, answers_of(exercise, right_answers(day).get(name, ())))
    told: list[str] = []
    while len(told) < len(work):
        before = len(told)
        ready, reason = _listen(day, name, before, told)
        if not ready:
            raise RuntimeError(f"{key(day)} {name}: the process ended before a mutant:\n{reason}")
        if len(told) < len(work):
            told.append("crashed")
    pairs = zip(work, told, strict=True)
    return [Result(answer.label, mutant, fate) for (answer, mutant), fate in pairs]


def _listen(day: Number, name: str, start: int, told: list[str]) -> tuple[bool, str]:
    """Add the results of one process to `told`. Returns whether it reached its first mutant."""
    command = [sys.executable, "-m", "tests.mutants", "--worker", str(day), name, str(start)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    errors: list[str] = []
    threading.Thread(target=read, daemon=True).start()
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)
    reader.start()
    ready, silence = False, 4 * SILENCE  # the imports may take long
    try:
        while (line := lines.get(timeout=silence)) is not None:
            found = json.loads(line)
            if isinstance(found, list):
                told.append(found[1])
            ready, silence = True, SILENCE
    except queue.Empty:
        pass
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        reader.join(5)
    return ready, "".join(errors)[-2000:]


def _named(day: Number, name: str) -> Exercise:
    return next(exercise for exercise in exercises_of(day) if exercise.name == name)


def _bound_memory() -> None:
    try:
        import resource

        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return  # no Linux
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


# equivalents -------------------------------------------------------------------------------------


def read_equivalents(day: Number, folder: Path = EQUIVALENTS) -> list[dict[str, str]]:
    path = folder / f"{key(day)}.toml"
    return tomllib.loads(path.read_text("utf-8")).get("equivalent", []) if path.exists() else []


def sorted_out(
    name: str, results: list[Result], entries: list[dict[str, str]]
) -> tuple[list[Result], list[Result], list[str]]:
    """(equivalent, survivors, complaints) of one exercise, from the entries listed for it."""
    mine = [entry for entry in entries if entry.get("exercise") == name]
    used, equivalent, survivors, complaints = set(), [], [], []
    for result in results:
        if result.fate != "survived":
            continue
        fitting = [i for i, entry in enumerate(mine) if _fits(entry, result)]
        used.update(fitting)
        (equivalent if fitting else survivors).append(result)
    for i, entry in enumerate(mine):
        old, new = (entry.get(x, entry.get(f"{x}_part", "")) for x in ("old", "new"))
        line = f"{old!r} -> {new!r}"
        if i not in used:
            complaints.append(f"{name}: a stale entry, no survivor is like it: {line}")
        elif not entry.get("reason", "").strip():
            complaints.append(f"{name}: an entry without a reason: {line}")
    return equivalent, survivors, complaints


def _fits(entry: dict[str, str], result: Result) -> bool:
    if entry.get("answer", result.answer) != result.answer:
        return False
    old, new = result.mutant.old, result.mutant.new
    part, other = entry.get("old_part"), entry.get("new_part")
    if part is None or other is None:
        return (entry.get("old"), entry.get("new")) == (old, new)
    starts = (i for i in range(len(old)) if old.startswith(part, i))
    return any(old[:i] + other + old[i + len(part) :] == new for i in starts)


def as_toml(name: str, result: Result) -> str:
    told = {"exercise": name, "answer": result.answer}
    told |= {"old": result.mutant.old, "new": result.mutant.new, "reason": ""}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in told.items()]
    return "\n".join(["[[equivalent]]", *lines, ""])


# the command -------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.worker:
        day, name, start = options.worker
        worker(find(day).number, name, int(start))
        return 0
    days = [find(day).number for day in options.days] or [info.number for info in ALL]
    jobs = [
        (day, exercise.name)
        for day in days
        for exercise in exercises_of(day)
        if options.exercise in (None, exercise.name)
    ]
    if not jobs:
        print("There is no such exercise.")
        return 1
    entries = {day: read_equivalents(day) for day, _ in jobs}
    started, bad, totals = time.perf_counter(), 0, {day: Counter() for day, _ in jobs}
    if options.exercise is None:
        for day, listed in entries.items():
            names = {exercise.name for exercise in exercises_of(day)}
            for entry in listed:
                if entry.get("exercise") not in names:
                    print(f"{key(day)}: no exercise is called {entry.get('exercise')!r}")
                    bad += 1
    with ThreadPoolExecutor(options.jobs) as pool:
        told = pool.map(lambda job: run_exercise(*job), jobs)
        for (day, name), results in zip(jobs, told, strict=True):
            equivalent, survivors, complaints = sorted_out(name, results, entries[day])
            counts = Counter(mutants=len(results), equivalent=len(equivalent))
            counts |= Counter(survivors=len(survivors))
            counts["killed"] = len(results) - len(equivalent) - len(survivors)
            counts["too long"] = sum(result.fate == "too long" for result in results)
            totals[day] += counts
            bad += len(survivors) + len(complaints)
            print(f"{key(day)} {name}: {_told(counts)}", flush=True)
            for result in survivors:
                print(as_toml(name, result) if options.toml else _diff(result), flush=True)
            for complaint in complaints:
                print(f"  {complaint}", flush=True)
    _print_totals(totals, options.report)
    print(f"{time.perf_counter() - started:.0f} s")
    return int(bad > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Run the checks of the exercises on mutants of right answers.",
    )
    parser.add_argument("days", nargs="*", metavar="dayNN", help="default: all days")
    parser.add_argument("--exercise", metavar="NAME", help="only this exercise")
    parser.add_argument("--report", action="store_true", help="print a table of the days")
    parser.add_argument(
        "--toml", action="store_true", help="print survivors as entries of the list"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    return parser


def _told(counts: Counter[str]) -> str:
    late = f" ({counts['too long']} ran too long)" if counts["too long"] else ""
    return (
        f"{counts['mutants']} mutants, {counts['killed']} killed{late}, "
        f"{counts['equivalent']} equivalent, {counts['survivors']} survivors"
    )


def _diff(result: Result) -> str:
    mutant = result.mutant
    return f"  {result.answer}: {mutant.operator}\n    - {mutant.old}\n    + {mutant.new}"


def _print_totals(totals: dict[int, Counter[str]], table: bool) -> None:
    if table:
        print("\n| day | mutants | killed | equivalent | survivors |")
        print("| --- | --- | --- | --- | --- |")
        for day, counts in totals.items():
            cells = (counts[x] for x in ("mutants", "killed", "equivalent", "survivors"))
            print(f"| {day} | " + " | ".join(map(str, cells)) + " |")
    print(f"\nin all: {_told(sum(totals.values(), Counter()))}")


if __name__ == "__main__":
    sys.exit(main())
