"""Read a kernel's source, refuse what Triton refuses, and bind its names to tlsim."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import branches, language
from nanoserve.kernels.tlsim.grid import KernelError, source_name
from nanoserve.kernels.tlsim.loops import Loop
from nanoserve.kernels.tlsim.values import as_value

BUILTINS = {  # the built-in functions that a kernel may use
    **{f.__name__: f for f in (len, list, float, int, isinstance, getattr, hasattr, print, locals)},
    "range": language.range,
    "min": language.minimum,
    "max": language.maximum,
}
REFUSED = {"Break", "Continue", "Try", "Raise", "With", "Lambda", "ClassDef", "Yield", "Import"}


class Source:
    """A kernel's function, compiled with its control flow rewritten."""

    def __init__(self, fn: Callable) -> None:
        try:
            lines, first = inspect.getsourcelines(fn)
        except (OSError, TypeError):
            raise KernelError(f"{fn.__name__}: the source of this kernel cannot be read") from None
        tree, file = ast.parse(textwrap.dedent("".join(lines))), inspect.getsourcefile(fn)
        ast.increment_lineno(tree, first - 1)
        [function] = tree.body
        for node in ast.walk(function):
            kind = type(node).__name__
            inside = [type(n).__name__ for n in ast.walk(node)] if kind in ("For", "While") else []
            if kind in REFUSED or "Return" in inside or (inside and node.orelse):
                what = kind.lower() if kind in REFUSED else "return or else in a loop"
                raise KernelError(f"{source_name(file)}, line {node.lineno}: Triton has no {what}")
        function.decorator_list, function.returns = [], None
        for arg in ast.walk(function.args):
            if isinstance(arg, ast.arg):
                arg.annotation = None
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        self.names = names - {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}  # its globals
        self.fn, tree = fn, ast.fix_missing_locations(Rewrite().visit(tree))
        self.code = compile(tree, file, "exec")

    def globals(self) -> dict[str, Any]:
        """The present values of the globals that the kernel uses."""
        closure = dict(zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True))
        known = {name: cell.cell_contents for name, cell in closure.items()}
        known |= {
            name: self.fn.__globals__[name] for name in self.names & self.fn.__globals__.keys()
        }
        return known

    def function(self) -> Callable:
        """The kernel as a Python function, with the present values of its globals."""
        namespace = {"__tlsim__": True, "__builtins__": BUILTINS, **CONTROL}
        for name, x in self.globals().items():
            namespace[name] = translate(x, f"{self.fn.__name__} reads the global {name}")
        exec(self.code, namespace)
        return namespace[self.fn.__name__]


def named(x: Any) -> Any:
    """The value that an assignment binds: a number becomes a tensor, unless it is tl.constexpr."""
    if isinstance(x, tuple):
        return tuple(map(named, x))
    return as_value(x) if isinstance(x, int | float) else x


CONTROL = {
    "__Loop": Loop,
    "__If": branches.If,
    "__While": branches.While,
    "__select": branches.select,
    "__named": named,
}


class Rewrite(ast.NodeTransformer):
    """Rewrite a kernel's control flow. `for i in range(n): body` becomes

    region = __Loop(range(n), locals())
    for i in region:
        body
        a, b, i = region.carry(("a", "b", "i"), locals())
    if not region.keeps("a"): a = None; del a  # and the same for b and i
    """

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name("__named", ast.Load()), [node.value], [])
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        then, other = (ast.Lambda(_NO_ARGUMENTS, x) for x in (node.body, node.orelse))
        return ast.Call(ast.Name("__select", ast.Load()), [node.test, then, other], [])

    def visit_For(self, node: ast.For) -> Any:
        bounds = ast.unparse(node.iter)
        if bounds.partition("(")[0].endswith("static_range"):
            return self.generic_visit(node)  # unrolled: i is a plain number
        return self._region(node, "__Loop({iter}, locals())", iter=node.iter)

    def visit_While(self, node: ast.While) -> Any:
        return self._region(node, "__While(locals())")

    def visit_If(self, node: ast.If) -> Any:
        both = not any(isinstance(n, ast.Return) for n in ast.walk(node))
        return self._region(node, f"__If({{test}}, locals(), {both})", test=node.test)

    def _region(self, node: Any, opened: str, **parts: ast.expr) -> list[ast.stmt]:
        stored = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        names = tuple(sorted({n.id for n in stored if isinstance(n.ctx, ast.Store)}))
        region = f"__region_{node.lineno}_{node.col_offset}"
        self.generic_visit(node)
        source = opened.format(**{name: ast.unparse(part) for name, part in parts.items()})
        enter = _at(node, f"{region} = {source}")
        carry = _at(node, f"[{', '.join(names)}] = {region}.carry({names}, locals())")
        leave = (f"if not {region}.keeps({name!r}): {name} = None; del {name}" for name in names)
        if isinstance(node, ast.If):
            [loop] = _at(node, f"for {region}_taken in {region}: pass")
            node.test, loop.body = _at(node, f"{region}_taken")[0].value, [node, *carry]
            node = loop
        else:
            node.body += carry
            [call] = _at(node, f"{region}.test(0)" if isinstance(node, ast.While) else region)
            if isinstance(node, ast.While):
                call.value.args, node.test = [node.test], call.value
            else:
                node.iter = call.value
        return [*enter, node, *(end for line in leave for end in _at(node, line))]


_NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])


def _at(node: ast.stmt, source: str) -> list[ast.stmt]:
    """Statements with the line number of node."""
    return [ast.increment_lineno(new, node.lineno - 1) for new in ast.parse(source).body]


_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def translate(x: Any, use: str = "") -> Any:
    """tlsim's counterpart of a global of a kernel; KernelError for a global that Triton refuses."""
    from nanoserve.kernels.tlsim.launch import Kernel, jit

    home, kind = getattr(x, "__module__", None) or "", type(x)
    if isinstance(x, ModuleType):
        if x.__name__.startswith("triton.language"):
            return language
        functions = {"jit": jit, "cdiv": language.cdiv, "next_power_of_2": next_power_of_2}
        triton = x.__name__ in ("triton", __package__)
        return SimpleNamespace(language=language, **functions) if triton else x
    if kind.__name__ == "constexpr":
        return x.value
    if kind.__module__.startswith("triton.language"):  # tl.float32 and the like
        return getattr(language, _DTYPES.get(x.name, x.name))
    if home.startswith("triton.language"):  # from triton.language import exp
        return getattr(language, x.__name__)
    if hasattr(x, "fn") or isinstance(x, Kernel):
        return jit(x)
    if not use or home.startswith(__package__) or isinstance(x, type | torch.dtype):
        return x
    rule = "is not marked @triton.jit" if callable(x) else "is not wrapped in tl.constexpr"
    raise KernelError(f"{use}, which {rule}: a kernel can use no other globals")
