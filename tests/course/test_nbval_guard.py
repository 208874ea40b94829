"""After a dead kernel or a hung cell, the notebook's other cells fail at once."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from nanoserve.course.lands import ROOT

pytestmark = pytest.mark.slow


def nbval(folder: Path, *sources: str, limit: int = 4) -> tuple[str, float]:
    """Run nbval with our conftest on a notebook of these cells; its output and the seconds.

    `limit` is the seconds that a cell may take.
    """
    shutil.copy(ROOT / "notebooks/conftest.py", folder)
    nbformat.write(new_notebook(cells=[new_code_cell(s) for s in sources]), folder / "x.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "--color=no"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, f"--nbval-cell-timeout={limit}", "-p", "no:cacheprovider", "-rA", "x.ipynb"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout, time.monotonic() - start


def test_after_a_dead_kernel_the_other_cells_fail_at_once(tmp_path):
    out, seconds = nbval(tmp_path, "1", "import os; os._exit(1)", "2", "3", limit=90)
    assert "3 failed, 1 passed" in out
    assert "the kernel died in this cell" in out
    assert out.count("not run: the kernel died in cell 1") >= 2
    assert seconds < 80  # less than one cell's limit, on a busy machine too


@pytest.mark.parametrize(
    "hang",
    [
        "import time; time.sleep(60)",
        "import time\nwhile True:\n    try:\n        time.sleep(60)\n"
        "    except BaseException:\n        pass",
    ],
    ids=["can be interrupted", "cannot be interrupted"],
)
def test_after_a_hung_cell_the_other_cells_fail_at_once(tmp_path, hang):
    out, seconds = nbval(tmp_path, "1", hang, hang, hang)
    assert "3 failed, 1 passed" in out
    assert "Timeout of 4 seconds exceeded" in out
    assert out.count("not run: cell 1 ran for more than 4 s") >= 2
    assert seconds < 30


def test_a_sound_notebook_passes(tmp_path):
    out, _ = nbval(tmp_path, "x = 1", "assert x == 1")
    assert "2 passed" in out
