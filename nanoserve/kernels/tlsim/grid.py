"""The programs that run side by side, the options of a run, and the errors of a kernel."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

import torch


class KernelError(ValueError):
    """A kernel broke a rule of Triton or accessed wrong memory. The message names the line."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    order   "lockstep": all programs side by side; "serial": one by one, in random order
    checks  refuse accesses outside a buffer, and stores of two programs to one address
    poison  also refuse a load of NaN
    seed    of the random order
    wave    the largest number of programs that run side by side; it limits only the memory used
    """

    order: str = "lockstep"
    checks: bool = True
    poison: bool = False
    seed: int = 0
    wave: int = 1024

    def __post_init__(self) -> None:
        if self.order not in ("lockstep", "serial"):
            raise ValueError(f'order must be "lockstep" or "serial", got {self.order!r}')
        if self.wave < 1:
            raise ValueError(f"wave must be at least 1, got {self.wave}")


@dataclass
class Wave:
    """Programs that run side by side, part of a grid. Every Value starts with the axes x, y, z."""

    grid: tuple[int, int, int]
    ids: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # int32 [x, 1, 1], [1, y, 1], [1, 1, z]
    options: Options
    writers: dict[tuple[int, int], torch.Tensor]  # by buffer: each element's last writer, or -1
    active: torch.Tensor | None = None  # [x, y, z], programs still in the loop; None: all

    @property
    def programs(self) -> torch.Tensor:
        """The number of each program in the grid, axis 0 fastest: int64 [x, y, z]."""
        x, y, z = (ids.long() for ids in self.ids)
        return x + self.grid[0] * (y + self.grid[1] * z)


_options: ContextVar[Options] = ContextVar("options")
_wave: ContextVar[Wave] = ContextVar("wave")


@contextmanager
def options(**changes: object) -> Iterator[Options]:
    """Launch kernels with changed Options inside a `with` block; `changes` are fields."""
    token = _options.set(replace(_options.get(Options()), **changes))
    try:
        yield _options.get()
    finally:
        _options.reset(token)


def current() -> Wave:
    """The wave that runs now. Raises KernelError outside a kernel."""
    wave = _wave.get(None)
    if wave is None:
        raise KernelError("this works only inside a kernel: launch a kernel with kernel[grid](...)")
    return wave


def kernel_line() -> tuple[str, int]:
    """File and line of the running kernel, from the innermost frame that tlsim compiled."""
    frame = sys._getframe(1)
    while frame and "__tlsim__" not in frame.f_globals:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("no kernel", 0)


def source_name(file: str) -> str:
    """A file's name for messages; "cell" for a cell of a notebook."""
    return "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name


def fault(what: str, program: int | None = None, lane: tuple[int, ...] = ()) -> KernelError:
    """A KernelError that names the kernel's line and, if given, a program and a lane."""
    file, line = kernel_line()
    where = f"{source_name(file)}, line {line}"
    if program is not None:
        x, y, z = current().grid
        place = (program % x, program // x % y, program // (x * y))
        where += f", program {place[: 3 if z > 1 else 2 if y > 1 else 1]}"
    if lane:
        where += f", lane {list(lane)}"
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())
