"""Lands cells: reading their definitions, comparing them, and the definitions that must land."""

from pathlib import Path

import pytest

from nanoserve.course import lands

ENGINE = '''"""Layers."""

import torch

__all__ = ["norm"]
LIMIT: int = 3


def norm(x):
    """Scale x."""
    # the mean, not the sum
    return x / LIMIT


@decorated
class Model:
    """A model."""

    size: int = 2

    def forward(self, x):
        return norm(x)

    @property
    def depth(self):
        return 1
'''

TWIN = '''# %% [markdown]
# # Day 1

# %%
# lands in nanoserve/layers.py: LIMIT, norm
LIMIT: int = 3


def norm(x):
    """Scale x."""
    # the mean, not the sum
    return x / LIMIT


# %% [markdown]
# text

# %% jupyter={"source_hidden": true}
# lands in nanoserve/layers.py: Model
@decorated
class Model:
    """A model."""

    size: int = 2

    def forward(self, x):
        return norm(x)


# %%
# lands in nanoserve/layers.py: Model.depth
class Model(Model):
    @property
    def depth(self):
        return 1
'''


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of one engine file and one day whose lands cells are up to date."""
    (tmp_path / "nanoserve/course").mkdir(parents=True)
    (tmp_path / "notebooks/source").mkdir(parents=True)
    (tmp_path / "nanoserve/layers.py").write_text(ENGINE)
    (tmp_path / "notebooks/source/day01_layers.py").write_text(TWIN)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def engine(clone: Path) -> Path:
    return clone / "nanoserve/layers.py"


def day(clone: Path, number: int = 1) -> Path:
    return clone / f"notebooks/source/day{number:02}_layers.py"


def test_this_repository_lands_every_definition_once():
    assert lands.problems() == []


def test_an_up_to_date_clone_has_no_problems(clone):
    assert lands.problems(clone) == []


def test_a_file_gives_functions_constants_class_heads_and_methods():
    found = lands.definitions(ENGINE, "layers.py")
    assert list(found) == ["LIMIT", "norm", "Model", "Model.forward", "Model.depth"]
    assert (
        found["Model"].text == '@decorated\nclass Model:\n    """A model."""\n\n    size: int = 2'
    )
    assert found["Model.depth"].text.startswith("    @property")


def test_a_class_without_fields_keeps_a_class_line_of_many_lines():
    source = "class A(\n    B,\n):\n    # about f\n    def f(self): ...\n"
    assert lands.definitions(source, "x")["A"].text == "class A(\n    B,\n):"


def test_assigned_operators_count_as_methods_and_fields_below_a_method_do_not():
    source = (
        "class A:\n    x = 1\n\n    def __add__(self, b): ...\n\n    __radd__ = __add__\n"
        "    __lt__, __gt__ = pair(f)\n"
    )
    assert list(lands.definitions(source, "x")) == [
        "A", "A.__add__", "A.__radd__", "A.__lt__", "A.__gt__",
    ]  # fmt: skip
    with pytest.raises(lands.LandsError, match="fields below a method"):
        lands.definitions(source + "    y = 2\n", "x")


def test_imports_alone_in_a_try_are_no_definition_but_a_fallback_is():
    source = "try:\n    import triton\nexcept ImportError:\n    triton = None\n"
    assert list(lands.definitions(source, "x")) == ["triton"]
    assert not lands.definitions("try:\n    import a\nexcept ImportError:\n    import b\n", "x")
    assert not lands.definitions("if TYPE_CHECKING:\n    X = 1\n", "x")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# the mean, not the sum", "# the sum"),
        ("Scale x.", "Scale."),
        ("size: int = 2", "size: int = 4"),
        ("@decorated\n", ""),
        ("LIMIT: int = 3", "LIMIT = 3"),
        ("    @property\n", ""),
    ],
    ids=["comment", "docstring", "field", "decorator", "constant", "method"],
)
def test_one_changed_word_is_found_and_make_sync_corrects_it(clone, old, new):
    edit(engine(clone), old, new)
    (problem,) = lands.problems(clone)
    assert "day01_layers, code cell" in problem
    assert "differs from nanoserve/layers.py" in problem
    day(clone).write_text(lands.rewrite(day(clone).read_text(), "day01_layers", clone))
    assert lands.problems(clone) == []


def test_a_skeleton_is_filled_in(clone):
    skeleton = """# %%
# lands in nanoserve/layers.py
class Model:
    def forward(self): ...
    @property
    def depth(self): ...
"""
    filled = "# %%\n# lands in nanoserve/layers.py: Model\n" + ENGINE[ENGINE.index("@decorated") :]
    assert lands.rewrite(skeleton, "day01_layers", clone) == filled


def test_rewriting_an_up_to_date_twin_changes_nothing():
    for twin in lands.twins():
        text = twin.read_text(encoding="utf-8")
        assert lands.rewrite(text, twin.stem) == text


def test_a_new_definition_must_land(clone):
    engine(clone).write_text(ENGINE + "\n\n_hidden = 1\n")
    assert lands.problems(clone) == ["nanoserve/layers.py: _hidden lands in no notebook"]


def test_a_new_method_must_land(clone):
    engine(clone).write_text(ENGINE + "\n    def width(self): ...\n")
    assert lands.problems(clone) == ["nanoserve/layers.py: Model.width lands in no notebook"]


def test_nothing_lands_twice(clone):
    day(clone, 2).write_text("# %%\n# lands in nanoserve/layers.py\nLIMIT: int = 3\n")
    (problem,) = lands.problems(clone)
    assert problem == (
        "nanoserve/layers.py: LIMIT lands twice: "
        "day01_layers, code cell 1 (line 5) and day02_layers, code cell 1 (line 2)"
    )


def test_a_definition_that_the_package_lacks_is_named(clone):
    edit(engine(clone), "LIMIT: int = 3\n", "")
    assert lands.problems(clone) == [
        "day01_layers, code cell 1 (line 5): nanoserve/layers.py has no LIMIT"
    ]


def test_a_lands_cell_holds_definitions_only(clone):
    edit(day(clone), "LIMIT: int = 3\n", "LIMIT: int = 3\nprint(LIMIT)\n")
    assert "this is not a definition: print(LIMIT)" in lands.problems(clone)[0]


def test_a_piece_of_a_class_holds_methods_only(clone):
    edit(day(clone), "class Model(Model):\n", "class Model(Model):\n    width: int = 1\n")
    assert "may hold methods only" in lands.problems(clone)[0]


# First lines


def test_the_first_line_of_a_lands_cell_names_what_the_cell_holds(clone):
    stale = TWIN.replace("layers.py: Model.depth", "layers.py: Model.width")
    assert lands.rewrite(stale, "day01_layers", clone) == TWIN
    bare = TWIN.replace(": LIMIT, norm", "").replace(": Model.depth", "").replace(": Model\n", "\n")
    assert lands.rewrite(bare, "day01_layers", clone) == TWIN
    assert lands.problems(clone) == []  # names that are out of date are `sync --check`'s to list


@pytest.mark.parametrize(
    ("names", "width", "short"),
    [
        (["A", "A.f", "A._g"], 9, "A"),
        (["A.f", "A.f'", "A.g"], 9, "A.f, A.g"),
        (["one", "_two", "three"], 16, "one, _two, three"),
        (["one", "_two", "three"], 15, "one, three"),
        (["one", "two", "three"], 14, "one and 2 more"),
        (["_one", "_two"], 10, "_one, _two"),
    ],
)
def test_names_that_do_not_fit_are_counted(names, width, short):
    assert lands._short(names, width) == short


def test_a_folded_solution_gets_a_first_line_that_names_it(clone):
    fold = '# %% jupyter={"source_hidden": true}\n'
    named = f"{fold}# solution: a, b\nimport os\n\n\ndef a(): ...\n\n\ndef b(): ...\n"
    for first in ("", "# solution\n", "# solution: c\n"):
        text = named.replace("# solution: a, b\n", first)
        assert lands.rewrite(text, "day01_layers", clone) == named
    assert lands.unnamed_folds(named) == []


def test_a_folded_cell_of_another_kind_keeps_its_own_first_line_and_needs_one(clone):
    fold = '# %% jupyter={"source_hidden": true}\n'
    named = f"{fold}# Draws the two curves.\nfig, ax = figure()\n"
    assert lands.rewrite(named, "day01_layers", clone) == named
    assert lands.unnamed_folds(named) == []
    bare = f"{fold}fig, ax = figure()\n\n# %%\nx = 1\n"
    assert lands.rewrite(bare, "day01_layers", clone) == bare
    assert lands.unnamed_folds(bare) == ["fig, ax = figure()"]


def test_no_learner_reads_a_linters_marker():
    engine = [
        path
        for path in (lands.ROOT / "nanoserve").rglob("*.py")
        if "course" not in path.parts and path.name not in lands.EXEMPT
    ]
    for path in [*lands.twins(), *engine]:
        text = path.read_text(encoding="utf-8")
        for marker in ("noqa", "fmt: skip", "fmt: off", "type: ignore", "NBVAL"):
            assert marker not in text, f"{path.name}: {marker} belongs into pyproject.toml or a tag"


def test_drawing_code_of_more_than_eight_lines_is_folded():
    for twin in lands.twins():
        for chunk in twin.read_text(encoding="utf-8").split("\n# %%")[1:]:
            head, _, body = chunk.partition("\n")
            lines = [n for n in body.splitlines() if n.strip() and not n.startswith("#")]
            if "[markdown]" not in head and "\nfig\n" in f"{body}\n" and len(lines) > 8:
                assert lands.is_folded(head), f"{twin.stem}: {lines[0]}"


# until day N


UNTIL = "# %%\n# until day 1: lands in nanoserve/layers.py: norm\ndef norm(x):\n    return x\n"


def test_until_a_later_day_a_cell_is_not_compared(clone):
    day(clone, 0).write_text(UNTIL)
    assert lands.problems(clone) == []
    assert lands.rewrite(UNTIL, "day00_layers", clone) == UNTIL


def test_the_day_that_until_names_must_land_it(clone):
    day(clone, 0).write_text(UNTIL.replace("def norm", "def other"))
    assert lands.problems(clone) == [
        "day00_layers, code cell 1 (line 2): day 1 lands no other in nanoserve/layers.py"
    ]


def test_the_day_that_until_names_may_hold_it_until_yet_another(clone):
    day(clone, 0).write_text(UNTIL.replace("day 1", "day 2"))
    day(clone, 2).write_text(UNTIL.replace("day 1", "day 3"))
    assert lands.problems(clone) == [
        "day02_layers, code cell 1 (line 2): day 3 lands no norm in nanoserve/layers.py"
    ]


def test_until_names_a_later_day(clone):
    day(clone, 3).write_text(UNTIL)
    assert lands.problems(clone) == [
        "day03_layers, code cell 1 (line 2): until day 1 is not later than its own day"
    ]


# Appendices


def appendix(clone: Path, text: str, letter: str = "a") -> None:
    (clone / f"notebooks/source/appendix_{letter}_more.py").write_text(text)


LIMIT = "# %%\n# lands in nanoserve/layers.py: LIMIT\nLIMIT: int = 3\n"


def test_what_lands_in_an_appendix_is_taught_and_lands_nowhere_else(clone):
    appendix(clone, LIMIT)
    assert lands.problems(clone) == [
        "nanoserve/layers.py: LIMIT lands twice: "
        "day01_layers, code cell 1 (line 5) and appendix_a_more, code cell 1 (line 2)"
    ]
    edit(day(clone), "LIMIT: int = 3\n\n\n", "")
    assert lands.problems(clone) == []
    edit(engine(clone), "LIMIT: int = 3", "LIMIT: int = 4")
    (problem,) = lands.problems(clone)
    assert "appendix_a_more, code cell 1 (line 2): LIMIT differs" in problem


def test_appendices_come_after_the_days(clone):
    appendix(clone, LIMIT)
    day(clone, 2).write_text("")
    assert [path.stem for path in lands.twins(clone)] == [
        "day01_layers", "day02_layers", "appendix_a_more",
    ]  # fmt: skip


IN_APPENDIX = "# %%\n# until appendix a: lands in nanoserve/layers.py: LIMIT\nLIMIT = 2\n"


def test_an_earlier_form_may_stand_until_an_appendix(clone):
    edit(day(clone), "LIMIT: int = 3\n\n\n", "")
    appendix(clone, LIMIT)
    day(clone, 22).write_text(IN_APPENDIX)
    assert lands.problems(clone) == []
    assert lands.rewrite(IN_APPENDIX, "day22_layers", clone) == IN_APPENDIX
    day(clone, 22).write_text(IN_APPENDIX.replace("LIMIT", "other"))
    assert lands.problems(clone) == [
        "day22_layers, code cell 1 (line 2): appendix a lands no other in nanoserve/layers.py"
    ]


def test_an_appendix_stands_between_the_last_day_that_it_needs_and_the_next(clone):
    edit(day(clone), "LIMIT: int = 3\n\n\n", "")
    appendix(clone, LIMIT)
    day(clone, 23).write_text(IN_APPENDIX)
    assert lands.problems(clone) == [
        "day23_layers, code cell 1 (line 2): until appendix a is not later than its own day"
    ]
    day(clone, 23).write_text(LIMIT)
    appendix(clone, LIMIT.replace("# lands", "# until day 23: lands"))
    assert lands.problems(clone) == []


def test_an_appendix_that_the_curriculum_lacks_is_named(clone):
    appendix(clone, LIMIT, "z")
    assert "appendix_z_more: the curriculum has no Appendix Z" in lands.problems(clone)


# untaught.txt


def untaught(clone: Path, text: str) -> None:
    (clone / "nanoserve/course/untaught.txt").write_text(text)


def test_a_definition_in_untaught_txt_need_not_land(clone):
    engine(clone).write_text(ENGINE + "\n\nclass Later:\n    def f(self): ...\n")
    untaught(clone, "nanoserve/layers.py: Later  # day 9\n")
    assert lands.problems(clone) == []


def test_the_list_only_shrinks(clone):
    untaught(clone, "nanoserve/layers.py: norm  # day 1\nnanoserve/layers.py: gone\n")
    assert lands.problems(clone) == [
        "untaught.txt: nanoserve/layers.py has no gone; take the line off the list",
        "untaught.txt: nanoserve/layers.py: norm lands in day01_layers, code cell 1 (line 5); "
        "take it off the list",
    ]
