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
import sys
from functools import cache, partial
from typing import Any

from nanoserve.kernels.tlsim.grid import current, fault, refuse


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/rules.py: number_dtype, joint_dtype, wide, bitcast and 9 more
def number_dtype(x, beside: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a number: that of `beside`, the other operand, if it is of the same kind or a
    wider kind (bool, integer, float); else int1, int32 (int64 if large) or float32."""
    refuse(not isinstance(x, int | float), f"a kernel computes with no {type(x).__name__}")
    refuse(beside == torch.uint8 and x < 0, f"{x} is out of range for uint8")
    whole = torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    dtype = torch.bool if isinstance(x, bool) else whole if isinstance(x, int) else torch.float32
    return beside if beside is not None and torch.can_cast(dtype, beside) else dtype


def joint_dtype(a: torch.dtype, b: torch.dtype, divides: bool = False) -> torch.dtype:
    """The dtype in which two operands meet. This is torch's choice, except that bfloat16 with
    float16 gives float16, bfloat16 with any other dtype float32, and a division of halves too."""
    halves = {a, b} == {torch.float16, torch.bfloat16}
    dtype = torch.float16 if halves else torch.promote_types(a, b)
    widens = divides or (dtype == torch.bfloat16 and a != b)
    return wide(dtype) if widens and dtype.is_floating_point else dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 32 bits, or more, that holds this dtype's numbers."""
    return torch.promote_types(dtype, torch.float32 if dtype.is_floating_point else torch.int32)


def bitcast(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bits in another dtype of the same size."""
    resized = dtype.itemsize != data.dtype.itemsize
    refuse(resized, f"a bitcast from {data.dtype} to {dtype} would change the size")
    return data.view(dtype)


def number(x):
    """x, if it is no pointer."""
    if x.buffer:
        raise fault(f"a pointer into {x.buffer.name} allows only + and - of integers")
    return x


def moved_buffer(a, b):
    """The buffer of a + b: None for numbers. Only integers move a pointer."""
    moved, by = (a, b) if a.buffer else (b, a)
    moves = not number(by).dtype.is_floating_point and by.dtype != torch.bool
    return moved.buffer if moves else number(moved).buffer


joint_shape = cache(torch.broadcast_shapes)  # the shape that blocks of some shapes broadcast to


def block_shape(*shape) -> tuple[int, ...]:
    """The shape of a block, by Triton's rules: constants that are powers of two."""
    for n in shape:
        refuse(not isinstance(n, int), "the shape of a block must be tl.constexpr")
        refuse(n < 1 or n & (n - 1), f"the sizes of a block must be powers of two, got {n}")
    return shape


def torch_axis(axis: int, rank: int) -> int:
    """The axis of a tensor [x, y, z, *shape] that is an axis of the block."""
    refuse(not -rank <= axis < rank, f"a block of {rank} axes has no axis {axis}")
    return 3 + axis % rank


def dot_operands(a, b) -> None:
    """Refuse what tensor cores do not multiply."""
    fits = len(a.shape) == len(b.shape) > 1 and a.shape[-1] == b.shape[-2]
    refuse(not fits, f"tl.dot cannot multiply {list(a.shape)} by {list(b.shape)}")
    refuse(a.dtype != b.dtype, f"tl.dot needs operands of one dtype, got {a.dtype} and {b.dtype}")
    known = a.dtype.is_floating_point or a.dtype == torch.int8
    refuse(not known, f"tl.dot multiplies floats or int8, not {a.dtype}")
    least = 32 if a.dtype.itemsize == 1 else 16
    refuse(a.shape[-1] < least, f"tl.dot must sum over at least {least} lanes, got {a.shape[-1]}")


def truth(x) -> bool:
    """Whether a condition of `if`, `while`, `and` or `or` is true: one answer for all programs."""
    refuse(bool(x.shape), "a block is neither true nor false: use tl.where, or &, | and ~ on masks")
    if current().off:
        return False
    rule = "in lockstep all programs take one branch, but this condition depends on the program"
    refuse(x.data.numel() > 1, f'{rule}: use a mask, or tlsim.options(order="serial")')
    return bool(x.data)


def method(x, name: str):
    """x.sum() and the like: functions of `tl` as methods of a tensor."""
    language = sys.modules[f"{__package__}.language"]  # it imports this module, not the reverse
    return partial(getattr(language, name), x)


class One(int):
    """An integer argument equal to 1: Triton compiles it as a constant."""

    def __getattr__(self, name: str):
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
from collections.abc import Callable

from nanoserve.kernels.tlsim.grid import off
from nanoserve.kernels.tlsim.language import Range, kept
from nanoserve.kernels.tlsim.values import Value, as_value


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: _code, Run, select
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


# %% [markdown]
# Before that, `Source` reads the text of the kernel as a tree and refuses the statements that Triton does not have.
# `translate` gives each global name of a kernel its meaning in tlsim, whatever it meant outside.

# %%
import inspect
import textwrap
from types import ModuleType

from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError
from nanoserve.kernels.tlsim.launch import jit


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/launch.py: REFUSED, Source, named, BUILTINS, DTYPES, translate
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


# %%
def with_a_break(x_ptr):
    for _ in range(4):
        break


try:
    Source(with_a_break)
except KernelError as error:
    print(error)

# %% [markdown]
# The messages name a line of the kernel: `Run.block` writes the line of each statement into the wave before it runs the
# statement, and `fault` reads it there. `refuse` is one line for one rule. `off` switches all programs off for a while.

# %%
import linecache
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from nanoserve.kernels.tlsim.grid import Options, Wave, running


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/grid.py: KernelError, DEFAULTS, off, fault, refuse
class KernelError(ValueError):
    """A kernel broke a rule of Triton or accessed wrong memory. The message names the line."""


DEFAULTS = Options()
_options: ContextVar[Options] = ContextVar("options", default=DEFAULTS)
_wave: ContextVar[Wave] = ContextVar("wave")


def off() -> AbstractContextManager:
    """Run code of a kernel with all programs off: it computes, and neither loads nor stores."""
    nobody = torch.zeros(1, 1, 1, dtype=torch.bool, device=current().ids[0].device)
    return running(replace(current(), active=nobody))


def fault(what: str, first: tuple[int, ...] = (), at=None) -> KernelError:
    """A KernelError that names the kernel's line and, if `first` is the index of a lane in
    [x, y, z, *shape], the program and the lane."""
    file, line = at or current().at
    name = "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name
    where = f"{name}, line {line}"
    if first:
        place = tuple(int(ids.flatten()[i]) for ids, i in zip(current().ids, first, strict=False))
        axes = max([1, *(axis + 1 for axis, n in enumerate(current().grid) if n > 1)])
        where += f", program {place[:axes]}" + f", lane {list(first[3:])}" * (len(first) > 3)
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())


def refuse(wrong: bool, what: str) -> None:
    """Raise KernelError if a rule is broken."""
    if wrong:
        raise fault(what)


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
# For each buffer the sanitizer keeps two rows as long as the buffer: for each element, which program has stored
# there, and which program has loaded from there. Each access is compared with them. Look at `check_order`, and at
# `SEVERAL`: no program may store to an element that several programs load.

# %%
from nanoserve.kernels.tlsim.grid import fault
from nanoserve.kernels.tlsim.values import aligned


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: NOBODY, SEVERAL, LARGE, watch, everywhere and 3 more
NOBODY, SEVERAL = -1, -2  # beside the numbers of programs
LARGE = 1 << 24  # elements; the order of accesses to a larger buffer is not checked


def watch(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Check an access, if checks are on, and record it, if a trace is on.

    `live` [x, y, z, *shape] is true in the lanes that take part; None: in all lanes.
    """
    wave, (name, flat) = current(), pointer.buffer
    if wave.options.checks:
        outside = (pointer.lanes < 0) | (pointer.lanes >= len(flat))
        refuse_lanes(outside, pointer, live, f"{kind}s outside")
        if kind != "atomic_add" and len(flat) <= LARGE:  # additions may come in any order
            check_order(kind, pointer, live)
    if wave.options.trace and not wave.off:
        lanes = (x.flatten(0, 2) for x in everywhere(pointer, live))
        where = (wave.at[1], flat.itemsize, wave.programs.flatten(), *lanes)
        coalesced = pointer.width > 1 or not pointer.shape
        wave.options.trace.accesses.append(Access(kind, name, *where, coalesced))


def everywhere(pointer: Value, lanes: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets, and a mask of lanes, expanded to all programs: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    lanes = pointer.data.new_ones((), dtype=torch.bool) if lanes is None else lanes
    return pointer.lanes.expand(shape), lanes.expand(shape)


def refuse_lanes(wrong: torch.Tensor, pointer: Value, live, action: str) -> None:
    """Raise KernelError for the first live lane where `wrong` is true."""
    offsets, wrong = everywhere(pointer, wrong if live is None else wrong & live)
    if wrong.any():
        first, (name, flat) = tuple(wrong.nonzero()[0].tolist()), pointer.buffer
        raise fault(f"{action} {name}[{offsets[first]}] of {len(flat)} elements", first)


def check_order(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse a store and another access of one address by two programs, or by two lanes."""
    offsets, live = everywhere(pointer, live)
    (programs,) = aligned(current().programs.int(), rank=len(pointer.shape))
    at, mine = offsets[live], programs.expand(live.shape)[live]
    stored, loaded = accessed(pointer.buffer.flat)

    def forbid(lanes: torch.Tensor, action: str) -> None:
        refuse_lanes(torch.zeros_like(live).masked_scatter(live, lanes), pointer, None, action)

    def others(known: torch.Tensor) -> torch.Tensor:
        return (known[at] != NOBODY) & (known[at] != mine)

    def note(known: torch.Tensor) -> torch.Tensor:
        shared = others(known)
        known[at] = mine
        shared |= known[at] != mine  # by another program of this wave
        known[at[shared]] = SEVERAL
        return shared

    if kind == "load":
        forbid(others(stored), "loads what another program has stored,")
        note(loaded)
    else:
        forbid(others(loaded), "stores where another program loads,")
        forbid(note(stored), "stores where another program has stored,")
        _, address, lanes = at.unique(return_inverse=True, return_counts=True)
        forbid(lanes[address] > 1, "stores where another lane of the same store has stored,")


def accessed(flat: torch.Tensor) -> torch.Tensor:
    """[2, elements]: the program that has stored to each element of a buffer, and the program that
    has loaded it. Two arguments at one address with elements of one size share what is known."""
    known, place = current().accessed, (flat.data_ptr(), flat.element_size())
    before = known.get(place, flat.new_empty(2, 0, dtype=torch.int32))
    if (more := len(flat) - before.shape[1]) > 0:  # the first access, or a longer argument's first
        known[place] = torch.cat([before, before.new_full((2, more), NOBODY)], 1)
    return known.get(place, before)


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
atomic_add = partial(store, adds=True)  # several lanes or programs may add to one address


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
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager

from nanoserve.kernels.tlsim.grid import options


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/memory.py: Access, Trace, trace
class Access(namedtuple("Access", "kind name line itemsize programs offsets live coalesced")):
    """One load, store or atomic_add of a wave of programs, recorded by a trace.

    kind       "load", "store" or "atomic_add"
    name       of the argument
    line       of the kernel's file
    itemsize   the bytes of an element
    programs   [programs], their numbers in the grid
    offsets    [programs, *shape], in elements
    live       [programs, *shape], the lanes that were accessed
    coalesced  whether the lanes of a row have consecutive offsets
    """

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


class Trace:
    """All loads and stores inside the `with` block, in order."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def bytes(self, kind: str) -> int:
        """The bytes of all accesses of a kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def distinct_bytes(self, kind: str, name: str) -> int:
        """The bytes of one argument that were accessed at least once."""
        chosen = [a for a in self.accesses if (a.kind, a.name) == (kind, name)]
        touched = [a.offsets[a.live] for a in chosen]
        return len(torch.cat(touched).unique()) * chosen[0].itemsize if chosen else 0


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
# types. Most are one line, since `combine` of Day 21 does the work. Where torch has a function of the same name, the name
# in a table is enough.

# %%
from nanoserve.kernels.tlsim.language import Range, reduce_max, reduce_min, reduce_sum
from nanoserve.kernels.tlsim.rules import block_shape, torch_axis, wide
from nanoserve.kernels.tlsim.values import combine, paired


# %% jupyter={"source_hidden": true}
# lands in nanoserve/kernels/tlsim/language.py: int1, int8, int16, int32, int64, uint8 and 18 more
int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64
static_range = range
math = sys.modules[__name__]  # tl.math.exp is tl.exp


def cumsum(x: Value, axis: int = 0) -> Value:
    """The sums of the lanes up to each lane, along an axis."""
    dtype = x.dtype if x.dtype.is_floating_point else wide(x.dtype)
    return Value(x.lanes.cumsum(torch_axis(axis, len(x.shape)), dtype=dtype))


def where(condition, x, y) -> Value:
    """x where the condition is true, else y. Both are always computed."""
    return combine(torch.where, as_value(condition).to(torch.bool), *paired(x, y))


def _extreme(op: Callable, x, y) -> Value:
    """The larger or the smaller of x and y, lane by lane; if one is NaN, the other."""
    x, y = as_value(x), as_value(y)
    short = (x.to(float32) if x.dtype == bfloat16 else x for x in (x, y))
    return combine(op, *paired(*short))


maximum, minimum = partial(_extreme, torch.fmax), partial(_extreme, torch.fmin)


def _function(name: str, x) -> Value:
    """torch's function of this name, lane by lane. All but abs are for float32 and float64 only."""
    x = as_value(x)
    short = name != "abs" and x.dtype not in (float32, float64)
    refuse(short, f"tl.{name} is for float32 and float64, not {x.dtype}: cast with .to first")
    return combine(getattr(torch, name), x)


FUNCTIONS = ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "floor", "ceil", "sigmoid")


def cdiv(x, y):
    """x / y, rounded up, for positive integers."""
    return (x + y - 1) // y


def reshape(x: Value, shape: tuple[int, ...]) -> Value:
    """The same lanes, in row-major order, in another shape."""
    return Value(x.lanes.reshape(*x.data.shape[:3], *block_shape(*shape)), x.buffer)


def trans(x: Value) -> Value:
    """x with its last two axes exchanged."""
    return x.T


expand_dims = Value.expand_dims


class constexpr:
    """A value known at compile time: annotates a parameter, or wraps a global."""

    def __init__(self, value) -> None:
        self.value = value


def static_assert(condition: bool, message: str = "tl.static_assert is false") -> None:
    """Raise KernelError if a condition on constants is false."""
    refuse(not condition, message)


HIDDEN = {name: partial(_function, name) for name in FUNCTIONS}  # Triton's names that are hidden
HIDDEN |= {"sum": reduce_sum, "max": reduce_max, "min": reduce_min, "range": Range}


def __getattr__(name: str):
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
