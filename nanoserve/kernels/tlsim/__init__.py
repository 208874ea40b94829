"""Triton's programming model in torch: it runs the same kernel source on any machine.

    @tlsim.jit
    def double(x_ptr, n, BLOCK: tl.constexpr): ...

    double[(4,)](x, n, BLOCK=32)                       # all programs side by side, in lockstep
    with tlsim.options(order="serial"): ...            # one program at a time, in a random order
    with tlsim.trace() as accesses: ...                # record every load and store

`tlsim` replaces `triton` in a kernel, and `tlsim.language` replaces `triton.language`. Values and
dtypes are Triton's (tests/interpreted compares them), with these deliberate differences:

- A load without `other` returns NaN in lanes where the mask is false.
- tl.max and tl.min return NaN if an element is NaN.
- tl.dot never rounds its operands to TF32.
- tl.atomic_add returns nothing.
- A mask must broadcast to the shape of the pointers.
- The step of a loop must be positive.
- In lockstep, `if`, `while`, `and` and `or` refuse a condition that depends on the program.

Not supported: block pointers, tensor descriptors, scans, sorts and random numbers.
"""

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError, options
from nanoserve.kernels.tlsim.language import cdiv
from nanoserve.kernels.tlsim.launch import jit
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
