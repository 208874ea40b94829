"""The mutation tool: each operator on small code, survivors of a weak check, their list."""

import textwrap
from dataclasses import replace

import pytest
import torch

from nanoserve.course.exercise import Case, Exercise
from tests import mutants
from tests.mutants import Answer, Result, examine, read_equivalents, sorted_out
from tests.mutation import Mutant, mutants_of


def changes(source, operator):
    """(old, new) of every mutant of this kind."""
    found = mutants_of(textwrap.dedent(source))
    return {(mutant.old, mutant.new) for mutant in found if mutant.operator == operator}


def toy(body, arguments="a, b"):
    return f"def toy({arguments}):\n" + textwrap.indent(textwrap.dedent(body), "    ")


OPERATORS = [
    ("changed comparison", "return a < b", "return a <= b"),
    ("changed comparison", "return a == b", "return a != b"),
    ("changed comparison", "return a is None", "return a is not None"),
    ("off by one", "return a[2]", "return a[3]"),
    ("off by one", "return a[-1]", "return a[-2]"),
    ("off by one", "return a[-1]", "return a[0]"),
    ("off by one", "return a[:b]", "return a[:b - 1]"),
    ("off by one", "return list(range(a, b))", "return list(range(a, b + 1))"),
    ("dropped bound", "return a[b:]", "return a[:]"),
    ("swapped names", "return a / b", "return b / a"),
    ("swapped name", "return k_pool - 1", "return v_pool - 1"),
    ("swapped name", "return a.k + a.v[0]", "return a.v + a.v[0]"),
    ("changed operator", "return a + b", "return a - b"),
    ("changed operator", "return a * b", "return a / b"),
    ("changed operator", "return a // b", "return a % b"),
    ("changed operator", "return a and b", "return a or b"),
    ("changed operator", "return not a", "return a"),
    ("changed operator", "a += b", "a = b"),
    ("dropped condition", "return a and b", "return a"),
    ("dropped operand", "return a * b", "return b"),
    ("dropped cast", "return a.float()", "return a"),
    ("dropped cast", "return int(a)", "return a"),
    ("dropped cast", "return torch.zeros(a, dtype=b)", "return torch.zeros(a)"),
    ("dropped copy", "return a.clone()", "return a"),
    ("dropped copy", "return list(a)", "return a"),
    ("dropped order", "return sorted(a)", "return a"),
    ("changed axis", "return a.sum(dim=1)", "return a.sum(dim=0)"),
    ("changed axis", "return a.softmax(-1)", "return a.softmax(-2)"),
    ("changed axis", "return a.transpose(1, 2)", "return a.transpose(0, 2)"),
    ("dropped argument", "return f(a, mask=b)", "return f(a)"),
    ("dropped argument", "return f(a, b)", "return f(a)"),
    ("swapped arguments", "return f(a, 7)", "return f(7, a)"),
    ("swapped elements", "return a[:, None]", "return a[None, :]"),
    ("swapped branches", "return a if b else None", "return None if b else a"),
    ("changed constant", "return 0.0", "return 1.0"),
    ("changed constant", 'return float("inf")', "return float('-inf')"),
    ("changed constant", "return f(True)", "return f(False)"),
    ("dropped minus", "return -a", "return a"),
    ("swapped function", "return a.max(b)", "return a.min(b)"),
    ("dropped element", "return [a, b]", "return [a]"),
]


@pytest.mark.parametrize(("operator", "old", "new"), OPERATORS)
def test_an_operator_changes_an_expression(operator, old, new):
    found = changes(toy(old, "a, b, k_pool=0, v_pool=0"), operator)
    assert new in {line for _, line in found}


@pytest.mark.parametrize(
    ("operator", "body", "old", "new"),
    [
        ("dropped statement", "a = b\nreturn a", "a = b", ""),
        ("dropped guard", "if a:\n    raise ValueError('no')\nreturn b",
         "if a: / raise ValueError(...)", ""),
        ("swapped branches", "if a:\n    b = 1\nreturn b", "if a:", "if not a:"),
        ("dropped branch", "if a:\n    b = 1\nelse:\n    b = 2\nreturn b", "else: / b = 2", ""),
        ("swapped statements", "a.x = 1\na.write(b)\nreturn a", "a.x = 1 / a.write(b)",
         "a.write(b) / a.x = 1"),
        ("swapped jump", "for x in a:\n    break\nreturn b", "break", "continue"),
    ],
)  # fmt: skip
def test_an_operator_changes_statements(operator, body, old, new):
    found = changes(toy(body), operator)
    assert (old, new) in found


def test_statements_that_do_not_depend_on_each_other_keep_their_order():
    assert not changes(toy("c = f(a)\nd = f(b)\nreturn c, d"), "swapped statements")
    assert not changes(toy("a.x = 1\na.y = b"), "swapped statements")
    assert changes(toy("a.x = b\nc = a.x\nreturn c"), "swapped statements")


def test_docstrings_annotations_and_messages_are_left_alone():
    source = '''
    @decorated(1)
    def toy(a: Block[3]) -> Shape[4]:
        """Seven, 7."""
        raise ValueError(f"not {a + 1}")
    '''
    assert {mutant.operator for mutant in mutants_of(textwrap.dedent(source))} == {
        "dropped statement"
    }


def test_a_swap_without_effect_is_no_mutant():
    for same in ("return a * b", "return a == b", "return max(a, b)", "return a - 2 + b"):
        assert not changes(toy(same), "swapped names"), same


def test_names_that_only_a_message_uses_are_not_mutated():
    body = """
    if a < 0:
        known = a in (b, 3)
        reason = 1 if known else 2
        raise ValueError(reason)
    return b
    """
    news = {mutant.new for mutant in mutants_of(toy(body))}
    assert not any("reason =" in new or "known =" in new for new in news)


def test_no_two_mutants_are_alike():
    found = mutants_of(toy("if a < b:\n    return a[0:b]\nreturn [a + 0, b - 1]"))
    assert len({mutant.source for mutant in found}) == len(found)


# running them ------------------------------------------------------------------------------------


def clip(x, low):
    """x, at least low."""
    return x if x > low else low


def exercise(*inputs, limit=10.0):
    cases = [Case(f"{x} at least {low}", (x, low), kind="one") for x, low in inputs]
    return Exercise("clip", lambda: cases, {"one": ("a", "b", "c")}, solution=clip, limit=limit)


def survivors(exercise):
    results = examine(exercise, mutants.answers_of(exercise))
    return {result.mutant.new for result in results if result.fate == "survived"}


def test_a_weak_check_has_a_survivor_and_a_strong_one_has_none():
    assert "return low if x > low else x" not in survivors(exercise((1, 2), (3, 2)))
    assert "return low" in survivors(exercise((1, 2)))
    assert "return low" not in survivors(exercise((1, 2), (3, 2)))


def test_the_survivor_that_is_equivalent_is_the_boundary():
    assert survivors(exercise((1, 2), (3, 2))) == {"return x if x >= low else low"}


def test_a_loop_that_never_ends_is_killed():
    def count(n):
        i = 0
        while i < n:
            i += 1
        return i

    cases = [Case("3", (3,), kind="one")]
    toy = Exercise("count", lambda: cases, {"one": ("a", "b", "c")}, solution=count)
    results = examine(replace(toy, limit=0.2), mutants.answers_of(toy))
    assert "too long" in {result.fate for result in results}
    assert {result.fate for result in results} <= {"killed", "too long", "survived"}


def test_a_method_is_handed_over_in_a_class_of_its_own_name(toy):
    step = toy.day.EXERCISES[1]
    answer = mutants.answers_of(step)[0]
    made = answer.built(answer.source.replace("+= by", "+= 2 * by"))
    assert made.__name__ == "Counter"
    assert issubclass(made, toy.engine.Counter)
    counter = made(1)
    assert counter.step(3) == 7
    fates = {result.mutant.new: result.fate for result in examine(step, [answer])}
    assert fates["self.count -= by"] == "killed"


def test_a_kernel_is_mutated_and_runs():
    from nanoserve.course.exercises.day21 import GATHER

    (answer,) = mutants.answers_of(GATHER)
    whole = Mutant("", "", "", answer.source)
    broken = replace(whole, source=answer.source.replace("position < kv_len", "position > kv_len"))
    assert list(mutants.fates(GATHER, [(answer, whole), (answer, broken)])) == [
        "survived", "killed",
    ]  # fmt: skip


def test_helpers_of_the_module_and_enclosing_names_are_found():
    factor = 3.0

    def times(x):
        return torch.mul(x, factor)

    toy = Exercise("times", list, {"one": ("a", "b", "c")}, solution=times)
    (answer,) = mutants.answers_of(toy)
    assert float(answer.built(answer.source)(torch.tensor(2.0))) == 6.0


def test_a_process_that_ends_counts_as_a_kill_and_the_rest_still_run(monkeypatch):
    work = [(Answer("package", "f", "", {}), Mutant("x", "a", str(i), "")) for i in range(3)]
    monkeypatch.setattr(mutants, "work_of", lambda *_: work)
    begun = []

    def listen(day, name, start, told):
        begun.append(start)
        told += ["killed"] if start == 0 else ["survived"]
        return True, ""

    monkeypatch.setattr(mutants, "_listen", listen)
    fates = [result.fate for result in mutants.run_exercise(21, "offsets_and_mask")]
    assert fates == ["killed", "crashed", "survived"]
    assert begun == [0, 2]


# the list of equivalents -------------------------------------------------------------------------


def survivor(old="a", new="b", answer="package"):
    return Result(answer, Mutant("changed comparison", old, new, ""), "survived")


def entry(old="a", new="b", **more):
    return {"exercise": "toy", "old": old, "new": new, "reason": "The same."} | more


def test_a_listed_survivor_is_equivalent_and_another_is_not():
    equivalent, left, complaints = sorted_out("toy", [survivor(), survivor(new="c")], [entry()])
    assert [result.mutant.new for result in equivalent] == ["b"]
    assert [result.mutant.new for result in left] == ["c"]
    assert complaints == []


def test_an_entry_for_one_answer_does_not_fit_another():
    _, left, complaints = sorted_out("toy", [survivor()], [entry(answer="solution")])
    assert len(left) == 1
    assert "stale" in complaints[0]


def test_an_entry_may_name_the_part_that_changes():
    one, other = survivor("n = k.shape[2]", "n = q.shape[2]"), survivor("f(k.shape[2])", "f(3)")
    part = {"exercise": "toy", "old_part": "k.shape[2]", "new_part": "q.shape[2]", "reason": "1"}
    equivalent, left, complaints = sorted_out("toy", [one, other], [part])
    assert (equivalent, left, complaints) == ([one], [other], [])
    assert "'k.shape[2]' -> 'q.shape[2]'" in sorted_out("toy", [other], [part])[2][0]


def test_an_entry_whose_mutant_is_killed_is_stale():
    killed = replace(survivor(), fate="killed")
    assert "stale" in sorted_out("toy", [killed], [entry()])[2][0]
    assert sorted_out("toy", [killed], [entry(exercise="other")])[2] == []


def test_an_entry_needs_a_reason():
    assert "without a reason" in sorted_out("toy", [survivor()], [entry(reason=" ")])[2][0]


def test_printed_entries_can_be_copied_into_the_list(tmp_path):
    result = survivor('x["a"]', "x['b']\\n")
    (tmp_path / "day07.toml").write_text(mutants.as_toml("toy", result), "utf-8")
    (read,) = read_equivalents(7, tmp_path)
    assert sorted_out("toy", [result], [read | {"reason": "Why."}])[0] == [result]
    assert read_equivalents(8, tmp_path) == []


def test_an_appendix_has_its_own_list_and_its_own_right_answers(tmp_path):
    (tmp_path / "appendix_a.toml").write_text(mutants.as_toml("toy", survivor()), "utf-8")
    assert len(read_equivalents("a", tmp_path)) == 1
    assert mutants.right_answers("z") == {}
    assert mutants.main(["appendix_a", "--exercise", "nonesuch"]) == 1
