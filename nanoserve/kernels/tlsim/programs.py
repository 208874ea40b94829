"""Which program this is, and the first blocks of numbers."""

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.rules import block_shape
from nanoserve.kernels.tlsim.values import Operand, Value, aligned, as_value


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


def full(shape: tuple[int, ...], value: Operand, dtype: torch.dtype) -> Value:
    """A block with `value` in every lane."""
    (data,) = aligned(as_value(value).data.to(dtype), rank=len(block_shape(*shape)))
    return Value(data.expand(-1, -1, -1, *shape))


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)
