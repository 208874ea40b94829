"""A kernel: its source, which runs statement by statement as Triton compiles it, and its launch."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from types import ModuleType

import torch

from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import current, fault, off, options_now, refuse, running, waves
from nanoserve.kernels.tlsim.language import Range, kept
from nanoserve.kernels.tlsim.replay import Recordings
from nanoserve.kernels.tlsim.rules import One
from nanoserve.kernels.tlsim.values import Value, as_value, flattened, pointer

# ---- the launch

HINTS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # for a compiler: accepted and ignored


class Kernel:
    """A function in Triton's language, launched as kernel[grid](*args, **meta)."""

    def __init__(self, fn: Callable) -> None:
        while hasattr(fn, "fn"):  # wrapped by triton.jit or triton.autotune
            fn = fn.fn
        update_wrapper(self, fn)
        self.fn, self.source, self.recordings = fn, Source(fn), Recordings(self)
        self.constants = {n for n, kind in fn.__annotations__.items() if "constexpr" in str(kind)}
        # bind(*args, **kwargs) gives the arguments by name, by Python's own rules
        self.bind = eval(f"lambda {', '.join(inspect.signature(fn).parameters)}: locals()")
        self.bind.__defaults__, self.bind.__qualname__ = fn.__defaults__, fn.__name__

    def __getitem__(self, grid) -> Callable:
        return partial(self.launch, grid)

    def __call__(self, *args, **kwargs):
        """Run this kernel inside another kernel, which calls it."""
        return self.source.run(self.bind(*args, **kwargs))

    @torch.no_grad()
    def launch(self, grid, *args, **kwargs) -> None:
        """Run every program of the grid: up to three sizes, or a function that returns them.

        Tensors become pointers to their first elements, and numbers become scalars; tl.constexpr
        parameters stay as they are. Raises TypeError for arguments that do not fit the signature,
        ValueError for a wrong grid, and KernelError for an error in the kernel.
        """
        given = self.bind(*args, **{name: x for name, x in kwargs.items() if name not in HINTS})
        grid = grid(given) if callable(grid) else grid
        sizes = grid if isinstance(grid, tuple) else (grid,)
        if not all(isinstance(n, int) and n >= 0 for n in sizes) or not 1 <= len(sizes) <= 3:
            raise ValueError(f"{self.__name__}: a grid must be one to three sizes, got {grid}")
        options = options_now()
        watched = options.checks or options.poison or options.trace or options.order == "serial"
        run = self.recordings.launch if options.replay and not watched else self.run
        run((*sizes, 1, 1)[:3], given)

    def run(self, grid: tuple[int, int, int], given: dict, inputs=()) -> None:
        """Run the kernel for each wave of programs. `inputs`: numbers that are tensors already."""
        devices = (x.device for x in given.values() if isinstance(x, torch.Tensor))
        device = next(devices, torch.device("cpu"))
        arguments = {name: self._argument(name, x, device) for name, x in given.items()}
        arguments |= {name: Value(inputs[name]) for name in inputs}
        for wave in waves(grid, device, self.source.at):
            with running(wave):
                self.source.run(arguments)

    def _argument(self, name: str, x, device: torch.device):
        if x is None or name in self.constants:
            return translate(x)
        if isinstance(x, torch.Tensor):
            return pointer(name, flattened(x))
        if not isinstance(x, int | float):
            raise TypeError(f"{self.__name__}: {name} must not be a {type(x).__name__}")
        return One(1) if type(x) is int and x == 1 else as_value(x, device=device)


def jit(fn: Callable) -> Kernel:
    """Make a tlsim kernel from a function, or from a kernel of triton.jit."""
    return fn if isinstance(fn, Kernel) else Kernel(fn)


# ---- the source

REFUSED = {"Break", "Continue", "Try", "Raise", "With", "Lambda", "ClassDef", "Yield", "Import"}


class Source(ast.NodeTransformer):
    """The statements of a kernel's function, and the globals that they use."""

    def __init__(self, fn: Callable) -> None:
        lines, first = inspect.getsourcelines(fn)
        self.fn, self.at = fn, (inspect.getsourcefile(fn), first)
        tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first - 1)
        body = ast.Module(tree.body[0].body, [])
        for node in ast.walk(body):
            kind, loop = type(node).__name__, isinstance(node, ast.For | ast.While)
            leaves = loop and any(isinstance(n, ast.Return) for n in ast.walk(node))
            if kind in REFUSED or leaves or (loop and node.orelse):
                what = "return or else in a loop" if loop else kind.lower()
                raise fault(f"Triton has no {what}", at=(self.at[0], node.lineno))
        names = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
        self.names = names - {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}  # its globals
        self.body = ast.fix_missing_locations(self.visit(body)).body

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """`x = 1` binds a tensor; `x: tl.constexpr = 1` a number."""
        node.value = ast.Call(ast.Name("__named", ast.Load()), [node.value], [])
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """`a if c else b` becomes __select(c, lambda: a, lambda: b)."""
        call = ast.parse("__select(0, lambda: 0, lambda: 0)", mode="eval").body
        call.args[0], call.args[1].body, call.args[2].body = node.test, node.body, node.orelse
        return self.generic_visit(call)

    def globals(self) -> dict:
        """The present values of the globals that the kernel uses."""
        cells, known = self.fn.__closure__ or (), self.fn.__globals__
        known = {name: known[name] for name in self.names if name in known}
        cells = zip(self.fn.__code__.co_freevars, cells, strict=True)
        return known | {name: cell.cell_contents for name, cell in cells}

    def run(self, arguments: dict):
        """Run the function for all programs of the current wave. Return what it returns."""
        use = f"{self.fn.__name__} reads the global"
        names = {name: translate(x, f"{use} {name}") for name, x in self.globals().items()}
        run = Run(self.at[0], {"__builtins__": BUILTINS, **names, **arguments})
        returned = run.block(self.body)
        return returned and returned[0]


@cache
def _code(node: ast.AST, file: str):
    if isinstance(node, ast.expr):
        return compile(ast.Expression(node), file, "eval")
    return compile(ast.Module([node], []), file, "exec")


class Run:
    """A run of a kernel's statements. A variable that is bound first in a loop, or in one branch of
    an `if`, ends with it. With checks, code that no program runs also runs, with all programs off:
    Triton compiles it."""

    def __init__(self, file: str, names: dict) -> None:
        self.file, self.names = file, names

    def value(self, node: ast.AST):
        """The value of an expression; None of a statement."""
        return eval(_code(node, self.file), self.names)

    def block(self, statements: list[ast.stmt]) -> tuple | None:
        """Run statements. Return (result,) if one of them is a return."""
        wave, returned = current(), None
        outer = wave.at
        for statement in statements:
            wave.at = self.file, statement.lineno
            run = getattr(self, type(statement).__name__, self.value)
            if returned := run(statement):
                break
        wave.at = outer
        return returned

    def merge(self, before: dict) -> dict:
        """Keep the old values in programs that are not active. Remove and return new variables."""
        for name, old in before.items():
            self.names[name] = before[name] = kept(name, old, self.names[name])
        return {name: self.names.pop(name) for name in self.names.keys() - before.keys()}

    def Return(self, node: ast.Return) -> tuple:
        return (node.value and self.value(node.value),)

    def For(self, node: ast.For) -> None:
        bounds, before = self.value(node.iter), dict(self.names)
        refuse(not isinstance(bounds, Range | range), "a loop needs range or tl.static_range")
        for self.names[node.target.id] in bounds:
            self.block(node.body)
            if isinstance(bounds, Range):  # else unrolled, and variables may change their types
                self.merge(before)

    def While(self, node: ast.While) -> None:
        before = dict(self.names)
        if current().options.checks:  # there may be no turn
            self.skip(node.body, before)
        while self.value(node.test):
            self.block(node.body)
            self.merge(before)

    def If(self, node: ast.If) -> tuple | None:
        condition, before = self.value(node.test), dict(self.names)
        taken, skipped = (node.body, node.orelse) if condition else (node.orelse, node.body)
        if not isinstance(condition, Value) or not current().options.checks:
            return self.block(taken)
        other = self.skip(skipped, before)
        returned, new = self.block(taken), self.merge(before)
        self.names |= {name: kept(name, other[name], new[name]) for name in other.keys() & new}
        return returned

    def skip(self, statements: list[ast.stmt], before: dict) -> dict:
        """Run what no program runs, with all programs off. Return the new variables."""
        with off():
            self.block(statements)
            return self.merge(before)


def select(condition, then: Callable, other: Callable):
    """`then() if condition else other()`."""
    taken, skipped = (then, other) if condition else (other, then)
    if not isinstance(condition, Value) or not current().options.checks:
        return taken()
    with off():
        unused = as_value(skipped())
    return kept("the result", unused, as_value(taken()))


def named(x):
    """The value that an assignment binds: a number becomes a tensor."""
    if isinstance(x, tuple):
        return tuple(map(named, x))
    return as_value(x) if isinstance(x, int | float) else x


BUILTINS = {f.__name__: f for f in (len, list, float, int, isinstance, getattr, hasattr, print)}
BUILTINS |= {"range": Range, "min": language.minimum, "max": language.maximum}
BUILTINS |= {"__named": named, "__select": select}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def translate(x, use: str = ""):
    """tlsim's counterpart of a global of a kernel; KernelError for a global that Triton refuses."""
    if type(x).__name__ == "constexpr":
        return x.value
    if hasattr(x, "fn"):
        return jit(x)
    module = isinstance(x, ModuleType)
    home = x.__name__ if module else getattr(x, "__module__", None) or type(x).__module__
    if home.startswith("triton"):  # a module, or something from it
        name = getattr(x, "__name__", None) or x.name
        space = sys.modules[__package__] if home == "triton" else language
        return space if module else getattr(space, DTYPES.get(name, name))
    if not use or home.startswith(__package__) or module or isinstance(x, type | torch.dtype):
        return x
    rule = "is not marked @triton.jit" if callable(x) else "is not wrapped in tl.constexpr"
    raise fault(f"{use}, which {rule}: a kernel can use no other globals")
