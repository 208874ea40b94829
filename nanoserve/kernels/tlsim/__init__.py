"""Triton's programming model in torch: the same kernel source, run on any machine, and checked.

    @tlsim.jit
    def double(x_ptr, n, BLOCK: tl.constexpr): ...

    double[(4,)](x, n, BLOCK=32)                       # all programs at once, in lockstep
    with tlsim.options(order="serial"): ...            # one at a time, in a shuffled order
    with tlsim.trace() as accesses: ...                # what was loaded and stored, and from where

`tlsim` stands where a kernel has `triton`, `tlsim.language` where it has `triton.language`.
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
