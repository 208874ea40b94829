"""Read a kernel's source, bind its names to tlsim, and check `if` and `while` as Triton does."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError, current, source_name
from nanoserve.kernels.tlsim.loops import Loop, Region
from nanoserve.kernels.tlsim.values import Value, as_value


class If(Region):
    """An `if`, or `a if c else b`. With checks, a condition that is known only when the kernel runs
    makes the branch that is not taken run too, before the other one and with all programs off."""

    where = "is {} before the if or in one branch, and {} after a branch"

    def __iter__(self) -> Iterator[bool]:
        taken, self.bound = bool(self.head), []
        self.both = isinstance(self.head, Value) and current().options.checks
        if self.both:
            yield from self.off(not taken)
        yield taken

    def carry(self, names: list[str], now: dict[str, Any]) -> list[Any]:
        """The names' values after a branch. What only the other branch has bound is not bound."""
        self.bound.append({name for name in names if now.get(name) is not None} | {*self.values})
        carried = super().carry(names, now) if self.both else [now.get(name) for name in names]
        if self.both and len(self.bound) == 1:
            carried = [x if n in self.values else None for n, x in zip(names, carried, strict=True)]
            self.values |= {name: now[name] for name in self.bound[0] - {*self.values}}
        return carried

    def keeps(self, name: str) -> bool:
        """Whether a name is bound after the `if`: before it, or in each branch that ran."""
        return all(name in bound for bound in self.bound)


class Exit(If):
    """An `if` with a return in a branch: only the branch that is taken runs."""

    def off(self, _: bool) -> Iterator[bool]:
        return iter(())


class While(Region):
    """A `while`: all programs take the same number of turns. It runs at least once, as a Loop."""

    def __iter__(self) -> Iterator[None]:
        more = bool(self.head())
        if not more and current().options.checks:
            yield from self.off(None)
        while more:
            yield
            more = bool(self.head())


def select(condition: Any, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """`then() if condition else other()`."""
    for taken in (region := If(condition, {})):
        result = then() if taken else other()
        result = as_value(result) if region.both else result
        region.carry(["the result"], {"the result": result})
    return result


def named(x: Any) -> Any:
    """The value that an assignment binds: a number becomes a tensor, unless it is tl.constexpr."""
    if isinstance(x, tuple):
        return tuple(map(named, x))
    return as_value(x) if isinstance(x, int | float) else x


REFUSED = {"Break", "Continue", "Try", "Raise", "With", "Lambda", "ClassDef", "Yield", "Import"}
ALLOWED = (len, list, float, int, isinstance, getattr, hasattr, print, locals)
BUILTINS = {f.__name__: f for f in ALLOWED} | {"range": language.range}
BUILTINS |= {"min": language.minimum, "max": language.maximum}
CONTROL = {f"__{x.__name__}": x for x in (Loop, While, If, Exit, select, named)}


class Source:
    """A kernel's function, compiled with its control flow rewritten."""

    def __init__(self, fn: Callable) -> None:
        try:
            lines, first = inspect.getsourcelines(fn)
        except (OSError, TypeError):
            raise KernelError(f"{fn.__name__}: the source of this kernel cannot be read") from None
        tree, file = ast.parse(textwrap.dedent("".join(lines))), inspect.getsourcefile(fn)
        function, self.fn = ast.increment_lineno(tree, first - 1).body[0], fn
        for node in ast.walk(function):
            kind = type(node).__name__
            inside = [type(n).__name__ for n in ast.walk(node)] if kind in ("For", "While") else []
            if kind in REFUSED or "Return" in inside or (inside and node.orelse):
                what = kind.lower() if kind in REFUSED else "return or else in a loop"
                raise KernelError(f"{source_name(file)}, line {node.lineno}: Triton has no {what}")
        function.decorator_list, function.returns = [], None
        for arg in (arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)):
            arg.annotation = None
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        self.names = names - {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}  # its globals
        self.code = compile(ast.fix_missing_locations(Rewrite().visit(tree)), file, "exec")

    def globals(self) -> dict[str, Any]:
        """The present values of the globals that the kernel uses."""
        cells, known = self.fn.__closure__ or (), self.fn.__globals__
        known = {name: known[name] for name in self.names if name in known}
        cells = zip(self.fn.__code__.co_freevars, cells, strict=True)
        return known | {name: cell.cell_contents for name, cell in cells}

    def function(self) -> Callable:
        """The kernel as a Python function, with the present values of its globals."""
        space = {"__tlsim__": True, "__builtins__": BUILTINS, **CONTROL}
        for name, x in self.globals().items():
            space[name] = translate(x, f"{self.fn.__name__} reads the global {name}")
        exec(self.code, space)
        return space[self.fn.__name__]


class Rewrite(ast.NodeTransformer):
    """Rewrite a kernel's control flow as loops over regions. `for i in range(n): body` becomes

    region = __Loop(range(n), locals())
    for i in region:
        body
        [a, i] = region.carry(["a", "i"], locals())
    if not region.keeps("a"): a = None; del a  # and the same for i
    """

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = _call("named", node.value)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        then, other = _function(node.body), _function(node.orelse)
        return self.generic_visit(_call("select", node.test, then, other))

    def visit_For(self, node: ast.For) -> Any:
        if ast.unparse(node.iter).partition("(")[0].endswith("static_range"):
            return self.generic_visit(node)  # unrolled: i is a plain number
        return self._region(node, "Loop", node.iter, ast.unparse(node.target), node.body)

    def visit_While(self, node: ast.While) -> Any:
        return self._region(node, "While", _function(node.test), "__turn", node.body)

    def visit_If(self, node: ast.If) -> Any:
        kind = "Exit" if any(isinstance(n, ast.Return) for n in ast.walk(node)) else "If"
        taken = f"__taken_{node.lineno}_{node.col_offset}"
        branch = ast.If(ast.Name(taken, ast.Load()), node.body, node.orelse)
        return self._region(node, kind, node.test, taken, [self.generic_visit(branch)])

    def _region(self, node: Any, kind: str, head: ast.expr, target: str, body: list) -> list:
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        names = sorted({n.id for n in stored if isinstance(n.ctx, ast.Store)})
        region = f"__region_{node.lineno}_{node.col_offset}"
        source = f"{region} = __{kind}(0, locals())\nfor {target} in {region}:\n"
        source += f" [{', '.join(names)}] = {region}.carry({names}, locals())\n"
        for name in names:
            source += f"if not {region}.keeps({name!r}): {name} = None; del {name}\n"
        new = ast.parse(source)
        for part in ast.walk(new):
            ast.copy_location(part, node)
        new.body[0].value.args[0] = self.visit(head)
        body = body if target.startswith("__taken") else self.generic_visit(ast.Module(body)).body
        new.body[1].body[:0] = body
        return new.body


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"__{name}", ast.Load()), [*args], [])


def _function(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def translate(x: Any, use: str = "") -> Any:
    """tlsim's counterpart of a global of a kernel; KernelError for a global that Triton refuses."""
    from nanoserve.kernels.tlsim.launch import jit

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
