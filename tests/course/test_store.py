"""The learner's folder: notebooks are copied and never overwritten; faults are one sentence."""

import json
import linecache
import os
import sys

import pytest

from nanoserve.course import store
from nanoserve.course.curriculum import ALL, find
from nanoserve.course.exercise import CourseError
from nanoserve.course.source import CannotSave, module_source, source_of
from nanoserve.course.store import Progress


def _notebook(*cells):
    return json.dumps({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def _code(source, tags=()):
    outputs = [{"output_type": "stream", "name": "stdout", "text": "42"}]
    return {
        "cell_type": "code",
        "source": source,
        "outputs": outputs,
        "execution_count": 3,
        "metadata": {"tags": list(tags)},
    }


OUT = ["day01_oracle.ipynb", "day02_weights.ipynb", "appendix_a_inside_tlsim.ipynb"]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with Days 1 and 2 and Appendix A out, as the current folder."""
    monkeypatch.delenv("NANOSERVE_WORK", raising=False)
    root = tmp_path / "clone"
    (root / "notebooks").mkdir(parents=True)
    (root / "nanoserve").mkdir()
    text = _notebook(_code("1 + 1"), _code("picture", ["keep"]))
    for name in OUT:
        (root / "notebooks" / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(root)
    return root


def test_start_copies_published_days_without_outputs_except_kept_ones(clone):
    copied = store.start()
    assert [path.name for path in copied] == OUT
    plain, kept = json.loads((clone / "work/day01_oracle.ipynb").read_text())["cells"]
    assert plain["outputs"] == []
    assert plain["execution_count"] is None
    assert kept["outputs"][0]["text"] == "42"


def test_start_never_changes_an_existing_copy(clone):
    store.start(1)
    mine = clone / "work/day01_oracle.ipynb"
    mine.write_text("my work", encoding="utf-8")
    assert store.start("day01") == []
    assert mine.read_text() == "my work"


def test_start_works_from_within_work(clone, monkeypatch):
    store.start(1)
    monkeypatch.chdir(clone / "work")
    assert store.start(2)[0] == clone / "work/day02_weights.ipynb"


def test_reset_keeps_the_old_copy_beside_the_fresh_one(clone):
    assert store.reset(2)[1] is None
    path = clone / "work/day02_weights.ipynb"
    for number in (1, 2):
        path.write_text(f"try {number}", encoding="utf-8")
        fresh, kept = store.reset("2")
        assert fresh == path
        assert kept.name == f"day02_weights.{number}.ipynb"
        assert kept.read_text() == f"try {number}"
        assert json.loads(path.read_text())["nbformat"] == 4


@pytest.mark.parametrize("day", [45, "x", "day99", -1, ""])
def test_an_unknown_day_is_named(clone, day):
    with pytest.raises(CourseError, match="there is no day"):
        store.start(day)


def test_a_day_that_is_not_out_is_named(clone):
    with pytest.raises(CourseError, match=r"Day 14 \(A pool of blocks\) is not out yet"):
        store.start(14)


def test_outside_of_a_clone_there_is_nothing_to_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "site-packages/nanoserve")
    with pytest.raises(CourseError, match="inside a clone"):
        store.start()


def test_a_damaged_notebook_is_named_and_nothing_is_copied(clone):
    (clone / "notebooks/day01_oracle.ipynb").write_text("{", encoding="utf-8")
    with pytest.raises(CourseError, match=r"day01_oracle\.ipynb cannot be read"):
        store.start(1)
    assert not (clone / "work").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(clone):
    (clone / "work").write_text("a file in the way", encoding="utf-8")
    with pytest.raises(CourseError, match="cannot write"):
        store.start(1)


def test_status_has_a_row_for_each_day(clone, work, toy):
    store.start(1)
    progress = Progress.load()
    progress.add_passed(4, "double")
    progress.save()
    rows = store.status()
    assert [row.info for row in rows] == list(ALL)
    assert (rows[1].words, rows[2].words, rows[14].words) == ("not started",) * 2 + ("not out yet",)
    assert (rows[4].passed, rows[4].total) == (("double",), 3)
    assert " ".join(str(rows[4]).split()) == "day 4 RMSNorm and RoPE 1 of 3 not out yet"
    assert " ".join(str(rows[-1]).split()) == "Appendix A Inside tlsim not started"


def test_an_appendix_is_copied_reset_and_started_like_a_day(clone):
    (path,) = store.start("appendix_a")
    assert path == clone / "work/appendix_a_inside_tlsim.ipynb"
    assert store.start("a") == []
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["source"] = "1 + 2"
    path.write_text(json.dumps(notebook))
    assert store.status()[-1].words == "started"
    fresh, kept = store.reset("A")
    assert (fresh, kept.name) == (path, "appendix_a_inside_tlsim.1.ipynb")
    assert store.status()[-1].words == "not started"


def test_a_saved_answer_of_an_appendix_counts_as_passed(work):
    store.write_atomically(work / "answers/appendix_a_broadcast.py", "def broadcast(): pass\n")
    progress = Progress.load()
    assert progress.passed("a") == ["broadcast"]
    progress.set_guess("a", "lines", 3.0)
    progress.save()
    assert Progress.load().guess("a", "lines") == 3.0


def _state(day):
    return store.status()[day].words


def test_a_copy_is_started_once_it_is_changed_or_run(clone):
    store.start()
    assert (_state(1), _state(2)) == ("not started", "not started")
    for day, change in ((1, {"source": "1 + 2"}), (2, {"execution_count": 1})):
        path = clone / "work" / find(day).notebook
        notebook = json.loads(path.read_text())
        notebook["metadata"]["language_info"] = {"version": "3.12"}  # what Jupyter adds by itself
        path.write_text(json.dumps(notebook))
        assert _state(day) == "not started"
        notebook["cells"][0].update(change)
        path.write_text(json.dumps(notebook))
        assert _state(day) == "started"


def test_an_update_of_the_course_starts_no_day(clone):
    store.start(1)
    published = clone / "notebooks/day01_oracle.ipynb"
    published.write_text(_notebook(_code("2 + 2")), encoding="utf-8")
    assert _state(1) == "not started"


def test_a_copy_of_an_earlier_version_is_compared_with_the_published_one(clone):
    (clone / "work").mkdir()
    copy = clone / "work/day01_oracle.ipynb"
    cells = json.loads((clone / "notebooks/day01_oracle.ipynb").read_text())["cells"]
    copy.write_text(_notebook(*({**cell, "execution_count": None} for cell in cells)))
    assert _state(1) == "not started"
    copy.write_text("damaged")
    assert _state(1) == "started"


def test_a_guess_starts_a_day_and_all_exercises_end_it(clone, work, toy):
    progress = Progress.load()
    progress.set_guess(1, "growth", 3.0)
    for name in ("scale_rows", "Counter", "double"):
        progress.add_passed(4, name)
    progress.save()
    (clone / "notebooks" / find(4).notebook).write_text(_notebook(), encoding="utf-8")
    assert (_state(1), _state(2), _state(4)) == ("started", "not started", "done")


def test_a_failed_write_leaves_the_old_file_whole(work, monkeypatch):
    path = work / "progress.json"
    store.write_atomically(path, "old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CourseError, match="No space left"):
        store.write_atomically(path, "new")
    assert [p.name for p in work.iterdir()] == ["progress.json"]
    assert path.read_text() == "old"


UNREADABLE = [
    b"{",
    b"[]",
    b'{"passed": {}}',
    b'{"passed": 3, "predictions": {}}',
    b'{"passed": {"2": [["x"]]}, "predictions": {}}',
    b"\xff\xfe\x00",
    b"",
    b"[" * 100_000,
]


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_damaged_progress_file_is_renamed_and_passes_come_from_the_answers(work, text):
    store.write_atomically(work / "answers/day02_unpermute.py", "def unpermute(): pass\n")
    for number in ("", ".1"):
        (work / "progress.json").write_bytes(text)
        progress = Progress.load()
        assert f"was renamed to progress.corrupt{number}.json" in progress.trouble
        assert progress.passed(2) == ["unpermute"]
        assert (work / f"progress.corrupt{number}.json").read_bytes() == text
    assert not (work / "progress.json").exists()
    again = Progress.load()
    assert (again.passed(2), again.trouble) == (["unpermute"], "")
    again.save()
    assert Progress.load().passed(2) == ["unpermute"]


def test_a_progress_file_that_is_a_folder_is_renamed_too(work):
    (work / "progress.json").mkdir(parents=True)
    assert "was damaged" in Progress.load().trouble
    Progress.load().save()
    assert (work / "progress.json").is_file()


def test_progress_round_trips(work):
    progress = Progress.load()
    progress.add_passed(2, "unpermute")
    progress.add_passed(2, "unpermute")
    progress.set_guess(1, "speedup", 8.0)
    progress.save()
    again = Progress.load()
    assert again.passed(2) == ["unpermute"]
    assert again.guess(1, "speedup") == 8.0
    assert again.trouble == ""


@pytest.mark.parametrize("asked", [2, "2", "02", "day02", "Day2", "day02_weights", "day2.ipynb"])
def test_a_day_is_found_by_any_of_its_names(asked):
    assert find(asked).number == 2


# The source of an answer.

HELPERS = """
import math
import torch
import torch.nn.functional as F
from dataclasses import dataclass
from torch import Tensor
SCALE = 2.5
DTYPE = torch.float32
TABLE = {"a": [1, 2]}
unused = torch.zeros(3)
x = torch.ones(2)

@dataclass
class Pair:
    left: float
    right: float = SCALE

def twice(v):
    return 2 * v

def helper(v: Tensor) -> Tensor:
    return twice(F.relu(v)) * math.pi
"""


def test_an_answer_s_module_has_everything_that_it_uses_and_nothing_else(cell):
    space = {"__name__": "__main__"}
    cell(HELPERS, space)
    made = cell(
        "@torch.no_grad()\ndef answer(x: Tensor, pair=Pair(1.0), scale: float = SCALE) -> Tensor:\n"
        "    unused = [helper(x) for _ in range(2)]\n"
        "    return (sum(unused) * scale * pair.right).to(DTYPE) + TABLE['a'][1]\n",
        space,
    ).answer
    text = module_source(made)
    assert "unused = torch" not in text
    alone = {"__name__": "alone"}
    exec(compile(text, "alone", "exec"), alone)
    value = sys.modules["torch"].tensor([1.0, -2.0])
    assert alone["answer"](value).equal(made(value))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "weights = torch.zeros(3)\ndef f(x):\n    return x + weights",
            "`weights`, a tensor of this notebook: make it inside",
        ),
        ("f = lambda x: x", "is a lambda"),
        ("def make(n):\n    def f(x):\n        return x + n\n    return f\nf = make(2)", "inside"),
    ],
)
def test_an_answer_that_cannot_stand_alone_says_why(cell, source, why):
    with pytest.raises(CannotSave, match=why):
        module_source(cell("import torch\n" + source).f)


def test_source_is_found_beside_ipython_s_own_lines(cell):
    file = next(iter(cell("def f():\n    return 1\n").f.__code__.co_filename for _ in "1"))
    lines = ["%time 1\n", "!ls\n", "f?\n", *linecache.cache[file][2]]
    linecache.cache[file] = (0, None, lines, file)
    made = {}
    exec(compile("\n\n\n" + "".join(lines[3:]), file, "exec"), made)
    assert source_of(made["f"]) == "def f():\n    return 1\n"
