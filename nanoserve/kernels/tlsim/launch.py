"""Read a kernel's source, bind its names to tlsim, and launch it on a grid."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from itertools import product
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import (
    KernelError,
    Options,
    Wave,
    _options,
    _wave,
    current,
    source_name,
)
from nanoserve.kernels.tlsim.loops import Loop, Rewrite, named
from nanoserve.kernels.tlsim.values import Buffer, Value, as_value

HINTS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # for a compiler: accepted and ignored


class One(int):
    """An integer argument equal to 1: Triton compiles it as a constant."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an integer argument equal to 1 is a constant in Triton, and has no .{name}: "
            "this kernel would fail only when the argument is 1"
        )


class Kernel:
    """A function in Triton's language, launched as kernel[grid](*args, **meta)."""

    def __init__(self, fn: Callable) -> None:
        while hasattr(fn, "fn"):  # wrapped by triton.jit or triton.autotune
            fn = fn.fn
        self.fn = fn
        update_wrapper(self, fn)
        self.signature = inspect.signature(fn)
        self._code, self._names = _read(fn)

    def __getitem__(self, grid: Any) -> Callable:
        return partial(self.launch, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run this kernel inside another kernel, which calls it."""
        current()
        return self._function()(*args, **kwargs)

    def launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Run every program of the grid: up to three sizes, or a function that returns them.

        Tensors become pointers to their first elements, and numbers become scalars; tl.constexpr
        parameters stay as they are. Raises TypeError for arguments that do not fit the signature,
        ValueError for a wrong grid or several devices, and KernelError for an error in the kernel.
        """
        try:
            bound = self.signature.bind(
                *args, **{k: v for k, v in kwargs.items() if k not in HINTS}
            )
        except TypeError as error:
            raise TypeError(f"{self.__name__}: {error}") from None
        bound.apply_defaults()
        grid = grid(bound.arguments) if callable(grid) else grid
        grid = (grid,) if isinstance(grid, int) else grid
        sizes = isinstance(grid, tuple) and all(isinstance(n, int) and n >= 0 for n in grid)
        if not sizes or not 1 <= len(grid) <= 3:
            raise ValueError(f"{self.__name__}: a grid must be one to three sizes, got {grid}")
        grid += (1,) * (3 - len(grid))
        devices = {x.device for x in bound.arguments.values() if isinstance(x, torch.Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{self.__name__}: needs one device, got {sorted(map(str, devices))}")
        options = _options.get(Options())
        function, writers = self._function(), {}
        for ids in _waves(grid, options):
            ids = tuple(part.to(*devices) for part in ids)
            token = _wave.set(Wave(grid, ids, options, writers))
            try:
                function(*(self._argument(name, x) for name, x in bound.arguments.items()))
            finally:
                _wave.reset(token)

    def _argument(self, name: str, x: Any) -> Any:
        annotation = self.signature.parameters[name].annotation
        if x is None or getattr(annotation, "__name__", str(annotation)).endswith("constexpr"):
            return _translate(x)
        if isinstance(x, torch.Tensor):
            start = torch.zeros(1, 1, 1, dtype=torch.int64, device=x.device)
            return Value(start, buffer=Buffer(name, x))
        if not isinstance(x, int | float):
            raise TypeError(f"{self.__name__}: {name} must not be a {type(x).__name__}")
        return One(1) if x is not True and x == 1 and isinstance(x, int) else as_value(x)

    def _function(self) -> Callable:
        """The kernel as a Python function, with the present values of its globals."""
        known = {**self.fn.__globals__, **inspect.getclosurevars(self.fn).nonlocals}
        namespace = {
            "__tlsim__": True,
            "__Loop": Loop,
            "__named": named,
            "__builtins__": BUILTINS,
        }
        for name in self._names & known.keys():
            namespace[name] = _translate(known[name], f"{self.__name__} reads the global {name}")
        exec(self._code, namespace)
        return namespace[self.fn.__name__]


def _waves(grid: tuple[int, int, int], options: Options) -> Iterator[tuple[torch.Tensor, ...]]:
    """The ids of each wave's programs, in the form of Wave.ids."""
    x, y, z = grid
    if options.order == "serial":
        shuffled = torch.Generator().manual_seed(options.seed)
        for program in torch.randperm(x * y * z, generator=shuffled).tolist():
            place = (program % x, program // x % y, program // (x * y))
            yield tuple(torch.full((1, 1, 1), i, dtype=torch.int32) for i in place)
        return
    deep = min(z, options.wave)
    high = min(y, options.wave // max(deep, 1))
    wide = min(x, options.wave // max(deep * high, 1))
    if x * y * z:
        sizes = zip(grid, (wide, high, deep), strict=True)
        along = (torch.arange(n, dtype=torch.int32).split(size) for n, size in sizes)
        for i, j, k in product(*along):
            yield i.view(-1, 1, 1), j.view(1, -1, 1), k.view(1, 1, -1)


def jit(fn: Callable) -> Kernel:
    """Make a tlsim kernel from a function, or from a kernel of triton.jit."""
    return fn if isinstance(fn, Kernel) else Kernel(fn)


def _read(fn: Callable) -> tuple[CodeType, set[str]]:
    """Return (the kernel compiled with its loops rewritten, the global names that it uses)."""
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
    names -= {*fn.__code__.co_varnames, *fn.__code__.co_cellvars}  # the kernel's own variables
    return compile(ast.fix_missing_locations(Rewrite().visit(tree)), file, "exec"), names


BUILTINS = {  # the built-in functions that a kernel may use
    **{f.__name__: f for f in (len, list, float, int, isinstance, getattr, hasattr, print, locals)},
    "range": language.range,
    "min": language.minimum,
    "max": language.maximum,
}
REFUSED = {"Break", "Continue", "Try", "Raise", "With", "Lambda", "ClassDef", "Yield", "Import"}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def _translate(x: Any, use: str = "") -> Any:
    """tlsim's counterpart of a global of a kernel; KernelError for a global that Triton refuses."""
    home, kind = getattr(x, "__module__", None) or "", type(x)
    if isinstance(x, ModuleType):
        if x.__name__.startswith("triton.language"):
            return language
        return _TRITON if x.__name__ in ("triton", __package__) else x
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


_TRITON = SimpleNamespace(
    language=language, jit=jit, cdiv=language.cdiv, next_power_of_2=next_power_of_2
)
