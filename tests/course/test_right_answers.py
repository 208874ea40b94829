"""Every exercise has at least three right answers in different styles; its check accepts each."""

import pytest

from nanoserve.course import check
from nanoserve.course.curriculum import ALL, key
from nanoserve.course.exercises import exercises_of
from tests.mutants import answers_of, right_answers

EXERCISES = [(info.number, exercise) for info in ALL for exercise in exercises_of(info.number)]
IDS = [f"{key(number)}-{exercise.name}" for number, exercise in EXERCISES]
ANSWERS = [
    pytest.param(exercise, answer, id=f"{name}-{getattr(answer, '__name__', answer)}")
    for (number, exercise), name in zip(EXERCISES, IDS, strict=True)
    for answer in right_answers(number).get(exercise.name, ())
]


@pytest.mark.parametrize(("number", "exercise"), EXERCISES, ids=IDS)
def test_an_exercise_has_three_right_answers_that_differ(number, exercise):
    answers = right_answers(number).get(exercise.name, ())
    assert len(answers) >= 3, f"tests/course/right_answers/{key(number)}.py: {exercise.name}"
    sources = [answer.source for answer in answers_of(exercise, answers)]
    own = (exercise.target is not None) + (exercise.solution is not None)
    assert len(set(sources)) >= 3 + min(own, 1), "a right answer is another one's text"


@pytest.mark.parametrize(("exercise", "answer"), ANSWERS)
def test_a_right_answer_passes_every_case(exercise, answer):
    report = check.run(exercise, answer)
    assert report.status == "passed", report.text()


@pytest.mark.parametrize("info", ALL, ids=str)
def test_right_answers_belong_to_an_exercise(info):
    names = {exercise.name for exercise in exercises_of(info.number)}
    assert set(right_answers(info.number)) <= names


def test_right_answers_have_names_by_which_a_list_can_call_them():
    for number, exercise in EXERCISES:
        answers = right_answers(number).get(exercise.name, ())
        names = [answer.label for answer in answers_of(exercise, answers)]
        assert len(set(names)) == len(names), f"{key(number)} {exercise.name}: {names}"
