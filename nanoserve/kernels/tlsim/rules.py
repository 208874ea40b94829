"""Triton's rules of dtypes, shapes and conditions: what meets what, and what is refused."""

from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault


def number_dtype(x: Any, beside: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a number: that of `beside`, the other operand, if it is of the same kind or a
    wider kind (bool, integer, float); else int1, int32 (int64 if large) or float32."""
    if not isinstance(x, int | float):
        raise fault(f"a kernel computes with numbers and tensors, not with {type(x).__name__}")
    dtype = torch.int32 if -(2**31) <= x < 2**31 else torch.int64
    if not isinstance(x, int) or isinstance(x, bool):
        dtype = torch.bool if isinstance(x, bool) else torch.float32
    if beside is not None and kind(dtype) <= kind(beside):
        dtype = beside
    if kind(dtype) == 1 and not torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max:
        raise fault(f"{x} is out of range for {dtype}")
    return dtype


def kind(dtype: torch.dtype) -> int:
    """0 for int1, 1 for integers, 2 for floats."""
    return 0 if dtype == torch.bool else 1 + dtype.is_floating_point


@cache
def joint_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype in which two operands meet. This is torch's choice, except that bfloat16 with
    float16 gives float16, and bfloat16 with any other dtype gives float32."""
    if a == b or torch.bfloat16 not in (a, b):
        return torch.promote_types(a, b)
    half = torch.float16 in (a, b)
    return torch.float16 if half else torch.promote_types(torch.promote_types(a, b), torch.float32)


@cache
def joint_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that blocks of these shapes broadcast to, aligned at the last axis."""
    sizes = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    joint = tuple(map(max, sizes))[::-1]
    if not all(broadcasts(shape, joint) for shape in shapes):
        raise fault(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
    return joint


@cache
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


def same_type(name: str, old: Any, new: Any, what: str) -> None:
    """Refuse a variable that changes its dtype or shape: compiled code has one register for it."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        was, became = (f"{list(x.shape)} {x.dtype}" for x in (old, new))
        raise fault(what.format(name=name, was=was, became=became))


def truth(x: Any) -> bool:
    """Whether a condition of `if`, `while`, `and` or `or` is true: one answer for all programs."""
    if x.shape:
        raise fault("a block is neither true nor false: use tl.where, or &, | and ~ on masks")
    if current().off:
        return False
    if x.data.numel() > 1:
        raise fault(
            "in lockstep all programs take the same branch, but this condition depends on the "
            'program: use a mask, or tlsim.options(order="serial")'
        )
    return bool(x.data)


METHODS = {*"abs cdiv ceil exp exp2 floor log log2 rsqrt sigmoid sqrt".split()}
METHODS |= {*"atomic_add broadcast_to expand_dims max min reshape store sum trans".split()}


def method(x: Any, name: str) -> Any:
    """x.sum() and the like: Triton's tensors have the functions of `tl` as methods."""
    from nanoserve.kernels.tlsim import language

    if name not in METHODS:
        raise AttributeError(f"tlsim has no method .{name} of a block")
    return partial(getattr(language, name), x)
