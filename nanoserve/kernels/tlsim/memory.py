"""Loads and stores with masks, and what watches them: the sanitizer and the trace."""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanoserve.kernels.tlsim.grid import current, fault, options, refuse
from nanoserve.kernels.tlsim.replay import one_step
from nanoserve.kernels.tlsim.values import Value, aligned, fitting

# ---- loads and stores


def load(pointer: Value, mask=None, other=None, **_) -> Value:
    """tl.load: the elements at the pointers where the mask is true, and `other` elsewhere.

    Without `other`, the other lanes are undefined on a GPU, and NaN in tlsim (0 for integers).
    Hints about caches are accepted and ignored.
    """
    refuse(other is not None and mask is None, "tl.load takes `other` only with a mask")
    mask, live = access("load", pointer, mask)
    flat, at, width = pointer.buffer.flat, pointer.data, pointer.width
    if live is not None:  # lanes that take no part may point anywhere
        at = torch.where(live.any(-1, keepdim=True) if width > 1 else live, at, 0)
    shape = at.shape if width == 1 else (*at.shape[:-1], width)
    starts = joined(at, width) if live is None else at.flatten()
    data = take(flat, starts, width, at.numel(), shape, live is not None)
    if mask is not None:
        other = (torch.nan if flat.is_floating_point() else 0) if other is None else other
        data = torch.where(mask, data, fitting(other, pointer.shape).to(flat.dtype))
    if current().options.poison:
        refuse_lanes(data.isnan(), pointer, live, "loads a NaN, so a slot without an owner,")
    return Value(data)


def store(pointer: Value, value, mask=None, adds: bool = False, **_) -> None:
    """tl.store: write value's lanes to the pointers where the mask is true."""
    _, live = access("atomic_add" if adds else "store", pointer, mask)
    flat, shape = pointer.buffer.flat, (*current().programs.shape, *pointer.shape)
    data = fitting(value, pointer.shape).to(flat.dtype)
    at, data = (x.expand(shape).flatten() for x in (pointer.lanes, data))
    if live is not None:
        lanes = live.expand(shape).flatten().nonzero().squeeze(1)
        at, data = at.index_select(0, lanes), data.index_select(0, lanes)
    (flat.index_add_ if adds else flat.index_copy_)(0, at, data)


def access(kind: str, pointer: Value, mask) -> tuple:
    """Return (mask, live): the mask, and the mask within the programs that run, each broadcast to
    [x, y, z, *shape]; None stands for all lanes. The sanitizer and the trace see the access."""
    if not isinstance(pointer, Value) or not pointer.buffer:
        raise fault(f"tl.{kind} needs pointers, got {getattr(pointer, 'dtype', pointer)}")
    if mask is not None:
        mask = fitting(mask, pointer.shape)
        refuse(mask.dtype != torch.bool, f"a mask must be int1, got {mask.dtype}")
    live = mask
    if (active := current().active) is not None:
        (active,) = aligned(active, rank=len(pointer.shape))
        live = active if mask is None else mask & active
    watch(kind, pointer, live)
    return mask, live


@one_step
def joined(at: torch.Tensor, width: int) -> torch.Tensor:
    """The offsets of rows. Where the programs of axis 0 load neighbouring rows, as the KV heads of
    a token are, these become one long row: then only the first program's offsets."""
    if width > 1 and len(at) > 1 and at.shape[1] * at.shape[2] == 1:
        at = at[:1] if bool((at[1:] - at[:-1] == width).all()) else at
    return at.flatten()


@one_step
def take(flat, at: torch.Tensor, width: int, rows: int, shape: tuple, masked: bool):
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


# ---- the sanitizer

NOBODY, SEVERAL = -1, -2  # beside the numbers of programs
LARGE = 1 << 24  # elements; the order of accesses to a larger buffer is not checked


def watch(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Check an access, if checks are on, and record it, if a trace is on.

    `live` [x, y, z, *shape] is true in the lanes that take part; None: in all lanes.
    """
    wave, (name, flat) = current(), pointer.buffer
    if wave.options.checks:
        outside = (pointer.lanes < 0) | (pointer.lanes >= len(flat))
        refuse_lanes(outside, pointer, live, f"{kind}s outside")
        if kind != "atomic_add" and len(flat) <= LARGE:  # additions may come in any order
            check_order(kind, pointer, live)
    if wave.options.trace and not wave.off:
        lanes = (x.flatten(0, 2) for x in everywhere(pointer, live))
        where = (wave.at[1], flat.itemsize, wave.programs.flatten(), *lanes)
        coalesced = pointer.width > 1 or not pointer.shape
        wave.options.trace.accesses.append(Access(kind, name, *where, coalesced))


def everywhere(pointer: Value, lanes: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets, and a mask of lanes, expanded to all programs: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    lanes = pointer.data.new_ones((), dtype=torch.bool) if lanes is None else lanes
    return pointer.lanes.expand(shape), lanes.expand(shape)


def refuse_lanes(wrong: torch.Tensor, pointer: Value, live, action: str) -> None:
    """Raise KernelError for the first live lane where `wrong` is true."""
    offsets, wrong = everywhere(pointer, wrong if live is None else wrong & live)
    if wrong.any():
        first, (name, flat) = tuple(wrong.nonzero()[0].tolist()), pointer.buffer
        raise fault(f"{action} {name}[{offsets[first]}] of {len(flat)} elements", first)


def check_order(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse a store and another access of one address by two programs, or by two lanes."""
    offsets, live = everywhere(pointer, live)
    (programs,) = aligned(current().programs.int(), rank=len(pointer.shape))
    at, mine = offsets[live], programs.expand(live.shape)[live]
    stored, loaded = accessed(pointer.buffer.flat)

    def forbid(lanes: torch.Tensor, action: str) -> None:
        refuse_lanes(torch.zeros_like(live).masked_scatter(live, lanes), pointer, None, action)

    def others(known: torch.Tensor) -> torch.Tensor:
        return (known[at] != NOBODY) & (known[at] != mine)

    def note(known: torch.Tensor) -> torch.Tensor:
        shared = others(known)
        known[at] = mine
        shared |= known[at] != mine  # by another program of this wave
        known[at[shared]] = SEVERAL
        return shared

    if kind == "load":
        forbid(others(stored), "loads what another program has stored,")
        note(loaded)
    else:
        forbid(others(loaded), "stores where another program loads,")
        forbid(note(stored), "stores where another program has stored,")
        _, address, lanes = at.unique(return_inverse=True, return_counts=True)
        forbid(lanes[address] > 1, "stores where another lane of the same store has stored,")


def accessed(flat: torch.Tensor) -> torch.Tensor:
    """[2, elements]: the program that has stored to each element of a buffer, and the program that
    has loaded it. Two arguments at one address with elements of one size share what is known."""
    known, place = current().accessed, (flat.data_ptr(), flat.element_size())
    before = known.get(place, flat.new_empty(2, 0, dtype=torch.int32))
    if (more := len(flat) - before.shape[1]) > 0:  # the first access, or a longer argument's first
        known[place] = torch.cat([before, before.new_full((2, more), NOBODY)], 1)
    return known.get(place, before)


# ---- the trace


class Access(namedtuple("Access", "kind name line itemsize programs offsets live coalesced")):
    """One load, store or atomic_add of a wave of programs, recorded by a trace.

    kind       "load", "store" or "atomic_add"
    name       of the argument
    line       of the kernel's file
    itemsize   the bytes of an element
    programs   [programs], their numbers in the grid
    offsets    [programs, *shape], in elements
    live       [programs, *shape], the lanes that were accessed
    coalesced  whether the lanes of a row have consecutive offsets
    """

    @property
    def bytes(self) -> int:
        """The bytes of all accessed lanes; an address counts as often as it is accessed."""
        return int(self.live.sum()) * self.itemsize

    @property
    def rows(self) -> int:
        """The number of pieces of consecutive offsets: one per row if coalesced."""
        lanes = self.offsets.shape[1:][-1:] or (1,)  # of a row; a number is a row of one
        offsets, live = self.offsets.reshape(-1, *lanes), self.live.reshape(-1, *lanes)
        joined = live[:, 1:] & live[:, :-1] & (offsets[:, 1:] == offsets[:, :-1] + 1)
        return int(live.sum() - joined.sum())

    def of(self, program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offsets, live) of the program with this number, each in the block's shape."""
        index = int((self.programs == program).nonzero())
        return self.offsets[index], self.live[index]


class Trace:
    """All loads and stores inside the `with` block, in order."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def bytes(self, kind: str) -> int:
        """The bytes of all accesses of a kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def distinct_bytes(self, kind: str, name: str) -> int:
        """The bytes of one argument that were accessed at least once."""
        chosen = [a for a in self.accesses if (a.kind, a.name) == (kind, name)]
        touched = [a.offsets[a.live] for a in chosen]
        return len(torch.cat(touched).unique()) * chosen[0].itemsize if chosen else 0


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the loads and stores of kernels launched inside the `with` block."""
    with options(trace=Trace()) as changed:
        yield changed.trace
