"""Lands cells: the cells of the notebooks that hold the engine's definitions, word for word.

A cell of a percent twin (notebooks/source/dayNN_name.py, or appendix_a_name.py) whose first line is

    # lands in nanoserve/layers.py: rms_norm
    # until day 13: lands in nanoserve/layers.py: sdpa
    # until appendix a: lands in nanoserve/kernels/tlsim/values.py: Block

holds only definitions (functions, classes, constants) and their imports. `rewrite` writes the names
after the last colon. The first kind of cell is compared with the package. A class may land in
pieces: `class Model(Model):` and some methods. So the head of a class (decorators, class line,
docstring, fields) and each of its methods are compared separately. The second kind of cell is not
compared; the day or appendix that it names must land its definitions. In the order of the course an
appendix comes between the last day that it needs and the next day.

Every definition of the engine lands exactly once, or is listed in untaught.txt until its day is
written.

A folded cell shows its first line only. So every other folded cell begins with a comment about its
content. For the solution of an exercise, `rewrite` writes that comment: `# solution: rotate_half`.
"""

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nanoserve.course.curriculum import APPENDICES, Number, number_in, position
from nanoserve.course.curriculum import name as name_of

ROOT = Path(__file__).resolve().parents[2]
EXEMPT = {
    "cli.py",
    "fetch.py",
    "gguf_file.py",
    "q4_file.py",
    "threads.py",
    "__init__.py",
    "__main__.py",
}

LINE = 100  # characters of a first line
_UNTIL = r"(?:until (day \d+|appendix [a-z]): )?"
_MARK = re.compile(rf"^# {_UNTIL}lands in (nanoserve/\S+?\.py)(?:: .*)?\s*$")
_CELL = re.compile(r"(?m)^(?=# %%)")


class LandsError(ValueError):
    """A lands cell or an engine file that cannot be read as definitions; the message says why."""


@dataclass(frozen=True)
class Definition:
    """The unit that lands: a function, a constant, the head of a class or one of its methods."""

    name: str  # "rms_norm", "Model" (the head), "Model.forward"
    text: str
    first: int  # its lines in the source it was read from, counted from 1, both inclusive
    last: int


@dataclass(frozen=True)
class LandsCell:
    """A lands cell of one twin; `start` is the line of the twin that its marker stands on."""

    twin: str
    number: int
    start: int
    target: str
    until: Number | None
    source: str  # the text below the marker

    @property
    def where(self) -> str:
        return f"{self.twin}, code cell {self.number} (line {self.start})"

    @property
    def day(self) -> Number:
        return day_number(self.twin)

    def definitions(self) -> dict[str, Definition]:
        return definitions(self.source, self.where, cell=True)


def day_number(file: str) -> Number:
    """7 for "day07_one_block", "a" for "appendix_a_inside_tlsim"."""
    number = number_in(file)
    if number is None:
        raise LandsError(f"{file}: a notebook is called dayNN_name or appendix_a_name")
    if isinstance(number, str) and number not in (info.number for info in APPENDICES):
        raise LandsError(f"{file}: the curriculum has no {name_of(number)}")
    return number


def twins(root: Path = ROOT) -> list[Path]:
    """The percent twins: day 0 first, then the other days, then the appendices."""
    return _of_the_course(root / "notebooks/source", ".py")


def notebooks(root: Path = ROOT) -> list[Path]:
    """The notebooks, in the order of `twins`."""
    return _of_the_course(root / "notebooks", ".ipynb")


def _of_the_course(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"day*{ending}")) + sorted(folder.glob(f"appendix_*{ending}"))


# Reading ----------------------------------------------------------------------------------------


def definitions(source: str, where: str, *, cell: bool = False) -> dict[str, Definition]:
    """The definitions of a source text by name, in order.

    In a lands cell (cell=True) other statements than definitions and imports are a LandsError; in a
    file they are ignored. `class X(X):` gives the methods of X without a head.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise LandsError(f"{where}: not Python: {error.msg} in line {error.lineno}") from None
    found: dict[str, Definition] = {}
    lines = source.splitlines()

    def add(name: str, first: int, last: int) -> None:
        while name in found:  # a property's setter follows its getter under the same name
            name += "'"
        found[name] = Definition(name, "\n".join(lines[first - 1 : last]), first, last)

    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            head, methods = _class_parts(node, lines, where)
            if not _is_piece(node):
                add(node.name, *head)
            for name, first, last in methods:
                add(f"{node.name}.{name}", first, last)
            continue
        names = dict.fromkeys(_names(node))
        for name in names:
            add(name, _first_line(node), node.end_lineno)
        if cell and not names and not isinstance(node, ast.Import | ast.ImportFrom):
            raise LandsError(f"{where}: this is not a definition: {lines[node.lineno - 1]}")
    return found


def _names(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement defines, also within an `if` or a `try`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in getattr(node, "targets", None) or [node.target]:
            for name in ast.walk(target):
                stored = isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                if stored and name.id != "__all__":
                    yield name.id
    elif isinstance(node, ast.Try) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
    ):
        handlers = [handler.body for handler in getattr(node, "handlers", [])]
        for body in [node.body, *handlers, node.orelse]:
            for child in body:
                yield from _names(child)


def _class_parts(
    node: ast.ClassDef, lines: list[str], where: str
) -> tuple[tuple[int, int], list[tuple[str, int, int]]]:
    """The lines of a class's head, and (name, first, last) of each method."""
    methods, head_last = [], 0
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            methods.append((child.name, _first_line(child), child.end_lineno))
        elif (methods or _is_piece(node)) and (names := _operators(child)):
            methods += [(name, child.lineno, child.end_lineno) for name in names]
        elif _is_piece(node) and not isinstance(child, ast.Pass):
            raise LandsError(f"{where}: class {node.name}({node.name}) may hold methods only")
        elif methods:
            raise LandsError(f"{where}: {node.name} has fields below a method; move them above it")
        else:
            head_last = child.end_lineno
    if not head_last:  # nothing above the first method; the class line itself may span lines
        head_last = methods[0][1] - 1
        while not lines[head_last - 1].strip() or lines[head_last - 1].lstrip().startswith("#"):
            head_last -= 1
    return (_first_line(node), head_last), methods


def _operators(node: ast.stmt) -> list[str]:
    """The names of methods that an assignment defines, such as `__radd__ = __add__`."""
    names = list(_names(node)) if isinstance(node, ast.Assign) else []
    return names if all(name.startswith("__") for name in names) else []


def _is_piece(node: ast.ClassDef) -> bool:
    return [base.id for base in node.bases if isinstance(base, ast.Name)] == [node.name]


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def lands_cells(twin_text: str, twin: str) -> list[LandsCell]:
    """The lands cells of one twin's text; `twin` is its stem, "day04_rmsnorm_and_rope"."""
    return [cell for cell, _ in _split(twin_text, twin) if cell is not None]


def _split(twin_text: str, twin: str) -> Iterator[tuple[LandsCell | None, str]]:
    """The twin's cells as text, each with its LandsCell, or None for another cell."""
    line, number = 1, 0
    for chunk in _CELL.split(twin_text):
        head, _, body = chunk.partition("\n")
        is_code = head.startswith("# %%") and not re.search(r"\[(markdown|md|raw)\]", head)
        number += is_code
        mark = _MARK.match(body.partition("\n")[0]) if is_code else None
        until = _number(mark[1]) if mark and mark[1] else None
        source = body.partition("\n")[2].rstrip()
        yield (LandsCell(twin, number, line + 1, mark[2], until, source) if mark else None), chunk
        line += chunk.count("\n")


def _number(words: str) -> Number:
    """13 for "day 13", "a" for "appendix a"."""
    kind, _, sign = words.partition(" ")
    return int(sign) if kind == "day" else sign


def _words(number: Number) -> str:
    return name_of(number).lower()


# Comparing --------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """The engine's definitions, the lands cells of the days, and the differences between them."""

    root: Path
    engine: dict[str, dict[str, Definition]] = field(default_factory=dict)
    landed: dict[tuple[str, str], list[LandsCell]] = field(default_factory=dict)
    cells: list[LandsCell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def problems(root: Path = ROOT) -> list[str]:
    """One line for each problem of the lands cells under `root`; empty if there is none."""
    ledger = Ledger(root)
    for steps in (_read_engine, _read_twins, _compare, _check_promises, _check_coverage):
        try:
            steps(ledger)
        except LandsError as error:
            ledger.problems.append(str(error))
    return ledger.problems


def _read_engine(ledger: Ledger) -> None:
    for path in sorted((ledger.root / "nanoserve").rglob("*.py")):
        name = path.relative_to(ledger.root).as_posix()
        if path.name not in EXEMPT and not name.startswith("nanoserve/course/"):
            ledger.engine[name] = definitions(path.read_text(encoding="utf-8"), name)


def _read_twins(ledger: Ledger) -> None:
    for path in twins(ledger.root):
        day_number(path.stem)
        ledger.cells += lands_cells(path.read_text(encoding="utf-8"), path.stem)
    for cell in ledger.cells:
        if cell.until is None:
            for name in cell.definitions():
                ledger.landed.setdefault((cell.target, name), []).append(cell)


def _compare(ledger: Ledger) -> None:
    for (target, name), cells in ledger.landed.items():
        package = ledger.engine.get(target, {}).get(name)
        if package is None:
            ledger.problems.append(f"{cells[0].where}: {target} has no {name}")
            continue
        if len(cells) > 1:
            ledger.problems.append(
                f"{target}: {name} lands twice: {' and '.join(cell.where for cell in cells)}"
            )
        for cell in cells:
            if (text := cell.definitions()[name].text) != package.text:
                diff = difflib.unified_diff(
                    text.splitlines(), package.text.splitlines(), "cell", "package", "", "", 1
                )
                short = "\n    ".join(list(diff)[2:14])
                ledger.problems.append(
                    f"{cell.where}: {name} differs from {target} (`make sync`):\n    {short}"
                )


def _check_promises(ledger: Ledger) -> None:
    """Check `until day N` cells: day N is later and has the same names in a lands cell."""
    for cell in ledger.cells:
        if cell.until is None:
            continue
        if isinstance(cell.until, str):
            day_number(f"appendix_{cell.until}_")  # refuses an appendix that does not exist
        if position(cell.until) <= position(cell.day):
            ledger.problems.append(
                f"{cell.where}: until {_words(cell.until)} is not later than its own day"
            )
        later = [c for c in ledger.cells if c.day == cell.until and c.target == cell.target]
        held = {name for other in later for name in other.definitions()}
        for name in cell.definitions():
            if name not in held:
                ledger.problems.append(
                    f"{cell.where}: {_words(cell.until)} lands no {name} in {cell.target}"
                )


def _check_coverage(ledger: Ledger) -> None:
    """Check that each definition either lands or is listed in untaught.txt."""
    untaught = _read_untaught(ledger)
    for target, found in ledger.engine.items():
        for name in found:
            listed = (target, name) in untaught
            if listed and (target, name) in ledger.landed:
                where = ledger.landed[target, name][0].where
                ledger.problems.append(
                    f"untaught.txt: {target}: {name} lands in {where}; take it off the list"
                )
            if not listed and (target, name) not in ledger.landed:
                ledger.problems.append(f"{target}: {name} lands in no notebook")


def _read_untaught(ledger: Ledger) -> set[tuple[str, str]]:
    """The (file, name) pairs of untaught.txt; a class's name stands for all its parts."""
    path = ledger.root / "nanoserve/course/untaught.txt"
    listed = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        target, _, name = (part.strip() for part in entry.partition(":"))
        parts = [n for n in ledger.engine.get(target, {}) if n == name or n.startswith(f"{name}.")]
        if not parts:
            ledger.problems.append(
                f"untaught.txt: {target} has no {name}; take the line off the list"
            )
        listed |= {(target, part) for part in parts}
    return listed


# Rewriting --------------------------------------------------------------------------------------


def rewrite(twin_text: str, twin: str, root: Path = ROOT) -> str:
    """The twin's text, with the package's present definitions in its lands cells.

    The first lines of lands cells and of folded solutions get the names of their definitions. The
    definitions of `until day` cells do not change.
    """
    out = []
    for cell, chunk in _split(twin_text, twin):
        if cell is not None and cell.until is None:
            chunk = _rewrite_cell(cell, chunk, root)
        out.append(_named(chunk, twin, cell))
    return "".join(out)


def _named(chunk: str, twin: str, cell: LandsCell | None) -> str:
    """The cell with its definitions' names in its first line, if that line is generated."""
    head, _, body = chunk.partition("\n")
    if cell is not None:
        until = "" if cell.until is None else f"until {_words(cell.until)}: "
        mark, held = f"# {until}lands in {cell.target}", body.partition("\n")[2]
        names = list(definitions(held, cell.where, cell=True))
    elif is_folded(head):
        mark, held = "# solution", re.sub(r"\A# solution(: .*)?\n", "", body)
        names = _solution_names(held)
    else:
        return chunk
    return f"{head}\n{mark}: {_short(names, LINE - len(mark) - 2)}\n{held}" if names else chunk


def _solution_names(source: str) -> list[str]:
    """The names that a folded solution defines: a cell of definitions only, at least one of them a
    function or class. Another cell, or a cell with a comment in its first line, gives none."""
    if source.startswith("#") or not re.search(r"(?m)^(def|class) ", source):
        return []
    try:
        return list(definitions(source, "a folded cell", cell=True))
    except LandsError:
        return []


def _short(names: list[str], width: int) -> str:
    """The names as a list of at most `width` characters. A class's name stands for its methods if
    its head is there. Private names are left out first, then the last names."""
    heads = {name for name in names if "." not in name}
    shown = [n for n in names if "'" not in n and (n in heads or n.split(".")[0] not in heads)]
    if len(", ".join(shown)) > width:
        shown = [n for n in shown if not n.split(".")[-1].startswith("_")] or shown
    kept = list(shown)
    while kept and len(_and_more(kept, len(shown))) > width:
        kept.pop()
    return _and_more(kept, len(shown))


def _and_more(kept: list[str], of: int) -> str:
    more = f" and {of - len(kept)} more" if len(kept) < of else ""
    return ", ".join(kept) + more


def is_folded(head: str) -> bool:
    """Whether a cell's `# %%` line folds the cell in JupyterLab."""
    return bool(re.search(r'"source_hidden": *true', head))


def unnamed_folds(twin_text: str) -> list[str]:
    """The first lines of the folded cells that do not say in a comment what they hold."""
    chunks = [chunk.split("\n") for chunk in _CELL.split(twin_text)]
    return [lines[1] for lines in chunks if is_folded(lines[0]) and not lines[1].startswith("# ")]


def _rewrite_cell(cell: LandsCell, chunk: str, root: Path) -> str:
    path = root / cell.target
    if not path.exists():
        raise LandsError(f"{cell.where}: there is no {cell.target}")
    package = definitions(path.read_text(encoding="utf-8"), cell.target)
    lines = cell.source.splitlines()
    spans = {(found.first, found.last): found for found in cell.definitions().values()}
    for (first, last), found in sorted(spans.items(), reverse=True):
        if found.name in package:
            lines[first - 1 : last] = package[found.name].text.splitlines()
    for found in reversed(definitions("\n".join(lines), cell.where, cell=True).values()):
        above = lines[found.first - 2].strip() if found.first > 1 else ""
        method = lines[found.first - 1].lstrip().startswith(("def ", "@"))
        if "." in found.name and method and above and not above.startswith(("class ", "#")):
            lines.insert(found.first - 1, "")  # a skeleton may have no line between methods
    body = "\n".join(lines)
    return chunk.replace(cell.source, body, 1) if cell.source else chunk
