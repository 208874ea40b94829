"""A fault in the package makes a notebook fail: the notebooks are regression tests."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from nanoserve.course.lands import ROOT

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """One textual replacement in one engine file, and the notebook that must notice."""

    what: str
    file: str
    old: str
    new: str
    notebook: str


FAULTS = [
    Fault(
        "q and k left in the file's order",
        "nanoserve/weights.py",
        "return unpermute(dequantize(tensor), heads) if heads else dequantize(tensor)",
        "return dequantize(tensor)",
        "day02_weights.ipynb",
    ),
    Fault(
        "half characters shown",
        "nanoserve/tokenizer.py",
        "return self._decoder.decode(self._tokenizer.token_bytes(token_id))",
        "return self._tokenizer.token_bytes(token_id).decode(errors='replace')",
        "day03_tokenizer.ipynb",
    ),
    Fault(
        "a token dropped in decoding",
        "nanoserve/tokenizer.py",
        "kept = (i for i in ids if",
        "kept = (i for i in ids[1:] if",
        "day01_oracle.ipynb",
    ),
    Fault(
        "the newest token left out of the paged read",
        "nanoserve/cache.py",
        "self._step_slots = self._slots[:end]",
        "self._step_slots = self._slots[: end - 1]",
        "day26_runner.ipynb",
    ),
    Fault(
        "the newest token left out of the batch",
        "nanoserve/cache.py",
        "kv_lens=torch.tensor(self._ends,",
        "kv_lens=torch.tensor([end - 1 for end in self._ends],",
        "day00_start_here.ipynb",
    ),
    Fault(
        "query head h reads KV head h % n_kv, in sdpa",
        "nanoserve/layers.py",
        "q = q.reshape(batch * n_kv,",
        "q = q.unflatten(1, (-1, n_kv)).transpose(1, 2).reshape(batch * n_kv,",
        "day09_greedy.ipynb",
    ),
    Fault(
        "query head h reads KV head h % n_kv, in the kernel",
        "nanoserve/kernels/paged_attention.py",
        "kv_head = head // N_REP",
        "kv_head = head % (tl.num_programs(1) // N_REP)",
        "day00_start_here.ipynb",
    ),
    Fault(
        "the tail of the last tile not masked",
        "nanoserve/kernels/paged_attention.py",
        "tl.where(position < visible, score,",
        "tl.where(position >= 0, score,",
        "day00_start_here.ipynb",
    ),
    Fault(
        "the rescale dropped",
        "nanoserve/kernels/paged_attention.py",
        "acc = acc * alpha +",
        "acc = acc +",
        "day23_dispatch.ipynb",
    ),
    Fault(
        "one token too many",
        "nanoserve/engine/engine.py",
        "limit = min(params.max_tokens,",
        "limit = min(params.max_tokens + 1,",
        "day00_start_here.ipynb",
    ),
    Fault(
        "the first position's logits",
        "nanoserve/engine/engine.py",
        "[end - 1 for end in accumulate(query_lens)]",
        "[0 for end in accumulate(query_lens)]",
        "day00_start_here.ipynb",
    ),
]


def copy_clone(root: Path, notebook: str, folder: Path) -> None:
    """The parts of a clone that a notebook needs: package, pictures, data, notebook, conftest."""
    ignore = shutil.ignore_patterns("__pycache__", "*.ipynb", "source")
    for part in ("nanoserve", "diagrams", "notebooks"):
        shutil.copytree(root / part, folder / part, ignore=ignore)
    shutil.copy(root / "notebooks" / notebook, folder / "notebooks")


def put(fault: Fault, folder: Path) -> None:
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} does not hold {fault.old!r} exactly once"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def nbval(folder: Path, notebook: str) -> subprocess.CompletedProcess:
    """Run a copied notebook against the copied package, up to its first failing cell."""
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-x", "-q"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", f"notebooks/{notebook}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_in_the_package_makes_its_notebook_fail(fault, tmp_path):
    copy_clone(ROOT, fault.notebook, tmp_path)
    put(fault, tmp_path)
    done = nbval(tmp_path, fault.notebook)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "1 failed" in done.stdout


def test_without_a_fault_a_copied_notebook_passes(tmp_path):
    copy_clone(ROOT, "day00_start_here.ipynb", tmp_path)
    done = nbval(tmp_path, "day00_start_here.ipynb")
    assert done.returncode == 0, done.stdout


def test_the_harness_itself_sees_a_fault(tmp_path):
    clone, copy = tmp_path / "clone", tmp_path / "copy"
    for part in ("nanoserve", "diagrams", "notebooks"):
        (clone / part).mkdir(parents=True)
    (clone / "nanoserve/__init__.py").touch()
    (clone / "nanoserve/weights.py").write_text("def double(x):\n    return 2 * x\n")
    shutil.copy(ROOT / "notebooks/conftest.py", clone / "notebooks")
    output = new_output("execute_result", {"text/plain": "6"}, execution_count=1)
    source = "from nanoserve.weights import double\ndouble(3)"
    cell = new_code_cell(source, execution_count=1, outputs=[output])
    nbformat.write(new_notebook(cells=[cell]), clone / "notebooks/day.ipynb")

    copy_clone(clone, "day.ipynb", copy)
    assert nbval(copy, "day.ipynb").returncode == 0
    put(Fault("half", "nanoserve/weights.py", "2 * x", "3 * x", "day.ipynb"), copy)
    done = nbval(copy, "day.ipynb")
    assert done.returncode == 1
    assert "mismatch 'text/plain'" in done.stdout
