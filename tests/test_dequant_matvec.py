"""The product with a weight in four bits: tlsim's result against the dequantised product."""

import pytest
import torch

from nanoserve.kernels import dequant_matvec as q4
from nanoserve.kernels import tlsim
from nanoserve.kernels.dequant_matvec import (
    FEW,
    MatvecLaunch,
    dequant_matvec,
    dequant_matvec_reference,
    launch_matvec,
    matvec_launch,
)
from nanoserve.kernels.dispatch import use_backend
from nanoserve.kernels.tlsim import language as tl

ROUGH = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def weight(num_out: int, width: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(numbers, scales, minimums) of a weight [num_out, width]: no group is like another."""
    drawn = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (num_out, width // 2), dtype=torch.uint8, generator=drawn)
    scales, minimums = torch.rand(2, num_out, width // 32, generator=drawn) * 0.02
    return numbers, scales.bfloat16(), (minimums - 0.1).bfloat16()


def rows(number: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(number)).to(dtype)


def close(got: torch.Tensor, x: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
    """Relative to the product of the absolute values: a result may be far smaller than those."""
    expected = dequant_matvec_reference(x, *parts)
    assert got.shape == expected.shape and got.dtype == x.dtype
    numbers, scales, minimums = parts
    size = dequant_matvec_reference(x.float().abs(), numbers, scales, minimums.abs())
    assert ((got.float() - expected.float()).abs() <= ROUGH[x.dtype] * size).all()


def test_the_oracle_is_the_sum_of_the_formula():
    x, parts = rows(2, 64), weight(3, 64)
    numbers, scales, minimums = parts
    values = torch.zeros(3, 64)
    for out in range(3):
        for i in range(64):
            byte = int(numbers[out, i // 2])
            number = byte >> 4 if i % 2 else byte & 15
            values[out, i] = number * scales[out, i // 32].float() + minimums[out, i // 32].float()
    torch.testing.assert_close(dequant_matvec_reference(x, *parts), x @ values.T)


@pytest.mark.parametrize("dtype", list(ROUGH))
@pytest.mark.parametrize("number", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(("num_out", "width"), [(17, 96), (40, 576), (1, 32), (5, 1024)])
def test_tlsim_gives_the_dequantised_product(num_out, width, number, dtype):
    x, parts = rows(number, width, dtype), weight(num_out, width)
    close(dequant_matvec(x, *parts), x, parts)


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("order", ["lockstep", "serial"])
def test_every_access_is_right_with_all_of_tlsims_checks(order, number):
    x, parts = rows(number, 160), weight(21, 160)
    launch = MatvecLaunch(4, 1, words=16 if number > 1 else 0)
    with tlsim.options(order=order):
        close(launch_matvec(q4._simulated_kernels(), x, *parts, launch), x, parts)


def test_few_programs_go_through_many_rows_of_the_weight():
    x, parts = rows(1, 96), weight(35, 96)
    launch = MatvecLaunch(4, 1, programs=1)
    close(launch_matvec(q4._simulated_kernels(), x, *parts, launch, 2), x, parts)


@pytest.mark.parametrize("number", [1, 4])
def test_x_may_have_any_strides(number):
    parts = weight(6, 64)
    every_second = rows(2 * number, 128)[::2, ::2]
    assert every_second.stride(1) == 2
    padded = rows(number, 100)[:, 3:67]
    for x in (every_second, padded, rows(64, number).T):
        close(dequant_matvec(x, *parts), x, parts)


def test_rows_of_a_larger_weight_are_read_in_place():
    numbers, scales, minimums = weight(12, 64)
    x, part = rows(1, 64), slice(5, 9)
    parts = (numbers[part], scales[part], minimums[part])
    close(dequant_matvec(x, *parts), x, parts)


@pytest.mark.parametrize("size", [1e-15, 1e-8, 1.0, 1e8])
def test_subnormal_numbers_keep_every_digit(size):
    x, parts = rows(1, 256) * size, weight(8, 256)
    close(dequant_matvec(x, *parts), x, parts)


def test_the_backend_is_that_of_select_backend():
    x, parts = rows(1, 32), weight(3, 32)
    with use_backend("reference"):
        assert torch.equal(dequant_matvec(x, *parts), dequant_matvec_reference(x, *parts))
    with use_backend("triton"), pytest.raises(ValueError, match="triton"):
        dequant_matvec(x, *parts)


def wrong_arguments():
    x, (numbers, scales, minimums) = rows(2, 64), weight(6, 64)
    yield "x must be .rows, in.", (rows(17, 64), numbers, scales, minimums)
    yield "x must be .rows, in.", (x[0], numbers, scales, minimums)
    yield "x must be float32", (x.double(), numbers, scales, minimums)
    yield "x's `in`", (rows(2, 48), numbers, scales, minimums)
    yield "numbers must be uint8", (x, numbers.int(), scales, minimums)
    yield "numbers must be uint8", (x, numbers[:, :16], scales, minimums)
    yield "scales must be bfloat16", (x, numbers, scales.float(), minimums)
    yield "minimums must be bfloat16", (x, numbers, scales, minimums[:5])
    yield "numbers must be contiguous", (x, weight(12, 64)[0][::2], scales, minimums)
    yield "scales must be contiguous", (x, numbers, scales.T.contiguous().T, minimums)
    yield "minimums is on meta", (x, numbers, scales, minimums.to("meta"))
    shifted = torch.zeros(6 * 32 + 1, dtype=torch.uint8)[1:].view(6, 32)
    yield "numbers must begin", (x, shifted, scales, minimums)


@pytest.mark.parametrize(("message", "arguments"), list(wrong_arguments()))
def test_an_error_names_the_argument(message, arguments):
    with pytest.raises(ValueError, match=message):
        dequant_matvec(*arguments)


@pytest.mark.parametrize("number", [1, 2, 16])
@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (12, 0)])
def test_every_gpu_has_launch_parameters(capability, number):
    for width in (32, 2_048, 8_192, 16_384, 28_672):
        launch = matvec_launch(number, width, capability)
        assert launch.num_warps <= 32 and bool(launch.words) == (number > FEW)


def test_a_bitcast_keeps_the_bits_and_refuses_another_size():
    @tlsim.jit
    def cast(x_ptr, out_ptr, DTYPE: tl.constexpr):
        i = tl.arange(0, 4)
        tl.store(out_ptr + i, tl.load(x_ptr + i).to(DTYPE, bitcast=True))

    x, out = torch.tensor([1, 0, 16, 0x3F800000], dtype=torch.int32), torch.zeros(4)
    cast[(1,)](x, out, DTYPE=torch.float32)
    assert torch.equal(out, torch.tensor([2.0**-149, 0, 2.0**-145, 1.0]))
    with pytest.raises(tlsim.KernelError, match="bitcast"):
        cast[(1,)](x, out, DTYPE=torch.float16)
