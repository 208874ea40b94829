"""Whole kernels in usual Triton style, run by Triton and by tlsim on the same numbers.

None of them was written or tuned for tlsim.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton import language
from triton.language import arange, float32, math
from triton.language import constexpr as known

from nanoserve.kernels import tlsim
from tests.interpreted.runtimes import INTERPRETED, by_both, drawn, quarters

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ROUGH = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def same(kernel, grid, *args, **meta) -> torch.Tensor:
    """Run both runtimes, check that their last tensors are close, and return Triton's."""
    (*_, theirs), (*_, ours) = by_both(kernel, grid, *args, **meta)
    tolerance = max(ROUGH.get(x.dtype, 0) for x in args if isinstance(x, torch.Tensor))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return theirs


def close(answer: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with torch's result, at the precision of the kernel's dtype."""
    tolerance = 4 * ROUGH.get(answer.dtype, 0)
    torch.testing.assert_close(answer, expected.to(answer.dtype), rtol=tolerance, atol=tolerance)


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask)
    y = tl.load(y_ptr + at, mask=mask)
    tl.store(out_ptr + at, x.to(tl.float32) + y.to(tl.float32), mask=mask)


@drawn(examples=10)
def test_vector_add(random):
    n, block, dtype = random.randint(1, 200), random.choice([16, 64]), random.choice(FLOATS)
    x, y = quarters(random, (n,), dtype), quarters(random, (n,), dtype)
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
    out = same(add, grid, x, y, torch.zeros(n, dtype=dtype), n, BLOCK=block)
    close(out, x.float() + y.float())


@triton.jit
def softmax(x_ptr, out_ptr, x_row, out_row, rows, columns, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    step = tl.num_programs(0)
    for row in tl.range(first, rows, step, num_stages=2):
        column = tl.arange(0, BLOCK)
        mask = column < columns
        x = tl.load(x_ptr + row * x_row + column, mask=mask, other=-float("inf")).to(tl.float32)
        x = x - tl.max(x, axis=0)
        weight = tl.exp(x)
        tl.store(out_ptr + row * out_row + column, weight / tl.sum(weight, axis=0), mask=mask)


@drawn(examples=10)
def test_fused_softmax(random):
    rows, columns, dtype = random.randint(1, 9), random.randint(2, 40), random.choice(FLOATS)
    x = quarters(random, (rows, columns), dtype)
    out = torch.zeros(rows, columns, dtype=dtype)
    sizes = (columns, columns, rows, columns)
    block = triton.next_power_of_2(columns)
    out = same(softmax, (random.choice([1, 2, 4]),), x, out, *sizes, BLOCK=block)
    close(out, x.float().softmax(-1))


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, mean_ptr, out_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride
    out_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        x = tl.where(at < n, x - mean, 0.0)
        squares += x * x
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < n
        w = tl.load(w_ptr + at, mask=mask).to(tl.float32)
        b = tl.load(b_ptr + at, mask=mask).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, (x - mean) * scale * w + b, mask=mask)


@drawn(examples=10)
def test_layer_norm(random):
    rows, n, dtype = random.randint(1, 6), random.randint(4, 50), random.choice(FLOATS)
    x, w, b = (quarters(random, shape, dtype) for shape in ((rows, n), (n,), (n,)))
    mean, out = torch.zeros(rows), torch.zeros(rows, n, dtype=dtype)
    out = same(layer_norm, (rows,), x, w, b, mean, out, n, n, 1e-2, BLOCK=16)
    close(out, torch.nn.functional.layer_norm(x.float(), (n,), w.float(), b.float(), 1e-2))


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    high, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * wide
    group = pid // in_group
    first_m = group * GROUP
    group_size = min(high - first_m, GROUP)
    pid_m = first_m + ((pid % in_group) % group_size)
    pid_n = (pid % in_group) // group_size

    at_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    at_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    at_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (at_m[:, None] * a_m + at_k[None, :] * a_k)
    b_ptrs = b_ptr + (at_k[:, None] * b_k + at_n[None, :] * b_n)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=at_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=at_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * a_k
        b_ptrs += BLOCK_K * b_k
    acc = tl.where(acc >= 0, acc, 0.01 * acc)

    at_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + c_m * at_m[:, None] + c_n * at_n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(at_m[:, None] < M) & (at_n[None, :] < N))


@drawn(examples=10)
def test_tiled_matrix_product(random):
    """bfloat16 on a GPU only: the interpreter's tl.dot multiplies its bits."""
    m, n, k = (random.randint(2, 70) for _ in "mnk")
    dtype = random.choice(FLOATS[:2] if INTERPRETED else FLOATS)
    a, b, c = quarters(random, (m, k), dtype), quarters(random, (n, k), dtype).T, torch.zeros(m, n)
    grid = (triton.cdiv(m, 32) * triton.cdiv(n, 16),)
    sizes = (m, n, k, *a.stride(), *b.stride(), *c.stride())
    out = same(matmul, grid, a, b, c, *sizes, BLOCK_M=32, BLOCK_N=16, BLOCK_K=16, GROUP=2)
    close(out, torch.nn.functional.leaky_relu(a.float() @ b.float(), 0.01))


@triton.jit
def transpose(x_ptr, out_ptr, rows, columns, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_mask = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=x_mask, other=0)
    out_mask = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(out_ptr + column[:, None] * out_row + row[None, :], tl.trans(x), mask=out_mask)


@drawn(examples=10)
def test_masked_transpose(random):
    rows, columns = random.randint(1, 40), random.randint(1, 40)
    dtype = random.choice([torch.float32, torch.float16, torch.int32, torch.int64])
    x = quarters(random, (rows, columns), dtype)
    out = torch.zeros(columns, rows, dtype=dtype)
    grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 16))
    out = same(transpose, grid, x, out, rows, columns, columns, rows, BLOCK=16)
    assert torch.equal(out, x.T)


@triton.jit
def histogram(x_ptr, out_ptr, n, bins, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=-1)
    tl.atomic_add(out_ptr + x, 1, mask=(at < n) & (x >= 0) & (x < bins))


@drawn(examples=10)
def test_histogram_by_atomics(random):
    n, bins = random.randint(1, 100), random.randint(1, 20)
    x = torch.tensor([random.randint(-2, 21) for _ in range(n)])
    counts = torch.zeros(bins, dtype=torch.int32)
    out = same(histogram, (triton.cdiv(n, 16),), x, counts, n, bins, BLOCK=16)
    assert torch.equal(out, torch.tensor([int((x == bin).sum()) for bin in range(bins)]).int())


@triton.jit
def weigh(first_ptr, column_ptr, value_ptr, x_ptr, out_ptr, decay):
    """A sparse matrix times x, row by row; earlier entries of a row decay with each later entry."""
    row = tl.program_id(0)
    total = 0.0
    entries = 0
    for at in range(tl.load(first_ptr + row), tl.load(first_ptr + row + 1)):
        column = tl.load(column_ptr + at)
        total = total * decay + tl.load(value_ptr + at) * tl.load(x_ptr + column)
        for _ in range(column):
            entries += 1
    tl.store(out_ptr + row, total + entries)


@drawn(examples=8)
def test_loops_whose_bounds_differ_by_program(random):
    counts = [random.randint(0, 5) for _ in range(random.randint(1, 7))]
    first = torch.tensor([0, *counts]).cumsum(0)
    columns = torch.tensor([random.randint(0, 7) for _ in range(sum(counts))], dtype=torch.int32)
    values, x = (quarters(random, (n,), torch.float32) for n in (sum(counts), 8))
    out = same(weigh, (len(counts),), first, columns, values, x, torch.zeros(len(counts)), 0.5)
    for row, answer in enumerate(out.tolist()):
        expected = 0.0
        for at in range(first[row], first[row + 1]):
            expected = expected * 0.5 + float(values[at] * x[columns[at]])
        assert answer == pytest.approx(expected + int(columns[first[row] : first[row + 1]].sum()))


@triton.jit
def _scores(q, k, scale, visible):
    """A helper that other kernels call."""
    return tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))


@triton.jit
def flash_attention(
    q_ptr, k_ptr, v_ptr, lse_ptr, out_ptr, scale, seq, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Causal attention with the online softmax; each program has a block of queries."""
    at_q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1).to(tl.int64) * head_stride
    dim = tl.arange(0, HEAD_DIM)
    at = at_q[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + head + at, mask=at_q[:, None] < seq, other=0.0)
    at_k = tl.arange(0, BLOCK_K)
    k_ptrs = k_ptr + head + at_k[:, None] * HEAD_DIM + dim[None, :]
    v_ptrs = v_ptr + head + at_k[:, None] * HEAD_DIM + dim[None, :]
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BLOCK_Q, seq)
    for start in range(0, end, BLOCK_K):
        held = start + at_k < seq
        k = tl.load(k_ptrs, mask=held[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=held[:, None], other=0.0)
        visible = (start + at_k[None, :] <= at_q[:, None]) & held[None, :]
        score = _scores(q, k, scale, visible)
        m_new = tl.maximum(m, tl.max(score, axis=1))
        p = tl.exp(score - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, axis=1)  # noqa: E741
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
        k_ptrs += BLOCK_K * HEAD_DIM
        v_ptrs += BLOCK_K * HEAD_DIM
    tl.store(lse_ptr + tl.program_id(1) * seq + at_q, m + tl.log(l), mask=at_q < seq)
    tl.store(out_ptr + head + at, acc / l[:, None], mask=at_q[:, None] < seq)


@drawn(examples=8)
def test_flash_attention(random):
    """bfloat16 on a GPU only: the interpreter's tl.dot multiplies its bits."""
    heads, seq = random.randint(1, 3), random.randint(1, 70)
    dtype = random.choice(FLOATS[:2] if INTERPRETED else FLOATS)
    q, k, v = (quarters(random, (heads, seq, 16), dtype) / 2 for _ in range(3))
    lse, out = torch.zeros(heads, seq), torch.zeros(heads, seq, 16, dtype=dtype)
    sizes = (0.25, seq, seq * 16)
    blocks = {"HEAD_DIM": 16, "BLOCK_Q": random.choice([16, 32]), "BLOCK_K": 16}
    grid = (triton.cdiv(seq, blocks["BLOCK_Q"]), heads)
    out = same(flash_attention, grid, q, k, v, lse, out, *sizes, **blocks)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, scale=0.25
    )
    close(out, expected)


HALF = tl.constexpr(0.5)


@triton.jit
def renamed(x_ptr, out_ptr, N: known):
    at = arange(0, N)
    x = language.load(x_ptr + at).to(float32)
    x = math.exp(x * HALF) + tl.math.floor(x)
    language.store(out_ptr + at, x + triton.cdiv(N, 3) + language.full((N,), 1, tl.float16))


def test_tlsim_takes_triton_s_place_under_any_name():
    """Triton's interpreter does not: it replaces the contents of the module `tl`."""
    x, out = torch.arange(8.0), torch.zeros(8)
    tlsim.jit(renamed)[(1,)](x, out, 8)
    torch.testing.assert_close(out, (x / 2).exp() + x + 4)
