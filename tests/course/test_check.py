"""For every answer, a check ends and prints a useful result."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanoserve.course import check
from nanoserve.course.compare import close, contrast, exact, short
from nanoserve.course.exercise import Case, CourseError, Exercise, raises, wrong
from nanoserve.course.guard import guarded


@pytest.fixture
def tried(toy, cell):
    """tried(source) -> the report on a cell's `scale_rows`."""

    def run(source):
        return check.run(toy.day.EXERCISES[0], cell("import torch, time\n" + source).scale_rows)

    return run


def message(report):
    return report.failed.message


def test_a_right_answer_passes_every_case(tried):
    report = tried("def scale_rows(x, f):\n    return x * f.unsqueeze(-1)")
    assert report.status == "passed"
    assert report.heading == "scale_rows: all 2 cases pass"


def test_the_package_s_own_definition_is_known_as_such(toy, cell):
    source = "def scale_rows(x, factors):\n"
    source += '    """[rows, dim] times one factor per row."""\n    return x * factors[:, None]\n'
    exercise = toy.day.EXERCISES[0]
    assert check.run(exercise, cell(source).scale_rows).status == "package"
    assert check.run(exercise, toy.engine.scale_rows).status == "package"


def test_an_unchanged_stub_is_one_line(tried):
    report = tried("def scale_rows(x, f):\n    raise NotImplementedError('your turn')")
    assert report.text() == "scale_rows: not attempted yet"
    assert "<table" not in report.html()


def test_a_half_written_answer_says_which_case_is_missing(tried):
    report = tried(
        "def scale_rows(x, f):\n"
        "    if len(x) == 2:\n        raise NotImplementedError\n    return x * f[:, None]"
    )
    assert message(report) == "this part is not written yet"
    assert report.rows[0].passed


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("x.sum(0)", "wrong shape: expected [3, 2], got [2]"),
        ("None", "it returns None: is a `return` missing?"),
        ("x.long()", "wrong dtype: expected float32, got int64"),
        ("(x * f[:, None]).double()", "wrong dtype: expected float32, got float64"),
        ("x * float('nan')", "NaN in 6 of 6 places, first at [0, 0]"),
        ("[1, 2]", "it returns a list where a tensor is expected"),
        (
            "x",
            "4 of 6 values differ, first at [1, 0]: expected 4, got 2",
        ),
    ],
)
def test_a_wrong_value_is_described_by_its_first_difference(tried, body, sentence):
    assert message(tried(f"def scale_rows(x, f):\n    return {body}")) == sentence


def test_an_exception_names_its_type_message_and_the_answer_s_own_line(tried):
    report = tried("def scale_rows(x, f):\n    return x.view(7)")
    assert message(report).startswith("it raised RuntimeError: shape '[7]' is invalid")
    assert message(report).endswith("(in line 3: `return x.view(7)`)")


def test_an_answer_that_exits_or_recurses_without_end_gets_a_message(tried):
    assert "sys.exit()" in message(tried("def scale_rows(x, f):\n    raise SystemExit"))
    endless = tried("def scale_rows(x, f):\n    return scale_rows(x, f)")
    assert message(endless) == "it calls itself without end (RecursionError)"


def test_a_known_mistake_gets_its_message(tried):
    report = tried("def scale_rows(x, f):\n    return x + f.reshape(-1, 1)")
    assert [row.message for row in report.rows] == ["This adds the factor."] * 2


def messages(exercise, answer):
    return [row.message for row in check.run(exercise, answer).rows]


def test_a_second_mistake_does_not_hide_the_first(tried):
    report = tried("def scale_rows(x, f):\n    return x + f[:, None] if len(x) == 3 else x * 9 + 1")
    assert report.rows[0].message == "This adds the factor."
    assert report.rows[1].message.startswith("4 of 4 values differ")


def split(n, parts):
    """n items in that many parts, the longer ones first; ValueError for no parts."""
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    return [n // parts + (i < n % parts) for i in range(parts)]


def split_exercise():
    def cases():
        return [
            Case("7 in 3", (7, 3)),
            Case("6 in 3", (6, 3)),
            Case("no parts", (7, 0), kind="refusal", expected=raises(ValueError, "parts")),
        ]

    @wrong("The rest is dropped.", hints="rest")
    def dropped(n, parts):
        return split(n - n % parts if parts else n, parts)

    @wrong("The rest goes to the last.", hints=("one", "two", "three"))
    def last(n, parts):
        return split(n, parts)[::-1]

    @wrong("Zero parts are let by.")
    def unchecked(n, parts):
        return split(n, parts) if parts else []

    @wrong("It always gives nothing.")
    def nothing(n, parts):
        return []

    @wrong("A name is used before it has a value.")
    def unbound(n, parts):
        for i in range(parts):
            total = total + i  # noqa: F821, F841
        return split(n, parts)

    hints = {kind: (f"{kind} 1", f"{kind} 2", f"{kind} 3") for kind in ("value", "refusal", "rest")}
    mistakes = (nothing, dropped, last, unchecked, unbound)
    return Exercise("split", cases, hints, solution=split, wrong=mistakes)


def test_a_missing_exception_hides_no_mistake_and_has_its_own_message():
    def answer(n, parts):
        return [n // parts] * parts if parts else []

    told = messages(split_exercise(), answer)
    assert told == ["The rest is dropped.", "", "Zero parts are let by."]


def test_a_common_outcome_proves_a_mistake_only_if_all_passed_cases_fit():
    exercise = split_exercise()
    only_nothing = replace(exercise, wrong=exercise.wrong[:1])
    answer = messages(only_nothing, lambda n, parts: split(n, parts) if parts else [])
    assert answer == ["", "", "it should raise ValueError here, and did not"]
    assert messages(only_nothing, lambda n, parts: [])[2] == "It always gives nothing."


def test_the_mistake_that_explains_most_cases_is_reported():
    exercise = split_exercise()
    both = replace(exercise, wrong=(replace(exercise.wrong[0], why="First."), *exercise.wrong))
    assert messages(both, lambda n, parts: [])[0] == "First."
    told = messages(exercise, lambda n, parts: split(n, parts)[::-1] if parts else [])
    assert told == ["The rest goes to the last.", "", "Zero parts are let by."]


def test_an_exception_is_a_known_mistake_by_type_and_message():
    def other_name(n, parts):
        for i in range(parts):
            rest = rest - i  # noqa: F821, F841
        return split(n, parts)

    def other_error(n, parts):
        if parts:
            raise UnboundLocalError("of another kind")
        return split(n, parts)

    exercise = split_exercise()
    assert messages(exercise, other_name)[0].endswith(". A name is used before it has a value.")
    assert messages(exercise, other_error)[0].startswith("it raised UnboundLocalError: of another")
    assert "A name" not in messages(exercise, other_error)[0]


def test_a_recognised_mistake_chooses_its_hints():
    exercise = split_exercise()
    report = check.run(exercise, lambda n, parts: [n // max(parts, 1)] * parts)
    assert report.diagnosed is report.rows[0]
    assert exercise.ladder("value", report.diagnosed.mistake)[0] == "rest 1"
    report = check.run(exercise, lambda n, parts: split(n, parts)[::-1])
    assert exercise.ladder("value", report.diagnosed.mistake) == ("one", "two", "three")
    assert exercise.ladder("value") == ("value 1", "value 2", "value 3")


@pytest.mark.parametrize("hints", ["nowhere", ("only", "two")])
def test_a_mistake_must_name_existing_hints(hints):
    exercise = split_exercise()
    with pytest.raises(CourseError, match="'split' has no hints"):
        replace(exercise, wrong=(replace(exercise.wrong[0], hints=hints),))


def test_changing_the_inputs_fails_an_otherwise_right_answer(tried):
    report = tried("def scale_rows(x, f):\n    return x.mul_(f[:, None])")
    assert message(report) == "the result is right, but it changed its inputs: work on a copy"


def test_a_message_of_several_rows_is_written_once(tried):
    report = tried("def scale_rows(x, f):\n    raise ValueError('no')")
    first, second = report.rows
    assert first.message == second.message == message(report)
    assert report.told == [message(report), "as above"]
    for shown in (report.text(), report.html()):
        assert shown.count("it raised ValueError: no") == 1
        assert shown.count("as above") == 1


def test_rows_show_the_inputs(tried):
    report = tried("def scale_rows(x, f):\n    return x")
    inputs = "x = float32 [3, 2] = [[0, 1], [2, 3], [4, 5]], factors = float32 [3] = [1, 2, 3]"
    assert report.rows[0].inputs == inputs
    assert f"  the inputs: {inputs}" in report.text()
    assert inputs in report.html()


@pytest.mark.parametrize(
    ("case", "inputs"),
    [
        (Case("", (3, "ab"), {"c": [1, 2]}), "n = 3, text = 'ab', c = [1, 2]"),
        (Case("", (3,), call=lambda answer, tokens, dtype: 0), "tokens = 3"),
        (Case("", (3, 4), call=lambda answer, *sizes: 0), "3, 4"),
        (Case("", (object(), int, None, torch.float16)), "c = None, float16"),
        (Case("ab", ("ab", 3)), "text = 3"),
        (Case("", (3,), inputs="a pool of 3"), "a pool of 3"),
        (Case("", (3,), inputs=""), ""),
    ],
)
def test_inputs_are_named_and_short(case, inputs):
    def answer(n, text, c=None):
        return n

    exercise = Exercise("answer", lambda: [case], {"value": ("a", "b", "c")}, solution=answer)
    assert check.run(exercise, lambda *args, **kwargs: 1).rows[0].inputs == inputs


def test_a_row_is_cut_around_what_differs():
    tokens = list(range(100, 160))
    hints = {"value": ("a", "b", "c")}
    exercise = Exercise("ids", lambda: [Case("60 ids")], hints, solution=lambda: tokens)
    [row] = check.run(exercise, lambda: [*tokens[:40], 7, *tokens[41:]]).rows
    assert "139, 140, 141" in row.expected
    assert "139, 7, 141" in row.got
    assert row.message == "item 40 of the list: expected 140, got 7"


def test_prints_are_shown_in_the_row_and_cut(tried, capsys):
    report = tried("def scale_rows(x, f):\n    print('shape', *x.shape)\n    return x * f[:, None]")
    assert report.status == "passed"
    assert report.rows[0].printed == "shape 3 2"
    assert "it printed: shape 3 2" in report.text()
    assert "shape 3 2" in report.html()
    loud = tried("def scale_rows(x, f):\n    print('a' * 10**6)\n    return x")
    assert len(loud.text()) < 2000
    assert capsys.readouterr().out == ""


LOOPS = {
    "plain": "    while True:\n        pass",
    "sleeping": "    time.sleep(60)",
    "bare except": "    while True:\n        try:\n            time.sleep(0.001)\n"
    "        except:\n            pass",
    "one line": "    while True:\n        try: x + 1\n        except: pass",
    "nested": "    while True:\n        try:\n            try:\n                time.sleep(0.001)\n"
    "            except:\n                pass\n        except BaseException:\n            x = x",
    "finally": "    while True:\n        try:\n            x = x + 1\n        finally:\n"
    "            continue",
    "helper": "    def step():\n        try:\n            time.sleep(0.001)\n"
    "        except BaseException:\n            return\n    while True:\n        step()",
    "prints": "    while True:\n        print('again')",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_never_ends_is_stopped(tried, loop):
    begin = time.monotonic()
    report = tried(f"def scale_rows(x, f):\n{LOOPS[loop]}")
    assert time.monotonic() - begin < 8
    assert message(report) == "it ran over the time limit: is there a loop that never ends?"
    assert report.rows[1].verdict == "not run"


def test_away_from_the_main_thread_a_loop_ends_or_the_row_says_it_does_not(tried):
    reports = []
    for body in (LOOPS["plain"], "    t = time.time()\n    while time.time() < t + 4:\n"
                 "        try: time.sleep(0.01)\n        except: time.sleep(3)"):  # fmt: skip
        source = f"def scale_rows(x, f):\n{body}"
        thread = threading.Thread(target=lambda s=source: reports.append(tried(s)))
        thread.start()
        thread.join(20)
    assert message(reports[0]) == "it ran over the time limit: is there a loop that never ends?"
    assert "could not be stopped" in message(reports[1])


def test_an_interrupt_reaches_the_learner(tried):
    with pytest.raises(KeyboardInterrupt):
        tried("def scale_rows(x, f):\n    raise KeyboardInterrupt")


def test_a_result_that_cannot_be_compared_or_shown_is_a_row(tried):
    report = tried(
        "class Odd:\n    def __repr__(self):\n        raise ValueError\n    __eq__ = __repr__\n"
        "def scale_rows(x, f):\n    return Odd()"
    )
    assert message(report) == "it returns an Odd where a tensor is expected"


def test_random_answers_repeat_and_leave_the_notebook_s_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    draw = guarded(lambda: torch.rand(3)).value
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(guarded(lambda: torch.rand(3)).value, draw)


def test_a_method_may_be_written_as_a_class_or_as_a_function(toy, cell):
    exercise = toy.day.EXERCISES[1]
    grown = "class Counter(Counter):\n    def step(self, by):\n"
    grown += "        self.count = self.count + by\n        return self.count\n"
    space = {"__name__": "__main__", "Counter": toy.engine.Counter}
    assert check.run(exercise, cell(grown, space).Counter).status == "passed"
    plain = "def step(self, by):\n    self.count = by + self.count\n    return self.count\n"
    assert check.run(exercise, cell(plain).step).status == "passed"
    assert check.run(exercise, cell(plain.replace("+", "-")).step).status == "failed"


def test_a_class_without_the_method_is_not_an_answer(toy, cell):
    space = {"__name__": "__main__", "Counter": toy.engine.Counter}
    report = check.run(
        toy.day.EXERCISES[1], cell("class Counter(Counter):\n    pass", space).Counter
    )
    told = "the class does not define the method `step`"
    assert report.text() == f"Counter: not attempted yet, {told}"
    assert "`" not in report.html()


def test_an_expected_exception_must_be_raised_and_name_its_cause():
    def half(n):
        if n % 2:
            raise ValueError(f"n is odd: {n}")
        return n // 2

    def cases():
        return [Case("odd", (3,), expected=raises(ValueError, "n is")), Case("even", (4,))]

    exercise = Exercise("half", cases, {"value": ("a", "b", "c")}, solution=half)
    assert check.run(exercise, lambda n: half(n)).status == "passed"
    assert "it should raise ValueError here, and did not" in message(
        check.run(exercise, lambda n: n // 2)
    )
    assert "should name n is" in message(
        check.run(exercise, lambda n: 1 / 0 if n < 0 else raise_())
    )


def raise_():
    raise ValueError("no")


def test_the_text_is_the_same_each_time_and_holds_no_address(tried):
    source = "def scale_rows(x, f):\n    raise ValueError(object())"
    texts = {tried(source).text(), tried(source).text()}
    assert len(texts) == 1
    assert "0x" not in texts.pop()


def test_big_tensors_are_shown_by_their_shape():
    assert short(torch.zeros(40, 50)) == "float32 [40, 50]"
    assert short(torch.tensor([1.5, 2.0])) == "float32 [2] = [1.5, 2]"
    assert len(short(list(range(10_000)))) <= 44
    assert short({"b": 1, "a": (2,)}) == "{'b': 1, 'a': (2,)}"


@pytest.mark.parametrize(
    ("got", "expected", "sentence"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "the key 'b' is missing"),
        ({"a": [1, 3]}, {"a": [1, 2]}, "item 1 of 'a': expected 2, got 3"),
        ([1, 3], [0, 3], "item 0 of the list: expected 0, got 1"),
        (([1, 2], 3), ([1, 4], 3), "item 1 of item 0 of the tuple: expected 4, got 2"),
        ({3: {"x": None}}, {3: {"x": [1]}}, "'x' of key 3: expected [1], got None"),
        ([[1], "a"], [[1], 7], "item 1 of the list: a str where a number is expected"),
        ({"a": [1]}, {"a": [1, 2]}, "'a': wrong length: expected 2, got 1"),
        (["abc"], ["abd"], "item 0 of the list: differs from character 2: expected 'abd'"),
        ((1, 2), [1, 2], "it returns a tuple where a list is expected"),
        ([1], [1, 2], "wrong length: expected 2, got 1"),
        ("abc", "abd", "differs from character 2: expected 'abd', got 'abc'"),
        (1, True, "expected True, got 1"),
        (float("nan"), 2.0, "NaN, expected 2"),
        (2.0, 2, None),
        (np.array([1, 2]), np.array([1, 3]), "1 of 2 values differ, first at [1]"),
        ([1, 2], np.array([1, 2]), "it returns a list where an array is expected"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.zeros(2, 3), torch.zeros(3, 2), "wrong shape: expected [3, 2], got [2, 3]"),
    ],
)
def test_a_difference_is_one_sentence(got, expected, sentence):
    told = exact(got, expected)
    assert told == sentence if sentence is None else told.startswith(sentence)


def test_a_pair_is_cut_around_its_first_difference():
    one, other = list(range(100)), list(range(100))
    other[50] = 7
    for shown, item in zip(contrast(one, other), ("50", "7"), strict=True):
        assert shown.startswith("...") and shown.endswith("...")
        assert f"49, {item}, 51" in shown
        assert len(shown) <= 44
    words = "the quick brown fox jumps over the lazy dog " * 4
    shown, changed = contrast(words, words.replace("dog", "cat"))
    assert "lazy dog the" in shown
    assert "lazy cat the" in changed
    assert contrast("short", "other") == ("'short'", "'other'")
    assert contrast([1] * 30, [1] * 31)[0].endswith("1, 1]")
    assert contrast(one, None)[1] == "None"
    same = torch.zeros(40, 50), torch.ones(40, 50)
    assert contrast(*same) == ("float32 [40, 50]", "float32 [40, 50]")


def test_close_accepts_differences_up_to_its_tolerance():
    assert close(atol=1e-3, rtol=0)(torch.tensor([1.0005]), torch.tensor([1.0])) is None
    assert close(atol=1e-4, rtol=0)(torch.tensor([1.0005]), torch.tensor([1.0]))
    assert close(atol=0, rtol=1e-2)(100.5, 100) is None
