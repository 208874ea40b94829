"""The learner's folder work/: copies of the notebooks, saved answers, predictions, progress."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.course.curriculum import DAYS, DayInfo, find
from nanoserve.course.exercise import CourseError
from nanoserve.course.exercises import exercises_of, module_of

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class DayStatus:
    """One day's line of `nanoserve course status`."""

    info: DayInfo
    out: bool  # the day is published
    started: bool  # the learner has a copy
    passed: tuple[str, ...]
    total: int

    @property
    def words(self) -> str:
        if not self.out:
            return "not out yet"
        if self.total and len(self.passed) == self.total:
            return "done"
        return "started" if self.started or self.passed else "open"

    @property
    def count(self) -> str:
        return f"{len(self.passed)} of {self.total}" if self.total else ""

    def __str__(self) -> str:
        line = f"day {self.info.number:>2}  {self.info.title:<30}  {self.count:<8}  {self.words}"
        return line.rstrip()


def clone_dir() -> Path | None:
    """The checkout around the current folder, else the one the package is installed from."""
    here = Path.cwd()
    for folder in (here, *here.parents, PACKAGE.parent):
        if (folder / "notebooks").is_dir() and (folder / "nanoserve").is_dir():
            return folder
    return None


def work_dir() -> Path:
    """$NANOSERVE_WORK, else work/ of the enclosing clone, else work/ here. It need not exist."""
    if chosen := os.environ.get("NANOSERVE_WORK"):
        return Path(chosen).expanduser()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "notebooks").is_dir() and (folder / "nanoserve").is_dir():
            return folder / "work"
    return here / "work"


def start(day: int | str | None = None) -> list[Path]:
    """Copy the notebooks of a day, or of all days, into work/; never over a file that is there.

    Copies come without outputs, but for cells tagged "keep". Returns what was copied.
    Raises CourseError for an unknown day, no notebooks, or a folder that cannot be written.
    """
    copied = []
    for source in _notebooks(day):
        path = work_dir() / source.name
        if not path.exists():
            write_atomically(path, _without_outputs(source))
            copied.append(path)
    return copied


def reset(day: int | str) -> tuple[Path, Path | None]:
    """A fresh copy of a day; the old one stays beside it as dayNN_name.1.ipynb, .2, ...

    Returns the path of the copy, and that of the old one if there was one.
    """
    (source,) = _notebooks(day)
    path, kept = work_dir() / source.name, None
    text = _without_outputs(source)
    if path.exists():
        kept = _free_name(path)
        with writing(path):
            path.rename(kept)
    write_atomically(path, text)
    return path, kept


def status() -> list[DayStatus]:
    """Every day: is it out, started, and which of its exercises are passed."""
    clone, work, progress = clone_dir(), work_dir(), Progress.load()
    rows = []
    for info in DAYS:
        exercises, noted = exercises_of(info.number), set(progress.passed(info.number))
        passed = tuple(e.name for e in exercises if noted.intersection(e.names))
        published = (
            (clone / "notebooks" / info.notebook).exists()
            if clone
            else bool(info.number == 0 or module_of(info.number))
        )
        started = (work / info.notebook).exists()
        rows.append(DayStatus(info, published, started, passed, len(exercises)))
    return rows


class Progress:
    """What work/progress.json holds: passed exercises and predictions, by day.

    A file that cannot be read as such is set aside, and `trouble` says so.
    """

    def __init__(self, data: dict[str, Any] | None = None, trouble: str = "") -> None:
        self.data = data or {"passed": {}, "predictions": {}}
        self.trouble = trouble

    @classmethod
    def load(cls) -> Progress:
        path = work_dir() / "progress.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            lists = all(isinstance(names, list) for names in data["passed"].values())
            if not lists or not all(isinstance(d, dict) for d in data["predictions"].values()):
                raise ValueError
            return cls(data)
        except FileNotFoundError:
            return cls()
        except OSError:
            return cls(trouble="Your progress file cannot be read, so this starts without it.")
        except (ValueError, KeyError, TypeError, AttributeError):
            aside = _free_name(path.with_name("progress.corrupt.json"), first=True)
            with contextlib.suppress(OSError):
                path.replace(aside)
            return cls(trouble=f"Your progress file was damaged: it is set aside as {aside.name}.")

    def save(self) -> None:
        text = json.dumps(self.data, indent=1, sort_keys=True)
        write_atomically(work_dir() / "progress.json", text + "\n")

    def passed(self, day: int) -> list[str]:
        return self.data["passed"].get(str(day), [])

    def add_passed(self, day: int, name: str) -> None:
        names = self.data["passed"].setdefault(str(day), [])
        if name not in names:
            names.append(name)

    def guess(self, day: int, name: str) -> float | str | None:
        return self.data["predictions"].get(str(day), {}).get(name)

    def set_guess(self, day: int, name: str, value: float | str) -> None:
        self.data["predictions"].setdefault(str(day), {})[name] = value


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing; CourseError where the folder cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into a CourseError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CourseError(f"cannot write {path}: {reason}") from error


def _notebooks(day: int | str | None) -> list[Path]:
    infos = DAYS if day is None else (find(day),)
    clone = clone_dir()
    if clone is None:
        raise CourseError("no notebooks found: run this inside a clone of the nanoserve repository")
    found = [clone / "notebooks" / info.notebook for info in infos]
    found = [path for path in found if path.exists()]
    if not found and day is None:
        raise CourseError(f"no notebooks found in {clone / 'notebooks'}")
    if not found:
        raise CourseError(f"day {infos[0].number} ({infos[0].title}) is not out yet")
    return found


def _without_outputs(source: Path) -> str:
    try:
        notebook = json.loads(source.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["execution_count"] = None
                if "keep" not in cell.get("metadata", {}).get("tags", ()):
                    cell["outputs"] = []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{source.name} cannot be read as a notebook: {error}") from error
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _free_name(path: Path, first: bool = False) -> Path:
    """dayNN_name.1.ipynb, or the next number that is free; `first`: the plain name if it is."""
    if first and not path.exists():
        return path
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
