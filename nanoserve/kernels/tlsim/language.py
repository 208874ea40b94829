"""triton.language in torch: tlsim binds a kernel's `tl` to this module."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from nanoserve.kernels.tlsim.grid import current, refuse
from nanoserve.kernels.tlsim.memory import load, store
from nanoserve.kernels.tlsim.rules import block_shape, dot_operands, torch_axis, wide
from nanoserve.kernels.tlsim.values import Value, aligned, as_value, combine, fitting, paired

int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64

static_range = range
math = sys.modules[__name__]  # tl.math.exp is tl.exp


# ---- which program this is, and the first blocks


def program_id(axis: int) -> Value:
    """The index of this program along an axis of the grid: int32."""
    return Value(current().ids[axis])


def num_programs(axis: int) -> Value:
    """The number of programs along an axis of the grid: int32."""
    return as_value(current().grid[axis])


def arange(start: int, end: int) -> Value:
    """start, start + 1, ... end - 1: an int32 block whose length is a power of two."""
    (length,) = block_shape(end - start)
    return Value(as_value(start).data[..., None], width=length)


def full(shape: tuple[int, ...], value, dtype: torch.dtype) -> Value:
    """A block with `value` in every lane."""
    return broadcast_to(as_value(value).to(dtype), shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def broadcast_to(x, shape: tuple[int, ...]) -> Value:
    """The same lanes repeated along axes of size 1."""
    x, shape = as_value(x), block_shape(*shape)
    return Value(fitting(x, shape).expand(-1, -1, -1, *shape), x.buffer)


# ---- reductions and the matrix product


def _reduction(op: Callable, sums: bool = False) -> Callable[..., Value]:
    """A reduction over one axis, or over all. It is done in 32 bits at least, but halves are summed
    as they are. The largest and the smallest lane are NaN if a lane is; a GPU ignores it instead.
    """

    def reduce(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
        rank, dtype = len(x.shape), x.dtype
        axes = [torch_axis(i, rank) for i in (range(max(rank, 1)) if axis is None else [axis])]
        dtype = dtype if sums and dtype.is_floating_point else wide(dtype)
        return Value(op(x.to(dtype).lanes, axes, keep_dims).to(dtype))

    return reduce


reduce_sum = _reduction(torch.sum, sums=True)
reduce_max, reduce_min = _reduction(torch.amax), _reduction(torch.amin)


def cumsum(x: Value, axis: int = 0) -> Value:
    """The sums of the lanes up to each lane, along an axis."""
    dtype = x.dtype if x.dtype.is_floating_point else wide(x.dtype)
    return Value(x.lanes.cumsum(torch_axis(axis, len(x.shape)), dtype=dtype))


def dot(a: Value, b: Value, acc: Value | None = None, *, out_dtype=torch.float32, **_) -> Value:
    """The matrix product of blocks [.., m, k] and [.., k, n], plus acc, summed in float32.

    One product of torch is the product of all programs. A GPU rounds float32 operands to TF32
    unless input_precision="ieee"; tlsim never rounds them.
    """
    dot_operands(a, b)
    product = torch.matmul(*(x.to(wide(x.dtype)).lanes for x in (a, b)))
    out = Value(product.to(out_dtype) if a.dtype == torch.float16 else product)
    return out if acc is None else out + acc


# ---- loops whose bounds differ by program


class Range:
    """tl.range, and range in a kernel. A bound is a number, or a value that differs by program."""

    def __init__(self, start, stop=None, step=1, **_) -> None:
        start, stop = (0, start) if stop is None else (start, stop)
        start, self.stop = paired(start, as_value(stop))
        self.start, self.step = paired(start, as_value(step))
        wrong = any(x.shape or x.dtype.is_floating_point for x in (start, self.stop, self.step))
        refuse(wrong, "the bounds of a loop must be integers, not blocks or fractions")
        known = (isinstance(step, int) and step < 0) or bool((self.step.data > 0).all())
        refuse(not known, "the step of a loop must be above 0, or a negative constant")

    def __iter__(self) -> Iterator[Value]:
        """The index in each turn. In a turn, the programs that have finished are not active. With
        checks, a loop without a turn has one, with all programs off."""
        wave, outer = current(), current().active
        # the distance, divided by the step and rounded up
        turns = -torch.div(self.start.data - self.stop.data, self.step.data, rounding_mode="floor")
        turns = turns if outer is None else torch.where(outer, turns, 0)
        longest = int(turns.max())
        alike = turns.numel() == 1 or bool((turns == longest).all())
        for turn in range(max(longest, wave.options.checks)):
            wave.active = outer if alike and longest > 0 else turns > turn
            yield self.start + self.step * turn
        wave.active = outer


def kept(name: str, old, new):
    """What a variable holds after code that only some programs run: the new value in the active
    programs, and the old one in the others. Its shape and dtype must be the same."""
    if new is old or not isinstance(old, Value) or not isinstance(new, Value):
        return new
    was, now = (f"{list(x.shape)} {x.dtype}" for x in (old, new))
    refuse(was != now, f"{name} is {was} before and {now} after: shape and dtype must stay")
    if (active := current().active) is None:
        return new
    width = new.width if old.width == new.width else 1  # rows stay rows
    data = aligned(active, *(x.data if width > 1 else x.lanes for x in (new, old)))
    return Value(torch.where(*data), new.buffer, width)


# ---- functions of each lane, and changes of shape


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


# ---- what is left of the language

atomic_add = partial(store, adds=True)  # several lanes or programs may add to one address
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
