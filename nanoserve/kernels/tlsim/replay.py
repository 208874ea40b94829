"""Record the torch calls of a launch, and replay them with other arguments: a CUDA graph for tlsim.

A recording is a flat Python function of torch calls. Calls that depend on no argument are done
once, when it is recorded. Where the kernel reads a number on the host (the turns of a loop, a
condition), the recording holds only for the same number; for another one the launch is recorded
again. A recording may read numbers only before its first store.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, wrap_torch_function

from nanoserve.kernels.tlsim.tracing import tracing
from nanoserve.kernels.tlsim.values import Value, as_value, flattened, pointer

if TYPE_CHECKING:
    from nanoserve.kernels.tlsim.grid import Options
    from nanoserve.kernels.tlsim.launch import Kernel

HOST = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
STORES = {"put", "add_in_turn"}
KINDS, RECORDINGS = 64, 16  # what a kernel keeps: kinds of launches, and recordings of each


def one_step(function: Callable) -> Callable:
    """Make a function one step of a recording, whatever torch calls it makes."""
    return wrap_torch_function(lambda *args: args)(function)


class Recorder(TorchFunctionMode):
    """Notes the torch calls that depend on the inputs, tensors by name."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inputs, self.names = inputs, {id(x): name for name, x in inputs.items()}
        self.space: dict[str, Any] = {"torch": torch}  # what the recording's source refers to
        self.steps: list[tuple[str, str, set[str]]] = []  # result's name, call, inputs' names
        self.results, self.stored, self.whole = [], False, True

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out, used = func(*args, **(kwargs or {})), set()
        texts = [self._text(x, used) for x in args]
        texts += [f"{name}={self._text(x, used)}" for name, x in (kwargs or {}).items()]
        call = f"{self._name(func.__name__, func)}({', '.join(texts)})"
        if used and func.__name__ in HOST:
            self.steps.append(("", f"if {call} != {out!r}: return False", used))
            self.whole &= not self.stored
        elif used and func.__name__ in STORES:
            self.steps.append(("", call, used))
            self.stored = True
        elif used and isinstance(out, torch.Tensor):
            name = f"t{len(self.results)}"
            self.results.append(out)  # alive, so that no other tensor gets its id
            self.names[id(out)] = name
            self.steps.append((name, call, used))
        return out

    def _text(self, x: Any, used: set[str]) -> str:
        if id(x) in self.names:
            used.add(self.names[id(x)])
            return self.names[id(x)]
        if isinstance(x, tuple | list):
            return f"{type(x).__name__}(({''.join(self._text(part, used) + ', ' for part in x)}))"
        if x is None or isinstance(x, int | str | torch.dtype):
            return repr(x)
        return self._name("constant", x)

    def _name(self, name: str, x: Any) -> str:
        """A name for x in the recording's source."""
        while self.space.setdefault(name, x) is not x:
            name += "_"
        return name

    def recording(self) -> Callable:
        """The recording as a function of the inputs that returns False if it does not hold."""
        lines, needed = [], set(self.inputs)
        for result, call, used in reversed(self.steps):
            if result in needed or not result:  # else nothing uses the result
                last = ", ".join(sorted(used - needed))
                lines.append(f"    {result and result + ' = '}{call}" + (last and f"; del {last}"))
                needed |= used
        source = "\n".join(
            [f"def replay({', '.join(self.inputs)}):", *reversed(lines), "    return True"]
        )
        exec(compile(source, "<a recording of tlsim>", "exec"), self.space)
        self.space["replay"].source = source
        return self.space["replay"]


class Known:
    """What is known about launches of one kind."""

    def __init__(self, names: dict[str, Any], numbers: dict[str, int | float]) -> None:
        self.names, self.numbers = names, numbers  # the kernel's globals; the numbers seen first
        self.varying = {name for name, x in numbers.items() if isinstance(x, float)}
        self.recordings: list[Callable] = []  # the latest first
        self.works = True


class Recordings:
    """The recordings of a kernel. Launches are of one kind if their grids, constants and dtypes are
    the same. An integer is part of a recording until it differs in a launch; from then on it is an
    input, as tensors and fractions are."""

    def __init__(self, kernel: "Kernel") -> None:
        self.kernel, self.kinds = kernel, {}

    def launch(self, grid: tuple[int, int, int], given: dict[str, Any], options: "Options") -> None:
        """Replay a recording, or record the launch if none holds."""
        names = self.kernel.source.globals()
        kind, tensors, numbers = [grid, options.wave, *map(id, names.values())], {}, {}
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                tensors[name] = flattened(x)
                kind += (x.dtype, x.device)
            elif type(x) in (int, float) and x != 1 and not self.kernel.constant[name]:
                numbers[name] = x
                kind.append(type(x) is int and -(2**31) <= x < 2**31)
            else:
                kind += (type(x), x)
        kind = tuple(kind)
        known = self.kinds.pop(kind, None) or Known(names, numbers)
        self.kinds[kind] = known  # the last kind is the latest
        if len(self.kinds) > KINDS:
            del self.kinds[next(iter(self.kinds))]
        if known.numbers != numbers:
            changed = {name for name, x in numbers.items() if x != known.numbers[name]}
            if not changed <= known.varying:
                known.varying |= changed
                known.recordings.clear()
        inputs = tensors | {name: as_value(numbers[name]).data for name in known.varying}
        for i, replay in enumerate(known.recordings):
            if replay(*inputs.values()):
                known.recordings.insert(0, known.recordings.pop(i))
                return
        self._record(known, inputs, grid, given, options)

    def _record(self, known: Known, inputs: dict, grid: tuple, given: dict, options: Any) -> None:
        if tracing() or not known.works:
            return self.kernel.run(grid, given, options)
        values = {name: Value(x) for name, x in inputs.items()}
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                values[name] = pointer(name, inputs[name])
        with Recorder(inputs) as recorder:
            self.kernel.run(grid, given | values, options)
        known.works = recorder.whole
        known.recordings[:] = [recorder.recording(), *known.recordings][:RECORDINGS]
