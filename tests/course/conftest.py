"""A small invented day: an engine of two modules, and one exercise for each kind of definition."""

import itertools
import linecache
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nanoserve.course.exercise import Case, Exercise, Wrong, close

ENGINE = '''
import torch

def scale_rows(x, factors):
    """[rows, dim] times one factor per row."""
    return x * factors[:, None]


class Counter:
    def __init__(self, start):
        self.count = start

    def step(self, by):
        self.count += by
        return self.count
'''
CALLER = """
from nanoserve.toy import Counter, scale_rows

def engine_run(x, factors):
    return scale_rows(x, factors).sum().item()
"""
_numbers = itertools.count()


def define(source, namespace=None, name="__main__"):
    """Run source as a notebook's cell: in a shared namespace, with its lines in linecache."""
    namespace = {"__name__": name} if namespace is None else namespace
    file = f"<cell-{next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), namespace)
    return SimpleNamespace(**namespace)


def _module(name, source):
    module = ModuleType(name)
    sys.modules[name] = module
    define(source, module.__dict__)
    return module


@pytest.fixture
def cell():
    """cell(source, namespace=None): the definitions of a notebook cell, as attributes."""
    return define


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A learner's work/ folder. It does not exist until the first write."""
    folder = tmp_path / "work"
    monkeypatch.setenv("NANOSERVE_WORK", str(folder))
    return folder


@pytest.fixture
def toy(work):
    """nanoserve.toy and nanoserve.toy_caller, and Day 4 with exercises on them."""
    names = ("nanoserve.toy", "nanoserve.toy_caller", "nanoserve.course.exercises.day04")
    before = {name: sys.modules.pop(name, None) for name in names}
    engine, caller = _module(names[0], ENGINE), _module(names[1], CALLER)
    day = ModuleType(names[2])
    day.EXERCISES = (scale_rows_exercise(), step_exercise(), puzzle_exercise())
    sys.modules[names[2]] = day
    yield SimpleNamespace(engine=engine, caller=caller, day=day)
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def scale_rows_exercise(limit=1.0):
    def cases():
        x = torch.arange(6.0).reshape(3, 2)
        return [
            Case("3 rows of 2", (x, torch.tensor([1.0, 2.0, 3.0])), kind="shape", compare=close()),
            Case("2 rows of 2", (x[:2], torch.tensor([2.0, 5.0])), kind="square", compare=close()),
        ]

    hints = {
        "shape": ("Look at the shapes.", "A factor per row is [rows, 1].", "factors[:, None]"),
        "square": ("Which axis?", "Rows come first.", "Index with [:, None]."),
    }
    mistakes = (
        Wrong(lambda x, f: x * f.mean(), "All rows get one factor: keep one per row."),
        Wrong(lambda x, f: x + f[:, None], "This adds the factor."),
        Wrong(lambda x, f: (x * f[:, None]).T, "This turns the result round."),
        Wrong(lambda x, f: x / f[:, None], "This divides by the factor."),
        Wrong(lambda x, f: x * f.flip(0)[:, None], "The factors come last to first."),
    )
    return Exercise(
        "scale_rows", cases, hints, "nanoserve.toy:scale_rows", wrong=mistakes, limit=limit
    )


def step_exercise():
    def cases():
        def use(counter, start, by):
            made = counter(start)
            return [made.step(by), made.step(by), made.count]

        return [Case("two steps of 3 from 4", (4, 3), kind="step", call=use)]

    return Exercise("Counter", cases, {"step": ("a", "b", "c")}, "nanoserve.toy:Counter.step")


def puzzle_exercise():
    def double(n):
        return 2 * n

    def cases():
        return [Case("n = 7", (7,), kind="number")]

    return Exercise("double", cases, {"number": ("a", "b", "c")}, solution=double)
