"""One kernel source under two runtimes: Triton (interpreted or compiled) and tlsim."""

import importlib.util
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton.language as tl

from nanoserve.kernels import tlsim

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TRITON_S = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.bool: tl.int1,
}
FLOATS, INTEGERS = list(TRITON_S)[:3], list(TRITON_S)[3:5]


def drawn(examples: int) -> Callable:
    """A test of one argument, `random`. Hypothesis draws its values if it is installed."""
    try:
        from hypothesis import Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        return pytest.mark.parametrize("random", [random.Random(seed) for seed in range(2)])
    examples = examples if INTERPRETED else 2  # each example may compile a kernel

    def decorate(test: Callable) -> Callable:
        randoms = given(random=st.randoms(use_true_random=False))
        rules = {"deadline": None, "derandomize": True, "phases": [Phase.generate]}
        return settings(max_examples=examples, **rules)(randoms(test))

    return decorate


def quarters(random: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Quarters from -8 to 8, or integers from -32 to 32: sums of them are exact in float16."""
    drawn = torch.Generator().manual_seed(random.getrandbits(32))  # one draw, not one per lane
    x = torch.randint(-32, 33, shape, generator=drawn)
    if dtype == torch.bool:
        return x > 0
    return (x / 4 if dtype.is_floating_point else x).to(dtype)


def module(source: str):
    """Kernels written in a file, since both runtimes read their source."""
    head = "import triton\nimport triton.language as tl\n\n\n"
    file = Path(_folder.name) / f"kernels{len(list(Path(_folder.name).iterdir()))}.py"
    file.write_text(head + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


_folder = tempfile.TemporaryDirectory()


def by_both(
    kernel: object, grid: tuple[int, ...], *args: object, **meta: object
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors among the arguments after Triton's run, and after tlsim's in any order."""
    sets = []
    for run in (kernel, tlsim.jit(kernel), tlsim.jit(kernel)):
        device = "cpu" if isinstance(run, tlsim.launch.Kernel) else DEVICE
        own = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in args]
        with tlsim.options(order="serial" if len(sets) == 2 else "lockstep"):
            run[grid](*own, **meta)
        sets.append([x.cpu() for x in own if isinstance(x, torch.Tensor)])
    for lockstep, serial in zip(*sets[1:], strict=True):
        torch.testing.assert_close(lockstep, serial, equal_nan=True)
    return sets[0], sets[1]
