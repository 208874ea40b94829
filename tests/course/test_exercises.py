"""Tests of the exercises: right answers pass, and each known wrong answer gets its message."""

from dataclasses import replace

import pytest

from nanoserve.course import check, lands
from nanoserve.course.above import ABOVE
from nanoserve.course.curriculum import ALL, key, last_of_week
from nanoserve.course.exercise import Wrong
from nanoserve.course.exercises import exercises_of, module_of, review_of, widgets_of

EXERCISES = [(info.number, exercise) for info in ALL for exercise in exercises_of(info.number)]
IDS = [f"{key(number)}-{exercise.name}" for number, exercise in EXERCISES]


def assert_wrong_answers_rejected(exercise, at_least=5):
    """The solution passes. Each wrong answer fails with a message that no other answer gets."""
    report = check.run(exercise, exercise.reference())
    assert report.failed is None, f"the solution fails: {report.text()}"
    assert len(exercise.wrong) >= at_least, f"only {len(exercise.wrong)} wrong answers"
    messages = {}
    for number, mistake in enumerate(exercise.wrong):
        report = check.run(exercise, mistake.fn)
        assert report.failed is not None, f"wrong answer {number} passes: {mistake.why}"
        message = report.failed.message
        assert mistake.why in message, f"wrong answer {number} is told {message!r}"
        assert "'Wrong' object" not in message, f"wrong answer {number} calls another wrong answer"
        twin = messages.setdefault(message, number)
        assert twin == number, f"wrong answers {twin} and {number} get one message: {message}"
    for kind in {case.kind for case in exercise.cases()}:
        rungs = exercise.hints[kind]
        assert len(rungs) == 3, f"hints for {kind!r}: {len(rungs)} rungs"
        assert len({rung.strip() for rung in rungs} - {""}) == 3, f"hints for {kind!r} repeat"


@pytest.mark.parametrize("exercise", [exercise for _, exercise in EXERCISES], ids=IDS)
def test_wrong_answers_are_rejected_each_with_its_own_message(exercise):
    assert_wrong_answers_rejected(exercise)


@pytest.mark.parametrize("exercise", [exercise for _, exercise in EXERCISES], ids=IDS)
def test_cases_are_the_same_each_time_and_their_names_differ(exercise):
    first, second = exercise.cases(), exercise.cases()
    assert len({case.what for case in first}) == len(first)
    for one, two in zip(first, second, strict=True):
        assert one.what == two.what
        assert check.exact(one.args, two.args) is None


@pytest.mark.parametrize("info", [info for info in ALL if module_of(info.number)], ids=str)
def test_a_day_s_names_are_its_own(info):
    names = [exercise.name for exercise in exercises_of(info.number)]
    assert len(set(names)) == len(names)
    assert all(callable(factory) for factory in widgets_of(info.number).values())
    assert not review_of(info.number) or last_of_week(info.number)


WITH_EXERCISES = [  # an appendix may have none
    twin for twin in lands.twins()[1:] if exercises_of(lands.day_number(twin.stem))
]


@pytest.mark.parametrize("twin", WITH_EXERCISES, ids=lambda twin: twin.stem)
def test_a_day_s_first_exercise_says_what_to_run_after_a_restart(twin):
    text = twin.read_text(encoding="utf-8")
    section = text[text.index("Your turn") :].partition("# %%")[0]
    assert ABOVE in section


def test_the_helper_accepts_a_sound_exercise(toy):
    assert_wrong_answers_rejected(toy.day.EXERCISES[0])


def test_the_helper_finds_each_defect(toy):
    good = toy.day.EXERCISES[0]
    first, *rest = good.wrong
    defects = {
        "passes": (Wrong(toy.engine.scale_rows, "This one is right."), *rest, first),
        "only 4": tuple(rest),
        "get one message|is told": (first, Wrong(first.fn, "Another why."), *rest),
        "wrong answer 1 and 2|is told|get one": (
            first,
            *rest[:1],
            Wrong(first.fn, first.why),
            *rest,
        ),
    }
    for message, wrong in defects.items():
        with pytest.raises(AssertionError, match=message):
            assert_wrong_answers_rejected(replace(good, wrong=wrong))
    with pytest.raises(AssertionError, match="hints for 'square'"):
        hints = {**good.hints, "square": ("a", "a", "b")}
        assert_wrong_answers_rejected(replace(good, hints=hints))
    with pytest.raises(AssertionError, match="the solution fails"):
        cases = good.cases()
        bad = [replace(cases[0], expected=3)]
        assert_wrong_answers_rejected(replace(good, cases=lambda: bad))
