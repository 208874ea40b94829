"""The lines of code of tlsim: blank lines, comments and docstrings do not count."""

import ast
import io
import tokenize
from pathlib import Path

from nanoserve.kernels import tlsim

FOLDER = Path(tlsim.__file__).parent
CORE = {  # what Days 21 and 22 land, by module
    "values": None,  # all of it
    "grid": {"Options", "Wave", "options_now", "options", "current", "running", "waves"},
    "memory": {"load", "store", "access", "take"},
    "launch": {"HINTS", "Kernel", "jit"},
    "language": {
        *("program_id", "num_programs", "arange", "full", "zeros", "broadcast_to"),
        *("_reduction", "reduce_sum", "reduce_max", "reduce_min", "dot", "Range", "kept"),
    },
}
BLANK = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(file: Path) -> set[int]:
    """The numbers of a file's lines of code."""
    text, strings = file.read_text(encoding="utf-8"), set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if documented and ast.get_docstring(node) is not None:
            strings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in BLANK)
    return {line for lines in code for line in lines} - strings


def core_lines(module: str) -> int:
    """The lines of code of a module's part of the core, and of its imports."""
    file, chosen = FOLDER / f"{module}.py", CORE[module]
    code, found, lines = code_lines(file), set(), set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names = {getattr(node, "name", None)}
        names |= {
            n.id for t in getattr(node, "targets", ()) for n in ast.walk(t) if hasattr(n, "id")
        }
        found |= names
        if not chosen or names & chosen or isinstance(node, ast.Import | ast.ImportFrom):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            lines |= set(range(first, node.end_lineno + 1))
    assert not chosen or chosen <= found
    return len(lines & code)


def test_the_core_is_small():
    """Programs, blocks, pointers, load and store, reductions, dot, loops and the launch."""
    assert sum(map(core_lines, CORE)) <= 362


def test_all_of_it_does_not_grow():
    assert sum(len(code_lines(file)) for file in FOLDER.glob("*.py")) <= 802
