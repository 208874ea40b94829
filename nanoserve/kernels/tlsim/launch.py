"""Launch a kernel on a grid: all programs side by side, or one by one."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch

from nanoserve.kernels.tlsim.grid import Options, Wave, current, options_now, running
from nanoserve.kernels.tlsim.replay import Recordings
from nanoserve.kernels.tlsim.rules import One
from nanoserve.kernels.tlsim.source import Source, translate
from nanoserve.kernels.tlsim.values import Value, as_value, flattened, pointer

HINTS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}  # for a compiler: accepted and ignored


class Kernel:
    """A function in Triton's language, launched as kernel[grid](*args, **meta)."""

    def __init__(self, fn: Callable) -> None:
        while hasattr(fn, "fn"):  # wrapped by triton.jit or triton.autotune
            fn = fn.fn
        update_wrapper(self, fn)
        self.fn, self.source, self.recordings = fn, Source(fn), Recordings(self)
        self.signature = inspect.signature(fn)
        kinds = ((name, p.annotation) for name, p in self.signature.parameters.items())
        self.constants = {name for name, kind in kinds if "constexpr" in str(kind)}

    def __getitem__(self, grid: Any) -> Callable:
        return partial(self.launch, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run this kernel inside another kernel, which calls it."""
        current()
        return self.source.run(self._bind(args, kwargs))

    @torch.no_grad()
    def launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Run every program of the grid: up to three sizes, or a function that returns them.

        Tensors become pointers to their first elements, and numbers become scalars; tl.constexpr
        parameters stay as they are. Raises TypeError for arguments that do not fit the signature,
        ValueError for a wrong grid or several devices, and KernelError for an error in the kernel.
        """
        given = self._bind(args, {name: x for name, x in kwargs.items() if name not in HINTS})
        grid = grid(given) if callable(grid) else grid
        grid = (grid,) if isinstance(grid, int) else grid
        sizes = (
            [n for n in grid if isinstance(n, int) and n >= 0] if isinstance(grid, tuple) else []
        )
        if not 1 <= len(sizes) == len(grid) <= 3:
            raise ValueError(f"{self.__name__}: a grid must be one to three sizes, got {grid}")
        run = self.recordings.launch if options_now().replays else self.run
        run((*grid, 1, 1)[:3], given)

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, with the defaults."""
        given = dict(zip(self.signature.parameters, args, strict=False)) | kwargs
        if (
            len(args) + len(kwargs) == len(given)
            and given.keys() == self.signature.parameters.keys()
        ):
            return given  # fast
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__name__}: {error}") from None
        bound.apply_defaults()
        return bound.arguments

    def run(self, grid: tuple[int, int, int], given: dict[str, Any], inputs: Any = ()) -> None:
        """Run the kernel for each wave of programs. `inputs`: numbers that are tensors already."""
        devices = {x.device for x in given.values() if isinstance(x, torch.Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{self.__name__}: needs one device, got {sorted(map(str, devices))}")
        for name, x in given.items():
            if name not in self.constants and not isinstance(x, torch.Tensor | int | float | None):
                raise TypeError(f"{self.__name__}: {name} must not be a {type(x).__name__}")
        options, accessed = options_now(), {}
        for ids in waves(grid, options):
            with running(Wave(grid, tuple(part.to(*devices) for part in ids), options, accessed)):
                numbers = {name: Value(inputs[name]) for name in inputs}
                self.source.run(
                    {name: self._argument(name, x) for name, x in given.items()} | numbers
                )

    def _argument(self, name: str, x: Any) -> Any:
        if x is None or name in self.constants:
            return translate(x)
        if isinstance(x, torch.Tensor):
            return pointer(name, flattened(x))
        return One(1) if type(x) is int and x == 1 else as_value(x)


def waves(grid: tuple[int, int, int], options: Options) -> Iterator[tuple[torch.Tensor, ...]]:
    """The ids of each wave's programs, in the form of Wave.ids. Waves cut the longest axis."""
    (x, y, z), axis = grid, grid.index(max(grid))
    if options.order == "serial":
        shuffled = torch.Generator().manual_seed(options.seed)
        for program in torch.randperm(x * y * z, generator=shuffled).tolist():
            place = (program % x, program // x % y, program // (x * y))
            yield tuple(torch.full((1, 1, 1), i, dtype=torch.int32) for i in place)
    elif x * y * z:
        i, j, k = (torch.arange(n, dtype=torch.int32) for n in grid)
        ids = [i.view(-1, 1, 1), j.view(1, -1, 1), k.view(1, 1, -1)]
        for part in ids[axis].split(max(1, options.wave * grid[axis] // (x * y * z)), axis):
            yield *ids[:axis], part, *ids[axis + 1 :]


def jit(fn: Callable) -> Kernel:
    """Make a tlsim kernel from a function, or from a kernel of triton.jit."""
    return fn if isinstance(fn, Kernel) else Kernel(fn)
