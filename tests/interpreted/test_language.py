"""tlsim's language compared with Triton's, operation by operation: values and dtypes.

Triton's interpreter holds bfloat16 as its bits and computes with those, so that sums, products and
comparisons of two bfloat16 blocks are wrong in it: they are drawn on a GPU only. Its float32 to
bfloat16 cuts where a GPU rounds, and its integer to bfloat16 is wrong. It also leaves a float
argument a number, where a compiled kernel has a float32 tensor: the kernels here give it a name
first, which makes it one everywhere. Triton 3.3's interpreter cannot invert an int1.
"""

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from nanoserve.kernels import tlsim
from tests.interpreted.runtimes import (
    FLOATS,
    INTEGERS,
    INTERPRETED,
    TRITON_S,
    by_both,
    drawn,
    module,
    quarters,
)

BOOL, F32 = [torch.bool], [torch.float32]
NUMBERS = FLOATS + INTEGERS
ANY = NUMBERS + BOOL
INVERTED = BOOL if not INTERPRETED or hasattr(InterpreterBuilder, "get_int1_ty") else []
RIGHT = [d for d in FLOATS if not INTERPRETED or d != torch.bfloat16]  # as the docstring says

# Expressions, by the dtypes of a and b. s is a scalar argument.
EXPRESSIONS = {
    **dict.fromkeys(["a + b", "a - b", "a * b"], (NUMBERS, NUMBERS)),
    **dict.fromkeys(["a / b", "a % b"], (NUMBERS, NUMBERS)),
    "a // b": (INTEGERS, INTEGERS),
    **dict.fromkeys(["a < b", "a <= b", "a > b", "a >= b"], (NUMBERS, NUMBERS)),
    **dict.fromkeys(["a == b", "a != b"], (ANY, NUMBERS)),
    **dict.fromkeys(["a & b", "a | b", "a ^ b"], (INTEGERS, INTEGERS)),
    **dict.fromkeys(["(a > 0) & (b > 0)", "(a > 0) | (b > 0)"], (INTEGERS, INTEGERS)),
    **({"(a > 0) | ~(b > 0)": (INTEGERS, INTEGERS)} if INVERTED else {}),
    **dict.fromkeys(["a << (b & 7)", "a >> (b & 7)"], (INTEGERS, INTEGERS)),
    **dict.fromkeys(["tl.maximum(a, b)", "tl.minimum(a, b)"], (NUMBERS, NUMBERS)),
    **dict.fromkeys(["tl.where(a > 0, a, b)", "tl.where(b != 0, a, b)"], (INTEGERS + F32, ANY)),
    **dict.fromkeys(["a + 2", "2 - a", "a * 3"], (RIGHT + INTEGERS + BOOL, F32)),
    **dict.fromkeys(["a * 2.5", "1.5 - a", "a - 0.25"], (RIGHT + INTEGERS + BOOL, F32)),
    **dict.fromkeys(["a / 4", "1.0 / b", "a % 3", "7 % b"], (NUMBERS, NUMBERS)),
    **dict.fromkeys(["a // 3", "-7 // b", "a & 6", "5 ^ a", "a << 3"], (INTEGERS, INTEGERS)),
    **dict.fromkeys(["a < 1", "2 >= a", "a == 0", "a != 1.5"], (RIGHT + INTEGERS, F32)),
    **dict.fromkeys(["tl.where(b > a, a, 0)", "tl.where(a > 0, 1.5, a)"], (INTEGERS + F32, F32)),
    **dict.fromkeys(["tl.where(a > 0, 1, 0)", "tl.where(a > 0, 1.0, 0.5)"], (INTEGERS, F32)),
    **dict.fromkeys(["tl.maximum(a, 0)", "tl.minimum(a, 0.5)"], (NUMBERS, F32)),
    **dict.fromkeys(["a + s", "s - a", "a * s"], (RIGHT + INTEGERS, F32)),
    **dict.fromkeys(["a / s", "a + i", "i * a", "a < i"], (RIGHT + INTEGERS, F32)),
    **dict.fromkeys(["a // i", "i % b", "a + i // 2"], (INTEGERS, INTEGERS)),
    **dict.fromkeys(["-a", "tl.abs(a)"], (RIGHT + INTEGERS, F32)),
    "~a": (INTEGERS + INVERTED, F32),
    **dict.fromkeys(
        [f"tl.{f}(a)" for f in ("exp", "exp2", "floor", "ceil", "sigmoid")], (F32, F32)
    ),
    **dict.fromkeys(
        [f"tl.{f}(tl.abs(a) + 0.25)" for f in ("log", "log2", "sqrt", "rsqrt")], (F32, F32)
    ),
    **dict.fromkeys(
        [f"a.to(tl.{d})" for d in ("float32", "float16", "int32", "int64", "int1")],
        (ANY, F32),
    ),
    "a.to(tl.bfloat16)": (FLOATS if INTERPRETED else ANY, F32),
    "a.to(tl.float32).to(tl.bfloat16).to(tl.float32) + b": (NUMBERS, F32),
    "(a + tl.zeros((1, 1), tl.float32)).to(b.dtype)": (INTEGERS, NUMBERS),
    "tl.full((1, 1), 3, tl.float16) + a": (INTEGERS, F32),
    "tl.full((1, 1), s, tl.float32) - tl.arange(0, 4)[:, None] + a": (F32, F32),
    "tl.cdiv(a, 3)": (INTEGERS, F32),
}
# Expressions of one block with all rows and columns, and the shape of their result.
WHOLE = {
    f"tl.{f}(a, axis={axis}, keep_dims={keep})": shape
    for f in ("sum", "max", "min")
    for axis, keep, shape in [
        (0, False, "COLUMNS"),
        (1, False, "ROWS"),
        (-1, False, "ROWS"),
        (None, False, ""),
        (0, True, "1, COLUMNS"),
        (1, True, "ROWS, 1"),
    ]
} | {
    "tl.trans(a)": "COLUMNS, ROWS",
    "tl.reshape(a, (COLUMNS, ROWS))": "COLUMNS, ROWS",
    "tl.reshape(tl.trans(a), (ROWS * COLUMNS,))": "ROWS * COLUMNS",
    "tl.expand_dims(tl.max(a, axis=0), 0)": "1, COLUMNS",
    "tl.expand_dims(tl.max(a, axis=0), -1)": "COLUMNS, 1",
    "tl.broadcast_to(tl.max(a, axis=0)[None, :], (ROWS, COLUMNS))": "ROWS, COLUMNS",
    "a[:, None, :] + tl.max(a, axis=0)": "ROWS, 1, COLUMNS",
    "tl.sum(a.to(tl.float32) * a.to(tl.float32), axis=1)": "ROWS",
    "tl.sum(a[:, :, None] * tl.arange(0, 4), axis=1)": "ROWS, 4",
    "tl.full((ROWS, COLUMNS), 7, tl.int64)": "ROWS, COLUMNS",
    "tl.zeros((ROWS, COLUMNS), tl.float16)": "ROWS, COLUMNS",
    "tl.arange(2, 2 + ROWS)": "ROWS",
}
KERNEL = """
def kernel_{number}(
    a_ptr, b_ptr, out_ptr, s_number, i_number, dtypes,
    A_ROWS: tl.constexpr, A_COLUMNS: tl.constexpr,
    B_ROWS: tl.constexpr, B_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    s = s_number
    i = i_number
    a_row, a_column = tl.arange(0, A_ROWS)[:, None], tl.arange(0, A_COLUMNS)[None, :]
    b_row, b_column = tl.arange(0, B_ROWS)[:, None], tl.arange(0, B_COLUMNS)[None, :]
    a = tl.load(a_ptr + a_row * A_COLUMNS + a_column)
    b = tl.load(b_ptr + b_row * B_COLUMNS + b_column)
    out = {expression}
"""
STORES = {
    0: "tl.store(out_ptr, out)",
    1: "tl.store(out_ptr + tl.arange(0, {0}), out)",
    2: "tl.store(out_ptr + tl.arange(0, {0})[:, None] * ({1}) + tl.arange(0, {1})[None, :], out)",
    3: "tl.store(out_ptr + tl.arange(0, {0})[:, None, None] * ({2}) + tl.arange(0, {2}), out)",
}


def source(number: int, expression: str, shape: str) -> str:
    """A kernel that stores what an expression gives and holds it to a dtype; and one for tlsim
    alone that tells the dtype."""
    body = KERNEL.format(number=number, expression=expression)
    sizes = [size for size in shape.split(", ") if size]
    end = f"    tl.static_assert(out.dtype == dtypes)\n    {STORES[len(sizes)].format(*sizes)}\n"
    asks = body.replace("kernel_", "asks_") + "    dtypes.append(out.dtype)\n"
    both = "@triton.jit" + body + end + "\n\n" + asks
    return both.replace("dtypes,", "dtypes: tl.constexpr,")


ALL = dict.fromkeys(EXPRESSIONS, "ROWS, COLUMNS") | WHOLE
KERNELS = module("\n\n".join(source(n, *each) for n, each in enumerate(ALL.items())))
NUMBER = {expression: number for number, expression in enumerate(ALL)}


def agree(expression: str, a: torch.Tensor, b: torch.Tensor, s: float, i: int, shape: torch.Size):
    """tlsim's result equals Triton's: first the dtype, in Triton's kernel, then the values."""
    number = NUMBER[expression]
    scalars = (s, i)
    sizes = (*a.shape, *b.shape, *shape)
    found = []
    tlsim.jit(getattr(KERNELS, f"asks_{number}"))[(1,)](a, b, a, *scalars, found, *sizes)
    out = torch.zeros(4 * torch.Size(shape).numel(), dtype=found[0])
    kernel = getattr(KERNELS, f"kernel_{number}")
    args = (a, b, out, *scalars, TRITON_S[found[0]], *sizes)
    (*_, theirs), (*_, ours) = by_both(kernel, (1,), *args)
    rough = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
    tolerance = max([1e-5, *(rough.get(x.dtype, 0) for x in (a, b, out))])
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def skips(a: torch.dtype, b: torch.dtype, expression: str) -> bool:
    """The interpreter's known faults, as in the module's docstring."""
    both = a == b == torch.bfloat16 and "/" not in expression and "%" not in expression
    return INTERPRETED and both and "tl.m" not in expression


@pytest.mark.parametrize("expression", EXPRESSIONS)
@drawn(examples=8)
def test_an_expression_of_blocks_and_numbers(expression, random):
    rows, columns = 4, random.choice([1, 2, 8, 16])
    dtypes = EXPRESSIONS[expression]
    a_dtype, b_dtype = (random.choice(choice) for choice in dtypes)
    if skips(a_dtype, b_dtype, expression):
        b_dtype = torch.float32
    a_shape, b_shape = (
        random.choice([(rows, columns), (1, columns), (rows, 1), (1, 1)]) for _ in "ab"
    )
    a = quarters(random, a_shape, a_dtype)
    b = quarters(random, b_shape, b_dtype)
    b = torch.where(b == 0, b.new_ones(()), b)  # it divides
    s, i = random.choice([0.5, -1.25, 3.0]), random.choice([-3, 2, 7])
    agree(expression, a, b, s, i, (rows, columns))


@pytest.mark.parametrize("expression", WHOLE)
@drawn(examples=6)
def test_an_expression_of_a_whole_block(expression, random):
    shape = (random.choice([2, 4, 16]), random.choice([1, 8, 32]))
    exact = [torch.float32, torch.float16]  # a sum of bfloat16s depends on its order
    a = quarters(random, shape, random.choice((exact if "sum" in expression else RIGHT) + INTEGERS))
    agree(expression, a, a[:1, :1], 0.5, 2, shape)


DOT = """
@triton.jit
def product(
    a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr,
):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + m * K + tl.arange(0, K)[None, :])
    b = tl.load(b_ptr + tl.arange(0, K)[:, None] * N + n)
    if ACC:
        out = tl.dot(a, b, tl.full((M, N), 0.5, tl.float32), input_precision="ieee")
    else:
        out = tl.dot(a, b, input_precision="ieee")
    tl.static_assert(out.dtype == tl.float32)
    tl.store(out_ptr + m * N + n, out)
"""
product = module(DOT).product


@drawn(examples=8)
def test_dot(random):
    """bfloat16 is multiplied on a GPU only: the interpreter multiplies its bits."""
    m, n, k = (random.choice([16, 32]) for _ in "mnk")
    dtype = random.choice(RIGHT)
    a, b = quarters(random, (m, k), dtype), quarters(random, (k, n), dtype)
    (*_, theirs), (*_, ours) = by_both(
        product, (1,), a, b, torch.zeros(m, n), m, n, k, random.choice([True, False])
    )
    torch.testing.assert_close(ours, theirs)


MEMORY = """
@triton.jit
def moves(
    x_ptr, out_ptr, rows, columns, x_row, x_column, out_row, out_column, other,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=other)
    if TRANSPOSED:
        x, row, column = tl.trans(x), tl.trans(row), tl.trans(column)
        inside = tl.trans(inside)
    tl.store(out_ptr + row * out_row + column * out_column, x, mask=inside | (row == 0))


@triton.jit
def counts(x_ptr, by_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bin = tl.load(x_ptr + at, mask=at < n, other=0)
    by = tl.load(by_ptr + at, mask=at < n, other=0)
    tl.atomic_add(out_ptr + bin, by, mask=at < n)
    if tl.program_id(0) == 0:
        tl.atomic_add(out_ptr, 1)
"""
memory = module(MEMORY)


@drawn(examples=30)
def test_loads_and_stores_with_masks_and_other(random):
    rows, columns = random.randint(1, 7), random.randint(1, 7)
    x_dtype, out_dtype = random.choice(RIGHT + INTEGERS + BOOL), random.choice(RIGHT + INTEGERS)
    x = quarters(random, (16, 16), x_dtype)
    x = x.T if random.choice([True, False]) else x
    block_rows, block_columns = random.choice([1, 2, 8]), random.choice([1, 4, 8])
    grid = (-(-columns // block_columns), -(-rows // block_rows))
    out = torch.full((16, 16), -1).to(out_dtype)
    args = (rows, columns, *x.stride(), *out.stride(), random.choice([0, 5]))
    transposed = random.choice([True, False])
    (*_, theirs), (*_, ours) = by_both(
        memory.moves, grid, x, out, *args, block_rows, block_columns, transposed
    )
    torch.testing.assert_close(ours, theirs)


@drawn(examples=8)
def test_atomic_add(random):
    n, block = random.randint(1, 40), random.choice([4, 16])
    dtype = random.choice([torch.int32, torch.int64, torch.float32, torch.float16])
    x = torch.tensor([random.randint(0, 4) for _ in range(n)])
    by = quarters(random, (n,), dtype)
    out = torch.zeros(5, dtype=dtype)
    for at in range(-(-n // block)):  # the kernel's own condition depends on the program
        part = slice(at * block, min(n, (at + 1) * block))
        args = (x[part].clone(), by[part].clone(), out, part.stop - part.start, block)
        (*_, theirs), (*_, ours) = by_both(memory.counts, (1,), *args)
        torch.testing.assert_close(ours, theirs)
        out = ours
