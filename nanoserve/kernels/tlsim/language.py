"""triton.language in torch: tlsim binds a kernel's `tl` to this module."""

import builtins
import sys
from typing import Any

import torch

from nanoserve.kernels.tlsim.atomics import atomic_add
from nanoserve.kernels.tlsim.functions import (
    absolute as abs,
)
from nanoserve.kernels.tlsim.functions import (
    broadcast_to,
    cdiv,
    ceil,
    exp,
    exp2,
    expand_dims,
    floor,
    log,
    log2,
    maximum,
    minimum,
    reshape,
    rsqrt,
    sigmoid,
    sqrt,
    trans,
    where,
)
from nanoserve.kernels.tlsim.grid import fault
from nanoserve.kernels.tlsim.loops import Range as range
from nanoserve.kernels.tlsim.memory import load, store
from nanoserve.kernels.tlsim.programs import arange, full, num_programs, program_id, zeros
from nanoserve.kernels.tlsim.reductions import dot
from nanoserve.kernels.tlsim.reductions import reduce_max as max
from nanoserve.kernels.tlsim.reductions import reduce_min as min
from nanoserve.kernels.tlsim.reductions import reduce_sum as sum

int1, int8, int16, int32, int64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
uint8, float16, bfloat16 = torch.uint8, torch.float16, torch.bfloat16
float32, float64 = torch.float32, torch.float64

static_range = builtins.range
math = sys.modules[__name__]  # tl.math.exp is tl.exp


class constexpr:
    """A value known at compile time: annotates a parameter, or wraps a global."""

    def __init__(self, value: Any) -> None:
        self.value = value


def static_assert(condition: bool, message: str = "") -> None:
    """Raise KernelError if a condition on constants is false."""
    if not condition:
        raise fault(message or "tl.static_assert: the condition is false")


def __getattr__(name: str) -> Any:
    raise AttributeError(f"tlsim has no tl.{name}: it has the part of Triton that the course uses")
