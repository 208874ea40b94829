"""triton.language in torch: tlsim binds a kernel's `tl` to this module."""

import builtins
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.loops import Range
from nanoserve.kernels.tlsim.memory import load as load
from nanoserve.kernels.tlsim.memory import store as store
from nanoserve.kernels.tlsim.rules import block_shape, broadcasts, dot_operands, wide
from nanoserve.kernels.tlsim.values import Value, aligned, as_value, combine, paired

int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64

range, static_range = Range, builtins.range
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
    if not (isinstance(start, int) and isinstance(end, int)):
        raise fault("the bounds of tl.arange must be tl.constexpr, known at compile time")
    (length,) = block_shape(end - start)
    return Value(as_value(start).data[..., None], width=length)


def full(shape: tuple[int, ...], value: Any, dtype: torch.dtype) -> Value:
    """A block with `value` in every lane."""
    return broadcast_to(as_value(value).to(dtype), shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Value:
    """The same lanes repeated along axes of size 1."""
    shape, x = block_shape(*shape), as_value(x)
    if not broadcasts(x.shape, shape):
        raise fault(f"a block of shape {list(x.shape)} does not broadcast to {list(shape)}")
    (data,) = aligned(x.lanes, rank=len(shape))
    return Value(data.expand(-1, -1, -1, *shape), x.buffer)


# ---- reductions and the matrix product


def sum(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The sum over an axis, or over all axes; short integers are summed in 32 bits."""
    dtype = x.dtype if x.dtype.is_floating_point else wide(x.dtype)
    return _reduce(partial(torch.sum, dtype=dtype), x, axis, keep_dims)


def max(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The largest lane along an axis, or of all lanes, in 32 bits at least.

    The result is NaN if a lane is NaN. A GPU ignores NaN lanes instead.
    """
    return _reduce(torch.amax, x.to(wide(x.dtype)), axis, keep_dims)


def min(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The smallest lane along an axis, or of all lanes, in 32 bits at least; NaN as in max."""
    return _reduce(torch.amin, x.to(wide(x.dtype)), axis, keep_dims)


def cumsum(x: Value, axis: int = 0) -> Value:
    """The sums of the lanes up to each lane, along an axis."""
    dtype = x.dtype if x.dtype.is_floating_point else wide(x.dtype)
    return Value(x.lanes.cumsum(3 + axis % len(x.shape), dtype=dtype))


def _reduce(op: Callable, x: Value, axis: int | None, keep_dims: bool) -> Value:
    rank = len(x.shape)
    if not rank or not (axis is None or -rank <= axis < rank):
        raise fault(f"a block of shape {list(x.shape)} has no axis {axis}")
    axes = [3 + i for i in (builtins.range(rank) if axis is None else (axis % rank,))]
    return Value(op(x.lanes, dim=axes, keepdim=keep_dims))


def dot(a: Value, b: Value, acc: Value | None = None, *, out_dtype=torch.float32, **_) -> Value:
    """The matrix product of blocks [.., m, k] and [.., k, n], plus acc, summed in float32.

    One product of torch is the product of all programs. A GPU rounds float32 operands to TF32
    unless input_precision="ieee"; tlsim never rounds them.
    """
    dot_operands(a, b)
    product = torch.matmul(*(x.to(wide(x.dtype)).lanes for x in (a, b)))
    out = Value(product.to(out_dtype) if a.dtype == torch.float16 else product)
    return out if acc is None else out + acc


# ---- functions of each lane, and changes of shape


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


def abs(x: Any) -> Value:
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


# ---- what is left of the language


class constexpr:
    """A value known at compile time: annotates a parameter, or wraps a global."""

    def __init__(self, value: Any) -> None:
        self.value = value


def atomic_add(pointer: Value, value: Any, mask: Any = None, **_) -> None:
    """tl.atomic_add: add to memory. Several lanes or programs may add to one address."""
    store(pointer, value, mask, adds=True)


def static_assert(condition: bool, message: str = "") -> None:
    """Raise KernelError if a condition on constants is false."""
    if not condition:
        raise fault(message or "tl.static_assert: the condition is false")


def __getattr__(name: str) -> Any:
    raise AttributeError(f"tlsim has no tl.{name}: it has the part of Triton that the course uses")
