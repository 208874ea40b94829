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
    "memory": {"load", "store", "access", "joined", "take"},
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


def names_in(node: ast.AST, context: type) -> set[str]:
    """The names that a piece of code uses (ast.Load) or binds (ast.Store)."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context))
    return {n.id for n in found}


def core_lines(module: str) -> int:
    """The lines of code of a module's part of the core, and of the imports that it uses."""
    file, chosen = FOLDER / f"{module}.py", CORE[module]
    body = ast.parse(file.read_text(encoding="utf-8")).body
    imports = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
    plain = [n for n in body if isinstance(n, ast.Assign)]
    bound = {n: names_in(n, ast.Store) if n in plain else {getattr(n, "name", "")} for n in body}
    parts = [n for n in body if not chosen or (n not in imports and bound[n] & chosen)]
    assert not chosen or chosen <= {name for n in parts for name in bound[n]}
    used = {name for n in parts for name in names_in(n, ast.Load)}
    parts += [n for n in imports if {a.asname or a.name for a in n.names} & used]
    heads = {n: [n.lineno, *(d.lineno for d in getattr(n, "decorator_list", ()))] for n in parts}
    lines = {line for n in parts for line in range(min(heads[n]), n.end_lineno + 1)}
    return len(lines & code_lines(file))


def test_the_core_is_small():
    """Programs, blocks, pointers, load and store, reductions, dot, loops and the launch."""
    assert sum(map(core_lines, CORE)) <= 350


def test_all_of_it_does_not_grow():
    assert sum(len(code_lines(file)) for file in FOLDER.glob("*.py")) <= 822
