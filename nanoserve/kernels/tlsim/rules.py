"""Triton's rules of dtypes, shapes and conditions: what meets what, and what is refused."""

import sys
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault


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
