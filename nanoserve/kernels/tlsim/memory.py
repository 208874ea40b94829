"""Loads and stores with masks."""

from typing import Any

import torch

from nanoserve.kernels.tlsim.accesses import check_poison, watch
from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.replay import one_step
from nanoserve.kernels.tlsim.rules import broadcasts
from nanoserve.kernels.tlsim.values import Value, aligned, as_value


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
    flat, at, data = pointer.buffer.flat, pointer.lanes, fitting(pointer, value, "a value")
    shape = (*current().programs.shape, *pointer.shape)
    at, data = at.expand(shape).flatten(), data.to(flat.dtype).expand(shape).flatten()
    if live is not None:
        lanes = live.expand(shape).flatten().nonzero().squeeze(1)
        at, data = at[lanes], data[lanes]
    flat.index_put_((at,), data, accumulate=adds)


def access(kind: str, pointer: Value, mask: Any) -> tuple[Any, Any]:
    """Return (mask, live): the mask, and the mask within the programs that run, each broadcast to
    [x, y, z, *shape]; None stands for all lanes. The sanitizer and the trace see the access."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    if mask is not None and (mask := fitting(pointer, mask, "a mask")).dtype != torch.bool:
        raise fault(f"a mask must be int1, as a comparison returns it, got {mask.dtype}")
    live, active = mask, current().active
    if active is not None:
        (active,) = aligned(active, rank=len(pointer.shape))
        live = active if mask is None else mask & active
    watch(kind, pointer, live)
    return mask, live


def fitting(pointer: Value, x: Any, what: str) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to the pointer's lanes."""
    x, shape = as_value(x), pointer.shape
    if not broadcasts(x.shape, shape):
        raise fault(f"{what} of shape {list(x.shape)} does not fit pointers {list(shape)}")
    return aligned(x.lanes, rank=len(shape))[0]


@one_step
def take(flat: torch.Tensor, at: torch.Tensor, width: int, anywhere: bool) -> torch.Tensor:
    """flat[at], or rows of `width` elements from `at` [.., 1]. With `anywhere`, offsets outside
    `flat` give any number: their lanes take no part."""
    last = len(flat) - width
    if anywhere and width > 1 and (last < 0 or at.min() < 0 or at.max() > last):
        at, width, last = Value(at, width=width).lanes, 1, len(flat) - 1  # rows partly inside
    if last < 0:
        return flat.new_zeros(()).expand(at.shape)
    at = at.clamp(0, last) if anywhere else at
    rows = flat.unfold(0, width, 1).index_select(0, at.flatten())  # of all rows, by their start
    return rows.view(*at.shape[:-1], width) if width > 1 else rows.view(at.shape)
