"""The lines of code of tlsim: blank lines, comments and docstrings do not count."""

import ast
import io
import tokenize
from pathlib import Path

from nanoserve.kernels import tlsim

FOLDER = Path(tlsim.__file__).parent
CORE = ("values", "memory", "launch", "loops")  # and this part of language:
IN_LANGUAGE = {
    *("program_id", "num_programs", "arange", "full", "zeros", "broadcast_to"),
    *("reduce_sum", "reduce_max", "reduce_min", "_reduce", "dot"),
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


def test_the_core_is_small():
    """Launch, program ids, blocks, pointers, values, load and store, reductions, dot, loops."""
    language = FOLDER / "language.py"
    body = ast.parse(language.read_text(encoding="utf-8")).body
    chosen = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
    chosen += [n for n in body if isinstance(n, ast.FunctionDef) and n.name in IN_LANGUAGE]
    assert len(chosen) >= len(IN_LANGUAGE)
    lines = {line for n in chosen for line in range(n.lineno, n.end_lineno + 1)}
    core = sum(len(code_lines(FOLDER / f"{name}.py")) for name in CORE)
    assert core + len(lines & code_lines(language)) <= 350


def test_all_of_it_does_not_grow():
    assert sum(len(code_lines(file)) for file in FOLDER.glob("*.py")) <= 960
