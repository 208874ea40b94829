"""Answers that earlier versions saved still load, pass their checks and run.

The files of old_answers/ were saved before seq_q, seq_total and read_paths were renamed.
"""

import shutil
from pathlib import Path

import pytest

from nanoserve.course import answers, check, day, store
from nanoserve.course.exercises import exercises_of

OLD = sorted((Path(__file__).parent / "old_answers").glob("day*.py"))


@pytest.mark.parametrize("file", OLD, ids=lambda file: file.stem)
def test_an_old_answer_loads_passes_its_check_and_takes_its_place(file, work, capsys):
    number, name = int(file.stem[3:5]), file.stem[6:]
    (work / "answers").mkdir(parents=True)
    shutil.copy(file, work / "answers")
    [answer] = answers.saved_answers(number, exercises_of(number))
    assert name in answer.exercise.names
    assert answer.trouble == ""
    assert check.run(answer.exercise, answer.definition).failed is None
    with day(number).mine() as calls:
        pass
    assert calls == {answer.exercise.name: 0}
    assert "Running with your " + answer.exercise.name in capsys.readouterr().out


def test_progress_under_a_former_name_counts(work):
    progress = store.Progress.load()
    progress.add_passed(26, "read_paths")
    progress.save()
    assert store.status()[26].passed == ("attention_paths",)
