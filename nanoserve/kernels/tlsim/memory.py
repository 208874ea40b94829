"""Masked loads and stores, checked lane by lane, and recorded inside a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from nanoserve.kernels.tlsim.grid import current, fault, kernel_line
from nanoserve.kernels.tlsim.values import Operand, Value, as_value, broadcasts, spread


def load(pointer: Value, mask: Operand | None = None, other: Operand | None = None, **_) -> Value:
    """tl.load: the elements at the pointers where the mask is true, and `other` elsewhere.

    Without `other`, the other lanes are undefined on a GPU, and NaN in tlsim (0 for integers). If
    the last axis is a ramp, whole rows are read. Hints about caches are accepted and ignored.
    """
    if other is not None and mask is None:
        raise fault("tl.load takes `other` only with a mask")
    mask, live = _access("load", pointer, mask)
    flat, first = pointer.buffer.flat, pointer.data
    width = pointer.shape[-1] if pointer.ramp else 1
    if pointer.ramp and first.min() >= 0 and first.max() <= len(flat) - width:
        data = flat.unfold(0, width, 1)[first.squeeze(-1)]  # all windows of `width`, by start
    elif len(flat):  # lanes outside the mask may point anywhere
        data = flat[pointer.lanes.clamp(0, len(flat) - 1)]
    else:
        data = flat.new_zeros(())
    if mask is not None:
        if other is None:
            other = torch.nan if flat.is_floating_point() else 0
        data = torch.where(mask, data, _lanes_for(pointer, other, "a value").to(flat.dtype))
    if current().options.poison and flat.is_floating_point():
        stale = data.isnan() if live is None else data.isnan() & live
        _refuse(stale, pointer, "loads a NaN, so a slot without an owner,")
    return Value(data, pointer.shape)


def store(pointer: Value, value: Operand, mask: Operand | None = None, **_) -> None:
    """tl.store: write value's lanes to the pointers where the mask is true."""
    _write("store", pointer, value, mask)


def atomic_add(pointer: Value, value: Operand, mask: Operand | None = None, **_) -> None:
    """tl.atomic_add: add to memory. Several lanes or programs may add to one address.

    Triton returns the old values. They depend on the order of programs, so tlsim returns None.
    """
    _write("atomic_add", pointer, value, mask)


def _write(kind: str, pointer: Value, value: Operand, mask: Operand | None) -> None:
    offsets, live = _everywhere(pointer, _access(kind, pointer, mask)[1])
    flat, data = pointer.buffer.flat, _lanes_for(pointer, value, "a value")
    data = data.to(flat.dtype).expand(offsets.shape)[live]
    flat.index_put_((offsets[live],), data, accumulate=kind == "atomic_add")


def _lanes_for(pointer: Value, x: Operand, what: str) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to the pointer's lanes."""
    x = as_value(x)
    if not broadcasts(x.shape, pointer.shape):
        raise fault(f"{what} of shape {list(x.shape)} does not fit pointers {list(pointer.shape)}")
    return spread(x.lanes, len(pointer.shape))


def _everywhere(pointer: Value, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and mask, expanded to every lane of every program: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    live = pointer.data.new_ones((), dtype=torch.bool) if live is None else live
    return pointer.lanes.expand(shape), live.expand(shape)


def _access(
    kind: str, pointer: Value, mask: Operand | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (mask, mask within active programs); None stands for all lanes. Check and record."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    wave, trace = current(), _trace.get()
    if mask is not None:
        mask = _lanes_for(pointer, mask, "a mask")
        if mask.dtype != torch.bool:
            raise fault(f"a mask must be int1, as a comparison returns it, got {mask.dtype}")
        mask = None if mask.numel() == 1 and bool(mask) else mask
    live = mask
    if wave.active is not None:
        active = spread(wave.active, len(pointer.shape))
        live = active if mask is None else mask & active
    if wave.options.checks:
        _check(kind, pointer, live)
    if trace is not None:
        trace.record(kind, pointer, live)
    return mask, live


def _check(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse offsets outside the buffer, and stores of two programs to one address.

    `live` [x, y, z, *shape] is true in lanes that take part; None: all lanes.
    """
    flat, wave = pointer.buffer.flat, current()
    outside = (pointer.lanes < 0) | (pointer.lanes >= len(flat))
    _refuse(outside if live is None else outside & live, pointer, f"{kind}s outside")
    if kind == "store":
        place = flat.data_ptr(), flat.element_size()
        writers = wave.writers.get(place, flat.new_empty(0, dtype=torch.int64))
        if len(writers) < len(flat):  # first store, or first to a longer argument at this address
            rest = torch.full_like(flat[len(writers) :], -1, dtype=torch.int64)
            writers = wave.writers[place] = torch.cat([writers, rest])
        offsets, live = _everywhere(pointer, live)
        mine = spread(wave.programs, len(pointer.shape)).expand(offsets.shape)[live]
        before = writers[offsets[live]]
        writers[offsets[live]] = mine
        clash = torch.zeros_like(live)
        clash[live] = ((before != -1) & (before != mine)) | (writers[offsets[live]] != mine)
        _refuse(clash, pointer, "stores where another program has stored,")


def _refuse(wrong: torch.Tensor, pointer: Value, action: str) -> None:
    """Raise KernelError for the first lane where `wrong` is true."""
    if wrong.any():
        offsets, wrong = _everywhere(pointer, wrong)
        first = tuple(int(i) for i in wrong.nonzero()[0])
        buffer, program = pointer.buffer, int(current().programs[first[:3]])
        what = f"{action} {buffer.name}[{int(offsets[first])}] of {len(buffer.flat)} elements"
        raise fault(what, program, first[3:])


@dataclass(frozen=True)
class Access:
    """One load, store or atomic_add of a wave of programs, recorded by a trace."""

    kind: str
    name: str  # of the argument
    line: int
    itemsize: int
    programs: torch.Tensor  # [programs], their numbers in the grid
    offsets: torch.Tensor  # [programs, *shape], in elements
    live: torch.Tensor  # [programs, *shape], the lanes that were accessed
    coalesced: bool  # the lanes of a row have consecutive offsets

    @property
    def bytes(self) -> int:
        """The bytes of all accessed lanes; an address counts as often as it is accessed."""
        return int(self.live.sum()) * self.itemsize

    @property
    def rows(self) -> int:
        """The number of pieces of consecutive offsets: one per row if coalesced."""
        offsets, live = self.offsets.flatten(0, -2), self.live.flatten(0, -2)
        joined = live[:, 1:] & live[:, :-1] & (offsets[:, 1:] == offsets[:, :-1] + 1)
        return int(live.sum() - joined.sum())

    def of(self, program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offsets, live) of the program with this number, each in the block's shape."""
        index = int((self.programs == program).nonzero())
        return self.offsets[index], self.live[index]


@dataclass
class Trace:
    """All loads and stores inside the `with` block, in order."""

    accesses: list[Access] = field(default_factory=list)

    def bytes(self, kind: str) -> int:
        """The bytes of all accesses of a kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def distinct_bytes(self, kind: str, name: str) -> int:
        """The bytes of one argument that were accessed at least once."""
        chosen = [a for a in self.accesses if (a.kind, a.name) == (kind, name)]
        touched = [a.offsets[a.live] for a in chosen]
        return len(torch.cat(touched).unique()) * chosen[0].itemsize if chosen else 0

    def record(self, kind: str, pointer: Value, live: torch.Tensor | None) -> None:
        """Append one access of the running wave; `live` is as for _check."""
        buffer, coalesced = pointer.buffer, pointer.ramp or not pointer.shape
        at = (kernel_line()[1], buffer.flat.itemsize, current().programs.flatten())
        lanes = (x.flatten(0, 2) for x in _everywhere(pointer, live))
        self.accesses.append(Access(kind, buffer.name, *at, *lanes, coalesced))


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the loads and stores of kernels launched inside the `with` block."""
    token = _trace.set(Trace())
    try:
        yield _trace.get()
    finally:
        _trace.reset(token)
