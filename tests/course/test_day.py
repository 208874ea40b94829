"""The methods that a notebook calls: each shows one readable output."""

import errno
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoserve.course import answers, day, store
from nanoserve.course.above import names_of
from nanoserve.course.curriculum import find
from nanoserve.course.exercise import CourseError
from nanoserve.course.exercises import exercises_of
from nanoserve.course.show import wrapped
from nanoserve.kernels import dispatch, tlsim
from nanoserve.kernels.tlsim.launch import Kernel


def triton_jit():
    try:
        return importlib.import_module("triton").jit
    except ImportError:
        return tlsim.jit


RIGHT = "def scale_rows(x, f):\n    return x * f.reshape(-1, 1)\n"
LOUD = "def scale_rows(x, f):\n    return 100 * 0.01 * x * f[:, None] + 0.0\n"


@pytest.fixture
def today(toy):
    return day(4)


def said(capsys):
    return capsys.readouterr().out.strip()


def test_nothing_is_written_before_an_answer_passes(today, cell, work, capsys):
    today.check(cell("def scale_rows(x, f):\n    raise NotImplementedError").scale_rows)
    today.check(cell("def scale_rows(x, f):\n    return x").scale_rows)
    today.predict("speed", "How fast?")
    today.hint()
    with today.mine():
        pass
    assert not work.exists()


def test_a_passed_answer_is_saved_reloaded_and_marked(today, cell, work, capsys):
    today.check(cell(RIGHT).scale_rows)
    assert "Saved: `with today.mine():` runs the engine with it." in said(capsys)
    saved = work / "answers/day04_scale_rows.py"
    assert "reshape(-1, 1)" in saved.read_text()
    assert json.loads((work / "progress.json").read_text())["passed"] == {"4": ["scale_rows"]}
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_an_appendix_checks_saves_and_runs_answers_like_a_day(toy, cell, work, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nanoserve.course.exercises.appendix_a", toy.day)
    today = day("appendix_a")
    assert repr(today) == "Appendix A · Inside tlsim"
    today.check(cell(RIGHT).scale_rows)
    saved = work / "answers/appendix_a_scale_rows.py"
    assert saved.read_text().startswith("# Appendix A, scale_rows: your answer")
    today.predict("lines", "How many?", 300)
    assert store.Progress.load().guess("a", "lines") == 300
    assert (day(4).guess("lines"), day(4).guess("lines", "appendix_a")) == (None, 300)
    said(capsys)
    with day(9).mine(everything=True) as calls:
        toy.caller.engine_run(torch.ones(2, 2), torch.ones(2))
    assert calls == {"scale_rows": 1}
    assert said(capsys).startswith("Running with your scale_rows (Appendix A).")


def test_the_names_of_an_appendix_s_cells_are_known_for_a_cell_run_too_early(tmp_path, monkeypatch):
    (tmp_path / "nanoserve").mkdir()
    (tmp_path / "notebooks").mkdir()
    cell = {"cell_type": "code", "source": "import math\nbelow = 3"}
    path = tmp_path / "notebooks/appendix_a_inside_tlsim.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    monkeypatch.chdir(tmp_path)
    assert names_of(find("a")) == {"math", "below"}


def test_an_older_answer_is_kept_beside_the_new_one(today, cell, work):
    for source in (RIGHT, RIGHT, LOUD):
        today.check(cell(source).scale_rows)
    saved = work / "answers/day04_scale_rows.py"
    assert "100 * 0.01" in saved.read_text()
    assert "reshape" in saved.with_name(saved.name + ".bak").read_text()


def test_a_failing_answer_does_not_replace_a_saved_one(today, cell, work):
    today.check(cell(RIGHT).scale_rows)
    today.check(cell("def scale_rows(x, f):\n    return x").scale_rows)
    assert "reshape" in (work / "answers/day04_scale_rows.py").read_text()


def test_the_package_s_own_code_passes_and_is_not_saved(today, toy, work, capsys):
    today.check(toy.engine.scale_rows)
    assert "all 2 cases pass (word for word the package's own)" in said(capsys)
    assert not work.exists()


def test_an_answer_that_cannot_be_saved_has_still_passed(today, cell, work, capsys):
    source = "import torch\none = torch.ones(1)\n" + RIGHT.replace("return x", "return one * x")
    today.check(cell(source).scale_rows)
    out = said(capsys)
    assert "all 2 cases pass" in out
    assert "not saved: it uses `one`, a tensor of this notebook" in out
    assert store.Progress.load().passed(4) == ["scale_rows"]


def test_an_answer_whose_saved_copy_fails_is_not_called_saved(today, cell, work, capsys):
    source = RIGHT.replace("return x", "return (__name__ == '__main__') * x")
    today.check(cell(source).scale_rows)
    assert "not saved: the saved copy fails '3 rows of 2' (5 of 6 values differ" in said(capsys)
    assert list((work / "answers").iterdir()) == []


def test_a_work_folder_that_cannot_be_written_loses_nothing_but_the_file(today, cell, work, capsys):
    work.write_text("a file in the way")
    today.check(cell(RIGHT).scale_rows)
    told = said(capsys)
    assert "all 2 cases pass" in told
    assert "Passed, but not saved: cannot write" in told


def test_a_full_disk_or_any_other_trouble_does_not_hide_that_an_answer_passed(
    today, cell, monkeypatch, capsys
):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store.tempfile, "mkstemp", full)
        today.check(cell(RIGHT).scale_rows)
        told = said(capsys)
        today.predict("speed", "How fast?", guess=3)
    assert "all 2 cases pass" in told
    assert "not saved: cannot write" in told
    assert "No space left on device" in told
    assert said(capsys).startswith("How fast?\nYour guess: 3\nKept for this session only: ")
    assert today.guess("speed") == 3
    with monkeypatch.context() as patched:
        patched.setattr(answers, "module_source", lambda _: 1 / 0)
        today.check(cell(RIGHT).scale_rows)
    told = said(capsys)
    assert "all 2 cases pass" in told
    assert "Passed, but not saved: ZeroDivisionError: division by zero." in told
    today.check(cell(RIGHT).scale_rows)
    assert "Saved" in said(capsys)


def test_a_read_only_work_folder_loses_nothing(today, cell, toy, monkeypatch, capsys):
    """Every write fails, as in a read-only folder (chmod does not stop root). Answers still run."""

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    today.check(cell(RIGHT).scale_rows)
    today.predict("speed", "How fast?", guess=3)
    said(capsys)
    with monkeypatch.context() as patched:
        for place, name in ((store.tempfile, "mkstemp"), (Path, "replace"), (Path, "mkdir")):
            patched.setattr(place, name, refuse)
        today.check(cell(LOUD).scale_rows)
        today.predict("speed", "How fast?", guess=4)
        told = said(capsys)
        with today.mine() as calls:
            toy.caller.engine_run(torch.ones(2, 3), torch.ones(2))
    assert "all 2 cases pass" in told
    assert "Passed, but not saved: cannot write" in told
    assert "Kept for this session only" in told
    assert calls == {"scale_rows": 1}
    assert (day(4).guess("speed"), store.Progress.load().passed(4)) == (3, ["scale_rows"])


def test_a_work_folder_that_is_deleted_meanwhile_is_made_again(
    toy, cell, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("NANOSERVE_WORK")
    clone = tmp_path / "clone"
    for folder in ("notebooks", "nanoserve", "work"):
        (clone / folder).mkdir(parents=True)
    monkeypatch.chdir(clone / "work")
    today = day(4)
    today.predict("speed", "How fast?", guess=3)
    shutil.rmtree(clone / "work")
    said(capsys)
    lost = "The folder of this notebook was deleted: save the notebook (File > Save Notebook As)"
    today.check(cell(RIGHT).scale_rows)
    told = said(capsys)
    assert "all 2 cases pass" in told
    assert "Saved" in told
    assert lost in told
    assert (clone / "work/answers/day04_scale_rows.py").exists()
    today.predict("speed", "How fast?", guess=None)
    assert "Your guess from before: 3" in said(capsys)
    today.progress()
    with today.mine() as calls:
        toy.caller.engine_run(torch.ones(2, 3), torch.ones(2))
    assert lost in said(capsys)
    assert calls == {"scale_rows": 1}


def test_mine_runs_the_engine_with_the_saved_answer_and_puts_all_back(today, cell, toy, capsys):
    x, f = torch.ones(2, 3), torch.tensor([1.0, 2.0])
    today.check(cell(RIGHT.replace("return", "print('mine ran')\n    return")).scale_rows)
    original = toy.engine.scale_rows
    said(capsys)
    with today.mine():
        assert toy.caller.engine_run(x, f) == 9.0
    assert said(capsys).splitlines() == [
        "Running with your scale_rows (Day 4).",
        "mine ran",
        "Your scale_rows (Day 4) was called once.",
    ]
    assert toy.caller.scale_rows is toy.engine.scale_rows is original
    with pytest.raises(ZeroDivisionError), today.mine():
        assert toy.caller.scale_rows is not original
        raise ZeroDivisionError
    assert toy.caller.scale_rows is toy.engine.scale_rows is original


def test_mine_puts_a_method_into_its_class(today, cell, toy, capsys):
    grown = "class Counter(Counter):\n    def step(self, by):\n        self.count += by * 1\n"
    grown += "        return self.count\n"
    space = {"__name__": "__main__", "Counter": toy.engine.Counter}
    cell(grown, space)
    today.check(cell(grown, space).Counter)  # the cell run twice: a class on top of itself
    assert "Saved" in said(capsys)
    original = toy.engine.Counter.step
    with today.mine():
        assert toy.engine.Counter.step is not original
        assert toy.caller.Counter(2).step(5) == 7
    assert toy.engine.Counter.step is original


def test_mine_of_everything_takes_all_days(toy, cell, capsys):
    day(4).check(cell(RIGHT).scale_rows)
    said(capsys)
    with day(9).mine():
        pass
    assert said(capsys) == "No saved answer of Day 9 yet: the engine runs with its own code."
    with day(9).mine(everything=True):
        pass
    told = "Running with your scale_rows (Day 4).\nYour scale_rows (Day 4) was not called."
    assert said(capsys) == told


DAMAGE = {
    "not Python": b"def scale_rows(:\n",
    "another file's content": b"def other(x):\n    return x\n",
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "a number": b"scale_rows = 3\n",
    "raises": b"1 / 0\n",
    "exits": b"raise SystemExit\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_answer_is_one_sentence_and_the_others_run(
    today, cell, toy, work, capsys, damage
):
    space = {"__name__": "__main__", "Counter": toy.engine.Counter}
    grown = "class Counter(Counter):\n    def step(self, by):\n        self.count += 1 * by\n"
    today.check(cell(grown + "        return self.count\n", space).Counter)
    today.check(cell(RIGHT).scale_rows)
    saved = work / "answers/day04_scale_rows.py"
    saved.write_bytes(DAMAGE[damage])
    said(capsys)
    with today.mine() as calls:
        toy.caller.Counter(2).step(3)
    before, _ = said(capsys).splitlines()
    assert before.startswith("Your scale_rows (Day 4) cannot be loaded: ")
    assert before.endswith(" Run its check once more. Running with your Counter (Day 4).")
    assert "attribute" not in before
    assert calls == {"Counter": 1}
    today.check(cell(RIGHT).scale_rows)
    assert "Saved" in said(capsys)
    assert saved.with_name(saved.name + ".bak").read_bytes() == DAMAGE[damage]


def test_when_no_answer_can_be_loaded_the_engine_runs_with_its_own_code(today, cell, work, capsys):
    today.check(cell(RIGHT).scale_rows)
    (work / "answers/day04_scale_rows.py").write_text("1 / 0\n")
    said(capsys)
    with today.mine():
        pass
    assert said(capsys).endswith("Run its check once more. The engine runs with its own code.")


def test_mine_lists_saved_answers_that_are_not_a_part_of_the_engine(today, cell, capsys):
    today.check(cell("def double(n):\n    return n + n\n").double)
    said(capsys)
    with today.mine():
        pass
    assert said(capsys) == (
        "Saved, but not a part of the engine: double. "
        "No saved scale_rows, Counter of Day 4 yet: the engine runs with its own code."
    )


ENGINE_CLASS = """
import functools

class Store:
    def __init__(self, items):
        self.items = list(items)

    @property
    def size(self):
        return len(self.items)

    @size.setter
    def size(self, size):
        del self.items[size:]

    @staticmethod
    def one():
        return 1

    @classmethod
    def of(cls, *items):
        return cls(items)

    def each(self):
        yield from self.items

    @functools.cached_property
    def total(self):
        return sum(self.items)
"""


def test_calls_of_all_kinds_of_methods_are_counted_and_none_is_changed(toy, cell):
    exec(ENGINE_CLASS, toy.engine.__dict__)
    exercise = replace(toy.day.EXERCISES[2], name="Store", target="nanoserve.toy:Store")
    definition = cell(ENGINE_CLASS).Store
    before = dict(vars(definition))
    answer = answers.Answer(4, exercise, definition)
    with answers.installed([answer]):
        store_class = toy.engine.Store
        assert store_class is definition
        made = store_class.of(1, 2, 3)
        assert answer.calls == 2  # of, and __init__
        assert (made.size, store_class.one(), list(made.each()), made.total) == (3, 1, [1, 2, 3], 6)
        assert answer.calls == 5
        made.size = 1
        assert made.items == [1]
        assert answer.calls == 6
        assert type(made) is definition
        assert store_class.each.__name__ == "each"
    assert dict(vars(definition)) == before
    assert answer.told == "Methods of your Store (Day 4) were called 6 times."
    assert (made.size, answer.calls) == (1, 6)


@pytest.mark.parametrize("jit", [None, tlsim.jit, triton_jit()], ids=["plain", "tlsim", "triton"])
def test_launches_of_a_kernel_are_counted(jit):
    """Under tlsim the engine wraps the answer in a kernel of its own and launches that kernel."""
    [exercise] = [e for e in exercises_of(22) if e.target]
    kernel = tlsim.jit(exercise.reference()).fn
    answer = answers.Answer(22, exercise, jit(kernel) if jit else kernel)
    q, pool = torch.ones(1, 6, 1, 8), torch.ones(5, 2, 8)
    before = Kernel.__getitem__, dispatch.paged_attention_kernel
    with answers.installed([answer]), dispatch.use_backend("tlsim"):
        for _ in range(3):
            dispatch.paged_attention_dispatch(q, pool, pool, torch.arange(5), 3)
        gather = tlsim.jit(exercises_of(21)[-1].reference())
        gather[(0, 1)]
    assert answer.told == "Your paged_attention_kernel (Day 22) was launched 3 times."
    assert (Kernel.__getitem__, dispatch.paged_attention_kernel) == before


def test_an_exercise_that_is_not_a_part_of_the_engine_is_saved_too(today, cell, work, capsys):
    today.check(cell("def double(n):\n    return n + n\n").double)
    assert said(capsys).endswith("Saved.")


PARTLY = "def scale_rows(x, f):\n    return x * f[:, None] if len(x) == 3 else x\n"


def hinted(today, capsys):
    said(capsys)
    today.hint()
    return said(capsys)


def test_each_hint_is_the_next_and_names_its_case(today, cell, capsys):
    assert hinted(today, capsys) == "Run the check first: a hint is about a case that failed."
    today.check(cell(PARTLY).scale_rows)
    first = hinted(today, capsys)
    assert first == "Hint 1 of 3 on scale_rows, for case '2 rows of 2': Which axis?"
    for text in ("Rows come first.", "Index with [:, None].", "Index with [:, None]."):
        assert text in hinted(today, capsys)
    today.check(cell(RIGHT).scale_rows)
    assert "no hint is needed" in hinted(today, capsys)


def test_a_new_answer_starts_at_the_first_hint_and_the_same_answer_continues(today, cell, capsys):
    today.check(cell(PARTLY).scale_rows)
    assert hinted(today, capsys).startswith("Hint 1 of 3")
    today.check(cell(PARTLY).scale_rows)
    assert hinted(today, capsys).startswith("Hint 2 of 3")
    today.check(cell(PARTLY.replace("else x", "else (x)")).scale_rows)
    assert hinted(today, capsys).startswith("Hint 1 of 3")
    helper = "def helper(x):\n    return x * {}\n\ndef scale_rows(x, f):\n    return helper(x)\n"
    today.check(cell(helper.format(2)).scale_rows)
    assert hinted(today, capsys).startswith("Hint 1 of 3")
    today.check(cell(helper.format(3)).scale_rows)
    assert hinted(today, capsys).startswith("Hint 1 of 3")


def test_a_recognised_mistake_chooses_the_hints(today, toy, cell, capsys):
    exercise = toy.day.EXERCISES[0]
    own = replace(exercise.wrong[1], hints=("Adds?", "Times.", "x * f"))
    toy.day.EXERCISES = (replace(exercise, wrong=(exercise.wrong[0], own)),)
    today = day(4)
    today.check(cell("def scale_rows(x, f):\n    return x + f[:, None]\n").scale_rows)
    told = "Hint 1 of 3 on scale_rows, for the mistake found in the case '3 rows of 2': Adds?"
    assert hinted(today, capsys) == told


def test_an_answer_saved_under_a_former_name_still_counts_and_runs(toy, work, cell, capsys):
    """The answer's file and the progress file have the form from before the rename."""
    toy.day.EXERCISES = (replace(toy.day.EXERCISES[0], was=("times_rows",)),)
    old = "# Day 4, times_rows: your answer, saved when it passed its check.\n\n"
    old += "def times_rows(x, f):\n    print('the old answer')\n    return x * f[:, None]\n"
    store.write_atomically(work / "answers/day04_times_rows.py", old)
    progress = store.Progress.load()
    progress.add_passed(4, "times_rows")
    progress.save()
    with day(4).mine():
        assert toy.caller.engine_run(torch.ones(2, 3), torch.tensor([1.0, 2.0])) == 9.0
    assert "the old answer" in said(capsys)
    assert store.status()[4].passed == ("scale_rows",)
    day(4).check(cell(old).times_rows)
    assert "all 2 cases pass" in said(capsys)


@pytest.mark.parametrize("answer", [3, None, "scale", len, lambda x: x, torch.ones(2)])
def test_another_argument_of_check_is_one_clear_line(today, answer, capsys):
    today.check(answer)
    out = said(capsys)
    assert out.startswith("Day 4 has no exercise ")
    assert out.endswith("Its exercises: scale_rows, Counter, double.")


def test_a_result_instead_of_the_function_gets_a_message(today, capsys):
    today.check(14, "double")
    assert said(capsys) == "Pass the function itself, without calling it: today.check(double)"


@pytest.mark.parametrize(("guess", "kept"), [(3, 3.0), ("1,024", 1024.0), (0.5, 0.5)])
def test_a_prediction_is_kept(today, guess, kept, capsys):
    today.predict("speed", "How many times faster?", guess=guess)
    assert "How many times faster?\nYour guess: " in said(capsys)
    assert today.guess("speed") == day(4).guess("speed") == day(5).guess("speed", day=4) == kept


@pytest.mark.parametrize("guess", ["fast", float("nan"), float("inf"), True, [1], object()])
def test_a_guess_that_is_no_number_is_one_clear_line(today, guess, work, capsys):
    today.predict("speed", "How many times faster?", guess=guess)
    assert "is not a number" in said(capsys)
    assert today.guess("speed") is None
    assert not work.exists()


def test_a_choice_must_be_one_of_the_choices(today, capsys):
    options = ("linear", "quadratic")
    today.predict("shape", "Which curve?", guess="cubic", choices=options)
    assert "'cubic' is not one of the choices: linear, quadratic." in said(capsys)
    today.predict("shape", "Which curve?", guess="Linear", choices=options)
    assert today.guess("shape") == "linear"


def test_no_guess_is_the_same_two_lines_each_time(today, capsys):
    today.predict("speed", "How fast?")
    assert said(capsys) == "How fast?\nNo guess yet: put yours in place of None."
    assert today.guess_text("speed") == "none yet"


def test_an_earlier_guess_is_kept_and_shown(today, capsys):
    today.predict("speed", "How fast?", guess=3)
    for again in (today, day(4)):
        said(capsys)
        again.predict("speed", "How fast?", guess=None)
        assert said(capsys) == "How fast?\nYour guess from before: 3"
        assert again.guess("speed") == 3
        assert again.guess_text("speed") == "3"
    today.predict("shape", "Which curve?", guess="linear", choices=("linear", "cubic"))
    assert day(5).guess_text("shape", day=4) == "linear"


@pytest.mark.parametrize(
    ("guess", "bounds", "wanted"),
    [
        (60, {"low": 0, "high": 1}, "60 does not fit: the guess must be at least 0 and at most 1."),
        (-0.5, {"low": 0}, "-0.5 does not fit: the guess must be at least 0."),
        ("1e4", {"high": 9.5}, "10000 does not fit: the guess must be at most 9.5."),
    ],
)
def test_a_guess_out_of_range_is_not_kept(today, guess, bounds, wanted, capsys):
    today.predict("share", "Which share?", guess=guess, **bounds)
    assert said(capsys) == f"Which share?\n{wanted}"
    assert today.guess("share") is None
    today.predict("share", "Which share?", guess=1, low=0, high=1)
    assert today.guess("share") == 1


def test_review_questions_and_glossary_have_a_plain_form(toy, capsys):
    toy.day.REVIEW = (("Why?", "Because of `x`."),)
    today = day(4)
    today.review()
    assert said(capsys) == "1. Why?\n   Answer: Because of `x`."
    today.glossary("logits", "token id")
    assert [line.split("  ")[0] for line in said(capsys).splitlines()[2:]] == ["logits", "token id"]


def test_pictures_and_data_are_found_or_named(today, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "nanoserve")
    (tmp_path / "diagrams").mkdir()
    (tmp_path / "nanoserve/course/data").mkdir(parents=True)
    (tmp_path / "diagrams/pool.png").write_bytes(b"\x89PNG")
    (tmp_path / "nanoserve/course/data/run.json").write_text('{"device": "a card"}')
    today.picture("pool")
    assert said(capsys) == "[picture: pool]"
    assert today.data("run") == {"device": "a card"}
    with pytest.raises(CourseError, match="there is no picture 'pond'"):
        today.picture("pond")


def test_a_day_that_does_not_exist_is_named():
    with pytest.raises(CourseError, match="there is no day 45"):
        day(45)


KERNEL_CELLS = (
    """
import os, sys
sys.path.insert(0, TESTS)
os.environ["NANOSERVE_WORK"] = WORK
import conftest, types
engine = conftest._module("nanoserve.toy", conftest.ENGINE)
made = types.ModuleType("nanoserve.course.exercises.day04")
made.EXERCISES = (conftest.scale_rows_exercise(), conftest.step_exercise())
sys.modules[made.__name__] = made
from nanoserve.toy import Counter
from nanoserve.course import day
today = day(4)
SCALE = 1.0
""",
    """
from dataclasses import dataclass
import torch

@dataclass
class Shape:
    rows: int

def column(f: torch.Tensor):
    return f.reshape(Shape(-1).rows, 1) * SCALE

def scale_rows(x, f):
    return x * column(f)

today.check(scale_rows)
""",
    """
class Counter(Counter):
    def step(self, by):
        self.count += 1 * by
        return self.count

today.check(Counter)
""",
    """
def scale_rows(x, f):
    while True:
        try: x + 1
        except: pass
today.check(scale_rows)
""",
    """
def scale_rows(x, f):
    return x.nonsense
today.check(scale_rows)
""",
    """
with today.mine():
    print(Counter.__mro__[1] is engine.Counter, engine.Counter(2).step(3))
""",
)


def test_in_a_real_kernel_answers_are_found_saved_and_shown(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    places = f"TESTS = {str(Path(__file__).parent)!r}\nWORK = {str(tmp_path / 'work')!r}"
    first = places + KERNEL_CELLS[0]
    cells = [nbformat.v4.new_code_cell(source) for source in (first, *KERNEL_CELLS[1:])]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in cells]
    assert all(len(output) == 1 for output in outputs[1:5])
    plain = [output[0].data["text/plain"] for output in outputs[1:5]]
    assert "Saved" in plain[0]
    assert "Saved" in plain[1]
    assert "ran over the time limit" in plain[2]
    assert "(in line 2: `return x.nonsense`)" in plain[3]
    assert "<table" in outputs[1][0].data["text/html"]
    running, printed, counted = outputs[5]
    assert running.data["text/plain"] == "Running with your scale_rows (Day 4), Counter (Day 4)."
    assert counted.data["text/plain"] == (
        "Your scale_rows (Day 4) was not called. Your Counter (Day 4) was called once."
    )
    assert printed.text == "True 5\n"


ORDER_CELLS = (
    "import os\nos.chdir({clone!r})\nfrom nanoserve.course import day\ntoday = day(1)",
    "print(below + 1)",
    "print(nowhere)",
    "def f():\n    print(late)\n    late = 1\nf()",
    "below = 3",
    "print(below + 1)",
)


def test_in_a_real_kernel_a_cell_run_too_early_points_at_the_cells_above(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    (tmp_path / "nanoserve").mkdir()
    (tmp_path / "notebooks").mkdir()
    sources = [source.format(clone=str(tmp_path)) for source in ORDER_CELLS]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(notebook, tmp_path / "notebooks/day01_oracle.ipynb")
    nbclient.NotebookClient(notebook, timeout=60, allow_errors=True).execute()
    error, pointer = cells[1].outputs
    assert error.ename == "NameError"
    assert " ".join(pointer.data["text/plain"].split()) == (
        "Another cell of this notebook defines `below`. That cell has not run since the kernel "
        "started. Run the cells above first: Run → Run All Above Selected Cell."
    )
    for cell, kind in ((cells[2], "NameError"), (cells[3], "UnboundLocalError")):
        assert [output.get("ename") for output in cell.outputs] == [kind]
    assert cells[5].outputs[0].text == "4\n"


def test_a_notebook_s_plain_text_is_wrapped_at_spaces_alone():
    long = "paged_attention_reference, " * 10 + "x" * 120
    assert " ".join(wrapped(f"short\n{long}").split()) == f"short {long}"
    assert wrapped("two\n\n  lines") == "two\n\n  lines"
    assert max(map(len, wrapped(long).splitlines()[:-1])) <= 96
