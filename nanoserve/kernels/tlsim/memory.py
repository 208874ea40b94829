"""Loads and stores with masks."""

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.replay import one_step
from nanoserve.kernels.tlsim.rules import broadcasts
from nanoserve.kernels.tlsim.sanitizer import check_access, check_poison
from nanoserve.kernels.tlsim.tracing import record
from nanoserve.kernels.tlsim.values import Operand, Value, aligned, as_value


def load(pointer: Value, mask: Operand | None = None, other: Operand | None = None, **_) -> Value:
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
        if other is None:
            other = torch.nan if flat.is_floating_point() else 0
        data = torch.where(mask, data, fitting(pointer, other, "a value").to(flat.dtype))
    check_poison(pointer, live, data)
    return Value(data)


def store(pointer: Value, value: Operand, mask: Operand | None = None, **_) -> None:
    """tl.store: write value's lanes to the pointers where the mask is true."""
    _, live = access("store", pointer, mask)
    flat = pointer.buffer.flat
    put(flat, pointer.lanes, fitting(pointer, value, "a value").to(flat.dtype), live)


def access(
    kind: str, pointer: Value, mask: Operand | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check an access and record it. Return (mask, live): the mask, and the mask within the
    programs that run, each [x, y, z, *shape] or broadcast to it; None stands for all lanes."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    if mask is not None:
        mask = fitting(pointer, mask, "a mask")
        if mask.dtype != torch.bool:
            raise fault(f"a mask must be int1, as a comparison returns it, got {mask.dtype}")
    live, active = mask, current().active
    if active is not None:
        (active,) = aligned(active, rank=len(pointer.shape))
        live = active if mask is None else mask & active
    check_access(kind, pointer, live)
    record(kind, pointer, live)
    return mask, live


def fitting(pointer: Value, x: Operand, what: str) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to the pointer's lanes."""
    x, shape = as_value(x), pointer.shape
    if not broadcasts(x.shape, shape):
        raise fault(f"{what} of shape {list(x.shape)} does not fit pointers {list(shape)}")
    return aligned(x.lanes, rank=len(shape))[0]


@one_step
def take(flat: torch.Tensor, at: torch.Tensor, width: int, anywhere: bool) -> torch.Tensor:
    """flat[at], or rows of `width` elements from `at` [.., 1]. With `anywhere`, offsets outside
    `flat` give any number: their lanes take no part."""
    if not len(flat):
        return flat.new_zeros(()).expand(*at.shape[:-1], at.shape[-1] * width)
    starts = len(flat) - width
    if anywhere and width > 1 and (at.min() < 0 or at.max() > starts):  # a row may be partly inside
        at, width, starts = Value(at, width=width).lanes, 1, len(flat) - 1
    at = at.clamp(0, starts) if anywhere else at
    rows = flat.unfold(0, width, 1).index_select(0, at.flatten())  # all rows of flat, by start
    return rows.view(*at.shape[:-1], width) if width > 1 else rows.view(at.shape)


@one_step
def put(
    flat: torch.Tensor, at: torch.Tensor, data: torch.Tensor, live: torch.Tensor | None
) -> None:
    """flat[at] = data in the lanes that are live; None: in all."""
    if live is None:
        flat.index_put_((at,), data)
    else:
        at, data, live = torch.broadcast_tensors(at, data, live)
        flat.index_put_((at[live],), data[live])
