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

from nanoserve.kernels.tlsim.grid import options_now
from nanoserve.kernels.tlsim.rules import number_dtype

HOST = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
KINDS, RECORDINGS = 64, 16  # what a kernel keeps: kinds of launches, and recordings of each
SMALL = 1 << 16  # the most elements of a result that is used again


def one_step(function: Callable) -> Callable:
    """Make a function one step of a recording, whatever torch calls it makes."""
    return wrap_torch_function(lambda *args: args)(function)


class Recorder(TorchFunctionMode):
    """Notes the torch calls that depend on the inputs, each as a line of Python."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {id(x): name for name, x in tensors.items()}  # and of what depends on them
        self.steps: list[tuple[str, str, set[str], bool]] = []  # result, line, used names, is small
        self.space: dict[str, Any] = {"torch": torch, "device": torch.device}  # for the lines
        self.alive, self.stored, self.works = [tensors], set(), True

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out, used = func(*args, **(kwargs or {})), set()
        texts = [self._text(x, used) for x in args]
        texts += [f"{key}={self._text(x, used)}" for key, x in (kwargs or {}).items()]
        call = f"{self._name(func.__name__, func)}({', '.join(texts)})"
        if func.__name__ in ("index_copy_", "index_add_"):
            self.steps.append(("", call, used, False))
            self.stored.add(texts[0])
        elif used and func.__name__ in HOST:
            self.steps.append(("", f"if {call} != {out!r}: return None", used, True))
            self.works &= not self.stored
        elif used and isinstance(out, torch.Tensor) and id(out) not in self.names:
            self.note(out, call, used)
        elif used and isinstance(out, tuple | list) and not isinstance(out, torch.Size):
            self.works = False  # several results: no step of tlsim has them
        return out

    def note(self, out: torch.Tensor, call: str, used: set[str]) -> None:
        """Note a call with its result."""
        self.names[id(out)] = result = f"t{len(self.alive)}"
        self.alive.append(out)  # so that no other tensor gets its id
        self.steps.append((result, f"{result} = {call}", used, out.numel() <= SMALL))

    def _text(self, x: Any, used: set[str]) -> str:
        if id(x) in self.names:
            used.add(self.names[id(x)])
            return self.names[id(x)]
        if isinstance(x, tuple | list):
            parts = "".join(self._text(part, used) + ", " for part in x)
            return f"({parts})" if isinstance(x, tuple) else f"[{parts}]"
        plain = x is None or isinstance(x, int | str | torch.dtype | torch.device)
        return repr(x) if plain else self._name("c", x)

    def _name(self, name: str, x: Any) -> str:
        number = ""
        while self.space.setdefault(f"{name}{number}", x) is not x:
            number = len(self.space)
        return f"{name}{number}"


class Recording:
    """The torch calls of a launch as two functions of its arguments."""

    def __init__(self, recorder: Recorder, inputs: list[str], settled: set[str]) -> None:
        early, late, self.state = [], [], None
        for result, _, used, _ in recorder.steps:
            settled -= used if result in recorder.stored else set()  # the memory of an argument
        for step in recorder.steps:
            result, _, used, small = step
            (early if small and used <= settled else late).append(step)
            settled |= {result} if early[-1:] == [step] else set()
        later = {name for _, _, used, _ in late for name in used}
        kept = [result for result, *_ in early if result in later]
        self.source = _function("prepare", inputs, early, kept)
        self.source += _function("replay", inputs + kept, late, [])
        exec(self.source, recorder.space)
        self.prepare, self.replay = recorder.space["prepare"], recorder.space["replay"]

    def runs(self, inputs: list[Any], state: list[Any], tables: list[torch.Tensor]) -> bool:
        """Replay the launch. False, before any store, if the recording does not hold for it. The
        state is what `prepare` depends on: numbers, and the identity and version of tables."""
        if self.state != state:
            self.state, self.tables, self.kept = state, tables, self.prepare(*inputs)
        return self.kept is not None and self.replay(*inputs, *self.kept) is not None


def _function(name: str, inputs: list[str], steps: list, returned: list[str]) -> str:
    lines, needed = [f"    return [{', '.join(returned)}]"], {*inputs, *returned}
    for result, line, used, _ in reversed(steps):
        if result in needed or not result:  # else nothing uses the result
            done = "".join(f"; del {name}" for name in sorted(used - needed))
            lines.append(f"    {line}{done}")
            needed |= used
    return "\n".join([f"def {name}({', '.join(inputs)}):", *reversed(lines), "\n"])


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
        self.kernel, self.kinds, self.last = kernel, {}, (None, None)

    def launch(self, grid: tuple[int, int, int], given: dict[str, Any]) -> None:
        """Replay a recording, or record the launch if none holds."""
        names, inputs, tables, state = self.kernel.source.globals(), {}, [], []
        exact = [grid, options_now().wave, *map(id, names.values())]
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                inputs[name] = x
                exact += (x.dtype, x.device)
                if not x.dtype.is_floating_point:
                    tables.append(x)
                    state += (id(x), x._version)
            else:
                exact += (type(x), x)
        known = self.last[1] if exact == self.last[0] else self._find(exact, names, given)
        self.last = exact, known
        for name in known.varying:
            inputs[name] = given[name]
            state.append(repr(given[name]))
        for i, recording in enumerate(known.recordings):
            if recording.runs(inputs.values(), state, tables):
                known.recordings.insert(0, known.recordings.pop(i))
                return
        if not known.works:
            self.kernel.run(grid, given)
            return
        recorder, numbers = Recorder(inputs), {}
        device = next((x.device for x in inputs.values() if isinstance(x, torch.Tensor)), "cpu")
        with recorder:
            for name in known.varying:
                like = {"dtype": number_dtype(given[name], None), "device": device}
                numbers[name] = torch.full((1, 1, 1), given[name], **like)
                recorder.note(numbers[name], f"torch.full((1, 1, 1), {name}, **{like})", {name})
            self.kernel.run(grid, given, numbers)
        settled = known.varying | {
            n for n, x in inputs.items() if any(x is table for table in tables)
        }
        recording, known.works = Recording(recorder, list(inputs), settled), recorder.works
        known.recordings[:] = [recording, *known.recordings][: RECORDINGS * known.works]

    def _find(self, exact: list[Any], names: dict[str, Any], given: dict[str, Any]) -> Known:
        kind, numbers = exact[: 2 + len(names)], {}
        for name, x in given.items():
            if type(x) in (int, float) and x != 1 and name not in self.kernel.constants:
                numbers[name] = x
                kind += (type(x), -(2**31) <= x < 2**31)
            else:
                kind += (x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x)
        known = self.kinds.pop(tuple(kind), None) or Known(names, numbers)
        self.kinds[tuple(kind)] = known  # the last kind is the latest
        if len(self.kinds) > KINDS:
            del self.kinds[next(iter(self.kinds))]
        changed = {name for name, x in numbers.items() if x != known.numbers[name]}
        if not changed <= known.varying:
            known.varying |= changed
            known.recordings.clear()
        return known
