"""One notebook alone in an empty folder, in a bare environment, as on Colab."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nanoserve.course.lands import ROOT

pytestmark = pytest.mark.slow

NOTEBOOK = "day01_oracle.ipynb"
OF_A_CLONE = ("PYTHONPATH", "VIRTUAL_ENV", "NANOSERVE_WORK", "JUPYTER_PATH")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program as on a machine without a clone, and return its output, also in a failure."""
    environment = {key: value for key, value in os.environ.items() if key not in OF_A_CLONE}
    environment |= {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PYTHONNOUSERSITE": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (path,) = folder.glob("nanoserve-*.whl")
    return path


def test_the_wheel_carries_pictures_data_and_nothing_of_the_clone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    pictures = {f"nanoserve/course/pictures/{p.name}" for p in ROOT.glob("diagrams/*.png")}
    data = {f"nanoserve/course/data/{p.name}" for p in ROOT.glob("notebooks/data/*.json")}
    assert pictures | data <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"nanoserve"}


def test_a_notebook_alone_installs_nanoserve_and_runs_to_its_end(wheel, tmp_path):
    shutil.copy(wheel, tmp_path)
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, tmp_path)
    run(sys.executable, "-m", "venv", "bare", cwd=tmp_path)
    programs = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin")
    python = programs / "python"
    run(python, "-m", "pip", "install", "-q", "ipykernel", "nbclient", cwd=tmp_path)
    run(programs / "jupyter-execute", "--kernel_name=python3", NOTEBOOK, cwd=tmp_path)
    where = run(python, "-c", "import nanoserve; print(nanoserve.__file__)", cwd=tmp_path)
    assert str(tmp_path / "bare") in where
