"""What tlsim accepts and refuses, held to Triton's own compiler, which needs no GPU for this.

Each kernel is compiled by Triton up to its first intermediate form, and run by tlsim with checks.
"""

# ruff: noqa: SIM108

import inspect
import os

import pytest
import torch

from nanoserve.kernels import tlsim

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and does not compile", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402


def compiles(kernel) -> bool:
    """Whether Triton compiles a kernel to its intermediate form."""
    from triton._C.libtriton import ir

    names = inspect.signature(kernel.fn).parameters
    signature = {name: "*fp32" if name.endswith("ptr") else "i32" for name in names}
    source = ASTSource(kernel, signature, {})
    backend = make_backend(GPUTarget("cuda", 75, 32))
    options, context = backend.parse_options({}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(
            GPUTarget("cuda", 75, 32), options, backend.get_codegen_implementation(options),
            backend.get_module_map(), context,
        )  # fmt: skip
    except triton.compiler.errors.CompilationError:
        return False
    return True


def runs(kernel) -> bool:
    """Whether tlsim, with its checks, runs a kernel on 16 numbers, n = 3 and m = 2."""
    given = {"x_ptr": torch.arange(16.0), "out_ptr": torch.zeros(16), "n": 3, "m": 2}
    names = inspect.signature(kernel.fn).parameters
    try:
        tlsim.jit(kernel)[(1,)](*(given[name] for name in names))
    except tlsim.KernelError as error:
        assert "test_tlsim_as_triton.py, line" in str(error)
        return False
    return True


GOOD, BAD = [], []
good, bad = (lambda fn: GOOD.append(triton.jit(fn))), (lambda fn: BAD.append(triton.jit(fn)))


# ---- what both accept


@good
def a_range_with_a_negative_constant_step(out_ptr, n):
    total = 0
    for i in range(n, 0, -1):
        total += i
    tl.store(out_ptr, total)


@good
def a_number_that_stands_up(out_ptr):
    tl.store(out_ptr + tl.program_id(0)[:, None], 1.0)


@good
def methods_of_a_block(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16))
    tl.store(out_ptr, x.sum() + x.max(axis=0) + x.reshape((4, 4)).sum(axis=1).min() + x.exp().sum())


@good
def both_branches_bind_a_name(out_ptr, n):
    if n > 1:
        a = 1.0
    else:
        a = 2.0
    tl.store(out_ptr, a)


@good
def a_branch_changes_a_name(out_ptr, n):
    a = 1.0
    if n > 5:
        a = 2.0
    elif n > 4:
        a += 3.0
    tl.store(out_ptr, a)


@good
def a_constant_condition_may_change_types(out_ptr):
    a = 1
    if True:
        a = 1.5
    else:
        b = tl.arange(0, 12)  # noqa: F841
    tl.store(out_ptr, a)


@good
def a_name_of_one_branch_that_is_not_used_later(out_ptr, n):
    if n > 1:
        a = 1.0
        tl.store(out_ptr, a)


@good
def a_return_in_a_branch(out_ptr, n):
    if n > 1:
        tl.store(out_ptr, 1.0)
        return
    tl.store(out_ptr, 2.0)


@good
def a_while_that_keeps_types(out_ptr, n):
    i = 0
    while i < n:
        i += 1
    tl.store(out_ptr, i)


@good
def a_ternary(out_ptr, n):
    tl.store(out_ptr, (n if n > 1 else 2 * n))


@good
def loops_in_branches(x_ptr, out_ptr, n):
    a = 0.0
    if n > 5:
        for i in range(n):
            a += tl.load(x_ptr + i)
    else:
        while a < 3.0:
            a += 1.0
    tl.store(out_ptr, a)


@good
def a_loop_without_turns(x_ptr, out_ptr, n):
    a = 0.0
    for i in range(n, n):
        b = tl.load(x_ptr + i + 100000)
        a += b
    tl.store(out_ptr, a)


# ---- what both refuse


@bad
def an_if_that_changes_a_dtype(out_ptr, n):
    a = 1
    if n > 5:
        a = 1.5
    tl.store(out_ptr, a)


@bad
def an_if_that_changes_a_shape(out_ptr, n):
    a = 1.0
    if n > 5:
        a = tl.zeros((4,), tl.float32)
    tl.store(out_ptr + tl.arange(0, 4), a)


@bad
def branches_of_two_dtypes(out_ptr, n):
    if n > 1:
        a = 1.0
    else:
        a = 2
    tl.store(out_ptr, a)


@bad
def a_name_of_one_branch(out_ptr, n):
    if n > 1:
        a = 1.0
    tl.store(out_ptr, a)


@bad
def a_name_of_the_other_branch(out_ptr, n):
    if n > 5:
        a = 1.0
    else:
        tl.store(out_ptr, a)


@bad
def a_ternary_of_two_dtypes(out_ptr, n):
    tl.store(out_ptr, (1 if n > 1 else 2.5))


@bad
def a_while_that_changes_a_dtype(out_ptr, n):
    a = 0
    while a < n:
        a += 0.5
    tl.store(out_ptr, a)


@bad
def a_while_without_turns_that_changes_a_dtype(out_ptr, n):
    a = 0
    while n > 5:
        a += 0.5
    tl.store(out_ptr, a)


@bad
def a_name_of_a_while(out_ptr, n):
    i = 0
    while i < n:
        i += 1
        a = 1.0
    tl.store(out_ptr, a)


@bad
def a_wrong_block_in_a_branch_that_is_not_taken(out_ptr, n):
    if n > 5:
        tl.store(out_ptr + tl.arange(0, 12), 1.0)


@bad
def an_unknown_name_in_a_branch_that_is_not_taken(out_ptr, n):
    if n > 5:
        tl.store(out_ptr, unknown)  # noqa: F821


@bad
def a_wrong_block_in_a_loop_without_turns(out_ptr, n):
    for i in range(n, n):
        tl.store(out_ptr + i + tl.arange(0, 12), 1.0)


@bad
def a_loop_that_changes_a_shape(out_ptr, n):
    a = 0.0
    for _ in range(n):
        a += tl.zeros((4,), tl.float32)
    tl.store(out_ptr + tl.arange(0, 4), a)


@bad
def a_name_of_a_loop(out_ptr, n):
    for i in range(n):
        a = i * 2
    tl.store(out_ptr, a)


@bad
def a_block_as_a_condition(x_ptr, out_ptr):
    if tl.load(x_ptr + tl.arange(0, 4)) > 0:
        tl.store(out_ptr, 1.0)


@pytest.mark.parametrize("kernel", GOOD, ids=lambda kernel: kernel.fn.__name__)
def test_triton_and_tlsim_accept(kernel):
    assert compiles(kernel)
    assert runs(kernel)


@pytest.mark.parametrize("kernel", BAD, ids=lambda kernel: kernel.fn.__name__)
def test_triton_and_tlsim_refuse(kernel):
    assert not compiles(kernel)
    assert not runs(kernel)
