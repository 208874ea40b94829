"""The learner's folder work/: copies of the notebooks, saved answers, predictions, progress."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.course.curriculum import ALL, DayInfo, Number, find, key, number_in
from nanoserve.course.exercise import CourseError
from nanoserve.course.exercises import exercises_of, module_of

PACKAGE = Path(__file__).resolve().parents[1]
FRESH = "nanoserve_fresh"  # a copy's metadata: the fingerprint of its cells when it was made


@dataclass(frozen=True)
class DayStatus:
    """The line of a day or an appendix in `nanoserve course status`."""

    info: DayInfo
    out: bool  # the day is published
    started: bool  # the copy was changed or run, an exercise was passed, or a guess was made
    passed: tuple[str, ...]
    total: int

    @property
    def words(self) -> str:
        if not self.out:
            return "not out yet"
        if self.total and len(self.passed) == self.total:
            return "done"
        return "started" if self.started else "not started"

    @property
    def count(self) -> str:
        return f"{len(self.passed)} of {self.total}" if self.total else ""

    def __str__(self) -> str:
        number = self.info.number
        name = self.info.name if self.info.is_appendix else f"day {number:>2}"
        return f"{name:<10}  {self.info.title:<30}  {self.count:<8}  {self.words}".rstrip()


def clone_dir() -> Path | None:
    """The clone around the current folder, else the clone that the package is installed from."""
    here = _here()
    for folder in (here, *here.parents, PACKAGE.parent):
        if (folder / "notebooks").is_dir() and (folder / "nanoserve").is_dir():
            return folder
    return None


def work_dir() -> Path:
    """$NANOSERVE_WORK, else work/ of the enclosing clone, else work/ here. It need not exist."""
    if chosen := os.environ.get("NANOSERVE_WORK"):
        return Path(chosen).expanduser()
    here = _here()
    for folder in (here, *here.parents):
        if (folder / "notebooks").is_dir() and (folder / "nanoserve").is_dir():
            return folder / "work"
    return here / "work"


def _here() -> Path:
    """The current folder; if it has been deleted, its last path."""
    with contextlib.suppress(OSError):
        _last_seen[:] = [Path.cwd()]
    return _last_seen[0] if _last_seen else PACKAGE.parent


_last_seen: list[Path] = []


def lost_folder() -> str:
    """A sentence for a notebook whose folder was deleted while it was open; "" otherwise."""
    try:
        Path.cwd()
    except OSError:
        return (
            "The folder of this notebook was deleted: save the notebook (File > Save Notebook As) "
            "and restart the kernel."
        )
    return ""


def start(day: Number | None = None) -> list[Path]:
    """Copy the notebooks of a day, or of all days and appendices, into work/. Existing files do not
    change.

    The copies have no outputs, except in cells tagged "keep". Returns the new copies.
    Raises CourseError for an unknown day, no notebooks, or a folder that cannot be written.
    """
    copied = []
    for source in _notebooks(day):
        path = work_dir() / source.name
        if not path.exists():
            write_atomically(path, _without_outputs(source))
            copied.append(path)
    return copied


def reset(day: Number) -> tuple[Path, Path | None]:
    """Make a fresh copy of a day; an old copy is renamed to dayNN_name.1.ipynb, .2, ...

    Returns the path of the fresh copy, and the new path of the old copy or None.
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
    """For every day and appendix: is it out, is it started, which exercises are passed (optional
    ones not counted)."""
    clone, work, progress = clone_dir(), work_dir(), Progress.load()
    rows = []
    for info in ALL:
        exercises = [each for each in exercises_of(info.number) if not each.optional]
        noted = set(progress.passed(info.number))
        passed = tuple(e.name for e in exercises if noted.intersection(e.names))
        published = (
            (clone / "notebooks" / info.notebook).exists()
            if clone
            else bool(info.number == 0 or module_of(info.number))
        )
        guessed = progress.data["predictions"].get(str(info.number))
        started = bool(passed or guessed) or _touched(work / info.notebook, clone)
        rows.append(DayStatus(info, published, started, passed, len(exercises)))
    return rows


class Progress:
    """The contents of work/progress.json: passed exercises and predictions, by day.

    A saved answer counts as a passed exercise too. A damaged file is renamed, and `trouble` is a
    sentence about it.
    """

    def __init__(self, data: dict[str, Any] | None = None, trouble: str = "") -> None:
        self.data = data or {"passed": {}, "predictions": {}}
        self.trouble = trouble
        for day, name in _saved_names():
            self.add_passed(day, name)

    @classmethod
    def load(cls) -> Progress:
        path = work_dir() / "progress.json"
        try:
            data = _sound(json.loads(path.read_text(encoding="utf-8")))
            return cls(data, lost_folder())
        except FileNotFoundError:
            return cls(None, lost_folder())
        except (OSError, ValueError, RecursionError):
            told = "Your progress file was damaged"
            aside = _free_name(path.with_name("progress.corrupt.json"), first=True)
            with contextlib.suppress(OSError):
                path.replace(aside)
                told += f" and was renamed to {aside.name}"
            told += ". Your saved answers still count as passed. Enter your guesses again."
            return cls(trouble=told)

    def save(self) -> None:
        text = json.dumps(self.data, indent=1, sort_keys=True)
        write_atomically(work_dir() / "progress.json", text + "\n")

    def passed(self, day: Number) -> list[str]:
        return self.data["passed"].get(str(day), [])

    def add_passed(self, day: Number, name: str) -> None:
        names = self.data["passed"].setdefault(str(day), [])
        if name not in names:
            names.append(name)

    def guess(self, day: Number, name: str) -> float | str | None:
        return self.data["predictions"].get(str(day), {}).get(name)

    def set_guess(self, day: Number, name: str, value: float | str) -> None:
        self.data["predictions"].setdefault(str(day), {})[name] = value


def _sound(data: Any) -> dict[str, Any]:
    """The data, if it has the form that Progress saves; ValueError otherwise."""
    match data:
        case {"passed": dict(passed), "predictions": dict(guesses)}:
            lists = all(isinstance(names, list) for names in passed.values())
            texts = lists and all(isinstance(x, str) for names in passed.values() for x in names)
            if texts and all(isinstance(day, dict) for day in guesses.values()):
                return data
    raise ValueError("not a progress file")


def _saved_names() -> list[tuple[Number, str]]:
    """(day, exercise) of every saved answer, by the names of the files."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted((work_dir() / "answers").iterdir()):
            number = number_in(path.name)
            name = path.name.removeprefix(f"{key(number)}_") if number is not None else ""
            if match := re.fullmatch(r"(\w+)\.py", name):
                found.append((number, match[1]))
    return found


def write_atomically(path: Path, text: str) -> None:
    """Write the whole file or nothing; CourseError if the folder cannot be written."""
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


def _notebooks(day: Number | None) -> list[Path]:
    infos = ALL if day is None else (find(day),)
    clone = clone_dir()
    if clone is None:
        raise CourseError("no notebooks found: run this inside a clone of the nanoserve repository")
    found = [clone / "notebooks" / info.notebook for info in infos]
    found = [path for path in found if path.exists()]
    if not found and day is None:
        raise CourseError(f"no notebooks found in {clone / 'notebooks'}")
    if not found:
        raise CourseError(f"{infos[0].name} ({infos[0].title}) is not out yet")
    return found


def _touched(copy: Path, clone: Path | None) -> bool:
    """Whether a learner's copy has been run or changed since `start` made it.

    An old copy without the fingerprint FRESH is compared with the published notebook.
    """
    try:
        notebook = json.loads(copy.read_text(encoding="utf-8"))
        fresh = notebook["metadata"].get(FRESH)
        if fresh is None and clone is not None:
            published = (clone / "notebooks" / copy.name).read_text(encoding="utf-8")
            fresh = _digest(json.loads(published))
        ran = any(cell.get("execution_count") for cell in notebook["cells"])
        return ran or fresh != _digest(notebook)
    except FileNotFoundError:
        return copy.exists()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def _digest(notebook: dict[str, Any]) -> str:
    """A fingerprint of the cells without their outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def _without_outputs(source: Path) -> str:
    try:
        notebook = json.loads(source.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["execution_count"] = None
                if "keep" not in cell.get("metadata", {}).get("tags", ()):
                    cell["outputs"] = []
        notebook["metadata"][FRESH] = _digest(notebook)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CourseError(f"{source.name} cannot be read as a notebook: {error}") from error
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _free_name(path: Path, first: bool = False) -> Path:
    """dayNN_name.1.ipynb, or the next free number. With `first`, the plain name if it is free."""
    if first and not path.exists():
        return path
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
