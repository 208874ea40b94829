"""The options of a run, the programs that run side by side, and the errors of a kernel."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import torch


class KernelError(ValueError):
    """A kernel broke a rule of Triton or accessed wrong memory. The message names the line."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    order   "lockstep": all programs side by side; "serial": one by one, in random order
    checks  refuse wrong accesses; also run the code that no program runs, with all lanes off,
            because Triton compiles it
    poison  also refuse a load of NaN
    seed    of the random order
    wave    about the largest number of programs that run side by side; it limits the memory used
    replay  without checks: record a launch once, and then replay its torch calls
    """

    order: str = "lockstep"
    checks: bool = True
    poison: bool = False
    seed: int = 0
    wave: int = 1024
    replay: bool = False

    def __post_init__(self) -> None:
        if self.order not in ("lockstep", "serial"):
            raise ValueError(f'order must be "lockstep" or "serial", got {self.order!r}')
        if self.wave < 1:
            raise ValueError(f"wave must be at least 1, got {self.wave}")
        if self.replay and (self.checks or self.poison or self.order != "lockstep"):
            raise ValueError("replay=True needs checks=False, poison=False and the lockstep order")


@dataclass
class Wave:
    """Programs that run side by side, part of a grid. Every Value starts with the axes x, y, z."""

    grid: tuple[int, int, int]
    ids: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # int32 [x, 1, 1], [1, y, 1], [1, 1, z]
    options: Options
    accessed: dict = field(default_factory=dict)  # for the sanitizer, shared by a launch's waves
    active: torch.Tensor | None = None  # [x, y, z] or size 1: programs that run; None: all

    @property
    def programs(self) -> torch.Tensor:
        """The number of each program in the grid, axis 0 fastest: int64 [x, y, z]."""
        x, y, z = (ids.long() for ids in self.ids)
        return x + self.grid[0] * (y + self.grid[1] * z)

    @property
    def off(self) -> bool:
        """Whether no program runs: the code runs only to be checked."""
        return self.options.checks and self.active is not None and not self.active.any()


_options: ContextVar[Options] = ContextVar("options", default=Options())
_wave: ContextVar[Wave] = ContextVar("wave")


@contextmanager
def options(**changes: object) -> Iterator[Options]:
    """Launch kernels with changed Options inside a `with` block; `changes` are fields."""
    token = _options.set(replace(_options.get(), **changes))
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


@contextmanager
def running(wave: Wave) -> Iterator[None]:
    """Run a kernel for a wave. An error of Python or torch becomes one with the kernel's line."""
    token = _wave.set(wave)
    try:
        yield
    except KernelError:
        raise
    except Exception as error:
        name = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        raise fault(f"{name}{error}", at=error.__traceback__) from error
    finally:
        _wave.reset(token)


def kernel_line(at: TracebackType | None = None) -> tuple[str, int]:
    """File and line of the running kernel, from the innermost frame that tlsim compiled."""
    found, frame = None, sys._getframe(1)
    while at:
        found = (at.tb_frame, at.tb_lineno) if "__tlsim__" in at.tb_frame.f_globals else found
        at = at.tb_next
    while not found and frame:
        found = (frame, frame.f_lineno) if "__tlsim__" in frame.f_globals else None
        frame = frame.f_back
    return (found[0].f_code.co_filename, found[1]) if found else ("no kernel", 0)


def source_name(file: str) -> str:
    """A file's name for messages; "cell" for a cell of a notebook."""
    return "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name


def fault(
    what: str,
    program: int | None = None,
    lane: tuple[int, ...] = (),
    at: TracebackType | None = None,
) -> KernelError:
    """A KernelError that names the kernel's line and, if given, a program and a lane."""
    file, line = kernel_line(at)
    where = f"{source_name(file)}, line {line}"
    if program is not None:
        x, y, z = current().grid
        place = (program % x, program // x % y, program // (x * y))
        where += f", program {place[: 3 if z > 1 else 2 if y > 1 else 1]}"
    if lane:
        where += f", lane {list(lane)}"
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())
