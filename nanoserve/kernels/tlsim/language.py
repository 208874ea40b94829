"""triton.language in torch: tlsim binds a kernel's `tl` to this module."""

import builtins
import sys
from collections.abc import Callable
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.loops import Range
from nanoserve.kernels.tlsim.memory import atomic_add, load, store
from nanoserve.kernels.tlsim.values import (
    Operand,
    Value,
    as_value,
    broadcasts,
    combine,
    paired,
    spread,
)

int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64

range, static_range = Range, builtins.range
math = sys.modules[__name__]  # tl.math.exp is tl.exp


class constexpr:
    """A value known at compile time: annotates a parameter, or wraps a global."""

    def __init__(self, value: Any) -> None:
        self.value = value


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
    (length,) = _block_shape(end - start)
    return Value(as_value(start).data[..., None], (length,), ramp=length > 1)


def full(shape: tuple[int, ...], value: Operand, dtype: torch.dtype) -> Value:
    """A block with `value` in every lane."""
    shape = _block_shape(*shape)
    return Value(spread(as_value(value).data, len(shape)).to(dtype), shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def _block_shape(*shape: Any) -> tuple[int, ...]:
    """The shape of a block, by Triton's rules: constants that are powers of two."""
    for size in shape:
        if not isinstance(size, int):
            raise fault("the shape of a block must be tl.constexpr, known at compile time")
        if size < 1 or size & (size - 1):
            raise fault(f"the sizes of a block must be powers of two, got {size}")
    return shape


def reshape(x: Value, shape: tuple[int, ...]) -> Value:
    """The same lanes, in row-major order, in another shape."""
    shape = _block_shape(*shape)
    if torch.Size(shape).numel() != torch.Size(x.shape).numel():
        raise fault(f"cannot reshape {list(x.shape)} to {list(shape)}: the numbers of lanes differ")
    return Value(x.whole.reshape(*x.data.shape[:3], *shape), shape, x.buffer)


def broadcast_to(x: Operand, shape: tuple[int, ...]) -> Value:
    """The same lanes repeated along axes of size 1."""
    shape, x = _block_shape(*shape), as_value(x)
    if not broadcasts(x.shape, shape):
        raise fault(f"a block of shape {list(x.shape)} does not broadcast to {list(shape)}")
    return Value(spread(x.lanes, len(shape)), shape, x.buffer)


def expand_dims(x: Value, axis: int) -> Value:
    """x with a new axis of size 1."""
    index = [slice(None)] * len(x.shape)
    index.insert(axis % (len(x.shape) + 1), None)
    return x[tuple(index)]


def trans(x: Value) -> Value:
    """x with its last two axes exchanged."""
    return x.T


def where(condition: Operand, x: Operand, y: Operand) -> Value:
    """x where the condition is true, else y. Both are always computed."""
    return combine(torch.where, as_value(condition).to(torch.bool), *paired(x, y))


def maximum(x: Operand, y: Operand) -> Value:
    """The larger of x and y; if one is NaN, the other."""
    return _elementwise(torch.fmax, x, y)


def minimum(x: Operand, y: Operand) -> Value:
    """The smaller of x and y; if one is NaN, the other."""
    return _elementwise(torch.fmin, x, y)


def _elementwise(op: Callable, *operands: Operand) -> Value:
    values = map(as_value, operands)
    return combine(op, *paired(*(_widened(x) if x.dtype == bfloat16 else x for x in values)))


def abs(x: Operand) -> Value:
    """The absolute value."""
    return combine(torch.abs, as_value(x))


def _function(op: Callable[[torch.Tensor], torch.Tensor], what: str) -> Callable[[Operand], Value]:
    """A function of each lane that Triton defines for float32 and float64 only."""

    def apply(x: Operand) -> Value:
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


def cdiv(x: Operand, y: Operand) -> Operand:
    """x / y, rounded up, for positive integers."""
    return (x + y - 1) // y


def sum(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The sum over an axis, or over all axes; short integers are summed in 32 bits."""
    x = x if x.dtype.is_floating_point else _widened(x)
    return _reduce(x.summed, x.shape, axis, keep_dims)


def max(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The largest lane along an axis, or of all lanes, in 32 bits at least.

    The result is NaN if a lane is NaN. A GPU ignores NaN lanes instead.
    """
    return _reduce(_widened(x).whole.amax, x.shape, axis, keep_dims)


def min(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The smallest lane along an axis, or of all lanes, in 32 bits at least; NaN as in max."""
    return _reduce(_widened(x).whole.amin, x.shape, axis, keep_dims)


def cumsum(x: Value, axis: int = 0) -> Value:
    """The sums of the lanes up to each lane, along an axis."""
    x = x if x.dtype.is_floating_point else _widened(x)
    return Value(x.whole.cumsum(3 + axis % len(x.shape), dtype=x.dtype), x.shape)


def _widened(x: Value) -> Value:
    """x in 32 bits at least."""
    wide = torch.float32 if x.dtype.is_floating_point else torch.int32
    return x if x.dtype.itemsize >= 4 else x.to(wide)


def _reduce(op: Callable, shape: tuple[int, ...], axis: int | None, keep_dims: bool) -> Value:
    rank = len(shape)
    if not rank or not (axis is None or -rank <= axis < rank):
        raise fault(f"a block of shape {list(shape)} has no axis {axis}")
    axes = tuple(builtins.range(rank)) if axis is None else (axis % rank,)
    out = Value(op([3 + i for i in axes]), tuple(n for i, n in enumerate(shape) if i not in axes))
    for i in axes if keep_dims else ():
        out = expand_dims(out, i)
    return out


def dot(
    a: Value,
    b: Value,
    acc: Value | None = None,
    input_precision: str | None = None,
    allow_tf32: bool | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Value:
    """The matrix product of blocks [.., m, k] and [.., k, n], plus acc, summed in float32.

    A GPU rounds float32 operands to TF32 unless input_precision="ieee"; tlsim never rounds them.
    """
    if a.dtype != b.dtype:
        raise fault(f"tl.dot needs operands of one dtype, got {a.dtype} and {b.dtype}")
    if len(a.shape) != len(b.shape) or len(a.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise fault(f"tl.dot cannot multiply {list(a.shape)} by {list(b.shape)}")
    if a.shape[-1] < (least := 32 if a.dtype.itemsize == 1 else 16):
        raise fault(f"tl.dot must sum over at least {least} lanes, got {a.shape[-1]}")
    if not a.dtype.is_floating_point and a.dtype != torch.int8:
        raise fault(f"tl.dot multiplies floats or int8, not {a.dtype}")
    product = torch.matmul(_widened(a).whole, _widened(b).whole)
    product = product.to(out_dtype) if a.dtype == float16 else product
    out = Value(product, (*a.shape[:-1], b.shape[-1]))
    return out if acc is None else out + acc


def static_assert(condition: bool, message: str = "") -> None:
    """Raise KernelError if a condition on constants is false."""
    if not condition:
        raise fault(message or "tl.static_assert: the condition is false")


def __getattr__(name: str) -> Any:
    raise AttributeError(f"tlsim has no tl.{name}: it has the part of Triton that the course uses")
