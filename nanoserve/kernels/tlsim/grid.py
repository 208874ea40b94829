"""The options of a run, the programs that run side by side, and the errors of a kernel."""

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


class KernelError(ValueError):
    """A kernel broke a rule of Triton or accessed wrong memory. The message names the line."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    order   "lockstep": all programs side by side; "serial": one by one, in random order
    checks  refuse wrong accesses; and run code that no program runs, because Triton compiles it
    poison  also refuse a load of NaN
    seed    of the random order
    wave    about the largest number of programs that run side by side; it limits the memory used
    replay  record a launch once, then replay its torch calls; in lockstep, without checks or poison
    trace   a Trace, which records each load and store
    """

    order: str = "lockstep"
    checks: bool = True
    poison: bool = False
    seed: int = 0
    wave: int = 1024
    replay: bool = False
    trace: Any = None

    def __post_init__(self) -> None:
        if self.order not in ("lockstep", "serial") or self.wave < 1:
            rule = 'order must be "lockstep" or "serial", and wave must be at least 1'
            raise ValueError(f"{rule}: got {self.order!r} and {self.wave}")

    @property
    def replays(self) -> bool:
        """Whether launches are recorded and replayed."""
        watched = self.checks or self.poison or self.trace is not None
        return self.replay and self.order == "lockstep" and not watched


@dataclass
class Wave:
    """Programs that run side by side, part of a grid. Every Value starts with the axes x, y, z."""

    grid: tuple[int, int, int]
    ids: tuple[torch.Tensor, ...]  # int32 [x, 1, 1], [1, y, 1], [1, 1, z]
    options: Options
    accessed: dict  # of the sanitizer: who has accessed what, for all waves of a launch
    active: torch.Tensor | None = None  # broadcasts to [x, y, z]: programs that run; None: all

    @property
    def programs(self) -> torch.Tensor:
        """The number of each program in the grid, axis 0 fastest: int64 [x, y, z]."""
        x, y, z = (ids.long() for ids in self.ids)
        return x + self.grid[0] * (y + self.grid[1] * z)

    @property
    def off(self) -> bool:
        """Whether no program runs: the code runs only to be checked."""
        return self.options.checks and self.active is not None and not self.active.any()


_options: ContextVar[Options] = ContextVar("options")
_wave: ContextVar[Wave] = ContextVar("wave")


def options_now() -> Options:
    """The options that hold now."""
    return _options.get(None) or Options()


@contextmanager
def options(**changes: object) -> Iterator[Options]:
    """Launch kernels with changed Options inside a `with` block; `changes` are fields."""
    token = _options.set(replace(options_now(), **changes))
    try:
        yield options_now()
    finally:
        _options.reset(token)


def current() -> Wave:
    """The wave that runs now. Raises KernelError outside a kernel."""
    if (wave := _wave.get(None)) is None:
        raise KernelError("this works only inside a kernel: launch a kernel with kernel[grid](...)")
    return wave


@contextmanager
def off() -> Iterator[None]:
    """Run code of a kernel with all programs off: it computes, and neither loads nor stores."""
    wave, outer = current(), current().active
    wave.active = torch.zeros(1, 1, 1, dtype=torch.bool, device=wave.ids[0].device)
    yield
    wave.active = outer


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
        raise fault(f"{name}{error}", error=error) from error
    finally:
        _wave.reset(token)


def kernel_line(error: Exception | None = None) -> tuple[str, int]:
    """File and line of the statement that runs, in the innermost kernel."""
    inward = list(traceback.walk_tb(error.__traceback__)) if error else []
    for frame, _ in inward[::-1] or traceback.walk_stack(None):
        if "statement" in frame.f_locals and frame.f_code.co_name == "block":  # of source.Run
            return frame.f_locals["self"].file, frame.f_locals["statement"].lineno
    return "no kernel", 0


def source_name(file: str) -> str:
    """A file's name for messages; "cell" for a cell of a notebook."""
    return "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name


def fault(what: str, program: int | None = None, lane: tuple = (), error=None) -> KernelError:
    """A KernelError that names the kernel's line and, if given, a program and a lane."""
    file, line = kernel_line(error)
    where = f"{source_name(file)}, line {line}"
    if program is not None:
        x, y, z = current().grid
        place = (program % x, program // x % y, program // (x * y))
        where += f", program {place[: 3 if z > 1 else 2 if y > 1 else 1]}"
    where += f", lane {list(lane)}" if lane else ""
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())
