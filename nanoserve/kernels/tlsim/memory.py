"""Loads and stores with masks."""

from typing import Any

import torch

from nanoserve.kernels.tlsim.accesses import access, check_poison, fitting
from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.replay import one_step
from nanoserve.kernels.tlsim.values import Value


def load(pointer: Value, mask: Any = None, other: Any = None, **_) -> Value:
    """tl.load: the elements at the pointers where the mask is true, and `other` elsewhere.

    Without `other`, the other lanes are undefined on a GPU, and NaN in tlsim (0 for integers).
    Hints about caches are accepted and ignored.
    """
    if other is not None and mask is None:
        raise fault("tl.load takes `other` only with a mask")
    mask, live = access("load", pointer, mask)
    flat = pointer.buffer.flat
    data = take(flat, pointer.data, pointer.width, live is not None)
    if mask is not None:
        undefined = torch.nan if flat.is_floating_point() else 0
        other = fitting(pointer, undefined if other is None else other, "a value")
        data = torch.where(mask, data, other.to(flat.dtype))
    check_poison(pointer, live, data)
    return Value(data)


def store(pointer: Value, value: Any, mask: Any = None, adds: bool = False, **_) -> None:
    """tl.store: write value's lanes to the pointers where the mask is true."""
    _, live = access("atomic_add" if adds else "store", pointer, mask)
    flat, shape = pointer.buffer.flat, (*current().programs.shape, *pointer.shape)
    data = fitting(pointer, value, "a value").to(flat.dtype)
    at, data = (
        x.flatten() if x.shape == shape else x.expand(shape).flatten()
        for x in (pointer.lanes, data)
    )
    if live is not None:
        lanes = live.expand(shape).flatten().nonzero().squeeze(1)
        at, data = at.index_select(0, lanes), data.index_select(0, lanes)
    (flat.index_add_ if adds else flat.index_copy_)(0, at, data)


@one_step
def take(flat: torch.Tensor, at: torch.Tensor, width: int, anywhere: bool) -> torch.Tensor:
    """flat[at], or rows of `width` elements from `at` [.., 1]. With `anywhere`, offsets outside
    `flat` give any number: their lanes take no part."""
    last = len(flat) - width
    low, high = map(int, at.aminmax()) if anywhere and width > 1 else (0, 0)
    if low < 0 or high > last:
        at, width, last = Value(at, width=width).lanes, 1, len(flat) - 1  # rows partly inside
    if last < 0:
        return flat.new_zeros(()).expand(at.shape)
    at = at.clamp(0, last) if anywhere else at
    rows = flat.unfold(0, width, 1).index_select(0, at.flatten())  # of all rows, by their start
    return rows.view(*at.shape[:-1], width) if width > 1 else rows.view(at.shape)
