"""Everything CI runs, in order, each step with its time, and one count at the end (`make test`).

`python tests/run_all.py machines` runs the notebooks as on other processors (`make test-machines`);
`python tests/run_all.py versions` runs the tests that depend on the versions of other packages
(`make test-oldest`, `make test-newest`).
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
CODE = "nanoserve tests notebooks diagrams"
ALONE = "tests/browser tests/course/test_standalone.py"  # these start programs of their own
BUT_ALONE = " ".join(f"--ignore={path}" for path in ALONE.split())
PYTEST = "pytest -q -n 2 -p no:nbval --dist worksteal"
NBVAL = "pytest -q -n 2 --dist loadfile --nbval --nbval-current-env"

# PyTorch chooses its loops by processor, and so do Intel's MKL and oneDNN, which compute its matrix
# products: each adds in another order. MKL_ENABLE_INSTRUCTIONS works on Intel's processors only,
# MKL_CBWR on all.
PLAIN = "ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1"
OLD = f"{PLAIN} MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41"
AVX2 = (
    "ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1"
    " MKL_CBWR=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2"
)


def notebooks(*days: int | str) -> str:
    """The notebooks of these days and appendices that are out, as arguments of pytest."""
    starts = [f"day{day:02}" if isinstance(day, int) else day for day in days]
    found = [path for start in starts for path in sorted(ROOT.glob(f"notebooks/{start}_*.ipynb"))]
    return " ".join(path.relative_to(ROOT).as_posix() for path in found)


# days that compare with an oracle
NUMERICAL = notebooks(4, 5, 6, 7, 8, 9, 11, 18, 22, 25, 28, 29, 30, 31, 33)
KERNELS = notebooks(*range(18, 32), "appendix_a")

MODEL = {"the model": "nanoserve fetch"}
UNITS = {"unit tests": f"{PYTEST} tests {BUT_ALONE}"}
INTERPRETED = {
    "kernels under Triton's interpreter": f"TRITON_INTERPRET=1 {PYTEST} tests/interpreted"
}
NOTEBOOKS = {"notebooks, all output": f"{NBVAL} notebooks"}
RUNS = {  # each step is run as `python -m ...`, in the environment that stands before it
    "all": MODEL
    | {
        "ruff: rules": f"ruff check {CODE}",
        "ruff: format": f"ruff format --check {CODE}",
        "twins, lands cells and notebooks in step": "nanoserve.course.sync --check",
    }
    | UNITS
    | INTERPRETED
    | NOTEBOOKS
    | {
        "notebooks that compare numbers, on plain instructions": f"{PLAIN} {NBVAL} {NUMERICAL}",
        "a browser; a notebook alone": f"pytest -q -n 2 --dist loadfile {ALONE}",
    },
    "machines": MODEL
    | {
        "notebooks as on an old processor": f"{OLD} {NBVAL} notebooks",
        "notebooks as on a processor with AVX2": f"{AVX2} {NBVAL} notebooks",
        "kernel days with the reference": f"NANOSERVE_BACKEND=reference {NBVAL} {KERNELS}",
        "kernel days under Triton's interpreter": f"TRITON_INTERPRET=1 {NBVAL} {KERNELS}",
    },
    "versions": MODEL | UNITS | INTERPRETED | NOTEBOOKS,
}
NO_TRITON = find_spec("triton") is None  # it is made for Linux alone
NO_AVX = platform.machine().lower() not in ("x86_64", "amd64")


def left_out(command: str) -> str | None:
    """Why a step cannot run on this machine, or None."""
    if NO_TRITON and "TRITON_INTERPRET" in command:
        return "there is no Triton here"
    if NO_AVX and AVX2 in command:
        return f"{platform.machine()} has no AVX2"
    return None


def main(which: str = "all") -> int:
    if which not in RUNS:
        print(f"usage: python tests/run_all.py [{' | '.join(RUNS)}]", file=sys.stderr)
        return 2
    total = dict.fromkeys(("passed", "failed", "skipped"), 0)
    start = time.monotonic()
    for what, command in RUNS[which].items():
        if reason := left_out(command):
            print(f"\n== {what}: not run, {reason}", flush=True)
            continue
        for outcome, number in run(what, command.split()).items():
            total[outcome] += number
    print(f"\nall of it: {time.monotonic() - start:.0f} s")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] else 0


def run(what: str, command: list[str]) -> dict[str, int]:
    """Run one step; the numbers of its tests, or 1 for itself where it is no pytest run."""
    print(f"\n== {what}", flush=True)
    start = time.monotonic()
    settings = {}
    while "=" in command[0]:
        name, _, settings[name] = command.pop(0).partition("=")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        if command[0] == "pytest":
            command = [*command, f"--junitxml={report}"]
        code = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **settings},
            stdin=subprocess.DEVNULL,
        ).returncode
        counts = {"failed": 0, "skipped": 0, "passed": 0}
        if report.exists():
            counts = count(report)
        if code and not counts["failed"]:
            counts["failed"] = 1
        elif not report.exists():
            counts["passed"] = 1
    verdict = "FAILED" if counts["failed"] else "ok"
    print(f"== {what}: {verdict}, {time.monotonic() - start:.0f} s", flush=True)
    return counts


def count(report: Path) -> dict[str, int]:
    """The numbers in a JUnit report."""
    suite = ElementTree.parse(report).getroot()[0].attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    return {
        "passed": int(suite["tests"]) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
