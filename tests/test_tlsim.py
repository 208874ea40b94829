"""tlsim: Triton's language and its rules, in torch. These tests need no Triton; tests/interpreted
compares the two."""

import inspect
import types

import pytest
import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.tlsim import language as tl
from nanoserve.kernels.tlsim.values import Value

refuses = lambda what: pytest.raises(tlsim.KernelError, match=what)  # noqa: E731


@tlsim.jit
def call(f: tl.constexpr, results: tl.constexpr):
    results.append(f())


def of(f, grid=(1,)) -> Value:
    """The result of f, written in tl, in a kernel."""
    results = []
    call[grid](f, results)
    return results[0]


def lanes(f, grid=(1,)) -> torch.Tensor:
    """Its lanes: [*shape] of the only program."""
    return of(f, grid).lanes[0, 0, 0]


def block(*numbers, dtype=torch.int32) -> Value:
    """A block of these numbers, made inside a kernel."""
    return Value(torch.tensor(numbers, dtype=dtype)[None, None, None])


def line_of(kernel, text: str) -> int:
    """The line of this file with `text`, in a kernel."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


@tlsim.jit
def copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


# ---- numbers and blocks


def test_a_block_and_a_number_meet_in_the_dtype_of_the_block():
    for dtype in (tl.float16, tl.bfloat16, tl.float32):
        assert of(lambda dtype=dtype: block(1, 2, dtype=dtype) * 2.5).dtype == dtype
        assert of(lambda dtype=dtype: 3 - block(1, 2, dtype=dtype)).dtype == dtype
    assert of(lambda: block(1, 2) + 1.5).dtype == tl.float32
    assert of(lambda: block(True, False, dtype=torch.bool) + 1).dtype == tl.int32
    assert of(lambda: block(1, 2, dtype=torch.int64) + 1).dtype == tl.int64


def test_blocks_of_two_dtypes_meet_where_triton_has_them_meet():
    def both(a, b):
        return of(lambda: block(1, 2, dtype=a) + block(1, 2, dtype=b)).dtype

    assert both(tl.int32, tl.int64) == tl.int64
    assert both(tl.int32, tl.float16) == tl.float16
    assert both(tl.int32, tl.bfloat16) == tl.float32
    assert both(tl.float16, tl.bfloat16) == tl.float16
    assert both(tl.bfloat16, tl.float32) == tl.float32


def test_a_number_with_a_name_is_a_tensor_and_meets_others_as_one():
    @tlsim.jit
    def kernel(dtypes: tl.constexpr):
        half = 0.5
        dtypes.append((tl.full((2,), 1, tl.float16) * half).dtype)
        dtypes.append((tl.full((2,), 1, tl.float16) * 0.5).dtype)
        known: tl.constexpr = 0.5
        dtypes.append((tl.full((2,), 1, tl.float16) * known).dtype)

    dtypes = []
    kernel[(1,)](dtypes)
    assert dtypes == [tl.float32, tl.float16, tl.float16]


def test_a_number_that_the_dtype_of_a_block_cannot_hold_is_refused():
    with refuses("cannot be converted to type int32"):
        of(lambda: block(1, 2) + 2**40)
    with refuses("-1 is out of range for uint8"):
        of(lambda: block(1, 2, dtype=tl.uint8) + -1)
    assert of(lambda: tl.full((2,), 2**40, tl.int64) + 1).dtype == tl.int64


def test_integers_are_divided_as_c_does_and_halves_in_float32():
    assert lanes(lambda: block(-7, 7) // 2).tolist() == [-3, 3]
    assert lanes(lambda: block(-7, 7) % 4).tolist() == [-3, 3]
    assert lanes(lambda: 7 // block(2, -2)).tolist() == [3, -3]
    assert of(lambda: block(1, 2) / 2).dtype == tl.float32
    assert of(lambda: block(1, 2, dtype=tl.float16) / 2).dtype == tl.float32
    assert of(lambda: block(1, 2, dtype=tl.bfloat16) % 2).dtype == tl.float32
    with refuses("// is for integers"):
        of(lambda: block(1, 2, dtype=tl.float32) // 2)


def test_bits_shifts_and_comparisons():
    assert lanes(lambda: (block(5, 12) & 6) | (block(1, 0) ^ 1)).tolist() == [4, 5]
    assert lanes(lambda: (block(5, -12) << 2) >> 1).tolist() == [10, -24]
    assert lanes(lambda: ~(block(1, 2) > 1)).tolist() == [True, False]
    assert lanes(lambda: block(0, 1) >= 1).tolist() == [False, True]
    assert lanes(lambda: block(3, 4) != 3).tolist() == [False, True]
    with refuses("not implemented for 'Float'"):
        of(lambda: block(1, 2, dtype=tl.float32) & 1)


def test_shapes_broadcast_from_the_last_axis():
    def table():
        return tl.arange(0, 4)[:, None] * 10 + tl.arange(0, 2)[None, :]

    assert of(table).shape == (4, 2)
    assert lanes(table).tolist() == [[0, 1], [10, 11], [20, 21], [30, 31]]
    assert of(lambda: table() + tl.arange(0, 2)).shape == (4, 2)
    with refuses(r"broadcast.* \(8,\).* \[4\]"):
        of(lambda: tl.arange(0, 4) + tl.arange(0, 8))
    with refuses(r"broadcast.* \(4,\).* \[4, 2\]"):
        of(lambda: table() + tl.arange(0, 4))


def test_a_block_is_indexed_by_none_alone():
    assert of(lambda: tl.arange(0, 4)[None, :, None]).shape == (1, 4, 1)
    with refuses("a block of 2 axes has no axis 2"):
        of(lambda: tl.arange(0, 4)[:, :, None])
    for index in (0, slice(0, 2), ...):
        with refuses("can be indexed only by None and :"):
            of(lambda index=index: tl.arange(0, 4)[index])


def test_a_ramp_stays_one_under_what_is_the_same_in_all_lanes():
    assert of(lambda: (tl.program_id(0) * 8 + tl.arange(0, 8)).to(tl.int64)[None, :] - 3).width == 8
    for bent in (
        lambda: tl.arange(0, 8) * 2,
        lambda: tl.arange(0, 8) + tl.arange(0, 8),
        lambda: tl.arange(0, 8)[:, None],
        lambda: tl.arange(0, 8).to(tl.int8),
        lambda: tl.arange(0, 8) + 0.5,
        lambda: 8 - tl.arange(0, 8),
    ):
        assert of(bent).width == 1
    assert lanes(lambda: tl.arange(250, 258).to(tl.uint8).to(tl.int32)).tolist() == [
        *range(250, 256),
        *range(2),
    ]
    assert lanes(lambda: tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :]).tolist() == [
        [i, i + 1] for i in range(4)
    ]


def test_a_block_is_neither_true_nor_false():
    with refuses("use tl.where"):
        of(lambda: 1 if tl.arange(0, 2) > 0 else 2)


# ---- the language


def test_where_maximum_and_minimum():
    assert lanes(lambda: tl.where(block(0, 1) > 0, block(3, 4), 0)).tolist() == [0, 4]
    assert lanes(lambda: tl.where(block(0, 1) > 0, 1, 0)).tolist() == [0, 1]
    assert of(lambda: tl.where(True, block(1, 2, dtype=tl.float16), 0.0)).dtype == tl.float16
    assert lanes(lambda: tl.maximum(block(1, 5), 3)).tolist() == [3, 5]
    assert of(lambda: tl.minimum(block(1, 2, dtype=tl.bfloat16), 3.0)).dtype == tl.float32
    nan = float("nan")
    assert lanes(lambda: tl.maximum(block(nan, 1, dtype=tl.float32), 0.0)).tolist() == [0, 1]


def test_reductions_by_axis_and_of_all():
    def table():
        return tl.arange(0, 4)[:, None] * 10 + tl.arange(0, 2)[None, :]

    assert lanes(lambda: tl.sum(table(), axis=0)).tolist() == [60, 64]
    assert lanes(lambda: tl.max(table(), axis=-1)).tolist() == [1, 11, 21, 31]
    assert lanes(lambda: tl.min(table())).item() == 0
    assert of(lambda: tl.sum(table(), axis=1, keep_dims=True)).shape == (4, 1)
    assert of(lambda: tl.sum(table(), keep_dims=True)).shape == (1, 1)
    with refuses("a block of 2 axes has no axis 2"):
        of(lambda: tl.sum(table(), axis=2))


def test_reductions_are_done_in_32_bits_but_halves_are_summed_as_they_are():
    assert of(lambda: tl.sum(block(1, 2, dtype=tl.float16))).dtype == tl.float16
    assert of(lambda: tl.max(block(1, 2, dtype=tl.float16))).dtype == tl.float32
    assert of(lambda: tl.sum(block(1, 2, dtype=tl.int8))).dtype == tl.int32
    assert of(lambda: tl.sum(block(True, True, dtype=torch.bool))).data.item() == 2


def test_a_constant_block_is_summed_as_often_as_it_has_lanes():
    assert lanes(lambda: tl.sum(tl.zeros((8,), tl.float32) + 1)).item() == 8
    assert lanes(lambda: tl.sum(tl.full((8, 4), 2.0, tl.float32) * tl.zeros((4,), tl.float32))) == 0
    twos = lambda: tl.full((8, 4), 2.0, tl.float32)  # noqa: E731
    assert lanes(lambda: tl.sum(twos() * twos(), axis=0)).tolist() == [32] * 4


def test_dot_is_the_matrix_product_in_float32():
    a, b = torch.randn(2, 16), torch.randn(16, 4)

    def product(dtype=tl.float32, **options):
        left, right = (Value(x.to(dtype)[None, None, None]) for x in (a, b))
        return tl.dot(left, right, **options)

    torch.testing.assert_close(lanes(product), a @ b)
    assert of(lambda: product(tl.float16)).dtype == tl.float32
    assert of(lambda: product(tl.float16, out_dtype=tl.float16)).dtype == tl.float16
    ones = lanes(lambda: product(acc=tl.full((2, 4), 1.0, tl.float32), input_precision="ieee"))
    torch.testing.assert_close(ones, a @ b + 1)


def test_dot_refuses_what_tensor_cores_do_not_do():
    blocks = {n: lambda n=n, dtype=tl.float32: tl.zeros((n, n), dtype) for n in (8, 16, 32)}
    with refuses("over at least 16 lanes, got 8"):
        of(lambda: tl.dot(blocks[8](), blocks[8]()))
    with refuses(r"cannot multiply \[16, 16\] by \[32, 32\]"):
        of(lambda: tl.dot(blocks[16](), blocks[32]()))
    with refuses("one dtype"):
        of(lambda: tl.dot(blocks[16](), blocks[16](dtype=tl.float16)))
    with refuses("int8"):
        of(lambda: tl.dot(blocks[16](dtype=tl.int32), blocks[16](dtype=tl.int32)))


def test_functions_of_a_lane_are_for_float32_alone():
    with refuses("tl.exp is for float32 and float64, not torch.float16: cast"):
        of(lambda: tl.exp(block(1, 2, dtype=tl.float16)))
    assert lanes(lambda: tl.exp2(block(1, 3, dtype=tl.float32))).tolist() == [2, 8]
    assert tl.math.exp is tl.exp


def test_shapes_are_changed_in_row_major_order():
    def table():
        return tl.reshape(tl.arange(0, 8), (4, 2))

    assert lanes(table).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lanes(lambda: tl.trans(table())).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert of(lambda: tl.expand_dims(table(), -1)).shape == (4, 2, 1)
    assert lanes(lambda: tl.broadcast_to(tl.arange(0, 2), (4, 2))).tolist() == [[0, 1]] * 4
    with refuses("invalid for input of size 8"):
        of(lambda: tl.reshape(tl.arange(0, 8), (4, 4)))
    with refuses(r"broadcast.* \(4, 2\).* \[1, 8\]"):
        of(lambda: tl.broadcast_to(tl.arange(0, 8), (4, 2)))


@pytest.mark.parametrize(
    "block",
    [lambda: tl.arange(0, 6), lambda: tl.zeros((3, 4), tl.float32), lambda: tl.arange(2, 2)],
)
def test_the_sizes_of_a_block_are_powers_of_two(block):
    with refuses(r"must be powers of two, got \d"):
        of(block)


def test_the_shape_of_a_block_is_known_when_the_kernel_is_compiled():
    @tlsim.jit
    def kernel(n):
        tl.arange(0, n)

    @tlsim.jit
    def named(BLOCK: tl.constexpr):
        half = BLOCK // 2
        tl.zeros((half,), tl.float32)

    with refuses("tl.constexpr"):
        kernel[(1,)](8)
    with refuses("tl.constexpr"):
        named[(1,)](8)
    with refuses("tl.constexpr"):
        of(lambda: list(tl.static_range(tl.program_id(0))))


# ---- pointers, loads and stores


def test_a_pointer_is_moved_by_integers_alone():
    @tlsim.jit
    def kernel(f: tl.constexpr, x_ptr):
        f(x_ptr)

    x = torch.zeros(4)
    for wrong in (
        lambda p: p + 0.5,
        lambda p: p * 2,
        lambda p: p + p,
        lambda p: p - p,
        lambda p: -p,
        lambda p: p > 0,
        lambda p: p.to(tl.int64),
    ):
        with refuses(r"a pointer into x_ptr allows only \+ and - of integers"):
            kernel[(1,)](wrong, x)
    with refuses("tl.load needs pointers, got torch.int32"):
        kernel[(1,)](lambda p: tl.load(tl.arange(0, 4)), x)
    kernel[(1,)](lambda p: tl.load(1 + (p + 4) - tl.arange(2, 4)), x)
    seen = []
    kernel[(1,)](lambda p: seen.append(p.dtype.element_ty), x)
    assert seen == [tl.float32]


def test_offsets_overflow_in_int32_as_on_a_gpu_and_the_sanitizer_sees_it():
    @tlsim.jit
    def kernel(x_ptr, slot, stride):
        tl.load(x_ptr + slot * stride)
        tl.load(x_ptr + slot.to(tl.int64) * stride)

    with refuses(r"loads outside x_ptr\[-2147483648\]"):
        kernel[(1,)](torch.zeros(4), 2**21, 1024)
    with refuses(r"loads outside x_ptr\[2147483648\]"):
        fixed = tlsim.jit(_widened_first)
        fixed[(1,)](torch.zeros(4), 2**21, 1024)


def _widened_first(x_ptr, slot, stride):
    tl.load(x_ptr + slot.to(tl.int64) * stride)


def test_masks_keep_lanes_out_and_other_takes_their_place():
    @tlsim.jit
    def kernel(x_ptr, out_ptr, n, other: tl.constexpr):
        at = tl.arange(0, 8)
        tl.store(out_ptr + at, tl.load(x_ptr + at, at < n, other))

    def run(dtype, **options):
        out = torch.zeros(8, dtype=dtype)
        kernel[(1,)](torch.arange(1, 6, dtype=dtype), out, 5, **options)
        return out.tolist()

    assert run(torch.float32, other=-1.0) == [1, 2, 3, 4, 5, -1, -1, -1]
    assert run(torch.int32, other=None) == [1, 2, 3, 4, 5, 0, 0, 0]
    assert run(torch.float32, other=None)[5:] != run(torch.float32, other=None)[5:], "NaN"


def test_masks_are_int1_and_have_to_broadcast():
    x = torch.zeros(8)

    @tlsim.jit
    def kernel(f: tl.constexpr, x_ptr):
        f(x_ptr + tl.arange(0, 8))

    with refuses(r"broadcast.* \(8,\).* \[4\]"):
        kernel[(1,)](lambda p: tl.load(p, mask=tl.arange(0, 4) > 0), x)
    with refuses(r"a block of shape \[8, 8\] does not broadcast to \[8\]"):
        kernel[(1,)](lambda p: tl.store(p, tl.zeros((8, 8), tl.float32)), x)
    with refuses("a mask must be int1, got torch.int32"):
        kernel[(1,)](lambda p: tl.load(p, mask=tl.arange(0, 8)), x)
    with refuses("takes `other` only with a mask"):
        kernel[(1,)](lambda p: tl.load(p, other=0.0), x)
    kernel[(1,)](lambda p: tl.store(p, 1.0, mask=False), x)
    assert x.sum() == 0


def test_a_store_casts_to_the_dtype_of_the_buffer():
    @tlsim.jit
    def kernel(out_ptr):
        tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) * 0.75)

    for dtype, expected in ((torch.int32, [0, 0, 1, 2]), (torch.float16, [0, 0.75, 1.5, 2.25])):
        out = torch.zeros(4, dtype=dtype)
        kernel[(1,)](out)
        assert out.tolist() == expected


def test_atomic_add_adds_up_lanes_and_programs():
    @tlsim.jit
    def histogram(x_ptr, out_ptr, BLOCK: tl.constexpr):
        x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
        tl.atomic_add(out_ptr + x, 1, mask=x > 0)

    x, out = torch.tensor([0, 1, 1, 3, 3, 3, 1, 0]), torch.zeros(4, dtype=torch.int32)
    histogram[(2,)](x, out, 4)
    assert out.tolist() == [0, 3, 0, 3]


def test_tensors_need_not_be_contiguous():
    @tlsim.jit
    def transposed(x_ptr, out_ptr, rows, columns, N: tl.constexpr):
        i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        tl.store(out_ptr + i * N + j, tl.load(x_ptr + i * rows + j * columns))

    whole = torch.arange(64.0).reshape(8, 8)
    for x in (whole[::2, 4:], whole.T[4:, 1:5], whole[:4, :4], whole[0, :4].expand(4, 4)):
        out = torch.zeros(4, 4)
        transposed[(1,)](x, out, *x.stride(), 4)
        assert torch.equal(out, x)
    with refuses(r"loads outside x_ptr\[28\] of 28 elements"):
        transposed[(1,)](whole[:4, :4], torch.zeros(4, 4), 8, 4, 4)


def test_an_empty_tensor_may_be_passed_and_not_read():
    copy[(1,)](torch.zeros(0), torch.zeros(0), 0, BLOCK=4)
    with refuses(r"loads outside x_ptr\[0\] of 0 elements"):
        copy[(1,)](torch.zeros(0), torch.zeros(4), 4, BLOCK=4)


def test_wherever_lanes_that_take_no_part_point():
    @tlsim.jit
    def kernel(x_ptr, out_ptr):
        at = tl.arange(0, 4)
        away = tl.where(at < 2, at, 1000000000)
        tl.store(out_ptr + away, tl.load(x_ptr + away, at < 2, 0.0), at < 2)
        tl.store(out_ptr + at + 4, tl.load(x_ptr + at - 2, at >= 2, 7.0))

    out = torch.zeros(8)
    kernel[(1,)](torch.tensor([1.0, 2.0]), out)
    assert out.tolist() == [1, 2, 0, 0, 7, 7, 1, 2]


# ---- the sanitizer


def test_an_access_outside_says_line_program_lane_argument_and_offset():
    @tlsim.jit
    def kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
        row, column = tl.program_id(0), tl.program_id(1)
        at = row * 8 + column * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at)  # the load
        tl.store(out_ptr + at, x)  # the store

    where = f"test_tlsim.py, line {line_of(kernel, '# the load')}, program \\(1, 1\\), lane \\[2\\]"
    with refuses(where + r": loads outside x_ptr\[14\] of 14 elements\n    x = tl.load"):
        kernel[(2, 2)](torch.zeros(14), torch.zeros(16), BLOCK=4)
    where = f"line {line_of(kernel, '# the store')}, program \\(0, 1\\), lane \\[3\\]"
    with refuses(where + r": stores outside out_ptr\[7\] of 7 elements"):
        kernel[(2, 2)](torch.zeros(16), torch.zeros(7), BLOCK=4)
    with refuses(r"program \(1, 1, 0\)"):
        kernel[(2, 2, 2)](torch.zeros(14), torch.zeros(16), BLOCK=4)


@pytest.mark.parametrize("options", [{}, {"wave": 1}, {"wave": 2}, {"order": "serial"}])
def test_two_programs_may_not_store_to_one_address(options):
    @tlsim.jit
    def kernel(out_ptr):
        tl.store(out_ptr + tl.program_id(0) * 3 + tl.arange(0, 4), 1.0)

    with refuses(r"stores where another program has stored, out_ptr\["), tlsim.options(**options):
        kernel[(3,)](torch.zeros(16))
    with tlsim.options(checks=False, **options):
        kernel[(3,)](torch.zeros(16))


def test_one_program_may_store_to_an_address_twice():
    @tlsim.jit
    def kernel(out_ptr):
        for i in range(2):
            tl.store(out_ptr + tl.program_id(0) * 4 + tl.arange(0, 4), i)

    out = torch.zeros(8)
    kernel[(2,)](out)
    assert out.tolist() == [1] * 8


@pytest.mark.parametrize("options", [{}, {"wave": 1}, {"order": "serial"}])
def test_a_program_may_not_load_what_another_one_stores(options):
    @tlsim.jit
    def shift(x_ptr, out_ptr, by):
        row = tl.program_id(0)
        tl.store(out_ptr + row, tl.load(x_ptr + row + by))

    x = torch.arange(8.0)
    with tlsim.options(**options):
        shift[(4,)](x, x, 0)
        shift[(4,)](x, x[4:], 0)
        with refuses(r"(stores where another program loads|loads what another program has stored)"):
            shift[(4,)](x, x, 1)

    @tlsim.jit
    def sums(x_ptr, out_ptr):
        row = tl.program_id(0)
        tl.store(out_ptr + row, row)
        tl.store(x_ptr + row, tl.load(out_ptr) + tl.load(out_ptr + 1))

    with refuses(r"loads what another program has stored, x_ptr\[|out_ptr\["):
        sums[(2,)](torch.zeros(2), torch.zeros(2))


def test_two_lanes_of_a_store_may_not_share_an_address():
    @tlsim.jit
    def kernel(out_ptr, n):
        lane = tl.arange(0, 8)
        tl.store(out_ptr + lane // 2, 1.0, mask=(lane % 2 == 0) | (lane < n))

    kernel[(1,)](torch.zeros(4), 0)
    with refuses(r"another lane of the same store has stored, out_ptr\[0"):
        kernel[(1,)](torch.zeros(4), 4)


def test_an_error_of_python_or_torch_names_the_line_of_the_kernel():
    @tlsim.jit
    def helper(x):
        return x.nothing  # here

    @tlsim.jit
    def attribute(x_ptr, n):
        if n > 1:
            helper(tl.load(x_ptr))

    @tlsim.jit
    def types(x_ptr):
        tl.load(x_ptr, nothing)  # noqa: F821

    @tlsim.jit
    def argument(x_ptr):
        helper()

    where = rf"test_tlsim.py, line {line_of(helper, '# here')}: AttributeError"
    with refuses(rf"{where}: tlsim has no tl.nothing: .*\n    return x.nothing"):
        attribute[(1,)](torch.zeros(2), 2)
    with refuses(rf"line {line_of(types, 'tl.load')}: NameError: name 'nothing'"):
        types[(1,)](torch.zeros(2))
    with refuses(rf"line {line_of(argument, 'helper()')}: TypeError: helper.. missing 1 required"):
        argument[(1,)](torch.zeros(2))


def test_arguments_of_two_lengths_at_one_address_share_what_was_stored():
    @tlsim.jit
    def kernel(short_ptr, long_ptr, start):
        tl.store(short_ptr + tl.program_id(0), 1.0)
        tl.store(long_ptr + start - tl.program_id(0), 2.0)

    memory = torch.zeros(8)
    kernel[(2,)](memory[:2], memory, 7)
    assert memory.tolist() == [1, 1, 0, 0, 0, 0, 2, 2]
    with refuses(r"stores where another program has stored, long_ptr\["):
        kernel[(2,)](memory[:2], memory, 1)


def test_arguments_of_two_element_sizes_at_one_address_count_for_themselves():
    @tlsim.jit
    def kernel(half_ptr, whole_ptr):
        tl.store(half_ptr + 2 + tl.program_id(0), 1)  # bytes 4 to 7
        tl.store(whole_ptr + 3 - tl.program_id(0), 2)  # bytes 8 to 15

    memory = torch.zeros(4, dtype=torch.int32)
    kernel[(2,)](memory.view(torch.int16), memory)
    assert memory.tolist() == [0, 1 + (1 << 16), 2, 2]


def test_poison_makes_reading_a_nan_an_error():
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    x[2] = torch.nan
    with tlsim.options(poison=True):
        copy[(2,)](x, torch.zeros(4), 2, BLOCK=2)
        with refuses(r"program \(1,\), lane \[0\]: loads a NaN, .* x_ptr\[2\] of 4"):
            copy[(2,)](x, torch.zeros(4), 4, BLOCK=2)
    copy[(2,)](x, torch.zeros(4), 4, BLOCK=2)


# ---- the trace


def test_a_trace_knows_lines_bytes_rows_and_programs():
    x, out = torch.arange(16, dtype=torch.float16), torch.zeros(16, dtype=torch.float16)
    with tlsim.trace() as trace:
        copy[(2,)](x, out, 12, BLOCK=8)
    load, store = trace.accesses
    assert (load.kind, load.name, load.itemsize) == ("load", "x_ptr", 2)
    assert (store.kind, store.name) == ("store", "out_ptr")
    assert load.line == line_of(copy, "tl.load")
    assert load.bytes == trace.bytes("load") == trace.bytes("store") == 12 * 2
    assert load.rows == 2
    assert load.coalesced
    offsets, live = load.of(1)
    assert offsets.tolist() == list(range(8, 16))
    assert live.tolist() == [True] * 4 + [False] * 4


def test_a_trace_counts_what_is_read_twice_once_where_asked_what_is_needed():
    @tlsim.jit
    def kernel(x_ptr, step):
        tl.load(x_ptr + tl.arange(0, 4) * step)

    with tlsim.trace() as trace:
        kernel[(3,)](torch.zeros(8), 2)
    assert not trace.accesses[0].coalesced
    assert trace.accesses[0].rows == 12
    assert trace.bytes("load") == 3 * 4 * 4
    assert trace.distinct_bytes("load", "x_ptr") == 4 * 4
    assert trace.distinct_bytes("store", "x_ptr") == 0
    with tlsim.trace() as nothing:
        pass
    kernel[(1,)](torch.zeros(8), 2)
    assert nothing.accesses == []


# ---- loops


@tlsim.jit
def sums(x_ptr, lengths_ptr, out_ptr, turns_ptr, stride, BLOCK: tl.constexpr):
    """The sum of each program's row; each row has its own length."""
    row = tl.program_id(0)
    n = tl.load(lengths_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    turns = 0
    x = x_ptr + row * stride
    for start in range(0, n, BLOCK):
        at = tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=start + at < n, other=0.0)
        x += BLOCK
        turns += 1
    tl.store(out_ptr + row, tl.sum(total))
    tl.store(turns_ptr + row, turns)


@pytest.mark.parametrize("order", ["lockstep", "serial"])
@pytest.mark.parametrize("wave", [1, 2, 1024])
def test_a_program_that_has_finished_its_loop_keeps_its_values(order, wave):
    lengths, x = torch.tensor([5, 0, 16, 1]), torch.arange(64.0).reshape(4, 16)
    out, turns = torch.full((4,), -1.0), torch.full((4,), -1)
    with tlsim.options(order=order, wave=wave):
        sums[(4,)](x, lengths, out, turns, 16, BLOCK=4)
    assert out.tolist() == [float(row[:n].sum()) for row, n in zip(x, lengths, strict=True)]
    assert turns.tolist() == [2, 0, 4, 1]


def test_finished_programs_store_and_are_checked_no_more():
    @tlsim.jit
    def kernel(out_ptr):
        row = tl.program_id(0)
        for i in range(row):
            tl.store(out_ptr + row * (row - 1) // 2 + i, row)
            tl.atomic_add(out_ptr + 6 + row, 1)

    out = torch.zeros(10, dtype=torch.int32)
    with tlsim.trace() as trace:
        kernel[(4,)](out)
    assert out.tolist() == [1, 2, 2, 3, 3, 3, 0, 1, 2, 3]
    assert trace.bytes("store") == 6 * 4


def test_loops_nest():
    @tlsim.jit
    def kernel(out_ptr):
        row = tl.program_id(0)
        total = 0
        for i in range(row):
            for j in range(i, row + 1):
                term = 10 * i
                total += term + j
        tl.store(out_ptr + row, total)

    out = torch.zeros(4, dtype=torch.int32)
    kernel[(4,)](out)
    assert out.tolist() == [
        sum(10 * i + j for i in range(row) for j in range(i, row + 1)) for row in range(4)
    ]


def test_a_program_that_has_finished_prolongs_no_loop_within():
    @tlsim.jit
    def kernel(inner_ptr, x_ptr):
        row = tl.program_id(0)
        for _ in range(row):
            for i in range(tl.load(inner_ptr + row)):
                tl.load(x_ptr + i)

    with tlsim.trace() as trace:
        kernel[(2,)](torch.tensor([9, 2]), torch.zeros(2))
    assert [access.name for access in trace.accesses] == ["inner_ptr", "x_ptr", "x_ptr"]
    assert trace.bytes("load") == 8 + 2 * 4


def test_what_a_loop_makes_ends_with_it():
    @tlsim.jit
    def kernel(out_ptr):
        for i in range(tl.program_id(0)):
            last = i
        tl.store(out_ptr + tl.program_id(0), last)

    with refuses(rf"line {line_of(kernel, ', last)')}: NameError: .*'last'"):
        kernel[(3,)](torch.zeros(4))


def test_what_a_loop_carries_keeps_its_type_and_shape():
    @tlsim.jit
    def type_changes(n):
        total = 0
        for _ in range(n):
            total += 0.5

    @tlsim.jit
    def shape_changes(n):
        total = 0.0
        for _ in range(n):
            total += tl.zeros((4,), tl.float32)

    with refuses(
        rf"line {line_of(type_changes, 'for _')}: total is \[\] torch.int32 before and \[\] torch.f"
    ):
        type_changes[(1,)](3)
    with refuses(r"total is \[\] torch.float32 before and \[4\] torch.float32 after"):
        shape_changes[(1,)](3)


def test_a_loop_over_static_range_is_unrolled_and_may_change_types():
    @tlsim.jit
    def kernel(out_ptr):
        total = tl.zeros((1,), tl.int32)
        for i in tl.static_range(1, 4):
            total = tl.sum(tl.zeros((2**i,), tl.int32) + 1) + total
        tl.store(out_ptr + tl.arange(0, 1), total)

    out = torch.zeros(1)
    kernel[(1,)](out)
    assert out.item() == 2 + 4 + 8


def test_bounds_of_a_loop():
    with refuses("integers, not blocks"):
        of(lambda: tl.range(tl.arange(0, 4)))
    with refuses("step of a loop must be above 0"):
        of(lambda: tl.range(4, 0, 0))
    with refuses("step of a loop must be above 0"):
        of(lambda: tl.range(4, 0, tl.program_id(0) - 1))
    assert of(lambda: tl.range(0, tl.program_id(0).to(tl.int64))).start.dtype == tl.int64
    tl_range = of(lambda: tl.range(8, num_stages=2))
    assert (tl_range.start.data.item(), tl_range.stop.data.item()) == (0, 8)

    @tlsim.jit
    def kernel(N: tl.constexpr):
        for _ in (1, 2, N):
            pass

    with refuses("a loop needs range or tl.static_range"):
        kernel[(1,)](3)


def test_an_uniform_while_works_and_one_that_depends_on_the_program_works_in_serial():
    @tlsim.jit
    def kernel(out_ptr, n, PER_PROGRAM: tl.constexpr):
        i = 0
        end = n + tl.program_id(0) if PER_PROGRAM else n
        while i < end:
            i += 2
        tl.store(out_ptr + tl.program_id(0), i)

    out = torch.zeros(2)
    kernel[(2,)](out, 3, False)
    assert out.tolist() == [4, 4]
    with refuses('depends on the program: use a mask, or tlsim.options\\(order="serial"\\)'):
        kernel[(2,)](out, 4, True)
    with tlsim.options(order="serial"):
        kernel[(2,)](out, 4, True)
    assert out.tolist() == [4, 6]


def test_an_if_that_depends_on_the_program_works_in_serial():
    @tlsim.jit
    def kernel(out_ptr):
        row = tl.program_id(0)
        if row == 1:
            return
        tl.store(out_ptr + row, 1)

    out = torch.zeros(3)
    with refuses("in lockstep all programs take one branch"):
        kernel[(3,)](out)
    with tlsim.options(order="serial"):
        kernel[(3,)](out)
    assert out.tolist() == [1, 0, 1]


def break_in_loop(n):
    for _ in range(n):
        break


def continue_in_loop(n):
    for _ in range(n):
        continue


def return_in_loop(n):
    while n > 0:
        return


def else_of_loop(n):
    for _ in range(n):
        pass
    else:
        n = 0


def lambdas(n):
    return (lambda: n)()


@pytest.mark.parametrize(
    "kernel", [break_in_loop, continue_in_loop, return_in_loop, else_of_loop, lambdas]
)
def test_what_triton_cannot_compile_is_refused_before_it_runs(kernel):
    with refuses(r"test_tlsim.py, line \d+: Triton has no "):
        tlsim.jit(kernel)


# ---- orders and waves


def test_serial_runs_in_an_order_that_is_shuffled_by_the_seed():
    @tlsim.jit
    def kernel(order: tl.constexpr):
        order.append(tl.program_id(0).data.item() + 2 * tl.program_id(1).data.item())

    def order(**options):
        seen = []
        with tlsim.options(order="serial", **options):
            kernel[(2, 3)](seen)
        return seen

    assert sorted(order()) == list(range(6))
    assert order(seed=1) == order(seed=1) != order(seed=2)


def test_serial_catches_a_kernel_that_needs_an_order():
    @tlsim.jit
    def running_sum(x_ptr):
        row = tl.program_id(0)
        tl.store(x_ptr + row + 1, tl.load(x_ptr + row) + tl.load(x_ptr + row + 1))

    def run(seed):
        x = torch.ones(9)
        with tlsim.options(order="serial", seed=seed, checks=False):
            running_sum[(8,)](x)
        return tuple(x.tolist())

    assert len({run(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("wave", [1, 2, 3, 5, 7, 1024])
def test_the_size_of_a_wave_changes_no_result(wave):
    @tlsim.jit
    def kernel(out_ptr):
        x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        wide, high = tl.num_programs(0), tl.num_programs(1)
        tl.store(out_ptr + x + wide * (y + high * z), 100 * x + 10 * y + z)

    out = torch.full((3 * 4 * 2,), -1)
    with tlsim.options(wave=wave):
        kernel[(3, 4, 2)](out)
    assert out.tolist() == [
        100 * x + 10 * y + z for z in range(2) for y in range(4) for x in range(3)
    ]


# ---- launching


def test_a_grid_is_one_to_three_sizes_or_a_function_of_the_arguments():
    x, out = torch.arange(6.0), torch.zeros(6)
    copy[lambda meta: (tlsim.cdiv(6, meta["BLOCK"]),)](x, out, 6, BLOCK=2)
    assert torch.equal(out, x)
    copy[3](x, out, 6, BLOCK=2)
    copy[(0,)](x, torch.zeros(0), 6, BLOCK=2)
    for grid in ((), (1, 1, 1, 1), (-1,), None, (1.5,), "3"):
        with pytest.raises(ValueError, match="copy: a grid must be one to three sizes, got"):
            copy[grid](x, out, 6, BLOCK=2)


def test_arguments_that_do_not_fit_are_refused_by_name():
    x = torch.zeros(4)
    with pytest.raises(TypeError, match=r"copy\(\) missing 2 required .* 'n' and 'BLOCK'"):
        copy[(1,)](x, x)
    with pytest.raises(TypeError, match=r"copy\(\) .*'BLOK'"):
        copy[(1,)](x, x, 4, 4, BLOK=4)
    with pytest.raises(TypeError, match="copy: n must not be a str"):
        copy[(1,)](x, x, "4", BLOCK=4)
    with refuses("launch a kernel with kernel\\[grid\\]"):
        copy(x, x, 4, 4)
    with refuses("works only inside a kernel"):
        tl.program_id(0)


def test_hints_to_a_compiler_are_taken_and_ignored():
    out = torch.zeros(4)
    copy[(1,)](torch.ones(4), out, 4, BLOCK=4, num_warps=8, num_stages=3)
    assert out.tolist() == [1] * 4


def test_an_argument_equal_to_1_is_a_constant_and_has_no_methods():
    @tlsim.jit
    def kernel(out_ptr, stride, flag):
        tl.store(out_ptr + tl.arange(0, 2) * stride, 1.0, mask=flag)
        tl.store(out_ptr, stride.to(tl.int64))

    kernel[(1,)](torch.zeros(4), 2, True)
    with refuses(r"equal to 1 is a constant in Triton, and has no .to"):
        kernel[(1,)](torch.zeros(4), 1, True)


def test_none_is_an_argument_that_is_left_out():
    @tlsim.jit
    def kernel(out_ptr, bias_ptr):
        total = 1.0
        if bias_ptr is not None:
            total += tl.load(bias_ptr)
        tl.store(out_ptr, total)

    out = torch.zeros(1)
    for bias, expected in ((None, 1), (torch.ones(1), 2)):
        kernel[(1,)](out, bias)
        assert out.item() == expected


SCALE = tl.constexpr(3)
PLAIN = 3


@tlsim.jit
def scaled(x, BY: tl.constexpr = 2):
    return x * BY * SCALE


def unmarked(x):
    return x


def test_a_kernel_sees_jitted_functions_and_constexpr_globals_and_no_other():
    @tlsim.jit
    def good(out_ptr):
        tl.store(out_ptr, scaled(tl.program_id(0) + 1, BY=5))

    @tlsim.jit
    def plain_global(out_ptr):
        tl.store(out_ptr, PLAIN)

    @tlsim.jit
    def plain_function(out_ptr):
        tl.store(out_ptr, unmarked(1))

    @tlsim.jit
    def python_function(out_ptr):
        tl.store(out_ptr, sorted(1))

    out = torch.zeros(1)
    good[(1,)](out)
    assert out.item() == 15
    with refuses("plain_global reads the global PLAIN, which is not wrapped in tl.constexpr"):
        plain_global[(1,)](out)
    with refuses("plain_function reads the global unmarked, which is not marked @triton.jit"):
        plain_function[(1,)](out)
    with refuses("NameError: name 'sorted' is not defined"):
        python_function[(1,)](out)


def test_a_kernel_may_be_a_closure_and_sees_names_as_they_are_when_launched():
    factor = tl.constexpr(2)

    @tlsim.jit
    def helper(x):
        return x + 1

    @tlsim.jit
    def kernel(out_ptr):
        tl.store(out_ptr, helper(factor))

    out = torch.zeros(1)
    kernel[(1,)](out)
    assert out.item() == 3

    @tlsim.jit
    def helper(x):  # noqa: F811  as a cell of a notebook that is run again
        return x * 10

    factor = tl.constexpr(4)
    kernel[(1,)](out)
    assert out.item() == 40


def test_the_language_may_have_any_name():
    from nanoserve.kernels.tlsim import language as t
    from nanoserve.kernels.tlsim.language import arange, float32
    from nanoserve.kernels.tlsim.language import store as put

    @tlsim.jit
    def kernel(out_ptr):
        put(out_ptr + arange(0, 2), t.full((2,), 7, float32))

    out = torch.zeros(2)
    kernel[(1,)](out)
    assert out.tolist() == [7, 7]


def test_python_s_min_max_and_range_mean_those_of_the_language():
    @tlsim.jit
    def kernel(out_ptr):
        at = tl.arange(0, 4)
        tl.store(out_ptr + at, min(max(at, 1), 2))

    out = torch.zeros(4)
    kernel[(1,)](out)
    assert out.tolist() == [1, 1, 2, 2]


def test_what_tlsim_does_not_speak_is_named():
    @tlsim.jit
    def kernel(x_ptr):
        tl.sort(tl.load(x_ptr + tl.arange(0, 4)))

    with refuses(r"tlsim has no tl\.sort"):
        kernel[(1,)](torch.zeros(4))


def test_a_kernel_has_a_source():
    namespace = {"tl": tl}
    exec("def kernel(x_ptr): pass", namespace)
    with pytest.raises(OSError, match="could not get source code"):
        tlsim.jit(namespace["kernel"])


def test_what_jit_has_made_a_kernel_of_stays_one():
    assert tlsim.jit(copy) is copy
    wrapped = types.SimpleNamespace(fn=copy.fn)  # as triton.jit and triton.autotune wrap
    out = torch.zeros(2)
    tlsim.jit(wrapped)[(1,)](torch.ones(2), out, 2, BLOCK=2)
    assert out.tolist() == [1, 1]
    assert (copy.__name__, tlsim.next_power_of_2(5), tlsim.cdiv(5, 2)) == ("copy", 8, 3)


def test_options_are_checked_and_end_with_their_block():
    with (
        pytest.raises(
            ValueError,
            match=r"order must be .*'random'",
        ),
        tlsim.options(order="random"),
    ):
        pass
    with pytest.raises(ValueError, match="wave at least 1"), tlsim.options(wave=0):
        pass
    with tlsim.options(checks=False), tlsim.options(seed=3) as options:
        assert (options.checks, options.seed) == (False, 3)


def test_gradients_are_no_concern_of_a_kernel():
    out = torch.zeros(2)
    copy[(1,)](torch.ones(2, requires_grad=True), out, 2, BLOCK=2)
    assert out.tolist() == [1, 1]
    assert not out.requires_grad
