"""Updates lands cells and notebooks from the package and the twins: `make sync`.

    python -m nanoserve.course.sync [dayNN | appendix_a ...] [--check] [--all] [--stamp OWNER/NAME]

For each percent twin: its lands cells get the package's present text, and its notebook is built
from the twin. The notebook runs from top to bottom if its code changed (always with --all). Its
outputs are normalised, so that they are the same on every machine. --check changes nothing, lists
the differences and exits with 1 if there are any. --stamp (`make publish`) first writes the
repository into every set-up cell and an "Open in Colab" badge under every title.
"""

import argparse
import difflib
import getpass
import hashlib
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from nanoserve.course import lands, publish
from nanoserve.course.lands import ROOT, twins

LIMIT_BYTES = 400_000
CELL_SECONDS = 300
IGNORED = "nbval-ignore-output"  # the tag of a cell whose output differs by machine
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"
_PERSONAL = re.compile(
    r"(?<![\w.])(?:/(?:home|root|Users|tmp|work|mnt|opt|var|private|usr)/|[A-Z]:\\)\w[^\s'\"<]*"
)
_NOT_OUT = re.compile(r"(?m)^(\d+|[A-Z]) .* not out yet$")  # a row of the map of days
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]{6,}")


class SyncError(ValueError):
    """A notebook that cannot be published in its present form; the message names the cell."""


def notebook_of(twin: Path) -> Path:
    """notebooks/dayNN_name.ipynb for notebooks/source/dayNN_name.py."""
    return twin.parents[1] / f"{twin.stem}.ipynb"


def in_step(twin: Path, root: Path = ROOT) -> str:
    """The twin's text with lands cells and set-up cell as in the package."""
    text = twin.read_text(encoding="utf-8")
    return lands.rewrite(publish.stamp(text, twin.stem, publish.stamped(root)), twin.stem, root)


def build(twin_text: str, old: NotebookNode | None) -> NotebookNode:
    """Build the notebook of a twin. Cells that did not change since `old` keep id and outputs."""
    new = jupytext.reads(twin_text, fmt="py:percent")
    new.nbformat, new.nbformat_minor = 4, 5
    for cell in new.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):  # folds the cell in JupyterLab
            cell.metadata["cellView"] = "form"  # folds the cell in Colab
    for cell in new.cells:
        cell["id"] = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
    old_cells = old.cells if old else []
    matcher = difflib.SequenceMatcher(None, _keys(old_cells), _keys(new.cells), autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        for before, after in zip(old_cells[i1:i2], new.cells[j1:j2], strict=False):
            if before.cell_type == after.cell_type:
                after["id"] = before.id
            if kind == "equal" and after.cell_type == "code":
                after.outputs, after.execution_count = before.outputs, before.execution_count
    _make_unique(new.cells)
    return new


def _make_unique(cells: list[NotebookNode]) -> None:
    """Make cell ids unique: a repeated id gets a number."""
    seen: set[str] = set()
    for cell in cells:
        start, number = cell.id, 1
        while cell.id in seen:
            number += 1
            cell["id"] = f"{start}-{number}"
        seen.add(cell.id)


def _keys(cells: list[NotebookNode]) -> list[tuple[str, str]]:
    """The keys by which cells are compared. Set-up cells are equal whatever their stamp."""
    return [
        (cell.cell_type, "set-up" if publish.is_setup(cell.source) else cell.source)
        for cell in cells
    ]


def code_changed(new: NotebookNode, old: NotebookNode | None) -> bool:
    """Whether a notebook must run: its code changed, or it has never run."""
    code = [key for key in _keys(new.cells) if key[0] == "code"]
    return (
        old is None
        or code != [key for key in _keys(old.cells) if key[0] == "code"]
        or any(cell.execution_count is None for cell in new.cells if cell.cell_type == "code")
    )


def map_is_old(notebook: NotebookNode, root: Path = ROOT) -> bool:
    """Whether a stored map of the days shows "not out yet" for a day that has a twin."""
    out = {str(lands.day_number(twin.stem)).upper() for twin in twins(root)}
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [output.get("data", {}).get("text/plain", "") for output in outputs]
    told = {sign for text in texts for sign in _NOT_OUT.findall(text)}
    return bool(told & out)


def execute(notebook: NotebookNode, name: str, folder: Path) -> None:
    """Run every cell in a kernel with an empty work folder; SyncError if a cell fails."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )
    with tempfile.TemporaryDirectory() as work:
        try:
            client.execute(env={**os.environ, "NANOSERVE_WORK": work})
        except CellExecutionError as error:
            raise SyncError(f"{name}: a cell fails:\n{error}") from None
        except (CellTimeoutError, DeadKernelError) as error:
            raise SyncError(f"{name}: {str(error).strip().splitlines()[0]}") from None


# Normalising -------------------------------------------------------------------------------------


def normalise(notebook: NotebookNode, name: str) -> None:
    """Make outputs the same on every machine, in place; SyncError for a forbidden output."""
    notebook.metadata = nbformat.from_dict(METADATA)
    number = 0
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        where = f"{name}, code cell {number}"
        ignored = IGNORED in cell.metadata.get("tags", ())
        cell.outputs = [_normal(out, number) for out in _merged(cell.outputs, where, ignored)]
        for output in cell.outputs:
            _refuse_personal(output, where)
    size = len(nbformat.writes(notebook).encode())
    if size > LIMIT_BYTES:
        raise SyncError(f"{name}: {size:,} bytes; a notebook may have {LIMIT_BYTES:,}")


def _merged(outputs: list[NotebookNode], where: str, ignored: bool) -> list[NotebookNode]:
    """The outputs, with neighbouring pieces of stdout joined; SyncError for errors and stderr."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "error":
            raise SyncError(f"{where}: stores an error: {output.ename}: {output.evalue}")
        if output.get("name") == "stderr":
            if ignored:
                continue
            raise SyncError(f"{where}: writes to stderr: {output.text.strip()[:200]}")
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def _normal(output: NotebookNode, number: int) -> NotebookNode:
    if "data" in output:
        output.data.pop(WIDGET, None)
        output.metadata.pop(WIDGET, None)
    if output.output_type == "execute_result":
        output.execution_count = number
    return output


def _refuse_personal(output: NotebookNode, where: str) -> None:
    """Raise SyncError for a path, an address, a host name or a user name in an output's text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind, value in data.items():
        if kind.startswith("image/") and kind != "image/svg+xml":
            continue
        text = str(value)
        if found := _PERSONAL.search(text) or _ADDRESS.search(text):
            raise SyncError(f"{where}: stores {found[0]!r}, which differs by machine")
        for personal in _names_of_this_machine():
            if re.search(rf"(?<!\w){re.escape(personal)}(?!\w)", text):
                raise SyncError(f"{where}: stores {personal!r}, a name of this machine")


def _names_of_this_machine() -> list[str]:
    """Host and user name, unless they look like a common word, and this machine's folders."""
    user = getpass.getuser()
    names = [platform.node(), user if user not in {"root", "user", "runner"} else ""]
    names = [name for name in names if len(name) > 3 and not name.isalpha()]
    folders = [str(Path.home()), str(ROOT), sys.prefix]
    return names + [folder for folder in folders if len(folder) > 3]


# The command -------------------------------------------------------------------------------------


def _read(path: Path) -> NotebookNode | None:
    return nbformat.read(path, as_version=4) if path.exists() else None


def _text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook) + "\n"


def problems(root: Path = ROOT, only: tuple[str, ...] = ()) -> list[str]:
    """The list that `--check` prints: one line for each difference; empty if there is none."""
    found = lands.problems(root)
    known = {notebook_of(twin) for twin in twins(root)}
    for stray in [path for path in lands.notebooks(root) if path not in known]:
        found.append(f"{stray.name} has no twin under notebooks/source")
    for twin in _selected(root, only):
        try:
            if in_step(twin, root) != twin.read_text(encoding="utf-8"):
                found.append(f"{twin.stem}: its lands or set-up cells are not as in the package")
            for line in lands.unnamed_folds(twin.read_text(encoding="utf-8")):
                found.append(f"{twin.stem}: a folded cell begins with no comment, but: {line}")
            path = notebook_of(twin)
            old = _read(path)
            if old is None:
                found.append(f"{twin.stem}: has no notebook yet")
                continue
            new = build(twin.read_text(encoding="utf-8"), old)
            if ("code", "set-up") not in _keys(new.cells[1:2]):
                found.append(f"{twin.stem}: the cell below its title is not the set-up cell")
            if code_changed(new, old):
                found.append(f"{twin.stem}: its code changed since the notebook ran")
                continue
            if map_is_old(new, root):
                found.append(f"{twin.stem}: its map of days lacks a day that is out")
            normalise(new, twin.stem)
            if _text(new) != path.read_text(encoding="utf-8"):
                found.append(f"{twin.stem}: twin and notebook differ")
        except (SyncError, lands.LandsError) as error:
            found.append(str(error))
    return found


def sync(twin: Path, root: Path = ROOT, *, rerun: bool = False) -> str:
    """Update one twin and its notebook. Returns a short text about the changes."""
    text = in_step(twin, root)
    rewritten = text != twin.read_text(encoding="utf-8")
    if rewritten:
        twin.write_text(text, encoding="utf-8")
    path = notebook_of(twin)
    old = _read(path)
    new = build(text, old)
    start = time.monotonic()
    ran = rerun or code_changed(new, old) or map_is_old(new, root)
    if ran:
        execute(new, twin.stem, path.parent)
    normalise(new, twin.stem)
    if path.exists() and path.read_text(encoding="utf-8") == _text(new):
        done = "unchanged"
    else:
        path.write_text(_text(new), encoding="utf-8")
        done = "written"
    ran_for = f", ran in {time.monotonic() - start:.1f} s" if ran else ""
    return f"{done}{ran_for}{', twin rewritten' if rewritten else ''}"


def _selected(root: Path, only: tuple[str, ...]) -> list[Path]:
    """The twins whose names begin with one of `only`; without `only`, all. Raises SyncError if a
    name fits no twin."""
    for start in only:
        if not any(twin.stem.startswith(start) for twin in twins(root)):
            raise SyncError(f"no twin begins with {start!r}")
    return [twin for twin in twins(root) if not only or twin.stem.startswith(only)]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="sync", description="Keep twins and notebooks in step.")
    parser.add_argument(
        "days", nargs="*", help="days to update, such as day02 or appendix_a; default: all"
    )
    parser.add_argument("--check", action="store_true", help="change nothing, list what differs")
    parser.add_argument("--stamp", metavar="OWNER/NAME", help="write the repository into the twins")
    parser.add_argument("--all", action="store_true", help="run unchanged notebooks too")
    options = parser.parse_args(arguments)
    only = tuple(options.days)
    if options.stamp is not None:
        try:
            count = publish.stamp_all(options.stamp, root)
        except ValueError as error:
            print(error)
            return 2
        print(f"stamped {count} notebooks with {options.stamp}")
    try:
        if options.check:
            found = problems(root, only)
            print("\n".join(found) or f"{len(_selected(root, only))} notebooks are in step")
            return 1 if found else 0
        failed = False
        for twin in _selected(root, only):
            print(f"{twin.stem}: ", end="", flush=True)
            try:
                print(sync(twin, root, rerun=options.all))
            except (SyncError, lands.LandsError) as error:
                failed = True
                print(f"not synced. {error}")
    except SyncError as error:
        print(error)
        return 2
    left = lands.problems(root)
    print("\n".join(left), end="\n" if left else "")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
