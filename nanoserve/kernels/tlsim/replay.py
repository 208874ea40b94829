"""Record the torch calls of a launch, and replay them with other arguments: a CUDA graph for tlsim.

A recording is two flat Python functions of torch calls. `prepare` has the calls that depend only on
numbers and on tensors of integers, as a block table is: their results are used again until those
arguments change. `replay` has the others. Calls that depend on no argument are done once, when the
launch is recorded. Where the kernel reads a number on the host (the turns of a loop, a condition),
the recording holds only for the same number; for another number the launch is recorded again. So
a launch that reads a number after its first store is never replayed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, wrap_torch_function

from nanoserve.kernels.tlsim import rules, values
from nanoserve.kernels.tlsim.grid import options_now

HOST = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
KINDS, RECORDINGS = 64, 16  # what a kernel keeps: kinds of launches, and recordings of each
SMALL = 1 << 16  # the most elements of a result that is used again


def one_step(function: Callable) -> Callable:
    """Make a function one step of a recording, whatever torch calls it makes."""
    return wrap_torch_function(lambda *args: args)(function)


class Recorder(TorchFunctionMode):
    """Notes the torch calls that depend on the inputs, each as a line of Python."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {
            id(x): name for name, x in inputs.items()
        }  # of the tensors that depend on them
        self.steps: list[tuple[str, str, set[str], bool]] = []  # result, line, used names, is small
        self.space: dict[str, Any] = {"torch": torch}  # what else the lines refer to
        self.alive, self.stored, self.works = [inputs], set(), True

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out, used = func(*args, **(kwargs or {})), set()
        texts = [self._text(x, used) for x in args]
        texts += [f"{key}={self._text(x, used)}" for key, x in (kwargs or {}).items()]
        call = f"{self._name(func.__name__, func)}({', '.join(texts)})"
        if func.__name__ == "index_put_":
            self.steps.append(("", call, used, False))
            self.stored.add(texts[0])
        elif used and func.__name__ in HOST:
            self.steps.append(("", f"if {call} != {out!r}: return None", used, True))
            self.works &= not self.stored
        elif used and isinstance(out, torch.Tensor) and id(out) not in self.names:
            self.names[id(out)] = result = f"t{len(self.alive)}"
            self.alive.append(out)  # so that no other tensor gets its id
            self.steps.append((result, f"{result} = {call}", used, out.numel() <= SMALL))
        elif used and isinstance(out, tuple | list) and not isinstance(out, torch.Size):
            self.works = False  # several results: no step of tlsim has them
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
        number = ""
        while self.space.setdefault(f"{name}{number}", x) is not x:
            number = len(self.space)
        return f"{name}{number}"


class Recording:
    """The torch calls of a launch as two functions."""

    def __init__(self, recorder: Recorder, inputs: list[str], settled: set[str]) -> None:
        self.recorder, self.state, settled = recorder, None, settled - recorder.stored
        early, late = [], []
        for step in recorder.steps:
            result, _, used, small = step
            (early if small and used <= settled else late).append(step)
            if early[-1:] == [step]:
                settled.add(result)
        later = {name for _, _, used, _ in late for name in used}
        kept = [result for result, *_ in early if result in later]
        self.source = self._function("prepare", inputs, early, kept)
        self.source += self._function("replay", inputs + kept, late, [])
        exec(self.source, recorder.space)

    def _function(self, name: str, inputs: list[str], steps: list, kept: list[str]) -> str:
        lines, needed = [f"    return [{', '.join(kept)}]"], {*inputs, *kept}
        for result, line, used, _ in reversed(steps):
            if result in needed or not result:  # else nothing uses the result
                done = "".join(f"; del {name}" for name in sorted(used - needed))
                lines.append(f"    {line}{done}")
                needed |= used
        return "\n".join([f"def {name}({', '.join(inputs)}):", *reversed(lines), "\n"])

    def runs(self, inputs: list[torch.Tensor], state: list) -> bool:
        """Replay the launch. False, before any store, if the recording does not hold for it. The
        state is what `prepare` depends on."""
        space = self.recorder.space
        if self.state != state:
            self.state, self.kept = None, space["prepare"](*inputs)
            if self.kept is None:
                return False
            self.state = state
        return space["replay"](*inputs, *self.kept) is not None


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
        names, numbers, inputs, state, device = self.kernel.source.globals(), {}, {}, [], None
        kind = [grid, options_now().wave, *map(id, names.values())]
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                inputs[name], device = values.flattened(x), x.device
                kind += (x.dtype, device)
                if not x.dtype.is_floating_point:
                    state += (Same(x), x._version)
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
        for name in known.varying:
            dtype = rules.number_dtype(numbers[name], None)
            inputs[name] = torch.full((1, 1, 1), numbers[name], dtype=dtype, device=device)
            state.append(str(numbers[name]))
        for i, recording in enumerate(known.recordings):
            if recording.runs(list(inputs.values()), state):
                known.recordings.insert(0, known.recordings.pop(i))
                break
        else:
            self.record(known, inputs, grid, given)

    def record(self, known: Known, inputs: dict, grid: tuple, given: dict[str, Any]) -> None:
        """Run the launch and record it, if this kind of launch can be replayed."""
        if not known.works:
            self.kernel.run(grid, given)
            return
        bound = {name: values.Value(x) for name, x in inputs.items()}
        tensors = {name for name, x in given.items() if isinstance(x, torch.Tensor)}
        bound |= {name: values.pointer(name, inputs[name]) for name in tensors}
        with Recorder(inputs) as recorder:
            self.kernel.run(grid, given | bound)
        settled = {name for name, x in inputs.items() if not x.is_floating_point()} | known.varying
        recording, known.works = Recording(recorder, list(inputs), settled), recorder.works
        known.recordings[:] = [recording, *known.recordings][: RECORDINGS * known.works]


class Same:
    """A tensor that is equal to itself only."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return self.x is other.x
