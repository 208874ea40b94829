"""Triton's rules of dtypes, shapes and conditions: what meets what, and what is refused."""

import sys
from functools import cache, partial

import torch

from nanoserve.kernels.tlsim.grid import current, fault, refuse

# ---- dtypes


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


# ---- shapes

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


# ---- conditions and methods


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
