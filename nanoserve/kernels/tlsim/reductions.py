"""Reductions: one number from the lanes of an axis; and the matrix product.

language.py imports these under Triton's names. Here their names do not hide Python's functions.
"""

from collections.abc import Callable

import torch

from nanoserve.kernels.tlsim.grid import fault
from nanoserve.kernels.tlsim.values import Value


def reduce_sum(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The sum over an axis, or over all axes; short integers are summed in 32 bits."""
    x = x if x.dtype.is_floating_point else widened(x)
    return _reduce(lambda data, axes: data.sum(axes, dtype=x.dtype), x, axis, keep_dims)


def reduce_max(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The largest lane along an axis, or of all lanes, in 32 bits at least.

    The result is NaN if a lane is NaN. A GPU ignores NaN lanes instead.
    """
    return _reduce(torch.amax, widened(x), axis, keep_dims)


def reduce_min(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The smallest lane along an axis, or of all lanes; dtype and NaN as for reduce_max."""
    return _reduce(torch.amin, widened(x), axis, keep_dims)


def widened(x: Value) -> Value:
    """x in 32 bits at least."""
    wide = torch.float32 if x.dtype.is_floating_point else torch.int32
    return x if x.dtype.itemsize >= 4 else x.to(wide)


def _reduce(op: Callable, x: Value, axis: int | None, keep_dims: bool) -> Value:
    rank = len(x.shape)
    if not rank or not (axis is None or -rank <= axis < rank):
        raise fault(f"a block of shape {list(x.shape)} has no axis {axis}")
    axes = range(rank) if axis is None else (axis % rank,)
    out = op(x.lanes, [3 + i for i in axes])
    for i in axes if keep_dims else ():
        out = out.unsqueeze(3 + i)
    return Value(out)


def dot(
    a: Value,
    b: Value,
    acc: Value | None = None,
    input_precision: str | None = None,
    allow_tf32: bool | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Value:
    """The matrix product of blocks [.., m, k] and [.., k, n], plus acc, summed in float32: one
    product of torch for all programs.

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
    product = torch.matmul(widened(a).lanes, widened(b).lanes)
    out = Value(product.to(out_dtype) if a.dtype == torch.float16 else product)
    return out if acc is None else out + acc
