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
    flat, at, width = pointer.buffer.flat, pointer.data, pointer.width
    if live is not None:  # lanes that take no part may point anywhere
        at = torch.where(live.any(-1, keepdim=True) if width > 1 else live, at, 0)
    masked = live is not None
    shape = at.shape if width == 1 else (*at.shape[:-1], width)
    starts = at.flatten() if masked else joined(at, width)
    data = take(flat, starts, width, at.numel(), shape, masked)
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
    at, data = (x if x.shape == shape else x.expand(shape) for x in (pointer.lanes, data))
    at, data = at.flatten(), data.flatten()
    if live is not None:
        lanes = live.expand(shape).flatten().nonzero().squeeze(1)
        at, data = at.index_select(0, lanes), data.index_select(0, lanes)
    (flat.index_add_ if adds else flat.index_copy_)(0, at, data)


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
def joined(at: torch.Tensor, width: int) -> torch.Tensor:
    """The offsets of rows. Where the programs of axis 0 load neighbouring rows, as the KV heads of
    a token are, these become one long row: then only the first program's offsets."""
    if width > 1 and len(at) > 1 and at.shape[1] * at.shape[2] == 1:
        at = at[:1] if bool((at[1:] - at[:-1] == width).all()) else at
    return at.flatten()


@one_step
def take(flat: Any, at: torch.Tensor, width: int, rows: int, shape: tuple, masked: bool) -> Any:
    """Rows of `width` neighbours in flat, from the offsets `at` on, viewed as shape. Of a masked
    row, the lanes outside flat give any number."""
    rows //= len(at)  # in one joined row
    try:
        if masked and flat.is_cuda:  # a GPU reports an index outside too late to catch
            raise IndexError
        data = flat.unfold(0, rows * width, 1).index_select(0, at)  # all rows, by their start
        data = data.view(-1, rows, width).transpose(0, 1) if rows > 1 else data
    except (IndexError, RuntimeError):  # a row is partly outside
        if not masked:
            raise
        at = at[:, None] + torch.arange(width, device=at.device)
        data = flat[at.clamp(max=len(flat) - 1)] if len(flat) else flat.new_zeros(at.shape)
    return data.view(shape)
