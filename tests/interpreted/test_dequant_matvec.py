"""The product with a weight in four bits by Triton: its interpreter, or compiled on a GPU."""

import pytest
import torch

from nanoserve.kernels.dequant_matvec import (
    MatvecLaunch,
    _compiled_kernels,
    dequant_matvec_triton,
    launch_matvec,
)
from nanoserve.kernels.dispatch import _gpu
from tests.interpreted.runtimes import DEVICE, INTERPRETED
from tests.test_dequant_matvec import close, rows, weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(number: int, num_out: int, width: int, dtype: torch.dtype, run=dequant_matvec_triton):
    """The interpreter multiplies blocks of bfloat16 wrongly: several rows are float32 there."""
    if INTERPRETED and dtype == torch.bfloat16 and number > 1:
        dtype = torch.float32
    x, parts = rows(number, width, dtype), weight(num_out, width)
    got = run(x.to(DEVICE), *(part.to(DEVICE) for part in parts))
    close(got.cpu(), x, parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 2, 5, 16])
@pytest.mark.parametrize(("num_out", "width"), [(17, 96), (33, 576)])
def test_triton_gives_the_dequantised_product(num_out, width, number, dtype):
    check(number, num_out, width, dtype)


def test_few_programs_go_through_many_rows_of_the_weight():
    def run(*arguments):
        launch = MatvecLaunch(4, 1, programs=1)
        return launch_matvec(_compiled_kernels(), *arguments, launch, multiprocessors=2)

    check(1, 35, 96, torch.float16, run)


@pytest.mark.skipif(INTERPRETED, reason="a large product: on a GPU only")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 3, 16])
@pytest.mark.parametrize(("num_out", "width"), [(2048, 2048), (2048, 8192), (1000, 28_672)])
def test_large_products_on_a_gpu(num_out, width, number, dtype):
    if dtype == torch.bfloat16 and _gpu(torch.device(DEVICE))[0] < (8, 0):
        pytest.skip("this GPU has no bfloat16")
    check(number, num_out, width, dtype)
