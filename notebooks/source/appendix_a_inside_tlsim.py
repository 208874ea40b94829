# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Appendix A · Inside tlsim
#
# Appendix · Phase 2, paged memory · you need: Day 21 (A grid of programs), Day 22 (The streaming softmax)
#
# **Here** you open the rest of tlsim: typing rules, refusals, the sanitizer, atomics, the trace, and capture and
# replay. No day needs this notebook. Each piece is an idea, a demonstration and the package's code.

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day("appendix_a")
today.picture("inside-tlsim")

# %% [markdown]
# ## Why it matters
#
# The core of Days 21 and 22 runs kernels. A simulator that only runs kernels is not enough: a wrong kernel must fail
# here, before it reaches a GPU, and a right kernel must run fast enough for an engine. The parts below do that.
#
# - **Typing rules and refusals**: a kernel that runs here compiles in Triton.
# - **Sanitizer**: a wrong address is an error that names line, program and lane. So is a result that depends on the
#   order of programs.
# - **Trace**: all loads and stores of a kernel, and their bytes.
# - **Capture and replay**: the Python of a launch runs once, and its torch calls run again and again.

# %%
import torch

from nanoserve.course.show import wrapped
from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl


def attempt(kernel, *arguments, grid=(2,), **constants):
    """Launch, and print the name of the kernel and what went wrong."""
    try:
        kernel[grid](*arguments, **constants)
        print(f"{kernel.__name__}: no fault")
    except tlsim.KernelError as error:
        print(wrapped(f"{kernel.__name__}: {error}"), end="\n\n")


# %% [markdown]
# ## Typing rules
#
# Which type has `bfloat16 * int32`? In torch it is bfloat16, in Triton float32. tlsim follows Triton, because a kernel
# must have the same types here and on a GPU. The kernel below prints the types of some results.


# %%
@tlsim.jit
def types(x_ptr):
    half = tl.load(x_ptr).to(tl.float16)
    brain, whole, number = half.to(tl.bfloat16), half.to(tl.int8), half.to(tl.int32)
    print("float16 + 1.5       ", (half + 1.5).dtype)
    print("float16 + bfloat16  ", (half + brain).dtype)
    print("bfloat16 * int32    ", (brain * number).dtype)
    print("float16 / float16   ", (half / half).dtype)
    print("int8 + 1            ", (whole + 1).dtype)
    print("int8 + int32        ", (whole + number).dtype)


types[(1,)](torch.ones(1))

# %% [markdown]
# A number next to a tensor takes the tensor's type. A half next to bfloat16 becomes float16, bfloat16 next to any other
# type becomes float32, and halves are divided in float32. `joint_dtype` holds the rule of two tensors, `number_dtype`
# that of a number, and `joint_shape` and `block_shape` the rules of shapes.

# %%
from functools import cache, partial
from itertools import zip_longest
from typing import Any

from nanoserve.kernels.tlsim.grid import current, fault


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/rules.py: kind, number_dtype, joint_dtype, wide and 9 more
def kind(dtype: torch.dtype) -> int:
    """0 for int1, 1 for integers, 2 for floats."""
    return 0 if dtype == torch.bool else 1 + dtype.is_floating_point


def number_dtype(x: Any, beside: torch.dtype | None) -> torch.dtype:
    """The dtype of a number: that of `beside`, the other operand, if it is of the same kind or a
    wider kind (bool, integer, float); else int1, int32 (int64 if large) or float32."""
    if not isinstance(x, int | float):
        raise fault(f"a kernel computes with numbers and tensors, not with {type(x).__name__}")
    whole = torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    dtype = torch.bool if isinstance(x, bool) else whole if isinstance(x, int) else torch.float32
    dtype = beside if beside is not None and kind(dtype) <= kind(beside) else dtype
    if kind(dtype) == 1 and not torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max:
        raise fault(f"{x} is out of range for {dtype}")
    return dtype


def joint_dtype(a: torch.dtype, b: torch.dtype, divides: bool = False) -> torch.dtype:
    """The dtype in which two operands meet. This is torch's choice, except that bfloat16 with
    float16 gives float16, bfloat16 with any other dtype float32, and a division of halves too."""
    dtype, both = torch.promote_types(a, b), {a, b}
    if torch.bfloat16 in both and len(both) == 2:
        dtype = (
            torch.float16 if torch.float16 in both else torch.promote_types(dtype, torch.float32)
        )
    return torch.float32 if divides and kind(dtype) == 2 and dtype.itemsize == 2 else dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 32 bits, or more, that holds this dtype's numbers."""
    if dtype.itemsize >= 4:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def number(x: Any) -> Any:
    """x, if it is no pointer."""
    if x.buffer:
        raise fault(f"a pointer into {x.buffer.name} allows only + and - of integers")
    return x


def moved_buffer(a: Any, b: Any) -> Any:
    """The buffer of a + b: None for numbers. Only integers move a pointer."""
    moved, by = (a, b) if a.buffer else (b, a)
    return moved.buffer if kind(number(by).dtype) == 1 else number(moved).buffer


@cache
def joint_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that blocks of these shapes broadcast to, aligned at the last axis."""
    joint = tuple(map(max, zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)))[::-1]
    if not all(broadcasts(shape, joint) for shape in shapes):
        raise fault(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
    return joint


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a block of one shape broadcasts to another shape."""
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(n in (1, size) for n, size in pairs)


def block_shape(*shape: Any) -> tuple[int, ...]:
    """The shape of a block, by Triton's rules: constants that are powers of two."""
    for size in shape:
        if not isinstance(size, int):
            raise fault("the shape of a block must be tl.constexpr, known at compile time")
        if size < 1 or size & (size - 1):
            raise fault(f"the sizes of a block must be powers of two, got {size}")
    return shape


def dot_operands(a: Any, b: Any) -> None:
    """Refuse what tensor cores do not multiply."""
    if a.dtype != b.dtype:
        raise fault(f"tl.dot needs operands of one dtype, got {a.dtype} and {b.dtype}")
    if len(a.shape) != len(b.shape) or len(a.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise fault(f"tl.dot cannot multiply {list(a.shape)} by {list(b.shape)}")
    if a.shape[-1] < (least := 32 if a.dtype.itemsize == 1 else 16):
        raise fault(f"tl.dot must sum over at least {least} lanes, got {a.shape[-1]}")
    if not a.dtype.is_floating_point and a.dtype != torch.int8:
        raise fault(f"tl.dot multiplies floats or int8, not {a.dtype}")


def truth(x: Any) -> bool:
    """Whether a condition of `if`, `while`, `and` or `or` is true: one answer for all programs."""
    if x.shape:
        raise fault("a block is neither true nor false: use tl.where, or &, | and ~ on masks")
    if x.data.numel() > 1 and not current().off:
        rule = "in lockstep all programs take the same branch, but this condition depends on the"
        raise fault(f'{rule} program: use a mask, or tlsim.options(order="serial")')
    return not current().off and bool(x.data)


def method(x: Any, name: str) -> Any:
    """x.sum() and the like: functions of `tl` as methods of a tensor."""
    language = sys.modules[f"{__package__}.language"]  # it imports this module, not the reverse
    if name.startswith("_") or not hasattr(language, name):
        raise AttributeError(f"a tensor has no .{name} in tlsim")
    return partial(getattr(language, name), x)


class One(int):
    """An integer argument equal to 1: Triton compiles it as a constant."""

    def __getattr__(self, name: str) -> Any:
        rule = f"an integer argument equal to 1 is a constant in Triton, and has no .{name}"
        raise AttributeError(f"{rule}: this kernel would fail only when the argument is 1")


# %% [markdown]
# ## What is refused
#
# Each of these is an error in Triton as well, at compile time and in its own words. Guess the reason before you run
# the cell.


# %%
@tlsim.jit
def changing_type(x_ptr):
    m = 0  # an integer
    for i in range(4):
        m = tl.maximum(m, tl.load(x_ptr + i))


@tlsim.jit
def exp_of_halves(x_ptr):
    tl.exp(tl.load(x_ptr + tl.arange(0, 4)).to(tl.float16))


@tlsim.jit
def twelve_lanes(x_ptr):
    tl.load(x_ptr + tl.arange(0, 12))


@tlsim.jit
def if_on_a_block(x_ptr):
    if tl.load(x_ptr + tl.arange(0, 4)) > 2:
        tl.store(x_ptr, 0.0)


# %%
x = torch.arange(16.0)
for kernel in (changing_type, exp_of_halves, twelve_lanes, if_on_a_block):
    attempt(kernel, x)

# %% [markdown]
# They come from three facts about compiled programs. A value that a loop carries is in **one register**, of one
# type. Blocks are spread over the threads of the hardware, so their **sizes are powers of two** and known before
# the program runs. And a program runs **one branch** for all its lanes, so a block cannot decide an `if`.

# %% [markdown]
# Two more rules are about branches. In Triton a condition that is known only at run time compiles **both** branches,
# and they must agree about types. So tlsim runs the branch that is not taken too, with all programs off, as long as
# checks are on:


# %%
@tlsim.jit
def one_branch_changes_the_type(x_ptr, n):
    m = 0
    if n > 3:
        m = tl.load(x_ptr)
    tl.store(x_ptr + 1, m)


attempt(one_branch_changes_the_type, x, 2)

# %% [markdown]
# `n` is 2, so the branch is not taken; it is refused all the same.
#
# Python's own `if` and `for` cannot do that. So tlsim runs the statements of a kernel itself: `Run` has a method for
# each of `for`, `while` and `if`, and `select` is `a if condition else b`. Other statements are compiled, one at a time,
# and executed by Python. Look at `If`: the branch that is not taken runs first, with all programs off, and `merge`
# compares the types of what both branches have bound.

# %%
import ast
import builtins
from collections.abc import Callable

from nanoserve.kernels.tlsim.grid import off
from nanoserve.kernels.tlsim.loops import Range, kept
from nanoserve.kernels.tlsim.values import Value, as_value


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/source.py: _code, Run, select
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


# %% [markdown]
# Before that, `Source` reads the text of the kernel as a tree and refuses the statements that Triton does not have.
# `translate` gives each global name of a kernel its meaning in tlsim, whatever it meant outside.

# %%
import inspect
import textwrap
from types import ModuleType, SimpleNamespace

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError, source_name


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/source.py: REFUSED, Source, named, ALLOWED, BUILTINS, translate
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


# %%
def with_a_break(x_ptr):
    for _ in range(4):
        break


try:
    Source(with_a_break)
except KernelError as error:
    print(error)

# %% [markdown]
# The messages name a line of the kernel. `kernel_line` looks through the call stack, or through the traceback of an
# error of Python, for the innermost statement that `Run` runs. `off` switches all programs off for a while.

# %%
import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from nanoserve.kernels.tlsim.grid import Options, Wave


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/grid.py: KernelError, off, kernel_line, source_name, fault
class KernelError(ValueError):
    """A kernel broke a rule of Triton or accessed wrong memory. The message names the line."""


_options: ContextVar[Options] = ContextVar("options")
_wave: ContextVar[Wave] = ContextVar("wave")


@contextmanager
def off() -> Iterator[None]:
    """Run code of a kernel with all programs off: it computes, and neither loads nor stores."""
    wave, outer = current(), current().active
    wave.active = torch.zeros(1, 1, 1, dtype=torch.bool, device=wave.ids[0].device)
    yield
    wave.active = outer


def kernel_line(error: Exception | None = None) -> tuple[str, int]:
    """File and line of the statement that runs, in the innermost kernel."""
    inward = list(traceback.walk_tb(error.__traceback__)) if error else []
    for frame, _ in inward[::-1] or traceback.walk_stack(None):
        if "statement" in frame.f_locals and frame.f_code.co_name == "block":  # of source.Run
            return frame.f_locals["self"].file, frame.f_locals["statement"].lineno
    return "no kernel", 0


def source_name(file: str) -> str:
    """A file's name for messages; "cell" for a cell of a notebook."""
    return "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name


def fault(what: str, program: int | None = None, lane: tuple = (), error=None) -> KernelError:
    """A KernelError that names the kernel's line and, if given, a program and a lane."""
    file, line = kernel_line(error)
    where = f"{source_name(file)}, line {line}"
    if program is not None:
        x, y, z = current().grid
        place = (program % x, program // x % y, program // (x * y))
        where += f", program {place[: 3 if z > 1 else 2 if y > 1 else 1]}"
    where += f", lane {list(lane)}" if lane else ""
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())


# %% [markdown]
# ## The sanitizer
#
# Day 21 showed two faults: an address outside its buffer, and two programs that store to one address. Two more
# faults depend on an order that no GPU promises. One program loads what another program stored in the same launch. Or
# two lanes of one program store to one address.


# %%
@tlsim.jit
def reads_its_neighbour(x_ptr, out_ptr):
    program = tl.program_id(0)
    tl.store(out_ptr + program, tl.load(x_ptr + program))
    left = tl.load(out_ptr + tl.maximum(program - 1, 0))
    tl.store(x_ptr + program, left)


@tlsim.jit
def two_lanes_one_address(x_ptr, out_ptr):
    lane = tl.arange(0, 4)
    tl.store(out_ptr + tl.program_id(0) * 2 + lane // 2, tl.load(x_ptr + lane))


# %%
attempt(reads_its_neighbour, x.clone(), torch.zeros(16))
attempt(two_lanes_one_address, x, torch.zeros(16))

# %% [markdown]
# For each buffer the sanitizer keeps two tensors as long as the buffer: for each element, which program has stored
# there, and which program has loaded from there. Each access is compared with them. Look at `_check_order`, and at
# `SEVERAL`: no program may store to an element that several programs load.

# %%
from nanoserve.kernels.tlsim.grid import fault
from nanoserve.kernels.tlsim.values import aligned


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/accesses.py: NOBODY, SEVERAL, LARGE, watch, everywhere and 1 more
NOBODY, SEVERAL = -1, -2  # beside the numbers of programs
LARGE = 1 << 24  # elements; who loads from a larger buffer is not recorded


def watch(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Check an access, if checks are on, and record it, if a trace is on.

    `live` [x, y, z, *shape] is true in the lanes that take part; None: in all lanes.
    """
    wave = current()
    if wave.options.checks:
        outside = (pointer.lanes < 0) | (pointer.lanes >= len(pointer.buffer.flat))
        _refuse(outside if live is None else outside & live, pointer, f"{kind}s outside")
        _check_order(kind, pointer, live)
    if wave.options.trace is not None and not wave.off:
        wave.options.trace.record(kind, pointer, live)


def everywhere(pointer: Value, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and mask, expanded to every lane of every program: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    live = pointer.data.new_ones((), dtype=torch.bool) if live is None else live
    return pointer.lanes.expand(shape), live.expand(shape)


def _check_order(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse a store and another access of one address by two programs, or by two lanes."""
    flat, (offsets, live) = pointer.buffer.flat, everywhere(pointer, live)
    programs = aligned(current().programs, rank=len(pointer.shape))[0].expand(offsets.shape)
    at, mine = offsets[live], programs[live]

    def by_others(programs: torch.Tensor) -> torch.Tensor:
        return (programs != NOBODY) & (programs != mine)

    def refuse(lanes: torch.Tensor, action: str) -> None:
        _refuse(torch.zeros_like(live).masked_scatter(live, lanes), pointer, action)

    if kind == "load":
        refuse(by_others(_accessed(flat, "store")[at]), "loads what another program has stored,")
    elif kind == "store":
        refuse(by_others(_accessed(flat, "load")[at]), "stores where another program loads,")
    if kind == "atomic_add" or (kind == "load" and len(flat) > LARGE):
        return  # atomic additions may come in any order
    known = _accessed(flat, kind, writes=True)
    before = by_others(known[at])
    known[at] = mine
    known[at[before | (known[at] != mine)]] = SEVERAL
    if kind == "store":
        refuse(known[at] != mine, "stores where another program has stored,")
        lane, last = torch.arange(len(at), device=at.device), torch.empty_like(known)
        last[at] = lane
        refuse(last[at] != lane, "stores where another lane of the same store has stored,")


def _accessed(flat: torch.Tensor, kind: str, writes: bool = False) -> torch.Tensor:
    """For each element of a buffer, the program that has accessed it. Two arguments at one address
    with elements of one size share what is known."""
    known, place = current().accessed, (kind, flat.data_ptr(), flat.element_size())
    nobody = torch.full((1,), NOBODY, device=flat.device)
    if place not in known and not writes:
        return nobody.expand(len(flat))
    before = known.setdefault(place, nobody[:0])
    if len(before) < len(flat):  # the first access, or the first by a longer argument
        known[place] = torch.cat([before, nobody.expand(len(flat) - len(before))])
    return known[place]


def check_poison(pointer: Value, live: torch.Tensor | None, data: torch.Tensor) -> None:
    """Refuse a load of NaN, if that is asked for."""
    if current().options.poison and data.is_floating_point():
        stale = data.isnan() if live is None else data.isnan() & live
        _refuse(stale, pointer, "loads a NaN, so a slot without an owner,")


def _refuse(wrong: torch.Tensor, pointer: Value, action: str) -> None:
    """Raise KernelError for the first lane where `wrong` is true."""
    if wrong.any():
        offsets, wrong = everywhere(pointer, wrong)
        first = tuple(int(i) for i in wrong.nonzero()[0])
        buffer, program = pointer.buffer, int(current().programs[first[:3]])
        what = f"{action} {buffer.name}[{int(offsets[first])}] of {len(buffer.flat)} elements"
        raise fault(what, program, first[3:])


# %% [markdown]
# ## Atomics
#
# Sometimes many programs must add to one number. An **atomic** addition reads, adds and writes, and no other program
# comes between. The order of the additions is open, so on a GPU a float sum can differ in its last digits from run to
# run. The sanitizer accepts `tl.atomic_add`.


# %%
@tlsim.jit
def total(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + offsets), axis=0))


out = torch.zeros(1)
total[(4,)](x, out, BLOCK=4)
print("four programs add to one number:", out.item(), "   in torch:", x.sum().item())
assert out == x.sum()

# %% [markdown]
# In tlsim an atomic addition is a store that accumulates (`store` of Day 21, with `adds`). Triton's also returns the
# numbers before. They depend on the order of the programs, so tlsim returns nothing.

# %%
from nanoserve.kernels.tlsim.memory import store


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/language.py: atomic_add
def atomic_add(pointer: Value, value: Any, mask: Any = None, **_) -> None:
    """tl.atomic_add: add to memory. Several lanes or programs may add to one address."""
    store(pointer, value, mask, adds=True)


# %% [markdown]
# ## The trace
#
# Day 21 drew its picture from a trace, and counted sectors with it. A trace keeps every access: kind, argument, line,
# programs, offsets and mask. Counts are sums over these tensors.

# %%
with tlsim.trace() as seen:
    total[(4,)](x, torch.zeros(1), BLOCK=4)
for one in seen.accesses:
    print(f"{one.kind:10} {one.name:8} {one.bytes:3} bytes in {one.rows} stretches")
print("bytes loaded:", seen.bytes("load"), "   distinct:", seen.distinct_bytes("load", "x_ptr"))

# %%
from dataclasses import dataclass, field

from nanoserve.kernels.tlsim.grid import kernel_line, options


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/accesses.py: Access, Trace, trace
@dataclass(frozen=True)
class Access:
    """One load, store or atomic_add of a wave of programs, recorded by a trace."""

    kind: str
    name: str  # of the argument
    line: int
    itemsize: int
    programs: torch.Tensor  # [programs], their numbers in the grid
    offsets: torch.Tensor  # [programs, *shape], in elements
    live: torch.Tensor  # [programs, *shape], the lanes that were accessed
    coalesced: bool  # the lanes of a row have consecutive offsets

    @property
    def bytes(self) -> int:
        """The bytes of all accessed lanes; an address counts as often as it is accessed."""
        return int(self.live.sum()) * self.itemsize

    @property
    def rows(self) -> int:
        """The number of pieces of consecutive offsets: one per row if coalesced."""
        lanes = self.offsets.shape[1:][-1:] or (1,)  # of a row; a number is a row of one
        offsets, live = self.offsets.reshape(-1, *lanes), self.live.reshape(-1, *lanes)
        joined = live[:, 1:] & live[:, :-1] & (offsets[:, 1:] == offsets[:, :-1] + 1)
        return int(live.sum() - joined.sum())

    def of(self, program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offsets, live) of the program with this number, each in the block's shape."""
        index = int((self.programs == program).nonzero())
        return self.offsets[index], self.live[index]


@dataclass
class Trace:
    """All loads and stores inside the `with` block, in order."""

    accesses: list[Access] = field(default_factory=list)

    def bytes(self, kind: str) -> int:
        """The bytes of all accesses of a kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def distinct_bytes(self, kind: str, name: str) -> int:
        """The bytes of one argument that were accessed at least once."""
        chosen = [a for a in self.accesses if (a.kind, a.name) == (kind, name)]
        touched = [a.offsets[a.live] for a in chosen]
        return len(torch.cat(touched).unique()) * chosen[0].itemsize if chosen else 0

    def record(self, kind: str, pointer: Value, live: torch.Tensor | None) -> None:
        """Append one access of the running wave; `live` is as for _check_order."""
        buffer, coalesced = pointer.buffer, pointer.width > 1 or not pointer.shape
        at = (kernel_line()[1], buffer.flat.itemsize, current().programs.flatten())
        lanes = (x.flatten(0, 2) for x in everywhere(pointer, live))
        self.accesses.append(Access(kind, buffer.name, *at, *lanes, coalesced))


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the loads and stores of kernels launched inside the `with` block."""
    with options(trace=Trace()) as changed:
        yield changed.trace


# %% [markdown]
# ## Capture and replay
#
# Where does the time of a launch go? With checks off, a small kernel is mostly Python: names, shapes, types. The work
# is a dozen torch calls, and the next launch with the same shapes makes the same calls. So **capture** records the calls
# once, and **replay** makes them again with new tensors and numbers. A CUDA graph is the same idea on a GPU; Day 31
# uses both.


# %%
@tlsim.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x * 2, mask=inside)


def doubled(x, replay):
    out = torch.zeros_like(x)
    with tlsim.options(checks=False, replay=replay):
        double[(3,)](x, out, len(x), BLOCK=4)
    return out


for x in (torch.arange(10.0), torch.ones(10)):
    assert torch.equal(doubled(x, replay=True), 2 * x)

# %% [markdown]
# What does a recording look like? `Recorder` notes each torch call that depends on an argument, and `Recording` makes
# a function of the notes:

# %% tags=["nbval-ignore-output"]
from nanoserve.kernels.tlsim.replay import Recorder, Recording

inputs = {"x": x, "out": torch.zeros(10)}
with tlsim.options(checks=False), Recorder(inputs) as recorder:
    double[(3,)](inputs["x"], inputs["out"], 10, BLOCK=4)
source = Recording(recorder, ["x", "out"], set()).source.strip()
print(source)
assert "take(" in source and "mul(" in source

# %% [markdown]
# That is the kernel without its Python. Offsets and masks depend on no tensor, so they were computed once and became
# constants. Calls that depend only on integers, such as a block table, go to `prepare`. `replay` has the others. A
# launcher that repeats a launch with the same tables captures it in a `Graph`, which runs `replay` alone (Day 31).
#
# How much time does a recording save? The work here is ten numbers, so nearly all of the time is Python:

# %%
today.predict("replay", "How many times as fast is a replayed launch?", guess=None)

# %% tags=["nbval-ignore-output"]
from nanoserve.bench.timing import median_times

runs = {"run": lambda: doubled(x, replay=False), "replay": lambda: doubled(x, replay=True)}
times = median_times(runs, rounds=51, warmup=5)
print(", ".join(f"{name} {seconds * 1e6:.0f} µs" for name, seconds in times.items()))
print(f"{times['run'] / times['replay']:.1f} times as fast")
if (guess := today.guess("replay")) is not None:
    print(f"your guess: {guess} times")
assert times["replay"] < times["run"]

# %% [markdown]
# When does a recording not hold? Where Python reads a number, such as the turns of a loop, the
# recording holds for that number only. `Recorder` writes a test into the recording. If the test fails, the launch
# is recorded again. Here is the kernel of Day 22, in tiles of 16 keys. With 37 keys its loop has three turns, with 49
# it has four:

# %%
from unittest.mock import patch

from nanoserve.kernels.dispatch import launch
from nanoserve.kernels.paged_attention import paged_attention_kernel

kernel = tlsim.jit(paged_attention_kernel)
q, pools = torch.randn(1, 9, 1, 64), torch.randn(2, 64, 3, 64)
options = tlsim.options(checks=False, replay=True)
with options, patch.object(kernel, "run", wraps=kernel.run) as spy:  # runs the kernel's Python
    for kv_len in (37, 38, 39, 49):
        launch(kernel, q, *pools, torch.arange(kv_len), 3, tile=16)
        print(f"{kv_len} keys: the kernel's Python ran {spy.call_count} times so far")

# %% [markdown]
# 38 keys: `kv_len` has changed for the first time, so the launch is recorded again, with `kv_len` as an input. 39 keys:
# replayed. 49 keys: another number of turns, recorded again.

# %%
from functools import lru_cache, partial

from torch.overrides import TorchFunctionMode, wrap_torch_function

from nanoserve.kernels.tlsim.grid import options_now
from nanoserve.kernels.tlsim.rules import number_dtype


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/replay.py: HOST, STORES, KINDS, RECORDINGS, SMALL and 5 more
HOST = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
STORES = {"index_copy_", "index_add_"}
KINDS, RECORDINGS = 64, 16  # what a kernel keeps: kinds of launches, and recordings of each
SMALL = 1 << 16  # the most elements of a result that is used again


def one_step(function: Callable) -> Callable:
    """Make a function one step of a recording, whatever torch calls it makes."""
    return wrap_torch_function(lambda *args: args)(function)


class Recorder(TorchFunctionMode):
    """Notes the torch calls that depend on the inputs, each as a line of Python."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {id(x): name for name, x in inputs.items()}  # and of what depends on them
        self.steps: list[tuple[str, str, set[str], bool]] = []  # result, line, used names, is small
        self.space: dict[str, Any] = {"torch": torch}  # what else the lines refer to
        self.alive, self.stored = [inputs], set()

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out, used, name, kwargs = func(*args, **(kwargs or {})), set(), func.__name__, kwargs or {}
        texts = [self._text(x, used) for x in args]
        texts += [f"{key}={self._text(x, used)}" for key, x in kwargs.items()]
        plain = getattr(func, "__wrapped__", func)  # without the wrapper that one_step adds
        call = f"{self._name(name, plain)}({', '.join(texts)})"
        if name in STORES:
            self.steps.append(("", call, used, False))
            self.stored.add(texts[0])
        elif used and name in HOST:
            self.steps.append(("", f"if {call} != {out!r}: return None", used, True))
        elif used and isinstance(out, torch.Tensor) and id(out) not in self.names:
            self.names[id(out)] = result = f"t{len(self.alive)}"
            self.alive.append(out)  # so that no other tensor gets its id
            self.steps.append((result, f"{result} = {call}", used, out.numel() <= SMALL))
        return out

    def _text(self, x: Any, used: set[str]) -> str:
        if id(x) in self.names:
            used.add(self.names[id(x)])
            return self.names[id(x)]
        if isinstance(x, tuple | list):
            return f"[{', '.join(self._text(part, used) for part in x)}]"
        plain = x is None or isinstance(x, int | str | torch.dtype)
        return repr(x) if plain else self._name("c", x)

    def _name(self, name: str, x: Any) -> str:
        found = name
        while self.space.setdefault(found, x) is not x:
            found = f"{name}{len(self.space)}"
        return found


class Recording:
    """The torch calls of a launch as two functions of its arguments."""

    def __init__(self, recorder: Recorder, inputs: list[str], settled: set[str]) -> None:
        early, late = [], []
        for result, _, used, _ in recorder.steps:
            settled -= used if result in recorder.stored else set()  # the memory of an argument
        for step in recorder.steps:
            result, _, used, small = step
            (early if small and used <= settled else late).append(step)
            settled |= {result} if early[-1:] == [step] else set()
        effects = [line.startswith("if ") for result, line, _, _ in late if not result]
        self.works = effects == sorted(effects, reverse=True)  # every test is before every store
        later = {name for _, _, used, _ in late for name in used}
        kept = [result for result, *_ in early if result in later]
        self.inputs = [name for name in inputs if name in later]
        self.source = _function("prepare", inputs, early, kept)
        self.source += _function("replay", self.inputs + kept, late, [])
        exec(self.source, recorder.space)
        self.prepare, self.replay = recorder.space["prepare"], recorder.space["replay"]

    def prepared(self, inputs: dict[str, Any]) -> Callable | None:
        """The launch as a function of self.inputs; None if the recording does not hold for it. The
        function returns None, before any store, if the recording does not hold for its inputs."""
        kept = self.prepare(**inputs)
        return None if kept is None else partial(self.replay, **kept)


class Graph:
    """A launch to repeat with other tensors, for a launcher that repeats a launch many times.

    tlsim.options(checks=False, replay=graph) captures a launch. `names` are the arguments that
    replay() replaces. It does not look at the tensors: the caller makes sure that they have the
    dtypes, devices and strides of the first ones, and that no tensor of integers has changed.
    """

    def __init__(self, *names: str) -> None:
        self.names, self.run = names, None

    def replay(self, *tensors: torch.Tensor) -> bool:
        """Repeat the launch. False, before any store, if there is none that holds for the tensors,
        or if the options that hold now watch each access: then launch the kernel instead."""
        now = options_now()
        watched = now.order != "lockstep" or now.poison or now.trace is not None
        if self.run is None or watched:
            return False
        given = dict(zip(self.names, tensors, strict=True))
        if not torch.is_grad_enabled():
            return self.run(**given) is not None
        with torch.no_grad():
            return self.run(**given) is not None


def _function(name: str, inputs: list[str], steps: list, returned: list[str]) -> str:
    result = ", ".join(f"{name!r}: {name}" for name in returned)
    lines, needed = [f"    return {{{result}}}"], {*inputs, *returned}
    for result, line, used, _ in reversed(steps):
        if result in needed or not result:  # else nothing uses the result
            lines.append("; del ".join([f"    {line}", *sorted(used - needed)]))
            needed |= used
    return "\n".join([f"def {name}({', '.join(inputs)}):", *reversed(lines), "\n"])


class Recordings:
    """The recordings of a kernel, by kind of launch: the grid, the constants and the dtypes. An
    integer is part of a recording until it differs in a launch of that kind; from then on it is an
    input, as tensors and fractions are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.known = kernel, lru_cache(KINDS)(lambda *_: SimpleNamespace(first=None))

    def launch(self, grid: tuple[int, int, int], given: dict[str, Any]) -> None:
        """Replay a recording, or record the launch if none holds."""
        uses, inputs, numbers, tables = self.kernel.source.globals(), {}, {}, set()
        graph = options_now().replay  # True: the launch stands alone
        kind, device = [grid, options_now().wave, *map(id, uses.values())], None
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                inputs[name], device = x, x.device
                kind += (x.dtype, device)
                tables |= set() if x.dtype.is_floating_point else {name}
            elif type(x) in (int, float) and x != 1 and name not in self.kernel.constants:
                numbers[name] = x
                wide = type(x) is int and not -(2**31) <= x < 2**31
                kind += (type(x), "wide" if wide else "")  # (int, 1) would equal (int, True)
            else:
                kind += (type(x), x)
        known = self.known(*kind)
        if known.first is None:
            known.first, known.uses, known.found = numbers, uses, []  # the latest is the first
            known.varying = {name for name, x in numbers.items() if isinstance(x, float)}
        if known.first != numbers:
            changed = {name for name, x in numbers.items() if x != known.first[name]}
            known.found *= changed <= known.varying  # else no recording holds
            known.varying |= changed
        for name in sorted(known.varying):  # a set has no order of its own
            dtype = number_dtype(numbers[name], None)
            inputs[name] = torch.full((1, 1, 1), numbers[name], dtype=dtype, device=device)
        for i, recording in enumerate(known.found):
            run, rest = recording.prepared(inputs), {x: inputs[x] for x in recording.inputs}
            if run is None or run(**rest) is None:
                continue
            known.found.insert(0, known.found.pop(i))
            if isinstance(graph, Graph):
                graph.run = partial(run, **{x: rest[x] for x in rest if x not in graph.names})
            return
        with Recorder(inputs) as recorder:
            self.kernel.run(grid, given, {name: inputs[name] for name in known.varying})
        recording = Recording(recorder, [*inputs], known.varying | tables)
        if recording.works:
            known.found[:] = [recording, *known.found][:RECORDINGS]


# %% [markdown]
# ## The words of the language
#
# What is left is vocabulary: functions that compute lane by lane, functions that change a shape, and the names of the
# types. Most are one line, since `combine` of Day 21 does the work.

# %%
import sys

from nanoserve.kernels.tlsim.language import broadcast_to, reduce_max, reduce_min, reduce_sum
from nanoserve.kernels.tlsim.loops import Range
from nanoserve.kernels.tlsim.rules import broadcasts, block_shape, wide
from nanoserve.kernels.tlsim.values import combine, paired


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/language.py: int1, int8, int16, int32, int64, uint8 and 27 more
int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64
static_range = range
math = sys.modules[__name__]  # tl.math.exp is tl.exp


def cumsum(x: Value, axis: int = 0) -> Value:
    """The sums of the lanes up to each lane, along an axis."""
    dtype = x.dtype if x.dtype.is_floating_point else wide(x.dtype)
    return Value(x.lanes.cumsum(3 + axis % len(x.shape), dtype=dtype))


def where(condition: Any, x: Any, y: Any) -> Value:
    """x where the condition is true, else y. Both are always computed."""
    return combine(torch.where, as_value(condition).to(torch.bool), *paired(x, y))


def maximum(x: Any, y: Any) -> Value:
    """The larger of x and y; if one is NaN, the other."""
    return _elementwise(torch.fmax, x, y)


def minimum(x: Any, y: Any) -> Value:
    """The smaller of x and y; if one is NaN, the other."""
    return _elementwise(torch.fmin, x, y)


def _elementwise(op: Callable, *operands: Any) -> Value:
    x, y = (as_value(x) for x in operands)
    short = (x.to(wide(x.dtype)) if x.dtype == bfloat16 else x for x in (x, y))
    return combine(op, *paired(*short))


def absolute(x: Any) -> Value:
    """The absolute value."""
    return combine(torch.abs, as_value(x))


def _function(op: Callable[[torch.Tensor], torch.Tensor], what: str) -> Callable[[Any], Value]:
    """A function of each lane that Triton defines for float32 and float64 only."""

    def apply(x: Any) -> Value:
        if (x := as_value(x)).dtype not in (torch.float32, torch.float64):
            raise fault(f"{what} is for float32 and float64, not {x.dtype}: cast with .to first")
        return combine(op, x)

    apply.__doc__ = f"{what}, lane by lane."
    return apply


exp, exp2 = _function(torch.exp, "e to the power x"), _function(torch.exp2, "2 to the power x")
log, log2 = _function(torch.log, "the natural logarithm"), _function(torch.log2, "log to base 2")
sqrt, rsqrt = _function(torch.sqrt, "the square root"), _function(torch.rsqrt, "1 / sqrt(x)")
floor, ceil = _function(torch.floor, "rounding down"), _function(torch.ceil, "rounding up")
sigmoid = _function(torch.sigmoid, "1 / (1 + exp(-x))")


def cdiv(x: Any, y: Any) -> Any:
    """x / y, rounded up, for positive integers."""
    return (x + y - 1) // y


def reshape(x: Value, shape: tuple[int, ...]) -> Value:
    """The same lanes, in row-major order, in another shape."""
    shape = block_shape(*shape)
    if torch.Size(shape).numel() != torch.Size(x.shape).numel():
        raise fault(f"cannot reshape {list(x.shape)} to {list(shape)}: the numbers of lanes differ")
    return Value(x.lanes.reshape(*x.data.shape[:3], *shape), x.buffer)


def expand_dims(x: Value, axis: int) -> Value:
    """x with a new axis of size 1."""
    index = [slice(None)] * len(x.shape)
    index.insert(axis % (len(x.shape) + 1), None)
    return x[tuple(index)]


def trans(x: Value) -> Value:
    """x with its last two axes exchanged."""
    return x.T


class constexpr:
    """A value known at compile time: annotates a parameter, or wraps a global."""

    def __init__(self, value: Any) -> None:
        self.value = value


def static_assert(condition: bool, message: str = "") -> None:
    """Raise KernelError if a condition on constants is false."""
    if not condition:
        raise fault(message or "tl.static_assert: the condition is false")


HIDDEN = {  # under Triton's names, these would hide functions of Python in this file
    "sum": reduce_sum,
    "max": reduce_max,
    "min": reduce_min,
    "abs": absolute,
    "range": Range,
}


def __getattr__(name: str) -> Any:
    if name in HIDDEN:
        return HIDDEN[name]
    raise AttributeError(f"tlsim has no tl.{name}: it has the part of Triton that the course uses")


# %% [markdown]
# ## What you learned
#
# 1. **A simulator has to refuse what the compiler refuses.** Otherwise a kernel runs here and fails on a GPU.
# 2. **A result that depends on the order of programs is a fault, also when its numbers are right.** The sanitizer
#    records which program stored where, and so finds it.
# 3. **The Python of a launch is the same every time.** Record its torch calls once, and run the recording.
#
# ## Back to the days
#
# Day 23 sends a kernel to Triton's compiler. Day 31 captures attention in a CUDA graph on a GPU and replays it with
# tlsim on a CPU.
#
# **In one paragraph.** tlsim's core runs a kernel line by line for all programs. Around it are rules that refuse
# what Triton refuses, a sanitizer that records which program stored where, a trace that counts bytes, and a recorder
# that repeats the torch calls of a launch without its Python. Sanitizer, trace and replay change no number of a right
# kernel.
