"""The options of a run, the programs that run side by side, and the errors of a kernel."""

import linecache
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
    trace: object = None

    def __post_init__(self) -> None:
        if self.order not in ("lockstep", "serial") or self.wave < 1:
            raise ValueError(f"order must be lockstep or serial, wave at least 1: got {self}")


@dataclass
class Wave:
    """Programs that run side by side, part of a grid. Every Value starts with the axes x, y, z."""

    grid: tuple[int, int, int]
    ids: tuple[torch.Tensor, ...]  # int32 [x, 1, 1], [1, y, 1], [1, 1, z]
    options: Options
    accessed: dict  # of the sanitizer: who has accessed what, for all waves of a launch
    active: torch.Tensor | None = None  # broadcasts to [x, y, z]: programs that run; None: all
    at: tuple[str, int] = ("no kernel", 0)  # file and line of the statement that runs

    @property
    def programs(self) -> torch.Tensor:
        """The number of each program in the grid, axis 0 fastest: int64 [x, y, z]."""
        x, y, z = (ids.long() for ids in self.ids)
        return x + self.grid[0] * (y + self.grid[1] * z)

    @property
    def off(self) -> bool:
        """Whether no program runs: the code runs only to be checked."""
        return self.options.checks and self.active is not None and not self.active.any()


DEFAULTS = Options()
_options: ContextVar[Options] = ContextVar("options", default=DEFAULTS)
_wave: ContextVar[Wave] = ContextVar("wave")
options_now = _options.get  # the options that hold now


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
def running(wave: Wave) -> Iterator[None]:
    """Run a kernel's code for a wave. An error of Python or torch gets the kernel's line."""
    token = _wave.set(wave)
    try:
        yield
    except KernelError:
        raise
    except Exception as error:
        raise fault(f"{type(error).__name__}: {error}") from error
    finally:
        _wave.reset(token)


def off() -> AbstractContextManager:
    """Run code of a kernel with all programs off: it computes, and neither loads nor stores."""
    nobody = torch.zeros(1, 1, 1, dtype=torch.bool, device=current().ids[0].device)
    return running(replace(current(), active=nobody))


def waves(grid: tuple[int, int, int], device, at: tuple[str, int]) -> Iterator[Wave]:
    """The waves of a launch: as many programs as there is room for. In serial order it is one."""
    options, accessed, parts = options_now(), {}, [()]
    serial = options.order == "serial"
    room = 1 if serial else options.wave
    for axis, n in enumerate(grid):
        ids = torch.arange(n, dtype=torch.int32, device=device)
        cuts = ids.view([-1 if i == axis else 1 for i in range(3)]).split(min(n, room) or 1, axis)
        parts = [(*part, cut) for part in parts for cut in cuts if n]
        room = max(1, room // max(1, n))
    shuffled = torch.Generator().manual_seed(options.seed)
    for i in torch.randperm(len(parts), generator=shuffled) if serial else range(len(parts)):
        yield Wave(grid, parts[i], options, accessed, at=at)


def fault(what: str, first: tuple[int, ...] = (), at=None) -> KernelError:
    """A KernelError that names the kernel's line and, if `first` is the index of a lane in
    [x, y, z, *shape], the program and the lane."""
    file, line = at or current().at
    name = "cell" if "ipykernel" in file or file.startswith("<") else Path(file).name
    where = f"{name}, line {line}"
    if first:
        place = tuple(int(ids.flatten()[i]) for ids, i in zip(current().ids, first, strict=False))
        axes = max([1, *(axis + 1 for axis, n in enumerate(current().grid) if n > 1)])
        where += f", program {place[:axes]}" + f", lane {list(first[3:])}" * (len(first) > 3)
    return KernelError(f"{where}: {what}\n    {linecache.getline(file, line).strip()}".rstrip())


def refuse(wrong: bool, what: str) -> None:
    """Raise KernelError if a rule is broken."""
    if wrong:
        raise fault(what)
