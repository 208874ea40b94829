"""`make sync`: updated lands cells and notebooks, with outputs that are equal on any machine."""

import base64
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from nanoserve.course import publish, sync

TWIN = f"""# %% [markdown]
# # Day 1

{publish.SETUP_HEAD}
{publish.SETUP_CELL}
# %%
import os, pathlib

print(sorted(os.listdir(os.environ["NANOSERVE_WORK"])))

# %% jupyter={{"source_hidden": true}}
# lands in nanoserve/layers.py: norm
def norm(x):
    return x / 2


# %%
norm(8)
"""


def test_this_repository_is_up_to_date():
    assert sync.problems() == []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of one engine file and one twin, not synced yet."""
    (tmp_path / "nanoserve/course").mkdir(parents=True)
    (tmp_path / "notebooks/source").mkdir(parents=True)
    (tmp_path / "nanoserve/layers.py").write_text("def norm(x):\n    return x / 2\n")
    twin_of(tmp_path).write_text(TWIN)
    return tmp_path


def twin_of(clone: Path) -> Path:
    return clone / "notebooks/source/day01_x.py"


def notebook_of(clone: Path) -> Path:
    return clone / "notebooks/day01_x.ipynb"


def read(clone: Path):
    return nbformat.read(notebook_of(clone), as_version=4)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_sync_builds_and_runs_the_notebook_and_then_check_finds_nothing(clone):
    assert sync.problems(clone) == ["day01_x: has no notebook yet"]
    assert sync.main([], clone) == 0
    assert sync.problems(clone) == []
    code = [cell for cell in read(clone).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    assert code[1].outputs[0].text == "[]\n"  # an empty work folder
    assert code[3].outputs[0].data["text/plain"] == "4.0"
    assert code[2].metadata == {"jupyter": {"source_hidden": True}, "cellView": "form"}


def test_a_second_sync_changes_nothing_and_runs_nothing(clone, monkeypatch):
    sync.main([], clone)
    before = notebook_of(clone).read_bytes()
    monkeypatch.setattr(sync, "execute", None)
    assert sync.main([], clone) == 0
    assert notebook_of(clone).read_bytes() == before


def test_new_prose_runs_nothing_and_keeps_ids_and_outputs(clone, monkeypatch):
    sync.main([], clone)
    before = read(clone)
    edit(twin_of(clone), "# # Day 1\n", "# # Day 1, again\n")
    edit(twin_of(clone), "# %%\nimport os", "# %% [markdown]\n# And more.\n\n# %%\nimport os")
    assert sync.problems(clone) == ["day01_x: twin and notebook differ"]
    monkeypatch.setattr(sync, "execute", None)
    sync.main([], clone)
    after = read(clone)
    assert [cell.id for cell in after.cells][3:] == [cell.id for cell in before.cells][2:]
    assert [cell.id for cell in after.cells][:2] == [cell.id for cell in before.cells][:2]
    assert after.cells[-1].outputs == before.cells[-1].outputs
    assert sync.problems(clone) == []


def test_changed_code_is_noticed_and_run(clone):
    sync.main([], clone)
    edit(twin_of(clone), "norm(8)", "norm(6)")
    assert sync.problems(clone) == ["day01_x: its code changed since the notebook ran"]
    sync.main(["day01"], clone)
    assert read(clone).cells[-1].outputs[0].data["text/plain"] == "3.0"


def test_a_changed_engine_reaches_twin_and_notebook(clone):
    sync.main([], clone)
    (clone / "nanoserve/layers.py").write_text("def norm(x):\n    return x / 4\n")
    assert len(sync.problems(clone)) == 2
    assert sync.main([], clone) == 0
    assert "return x / 4" in twin_of(clone).read_text()
    assert read(clone).cells[-1].outputs[0].data["text/plain"] == "2.0"


def test_a_stamp_runs_nothing(clone, monkeypatch):
    sync.main([], clone)
    twin_of(clone).write_text(publish.stamp(TWIN, "day01_x", "ada/nanoserve"))
    monkeypatch.setattr(sync, "execute", None)
    assert sync.main([], clone) == 0
    assert 'REPOSITORY = "ada/nanoserve"' in read(clone).cells[1].source
    assert sync.problems(clone) == []


def test_a_notebook_without_a_twin_is_listed(clone):
    sync.main([], clone)
    (clone / "notebooks/day02_y.ipynb").write_text("{}")
    assert sync.problems(clone) == ["day02_y.ipynb has no twin under notebooks/source"]


def test_a_notebook_begins_with_the_set_up_cell_or_a_place_for_it(clone):
    twin_of(clone).write_text(TWIN.replace(publish.SETUP_CELL, "# (the set-up cell)\n"))
    sync.main([], clone)
    assert twin_of(clone).read_text() == TWIN
    assert sync.problems(clone) == []
    twin_of(clone).write_text(TWIN.replace(f"{publish.SETUP_HEAD}\n{publish.SETUP_CELL}", ""))
    sync.main([], clone)
    assert sync.problems(clone) == ["day01_x: the cell below its title is not the set-up cell"]


def test_an_appendix_is_synced_checked_and_listed_like_a_day(clone):
    other = clone / "notebooks/source/appendix_a_more.py"
    other.write_text(TWIN.replace("# # Day 1", "# # Appendix A").replace("def norm", "def half"))
    (clone / "nanoserve/layers.py").write_text(
        "def norm(x):\n    return x / 2\n\n\ndef half(x):\n    return x / 2\n"
    )
    edit(other, "norm(8)", "half(6)")
    assert "appendix_a_more: has no notebook yet" in sync.problems(clone)
    assert sync.main(["appendix_a"], clone) == 0
    notebook = nbformat.read(clone / "notebooks/appendix_a_more.ipynb", as_version=4)
    assert notebook.cells[-1].outputs[0].data["text/plain"] == "3.0"
    assert sync.problems(clone) == ["day01_x: has no notebook yet"]
    assert sync.main([], clone) == 0
    assert sync.problems(clone) == []
    (clone / "notebooks/appendix_b_stray.ipynb").write_text("{}")
    assert sync.problems(clone) == ["appendix_b_stray.ipynb has no twin under notebooks/source"]


def test_an_edited_output_is_listed_when_it_is_not_normal(clone):
    sync.main([], clone)
    edit(notebook_of(clone), '"4.0"', '"/home/ada/model"')
    (problem,) = sync.problems(clone)
    assert "day01_x, code cell 4: stores '/home/ada/model'" in problem


def test_a_failing_cell_leaves_the_notebook_as_it_was_and_says_which(clone, capsys):
    sync.main([], clone)
    before = notebook_of(clone).read_bytes()
    edit(twin_of(clone), "norm(8)", "norm(None)")
    assert sync.main([], clone) == 1
    assert "day01_x: not synced." in (out := capsys.readouterr().out)
    assert "norm(None)" in out
    assert notebook_of(clone).read_bytes() == before


def test_an_unknown_day_is_one_line(clone, capsys):
    assert sync.main(["day99"], clone) == 2
    assert capsys.readouterr().out == "no twin begins with 'day99'\n"


# Normalising


def normalised(*outputs, tags: tuple[str, ...] = ()):
    cell = new_code_cell("1", outputs=list(outputs), metadata={"tags": list(tags)})
    notebook = new_notebook(cells=[cell])
    sync.normalise(notebook, "day01_x")
    return notebook.cells[0]


def stream(text: str, name: str = "stdout"):
    return new_output("stream", name=name, text=text)


def test_times_widgets_and_fragments_are_removed():
    picture = base64.b64encode(b"png").decode()
    shown = new_output("display_data", {sync.WIDGET: {}, "image/png": picture, "text/plain": "W"})
    cell = new_code_cell("1", outputs=[stream("a"), stream("b\n"), shown])
    cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01"}
    notebook = new_notebook(cells=[cell])
    sync.normalise(notebook, "day01_x")
    assert cell.metadata == {}
    assert [out.get("text") for out in cell.outputs] == ["ab\n", None]
    assert cell.outputs[1].data == {"image/png": picture, "text/plain": "W"}


def test_stderr_is_refused_but_dropped_where_outputs_are_ignored():
    with pytest.raises(sync.SyncError, match="code cell 1: writes to stderr: a warning"):
        normalised(stream("a warning", "stderr"))
    assert normalised(stream("", "stderr"), tags=(sync.IGNORED,)).outputs == []


@pytest.mark.parametrize(
    "text",
    ["see /home/ada/x", "in '/Users/ada'", "C:\\Users\\ada", "<Thing at 0x7f00aa11>", "/tmp/x1"],
)
def test_outputs_that_differ_by_machine_are_refused(text):
    with pytest.raises(sync.SyncError, match="differs by machine"):
        normalised(stream(text))


def test_this_machines_names_are_refused(monkeypatch):
    monkeypatch.setattr(sync.platform, "node", lambda: "ada-laptop")
    with pytest.raises(sync.SyncError, match="'ada-laptop', a name of this machine"):
        normalised(stream("on ada-laptop."))


@pytest.mark.parametrize("text", ["work/answers/day01.py", "q/k/v", "0x10", "a: /b", "root mean"])
def test_outputs_that_only_look_personal_are_kept(text):
    assert normalised(stream(text)).outputs[0].text == text


def test_pictures_are_not_searched():
    data = {"image/png": "AAAA /tmp/x", "text/plain": "<Figure>"}
    assert normalised(new_output("display_data", data)).outputs[0].data == data


def test_an_error_and_a_large_notebook_are_refused():
    with pytest.raises(sync.SyncError, match="stores an error: ValueError: no"):
        normalised(new_output("error", ename="ValueError", evalue="no", traceback=[]))
    with pytest.raises(sync.SyncError, match="a notebook may have 400,000"):
        normalised(stream("x" * 400_000))


def test_a_map_that_lacks_a_day_which_is_out_is_noticed():
    def notebook(row: str):
        output = new_output("display_data", data={"text/plain": f"day  title\n{row}"})
        return new_notebook(cells=[new_code_cell("today.index()", outputs=[output])])

    assert sync.map_is_old(notebook("14   A pool of blocks  0 of 1     not out yet"))
    assert not sync.map_is_old(notebook("14   A pool of blocks  0 of 1     started"))
    assert not sync.map_is_old(notebook("99   Later                        not out yet"))


def test_a_map_that_lacks_an_appendix_which_is_out_is_noticed(clone):
    def notebook(row: str):
        output = new_output("display_data", data={"text/plain": f"day  title\n{row}"})
        return new_notebook(cells=[new_code_cell("today.progress()", outputs=[output])])

    row = "A    Inside tlsim         0 of 2     not out yet"
    assert not sync.map_is_old(notebook(row), clone)
    (clone / "notebooks/source/appendix_a_more.py").write_text(TWIN)
    assert sync.map_is_old(notebook(row), clone)
