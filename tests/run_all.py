"""Everything CI runs, in order, each step with its time, and one count at the end (`make test`)."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
CODE = ["nanoserve", "tests", "notebooks", "diagrams"]
ALONE = ["tests/browser", "tests/course/test_standalone.py"]  # each starts programs of its own
TWO = ["-n", "2", "--dist"]


def main() -> int:
    python = [sys.executable, "-m"]
    pytest = [*python, "pytest", "-q"]
    total = dict.fromkeys(("passed", "failed", "skipped"), 0)
    with tempfile.TemporaryDirectory() as folder:
        for what, command in {
            "the model": [*python, "nanoserve", "fetch"],
            "ruff: rules": [*python, "ruff", "check", *CODE],
            "ruff: format": [*python, "ruff", "format", "--check", *CODE],
            "twins, lands cells and notebooks in step": [
                *python,
                "nanoserve.course.sync",
                "--check",
            ],
            "unit tests": [
                *pytest,
                "tests",
                *(f"--ignore={path}" for path in ALONE),
                *TWO,
                "worksteal",
            ],
            "every notebook, output by output": [
                *[*pytest, "--nbval", "--nbval-current-env", "notebooks", *TWO, "loadfile"]
            ],
            "a browser; a notebook alone": [*pytest, *ALONE, *TWO, "loadfile"],
        }.items():
            for outcome, number in run(what, command, Path(folder) / "report.xml").items():
                total[outcome] += number
    print(f"\n{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] else 0


def run(what: str, command: list[str], report: Path) -> dict[str, int]:
    """Run one step; the numbers of its tests, or of itself where it is no pytest run."""
    print(f"\n== {what}", flush=True)
    report.unlink(missing_ok=True)
    if "pytest" in command:
        command = [*command, f"--junitxml={report}"]
    start = time.monotonic()
    # Two workers on two cores: one thread each.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    print(
        f"== {what}: {'ok' if code == 0 else 'FAILED'}, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if not report.exists():
        return {"passed": int(code == 0), "failed": int(code != 0), "skipped": 0}
    suite = ElementTree.parse(report).getroot()[0].attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    passed = int(suite["tests"]) - failed - skipped
    return {"passed": passed, "failed": failed or int(code != 0), "skipped": skipped}


if __name__ == "__main__":
    sys.exit(main())
