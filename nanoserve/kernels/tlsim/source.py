"""Read a kernel's source, and run its statements as Triton compiles them."""

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError, current, fault, off, source_name
from nanoserve.kernels.tlsim.loops import Range, kept
from nanoserve.kernels.tlsim.values import Value, as_value

REFUSED = {"Break", "Continue", "Try", "Raise", "With", "Lambda", "ClassDef", "Yield", "Import"}


class Source(ast.NodeTransformer):
    """The statements of a kernel's function, and the globals that they use."""

    def __init__(self, fn: Callable) -> None:
        try:
            lines, first = inspect.getsourcelines(fn)
        except (OSError, TypeError):
            raise KernelError(f"{fn.__name__}: the source of this kernel cannot be read") from None
        self.fn, self.file = fn, inspect.getsourcefile(fn)
        tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first - 1)
        for node in ast.walk(tree.body[0]):
            kind = type(node).__name__
            inside = [type(n).__name__ for n in ast.walk(node)] if kind in ("For", "While") else []
            if kind in REFUSED or "Return" in inside or (inside and node.orelse):
                what = kind.lower() if kind in REFUSED else "return or else in a loop"
                where = f"{source_name(self.file)}, line {node.lineno}"
                raise KernelError(f"{where}: Triton has no {what}")
        body = ast.Module(tree.body[0].body, [])
        names = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
        self.names = names - {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}  # its globals
        self.body = ast.fix_missing_locations(self.visit(body)).body

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """`x = 1` binds a tensor; `x: tl.constexpr = 1` a number."""
        node.value = ast.Call(ast.Name("__named", ast.Load()), [node.value], [])
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """`a if c else b` becomes __select(c, lambda: a, lambda: b)."""
        none = ast.arguments([], [], None, [], [], None, [])
        branches = (ast.Lambda(none, branch) for branch in (node.body, node.orelse))
        call = ast.Call(ast.Name("__select", ast.Load()), [node.test, *branches], [])
        return self.generic_visit(call)

    def globals(self) -> dict[str, Any]:
        """The present values of the globals that the kernel uses."""
        cells, known = self.fn.__closure__ or (), self.fn.__globals__
        known = {name: known[name] for name in self.names if name in known}
        cells = zip(self.fn.__code__.co_freevars, cells, strict=True)
        return known | {name: cell.cell_contents for name, cell in cells}

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run the function for all programs of the current wave. Return what it returns."""
        names = {"__builtins__": BUILTINS, "__named": named, "__select": select}
        for name, x in self.globals().items():
            names[name] = translate(x, f"{self.fn.__name__} reads the global {name}")
        returned = Run(self.file, names | arguments).block(self.body)
        return returned and returned[0]


@cache
def _code(node: ast.AST, file: str) -> Any:
    if isinstance(node, ast.expr):
        return compile(ast.Expression(node), file, "eval")
    return compile(ast.Module([node], []), file, "exec")


class Run:
    """A run of a kernel's statements. A variable that is bound first in a loop, or in one branch of
    an `if`, ends with it. With checks, code that no program runs also runs, with all programs off:
    Triton compiles it."""

    def __init__(self, file: str, names: dict[str, Any]) -> None:
        self.file, self.names = file, names

    def value(self, node: ast.expr) -> Any:
        """The value of an expression."""
        return eval(_code(node, self.file), self.names)

    def block(self, statements: list[ast.stmt]) -> tuple | None:
        """Run statements. Return (result,) if one of them is a return."""
        for statement in statements:
            kind = type(statement).__name__
            if kind == "Return":
                return (statement.value and self.value(statement.value),)
            if kind in ("For", "While", "If"):
                if returned := getattr(self, kind)(statement, dict(self.names)):
                    return returned
            else:
                exec(_code(statement, self.file), self.names)
        return None

    def merge(self, before: dict[str, Any]) -> dict[str, Any]:
        """Keep the old values in programs that are not active. Remove and return new variables."""
        for name, old in before.items():
            new = self.names[name]
            if new is not old and isinstance(old, Value) and isinstance(new, Value):
                self.names[name] = before[name] = kept(name, old, new)
        return {name: self.names.pop(name) for name in self.names.keys() - before.keys()}

    def For(self, node: ast.For, before: dict[str, Any]) -> None:
        bounds = self.value(node.iter)
        if not isinstance(bounds, Range | builtins.range):
            raise fault("a kernel loops only over range, tl.range or tl.static_range")
        for self.names[node.target.id] in bounds:
            self.block(node.body)
            if isinstance(bounds, Range):  # else unrolled, and variables may change their types
                self.merge(before)

    def While(self, node: ast.While, before: dict[str, Any]) -> None:
        if not (more := bool(self.value(node.test))) and current().options.checks:
            with off():
                self.block(node.body)
                self.merge(before)
        while more:
            self.block(node.body)
            self.merge(before)
            more = bool(self.value(node.test))

    def If(self, node: ast.If, before: dict[str, Any]) -> tuple | None:
        condition = self.value(node.test)
        branches = (node.body, node.orelse) if condition else (node.orelse, node.body)
        if not isinstance(condition, Value) or not current().options.checks:
            return self.block(branches[0])
        other = {}
        if not any(isinstance(n, ast.Return) for n in ast.walk(node)):
            with off():
                self.block(branches[1])
                other = self.merge(before)
        returned = self.block(branches[0])
        for name, new in self.merge(before).items():
            if name in other:
                self.names[name] = kept(name, other[name], new) if isinstance(new, Value) else new
        return returned


def select(condition: Any, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """`then() if condition else other()`."""
    taken, skipped = (then, other) if condition else (other, then)
    if not isinstance(condition, Value) or not current().options.checks:
        return taken()
    with off():
        off_value = as_value(skipped())
    return kept("the result", off_value, as_value(taken()))


def named(x: Any) -> Any:
    """The value that an assignment binds: a number becomes a tensor."""
    if isinstance(x, tuple):
        return tuple(map(named, x))
    return as_value(x) if isinstance(x, int | float) else x


ALLOWED = (len, list, float, int, isinstance, getattr, hasattr, print)
BUILTINS = {f.__name__: f for f in ALLOWED} | {"range": language.range}
BUILTINS |= {"min": language.minimum, "max": language.maximum}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def translate(x: Any, use: str = "") -> Any:
    """tlsim's counterpart of a global of a kernel; KernelError for a global that Triton refuses."""
    jit = sys.modules[f"{__package__}.launch"].jit  # it imports this module, not the reverse
    kind, name = type(x), getattr(x, "__name__", None) or getattr(x, "name", "")
    home = f"{name if kind is ModuleType else getattr(x, '__module__', '') or kind.__module__}."
    if kind.__name__ == "constexpr":
        return x.value
    if hasattr(x, "fn"):
        return jit(x)
    if home.startswith("triton.language."):  # the module, or something from it
        return language if kind is ModuleType else getattr(language, _DTYPES.get(name, name))
    if home in ("triton.", f"{__package__}.") and kind is ModuleType:
        functions = {"cdiv": language.cdiv, "next_power_of_2": next_power_of_2}
        return SimpleNamespace(language=language, jit=jit, **functions)
    own = home.startswith(f"{__package__}.")
    if not use or own or kind is ModuleType or isinstance(x, type | torch.dtype):
        return x
    rule = "is not marked @triton.jit" if callable(x) else "is not wrapped in tl.constexpr"
    raise KernelError(f"{use}, which {rule}: a kernel can use no other globals")
