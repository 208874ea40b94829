"""What watches each load and store: the rules of masks, the sanitizer, and the trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import current, fault, kernel_line, options
from nanoserve.kernels.tlsim.rules import broadcasts
from nanoserve.kernels.tlsim.values import Value, aligned, as_value

NOBODY, SEVERAL = -1, -2  # beside the numbers of programs
LARGE = 1 << 24  # elements; who loads from a larger buffer is not recorded


def access(kind: str, pointer: Value, mask: Any) -> tuple[Any, Any]:
    """Check an access and record it. Return (mask, live): the mask, and the mask within the
    programs that run, each broadcast to [x, y, z, *shape]; None stands for all lanes."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    if mask is not None and (mask := fitting(pointer, mask, "a mask")).dtype != torch.bool:
        raise fault(f"a mask must be int1, as a comparison returns it, got {mask.dtype}")
    live, wave = mask, current()
    if wave.active is not None:
        (active,) = aligned(wave.active, rank=len(pointer.shape))
        live = active if mask is None else mask & active
    if wave.options.checks:
        outside = (pointer.lanes < 0) | (pointer.lanes >= len(pointer.buffer.flat))
        _refuse(outside if live is None else outside & live, pointer, f"{kind}s outside")
        _check_order(kind, pointer, live)
    if wave.options.trace is not None and not wave.off:
        wave.options.trace.record(kind, pointer, live)
    return mask, live


def fitting(pointer: Value, x: Any, what: str) -> torch.Tensor:
    """x's lanes, in a shape that broadcasts to the pointer's lanes."""
    x, shape = as_value(x), pointer.shape
    if not broadcasts(x.shape, shape):
        raise fault(f"{what} of shape {list(x.shape)} does not fit pointers {list(shape)}")
    return aligned(x.lanes, rank=len(shape))[0]


def everywhere(pointer: Value, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and mask, expanded to every lane of every program: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    live = pointer.data.new_ones((), dtype=torch.bool) if live is None else live
    return pointer.lanes.expand(shape), live.expand(shape)


def _check_order(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse a store and another access of one address by two programs, or by two lanes."""
    flat, (offsets, live) = pointer.buffer.flat, everywhere(pointer, live)
    programs = aligned(current().programs, rank=len(pointer.shape))[0].expand(offsets.shape)
    at, mine = offsets[live], programs[live]
    by_others = lambda programs: (programs != NOBODY) & (programs != mine)  # noqa: E731

    def refuse(lanes: torch.Tensor, action: str) -> None:
        _refuse(torch.zeros_like(live).masked_scatter(live, lanes), pointer, action)

    if kind == "load":
        refuse(by_others(_accessed(flat, "store")[at]), "loads what another program has stored,")
    elif kind == "store":
        refuse(by_others(_accessed(flat, "load")[at]), "stores where another program loads,")
    if kind == "atomic_add" or (kind == "load" and len(flat) > LARGE):
        return  # atomic additions may come in any order
    known = _accessed(flat, kind, writes=True)
    before = by_others(known[at])
    known[at] = mine
    known[at[before | (known[at] != mine)]] = SEVERAL
    if kind == "store":
        refuse(known[at] != mine, "stores where another program has stored,")
        lane, last = torch.arange(len(at), device=at.device), torch.empty_like(known)
        last[at] = lane
        refuse(last[at] != lane, "stores where another lane of the same store has stored,")


def _accessed(flat: torch.Tensor, kind: str, writes: bool = False) -> torch.Tensor:
    """For each element of a buffer, the program that has accessed it. Two arguments at one address
    with elements of one size share what is known."""
    known, place = current().accessed, (kind, flat.data_ptr(), flat.element_size())
    nobody = torch.full((1,), NOBODY, device=flat.device)
    if place not in known and not writes:
        return nobody.expand(len(flat))
    before = known.setdefault(place, nobody[:0])
    if len(before) < len(flat):  # the first access, or the first by a longer argument
        known[place] = torch.cat([before, nobody.expand(len(flat) - len(before))])
    return known[place]


def check_poison(pointer: Value, live: torch.Tensor | None, data: torch.Tensor) -> None:
    """Refuse a load of NaN, if that is asked for."""
    if current().options.poison and data.is_floating_point():
        stale = data.isnan() if live is None else data.isnan() & live
        _refuse(stale, pointer, "loads a NaN, so a slot without an owner,")


def _refuse(wrong: torch.Tensor, pointer: Value, action: str) -> None:
    """Raise KernelError for the first lane where `wrong` is true."""
    if wrong.any():
        offsets, wrong = everywhere(pointer, wrong)
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
        """Append one access of the running wave; `live` is as for _check_order."""
        buffer, coalesced = pointer.buffer, pointer.width > 1 or not pointer.shape
        at = (kernel_line()[1], buffer.flat.itemsize, current().programs.flatten())
        lanes = (x.flatten(0, 2) for x in everywhere(pointer, live))
        self.accesses.append(Access(kind, buffer.name, *at, *lanes, coalesced))


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the loads and stores of kernels launched inside the `with` block."""
    with options(trace=Trace()) as changed:
        yield changed.trace
