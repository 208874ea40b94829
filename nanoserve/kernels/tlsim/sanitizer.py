"""The checks of every access: bounds, races between programs and lanes, and poison."""

import torch

from nanoserve.kernels.tlsim.grid import current, fault
from nanoserve.kernels.tlsim.values import Value, aligned

NOBODY, SEVERAL = -1, -2  # beside the numbers of programs


def everywhere(pointer: Value, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and mask, expanded to every lane of every program: [x, y, z, *shape]."""
    shape = (*current().programs.shape, *pointer.shape)
    live = pointer.data.new_ones((), dtype=torch.bool) if live is None else live
    return pointer.lanes.expand(shape), live.expand(shape)


def check_access(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse offsets outside the buffer, and accesses whose result depends on an order.

    `live` [x, y, z, *shape] is true in lanes that take part; None: all lanes.
    """
    if not current().options.checks:
        return
    outside = (pointer.lanes < 0) | (pointer.lanes >= len(pointer.buffer.flat))
    _refuse(outside if live is None else outside & live, pointer, f"{kind}s outside")
    if kind != "atomic_add":  # atomic additions may come in any order
        _check_order(kind, pointer, live)


def _check_order(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Refuse a store and another access of one address by two programs or two lanes."""
    flat, (offsets, live) = pointer.buffer.flat, everywhere(pointer, live)
    programs = aligned(current().programs, rank=len(pointer.shape))[0].expand(offsets.shape)
    at, mine, clash = offsets[live], programs[live], torch.zeros_like(live)
    writers, readers = (_accessed(flat, kind) for kind in ("store", "load"))

    def refuse(lanes: torch.Tensor, action: str) -> None:
        clash[live] = lanes
        _refuse(clash, pointer, action)

    others = (writers[at] != NOBODY) & (writers[at] != mine)
    if kind == "load":
        refuse(others, "loads what another program has stored,")
        known = (readers[at] != NOBODY) & (readers[at] != mine)
        readers[at] = mine
        readers[at[known | (readers[at] != mine)]] = SEVERAL
        return
    refuse(others, "stores where another program has stored,")
    refuse((readers[at] != NOBODY) & (readers[at] != mine), "stores where another program loads,")
    writers[at] = mine
    refuse(writers[at] != mine, "stores where another program has stored,")
    lane, last = torch.arange(len(at), device=at.device), torch.empty_like(writers)
    last[at] = lane
    refuse(last[at] != lane, "stores where another lane of the same store has stored,")


def _accessed(flat: torch.Tensor, kind: str) -> torch.Tensor:
    """For each element of a buffer, the program that has accessed it. Two arguments at one address
    with elements of one size share what is known."""
    known, place = current().accessed, (kind, flat.data_ptr(), flat.element_size())
    before = known.get(place, flat.new_empty(0, dtype=torch.int64))
    more = max(0, len(flat) - len(before))  # above 0: first access, or first by a longer argument
    known[place] = torch.cat([before, before.new_full((more,), NOBODY)])
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
