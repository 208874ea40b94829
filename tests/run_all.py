"""Everything CI runs, in order, each step with its time, and one count at the end (`make test`)."""

import os
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
INTERPRETED = "pytest -q -n 2 -p no:nbval tests/interpreted"

STEPS = {  # each is run as `python -m ...`, in the environment that stands before it
    "the model": "nanoserve fetch",
    "ruff: rules": f"ruff check {CODE}",
    "ruff: format": f"ruff format --check {CODE}",
    "twins, lands cells and notebooks in step": "nanoserve.course.sync --check",
    "unit tests": f"pytest -q -n 2 --dist worksteal tests {BUT_ALONE}",
    "kernels under Triton's interpreter": f"TRITON_INTERPRET=1 {INTERPRETED}",
    "notebooks, all output": "pytest -q -n 2 --dist loadfile --nbval --nbval-current-env notebooks",
    "a browser; a notebook alone": f"pytest -q -n 2 --dist loadfile {ALONE}",
}

if find_spec("triton") is None:  # it is made for Linux alone
    del STEPS["kernels under Triton's interpreter"]


def main() -> int:
    total = dict.fromkeys(("passed", "failed", "skipped"), 0)
    start = time.monotonic()
    for what, command in STEPS.items():
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
            env={**os.environ, "PYTHONUNBUFFERED": "1", **settings},
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
    sys.exit(main())
