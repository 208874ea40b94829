"""The paged attention kernel under Triton: interpreted on the CPU, or compiled on a GPU."""

import os

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from nanoserve.kernels.dispatch import launch, paged_attention_triton
from nanoserve.kernels.paged_attention import paged_attention_kernel
from nanoserve.kernels.reference import paged_attention_reference, tolerance
from tests.attention_cases import (
    ALL,
    SMALL,
    AttentionCase,
    assert_expected,
    call_laid_out,
    compact,
    tensors,
    with_out_laid_out,
)
from tests.interpreted.runtimes import drawn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
CASES = SMALL if INTERPRETED else SMALL | ALL


def of(cases: dict[str, AttentionCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def test_the_runtime_is_the_one_of_this_process():
    assert type(paged_attention_kernel) is (InterpretedFunction if INTERPRETED else JITFunction)


@of(CASES)
def test_the_kernel(case):
    assert_expected(launch(paged_attention_kernel, *tensors(case, DEVICE), tile=case.tile), case)


@of({name: case for name, case in CASES.items() if case.query_len == 1})
def test_the_shipped_kernel(case):
    """Triton's interpreter multiplies blocks of bfloat16 wrongly: there they are float32 first."""
    q, k_pool, v_pool, *rest = tensors(case, DEVICE)
    if INTERPRETED and case.dtype == torch.bfloat16:
        q, k_pool, v_pool = q.float(), k_pool.float(), v_pool.float()
    out = paged_attention_triton(q, k_pool, v_pool, *rest)
    assert_expected(out.to(case.dtype), case)


@of({name: case for name, case in SMALL.items() if case.dtype != torch.float32})
def test_half_precision_is_rounded_once_when_it_is_stored(case):
    """All earlier values are float32. The interpreter truncates to bfloat16; a GPU rounds."""
    q, k_pool, v_pool, *rest = tensors(case, DEVICE)
    wide = (x.float() for x in (q, k_pool, v_pool))
    exact = launch(paged_attention_kernel, *wide, *rest, tile=case.tile)
    out = launch(paged_attention_kernel, q, k_pool, v_pool, *rest, tile=case.tile)
    unit = 1.01 * torch.finfo(case.dtype).eps * exact.abs() + 1e-7
    cut = INTERPRETED and case.dtype == torch.bfloat16
    assert ((out - exact).abs() <= (unit if cut else unit / 2)).all()


@of({name: case for name, case in CASES.items() if "all at" in name})
def test_the_content_of_other_slots_changes_no_bit(case):
    outs = [
        launch(paged_attention_kernel, *tensors(case, DEVICE, empty=empty), tile=case.tile)
        for empty in (torch.nan, 0.0)
    ]
    assert torch.equal(*outs)


@drawn(examples=12)
def test_any_layout_gives_what_contiguous_copies_give(random):
    """Views are drawn on the CPU; on a GPU they are copied there with their strides."""
    given = call_laid_out(random)
    expected = paged_attention_reference(*compact(given))
    atol, rtol = tolerance(torch.float32)
    args = tuple(on_device(x) if isinstance(x, torch.Tensor) else x for x in given)
    outs = [paged_attention_triton(*args)]
    if INTERPRETED:
        outs.append(with_out_laid_out(paged_attention_kernel, random, args))
    for out in outs:
        torch.testing.assert_close(out.cpu(), expected, atol=atol, rtol=rtol)


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The view x on DEVICE, with the same strides and offset into a copy of its memory."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(DEVICE)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())
