"""Triton's programming model in torch: the same kernel source, run on any machine, and checked.

    @tlsim.jit
    def double(x_ptr, n, BLOCK: tl.constexpr): ...

    double[(4,)](x, n, BLOCK=32)                       # all programs at once, in lockstep
    with tlsim.options(order="serial"): ...            # one at a time, in a shuffled order
    with tlsim.trace() as accesses: ...                # what was loaded and stored, and from where

`tlsim` stands where a kernel has `triton`, `tlsim.language` where it has `triton.language`. Values
and dtypes are Triton's (tests/interpreted holds them to it), but for these, which are on purpose:
lanes that a mask leaves out of a load without `other` are NaN; tl.max and tl.min let a NaN be seen;
tl.dot never rounds to TF32; tl.atomic_add gives nothing back; a mask has to fit the pointers, not
they it; loops count upwards; and in lockstep `if`, `while`, `and` and `or` refuse a condition that
depends on the program. Block pointers, descriptors, scans, sorts and random numbers it has not.
"""

from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError, options
from nanoserve.kernels.tlsim.language import cdiv
from nanoserve.kernels.tlsim.launch import jit, next_power_of_2
from nanoserve.kernels.tlsim.memory import Access, Trace, trace

__all__ = [
    "Access",
    "KernelError",
    "Trace",
    "cdiv",
    "jit",
    "language",
    "next_power_of_2",
    "options",
    "trace",
]
