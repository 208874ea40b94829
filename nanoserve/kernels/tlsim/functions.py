"""Functions of blocks: those that compute lane by lane, and those that change a shape."""

from collections.abc import Callable

import torch

from nanoserve.kernels.tlsim.grid import fault
from nanoserve.kernels.tlsim.reductions import widened
from nanoserve.kernels.tlsim.rules import block_shape, broadcasts
from nanoserve.kernels.tlsim.values import Operand, Value, aligned, as_value, combine, paired


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
    x, y = (as_value(x) for x in operands)
    return combine(op, *paired(*(widened(v) if v.dtype == torch.bfloat16 else v for v in (x, y))))


def absolute(x: Operand) -> Value:
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


def reshape(x: Value, shape: tuple[int, ...]) -> Value:
    """The same lanes, in row-major order, in another shape."""
    shape = block_shape(*shape)
    if torch.Size(shape).numel() != torch.Size(x.shape).numel():
        raise fault(f"cannot reshape {list(x.shape)} to {list(shape)}: the numbers of lanes differ")
    return Value(x.lanes.reshape(*x.data.shape[:3], *shape), x.buffer)


def broadcast_to(x: Operand, shape: tuple[int, ...]) -> Value:
    """The same lanes repeated along axes of size 1."""
    shape, x = block_shape(*shape), as_value(x)
    if not broadcasts(x.shape, shape):
        raise fault(f"a block of shape {list(x.shape)} does not broadcast to {list(shape)}")
    (data,) = aligned(x.lanes, rank=len(shape))
    return Value(data.expand(-1, -1, -1, *shape), x.buffer)


def expand_dims(x: Value, axis: int) -> Value:
    """x with a new axis of size 1."""
    index = [slice(None)] * len(x.shape)
    index.insert(axis % (len(x.shape) + 1), None)
    return x[tuple(index)]


def trans(x: Value) -> Value:
    """x with its last two axes exchanged."""
    return x.T
