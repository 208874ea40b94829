"""A trace: every load and store of the kernels inside a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from nanoserve.kernels.tlsim.grid import current, kernel_line
from nanoserve.kernels.tlsim.sanitizer import everywhere
from nanoserve.kernels.tlsim.values import Value


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


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record the loads and stores of kernels launched inside the `with` block."""
    token = _trace.set(Trace())
    try:
        yield _trace.get()
    finally:
        _trace.reset(token)


def record(kind: str, pointer: Value, live: torch.Tensor | None) -> None:
    """Append an access of the running wave to the trace, if there is one; `live` is as for
    check_access."""
    trace = _trace.get()
    if trace is not None and not current().off:
        buffer, coalesced = pointer.buffer, pointer.width > 1 or not pointer.shape
        at = (kernel_line()[1], buffer.flat.itemsize, current().programs.flatten())
        lanes = (x.flatten(0, 2) for x in everywhere(pointer, live))
        trace.accesses.append(Access(kind, buffer.name, *at, *lanes, coalesced))


def tracing() -> bool:
    """Whether a trace records."""
    return _trace.get() is not None
