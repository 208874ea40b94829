"""Where a day says that the engine runs with the learner's answer, the engine calls it.

A day's cell with `today.mine(` runs as it stands in the twin, after the statements of earlier
cells that define what it uses. The answers are the package's own definitions.
"""

import ast
import linecache
import re
import symtable
import sys
from types import ModuleType

import pytest

from nanoserve.course import answers, day, lands
from nanoserve.course.exercises import exercises_of
from nanoserve.course.source import _global_names
from nanoserve.course.store import write_atomically

ANSWER = "from nanoserve.course.exercise import locate\n\n{name} = locate({target!r})[2]\n"
EVERYTHING = {25: {"paged_attention_kernel"}}  # mine(everything=True): what the text promises


def code_cells(twin):
    """The code cells of a percent twin, without lines that only a notebook understands."""
    for chunk in re.split(r"(?m)^# %%", twin.read_text(encoding="utf-8")):
        head, _, body = chunk.partition("\n")
        if "[markdown]" not in head:
            yield re.sub(r"(?m)^[%!].*$", "", body)


def cells_with_mine():
    for twin in lands.twins():
        for number, cell in enumerate(code_cells(twin)):
            if re.search(r"(?m)^with .*today\.mine\(", cell):
                yield pytest.param(twin, number, id=f"{twin.stem[:5]}-cell{number}")


def bound_by(node):
    """The names that statements bind at the top level."""
    table = symtable.symtable(ast.unparse(node), "<cell>", "exec")
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


def surroundings(before, cell):
    """The statements of earlier cells that define what a cell uses, in their order."""
    needed, kept = _global_names(cell) - bound_by(ast.parse(cell)) - {"today"}, []
    for source in reversed(before):
        waiting = [s for s in ast.parse(source).body if not is_stub(s)]
        found, fresh = {}, {}
        while chosen := [
            s for s in waiting if bound_by(s) & needed
        ]:  # a function may use a later one
            for statement in chosen:
                waiting.remove(statement)
                bound, uses = bound_by(statement), _global_names(ast.unparse(statement)) - {"today"}
                found[statement.lineno] = statement
                fresh |= dict.fromkeys(bound - uses)
                needed |= uses
        needed -= fresh.keys()
        kept = [found[line] for line in sorted(found)] + kept
    return kept


def is_stub(statement):
    return "NotImplementedError('your turn')" in ast.unparse(statement)


@pytest.mark.parametrize(("twin", "number"), list(cells_with_mine()))
def test_the_engine_calls_the_answers_of_the_day(twin, number, work, monkeypatch):
    day_number = lands.day_number(twin.stem)
    cells = list(code_cells(twin))
    today = day(day_number)
    ours = [e for e in exercises_of(day_number) if e.target]
    others = [e for e in exercises_of(22) if e.name in EVERYTHING.get(day_number, ())]
    for owner, exercises in ((day_number, ours), (22, others)):
        for exercise in exercises:
            source = ANSWER.format(name=exercise.name, target=exercise.target)
            write_atomically(answers.answer_path(owner, exercise.name), source)
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    module.today = today
    counted = []
    monkeypatch.setattr(answers.Answer, "told", property(lambda a: counted.append(a) or ""))
    tree = ast.Module(surroundings(cells[:number], cells[number]), [])
    for source in (ast.unparse(tree), cells[number]):
        file = f"<{twin.stem}, {len(linecache.cache)}>"
        linecache.cache[file] = (0, None, source.splitlines(keepends=True), file)  # for kernels
        exec(compile(source, file, "exec"), module.__dict__)
    calls = {answer.exercise.name: answer.calls for answer in counted}
    expected = EVERYTHING.get(day_number, set()) | {exercise.name for exercise in ours}
    assert calls.keys() == expected
    assert {name for name in expected if not calls[name]} == set(), "never called"
