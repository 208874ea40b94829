"""Record the torch calls of a launch, and replay them with other arguments: a CUDA graph for tlsim.

A recording is two flat Python functions of torch calls. `prepare` has the calls that depend only on
numbers and on tensors of integers, as a block table is. `replay` has the others. A launch with
replay=True runs both. A Graph keeps the results of `prepare` and runs `replay` alone. Calls that
depend on no argument are done once, when the launch is recorded. Where the kernel reads a number on
the host (the turns of a loop, a condition), the recording holds only for the same number; for
another number the launch is recorded again. So a launch that must read a number after its first
store is never replayed.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, wrap_torch_function

from nanoserve.kernels.tlsim.grid import options_now
from nanoserve.kernels.tlsim.rules import number_dtype

HOST = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist"}
STORES = {"index_copy_", "index_add_"}
KINDS, RECORDINGS = 64, 16  # what a kernel keeps: kinds of launches, and recordings of each
SMALL = 1 << 16  # the most elements of a result that is used again


def one_step(function: Callable) -> Callable:
    """Make a function one step of a recording, whatever torch calls it makes."""
    return wrap_torch_function(lambda *args: args)(function)


class Recorder(TorchFunctionMode):
    """Notes the torch calls that depend on the inputs, each as a line of Python."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {id(x): name for name, x in inputs.items()}  # and of what depends on them
        self.steps: list[tuple[str, str, set[str], bool]] = []  # result, line, used names, is small
        self.space: dict[str, Any] = {"torch": torch}  # what else the lines refer to
        self.alive, self.stored = [inputs], set()

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out, used, name, kwargs = func(*args, **(kwargs or {})), set(), func.__name__, kwargs or {}
        texts = [self._text(x, used) for x in args]
        texts += [f"{key}={self._text(x, used)}" for key, x in kwargs.items()]
        plain = getattr(func, "__wrapped__", func)  # without the wrapper that one_step adds
        call = f"{self._name(name, plain)}({', '.join(texts)})"
        if name in STORES:
            self.steps.append(("", call, used, False))
            self.stored.add(texts[0])
        elif used and name in HOST:
            self.steps.append(("", f"if {call} != {out!r}: return None", used, True))
        elif used and isinstance(out, torch.Tensor) and id(out) not in self.names:
            self.names[id(out)] = result = f"t{len(self.alive)}"
            self.alive.append(out)  # so that no other tensor gets its id
            self.steps.append((result, f"{result} = {call}", used, out.numel() <= SMALL))
        return out

    def _text(self, x: Any, used: set[str]) -> str:
        if id(x) in self.names:
            used.add(self.names[id(x)])
            return self.names[id(x)]
        if isinstance(x, tuple | list):
            return f"[{', '.join(self._text(part, used) for part in x)}]"
        plain = x is None or isinstance(x, int | str | torch.dtype)
        return repr(x) if plain else self._name("c", x)

    def _name(self, name: str, x: Any) -> str:
        found = name
        while self.space.setdefault(found, x) is not x:
            found = f"{name}{len(self.space)}"
        return found


class Recording:
    """The torch calls of a launch as two functions of its arguments."""

    def __init__(self, recorder: Recorder, inputs: list[str], settled: set[str]) -> None:
        early, late = [], []
        for result, _, used, _ in recorder.steps:
            settled -= used if result in recorder.stored else set()  # the memory of an argument
        for step in recorder.steps:
            result, _, used, small = step
            (early if small and used <= settled else late).append(step)
            settled |= {result} if early[-1:] == [step] else set()
        effects = [line.startswith("if ") for result, line, _, _ in late if not result]
        self.works = effects == sorted(effects, reverse=True)  # every test is before every store
        later = {name for _, _, used, _ in late for name in used}
        kept = [result for result, *_ in early if result in later]
        self.inputs = [name for name in inputs if name in later]
        self.source = _function("prepare", inputs, early, kept)
        self.source += _function("replay", self.inputs + kept, late, [])
        exec(self.source, recorder.space)
        self.prepare, self.replay = recorder.space["prepare"], recorder.space["replay"]

    def prepared(self, inputs: dict[str, Any]) -> Callable | None:
        """The launch as a function of self.inputs; None if the recording does not hold for it. The
        function returns None, before any store, if the recording does not hold for its inputs."""
        kept = self.prepare(**inputs)
        return None if kept is None else partial(self.replay, **kept)


class Graph:
    """A launch to repeat with other tensors, for a launcher that repeats a launch many times.

    tlsim.options(checks=False, replay=graph) captures a launch. `names` are the arguments that
    replay() replaces. It does not look at the tensors: the caller makes sure that they have the
    dtypes, devices and strides of the first ones, and that no tensor of integers has changed.
    """

    def __init__(self, *names: str) -> None:
        self.names, self.run = names, None

    def replay(self, *tensors: torch.Tensor) -> bool:
        """Repeat the launch. False, before any store, if there is none that holds for the tensors,
        or if the options that hold now watch each access: then launch the kernel instead."""
        now = options_now()
        watched = now.order != "lockstep" or now.poison or now.trace is not None
        if self.run is None or watched:
            return False
        given = dict(zip(self.names, tensors, strict=True))
        if not torch.is_grad_enabled():
            return self.run(**given) is not None
        with torch.no_grad():
            return self.run(**given) is not None


def _function(name: str, inputs: list[str], steps: list, returned: list[str]) -> str:
    result = ", ".join(f"{name!r}: {name}" for name in returned)
    lines, needed = [f"    return {{{result}}}"], {*inputs, *returned}
    for result, line, used, _ in reversed(steps):
        if result in needed or not result:  # else nothing uses the result
            lines.append("; del ".join([f"    {line}", *sorted(used - needed)]))
            needed |= used
    return "\n".join([f"def {name}({', '.join(inputs)}):", *reversed(lines), "\n"])


class Recordings:
    """The recordings of a kernel, by kind of launch: the grid, the constants and the dtypes. An
    integer is part of a recording until it differs in a launch of that kind; from then on it is an
    input, as tensors and fractions are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.known = kernel, lru_cache(KINDS)(lambda *_: SimpleNamespace(first=None))

    def launch(self, grid: tuple[int, int, int], given: dict[str, Any]) -> None:
        """Replay a recording, or record the launch if none holds."""
        uses, inputs, numbers, tables = self.kernel.source.globals(), {}, {}, set()
        graph = options_now().replay  # True: the launch stands alone
        kind, device = [grid, options_now().wave, *map(id, uses.values())], None
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                inputs[name], device = x, x.device
                kind += (x.dtype, device)
                tables |= set() if x.dtype.is_floating_point else {name}
            elif type(x) in (int, float) and x != 1 and name not in self.kernel.constants:
                numbers[name] = x
                wide = type(x) is int and not -(2**31) <= x < 2**31
                kind += (type(x), "wide" if wide else "")  # (int, 1) would equal (int, True)
            else:
                kind += (type(x), x)
        known = self.known(*kind)
        if known.first is None:
            known.first, known.uses, known.found = numbers, uses, []  # the latest is the first
            known.varying = {name for name, x in numbers.items() if isinstance(x, float)}
        if known.first != numbers:
            changed = {name for name, x in numbers.items() if x != known.first[name]}
            known.found *= changed <= known.varying  # else no recording holds
            known.varying |= changed
        for name in sorted(known.varying):  # a set has no order of its own
            dtype = number_dtype(numbers[name], None)
            inputs[name] = torch.full((1, 1, 1), numbers[name], dtype=dtype, device=device)
        for i, recording in enumerate(known.found):
            run, rest = recording.prepared(inputs), {x: inputs[x] for x in recording.inputs}
            if run is None or run(**rest) is None:
                continue
            known.found.insert(0, known.found.pop(i))
            if isinstance(graph, Graph):
                graph.run = partial(run, **{x: rest[x] for x in rest if x not in graph.names})
            return
        with Recorder(inputs) as recorder:
            self.kernel.run(grid, given, {name: inputs[name] for name in known.varying})
        recording = Recording(recorder, [*inputs], known.varying | tables)
        if recording.works:
            known.found[:] = [recording, *known.found][:RECORDINGS]
