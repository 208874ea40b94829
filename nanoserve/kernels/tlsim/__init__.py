"""Triton's programming model in torch: it runs the same kernel source on any machine.

    @tlsim.jit
    def double(x_ptr, n, BLOCK: tl.constexpr): ...

    double[(4,)](x, n, BLOCK=32)                       # all programs side by side, in lockstep
    with tlsim.options(order="serial"): ...            # one program at a time, in a random order
    with tlsim.options(checks=False, replay=True): ... # record a launch once, then replay it
    with tlsim.trace() as accesses: ...                # record every load and store

A replay prepares every launch again, so it sees every change. A tlsim.Graph repeats one launch with
other tensors, and does not look at them: its caller must see that no table and no shape changed.

`tlsim` replaces `triton` in a kernel, and `tlsim.language` replaces `triton.language`.

The core, which Days 21 and 22 build:

    values.py    numbers, blocks and pointers of all programs at once
    memory.py    load and store; in the appendix, the sanitizer and the trace
    language.py  program ids, blocks, reductions, loops: the names of triton.language
    launch.py    a kernel on a grid; in the appendix, its source, which runs by statements
    grid.py      options and waves of programs; in the appendix, errors with the kernel's line

Around it, in the appendix:

    rules.py     Triton's rules of dtypes, shapes and conditions
    replay.py    capture and replay

Values and dtypes are Triton's (tests/interpreted compares them), with these deliberate differences:

- A load without `other` returns NaN in lanes where the mask is false.
- tl.max and tl.min return NaN if an element is NaN.
- tl.dot never rounds its operands to TF32.
- A mask must broadcast to the shape of the pointers.
- tl.atomic_add returns nothing: the numbers before depend on the order of the programs.
- The index of a loop ends with the loop. Triton accepts it later, and gives an undefined number.
- The sanitizer holds no load against an atomic addition. It does not check the order of accesses to
  a buffer of more than 2**24 elements: it would need 8 bytes for each element.
- In lockstep, `if`, `while`, `and` and `or` refuse a condition that depends on the program.

Not supported: block pointers, tensor descriptors, scans, sorts and random numbers.
"""

from nanoserve.kernels.sizes import next_power_of_2
from nanoserve.kernels.tlsim import language
from nanoserve.kernels.tlsim.grid import KernelError, options
from nanoserve.kernels.tlsim.language import cdiv
from nanoserve.kernels.tlsim.launch import jit
from nanoserve.kernels.tlsim.memory import Access, Trace, trace
from nanoserve.kernels.tlsim.replay import Graph

__all__ = ["Access", "Graph", "KernelError", "Trace", "cdiv", "jit", "language"]
__all__ += ["next_power_of_2", "options", "trace"]
