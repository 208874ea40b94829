"""The set-up cell and the stamps of `make publish`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from nanoserve.course import lands, publish, sync

TWIN = f"""# %% [markdown]
# # Day 1
#
# Week 1

{publish.SETUP_HEAD}
{publish.SETUP_CELL}
# %%
print(1)
"""


def test_every_notebook_begins_with_the_set_up_cell_word_for_word():
    expected = publish.setup_cell(publish.stamped())
    for path in lands.notebooks():
        code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        assert code[0].source == expected.rstrip("\n"), path.name
        assert code[0].outputs == []
        assert code[0].metadata == {"jupyter": {"source_hidden": True}, "cellView": "form"}


def test_a_days_picture_follows_the_set_up_cell():
    for twin in lands.twins():
        cells = twin.read_text(encoding="utf-8").split("\n# %%")
        assert publish.is_setup(cells[2].partition("\n")[2]), twin.name
        assert "today.picture(" in cells[3], twin.name


def test_the_set_up_cell_is_short():
    assert len(publish.SETUP_CELL.splitlines()) <= 20


# What the cell does


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An empty folder without nanoserve, and a pip that only records its arguments."""
    pip = SimpleNamespace(calls=[], returncode=0, folder=tmp_path)

    def run(command, **kwargs):
        pip.calls.append(command)
        return SimpleNamespace(stdout="pip's own words", returncode=pip.returncode)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", run)
    return pip


def run_cell(repository: str = "") -> None:
    exec(compile(publish.setup_cell(repository), "set-up", "exec"), {})


def wheel(folder: Path, name: str, age: int) -> Path:
    path = folder / name
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_where_nanoserve_imports_it_does_nothing(bare, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    run_cell("ada/nanoserve")
    assert bare.calls == []
    assert capsys.readouterr().out == ""


def test_it_installs_the_newest_wheel_beside_the_notebook_and_prints_nothing(bare, capsys):
    wheel(bare.folder, "nanoserve-0.9.0-py3-none-any.whl", age=9)
    new = wheel(bare.folder, "nanoserve-0.10.0-py3-none-any.whl", age=1)
    run_cell("ada/nanoserve")
    (call,) = bare.calls
    assert call[:4] == [sys.executable, "-m", "pip", "install"]
    assert call[-1] == f"nanoserve[notebook] @ {new.as_uri()}"
    assert capsys.readouterr().out == ""


def test_without_a_wheel_it_installs_the_stamped_repository(bare):
    run_cell("ada/nanoserve")
    (call,) = bare.calls
    archive = "https://github.com/ada/nanoserve/archive/refs/heads/main.zip"
    assert call[-1] == f"nanoserve[notebook] @ {archive}"


def test_without_wheel_and_repository_it_stops_and_says_what_to_do(bare):
    with pytest.raises(ModuleNotFoundError, match=r"put a nanoserve-\*\.whl beside this notebook"):
        run_cell()
    assert bare.calls == []


def test_an_installer_that_fails_stops_the_notebook_with_its_own_words(bare):
    bare.returncode = 1
    with pytest.raises(
        RuntimeError, match=r"could not install nanoserve from \S+\npip's own words"
    ):
        run_cell("ada/nanoserve")


# Stamping


def test_a_stamp_sets_the_repository_and_the_badge():
    text = publish.stamp(TWIN, "day01_x", "ada/nanoserve")
    assert 'REPOSITORY = "ada/nanoserve"' in text
    assert (
        "# # Day 1\n#\n# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        "(https://colab.research.google.com/github/ada/nanoserve/blob/main/notebooks/day01_x.ipynb)\n"
        "#\n# Week 1\n"
    ) in text


def test_stamping_again_changes_nothing_and_another_name_replaces_the_first():
    once = publish.stamp(TWIN, "day01_x", "ada/nanoserve")
    assert publish.stamp(once, "day01_x", "ada/nanoserve") == once
    other = publish.stamp(once, "day01_x", "grace/course")
    assert "ada" not in other
    assert other == publish.stamp(TWIN, "day01_x", "grace/course")
    assert publish.stamp(other, "day01_x", "") == TWIN


def test_an_appendix_is_stamped_too(tmp_path):
    path = tmp_path / "notebooks/source/appendix_a_more.py"
    path.parent.mkdir(parents=True)
    path.write_text(TWIN)
    assert publish.stamp_all("ada/nanoserve", tmp_path) == 1
    assert "blob/main/notebooks/appendix_a_more.ipynb)" in path.read_text()
    assert publish.stamped(tmp_path) == "ada/nanoserve"


def test_an_outdated_set_up_cell_is_replaced():
    old = TWIN.replace("import importlib.util, subprocess, sys", "import os")
    old = old.replace(publish.SETUP_HEAD, '# %% tags=["setup"]')
    assert publish.stamp(old, "day01_x", "") == TWIN


@pytest.mark.parametrize("name", ["", "nanoserve", "https://github.com/a/b", "a/b/c", "a b/c"])
def test_a_repository_that_is_no_owner_and_name_is_one_clear_line(name, capsys):
    assert sync.main(["--stamp", name]) == 2
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "make publish REPO=ada/nanoserve" in out
    assert repr(name) in out
