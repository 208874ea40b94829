"""Record the torch calls of a launch, and replay them with other arguments: a CUDA graph for tlsim.

A recording is a flat Python function of torch calls. Calls that depend on no argument are done
once, when it is recorded. Where the kernel reads a number on the host (the turns of a loop, a
condition), the recording holds only for the same number; for another number the launch is recorded
again. So a launch that reads a number after its first store is never replayed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, wrap_torch_function

from nanoserve.kernels.tlsim import rules, values
from nanoserve.kernels.tlsim.grid import options_now

HOST = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
KINDS, RECORDINGS = 64, 16  # what a kernel keeps: kinds of launches, and recordings of each


def one_step(function: Callable) -> Callable:
    """Make a function one step of a recording, whatever torch calls it makes."""
    return wrap_torch_function(lambda *args: args)(function)


class Recorder(TorchFunctionMode):
    """Notes the torch calls that depend on the inputs, as lines of a function."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inputs, self.names = inputs, {id(x): name for name, x in inputs.items()}
        self.space: dict[str, Any] = {"torch": torch}  # what the lines refer to
        self.steps: list[tuple[str, str, set[str]]] = []  # result's name, call, inputs' names
        self.results, self.stored, self.works = [], False, True

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out, used, name = func(*args, **(kwargs or {})), set(), func.__name__
        texts = [self._text(x, used) for x in args]
        texts += [f"{key}={self._text(x, used)}" for key, x in (kwargs or {}).items()]
        call = f"{self._name(name, func)}({', '.join(texts)})"
        if used and isinstance(out, torch.Tensor):
            self.names[id(out)] = result = f"t{len(self.results)}"
            self.results.append(out)  # alive, so that no other tensor gets its id
            self.steps.append((result, call, used))
        elif used and name in HOST:
            self.steps.append(("", f"if {call} != {out!r}: return False", used))
            self.works &= not self.stored
        elif used and name == "put":
            self.steps.append(("", call, used))
            self.stored = True
        return out

    def _text(self, x: Any, used: set[str]) -> str:
        if id(x) in self.names:
            used.add(self.names[id(x)])
            return self.names[id(x)]
        if isinstance(x, tuple | list):
            parts = "".join(self._text(part, used) + ", " for part in x)
            return f"({parts})" if isinstance(x, tuple) else f"[{parts}]"
        plain = x is None or isinstance(x, int | str | torch.dtype)
        return repr(x) if plain else self._name("constant", x)

    def _name(self, name: str, x: Any) -> str:
        while self.space.setdefault(name, x) is not x:
            name += "_"
        return name

    def recording(self) -> Callable:
        """The function of the inputs. It returns False, before any store, if it does not hold."""
        lines, needed = ["    return True"], set(self.inputs)
        for result, call, used in reversed(self.steps):
            if result in needed or not result:  # else nothing uses the result
                done = "".join(f"; del {name}" for name in sorted(used - needed))
                lines.append(f"    {result + ' = ' if result else ''}{call}{done}")
                needed |= used
        lines.append(f"def replay({', '.join(self.inputs)}):")
        self.space["source"] = "\n".join(reversed(lines))
        exec(self.space["source"], self.space)
        return self.space["replay"]


class Known:
    """What is known about the launches of one kind."""

    def __init__(self, names: dict[str, Any], numbers: dict[str, int | float]) -> None:
        self.names, self.numbers = names, numbers  # the kernel's globals; the numbers at first
        self.varying = {name for name, x in numbers.items() if isinstance(x, float)}
        self.recordings, self.works = [], True  # the latest first; whether they can be replayed


class Recordings:
    """The recordings of a kernel, by kind of launch: the grid, the constants and the dtypes. An
    integer is part of a recording until it differs in a launch of that kind; from then on it is an
    input, as tensors and fractions are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.kinds = kernel, {}

    def launch(self, grid: tuple[int, int, int], given: dict[str, Any]) -> None:
        """Replay a recording, or record the launch if none holds."""
        names, tensors, numbers = self.kernel.source.globals(), {}, {}
        kind = [grid, options_now().wave, *map(id, names.values())]
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                tensors[name] = values.flattened(x)
                kind += (x.dtype, x.device)
            elif type(x) in (int, float) and x != 1 and name not in self.kernel.constants:
                numbers[name] = x
                kind += (type(x), -(2**31) <= x < 2**31)
            else:
                kind += (type(x), x)
        known = self.kinds.pop(tuple(kind), None) or Known(names, numbers)
        self.kinds[tuple(kind)] = known  # the last kind is the latest
        if len(self.kinds) > KINDS:
            del self.kinds[next(iter(self.kinds))]
        if known.numbers != numbers:
            changed = {name for name, x in numbers.items() if x != known.numbers[name]}
            known.recordings *= changed <= known.varying  # else none holds
            known.varying |= changed
        device = next((x.device for x in tensors.values()), None)
        inputs = dict(tensors)
        for name in known.varying:
            dtype = rules.number_dtype(numbers[name], None)
            inputs[name] = torch.full((1, 1, 1), numbers[name], dtype=dtype, device=device)
        for i, replay in enumerate(known.recordings):
            if replay(*inputs.values()):
                known.recordings.insert(0, known.recordings.pop(i))
                return None
        if not known.works:
            self.kernel.run(grid, given)
            return
        bound = {name: values.Value(x) for name, x in inputs.items()}
        bound |= {name: values.pointer(name, x) for name, x in tensors.items()}
        with Recorder(inputs) as recorder:
            self.kernel.run(grid, given | bound)
        known.works = recorder.works
        known.recordings[:] = [recorder.recording(), *known.recordings][: RECORDINGS * known.works]
